"""A job of the pages goes on whatever is killed: each dead letter once, none without its record."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from tests.integration.cli_tools import Commands
from tests.integration.parallel_tools import topic_settings
from tests.integration.queue_logs import make_service
from tests.integration.test_cli_redrive import Letters
from tests.integration.test_web_actions import redrive_through_kills, replay_through_kills
from tests.integration.web_client import WebClient
from tests.waiting import wait_until, within

from kafkamq import Service
from kafkamq.dev import LocalKafka, cache_dir_from, java_from
from kafkamq.queue.dead_letters import read_dead_letters
from kafkamq.web.app import serving
from kafkamq.web.index.follower import IndexOptions
from kafkamq.web.options import WebOptions

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]

COUNT = int(os.environ.get("KAFKAMQ_WEB_LETTERS", "100000"))
KILLS = 5
BROKER_KILLS = (1, 3)


def test_a_job_goes_on_behind_kills_of_its_process_and_of_the_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One dead letter among them fits no more: it is named, and the others go."""
    monkeypatch.chdir(tmp_path)
    killed = []
    with LocalKafka(cache_dir=cache_dir_from(os.environ), java=java_from(os.environ)) as kafka:
        bootstrap = kafka.bootstrap_servers
        commands = Commands(bootstrap, "shop")
        with Service(bootstrap, "shop") as service:
            service.create_topics(partitions=2, marker_partitions=1)
        letters = Letters(commands)
        letters.write("large", payload=os.urandom(500_000))
        (large,) = read_dead_letters(letters.config)
        topic_settings(bootstrap, letters.config.message_topic, max_message_bytes="200000")

        def before_kill(number: int) -> None:
            if number in BROKER_KILLS:
                kafka.kill()
                kafka.start()
                killed.append(number)

        job = redrive_through_kills(
            commands, letters, COUNT, KILLS, before_kill=before_kill, refused=1
        )
        assert killed == [*BROKER_KILLS]
        (refusal,) = job["refusals"]
        place = f"{letters.config.dead_letter_topic}[{large.partition}]@{large.offset}: "
        assert refusal.startswith(place)
        assert "max.message.bytes" in refusal


def test_a_replay_goes_on_behind_kills_of_its_process_and_of_the_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with LocalKafka(cache_dir=cache_dir_from(os.environ), java=java_from(os.environ)) as kafka:
        bootstrap = kafka.bootstrap_servers
        commands = Commands(bootstrap, "shop")
        with Service(bootstrap, "shop") as service:
            service.create_topics(partitions=2, marker_partitions=1)

        def before_kill(number: int) -> None:
            if number == 1:
                kafka.kill()
                kafka.start()

        replay_through_kills(
            commands, service.config, COUNT // 5, KILLS - 2, before_kill=before_kill
        )


def test_pages_outlive_a_broker_and_a_topic(tmp_path: Path) -> None:
    with (
        LocalKafka(cache_dir=cache_dir_from(os.environ), java=java_from(os.environ)) as kafka,
        make_service(kafka.bootstrap_servers, "shop", partitions=1) as service,
    ):
        config = service.config
        index = IndexOptions(path=tmp_path / "index")

        def send(count: int) -> None:
            with make_service(config.bootstrap_servers, "shop", partitions=1) as sender:
                producer = sender.queue("orders").producer()
                for _ in range(count):
                    producer.send(b"x").result(within(60))

        with serving(config, WebOptions(port=0), index) as address:
            web = WebClient(address, timeout_s=120.0)

            def messages() -> list[int]:
                return [queue["messages"] for queue in web.get("queues")["queues"]]

            send(3)
            wait_until(lambda: messages() == [3])
            kafka.kill()
            wait_until(lambda: web.get("state")["error"], "the page says so", 120.0)
            assert messages() == [3], "what is known stays"
            kafka.start()
            send(2)
            wait_until(lambda: messages() == [5], timeout_s=120.0)
            assert web.get("state")["error"] == ""
            admin = AdminClient({"bootstrap.servers": config.bootstrap_servers})
            for future in admin.delete_topics([config.message_topic]).values():
                future.result(within(60))
            wait_until(lambda: config.message_topic not in admin.list_topics(timeout=20).topics)
            send(1)
            wait_until(lambda: messages() == [1], "the index is another topic's", 120.0)
