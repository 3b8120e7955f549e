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

from kafkamq.core.claims import Claim, ClaimState
from kafkamq.kafka.claims import (
    Admin,
    Batch,
    ClaimedMessage,
    ClaimedRange,
    Cluster,
    CommitToken,
    Consumer,
    Hold,
    Member,
    Position,
    RangeClaims,
    init_topic,
)

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
