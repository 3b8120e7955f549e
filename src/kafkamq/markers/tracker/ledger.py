"""Ledgers: the committed offset that says who owns a marker partition, and how far it is (R22).

A ledger is committed under the partition's transactional id, as a group id. Its offset is where to
read from after a restart; its metadata says which engine of which epoch wrote it, in which batch,
and how many rows of that batch are done. It is committed in the same transaction as what it speaks
of, so it can neither lag nor lead.
"""

from __future__ import annotations

import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter

from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError, FencedError, KafkaMQError
from kafkamq.markers.wire.records import Position, decode_position, encode_position
from kafkamq.transport.admin import Admin
from kafkamq.transport.commits import metadata_of
from kafkamq.transport.errors import TransactionAbortedError
from kafkamq.transport.record import TopicPartition
from kafkamq.transport.transactions import TransactionalProducer

# Of a process; a producer has two connections to a broker that coordinates it.
MAX_OPEN = 24
# Partitions at once: each start of a producer waits for the broker.
_CLAIMING = 8
# Of each partition.
_CLAIM_S = 60.0


@dataclass(frozen=True, slots=True)
class LedgerKey:
    """Names one ledger: its transactional id (also its group) and where its offset is committed."""

    transactional_id: str
    topic: str
    partition: int

    @classmethod
    def of_markers(cls, config: ServiceConfig, partition: int) -> LedgerKey:
        """Return the ledger of a marker partition, the same for every engine: R22."""
        topic = config.marker_topic
        return cls(f"kafkamq.{topic}.{partition}", topic, partition)


