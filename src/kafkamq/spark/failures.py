"""Our errors, found again by name and text: Spark and other processes carry them as text."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import NoReturn, ParamSpec, TypeVar

import kafkamq.errors as errors
import kafkamq.transport.errors as client_errors
from kafkamq.errors import KafkaMQError

_Given = ParamSpec("_Given")
_Started = TypeVar("_Started")

_CALLING = re.compile(r"An error occurred while calling \S+\n: ")
_OURS = re.compile(r"kafkamq\.(?:\w+\.)+(\w+): ([^\n]*)")

_ENDING_S = 1.0
_NO_ROOM = (
    "; a disk is full, that of the checkpoint or of Spark's working files (SPARK_LOCAL_DIRS, else "
    "/tmp): make room there, and the query goes on where it was"
)


class QueryFailedError(KafkaMQError):
    """A query ended for a reason of Spark's: a worker died, a disk is full. Start it again."""


class SparkGoneError(KafkaMQError):
    """The JVM that a session lives in has ended; nothing in this process brings it back."""


def query_failure(error: BaseException) -> KafkaMQError:
    """Our error for the one that a query ended with, or could not start with, from Spark's text."""
    for name, text in reversed(_OURS.findall(str(error))):
        kind = getattr(errors, name, None) or getattr(client_errors, name, None)
        if isinstance(kind, type) and issubclass(kind, KafkaMQError):
            return kind(text)
    advice = _NO_ROOM if "No space left on device" in str(error) else ""
    return QueryFailedError(f"the Spark query ended: {first_line(error)}{advice}")


def raise_ours(error: BaseException) -> NoReturn:
    """Raise our error that one of Spark's carries, or else Spark's."""
    ours = query_failure(error)
    if isinstance(ours, QueryFailedError):
        raise error
    raise ours from error


def first_line(error: BaseException) -> str:
    line = _CALLING.sub("", str(error)).strip().partition("\n")[0]
    return "".join(one if one.isprintable() else "?" for one in line)


def spark_failure(error: BaseException) -> KafkaMQError:
    """``query_failure``, or that Spark itself is gone."""
    if is_spark_gone():
        return SparkGoneError(
            "Spark's JVM has ended: it was killed, or ran out of memory (its last words are in "
            "this log). Start again in a new process: it goes on from its checkpoint"
        )
    return query_failure(error)


def opens_checkpoint(start: Callable[_Given, _Started]) -> Callable[_Given, _Started]:
    """Let a function raise our error with the checkpoint's name for the JVM's own."""

    @wraps(start)
    def named(*args: _Given.args, **given: _Given.kwargs) -> _Started:
        try:
            return start(*args, **given)
        except jvm_errors() as error:
            if isinstance(error, KafkaMQError):
                raise
            failed = spark_failure(error)
            raise type(failed)(f"checkpoint {given.get('checkpoint')}: {failed}") from error

    return named


def spark_errors() -> tuple[type[BaseException], ...]:
    """Return what calls of Spark raise; of Spark Connect alone, where there is no py4j, too."""
    from pyspark.errors import PySparkException

    return PySparkException, *jvm_errors()


def jvm_errors() -> tuple[type[BaseException], ...]:
    """Return what calls of a JVM raise; with Spark Connect alone there is no py4j."""
    try:
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # no hints
    except ImportError:
        return (OSError,)
    return Py4JError, OSError


@contextmanager
def without_spark_log() -> Iterator[None]:
    """PySpark prints each wrong statement itself, with its plan and the stack of the JVM."""
    from pyspark.logger import PySparkLogger

    loggers = [
        PySparkLogger.getLogger(f"{kind}QueryContextLogger") for kind in ("SQL", "DataFrame")
    ]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, was_disabled in zip(loggers, before, strict=True):
            logger.disabled = was_disabled


def is_spark_gone() -> bool:
    """Return whether this process had a JVM of Spark's and has it no more."""
    try:
        from pyspark import SparkContext
    except ImportError:
        return False
    process = getattr(SparkContext._gateway, "proc", None)
    if process is None:
        return False
    try:
        process.wait(_ENDING_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def advised(error: KafkaMQError, checkpoint: str) -> KafkaMQError:
    """Get the failure of a tracker's query before its first batch, with what may be the matter."""
    if not isinstance(error, QueryFailedError) or str(error).endswith(_NO_ROOM):
        return error
    return QueryFailedError(
        f"{error}; it had not done a batch since it was started: if that repeats, the checkpoint "
        f"{checkpoint} may be damaged. Delete it then: the next start folds again from the "
        "positions in Kafka, and no message is lost"
    )
