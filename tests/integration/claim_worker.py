"""A member of a group as a process, for tests that kill, stop and mislead it.

Every hand-out is one line of its trace, written before anything else happens to the messages:
``token partition first_offset next_offset lease_clock_ms``, the last being when it was decided. It
can kill or stop itself at a step of a batch, and its wall clock can be wrong.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kafkamq.claims import Cluster, Consumer
from kafkamq.claims.consumer import AtMostOnceBatches
from kafkamq.claims.engine import Engine, Fence
from kafkamq.claims.rules.claimant import Claimant
from kafkamq.claims.rules.log import SafeRules
from kafkamq.errors import KafkaMQError, LeaseLostError
from kafkamq.types import MarshalType

ROOT = Path(__file__).resolve().parents[2]
STEPS = (
    "fetched",
    "announced",  # ClaimingMessages is on its way
    "committing",
    "committed",
    "heartbeat",  # it is on its way
    "handed-out",  # before the application sees it
    "returned",  # the application has it
)


@dataclass(frozen=True)
class HandOut:
    client: str
    token: int
    partition: int
    first: int
    next: int
    at_ms: int


def read_trace(*paths: Path) -> list[HandOut]:
    """What was handed out, in the order of the lease clock."""
    found = []
    for path in paths:
        if path.exists():
            lines = path.read_text().splitlines()
            found += [HandOut(path.stem, *map(int, line.split())) for line in lines]
    return sorted(found, key=lambda each: each.at_ms)


def overlaps(trace: list[HandOut]) -> list[tuple[HandOut, HandOut]]:
    """Hand-outs under an older token after one under a newer token: two owners at once."""
    newest: dict[int, HandOut] = {}
    found = []
    for each in trace:
        before = newest.get(each.partition)
        if before is not None and each.token < before.token:
            found.append((before, each))
        else:
            newest[each.partition] = each
    return found


def start(trace: Path, topics: Any, *arguments: str) -> subprocess.Popen[str]:
    """A worker; its client id is the trace's name."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.integration.claim_worker"),
            *("--bootstrap", topics.bootstrap, "--coordination", topics.coordination),
            *("--topic", topics.work, "--group", topics.group, "--trace", str(trace)),
            *("--interval", str(topics.interval_s), *arguments),
        ],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _signal_after(count: int, sent: signal.Signals) -> Callable[[], None]:
    left = [count]

    def die() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), sent)

    return die


def _around(
    owner: Any, name: str, before: Callable[..., None] | None, after: Callable[..., None] | None
) -> None:
    """Call something at each call of a method, with the method's arguments."""
    real = getattr(owner, name)

    def wrapper(*arguments: Any, **options: Any) -> Any:
        if before is not None:
            before(*arguments)
        result = real(*arguments, **options)
        if after is not None:
            after(*arguments)
        return result

    setattr(owner, name, wrapper)


def _arm(step: str, die: Callable[[], None]) -> Callable[[], None]:
    """Call ``die`` whenever a batch comes to ``step``; returns the last step's call."""

    def fetched(batches: AtMostOnceBatches) -> None:
        if any(batches._reader.buffers.values()):
            die()

    def sent(_engine: Engine, _partition: int, record: Any, _report: Any) -> None:
        is_batch = record.type is MarshalType.CLAIMING_MESSAGES
        is_beat = record.type is MarshalType.HEARTBEAT and record.offset > 0
        if is_batch if step == "announced" else is_beat:
            die()

    def now(*_arguments: Any) -> None:
        die()

    if step == "fetched":
        _around(AtMostOnceBatches, "_offer", fetched, None)
    elif step in ("announced", "heartbeat"):
        _around(Engine, "send", None, sent)
    elif step == "committing":
        _around(Fence, "commit", now, None)
    elif step == "committed":
        _around(Fence, "commit", None, now)
    elif step == "handed-out":
        _around(AtMostOnceBatches, "hand_out", None, now)
    return die if step == "returned" else lambda: None


def _note_decisions() -> Callable[[], int]:
    """When the last hand-out was decided: the process may be held up between that and its trace."""
    real, decided = Claimant.is_live, [0]

    def is_live(claimant: Claimant, monotonic_ms: int) -> bool:
        found = real(claimant, monotonic_ms)
        if found:
            decided[0] = monotonic_ms
        return found

    Claimant.is_live = is_live  # type: ignore[method-assign]
    return lambda: decided[0]


def _mislead(skew_s: float, jump_s: float) -> None:
    """The wall clock is wrong, and jumps after three seconds; leases go by another clock."""
    real_time, real_ns, began = time.time, time.time_ns, time.monotonic()

    def off_s() -> float:
        return skew_s + (jump_s if time.monotonic() - began > 3 else 0.0)

    time.time = lambda: real_time() + off_s()
    time.time_ns = lambda: real_ns() + round(off_s() * 1e9)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _work(consumer: Consumer, options: argparse.Namespace, returned: Callable[[], None]) -> None:
    trace = os.open(options.trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    is_once = options.delivery == "at-most-once"
    decided_ms = _note_decisions()
    while True:
        batch = consumer.next_batch(0.2)
        if batch is None:
            continue
        line = (
            f"{batch.token} {batch.partition} {batch.first_offset} {batch.next_offset}"
            f" {decided_ms()}\n"
        )
        os.write(trace, line.encode())
        returned()
        try:
            if options.output:
                with consumer.transaction(batch) as outputs:
                    for message in batch.messages:
                        outputs.send(options.output, message.payload)
                    time.sleep(options.work)
            else:
                time.sleep(options.work)
            if not is_once:
                consumer.commit(batch)
        except LeaseLostError as error:
            _say(f"lost: {error}")
        except KafkaMQError as error:
            _say(f"refused: {error}")


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("bootstrap", "coordination", "topic", "group", "trace"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--interval", type=float, required=True)
    parser.add_argument("--delivery", default="at-most-once")
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--step", default="")
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--signal", default="SIGKILL")
    parser.add_argument("--skew", type=float, default=0.0)
    parser.add_argument("--jump", type=float, default=0.0)
    parser.add_argument("--work", type=float, default=0.0)
    parser.add_argument("--output", default="")
    parser.add_argument("--max-claims", type=int, default=0)
    parser.add_argument("--unsafe", action="store_true")
    options = parser.parse_args()
    if options.skew or options.jump:
        _mislead(options.skew, options.jump)
    if options.unsafe:
        SafeRules._holds = lambda self, entry: False  # type: ignore[method-assign]
        SafeRules.is_claimable = lambda self, entry, now_s: True  # type: ignore[method-assign]
        Claimant._still_holds = lambda self, claim, ms, now_s: True  # type: ignore[method-assign]
    die = _signal_after(options.count, signal.Signals[options.signal])
    returned = _arm(options.step, die) if options.step else (lambda: None)
    with (
        Cluster(
            options.bootstrap,
            coordination_topic=options.coordination,
            heartbeat_interval=options.interval,
        ) as cluster,
        cluster.member(Path(options.trace).stem, options.group).consumer(
            options.topic,
            delivery=options.delivery,
            claims="greedy",
            batch=options.batch,
            fenced=bool(options.output),
            max_claims=options.max_claims or None,
            on_lost=lambda *what: _say(f"ended: {what}"),
        ) as consumer,
    ):
        _say("ready")
        _work(consumer, options, returned)


if __name__ == "__main__":
    main()
