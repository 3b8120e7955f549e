"""Runs jobs, in one process of a namespace at a time.

Whose turn it is says Kafka: the actions topic has one partition, and the member of a consumer group
that is assigned it runs the jobs. When its process is killed, another one has its turn as soon as
the group has missed its heartbeats for six seconds, and goes on from the ledger. A process that was
frozen and still believes that it is its turn is fenced by the other one's redrive, whose
transactional id is the same.
"""

from __future__ import annotations

import base64
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, DeadlineExceededError, FencedError, KafkaMQError, StateError
from kafkamq.markers.replays import Messages
from kafkamq.queue.backend import StoredMessage
from kafkamq.queue.dead_letters import (
    MAX_TRANSACTION_RECORDS,
    REPLAY_NAME,
    DeadLetter,
    RedriveReport,
    Selection,
    redrive,
)
from kafkamq.queue.names import actions_group
from kafkamq.transport.admin import Admin
from kafkamq.transport.errors import KafkaError, broker_error, is_fatal
from kafkamq.transport.group_consumer import GroupConsumer
from kafkamq.transport.transactions import NewRecord
from kafkamq.types import PartitionId
from kafkamq.web.actions import SEEN_S, Actions
from kafkamq.web.filters import LetterFilter
from kafkamq.web.jobs import Action, Job

MAX_REFUSALS = 20
_SESSION_MS = 6000
_RETRY_S = 5.0
_WAIT_S = 0.5
_PATIENCE = 60
_FENCED_AGAIN_S = 600.0
_UNDISTURBED_S = 60.0
_STOP_S = 20.0
_FENCED = (
    "another redrive, such as kafkamq dlq redrive, or an outage of a broker has ended this one"
    " twice: resume it when that is over"
)
_log = logging.getLogger(__name__)


class _InterruptedError(Exception):
    """The job must not go on, here and now."""


@dataclass(frozen=True, kw_only=True)
class _Meant(Selection):
    """It has the dead letters of a job, and asks at each one whether to go on."""

    job: Job
    check: Callable[[], None]

    def __contains__(self, letter: object) -> bool:
        self.check()
        if not isinstance(letter, DeadLetter):
            return False
        if letter.offset >= self.job.ends.get(letter.partition, 0):
            # It died after the job began, maybe once more.
            return False
        if self.job.place is not None:
            return (letter.partition, letter.offset) == self.job.place
        return self.job.filter.means(letter)


def messages_of(
    config: ServiceConfig,
    chosen: LetterFilter,
    ends: Mapping[int, int],
    marker_ends: Mapping[int, int],
    *,
    name: str = "",
) -> Messages:
    """Return the messages that a replay of this name means."""
    return Messages(
        topic=config.message_topic,
        prefix=f"replay-{name}",
        headers=((REPLAY_NAME, name.encode()),),
        means=chosen.means,
        since_ms=chosen.since_ms,
        is_done=chosen.state == "done",
        ends=ends,
        marker_ends=marker_ends,
    )