class Ledger:
    """One ledger and the transactional producer that writes it; one owner thread.

    Attributes:
        key: What it names.
        engine: Who writes: constant over the restarts of one engine (for Spark: of a checkpoint).
        epoch: The epoch of this start of the engine.
        last: What the ledger held when it was last read or written; None: nothing yet.
        producer: For what goes into the same transaction as the position.
    """

    def __init__(
        self,
        config: ServiceConfig,
        key: LedgerKey,
        *,
        engine: str,
        epoch: int,
        admin: Admin | None = None,
        reports: bool = False,
    ) -> None:
        """``reports``: what ``producer`` delivers is reported; each costs as much as the record."""
        self.key = key
        self.engine = engine
        self.epoch = epoch
        self.last: Position | None = None
        self.producer = TransactionalProducer(
            config, key.transactional_id, delivery_report_only_error=not reports
        )
        self._config = config
        self._admin = admin
        self._owns_admin = admin is None
        self._group = b""
        self._is_read = False
        # ``rest`` ended its client, and ``resume`` may make another one.
        self.is_resting = False
        self._held: Position | None = None

    @property
    def is_open(self) -> bool:
        """Return whether transactions can start: opened, and not fenced or broken since."""
        return self._is_read and self.producer.is_ready

    def open(self, *, timeout_s: float = 30.0, looks_first: bool = False) -> Position | None:
        """Fence the former owner (``init_transactions``), read the ledger, check the epoch.

        What an earlier owner had under way is committed or aborted for good when this returns, so
        that ``last`` and ``rows_done`` are the truth, also after a commit of unknown outcome.

        Args:
            timeout_s: Bound of each of the requests.
            looks_first: Read the epoch before anybody is fenced, too: an earlier start that goes on
                takes no transaction away from the later one.

        Raises:
            FencedError: The ledger holds a larger epoch, or another engine's equal one: stop.
            BrokerError, DeadlineExceededError: Not reached in time; may be repeated.
        """
        if looks_first:
            self._read(timeout_s, stable=False)
            self._refuse_earlier()
        self.fence(timeout_s=timeout_s)
        self._refuse_earlier()
        return self.last

    def _refuse_earlier(self) -> None:
        last = self.last
        if last is not None and self.is_anothers:
            # It stops without writing (R22).
            self.producer.close()
            raise FencedError(
                f"{self.key.topic}[{self.key.partition}]: engine {last.engine!r} started later "
                f"(epoch {last.epoch}, ours is {self.epoch} as {self.engine!r}); stop this one",
                code="LATER_START",
                is_fatal=True,
            )

    def _read(self, timeout_s: float, *, stable: bool = True) -> None:
        if self._admin is None:
            self._admin = Admin(self._config, timeout_s=timeout_s)
        self.last = read_ledgers(self._admin, (self.key,), stable=stable).get(self.key)

    @property
    def is_anothers(self) -> bool:
        """Return whether it held a later start, or another engine's of the same epoch."""
        last = self.last
        if last is None:
            return False
        is_other = last.epoch == self.epoch and last.engine != self.engine
        return last.epoch > self.epoch or is_other

    def fence(self, *, timeout_s: float = 30.0) -> None:
        """``open`` without the check; for a start that is about to choose its epoch."""
        # An old ``last`` would have rows written once more.
        self._is_read = False
        self.producer.init(timeout_s=timeout_s)
        # Now, and not when the first commit waits for it.
        self._metadata()
        self._read(timeout_s)
        self._is_read = True
        self.is_resting = False

    def rest(self) -> None:
        """End the client until ``resume``; only of an open ledger, outside of transactions."""
        if self.is_open:
            self.is_resting = True
            self._is_read = False
            self._held = self.last
            self.producer.close()

    def resume(self, *, timeout_s: float = 30.0) -> None:
        """``open`` after ``rest``, as an owner that need not read its partition's log again.

        R17 asks for a TICK after ``init_transactions`` because a predecessor may have written. All
        that owners write is in transactions, and each of these puts a ``Position`` here that none
        before it had: a larger epoch, or of the same epoch a larger batch or more rows of it. So
        while the ledger holds what it held at ``rest``, nobody has written since.

        Raises:
            FencedError: Somebody has: start the partition again, or stop (``LATER_START``).
            BrokerError, DeadlineExceededError: Not reached in time; may be repeated.
        """
        held = self._held
        try:
            last = self.open(timeout_s=timeout_s)
        except BaseException:
            # It rests on, which is without a client.
            self.producer.close()
            raise
        if last != held:
            self.producer.close()
            raise FencedError(
                f"{self.key.topic}[{self.key.partition}]: another replica has written meanwhile "
                f"(batch {-1 if last is None else last.batch}); start again behind it",
                code="OTHER_OWNER",
            )

    def rows_done(self, batch: int) -> int:
        """Rows of ``batch`` that this start of this engine has committed; 0: none."""
        last = self._own()
        return last.rows_done if last is not None and last.batch == batch else 0

    def is_past(self, batch: int) -> bool:
        """Return whether this start of this engine has committed rows of a later batch already."""
        last = self._own()
        return last is not None and last.batch > batch

    def begin(self) -> None:
        self.producer.begin()

    def commit(
        self,
        position: int,
        *,
        batch: int,
        rows_done: int,
        source_hash: str = "",
        members: Sequence[bytes] = (),
        timeout_s: float = 30.0,
    ) -> Position:
        """Put the position into the open transaction and commit it.

        Args:
            position: Offset to read from after a restart.
            batch: Number of the batch, of this engine.
            rows_done: Rows of the batch that are done with this transaction.
            source_hash: Of the batch's source, for engines that check it.
            members: Group metadata of consumers (``Consumer.consumer_group_metadata()``); the
                position is committed for their groups as well, which fences former members.
            timeout_s: Bound of each of the requests.

        Raises:
            TransactionAbortedError: Known to be aborted; the ledger is usable.
            FencedError: Somebody opened this ledger after us; after ``open`` (if the epoch still
                is the latest) ``rows_done`` tells whether it was committed.
            OutcomeUnknownError: Call ``open``; then ``rows_done`` tells.
        """
        written = Position(
            position=position,
            epoch=self.epoch,
            batch=batch,
            rows_done=rows_done,
            source_hash=source_hash,
            engine=self.engine,
        )
        self._write(written, members, timeout_s)
        return written

    def adopt(self, epoch: int, position: int, *, timeout_s: float = 30.0) -> Position:
        """Make ``epoch`` this start's, in a transaction of its own; its batches begin again."""
        self.epoch = epoch
        written = Position(position=position, epoch=epoch, engine=self.engine)
        self.begin()
        self._write(written, (), timeout_s)
        return written

    def _write(self, written: Position, members: Sequence[bytes], timeout_s: float) -> None:
        topic, partition = self.key.topic, self.key.partition
        offset = TopicPartition(
            topic, partition, written.position, metadata=encode_position(written)
        )
        try:
            self.producer.send_offsets([offset], self._metadata(), timeout_s=timeout_s)
            for member in members:
                plain = TopicPartition(topic, partition, written.position)
                self.producer.send_offsets([plain], member, timeout_s=timeout_s)
        except (FencedError, TransactionAbortedError):
            raise
        except KafkaMQError as error:
            self.producer.abort()
            raise TransactionAbortedError(f"{error}: aborted", is_retriable=True) from error
        self.producer.commit(timeout_s=timeout_s)
        self.last = written

    def abort(self, *, timeout_s: float = 10.0) -> None:
        self.producer.abort(timeout_s=timeout_s)

    def close(self) -> None:
        """Abort what is open and end the clients; idempotent."""
        self.is_resting = False
        self.producer.close()
        if self._owns_admin and self._admin is not None:
            self._admin.close()
            self._admin = None

    def _own(self) -> Position | None:
        return self.last if self.is_last(self.engine, self.epoch) else None

    def is_last(self, engine: str, epoch: int) -> bool:
        last = self.last
        return last is not None and (last.engine, last.epoch) == (engine, epoch)

    def _metadata(self) -> bytes:
        """Return the metadata of a group without members: the ledger's group never has any."""
        if not self._group:
            self._group = metadata_of(self._config, self.key.transactional_id)
        return self._group


