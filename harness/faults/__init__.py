"""Faults for real clusters, histories of what clients saw, and a checker that reads only those.

`KafkaCluster` is three brokers on machines of their own: kill, pause, cut and heal them, fill their
disks. `BrokerClock` moves a broker's wall clock, `SlowLink` delays what goes over it. `Part` and
``python -m harness.faults.actors`` are senders, workers and trackers that write histories;
`check_run` judges histories and topics. The pytest fixture ``kafka_cluster`` gives one cluster.
"""

from harness.broker_clock import BrokerClock, why_no_clock
from harness.cluster import KafkaCluster
from harness.faults.invariants import Finding, Report, check_run
from harness.faults.part import POISON, Part
from harness.faults.records import (
    NamespaceRecords,
    committed_positions,
    log_end,
    read_namespace,
    read_records,
)
from harness.network import Host, Network, NetworkError, why_no_network
from harness.slow_link import SlowLink
from kafkamq.dev.history import Event, HistoryError, Recorder, digest, read_histories

__all__ = [
    "BrokerClock",
    "Event",
    "Finding",
    "HistoryError",
    "Host",
    "KafkaCluster",
    "NamespaceRecords",
    "Network",
    "NetworkError",
    "POISON",
    "Part",
    "Recorder",
    "Report",
    "SlowLink",
    "check_run",
    "committed_positions",
    "digest",
    "log_end",
    "read_histories",
    "read_namespace",
    "read_records",
    "why_no_clock",
    "why_no_network",
]
