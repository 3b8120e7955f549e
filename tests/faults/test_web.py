"""A job of the pages goes on whatever is killed: each dead letter once, none without its record."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.integration.cli_tools import Commands
from tests.integration.parallel_tools import topic_settings
from tests.integration.test_cli_redrive import Letters
from tests.integration.test_web_actions import redrive_through_kills

from kafkamq import Service
from kafkamq.dev import LocalKafka, cache_dir_from, java_from
from kafkamq.queue.dead_letters import read_dead_letters

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
