"""What the Kafka sink has written, kept in Kafka itself: the rules, and the reads and writes.

A *cell* is the part of a batch that is one transaction: the rows of a task, or of a slot. The
transaction of a cell also commits its *entry* (a committed offset whose text says batch, number and
digest of the rows, and which run of the query wrote it). So a repeated batch finds out, cell by
cell, what is written already.

Spark may cut a repeated batch into other tasks than before. Therefore a cell that is not written
yet waits until every cell that an earlier run wrote of this batch was found again with the same
rows: then, and only then, its own rows are not among theirs. Where that never happens the batch
was cut differently, and the query ends without writing. Slots do not wait for each other while
their number is the same: equal rows are in the same slot then.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, DeadlineExceededError, KafkaMQError, StateError, WireError
from kafkamq.markers.wire.records import Position, decode_position, encode_position
from kafkamq.queue.namespace import Namespace
from kafkamq.transport.admin import Admin
from kafkamq.transport.commits import metadata_of
from kafkamq.transport.errors import Meaning, OutcomeUnknownError, TransactionAbortedError, meaning
from kafkamq.transport.record import TopicPartition
from kafkamq.transport.transactions import TransactionalProducer

TASKS = "tasks"
"""Name of a cut by tasks; a cut into n slots is called ``slots=n``."""

MAX_RUNS = 16

_TRANSACTION_MS = 60_000
_PATIENCE_S = 30.0
_POLL_S = 0.2
_HASTE_S = 6.0
_MAX_BITS = 24
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class CellEntry:
    batch: int
    rows: int
    digest: int
    cut: str
    run: str

    def has_rows_of(self, other: CellEntry) -> bool:
        mine = (self.batch, self.rows, self.digest, self.cut)
        return mine == (other.batch, other.rows, other.digest, other.cut)


def is_written(entry: CellEntry | None, batch: int, *, where: str) -> bool:
    if entry is None or entry.batch < batch:
        return False
    if entry.batch > batch:
        raise StateError(
            f"checkpoint older than its ledger: {where} has written batch {entry.batch}, the "
            f"query is at batch {batch}; restore the newest checkpoint, or start with an empty "
            "one (which writes again what its source still has)"
        )
    return True


def unconfirmed(
    entries: Mapping[int, CellEntry], *, batch: int, run: str, cut: str
) -> dict[int, CellEntry]:
    """Return cells of this batch that an earlier run wrote and this one has not found again."""
    return {
        number: entry
        for number, entry in entries.items()
        if entry.batch == batch and entry.run != run and (cut == TASKS or entry.cut != cut)
    }


def _encode(entry: CellEntry, sink: str) -> str:
    return encode_position(
        Position(
            position=entry.batch + 1,
            epoch=1,
            batch=entry.batch,
            rows_done=entry.rows,
            source_hash=f"{entry.cut} {entry.digest:016x} {entry.run}",
            engine=sink,
        )
    )


def _decode(text: str | None) -> CellEntry | None:
    position = decode_position(text)
    if position is None:
        return None
    cut, _, rest = position.source_hash.partition(" ")
    digest, _, run = rest.partition(" ")
    try:
        return CellEntry(position.batch, position.rows_done, int(digest, 16), cut, run)
    except ValueError:
        raise WireError("an entry of the sink's ledger names no digest") from None


@dataclass(eq=False)
class SinkLedger:
    """The entries of one sink; one owner thread.

    Committed offsets of ``topic``'s partition 0, each under a group of its own that never has
    members: one per cell, one for the batch that was written last, and one for each power of two
    below which there are cells. A cell renews all of its own, so that the broker, which forgets
    what is not renewed, forgets none that is needed.
    """

    config: ServiceConfig
    topic: str
    sink: str
    # No other run repeats its batch: entries of cells are enough.
    is_alone: bool = False

    def __post_init__(self) -> None:
        self.prefix = f"kafkamq.{self.topic}.{self.sink}"
        self.namespace = Namespace(self.config)
        self._admin = Admin(self.config)
        self._hasty_admin = Admin(self.config, timeout_s=_HASTE_S)
        self._metadata: dict[str, bytes] = {}
        # A worker sees one after the other.
        self.settled_runs = deque[str](maxlen=MAX_RUNS)

    def group(self, cell: int) -> str:
        return f"{self.prefix}.{cell}"

    @property
    def last_group(self) -> str:
        return f"{self.prefix}.last"

    def range_group(self, cell: int) -> str:
        """Return the group that exists while there are cells of so many bits."""
        return f"{self.prefix}.range.{cell.bit_length()}"

    def entry(self, cell: int) -> CellEntry | None:
        return self._read([self.group(cell)])[0]

    def last(self) -> CellEntry | None:
        return self._read([self.last_group])[0]

    def metadata(self, group: str) -> bytes:
        if group not in self._metadata:
            self._metadata[group] = metadata_of(self.config, group)
        return self._metadata[group]

    def delete(self) -> int:
        """Delete all entries; returns how many there were."""
        count, admin = 0, self._admin
        groups = [*map(self.group, self._cells()), self.last_group, *self._ranges()]
        for group, future in admin.client.delete_consumer_groups(groups).items():
            try:
                admin.wait(future, f"deleting group {group}")
                count += 1
            except KafkaMQError as error:  # noqa: PERF203 - each of them may be missing
                if meaning(error) is not Meaning.NO_GROUP:
                    raise
        return count

    def entries(self) -> dict[int, CellEntry]:
        cells = self._cells()
        found = zip(cells, self._read(map(self.group, cells)), strict=True)
        return {number: entry for number, entry in found if entry is not None}

    def _ranges(self) -> list[str]:
        return [f"{self.prefix}.range.{bits}" for bits in range(_MAX_BITS + 1)]

    def _cells(self) -> list[int]:
        """Return the numbers of all cells that have an entry, and of some that have none.

        Brokers list neither a group that has no coordinator now nor one whose first transaction is
        just being committed: the ranges tell of these. Earlier releases did not renew the ranges.
        """
        ranges = enumerate(self._read(self._ranges()))
        known = max((1 << bits for bits, entry in ranges if entry is not None), default=0)
        parts = (group.rpartition(".") for group in self._admin.groups())
        listed = {int(cell) for of, _, cell in parts if of == self.prefix and cell.isdecimal()}
        return sorted({*range(known), *listed})

    def await_confirmation(self, *, batch: int, run: str, cut: str) -> None:
        """Return when nothing that an earlier run wrote of this batch is in question."""
        if self.is_alone or run in self.settled_runs:
            return
        deadline_s = time.monotonic() + _PATIENCE_S
        last = self.last()
        while last is not None and last.batch == batch and last.run != run:
            is_last_look = time.monotonic() > deadline_s
            left = unconfirmed(self.entries(), batch=batch, run=run, cut=cut)
            if not left:
                break
            if is_last_look:
                cells = ", ".join(map(str, sorted(left)[:10]))
                raise StateError(
                    f"batch {batch} was written in part, by other tasks than Spark makes of it "
                    f"now: those numbered {cells} were not found again within {_PATIENCE_S:g} s, "
                    "and nothing more was written. Start the query as it was started before (as "
                    "many cores, the same shuffle partitions); with rows from by_slot() this "
                    "cannot happen"
                )
            time.sleep(_POLL_S)
        self.settled_runs.append(run)

    def _read(self, groups: Iterable[str]) -> list[CellEntry | None]:
        wanted = [(group, (self.topic, 0)) for group in groups]
        try:
            found = self._hasty_admin.committed(wanted)
        except (BrokerError, DeadlineExceededError):
            # Held back by a dead producer's open transaction, which will never be committed.
            found = self._admin.committed(wanted, stable=False)
        return [None if each.offset < 0 else _decode(each.metadata) for each in found]

    def close(self) -> None:
        self.namespace.close()
        self._admin.close()
        self._hasty_admin.close()


class Cell:
    """One cell of one batch: at most one transaction; one owner thread."""

    def __init__(self, ledger: SinkLedger, number: int, *, batch: int, cut: str, run: str) -> None:
        self.number = number
        self._ledger = ledger
        self._batch = batch
        self._cut = cut
        self._run = run
        self.rows = 0
        self._digest = 0
        self.producer = TransactionalProducer(
            ledger.config,
            ledger.group(number),
            delivery_report_only_error=True,
            transaction_timeout_ms=_TRANSACTION_MS,
            message_timeout_ms=_TRANSACTION_MS,
            linger_ms=20,
            queue_buffering_max_messages=500_000,
            partitioner="murmur2_random",
        )
        try:
            # What an earlier task had under way is committed or aborted now.
            self.producer.init()
            self._before = ledger.entry(number)
            where = f"{cut} {number} of sink {ledger.sink}"
            self.is_repeated = is_written(self._before, batch, where=where)
            if not self.is_repeated:
                self.producer.begin()
        except BaseException:
            self.producer.close()
            raise

    def count(self, rows: int, digest: int) -> None:
        """Rows of this cell, written or found again; digests add up in any order."""
        self.rows += rows
        self._digest = (self._digest + digest) & _MASK

    def commit(self) -> bool:
        """All rows were counted; returns whether they are written now (False: they were before)."""
        entry = CellEntry(self._batch, self.rows, self._digest, self._cut, self._run)
        if self.is_repeated:
            self._confirm(entry)
            return False
        self._ledger.await_confirmation(batch=self._batch, run=self._run, cut=self._cut)
        self._commit(entry, last=entry)
        return True

    def _confirm(self, entry: CellEntry) -> None:
        before = self._before
        assert before is not None, "a repeated cell has an entry"
        if not before.has_rows_of(entry):
            raise StateError(
                f"checkpoint older than its ledger, or a batch that changed: batch {self._batch} "
                f"of {before.cut} {self.number} was written with {before.rows} rows "
                f"({before.digest:016x}), now it has {entry.rows} ({entry.digest:016x}); nothing "
                "of it was written again. Start the query as it was started before, from a source "
                "that gives the same rows again; rows from by_slot() do not depend on the number "
                "of tasks"
            )
        if before.run != entry.run:
            self.producer.begin()
            # Renewed as it is: its run says that other cells may be in question yet.
            self._commit(entry, last=self._ledger.last() or before)

    def _commit(self, entry: CellEntry, *, last: CellEntry) -> None:
        ledger = self._ledger
        entries = {ledger.group(self.number): entry}
        if not ledger.is_alone:
            entries |= {ledger.last_group: last, ledger.range_group(self.number): entry}
        for group, each in entries.items():
            text = _encode(each, ledger.sink)
            offset = TopicPartition(ledger.topic, 0, each.batch + 1, metadata=text)
            self.producer.send_offsets([offset], ledger.metadata(group))
        try:
            self.producer.commit()
        except OutcomeUnknownError as error:
            self.producer.init()
            if ledger.entry(self.number) != entry:
                raise TransactionAbortedError(f"{error}: it was not", is_retriable=True) from error

    def close(self) -> None:
        self.producer.close()
