"""What the log says when a handler fails: which message, which delivery, what happens next."""

from __future__ import annotations

import logging
import re

import pytest
from tests.waiting import wait_until

from kafkamq import Backoff, Reject, Worker
from kafkamq.testing import MemoryService

PLACE = r"message job-7 at \d+/\d+ of queue orders, delivery {} of 2,"


def lines_of(handler: object, caplog: pytest.LogCaptureFixture, wanted: int) -> list[str]:
    service = MemoryService()
    queue = service.queue(
        "orders", max_deliveries=2, backoff=Backoff(first=0.1, max=0.1, jitter=0.0)
    )
    queue.handler()(handler)
    queue.producer().send(b"secret", id="job-7")
    logger = "kafkamq.runtime.messages"
    with caplog.at_level(logging.INFO, logger=logger), Worker(service):
        wait_until(lambda: service.dead_letters("orders"), "a dead letter")
    lines = [record.getMessage() for record in caplog.records if record.name == logger]
    assert len(lines) == wanted, lines
    assert not any("secret" in line for line in lines)
    return lines


def test_a_failure_names_its_message_and_what_comes_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(message) -> None:
        raise ValueError("no")

    first, last = lines_of(fails, caplog, 2)
    assert_like(first, f"a handler failed: {PLACE.format(1)} comes again in 0.1 s")
    assert_like(last, f"a handler failed: {PLACE.format(2)} was the last one: .* a dead letter")
    assert [record.levelname for record in caplog.records if record.exc_info] == [
        "WARNING",
        "ERROR",
    ]


def test_a_rejection_leaves_a_line(caplog: pytest.LogCaptureFixture) -> None:
    def rejects(message) -> object:
        return Reject("unknown customer")

    (line,) = lines_of(rejects, caplog, 1)
    assert_like(line, f"{PLACE.format(1)} was rejected: it becomes a dead letter")


def assert_like(line: str, pattern: str) -> None:
    assert re.fullmatch(pattern, line), line
