"""Reads single records of a topic again, by their offsets (R18)."""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, DeadlineExceededError, KafkaMQError
from kafkamq.transport.errors import is_retriable
from kafkamq.transport.follower import READER_GROUP, Follower
from kafkamq.transport.patience import Answers, Patience
from kafkamq.transport.record import Place, Record

MAX_READ_THROUGH = 280
"""Records between two wanted ones that are read and dropped; a wider gap is sought (R18)."""

MAX_READ = 1000
"""Records that are taken at once."""

_FETCH_BYTES = 65_536  # of a partition; librdkafka's 1 MiB, decompressed, may be 100,000 records
END_GRACE_S = 3.0  # where nothing is lost by taking what is not there yet for gone
_WAIT_S = 0.5  # one wait for records
_NONE = 1 << 63  # an offset that no record has


class RecordReader:
    """A read_committed reader of one topic; one owner thread."""

    def __init__(self, config: ServiceConfig, topic: str, *, group_id: str = READER_GROUP) -> None:
        self._config = config
        self._topic = topic
        self._group_id = group_id
        self._follower: Follower | None = None
        self._patience = Patience(END_GRACE_S)
        self._answers = Answers()  # of partitions

    def read(self, partition: int, offset: int, *, timeout_s: float = 30.0) -> Record | None:
        """The record at one offset, or None; also when it lies beyond the log's end."""
        wanted = {partition: (offset,)}
        for _, found in self.sweep(wanted, timeout_s=timeout_s, patience=self._patience):
            return found[offset]
        return None

    def stream(
        self, partition: int, offsets: Sequence[int], *, timeout_s: float = 60.0
    ) -> Iterator[tuple[int, Record | None]]:
        """Offset and record at each of ``offsets`` (ascending, each once); see ``sweep``."""
        for _, found in self.sweep({partition: offsets}, timeout_s=timeout_s):
            yield from found.items()

    def sweep(
        self,
        wanted: Mapping[int, Sequence[int]],
        *,
        timeout_s: float = 60.0,
        patience: Patience | None = None,
        left: dict[int, int] | None = None,
    ) -> Iterator[tuple[int, dict[int, Record | None]]]:
        """Partition, and records by offset, as they come; all partitions at once.

        Those of a partition (ascending, without repetition) come in their order.
        An offset without a record (deleted, or aborted) comes with None. One beyond the log's end
        is waited for, because the caller has seen it: after a change of leaders the end may step
        back for a while. When ``patience`` is over it comes with None.

        With ``left`` nothing is waited for. What lies beyond a log's end for now does not come, nor
        do the last ones of a partition that gives no answer: ``left`` has the first of these.
        """
        scans = {number: _Scan(offsets) for number, offsets in wanted.items() if offsets}
        if left is not None:
            for number in [each for each in scans if self._answers.is_resting(each)]:
                left[number] = scans.pop(number).target
        if not scans:
            return
        deadline_s = time.monotonic() + timeout_s
        follower = self._connected()
        try:
            follower.place({self._place(number): scan.target for number, scan in scans.items()})
            while scans:
                yield from self._step(follower, scans, patience, left)
                # Each seek takes its time, all together much.
                if scans and time.monotonic() > deadline_s:
                    if left is None:
                        raise follower.deadline(timeout_s)
                    left |= {each: scan.target for each, scan in scans.items()}
                    return
        except BrokerError:
            self.close()
            raise
        finally:  # otherwise it would go on fetching what nobody wants
            follower.drop(map(self._place, scans))

    def _step(
        self,
        follower: Follower,
        scans: dict[int, _Scan],
        patience: Patience | None,
        left: dict[int, int] | None,
    ) -> Iterator[tuple[int, dict[int, Record | None]]]:
        """What one poll gives; scans that are over go."""
        for number, records in groupby(follower.poll(MAX_READ, _WAIT_S), Record.partition):
            if number not in scans:
                continue
            assert number is not None, "records have a partition"
            scan, asked_s = scans[number], scans[number].answered_s
            found = scan.take(records)
            self._answers.came(number, time.monotonic() - asked_s)
            if patience is not None:
                patience.found(self._place(number), scan.position)
            if found:
                yield number, found
        for number, scan in list(scans.items()):
            if found := self._passed(follower, number, scan, patience, left is None):
                yield number, found
            if left is not None and scan.remains and self._is_over(number, scan):
                left[number] = scan.target
            elif scan.remains:
                continue
            del scans[number]
            follower.drop([self._place(number)])

    def _place(self, partition: int) -> Place:
        return self._topic, partition

    def _is_over(self, partition: int, scan: _Scan) -> bool:
        """Whether what remains is not to be had now."""
        return scan.is_at_end or self._answers.is_given_up(partition, scan.answered_s)

    def _passed(
        self,
        follower: Follower,
        partition: int,
        scan: _Scan,
        patience: Patience | None,
        is_sure: bool,
    ) -> dict[int, Record | None]:
        """The wanted offsets that are known now to have no record; goes on from there.

        ``is_sure``: Raise where nobody can tell; else it is no answer.
        """
        place = self._place(partition)
        passed: list[int] = []
        if place in follower.outside:  # deleted, or a leader that does not know the end yet
            try:
                first, end = follower.bounds(place)
            except (BrokerError, DeadlineExceededError) as error:
                if is_sure or not is_retriable(error):
                    raise
                return {}
            known = max(first, min(end, scan.target))  # which it may have again by now
            follower.place({place: known})
            passed += scan.pass_to(known, is_end=end <= scan.target)
        elif place in follower.ends:
            passed += scan.pass_to(max(follower.ends[place], scan.behind), is_end=True)
        if not scan.is_at_end:
            if scan.is_far:
                follower.place({place: scan.target})
        elif patience is not None:
            over = patience.over_from(place, scan.target, scan.position)
            passed += scan.pass_from(over)
        return dict.fromkeys(passed)

    def _connected(self) -> Follower:
        if self._follower is None:
            self._follower = Follower(
                self._config,
                f"reading {self._topic}",
                group_id=self._group_id,
                enable_partition_eof=True,
                queued_min_messages=2 * MAX_READ,
                queued_max_messages_kbytes=32_768,
                fetch_message_max_bytes=_FETCH_BYTES,
            )
        return self._follower

    def prepare(self, partition: int = 0, *, timeout_s: float = 5.0) -> None:
        """Connect, so that the first ``stream`` need not; what fails is left to that one."""
        with contextlib.suppress(KafkaMQError):
            self._connected().bounds((self._topic, partition), timeout_s=timeout_s)

    def close(self) -> None:
        follower, self._follower = self._follower, None
        if follower is not None:
            follower.close()


