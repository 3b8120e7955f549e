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
_OF_NOTES = re.compile(rf"{_FILE.pattern}|state-\d+")
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


class Checkpoint:
    """The folder of a query, on any file system that Spark knows."""

    def __init__(self, spark: SparkSession, place: str) -> None:
        jvm: Any = getattr(spark, "_jvm", None)
        if jvm is None:
            raise ConfigError(
                "this session is one of Spark Connect, where the checkpoint cannot be looked at: "
                'use a session of this process, or format("kafkamq") as it is'
            )
        self.spark = spark
        self._place = place
        self._path = jvm.org.apache.hadoop.fs.Path
        self._files = self._path(place).getFileSystem(spark._jsc.hadoopConfiguration())

    def note(self, topic: str) -> CheckpointNote | None:
        """Return the note that holds; None: the folder is new, or has none."""
        found = filter(None, map(_FILE.fullmatch, self._names("")))
        number = max((int(each[1] or 1) for each in found), default=0)
        if not number:
            if self._files.exists(self._at("offsets")):
                raise ConfigError(
                    f"checkpoint {self._place} belongs to another Spark query: name another folder"
                )
            return None
        name = _name(number)
        with closing(self._files.open(self._at(name))) as stream:
            text = bytes(stream.readAllBytes())
        try:
            values = json.loads(text)
            version = int(values.pop("version"))
            starting = {int(number): int(at) for number, at in values.pop("starting").items()}
            note = CheckpointNote(starting=starting, **values) if version == _VERSION else None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{self._place}/{name} is damaged ({error}): restore it, or name another folder (a "
                "tracker loses no message by that)"
            ) from None
        if note is None:
            raise ConfigError(
                f"{self._place} is of version {version}, this release reads {_VERSION}"
            )
        if note.topic != topic:
            raise ConfigError(
                f"checkpoint {self._place} is of topic {note.topic}, not {topic}: name another "
                "folder"
            )
        return note

    def write(self, note: CheckpointNote) -> CheckpointNote:
        name, draft = _name(note.number), self._draft()
        values = {"version": _VERSION, **asdict(note)}
        if note.into is None:
            # Earlier releases read the notes of trackers, and know nothing of it.
            del values["into"]
        with closing(self._files.create(draft, True)) as stream:
            stream.write(bytearray(json.dumps(values).encode()))
        if not self._files.rename(draft, self._at(name)):
            raise ConfigError(
                f"{self._place}/{name} cannot be written: check the folder's permissions"
            )
        return note

    def require_writable(self) -> None:
        """Raise Spark's own error where no file can be written."""
        draft = self._draft()
        self._files.create(draft, True).close()
        self._files.delete(draft, False)

    def drop_earlier(self, note: CheckpointNote) -> None:
        """Delete what a tracker's earlier notes have left, and those notes."""
        own = (note.folder, _name(note.number))
        for name in self._names("") if note.folder else ():
            if name not in own and (name in _OF_SPARK or _OF_NOTES.fullmatch(name)):
                self._files.delete(self._at(name), True)

    def last_batch(self, *, below: str = "", log: str = "offsets") -> int:
        """Number of the last batch that Spark has planned, or committed; -1: none."""
        names = self._names(f"{below}/{log}")
        return max((int(name) for name in names if name.isdigit()), default=-1)

    def is_settled(self) -> bool:
        """Say whether Spark knows every batch that it has planned to be done."""
        return self.last_batch() == self.last_batch(log="commits")

    def _draft(self) -> Any:
        self._files.mkdirs(self._at(""))
        return self._at(f".kafkamq-{uuid.uuid4().hex}.draft")

    def _names(self, folder: str) -> list[str]:
        path = self._at(folder)
        found = self._files.listStatus(path) if self._files.exists(path) else ()
        return [status.getPath().getName() for status in found]

    def _at(self, name: str) -> Any:
        return self._path(self._place + "/" + name)


def _name(number: int) -> str:
    return "kafkamq.json" if number == 1 else f"kafkamq-{number}.json"