class OpenLedgers:
    """Puts ledgers to rest, the least recently used first; thread-safe.

    A marker partition has a transactional id, and so a producer, of its own (R22): a thousand of
    them would be two thousand connections and five thousand threads, nearly all of them idle. Those
    that were used last stay open; the others are opened again when something is due there.
    """

    def __init__(self, most: int = MAX_OPEN) -> None:
        self._most = most
        self._idle: OrderedDict[Ledger, None] = OrderedDict()
        self._used: set[Ledger] = set()
        self._ending: set[Ledger] = set()
        self._is_closed = False
        self._changed = threading.Condition()

    @contextmanager
    def using(self, ledger: Ledger) -> Iterator[None]:
        """The calling thread owns the ledger inside the block."""
        self._take(ledger)
        try:
            yield
        finally:
            self.keep(ledger)

    def keep(self, ledger: Ledger) -> None:
        """Nobody uses this ledger for now; the one that was not used for longest may rest."""
        with self._changed:
            self._used.discard(ledger)
            is_closed = self._is_closed
            if not is_closed:
                if not ledger.is_open:
                    return
                self._idle[ledger] = None
                if len(self._idle) <= self._most:
                    return
                oldest, _ = self._idle.popitem(last=False)
                self._ending.add(oldest)
        if is_closed:
            ledger.close()
        else:
            self._end(oldest, oldest.rest)

    def close(self, ledger: Ledger) -> None:
        """End a ledger that nobody uses; idempotent."""
        self._take(ledger)
        try:
            ledger.close()
        finally:
            with self._changed:
                self._used.discard(ledger)

    def close_all(self, ledgers: Iterable[Ledger]) -> None:
        """End these and all that are kept; one that is used ends when it is not any more."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: not self._ending)
            every = dict.fromkeys((*ledgers, *self._idle))
            unused = [ledger for ledger in every if ledger not in self._used]
            self._idle.clear()
            self._ending.update(unused)
        for ledger in unused:
            self._end(ledger, ledger.close)

    def _end(self, ledger: Ledger, end: Callable[[], None]) -> None:
        try:
            end()
        finally:
            with self._changed:
                self._ending.discard(ledger)
                self._changed.notify_all()

    def _take(self, ledger: Ledger) -> None:
        """The calling thread owns it from here on: no other one may be ending its client."""
        with self._changed:
            self._changed.wait_for(lambda: ledger not in self._ending)
            self._idle.pop(ledger, None)
            self._used.add(ledger)


def read_ledgers(
    admin: Admin, keys: Sequence[LedgerKey], *, stable: bool = True
) -> dict[LedgerKey, Position]:
    """Return what the ledgers hold, without fencing anybody; a key without a commit is absent.

    An offset without our text beside it was set by an operator: it is the position, of no engine.

    ``stable=False`` reads past transactions that are under way, for a look at epochs before a
    ``fence`` has settled them.

    Raises:
        WireError: Something that is not ours was committed under one of the ids.
    """
    requests = [(key.transactional_id, (key.topic, key.partition)) for key in keys]
    found = {}
    for key, committed in zip(keys, admin.committed(requests, stable=stable), strict=True):
        if committed.offset >= 0:
            position = decode_position(committed.metadata)
            found[key] = position or Position(position=committed.offset, epoch=0)
    return found


def is_later_start(error: Exception) -> bool:
    """Return whether a ledger holds a later start than ours: no try of this one will do.

    Any other ``FencedError`` says no more than that our client has ended. A start that was killed
    may have asked for the id before it died, and its request arrives behind ours; or the broker was
    the first to end a transaction that took too long.
    """
    return isinstance(error, FencedError) and error.code == "LATER_START"


def newest_start(admin: Admin, keys: Sequence[LedgerKey]) -> Position | None:
    """Return what the latest start of any engine has written; None: nobody has started yet.

    A start writes its epoch to id 0 before any other (R22), so id 0 alone holds the largest. Where
    it holds none, it may be lost, because an operator has deleted its group or Kafka has dropped
    it: then all ledgers that exist are read.

    Args:
        keys: Of all marker partitions, that of partition 0 first.

    Raises:
        BrokerError, DeadlineExceededError: Not all could be read.
    """
    first = read_ledgers(admin, keys[:1], stable=False).get(keys[0])
    if (first is not None and first.epoch) or len(keys) == 1:
        return first
    # The coordinator of a group that does not exist need not be asked.
    groups = admin.groups()
    exist = [key for key in keys if key.transactional_id in groups]
    found = read_ledgers(admin, exist, stable=False).values()
    return max(found, key=attrgetter("epoch"), default=None)


@dataclass(slots=True)
class Claim:
    """A start of an engine: its epoch, and what each partition's ledger held before."""

    epoch: int = 0
    positions: dict[int, Position] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    # The epoch is larger than this, whatever the ledgers hold: they may be lost.
    above: int = 0
    ledgers: dict[int, Ledger] = field(default_factory=dict)