class _Scan:
    """The wanted offsets of one stream against what the log gives."""

    def __init__(self, offsets: Sequence[int]) -> None:
        self._offsets = offsets
        self._at = 0  # the first one that is not known
        self.position = self.target  # the log is known up to here
        self.behind = 0  # the last record that was read
        self.is_at_end = False  # the log ends before the target
        self.answered_s = time.monotonic()  # or when it was asked first

    @property
    def target(self) -> int:
        """The next offset that is wanted."""
        return self._offsets[self._at] if self.remains else _NONE

    @property
    def remains(self) -> bool:
        """Whether more is wanted."""
        return self._at < len(self._offsets)

    @property
    def is_far(self) -> bool:
        """Whether seeking the target is cheaper than reading up to it."""
        return self.remains and self.target - self.position > MAX_READ_THROUGH

    def take(self, records: Iterable[Record]) -> dict[int, Record | None]:
        """What is wanted of these records; they also show which offsets before them are gone."""
        records = list(records)
        offsets = [each.offset() or 0 for each in records]  # None: of events alone
        if not offsets:
            return {}
        self.is_at_end = False
        self.answered_s = time.monotonic()
        self.position = self.behind = offsets[-1] + 1
        wanted = self._wanted_to(self.position)
        if wanted == offsets:  # most often: nothing between them, and nothing gone
            return dict(zip(wanted, records, strict=True))
        there = dict(zip(offsets, records, strict=True))
        return {offset: there.get(offset) for offset in wanted}

    def _wanted_to(self, position: int) -> list[int]:
        """Take what is wanted before ``position``."""
        begin = self._at
        self._at = bisect_left(self._offsets, position, begin)
        return list(self._offsets[begin : self._at])

    def pass_from(self, over: int) -> list[int]:
        """Nothing wanted from there on is in the log, nor will it be."""
        kept = bisect_left(self._offsets, over, self._at)
        passed = list(self._offsets[kept:])
        if passed:
            self._offsets = self._offsets[:kept]
        self.is_at_end = self.remains
        return passed

    def pass_to(self, position: int, *, is_end: bool) -> list[int]:
        """The log has nothing wanted before ``position``, which may be its end."""
        self.answered_s = time.monotonic()
        self.position = position
        passed = self._wanted_to(position)
        self.is_at_end = is_end and self.remains
        return passed
