"""``map_messages``: an ordinary handler for each message of a stream, on Spark's executors.

    def handler(message):                      # or async def
        if not message.payload:
            return Reject("empty")
        return message.payload.upper()         # goes into column `result`, and means Ack

Messages of the same key run one after the other, in the order of their rows; others beside each
other: in threads, or for an ``async def`` as coroutines of one event loop per task.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from pyspark.sql.types import StructType

from kafkamq.config import Options
from kafkamq.errors import ConfigError
from kafkamq.queue.handler import is_async_function
from kafkamq.queue.wire.headers import cut_text
from kafkamq.spark.queues.acks import MAX_DELAY_S
from kafkamq.types import Ack, Nack, Reject

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

Verdict: TypeAlias = "Ack | Nack | Reject | bytes | str | None"
"""What a handler may return; bytes and text are an Ack with a result."""

Handler: TypeAlias = "Callable[[StreamMessage], Verdict | Awaitable[Verdict]]"

_NEEDED = ("ack_token", "value")
_RESULTS = {"verdict": "string", "delay": "double", "reason": "string", "result": "binary"}
_GIVEN = ("verdict", "reason")
# Whatever a handler raises is a nack, as in a worker: a GeneratorExit is the loop's own.
_RAISED = (Exception, asyncio.CancelledError, SystemExit, KeyboardInterrupt)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamMessage:
    """What a handler sees of a row; verdicts are what it returns."""

    payload: bytes | None
    key: bytes | None
    headers: Mapping[str, bytes | None]
    id: str
    queue_id: str
    delivery_count: int
    timestamp_ms: int
    row: Mapping[str, Any] = field(repr=False)


def map_messages(
    frame: DataFrame, handler: Handler, *, concurrency: int | None = None
) -> DataFrame:
    """Run a handler for each row; adds ``verdict``, ``delay``, ``reason`` and ``result``.

    It may return None or ``Ack()``, ``Nack(delay)``, ``Reject(reason)``, or bytes or a text: an ack
    with a ``result``. An exception is a nack with the queue's back-off, its text as the reason. A
    batch that Spark repeats runs the handler again. Rows that have a verdict already, as
    ``with_body`` gives them, keep it: their handler is not called.

    Args:
        frame: Rows of ``read_queue``, perhaps with other columns.
        handler: Called on the executors: it and what it refers to must be picklable.
        concurrency: Calls at a time in each task. None: 1 for a plain function, 256 for an
            ``async def``.

    Raises:
        ConfigError: A column is missing, or taken.
    """
    missing = [name for name in _NEEDED if name not in frame.columns]
    if missing:
        raise ConfigError(
            f"the rows have the columns {', '.join(frame.columns)}: map_messages needs "
            f"{', '.join(_NEEDED)}, as read_queue() gives them"
        )
    given = _GIVEN if set(_GIVEN) <= set(frame.columns) else ()
    columns = [each for each in frame.schema.fields if each.name not in given]
    taken = [each.name for each in columns if each.name in _RESULTS]
    if taken:
        raise ConfigError(f"column {taken[0]} is taken: map_messages adds it; rename yours")
    is_async = is_async_function(handler)
    count = (256 if is_async else 1) if concurrency is None else concurrency
    Options.concurrency.check(count)
    schema = StructType(columns)
    for name, kind in _RESULTS.items():
        schema = schema.add(name, kind)
    return frame.mapInArrow(
        lambda parts: _run(parts, handler, count=count, is_async=is_async), schema
    )


def _run(
    parts: Iterator[pa.RecordBatch], handler: Handler, *, count: int, is_async: bool
) -> Iterator[pa.RecordBatch]:
    if is_async:
        loop = asyncio.new_event_loop()
        try:
            for part in parts:
                run = _run_coroutines(_messages(part), handler, count)
                yield _with(part, loop.run_until_complete(run))
        finally:
            loop.close()
        return
    with ThreadPoolExecutor(count, "kafkamq-handler") as threads:
        for part in parts:
            messages = _messages(part)
            done = list(map(_given, messages))
            list(threads.map(partial(_run_shard, handler, done), _shards(messages)))
            yield _with(part, done)


@dataclass(frozen=True, slots=True)
class _Done:
    verdict: str
    delay: float | None = None
    reason: str | None = None
    result: bytes | None = None


_ACKED = _Done("ack")


def _given(message: StreamMessage) -> _Done:
    """Return the verdict that a row has before, else an ack."""
    verdict = message.row.get("verdict")
    return _Done(verdict, None, message.row.get("reason")) if verdict else _ACKED


_Shard = list[tuple[int, StreamMessage]]


def _messages(part: pa.RecordBatch) -> list[StreamMessage]:
    messages = []
    for row in part.to_pylist():
        headers = row.get("headers") or ()
        timestamp = row.get("timestamp")
        messages.append(
            StreamMessage(
                payload=row["value"],
                key=row.get("user_key"),
                headers={each["key"]: each["value"] for each in headers},
                id=row.get("id") or "",
                queue_id=row.get("queue_id") or "",
                delivery_count=row.get("delivery_count") or 1,
                timestamp_ms=-1 if timestamp is None else round(timestamp.timestamp() * 1000),
                row=row,
            )
        )
    return messages


def _shards(messages: Sequence[StreamMessage]) -> list[_Shard]:
    """Say what must run one after the other: messages of one key; each without a key by itself."""
    shards: list[_Shard] = []
    by_key: dict[bytes, _Shard] = {}
    for index, message in enumerate(messages):
        if message.row.get("verdict"):
            continue
        if message.key is not None and message.key in by_key:
            by_key[message.key].append((index, message))
            continue
        shard: _Shard = [(index, message)]
        shards.append(shard)
        if message.key is not None:
            by_key[message.key] = shard
    return shards


def _run_shard(handler: Handler, done: list[_Done], shard: _Shard) -> None:
    for index, message in shard:
        try:
            done[index] = _judge(cast("Verdict", handler(message)))
        except _RAISED as error:  # noqa: PERF203 - each message has its own
            done[index] = _failed(error, message)


async def _run_coroutines(
    messages: Sequence[StreamMessage], handler: Handler, count: int
) -> list[_Done]:
    done = list(map(_given, messages))
    shards = iter(_shards(messages))

    async def work() -> None:
        # The iterator is shared: each takes the next one.
        for shard in shards:
            for index, message in shard:
                try:
                    done[index] = _judge(await cast("Awaitable[Verdict]", handler(message)))
                except _RAISED as error:  # noqa: PERF203 - each message has its own
                    done[index] = _failed(error, message)

    await asyncio.gather(*(work() for _ in range(min(count, len(messages)))))
    return done


def _judge(verdict: Verdict) -> _Done:
    if verdict is None or isinstance(verdict, Ack):
        return _ACKED
    if isinstance(verdict, bytes | bytearray):
        return _Done("ack", result=bytes(verdict))
    if isinstance(verdict, str):
        return _Done("ack", result=verdict.encode())
    if isinstance(verdict, Nack):
        return _Done("nack", _delay(verdict.delay), _text(verdict.reason))
    if isinstance(verdict, Reject):
        return _Done("reject", None, _text(verdict.reason))
    raise TypeError(
        f"the handler returned a {type(verdict).__name__}: return None, Ack, Nack, Reject, bytes "
        "or a text"
    )


def _failed(error: BaseException, message: StreamMessage) -> _Done:
    _log.warning(
        "a handler failed; its message is nacked",
        exc_info=error,
        extra={"queue": message.queue_id, "message_id": message.id},
    )
    name = type(error).__name__
    try:
        return _Done("nack", None, _text(f"{name}: {error}"))
    except Exception:  # noqa: BLE001 - of the user's own __str__
        return _Done("nack", None, name)


def _text(reason: object) -> str:
    """Return a text as it can be a column's: without lone surrogates."""
    return cut_text(reason if isinstance(reason, str) else repr(reason))


def _delay(delay: object) -> float | None:
    if delay is None:
        return None
    seconds = float(delay)  # type: ignore[arg-type]  # whatever it is, that is the question
    if not 0.0 <= seconds <= MAX_DELAY_S:
        raise ValueError(f"delay is {delay}: it must be seconds, from 0 to a year's")
    return seconds


def _with(part: pa.RecordBatch, done: Sequence[_Done]) -> pa.RecordBatch:
    import pyarrow as pa

    if set(_GIVEN) <= set(part.schema.names):
        part = part.drop_columns(list(_GIVEN))
    for name, kind in _RESULTS.items():
        values = [getattr(each, name) for each in done]
        part = part.append_column(name, pa.array(values, kind))
    return part
