"""Claims: who may read which partition, decided on nothing but a Kafka topic (Marshal's protocol).

from kafkamq.claims import Cluster, init_topic

init_topic("localhost:9092")
with Cluster("localhost:9092") as cluster:
    member = cluster.member("worker-1", "billing")
    with member.consumer(["orders"]) as consumer:
        for message in consumer:
            handle(message.payload)
            message.commit()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafkamq.lazy import loader

if TYPE_CHECKING:
    from kafkamq.claims.admin import Admin, Position
    from kafkamq.claims.cluster import Cluster, Member
    from kafkamq.claims.consumer import Batch, ClaimedMessage, CommitToken, Consumer
    from kafkamq.claims.holding import Hold
    from kafkamq.claims.log_engine import init_topic
    from kafkamq.claims.ranges import ClaimedRange, RangeClaims
    from kafkamq.claims.rules.log import Claim, ClaimState

__all__ = [
    "Cluster",
    "Member",
    "Consumer",
    "Hold",
    "Admin",
    "ClaimedMessage",
    "Batch",
    "CommitToken",
    "Claim",
    "Position",
    "RangeClaims",
    "ClaimedRange",
    "ClaimState",
    "init_topic",
]

_HOMES = {
    "kafkamq.claims.cluster": ("Cluster", "Member"),
    "kafkamq.claims.consumer": ("Consumer", "ClaimedMessage", "Batch", "CommitToken"),
    "kafkamq.claims.holding": ("Hold",),
    "kafkamq.claims.admin": ("Admin", "Position"),
    "kafkamq.claims.rules.log": ("Claim", "ClaimState"),
    "kafkamq.claims.ranges": ("RangeClaims", "ClaimedRange"),
    "kafkamq.claims.log_engine": ("init_topic",),
}

__getattr__ = loader(__name__, _HOMES)
