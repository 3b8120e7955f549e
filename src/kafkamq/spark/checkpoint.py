"""What our queries keep in their checkpoint folders beside Spark's own files.

One small file, written before the query starts for the first time: an id that lives as long as the
checkpoint, the number of tasks that it was cut for, and for the tracker where folding began. When
the number changes a second file follows, and so on: the one with the largest number holds. The
folder may be on any file system that Spark can write.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kafkamq.errors import ConfigError, StateError
from kafkamq.markers.wire.records import Position

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_FILE = re.compile(r"kafkamq(?:-(\d+))?\.json")
_VERSION = 1
_OF_SPARK = ("commits", "metadata", "offsets", "sources", "state")


@dataclass(frozen=True, kw_only=True)
class CheckpointNote:
    topic: str
    tasks: int
    engine: str
    starting: dict[int, int] = field(default_factory=dict)
    number: int = 1
    # Where Spark's own files are, below the checkpoint; empty: there itself.
    folder: str = ""
    since: int = 0
    tasks_before: int = 0
    # Of sinks: into how many tasks any batch was cut at most; 0: always ``tasks``.
    most: int = 0
    # Of sinks: the queue that the rows are sent to; empty: topics.
    queue: str = ""
    # Of sinks: the topic of rows that name none; None: earlier releases did not note it.
    into: str | None = None

    @classmethod
    def new(
        cls, kind: str, *, topic: str, tasks: int, queue: str = "", into: str | None = None
    ) -> CheckpointNote:
        engine = f"{kind}-{uuid.uuid4().hex[:16]}"
        return cls(topic=topic, tasks=tasks, engine=engine, queue=queue, into=into)

    def place(self, checkpoint: str) -> str:
        return f"{checkpoint.rstrip('/')}/{self.folder}" if self.folder else checkpoint

    def require_newest(self, positions: Mapping[int, Position], newest_batch: int) -> None:
        """Refuse a checkpoint that was restored from an older copy: its batches would be skipped.

        Raises:
            StateError: A ledger is ahead of it.
        """
        for number, position in positions.items():
            # A ledger says 0 also where no batch is done yet.
            if position.engine == self.engine and position.batch > max(0, newest_batch):
                raise StateError(
                    f"checkpoint older than its ledger: {self.topic}[{number}] is settled up to "
                    f"batch {position.batch}, the checkpoint ends at batch {newest_batch}; restore "
                    "the newest one, or start with an empty folder (nothing is lost)"
                )

    def require_usable(
        self, spark: SparkSession, checkpoint: str, positions: Mapping[int, Position]
    ) -> None:
        """Refuse a folder where a start would fail that has claimed the ledgers.

        Raises:
            StateError: As ``require_newest``; Spark's own error: no file can be written there.
        """
        self.require_newest(positions, last_batch(spark, self.place(checkpoint)))
        files, folder = _folder(spark, checkpoint)
        files.mkdirs(folder)
        draft = _path(spark, folder, ".kafkamq.draft")
        files.create(draft, True).close()
        files.delete(draft, False)

    def tasks_of(self, batch: int) -> int:
        """Into how many slots a batch of a sink is cut: always the same, however often it runs."""
        return self.tasks if batch >= self.since else self.tasks_before

    def cut(self, tasks: int, *, since: int) -> CheckpointNote:
        """Return a sink's next note: other slots, from a batch on that has not run yet."""
        return replace(
            self,
            tasks=tasks,
            since=since,
            tasks_before=self.tasks_of(since - 1),
            most=max(self.most, self.tasks, tasks),
            number=self.number + 1,
        )

    def moved(self, tasks: int, starting: dict[int, int]) -> CheckpointNote:
        """Return the next note of a tracker, whose state begins again in a folder of its own."""
        number = self.number + 1
        folder = f"state-{number}"
        return replace(self, tasks=tasks, starting=starting, folder=folder, number=number)


