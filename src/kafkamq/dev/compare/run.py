"""The comparison takes each contender through all phases, one after the other."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from kafkamq.config import ServiceConfig
from kafkamq.dev.compare.plan import (
    Contender,
    Measured,
    Phase,
    PhaseFacts,
    PhaseKind,
    Work,
    handlers_at_once,
    ideal_s,
    judge,
    ordering_of,
    percentile,
    phases,
)
from kafkamq.dev.compare.stage import Stage, ends_of, settled_ends, written_between
from kafkamq.errors import ConfigError, KafkaMQError
from kafkamq.share.settings import read_limits
from kafkamq.transport.admin import Admin

KILL_AT = 0.25
RECOVERY_LIMIT_S = 90.0
Say = Callable[[str], None]


def compare(
    config: ServiceConfig,
    work: Work,
    contenders: Sequence[Contender] = tuple(Contender),
    *,
    say: Say = lambda _: None,
    keep: bool = False,
) -> list[Measured]:
    """Measure them on one cluster; all that is made there is removed, unless ``keep``.

    Raises:
        KafkaMQError: No contender can be measured: the cluster does not answer, or refuses.
    """
    prefix = f"{config.namespace}-compare-{uuid.uuid4().hex[:8]}"
    own = ServiceConfig(
        bootstrap_servers=config.bootstrap_servers, namespace=prefix, kafka=config.kafka
    )
    with Admin(own) as admin:
        # A cluster that does not answer is told of at once.
        admin.cluster()
    folder = Path(tempfile.mkdtemp(prefix="kafkamq-compare-"))
    say(f"Topics and groups of this run begin with {prefix}")
    found = []
    try:
        for contender in contenders:
            refusal = why_not(own, contender)
            if refusal:
                say(f"{contender.value}: skipped: {refusal}")
                found.append(Measured(contender=contender.value, notes=[refusal]))
                continue
            stage = Stage(own, work, contender, folder, keep=keep)
            result = Measured(contender=stage.name, ordering=ordering_of(contender, work))
            found.append(result)
            try:
                with stage:
                    measure(stage, result, say)
            except KafkaMQError as error:
                result.notes.append(str(error))
                say(f"{stage.name}: {error}")
            if stage.left:
                say(f"{contender.value}: could not be deleted: {', '.join(stage.left)}")
    finally:
        if keep:
            say(f"Kept: topics {prefix}..., and histories and logs in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
            say(f"Topics and groups of this run ({prefix}) are deleted")
    return found


def why_not(config: ServiceConfig, contender: Contender) -> str:
    """Return why a contender cannot be measured on this cluster; empty: it can."""
    if contender is not Contender.SHARE:
        return ""
    with Admin(config) as admin:
        try:
            read_limits(admin, config.namespace)
        except ConfigError as error:
            return str(error)
    return ""


def measure(stage: Stage, result: Measured, say: Say) -> None:
    """All phases of a contender; what is not done in time ends them, and is a note."""
    stage.warm_up()
    runs: list[PhaseFacts] = []
    result.lost = 0
    for phase in phases(stage.work, stage.contender):
        say(f"{stage.name}: {phase.kind.value}, {len(phase.items):,} messages")
        facts = PHASES[phase.kind](stage, phase, result)
        result.lost += facts.messages - facts.done
        if phase.kind is not PhaseKind.RECOVERY:
            runs.append(facts)
            result.runs = sum(each.runs * each.messages for each in runs) / sum(
                each.messages for each in runs
            )
        if facts.done < facts.messages:
            result.notes.append(
                f"{phase.kind.value}: {facts.done:,} of {facts.messages:,} messages in "
                f"{stage.work.limit_s:g} s; what follows was not measured"
            )
            say(f"{stage.name}: {result.notes[-1]}")
            return


def _judged(stage: Stage, phase: Phase, begin_s: float) -> PhaseFacts:
    stage.wait(phase.numbers, stage.work.limit_s)
    return judge(phase.items, stage.events, begin_s=begin_s)


def _latency(stage: Stage, phase: Phase, result: Measured) -> PhaseFacts:
    stage.send(phase.items, interval_ms=phase.interval_ms)
    facts = _judged(stage, phase, 0)
    waits = sorted(at - stage.sent_s[number] * 1000 for number, at in facts.waits_ms.items())
    result.latency_p50_ms, result.latency_p99_ms = percentile(waits, 0.5), percentile(waits, 0.99)
    return facts


def _throughput(stage: Stage, phase: Phase, result: Measured) -> PhaseFacts:
    prefix = stage.config.namespace
    before = ends_of(stage.config, prefix)
    facts = _judged(stage, phase, stage.send_backlog(phase.items))
    if facts.seconds is not None:
        result.seconds = facts.seconds
        result.per_second = facts.messages / facts.seconds
    result.ideal_s = ideal_s(phase.items, handlers_at_once(stage.contender, stage.work))
    after = settled_ends(stage.config, prefix)
    written = written_between(stage.config, prefix, before, after, messages=stage.topic)
    if written is None:
        result.notes.append("Kafka's own topics cannot be read here: extra records are not counted")
    else:
        records, size = written
        result.extra_records = records / facts.messages
        result.extra_bytes = size / facts.messages
    return facts


def _blocking(stage: Stage, phase: Phase, result: Measured) -> PhaseFacts:
    facts = _judged(stage, phase, stage.send_backlog(phase.items))
    result.blocking_s = facts.seconds
    result.blocking_ideal_s = ideal_s(phase.items, handlers_at_once(stage.contender, stage.work))
    slow_us = stage.work.slow.ms * 1000
    quick = [item.number for item in phase.items if item.us != slow_us]
    waits = sorted(facts.waits_ms[number] for number in quick if number in facts.waits_ms)
    result.blocked_p99_ms = percentile(waits, 0.99)
    return facts


def _order(stage: Stage, phase: Phase, result: Measured) -> PhaseFacts:
    facts = _judged(stage, phase, stage.send_backlog(phase.items))
    result.keys, result.keys_in_order = facts.keys, facts.keys_in_order
    return facts


def _recovery(stage: Stage, phase: Phase, result: Measured) -> PhaseFacts:
    begin_s = stage.send_backlog(phase.items)
    if stage.work.processes < 2:
        result.notes.append("recovery: it takes two processes or more")
        return _judged(stage, phase, begin_s)
    stage.wait(phase.numbers, stage.work.limit_s, share=KILL_AT)
    killed_s = stage.kill_busiest()
    stage.wait(phase.numbers, max(RECOVERY_LIMIT_S, stage.work.limit_s))
    facts = judge(phase.items, stage.events, begin_s=killed_s)
    result.recovery_s = facts.seconds
    return facts


PHASES = {
    PhaseKind.LATENCY: _latency,
    PhaseKind.THROUGHPUT: _throughput,
    PhaseKind.BLOCKING: _blocking,
    PhaseKind.ORDER: _order,
    PhaseKind.RECOVERY: _recovery,
}
