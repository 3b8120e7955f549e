"""Reads one queue's messages off the shared topic: filter, rebalances, commits, lost positions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from itertools import compress, groupby, repeat
from time import monotonic
from typing import cast

from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.errors import BrokerError, KafkaMQError
from kafkamq.markers.data_loss import report_loss
from kafkamq.markers.membership import Membership, max_idle_ms, open_member
from kafkamq.markers.message import MarkersAcknowledger, MarkersMessage, messages_of
from kafkamq.markers.offset_commits import OffsetCommits
from kafkamq.markers.positions import Positions
from kafkamq.markers.rules.fetch_buffer import MAX_AGE_MS, FetchBuffer, Run
from kafkamq.queue.names import group_of, group_of_workers
from kafkamq.queue.wire.headers import ID
from kafkamq.transport.clock import monotonic_ms
from kafkamq.transport.errors import is_retriable
from kafkamq.transport.group_consumer import COMMITTED
from kafkamq.transport.offset_commits import Commit
from kafkamq.transport.record import LOG_APPEND_TIME, Place, Record, take_only

__all__ = ["Membership", "MessageReader", "group_of"]

MIN_POLL = 100  # records of one consume() ...
MAX_POLL = 10_000  # ... and at most: where few or none of them are our own
CLOSE_TIMEOUT_S = 10.0
IDLE_MS = 1000  # unpolled for so long, a member may hold up its group
PAUSE_MS = MAX_AGE_MS  # what nobody wanted for so long is read again anyway
_ASK_AGAIN_S = 0.1
_LOOK_AGAIN_S = 5.0  # after a look at a former owner's STARTs that failed
_LOOK_FOR_S = 15.0  # of owning a partition; there may be more of them than can be read in time
_WAIT_S = 0.25  # one blocking wait; between two, errors are looked at
# In place of the position of a partition that is to be read from another place.
_UNKNOWN = -1  # from what is committed
_FROM_START = -10  # from its start, whatever is committed
_log = logging.getLogger(__name__)


class MessageReader:
    """Owns the Kafka consumer of one worker and fills its fetch buffer; the caller serialises."""

    def __init__(
        self,
        config: ServiceConfig,
        queue: QueueConfig,
        buffer: FetchBuffer[MarkersMessage],
        member: Membership,
        ack_writer: MarkersAcknowledger,
    ) -> None:
        """``ack_writer`` is for the messages."""
        self._config = config
        self._queue = queue
        self._buffer = buffer
        self._member = member
        self._ack_writer = ack_writer
        self._topic = config.message_topic
        self._key = queue.queue_id.encode()
        self._prefix = self._key + b"\0"
        self._unplaced: dict[int, int] = {}  # partition -> the position that is not in the log
        self._place_s = 0.0  # monotonic: nobody is asked before
        self._gained_s: dict[int, float] = {}  # partition -> when it was assigned, monotonic
        self._polled_per_own = 1.0  # records of the last poll for each message of our own
        self._fresh: set[int] = set()  # assigned, and not looked at for a former owner's STARTs
        self._look_s = 0.0  # monotonic: nobody looks at them before
        self._is_paused = False
        self._polled_ms = self._wanted_ms = monotonic_ms()  # the last poll; ... for messages
        self._commits = OffsetCommits(self._topic, queue, buffer, self._note)
        self.positions = Positions(config, group_of_workers(config, queue), queue.queue_id)
        self._asked: Future[dict[Place, int]] | None = None  # what is committed
        self._failure: KafkaMQError | None = None  # of a poll whose caller had no use for it
        # Whether a transaction is under way, which alone decides what is committed.
        self.is_in_transaction: Callable[[], bool] = lambda: False
        self._connect()
        self.max_idle_ms = max_idle_ms(self._group.settings)

    def _connect(self) -> None:
        self._group = open_member(self._config, self._queue, self)
        self._group.join()

    # Reading.

    def poll(self, wanted: int, timeout_s: float) -> None:
        """Poll once and keep what is the queue's own; returns early when something came.

        Args:
            wanted: Own messages that can be used now: bounds what is polled (back-pressure).
            timeout_s: Longest wait, cut to a quarter of a second.

        Raises:
            BrokerError: What no waiting can mend.
            DataLossError: A position lies outside the log.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if self.is_away:
            self._group.join()
        self._resume()
        usable = min(wanted, self._queue.max_in_flight)
        size = max(MIN_POLL, min(MAX_POLL, round(usable * self._polled_per_own)))
        self._polled_ms = self._wanted_ms = polled_ms = monotonic_ms()
        try:
            records = self._group.poll(size, min(timeout_s, _WAIT_S))
        except BrokerError as error:
            if not error.is_fatal or self._group.watch.has_ended:
                raise
            self.rebuild()
            return
        if records:
            self._take(records, polled_ms)
        if self._group.ends:
            self._see_ends()
        if self._group.outside:
            self._see_outside()
        if self._unplaced:
            self._place()
        self._commit_skipped()

    def poll_ahead(self, wanted: int) -> None:
        """Poll what the next batch needs, without waiting; ``poll`` raises what goes wrong."""
        if self._failure is None and len(self._buffer) < wanted:
            try:
                self.poll(wanted, 0.0)
            except KafkaMQError as error:
                self._failure = error

    def _take(self, records: Sequence[Record], polled_ms: int) -> None:
        runs: list[Run[MarkersMessage]] = []
        first: dict[int, int] = {}
        following: dict[int, int] = {}
        end = own = 0
        for partition, group in groupby(map(Record.partition, records)):  # they come in runs
            assert partition is not None, "records have a partition"
            begin, end = end, end + len(list(group))
            if partition in self._unplaced or partition in self._buffer.held:
                continue  # read on from a place that is given up; soon it is read again
            first.setdefault(partition, _offset_of(records[begin]))
            following[partition] = _offset_of(records[end - 1]) + 1
            run = self._run(partition, records[begin:end], polled_ms)
            if run.messages:
                runs.append(run)
                own += len(run.messages)
        if self._fresh:
            self._look_behind(runs)
        self._buffer.polled(
            runs,
            first_offsets=first,
            next_offsets=following,
            count=len(records),
        )
        # Else nothing is known: all of it is read again, or it is one record, whoever's.
        if following and len(records) > 1:
            self._polled_per_own = len(records) / own if own else MAX_POLL

    def _look_behind(self, runs: Iterable[Run[MarkersMessage]]) -> None:
        """What a former owner STARTed and did not commit is a tracker's, or soon may be (R5)."""
        first = {run.partition: run for run in reversed(list(runs)) if run.partition in self._fresh}
        old = {number: run.offsets[0] for number, run in first.items() if self._may_be_begun(run)}
        if old:
            if monotonic() < self._look_s:  # a look failed just now; these may be STARTed
                return
            times = [first[number].messages[0]._record.timestamp() for number in old]
            since_ms = min(time_ms if kind == LOG_APPEND_TIME else 0 for kind, time_ms in times)
            found = self.positions.overtaken(old, since_ms)
            if found.starts or found.redelivered:
                _log.info(
                    "a former owner had STARTed messages: what it cannot finish comes again",
                    extra={
                        "queue": self._queue.queue_id,
                        "started": len(found.starts),
                        "redelivered": len(found.redelivered),
                    },
                )
                self._member._overtaken(found)
            if not found.is_whole:
                self._look_s = monotonic() + _LOOK_AGAIN_S
                since_s = monotonic() - _LOOK_FOR_S
                self._fresh -= {number for number in old if self._gained_s[number] < since_s}
                return
        self._fresh.difference_update(first)  # last: a look that is broken off is repeated

    def _may_be_begun(self, run: Run[MarkersMessage]) -> bool:
        """Whether a former owner may have STARTed its first message, and ours may come too late."""
        kind, time_ms = run.messages[0]._record.timestamp()
        now_ms = self._member._broker_ms()
        if kind != LOG_APPEND_TIME or now_ms is None:
            return True
        owned_ms = (monotonic() - self._gained_s.get(run.partition, monotonic())) * 1000
        age_ms = now_ms - time_ms
        return age_ms >= owned_ms and age_ms + MAX_AGE_MS >= self._queue.redelivery_timeout_ms

    def _run(
        self, partition: int, records: Sequence[Record], polled_ms: int
    ) -> Run[MarkersMessage]:
        """The queue's own of these."""
        if self._queue.topic:
            return self._run_of_topic(partition, records, polled_ms)
        keys = list(map(Record.key, records))
        if keys.count(self._key) < len(keys):
            own = set(filter(self._is_own, set(keys)))  # few: most records have the key of a queue
            records = list(compress(records, map(own.__contains__, keys)))
        offsets = list(map(_offset_of, records))
        headers, others = take_only(ID, records)
        messages = list(
            map(MarkersMessage, repeat(self._ack_writer), records, offsets, headers),
        )
        special = [messages[at] for at in others]
        for message in special:
            message.read()
        is_plain = all(message._count == 1 and not message._expiry_ms for message in special)
        return Run(partition, offsets, messages, polled_ms, is_plain)

    def _run_of_topic(
        self, partition: int, records: Sequence[Record], polled_ms: int
    ) -> Run[MarkersMessage]:
        messages = messages_of(self._ack_writer, records, self._member._stamp())
        is_plain = all(message._count == 1 and not message._expiry_ms for message in messages)
        return Run(partition, [each.offset for each in messages], messages, polled_ms, is_plain)

    def _is_own(self, key: bytes | None) -> bool:
        return key == self._key or (key is not None and key.startswith(self._prefix))

    def _see_ends(self) -> None:
        """Pass what no record is polled of: control records of transactions.

        A position in front of them would be outside of the log when all of it is deleted.
        """
        polled, held = self._buffer.positions(), self._buffer.held
        ends = {
            number: end
            for (_, number), end in self._group.ends.items()
            if number not in self._unplaced and number not in held and end > polled.get(number, end)
        }
        self._buffer.polled([], first_offsets={}, next_offsets=ends, count=len(ends))

    def _see_outside(self) -> None:
        """Positions that are not in the log are found again."""
        for (_, partition), offset in self._group.outside.items():
            self._unplaced.setdefault(partition, _UNKNOWN if offset < 0 else offset)

    def rebuild(self) -> None:
        """Make a new client after a fatal error; it reads from what is committed."""
        self._buffer.revoked(list(self._buffer.partitions()))
        self._unplaced.clear()
        self._commits.give_up()
        self._asked = None
        self._gained_s.clear()
        old, commits = self._group, self._commits
        self._connect()
        commits.finish(old.close, CLOSE_TIMEOUT_S)
        self._commits = OffsetCommits(self._topic, self._queue, self._buffer, self._note)

    # Positions.

    def _place(self) -> None:
        """Partitions whose position is not in the log: a new group's, or data was lost."""
        if self.is_in_transaction():  # given up, perhaps before its offsets were sent: ask after it
            return
        for partition in self._unplaced.keys() - self.partitions:  # revoked meanwhile
            del self._unplaced[partition]
        if not self._unplaced or monotonic() < self._place_s:
            return
        try:
            committed = self._group.committed(self._places(self._unplaced))
        except KafkaMQError as error:
            self._ask_later(error)
            return
        kept = self._kept([number for (_, number), at in committed.items() if at < 0])
        new: dict[int, int] = {}
        for (_, number), offset in committed.items():
            if not self._place_one(number, offset, kept, new):
                break
        if new and self._commits.commit_now(self._group.client, new):
            for number, start in new.items():
                self._buffer.placed(number, start)
                self._read_from(number, start)

    def _ask_later(self, error: KafkaMQError) -> None:
        """The group moves on, or a broker is not ready: the next poll asks again.

        What is not revoked stays ours without being assigned again (cooperative), and Kafka does
        not ask twice for its position.
        """
        if not is_retriable(error):
            raise error
        self._place_s = monotonic() + _ASK_AGAIN_S
        _log.info("where to read is not known yet", extra={"error": str(error)})

    def _place_one(
        self, partition: int, committed: int, kept: Mapping[int, int], new: dict[int, int]
    ) -> bool:
        """Read a partition from where it is to be read; False: ask again later.

        What is to be committed first is added to ``new``.
        """
        position = self._unplaced[partition]
        try:
            low, high = self._group.bounds((self._topic, partition))
        except KafkaMQError as error:
            self._unplaced[partition] = self._unplaced.pop(partition)  # the others come first then
            self._ask_later(error)
            return False
        if committed < 0 <= position and self._member._is_topic_another():
            return False  # it was deleted, and what the group had committed with it
        is_new = committed < 0 or position == _FROM_START
        if position == _FROM_START:
            start = low
        elif is_new:
            start = kept.get(partition, low)  # its start, unless Kafka dropped the group's offsets
        else:
            start = position if position >= 0 else committed
        if not low <= start <= high:  # else a former owner has committed meanwhile
            report_loss(self._config, self._queue, partition, start, low, high)
            # Behind the log's end: at most once, what is there may have been handed out.
            start = high if start > high and self._queue.is_at_most_once else low
            self._buffer.skipped_to(partition, start)
        elif is_new:
            new[partition] = start
            return True
        self._read_from(partition, start)
        return True

    def _read_from(self, partition: int, start: int) -> None:
        self._group.place(self._at({partition: start}), others=self._at(self._buffer.positions()))
        self._unplaced.pop(partition, None)

    def _kept(self, partitions: Sequence[int]) -> dict[int, int]:
        """Where the ledger has the group in partitions for which Kafka has nothing.

        STARTs behind these places are told to the member.
        """
        wanted = [number for number in partitions if self._unplaced[number] != _FROM_START]
        if not wanted:
            return {}
        found = self.positions.find(wanted, self._member._topic_id())
        if found:
            _log.warning(
                "the group's offsets are gone (offsets.retention.minutes); the ledger has them",
                extra={"queue": self._queue.queue_id, "partitions": sorted(found)},
            )
            self._member._answered(self.positions.started_since(found))
        return {number: position.offset for number, position in found.items()}

    def _note(self, offsets: Mapping[int, int]) -> None:
        self.positions.note(offsets, self._member._topic_id())

    def _note_committed(self) -> None:
        """The ledger is to have every partition's position, also where nothing is committed again.

        A queue may be empty for as long as this worker runs, and longer.
        """
        asked, self._asked = self._asked, None
        numbers = [number for number in self._gained_s if not self.positions.is_known(number)]
        if asked is None:
            if numbers and not self._commits.is_pending:
                group, wanted = self._group, self._places(numbers)
                self._asked = self._commits.ask(lambda: group.committed(wanted))
        elif not asked.done():
            self._asked = asked
        elif asked.exception() is None:
            found = {number: at for (_, number), at in asked.result().items() if at >= 0}
            self._note({number: found[number] for number in numbers if number in found})

    @property
    def partitions(self) -> set[int]:
        """Those that are assigned."""
        return {number for _, number in self._group.places}

    def _places(self, numbers: Iterable[int]) -> list[Place]:
        return [(self._topic, number) for number in numbers]

    def _at(self, offsets: Mapping[int, int]) -> dict[Place, int]:
        return {(self._topic, number): offset for number, offset in offsets.items()}

    def seek_back(self, partitions: Iterable[int] | None = None) -> None:
        """Read again from the committed offsets (R5); None: all that are not held back."""
        held = set(self._buffer.held)
        offsets = self._buffer.rewind(partitions)
        self._seek(offsets)
        self._resume_these(held.intersection(offsets))

    def hold(self, late: Mapping[int, int]) -> None:
        """Read no more of these partitions, whose STARTs are late from these offsets on."""
        self._buffer.hold(late)
        self._group.pause(self._places(late))

    def go_on(self, partitions: Iterable[int]) -> None:
        """Read on in those of the partitions that were held back."""
        offsets = self._buffer.go_on(partitions)
        self._seek(offsets)
        self._resume_these(offsets)

    def _resume_these(self, partitions: Collection[int]) -> None:
        if partitions and not self._is_paused:  # else with all others
            self._group.resume(self._places(partitions))

    def _seek(self, offsets: Mapping[int, int]) -> None:
        refused = self._group.seek(self._at(offsets))
        self._unplaced.update({number: offset for (_, number), offset in refused.items()})

    def reread_topic(self, gained_before_s: float) -> None:
        """The topic is another one: positions in the former one are not in this one (R13).

        What was committed in it since then may be such a position, so it is read from its start;
        but not where another member has, who knew.

        Args:
            gained_before_s: Partitions that are ours since then (monotonic) nobody has read again.
        """
        assigned = self.partitions
        _log.warning("the topic was recreated", extra={"topic": self._topic})
        self._is_paused = self._is_paused or bool(self._buffer.held)
        self._buffer.revoked(self._buffer.partitions())
        for partition in assigned:
            was_ours = self._gained_s.get(partition, 0.0) < gained_before_s
            self._unplaced[partition] = _FROM_START if was_ours else _UNKNOWN

    def read_again(self) -> None:
        """``ask_again`` of all: a call was broken off, perhaps with records in its hands."""
        assigned = self.partitions
        self._is_paused = self._is_paused or bool(self._buffer.held)
        self._buffer.revoked(assigned | set(self._buffer.partitions()))
        self._commits.give_up()
        self._unplaced.update(dict.fromkeys(assigned, _UNKNOWN))

    def ask_again(self, partitions: Iterable[int]) -> None:
        """Read again from what the group has committed, which only it knows."""
        for partition in set(partitions).intersection(self._buffer.partitions()):  # not the lost
            self._buffer.revoked([partition])
            self._unplaced[partition] = _UNKNOWN

    # Commits.

    def commit(self, timeout_s: float) -> Commit:
        """Commit up to the last STARTs (R5), other queues' messages too; call again while pending.

        Raises:
            BrokerError: It failed, and would fail again.
        """
        outcome = self._commits.commit(self._group.client, timeout_s)
        if outcome is Commit.PENDING and (timeout_s > 0 or self.is_skipping):
            self.tend()  # the group may wait for us
        return outcome

    def give_up_commit(self) -> None:
        """Wait no more for what is being committed; what comes next is committed behind it."""
        self._commits.give_up()

    def committed(self, offsets: dict[int, int], count: int) -> None:
        """These offsets are committed, which are those of ``count`` polled records."""
        self._commits.committed(offsets, count)

    @property
    def is_skipping(self) -> bool:
        """Whether a commit is under way that no batch asked for; ``tend`` sees its end."""
        return self._commits.is_skipping

    def _commit_skipped(self) -> None:
        self._commits.see_skipped()
        self._note_committed()
        if not self.is_in_transaction():
            self._commits.skip(self._group.client)

    # Membership.

    def membership(self) -> bytes:
        """What fences this member's transactions once the group has gone on without it."""
        return self._group.membership()

    @property
    def is_away(self) -> bool:
        """Whether it has left the group."""
        return not self._group.is_joined

    @property
    def is_idle(self) -> bool:
        """Whether nobody has polled for so long that a rebalance may be waiting for it."""
        return monotonic_ms() - self._polled_ms >= IDLE_MS

    def leave(self) -> None:
        """Leave the group: others get the partitions. The next ``poll`` joins it again."""
        self._group.leave()  # ``tend`` serves what follows from it

    def tend(self) -> None:
        """Stay a member while nothing is wanted: poll.

        That takes a record each time, and in the end all partitions are paused. Not at once: a
        pause throws away what was fetched ahead, which would be fetched again for every batch.
        """
        self._polled_ms = monotonic_ms()
        if self._polled_ms - self._wanted_ms >= PAUSE_MS:
            self._is_paused = True
            self._group.pause(self._group.places)
        records = self._group.serve()
        if records:  # of a partition that was assigned just now; a look at it would wait
            fresh = self._fresh.intersection(map(Record.partition, records))
            self._buffer.revoked(fresh)
            for partition in fresh:
                self._unplaced.setdefault(partition, _UNKNOWN)
            self._take(records, self._polled_ms)
        self._commit_skipped()  # asynchronous: nothing here may wait

    def _resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            held = self._buffer.held
            self._group.resume(place for place in self._group.places if place[1] not in held)

    def assigned(self, places: Sequence[Place]) -> Mapping[Place, int]:
        """Told by the group consumer, inside its calls: read on where the group is."""
        self._gained_s.update((number, monotonic()) for _, number in places)
        if not self._queue.exactly_once and not self._queue.is_at_most_once:
            self._fresh.update(number for _, number in places)
        self._member._gained([number for _, number in places])
        return dict.fromkeys(places, COMMITTED)

    def revoked(self, places: Sequence[Place], *, is_lost: bool) -> None:
        """Told as ``assigned`` is: these are another member's soon, or already."""
        numbers = [number for _, number in places]
        self.positions.forget(numbers)
        self._asked = None  # or its answer would be noted as if they were never another's
        for number in numbers:
            self._unplaced.pop(number, None)
            self._gained_s.pop(number, None)
            self._fresh.discard(number)
            self._commits.forget(number)  # it may come back with another's position
        self._buffer.revoked(numbers)
        self._member._lost(numbers)

    def close(self) -> None:
        """Leave the group; what Kafka keeps waiting ends behind us."""
        if not self._commits.finish(self._group.close, CLOSE_TIMEOUT_S):
            _log.warning(
                "leaving the group takes long and goes on", extra={"queue": self._queue.queue_id}
            )


# In C, as there are many: of a consumed record it is never None.
_offset_of: Callable[[Record], int] = cast("Callable[[Record], int]", Record.offset)
