"""The topic of actions is followed from its beginning, and written one record at a time.

It is made at the first action, and keeps everything. Every process folds it alike, so the state of
jobs is what its records say: a process that starts knows what another one was doing.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import asdict
from typing import Any

from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError, KafkaMQError
from kafkamq.queue.names import actions_topic
from kafkamq.queue.topics import log_settings
from kafkamq.transport.admin import Admin
from kafkamq.transport.errors import broker_error, is_fatal
from kafkamq.transport.follower import Follower
from kafkamq.transport.producer import IdempotentProducer
from kafkamq.transport.settings import producer_settings
from kafkamq.transport.transactions import NewRecord
from kafkamq.web.jobs import MAX_RECORD_BYTES, Action, Job, Trail, decode
from kafkamq.web.lookups import page_of

PAGE_ENTRIES = 100
PAGE_JOBS = 50
_LOOK_S = 5.0
_LOOK_AGAIN_S = 60.0
_RETRY_S = 5.0
_WRITE_S = 30.0
SEEN_S = 5.0
_log = logging.getLogger(__name__)


class Actions:
    """It follows the log of a namespace's actions; ``start`` and ``close`` are its owner's.

    One thread reads. Everybody else may look and write: one lock guards what is folded, another
    one the producer.
    """

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config
        self.topic = actions_topic(config)
        self.error = ""
        # The job that is to run; empty: there is none, or nobody knows yet.
        self.next_id = ""
        self.turn_error = ""
        self.exists = False
        self._changed = threading.Condition()
        self._trail = Trail()
        self._topic_id = b""
        self._next_offset = 0
        self._writing = threading.Lock()
        self._producer: IdempotentProducer | None = None
        self._stopping = threading.Event()
        self._look = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kafkamq-web-actions", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._look.set()
        if self._thread.ident is not None:
            self._thread.join(SEEN_S)
        with self._writing:
            if self._producer is not None:
                self._producer.close()

    # ---- reading

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._follow_until_it_fails()

    def _follow_until_it_fails(self) -> None:
        try:
            self._follow()
        except KafkaMQError as error:
            _log.warning("actions cannot be read", extra={"error": str(error)})
            self.error = str(error)
            self._stopping.wait(_RETRY_S)

    def _look_up(self) -> bytes | None:
        with Admin(self.config, timeout_s=15.0) as admin:
            found = admin.topics([self.topic]).get(self.topic)
        self.exists, self.error = found is not None, ""
        return None if found is None else found.topic_id

    def _follow(self) -> None:
        """Read until the topic is another one; where this was broken off, the next call goes on."""
        topic_id = self._look_up()
        if topic_id is None:
            self._look.wait(_LOOK_S)
            self._look.clear()
            return
        if topic_id != self._topic_id:
            with self._changed:
                self._trail, self._topic_id, self._next_offset = Trail(), topic_id, 0
                self.next_id = ""
        place = (self.topic, 0)
        follower = Follower(
            self.config,
            f"reading {self.topic}",
            ignores=lambda error: not is_fatal(error),
            enable_partition_eof=True,
            fetch_wait_max_ms=200,
        )
        try:
            low, _ = follower.bounds(place)
            follower.place({place: max(low, self._next_offset)})
            look_s = time.monotonic() + _LOOK_AGAIN_S
            while not self._stopping.is_set():
                if time.monotonic() > look_s:
                    if self._look_up() != topic_id:
                        return
                    look_s = time.monotonic() + _LOOK_AGAIN_S
                records = follower.poll(5000, 0.25)
                follower.require_inside()
                if not records and not follower.ends:
                    continue
                with self._changed:
                    for record in records:
                        self._apply(record)
                    # What it says of the end may be older than the records.
                    self._next_offset = max(self._next_offset, follower.ends.get(place, 0))
                    if follower.ends or self.next_id:
                        job = self._trail.next_job()
                        self.next_id = "" if job is None else job.id
                    self._changed.notify_all()
        finally:
            follower.close()

    def _apply(self, record: Any) -> None:
        offset = record.offset() or 0
        self._next_offset = offset + 1
        action = decode(record.value(), at_ms=record.timestamp()[1], offset=offset)
        if action is not None:
            self._trail.apply(action)

    def wait(self, timeout_s: float) -> None:
        """Return when something has changed, or the time is over."""
        with self._changed:
            self._changed.wait(timeout_s)

    def job(self, id: str) -> Job | None:
        with self._changed:
            return self._trail.jobs.get(id)

    @property
    def version(self) -> int:
        """Return a number that is another one when jobs or entries may have changed."""
        return self._next_offset

    @property
    def open_jobs(self) -> int:
        with self._changed:
            return sum(not job.is_over for job in self._trail.jobs.values())

    def jobs(self, page: int = 1, written: int = -1) -> dict[str, Any]:
        """Return a page of jobs: those that have not ended, then the others, the newest first.

        ``written``: the offset of an action, of which the page says whether it is read.
        """
        with self._changed:
            jobs = [*reversed(self._trail.jobs.values())]
            jobs.sort(key=lambda job: job.is_over)
            shown, paging = page_of(jobs, page, PAGE_JOBS)
            made = [job.as_dict() for job in shown]
            is_unread = self._next_offset <= written
        return paging | {
            "jobs": made,
            "unread": written if is_unread else -1,
            "error": self.error,
            "turn_error": self.turn_error,
            "topic": self.topic,
        }

    def entries(self, before: int = 0) -> dict[str, Any]:
        """Return what was done, the newest first, and the offset to go on before."""
        with self._changed:
            found = [each for each in self._trail.entries if not before or each.offset < before]
        shown = found[-PAGE_ENTRIES:][::-1]
        return {
            "actions": [
                asdict(each)
                | {"more": {n: value for n, value in each.more.items() if value not in ("", 0, {})}}
                for each in shown
            ],
            "before": shown[-1].offset if len(found) > PAGE_ENTRIES else 0,
            "error": self.error,
            "topic": self.topic,
        }

    # ---- writing

    def form(self, action: Action) -> NewRecord:
        """Return the record of an action, for a transaction."""
        return self.topic, 0, action.id.encode(), action.encode(), ()

    def wait_for(self, offset: int) -> bool:
        """Return whether this process has read a record, maybe some seconds later."""
        with self._changed:
            return self._changed.wait_for(lambda: self._next_offset > offset, SEEN_S)

    def write(self, action: Action) -> int:
        """Write an action, and return its offset.

        Raises:
            ConfigError: It is too large.
            BrokerError, DeadlineExceededError: It may not be written, or not in time.
        """
        topic, partition, key, value, _ = self.form(action)
        if len(value or b"") > MAX_RECORD_BYTES:
            raise ConfigError(f"the action has {len(value or b''):,} bytes: {MAX_RECORD_BYTES:,}")
        if not self.exists:
            with Admin(self.config) as admin:
                settings = {**log_settings(admin, -1), "retention.ms": "-1"}
                admin.create_topics({topic: (1, settings)}, replication_factor=-1)
            self._look.set()
        told: list[tuple[Any, int]] = []
        with self._writing:
            if self._producer is None:
                own = producer_settings(self.config)
                self._producer = IdempotentProducer(self.config, own, owner="page")
            self._producer.produce(
                topic,
                value,
                key,
                partition,
                None,
                lambda error, message: told.append((error, message.offset() or 0)),
                _WRITE_S,
            )
            self._producer.confirm(lambda: bool(told), f"writing to {topic}", _WRITE_S)
        error, offset = told[0]
        if error is not None:
            raise broker_error(error, f"writing to {topic}")
        return offset
