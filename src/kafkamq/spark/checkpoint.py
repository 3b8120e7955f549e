"""What our queries keep in their checkpoint folders beside Spark's own files.

One small file, written before the query starts for the first time: an id that lives as long as the
checkpoint, the number of tasks that it was cut for, and for the tracker where folding began.
The folder may be on any file system that Spark can write.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from kafkamq.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["CheckpointNote", "last_batch", "read_note", "write_note"]

_FILE = "kafkamq.json"
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class CheckpointNote:
    """The file's content."""

    topic: str  # the markers topic that the state is of; sinks: the ledger topic
    tasks: int  # shuffle partitions or slots, fixed for the life of the checkpoint
    engine: str  # the id
    starting: dict[int, int] = field(default_factory=dict)  # by marker partition; added ones: 0

    @classmethod
    def new(cls, kind: str, *, topic: str, tasks: int) -> CheckpointNote:
        """A note with a fresh id."""
        return cls(topic=topic, tasks=tasks, engine=f"{kind}-{uuid.uuid4().hex[:16]}")


def read_note(spark: SparkSession, checkpoint: str, *, topic: str) -> CheckpointNote | None:
    """The note of a checkpoint; None: the folder is new, or holds none.

    Raises:
        ConfigError: The folder belongs to another topic, another query or a newer release.
    """
    files, folder = _folder(spark, checkpoint)
    path = _path(spark, folder, _FILE)
    if not files.exists(path):
        if files.exists(_path(spark, folder, "offsets")):
            raise ConfigError(
                f"checkpoint {checkpoint} belongs to another Spark query: name another folder"
            )
        return None
    stream = files.open(path)
    try:
        text = bytes(stream.readAllBytes())
    finally:
        stream.close()
    try:
        values = json.loads(text)
        version = int(values.pop("version"))
        starting = {int(number): int(at) for number, at in values.pop("starting").items()}
        note = CheckpointNote(starting=starting, **values) if version == _VERSION else None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{checkpoint}/{_FILE} is damaged ({error}): restore it, or name another folder (a "
            "tracker loses no message by that)"
        ) from None
    if note is None:
        raise ConfigError(f"{checkpoint} is of version {version}, this release reads {_VERSION}")
    if note.topic != topic:
        raise ConfigError(
            f"checkpoint {checkpoint} is of topic {note.topic}, not {topic}: name another folder"
        )
    return note


def write_note(spark: SparkSession, checkpoint: str, note: CheckpointNote) -> None:
    """Write the note; it appears whole or not at all."""
    files, folder = _folder(spark, checkpoint)
    files.mkdirs(folder)
    draft = _path(spark, folder, f".{_FILE}.draft")
    stream = files.create(draft, True)
    try:
        stream.write(bytearray(json.dumps({"version": _VERSION, **asdict(note)}).encode()))
    finally:
        stream.close()
    if not files.rename(draft, _path(spark, folder, _FILE)):
        raise ConfigError(f"{checkpoint}/{_FILE} cannot be written: check the folder's permissions")


def last_batch(spark: SparkSession, checkpoint: str) -> int:
    """Number of the last batch that Spark planned; -1: none."""
    files, folder = _folder(spark, checkpoint)
    offsets = _path(spark, folder, "offsets")
    if not files.exists(offsets):
        return -1
    names = [status.getPath().getName() for status in files.listStatus(offsets)]
    return max((int(name) for name in names if name.isdigit()), default=-1)


def _folder(spark: SparkSession, checkpoint: str) -> tuple[Any, Any]:
    """Hadoop's file system, and the folder as its Path."""
    jvm = spark._jvm
    assert jvm is not None, "a session of this process, not of Spark Connect"
    folder = jvm.org.apache.hadoop.fs.Path(checkpoint)
    return folder.getFileSystem(spark._jsc.hadoopConfiguration()), folder


def _path(spark: SparkSession, folder: Any, name: str) -> Any:
    jvm = spark._jvm
    assert jvm is not None, "a session of this process, not of Spark Connect"
    return jvm.org.apache.hadoop.fs.Path(folder, name)
