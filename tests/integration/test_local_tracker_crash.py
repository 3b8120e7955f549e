"""SIGKILL of the local tracker while it fires: nothing lost, nothing twice, by the logs."""

from __future__ import annotations

import signal
import time
from collections import Counter
from contextlib import ExitStack

import pytest
from tests.integration.tracker_logs import Logs, tracker_process
from tests.waiting import wait_until, within

from kafkamq.types import MarkerType, MessageId, Outcome

KILLS = 4
BATCH = 3000


@pytest.mark.faults
@pytest.mark.slow
def test_killed_while_firing_loses_nothing_and_repeats_nothing(
    bootstrap: str, namespace: str
) -> None:
    logs = Logs(bootstrap, namespace, marker_partitions=3, partitions=3)
    silent: set[MessageId] = set()
    acked: set[MessageId] = set()
    rejected: set[MessageId] = set()

    def load(partition: int) -> None:
        """Messages of one more batch: most fall silent, some are acked, some rejected."""
        ids = logs.send(BATCH, partition=partition)
        logs.start(*ids, timeout_ms=1500)
        acked.update(ids[::5])
        rejected.update(ids[1::5])
        silent.update(set(ids) - set(ids[::5]) - set(ids[1::5]))
        logs.end(*ids[::5])
        logs.end(*ids[1::5], outcome=Outcome.REJECT, reason="no")

    killed_while_firing = 0
    with ExitStack() as processes:
        for turn in range(KILLS):
            # Few rows in one transaction, so that the firing takes long enough to be hit.
            process = processes.enter_context(tracker_process(logs.config, max_rows=10))
            load(turn % 3)
            before = len(logs.copied())
            wait_until(lambda before=before: len(logs.copied()) > before + 20, timeout_s=90)
            process.send_signal(signal.SIGKILL)
            process.wait(within(10))
            killed_while_firing += len(logs.copied()) < len(silent)
        processes.enter_context(tracker_process(logs.config))
        expected = silent | rejected
        wait_until(
            lambda: expected <= set(logs.ends(Outcome.REDELIVERED, Outcome.DEAD_LETTERED)),
            timeout_s=90,
        )
        time.sleep(2.0)  # whatever would be written twice has time to appear

    assert killed_while_firing >= KILLS - 1, "the kills came too late to show anything"
    copies = Counter(logs.copied())
    assert copies == Counter((id_.partition, id_.offset) for id_ in silent)
    assert Counter(logs.ends(Outcome.REDELIVERED)) == Counter(silent)
    assert Counter(logs.ends(Outcome.DEAD_LETTERED)) == Counter(rejected)
    letters = [headers["kafkamq-origin"] for _, headers in logs.dead_letters()]
    assert Counter(letters) == Counter(
        f"{logs.config.message_topic}/{id_.partition}/{id_.offset}/{logs.sent[id_]}".encode()
        for id_ in rejected
    )
    assert all(copy.delivery_count == 2 for copy in logs.copies())
    assert no_copy_before_its_deadline(logs)


def no_copy_before_its_deadline(logs: Logs) -> bool:
    """No END of a tracker before the START's timeout, unless a verdict asked for it."""
    begun: dict[MessageId, int] = {}
    asked: set[MessageId] = set()
    for message, marker in logs.markers():
        id_, stamp_ms = marker.message_id, message.timestamp()[1]
        if id_ is None:
            continue
        if marker.type is MarkerType.START:
            begun[id_] = stamp_ms
        elif marker.outcome is Outcome.REJECT:
            asked.add(id_)
        elif marker.outcome is Outcome.REDELIVERED and id_ not in asked:
            assert stamp_ms - begun[id_] > 1500, id_
    return True
