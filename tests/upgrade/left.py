"""What an earlier release left behind (``leave_behind.py``), opened with today's code."""

from __future__ import annotations

import tarfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.integration.tracker_logs import read_topic
from tests.upgrade.leave_behind import PLACE, STATE_NOTE

from kafkamq import Queue, Service
from kafkamq.config import ServiceConfig
from kafkamq.dev import LocalKafka
from kafkamq.queue.dead_letters import Selection, read_dead_letters, redrive
from kafkamq.testing import Verdict, check_logs, record_of

__all__ = ["judged", "left_behind", "take_over"]

VECTORS = Path(__file__).parents[1] / "vectors"
KEPT = {
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "1",
    # However long ago it was left, nothing of it has been deleted.
    "log.initial.task.delay.ms": str(86_400_000),
    "offsets.retention.minutes": str(2**31 - 1),
}

OPEN = Counter(
    {
        **{(f"nacked-{number}", 2): 1 for number in range(2)},  # its delay is over
        **{(f"held-{number}", 2): 1 for number in range(2)},  # by a worker that was killed
        **{(f"large-{number}", 2): 1 for number in range(2)},  # the same, STARTed by reference
        **{(f"delayed-{number}", 1): 1 for number in range(2)},
        ("fresh-0", 1): 1,
    }
)
"""Of ``orders``: (id, delivery count) of what is still to come, and how often.

Not "acked", "again" (acked at its second delivery), "late-ack" (acked when no tracker ran),
"cancelled", nor "rejected", which is in the dead letters twice: redriven, and rejected once more.
"""


@contextmanager
def left_behind(folder: Path, name: str = "left-behind") -> Iterator[LocalKafka]:
    """The broker of then, on a copy of its data."""
    with tarfile.open(VECTORS / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    note = folder / STATE_NOTE
    if note.exists():
        note.write_text(note.read_text().replace(PLACE, str(folder)))
    with LocalKafka(data_dir=folder / "kafka", properties=KEPT) as kafka:
        yield kafka


def take_over(service: Service) -> None:
    """With a tracker of today: what is open comes, once; nothing else does; and it is redriven.

    The logs are judged by a checker that asks nobody: what comes beyond what is expected here is
    a copy that they do not explain, or a message that is not settled.
    """
    payments = service.queue("payments", exactly_once=True)
    assert received(service.queue("orders"), OPEN.total()) == OPEN
    held = Counter({("held-0", 2): 1, ("held-1", 2): 1})
    assert received(payments, held.total()) == held
    config = service.config
    letters = list(read_dead_letters(config))
    assert [(each.id, each.reason, each.is_redriven) for each in letters] == [
        ("rejected-0", "rejected", True),
        ("rejected-0", "rejected", False),
    ]
    assert redrive(config, Selection()).redriven == 1
    assert received(service.queue("orders"), 1) == Counter({("rejected-0", 1): 1})
    judged(config)


def judged(config: ServiceConfig) -> Verdict:
    """What a checker that asks nobody says of the logs: nothing that is wrong."""
    topics = config.message_topic, config.marker_topic, config.dead_letter_topic
    messages, markers, dead_letters = (
        map(record_of, read_topic(config.bootstrap_servers, topic)) for topic in topics
    )
    verdict = check_logs(messages=messages, markers=markers, dead_letters=dead_letters)
    verdict.require_ok()
    return verdict


def received(queue: Queue, count: int) -> Counter[tuple[str, int]]:
    """So many, acked: (id, delivery count), and how often."""
    seen: Counter[tuple[str, int]] = Counter()
    with queue.consumer() as consumer:
        while seen.total() < count:
            message = consumer.receive(timeout=240)  # of Spark, the first batch
            assert message is not None, f"only {seen}"
            fate, number = message.id.split("-")[0], message.id[-1:].encode()
            assert message.payload is not None
            assert message.payload == fate.encode().ljust(70_000 if fate == "large" else 0)
            assert message.headers["n"] == number
            message.ack(wait=True)
            seen[message.id, message.delivery_count] += 1
    return seen
