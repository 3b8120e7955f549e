"""Pictures of the pages for docs/web.md, of queues that run for a while on a broker of their own.

Run: make screenshots
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kafkamq import Service
from kafkamq.dev import LocalKafka
from kafkamq.markers.tracker.local import LocalTracker
from kafkamq.web.app import serving
from kafkamq.web.index.follower import IndexOptions
from kafkamq.web.options import WebOptions

CHROMIUM = "/usr/bin/chromium"
FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images"
MAX_BYTES = 150_000
QUEUES = ("orders", "invoices", "mails", "thumbnails", "exports")
ERRORS = (
    "ValueError: no article {0}",
    "TimeoutError: the bank did not answer in {0} ms",
    "KeyError: 'address' of customer {0}",
)


def send(service: Service, chance: random.Random, stopping: threading.Event) -> None:
    """Send messages, some of them for later."""
    producers = {name: service.queue(name).producer() for name in QUEUES}
    number = 0
    while not stopping.wait(0.02):
        name = chance.choice(QUEUES)
        delay = chance.uniform(60, 3600) if chance.random() < 0.03 else 0.0
        payload = b'{"article": %d, "count": %d}' % (number, chance.randrange(1, 9))
        producers[name].send(
            payload, key=f"customer-{number % 97}", id=f"{name}-{number:05}", delay=delay,
            headers={"shop": chance.choice((b"vienna", b"graz"))},
        )  # fmt: skip
        number += 1


def work(service: Service, name: str, chance: random.Random, stopping: threading.Event) -> None:
    """Work messages of a queue off: most succeed, some fail, some are held for long."""
    held: list[Any] = []
    with service.queue(name, redelivery_timeout=120.0, max_deliveries=3).consumer() as worker:
        while not stopping.is_set():
            message = worker.receive(0.2)
            if message is None:
                continue
            which = chance.random()
            if which < 0.03:
                message.reject(chance.choice(ERRORS).format(chance.randrange(1000, 9999)))
            elif which < 0.06:
                message.nack(delay=chance.uniform(1, 90), reason="busy")
            elif which < 0.08 and len(held) < 12:
                held.append(message)
            else:
                message.ack()


@contextmanager
def shop() -> Iterator[Service]:
    """Queues with senders, workers and a tracker, all for real."""
    stopping, chance = threading.Event(), random.Random(7)
    with ExitStack() as stack:
        kafka = stack.enter_context(LocalKafka())
        service = stack.enter_context(Service(kafka.bootstrap_servers, "shop"))
        service.create_topics(partitions=3, marker_partitions=2)
        stack.enter_context(LocalTracker(service.config).in_thread())
        threads = [threading.Thread(target=send, args=(service, chance, stopping))]
        threads += [  # nobody works for the last one
            threading.Thread(target=work, args=(service, name, chance, stopping))
            for name in QUEUES[:-1]
        ]
        for thread in threads:
            thread.start()
        try:
            yield service
        finally:
            stopping.set()
            for thread in threads:
                thread.join()


def take(page: Any, name: str) -> None:
    path = FOLDER / f"web-{name}.png"
    page.screenshot(path=path)
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise SystemExit(f"{path} has {size:,} bytes: more than {MAX_BYTES:,}")
    print(f"{path}: {size:,} bytes")


def pictures(page: Any, address: str) -> None:
    """Each page as people come to it."""
    page.goto(address)
    take(page, "queues")
    page.goto(f"{address}queue?name=orders")
    take(page, "queue")
    page.goto(f"{address}dead-letters?queue=orders")
    take(page, "dead-letters")
    page.locator("td a[href^='/message/2/']").first.click()
    page.get_by_role("link", name="json").click()
    page.locator("pre").wait_for()
    page.evaluate("scrollTo(0, 0)")  # from the payload, where the link leads
    take(page, "message")
    for query, rate in (("queue=mails", "0"), ("queue=orders&text=article", "0.2")):
        page.goto(f"{address}redrive?{query}")
        page.get_by_label("name").fill("the catalogue is complete again")
        page.get_by_label("per second").fill(rate)
        page.get_by_role("button", name="Redrive them").click()
        page.get_by_role("heading", name="Jobs").wait_for()
    page.get_by_text("done", exact=True).nth(1).wait_for(timeout=60_000)
    take(page, "jobs")
    page.set_viewport_size({"width": 400, "height": 720})
    page.emulate_media(color_scheme="dark")
    page.goto(address)
    take(page, "narrow")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=240.0, help="how long the queues run")
    seconds = parser.parse_args().seconds
    from playwright.sync_api import sync_playwright

    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, shop() as service, sync_playwright() as browsers:
        options = IndexOptions(path=Path(folder) / "index")
        with serving(service.config, WebOptions(port=0), options) as address:
            time.sleep(seconds)
            chromium = browsers.chromium.launch(
                executable_path=CHROMIUM, args=["--no-sandbox", "--disable-background-networking"]
            )
            pictures(chromium.new_page(viewport={"width": 1280, "height": 760}), address)
            chromium.close()


if __name__ == "__main__":
    main()