def claim(
    config: ServiceConfig,
    *,
    engine: str,
    partitions: int,
    takeover: bool = True,
    former: Collection[str] = (),
    begun: Claim | None = None,
    kept: tuple[OpenLedgers, Admin] | None = None,
) -> Claim:
    """Make this start of ``engine`` the latest on every marker partition, id 0 first (R22).

    For an engine that owns all partitions at once (Spark's driver). All that predecessors wrote is
    committed or aborted when it returns: append the TICKs after it (R17). Positions stay as they
    were found; batches of this start begin again, because its plans differ from an earlier one's.

    Args:
        takeover: False: refuse where another engine's epoch is the latest.
        former: Ids that this engine had before, which are no other engine's.
        begun: What an earlier call is filling, or has filled when it failed: this one goes on
            behind it, under the same epoch, unless another start came between. Nothing may have
            been planned under that epoch. None: begin.
        kept: Where the ledgers stay open that were claimed, and with whose client they ask. None:
            they are closed.

    Raises:
        OtherEngineError: ``takeover`` is False and another engine's epoch is the latest.
        FencedError: A later start of some engine was found on the way.
        BrokerError, DeadlineExceededError: A partition could not be claimed in time.
    """
    keys = [LedgerKey.of_markers(config, partition) for partition in range(partitions)]
    begun = Claim() if begun is None else begun
    often = {keys[0].transactional_id}
    own = partial(Admin, config, timeout_s=_CLAIM_S, kept_groups=often)
    with nullcontext(kept[1]) if kept else own() as admin:
        bounds = admin.log_bounds(config.marker_topic, range(partitions))
        if not takeover:
            # This goes before it fences anybody, and again where nobody can start meanwhile.
            require_own(newest_start(admin, keys), engine, *former)

        def choose(held: Position | None) -> int:
            """Of id 0, which is fenced and holds this: what starts now comes behind us."""
            newest = held if held is not None and held.epoch else newest_start(admin, keys)
            if not takeover:
                require_own(newest, engine, *former)
            return 1 if newest is None else newest.epoch + 1

        def take(key: LedgerKey) -> None:
            first, _ = bounds[key.partition]
            one = _claim_one(config, key, engine, begun, first, choose, admin)
            if one is not None and kept is not None:
                begun.ledgers[key.partition] = one
                kept[0].keep(one)
            elif one is not None:
                one.close()

        take(keys[0])
        left = [key for key in keys if key.partition not in begun.done]
        with ThreadPoolExecutor(_CLAIMING, thread_name_prefix="kafkamq-claim") as threads:
            try:
                for taken in [threads.submit(take, key) for key in left]:
                    taken.result()
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise
    return begun


