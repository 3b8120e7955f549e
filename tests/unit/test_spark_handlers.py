"""What one handler says or raises is a verdict on its message, and never the end of the batch."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from kafkamq.spark.handlers import _log, _run
from kafkamq.types import Nack, Reject


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def lost() -> None:
    raise FileNotFoundError("no file caf\udce9")  # as os.listdir names it


def unspeakable() -> None:
    raise UnspeakableError


def cancelled() -> None:
    raise asyncio.CancelledError("elsewhere")


VERDICTS: list[tuple[Callable[[], Any], str, str]] = [
    (lost, "nack", "FileNotFoundError: no file caf?"),
    (unspeakable, "nack", "UnspeakableError"),
    (cancelled, "nack", "CancelledError: elsewhere"),
    (lambda: sys.exit(3), "nack", "SystemExit: 3"),
    (lambda: Nack(1.0, "caf\udce9"), "nack", "caf?"),
    (lambda: Reject(ValueError("bad")), "reject", "ValueError('bad')"),  # type: ignore[arg-type]
    (lambda: Nack("soon"), "nack", "ValueError: "),  # type: ignore[arg-type]
    (lambda: Nack(-1.0), "nack", "ValueError: delay is -1.0"),
    (lambda: Nack(float("nan")), "nack", "ValueError: delay is nan"),
    (lambda: Nack(1e12), "nack", "ValueError: delay is 1"),
]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_verdict_that_cannot_be_written_as_it_is(
    is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_log, "disabled", True)

    def handler(message: Any) -> Any:
        return VERDICTS[int(message.payload)][0]()

    async def coroutine(message: Any) -> Any:
        return handler(message)

    rows = pa.RecordBatch.from_pydict({"value": [b"%d" % n for n in range(len(VERDICTS))]})
    chosen = coroutine if is_async else handler
    (done,) = _run(iter([rows]), chosen, count=1, is_async=is_async)
    found = done.to_pylist()
    assert [row["verdict"] for row in found] == [verdict for _, verdict, _ in VERDICTS]
    for row, (_, _, reason) in zip(found, VERDICTS, strict=True):
        assert row["reason"].startswith(reason)
    assert [row["delay"] for row in found] == [None] * 4 + [1.0, None, None, None, None, None]
