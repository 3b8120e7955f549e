"""What operators have done, as records of one topic, and the state of jobs folded from them.

An action is written before its effect, so none is without a record. Records say ``what``:

- ``redrive``, ``replay``, ``resend``: a job begins; it runs.
- ``pause``, ``resume``, ``cancel``: what an operator wants of a job that has not ended.
- ``run``: a process takes the job up. What another one has to say of its end counts no more.
- ``progress``: so many more went, in the transaction in which they went.
- ``stop``: the process that runs the job cannot go on, and says why: the job is paused.
- ``end``: nothing is left.
- ``send``, ``cancel-delayed``: one message; ``done``, ``failed`` or ``unknown`` (it was not known
  in time) with the same id follow.

Pure and total: a record that nobody understands, or that comes too late, changes no job.
"""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kafkamq.web.filters import LetterFilter

RUNNING, PAUSED, CANCELLED, ENDED = "running", "paused", "cancelled", "done"
STATES_AFTER = {"pause": PAUSED, "resume": RUNNING, "cancel": CANCELLED}
MAX_JOBS = 1000
MAX_RATE = 1e6
MAX_ENTRIES = 2000
MAX_RECORD_BYTES = 900_000
_KINDS = ("redrive", "replay", "resend")
_SILENT = ("progress", "run")
_UNSHOWN = ("payload", "ends", "marker_ends", "topic_id")
_OWN = ("payload", "place", "ends", "marker_ends", "topic_id", "runner")
_REDRIVEN_BEFORE = "it was redriven before: nothing was sent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    what: str
    id: str
    user: str
    at_ms: int = 0
    offset: int = -1
    more: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        fields = {"what": self.what, "id": self.id, "user": self.user, "more": dict(self.more)}
        return json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace")


def decode(value: bytes | None, *, at_ms: int, offset: int) -> Action | None:
    try:
        fields = json.loads(value or b"", parse_int=_int)
        # No page can show a lone surrogate.
        json.dumps(fields, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    what, id_, user = (fields.get(name) for name in ("what", "id", "user"))
    more = fields.get("more")
    if not (isinstance(what, str) and isinstance(id_, str) and isinstance(user, str)):
        return None
    if not isinstance(more, dict):
        return None
    return Action(what=what, id=id_, user=user, at_ms=at_ms, offset=offset, more=more)


def _int(text: str) -> int:
    if len(text) > 18:
        raise ValueError("no number of ours")
    return int(text)


@dataclass(slots=True, kw_only=True)
class Job:
    """A job sends dead letters back into their queues, or messages again."""

    id: str
    kind: str
    name: str
    user: str
    state: str = RUNNING
    created_ms: int
    changed_ms: int
    filter: LetterFilter
    place: tuple[int, int] | None
    payload: str
    # 0: as fast as it goes.
    rate: float
    expected: int
    # By partition of the topic that it reads: later ones are not meant.
    ends: Mapping[int, int]
    marker_ends: Mapping[int, int]
    topic_id: str
    runner: str = ""
    done: int = 0
    refused: int = 0
    why: str = ""
    refusals: list[str] = field(default_factory=list)

    @property
    def left(self) -> int:
        return 0 if self.is_over else max(0, self.expected - self.done - self.refused)

    @property
    def is_over(self) -> bool:
        return self.state in (ENDED, CANCELLED)

    def as_dict(self) -> dict[str, Any]:
        """Return what pages show: all but the payload, and what its process alone needs."""
        shown = {name: value for name, value in asdict(self).items() if name not in _OWN}
        chosen = {name: value for name, value in shown["filter"].items() if value}
        where = None if self.place is None else f"2/{self.place[0]}/{self.place[1]}"
        return shown | {"filter": chosen, "where": where, "left": self.left}


class Trail:
    def __init__(self) -> None:
        self.jobs: OrderedDict[str, Job] = OrderedDict()
        self.entries: deque[Action] = deque(maxlen=MAX_ENTRIES)

    def apply(self, action: Action) -> None:
        if action.what not in _SILENT:
            more = {name: value for name, value in action.more.items() if name not in _UNSHOWN}
            self.entries.append(replace(action, more=more))
        if action.what in _KINDS:
            if action.id not in self.jobs:
                job = _job(action)
                if job is not None:
                    self.jobs[job.id] = job
                    self._forget()
            return
        job = self.jobs.get(action.id)
        if job is not None:
            _change(job, action)

    def next_job(self) -> Job | None:
        """Return the job that is to run now: an edited message does not wait for thousands."""
        running = [job for job in self.jobs.values() if job.state == RUNNING]
        return min(running, key=lambda job: job.kind != "resend", default=None)

    def _forget(self) -> None:
        over = [job.id for job in self.jobs.values() if job.is_over]
        for id_ in over[: max(0, len(over) - MAX_JOBS)]:
            del self.jobs[id_]


def _job(action: Action) -> Job | None:
    more = action.more
    try:
        # What names nothing means nothing, and not everything.
        place: Any = more["place"] if action.what == "resend" else None
        chosen = LetterFilter()
        if action.what != "resend":
            chosen = LetterFilter.of_record(more["filter"]).of_kind(action.what)
        return Job(
            id=action.id,
            kind=action.what,
            name=str(more.get("name", "")),
            user=action.user,
            created_ms=action.at_ms,
            changed_ms=action.at_ms,
            filter=chosen,
            place=(int(place[0]), int(place[1])) if action.what == "resend" else None,
            payload=str(more["payload"]) if action.what == "resend" else "",
            rate=min(MAX_RATE, max(0.0, float(more.get("rate", 0.0)))),
            expected=_count(more.get("expected")),
            ends=_ends(more["ends"]),
            marker_ends=_ends(more["marker_ends"]) if action.what == "replay" else {},
            topic_id=str(more["topic_id"]),
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError):
        return None


def _ends(kept: Any) -> dict[int, int]:
    return {int(number): int(end) for number, end in kept.items()}


def _change(job: Job, action: Action) -> None:
    what, more = action.what, action.more
    if what == "progress":
        # This goes behind a cancellation, too: these letters had gone.
        job.done += _count(more.get("count"))
        job.refused = _count(more.get("refused"))
    elif job.is_over:
        return
    elif what in STATES_AFTER:
        job.state, job.why = STATES_AFTER[what], ""
    elif what == "run":
        job.runner = action.user
    elif job.runner != action.user:
        # It is a process that had the job before.
        return
    elif what == "stop":
        job.state, job.why = PAUSED, str(more.get("why", ""))
    elif what == "end":
        job.state, job.refused = ENDED, _count(more.get("refused"))
        job.why = str(more.get("why", ""))
        if job.kind == "resend" and not job.done and _count(more.get("already_redriven")):
            job.why = _REDRIVEN_BEFORE
        fewer = job.expected - job.done - job.refused
        if job.kind == "replay" and fewer > 0:
            # Retention has deleted them, maybe between two runs.
            job.why = "; ".join(filter(None, (job.why, f"{fewer:,} fewer than expected")))
        refusals = more.get("refusals")
        job.refusals = [str(each) for each in refusals] if isinstance(refusals, list) else []
    else:
        return
    job.changed_ms = action.at_ms
    if job.state in (ENDED, CANCELLED):
        job.payload = ""


def _count(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0