class Runner:
    """It runs jobs while it is this process's turn; ``start`` and ``close`` are its owner's."""

    def __init__(self, config: ServiceConfig, actions: Actions) -> None:
        self._config = config
        self._actions = actions
        self.name = f"{platform.node()}/{os.getpid()}/{os.urandom(4).hex()}"
        self._turn = threading.Event()
        self._stopping = threading.Event()
        self._failures = 0
        self._fenced_s = -_FENCED_AGAIN_S
        self._threads = [
            threading.Thread(target=self._take_turns, name="kafkamq-web-turn", daemon=True),
            threading.Thread(target=self._run, name="kafkamq-web-jobs", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._stopping.set()
        for thread in reversed(self._threads):
            if thread.ident is not None:
                thread.join(_STOP_S)

    # ---- turns

    def _take_turns(self) -> None:
        while not self._stopping.is_set():
            if not self._actions.exists:
                self._stopping.wait(_WAIT_S)
                continue
            try:
                self._be_member()
            except KafkaMQError as error:
                _log.warning("no turn to run jobs", extra={"error": str(error)})
                self._actions.turn_error = str(error)
                self._stopping.wait(_RETRY_S)

    def _be_member(self) -> None:
        member = GroupConsumer(
            self._config,
            self,
            [self._actions.topic],
            group_id=actions_group(self._config),
            session_ms=_SESSION_MS,
            ignores=self._ignores,
        )
        try:
            member.join()
            while not self._stopping.is_set():
                member.poll(1, _WAIT_S)
                if member.is_member:
                    self._actions.turn_error = ""
        finally:
            self._turn.clear()
            member.close()

    def _ignores(self, error: KafkaError) -> bool:
        self._actions.turn_error = str(broker_error(error, "waiting for a turn to run jobs"))
        return not is_fatal(error)

    def assigned(self, places: Sequence[PartitionId]) -> Mapping[PartitionId, int]:
        if places:
            self._turn.set()
        return {}

    def revoked(self, places: Sequence[PartitionId], *, is_lost: bool) -> None:
        del is_lost
        if places:
            self._turn.clear()

    # ---- jobs

    def _run(self) -> None:
        while not self._stopping.is_set():
            job = self._actions.job(self._actions.next_id) if self._turn.is_set() else None
            if job is None:
                self._actions.wait(_WAIT_S)
                continue
            try:
                self._run_job(job)
            except Exception as error:  # noqa: BLE001 - logged and told: other jobs go on
                _log.exception("a job has failed")
                self._stop(job, f"{type(error).__name__}: see the log of this process")

    def _run_job(self, job: Job) -> None:
        try:
            # Confirmed is enough: who had the turn may have left a transaction open, behind which
            # nothing is read until the redrive below has fenced it.
            self._actions.write(Action(what="run", id=job.id, user=self.name))
            config = self._config
            topic = config.message_topic if job.kind == "replay" else config.dead_letter_topic
            with Admin(config) as admin:
                topic_id = admin.require_topic(topic).topic_id
            if topic_id.hex() != job.topic_id:
                raise StateError(f"{topic} is another topic since; cancel it")
            report = self._redrive(job)
            refusals = [
                f"{each.topic}[{each.partition}]@{each.offset}: {each.error}"
                for each in report.refusals[:MAX_REFUSALS]
            ]
            self._tell(
                job,
                "end",
                refused=_refused(report),
                refusals=refusals,
                why=_why(report),
                already_redriven=report.already_redriven,
            )
            self._failures = 0
        except _InterruptedError:
            return
        except FencedError as error:
            # A transaction that a broker's end has cut looks alike: once is no reason to stop.
            again, self._fenced_s = time.monotonic() - self._fenced_s, time.monotonic()
            if again < _FENCED_AGAIN_S:
                self._stop(job, f"{_FENCED} ({error})")
            else:
                self._stopping.wait(_RETRY_S)
        except (BrokerError, DeadlineExceededError) as error:
            _log.warning("a job waits for Kafka", extra={"job": job.id, "error": str(error)})
            may_mend = isinstance(error, DeadlineExceededError) or error.is_retriable
            self._failures += 1 if may_mend else _PATIENCE // 3
            if self._failures > _PATIENCE:
                self._stop(job, str(error))
            else:
                self._stopping.wait(_RETRY_S)
        except KafkaMQError as error:
            self._stop(job, str(error))

    def _redrive(self, job: Job) -> RedriveReport:
        pace = _Pace(job.rate)

        def check() -> None:
            is_ours = self._turn.is_set() and not self._stopping.is_set() and not job.is_over
            if not is_ours or self._actions.next_id != job.id:
                raise _InterruptedError

        def on_progress(done: int) -> None:
            if done > pace.done:
                self._failures = 0
                if time.monotonic() - self._fenced_s > _UNDISTURBED_S:
                    self._fenced_s = -_FENCED_AGAIN_S
            due_s = pace.next_s(done)
            while (left_s := due_s - time.monotonic()) > 0:
                check()
                self._actions.wait(min(left_s, _WAIT_S))
            check()

        def also(report: RedriveReport, count: int) -> Sequence[NewRecord]:
            more = {"count": count, "refused": _refused(report)}
            action = Action(what="progress", id=job.id, user=self.name, more=more)
            return (self._actions.form(action),)

        edited = None
        if job.place is not None:
            payload = base64.b64decode(job.payload)

            def edited(message: StoredMessage) -> StoredMessage:
                return replace(message, payload=payload)

        source = None
        if job.kind == "replay":
            source = messages_of(self._config, job.filter, job.ends, job.marker_ends, name=job.id)
            source = replace(source, check=check)
        return redrive(
            self._config,
            _Meant(job=job, check=check) if source is None else Selection(),
            source=source,
            on_progress=on_progress,
            max_records=pace.chunk,
            also=also,
            edited=edited,
        )

    def _tell(self, job: Job, what: str, **more: object) -> None:
        offset = self._actions.write(Action(what=what, id=job.id, user=self.name, more=more))
        # Readers come no further than to a transaction that is open: of a process that was killed
        # or stands still this takes until the next redrive begins.
        if not self._actions.wait_for(offset):
            raise DeadlineExceededError(
                f"{self._actions.topic} was written, but is not read in {SEEN_S:g} s"
            )

    def _stop(self, job: Job, why: str) -> None:
        self._failures = 0
        with suppress(KafkaMQError):
            self._tell(job, "stop", why=why[:2000])


class _Pace:
    """It says when the next transaction may begin, so that so many go in a second."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self.done = 0
        self._due_s = time.monotonic()
        most = MAX_TRANSACTION_RECORDS
        self.chunk = max(1, min(most, round(rate))) if rate else most

    def next_s(self, done: int) -> float:
        count, self.done = done - self.done, done
        if self._rate:
            self._due_s = max(self._due_s, time.monotonic() - 1.0) + count / self._rate
        return self._due_s


def _refused(report: RedriveReport) -> int:
    lost = report.payload_lost + report.queue_unknown + report.headers_unreadable
    return report.refused + lost


def _why(report: RedriveReport) -> str:
    """Say what the page tells of those that stay."""
    texts = [
        (report.refused, "are not taken by their topic"),
        (report.payload_lost, "have lost their payload"),
        (report.queue_unknown, "name no queue"),
        (report.headers_unreadable, "have headers whose names are not UTF-8"),
    ]
    return "; ".join(f"{count:,} {text}" for count, text in texts if count)