def _claim_one(
    config: ServiceConfig,
    key: LedgerKey,
    engine: str,
    begun: Claim,
    first: int,
    choose: Callable[[Position | None], int],
    admin: Admin,
) -> Ledger | None:
    """Make one ledger this start's; chooses the epoch at id 0. None: it was claimed before."""
    deadline_s = time.monotonic() + _CLAIM_S
    while True:
        one = Ledger(config, key, engine=engine, epoch=begun.epoch, admin=admin)
        try:
            if key.partition:
                one.open(timeout_s=_CLAIM_S)
            else:
                one.fence(timeout_s=_CLAIM_S)
                if begun.done and one.is_last(engine, begun.epoch):
                    one.close()
                    return None
                begun.epoch = max(choose(one.last), begun.above + 1)
                begun.done.clear()
            if one.last is not None:
                begun.positions[key.partition] = one.last
            position = first if one.last is None else one.last.position
            one.adopt(begun.epoch, position, timeout_s=_CLAIM_S)
            begun.done.add(key.partition)
            return one
        except (FencedError, TransactionAbortedError) as error:
            one.close()
            if is_later_start(error) or time.monotonic() > deadline_s:
                raise
            # Engines that start at one moment would fence each other forever.
            time.sleep(random.uniform(0.02, 0.3))
        except BaseException:
            one.close()
            raise


class OtherEngineError(ConfigError):
    """Another engine's epoch is the latest, and ``takeover`` is False."""


def require_own(newest: Position | None, *engines: str) -> None:
    """Refuse a start behind another engine's (``takeover`` is False).

    Raises:
        OtherEngineError: Another engine's epoch is the latest.
    """
    if newest is not None and newest.engine not in ("", *engines):
        raise OtherEngineError(
            f"takeover is False: engine {newest.engine!r} (epoch {newest.epoch}) started last; "
            "stop it, and start with takeover, to move the namespace to this engine"
        )
