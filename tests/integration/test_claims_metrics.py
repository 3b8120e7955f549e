"""What a process shows of its claims."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, generate_latest
from tests.integration.claim_logs import ClaimTopics
from tests.waiting import wait_until, within

from kafkamq.metrics import register_metrics


def shown() -> str:
    registry = CollectorRegistry()
    register_metrics(registry)
    return generate_latest(registry).decode()


def test_metrics_of_claims(bootstrap: str) -> None:
    topics = ClaimTopics(bootstrap)
    topics.fill(4)
    topics.write("nonsense", f"Heartbeat/1/{int(time.time()) + 30}/i/x/{topics.group}/other/0/0")
    place = f'group="{topics.group}",topic="{topics.work}"'
    with topics.cluster() as cluster:
        member = cluster.member("a", topics.group)
        for _ in range(2):  # nothing is committed, so it comes again
            with member.consumer(topics.work, claims="greedy") as consumer:
                for _ in range(4):
                    assert consumer.receive(within(60.0)) is not None
                wait_until(lambda: f"kafkamq_claims_held{{{place}}} 2.0" in shown())
                text = shown()
        for line in (
            "kafkamq_claims_won_total 4.0",
            'kafkamq_claims_ended_total{reason="released"} 2.0',
            "kafkamq_claims_messages_handed_out_total 8.0",
            "kafkamq_claims_bad_records_total 1.0",
            "kafkamq_claims_takeovers_total 0.0",
            "kafkamq_claims_lost_total 0.0",
        ):
            assert line in text, text
        age = f'{{group="{topics.group}",partition="0",topic="{topics.work}"}}'
        assert f"kafkamq_claims_age_seconds{age}" in text
        (skew,) = (line for line in text.splitlines() if 'client="x"' in line)
        assert 25 < float(skew.rpartition(" ")[2]) < 31
    assert "kafkamq_claims_held{" not in shown()