def read_note(spark: SparkSession, checkpoint: str, *, topic: str) -> CheckpointNote | None:
    """Return the note of a checkpoint; None: the folder is new, or holds none."""
    files, folder = _folder(spark, checkpoint)
    found = filter(None, map(_FILE.fullmatch, _names(files, folder)))
    number = max((int(each[1] or 1) for each in found), default=0)
    if not number:
        if files.exists(_path(spark, folder, "offsets")):
            raise ConfigError(
                f"checkpoint {checkpoint} belongs to another Spark query: name another folder"
            )
        return None
    name = _name(number)
    path = _path(spark, folder, name)
    with closing(files.open(path)) as stream:
        text = bytes(stream.readAllBytes())
    try:
        values = json.loads(text)
        version = int(values.pop("version"))
        starting = {int(number): int(at) for number, at in values.pop("starting").items()}
        note = CheckpointNote(starting=starting, **values) if version == _VERSION else None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{checkpoint}/{name} is damaged ({error}): restore it, or name another folder (a "
            "tracker loses no message by that)"
        ) from None
    if note is None:
        raise ConfigError(f"{checkpoint} is of version {version}, this release reads {_VERSION}")
    if note.topic != topic:
        raise ConfigError(
            f"checkpoint {checkpoint} is of topic {note.topic}, not {topic}: name another folder"
        )
    return note


def write_note(spark: SparkSession, checkpoint: str, note: CheckpointNote) -> CheckpointNote:
    files, folder = _folder(spark, checkpoint)
    files.mkdirs(folder)
    name = _name(note.number)
    draft = _path(spark, folder, f".{name}.draft")
    values = {"version": _VERSION, **asdict(note)}
    if note.into is None:
        # Earlier releases read the notes of trackers, and know nothing of it.
        del values["into"]
    with closing(files.create(draft, True)) as stream:
        stream.write(bytearray(json.dumps(values).encode()))
    if not files.rename(draft, _path(spark, folder, name)):
        raise ConfigError(f"{checkpoint}/{name} cannot be written: check the folder's permissions")
    return note


def last_batch(spark: SparkSession, checkpoint: str) -> int:
    """Number of the last batch that Spark planned; -1: none."""
    return _last(spark, checkpoint, "offsets")


def is_settled(spark: SparkSession, checkpoint: str) -> bool:
    """Say whether Spark knows every batch that it has planned to be done: none will be repeated."""
    return last_batch(spark, checkpoint) == _last(spark, checkpoint, "commits")


def _last(spark: SparkSession, checkpoint: str, log: str) -> int:
    files, folder = _folder(spark, checkpoint)
    return max((int(name) for name in _names(files, _path(spark, folder, log)) if name.isdigit()),
               default=-1)  # fmt: skip


def drop_folder(spark: SparkSession, checkpoint: str, note: CheckpointNote) -> None:
    """Delete Spark's files of a note that another one has followed."""
    files, folder = _folder(spark, checkpoint)
    for name in (note.folder,) if note.folder else _OF_SPARK:
        files.delete(_path(spark, folder, name), True)


def _name(number: int) -> str:
    return "kafkamq.json" if number == 1 else f"kafkamq-{number}.json"


def _names(files: Any, folder: Any) -> list[str]:
    if not files.exists(folder):
        return []
    return [status.getPath().getName() for status in files.listStatus(folder)]


def _folder(spark: SparkSession, checkpoint: str) -> tuple[Any, Any]:
    """Hadoop's file system, and the folder as its Path."""
    folder = _jvm(spark).org.apache.hadoop.fs.Path(checkpoint)
    return folder.getFileSystem(spark._jsc.hadoopConfiguration()), folder


def _path(spark: SparkSession, folder: Any, name: str) -> Any:
    return _jvm(spark).org.apache.hadoop.fs.Path(folder, name)


def _jvm(spark: SparkSession) -> Any:
    jvm = getattr(spark, "_jvm", None)
    if jvm is None:
        raise ConfigError(
            "this session is one of Spark Connect, where the checkpoint cannot be looked at: use a "
            'session of this process, or format("kafkamq") as it is'
        )
    return jvm
