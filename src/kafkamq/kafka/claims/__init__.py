"""Claims of partitions through a coordination topic; public as ``kafkamq.claims``."""

from kafkamq.kafka.claims.admin import Admin, Position
from kafkamq.kafka.claims.cluster import Cluster
from kafkamq.kafka.claims.consumer import Consumer
from kafkamq.kafka.claims.hold import Hold
from kafkamq.kafka.claims.member import Member
from kafkamq.kafka.claims.message import Batch, ClaimedMessage, CommitToken
from kafkamq.kafka.claims.ranges import ClaimedRange, RangeClaims
from kafkamq.kafka.claims.topic import init_topic

__all__ = [
    "Admin",
    "Batch",
    "ClaimedMessage",
    "ClaimedRange",
    "Cluster",
    "CommitToken",
    "Consumer",
    "Hold",
    "Member",
    "Position",
    "RangeClaims",
    "init_topic",
]
