"""The properties of a small single-node broker, and their file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kafkamq.errors import ConfigError

__all__ = ["HOST", "OWNED", "format_properties", "server_properties"]

HOST = "127.0.0.1"

OWNED = frozenset(
    {
        "advertised.listeners",
        "controller.listener.names",
        "controller.quorum.voters",
        "inter.broker.listener.name",
        "listener.security.protocol.map",
        "listeners",
        "log.dir",
        "log.dirs",
        "metadata.log.dir",
        "node.id",
        "process.roles",
    }
)
"""Properties that decide who talks to whom and where data is; a user cannot change them."""

_DEFAULTS = {
    # One node: nothing can have a second copy.
    "default.replication.factor": "1",
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    # Internal topics are created at their first use; 50 partitions would take seconds.
    "offsets.topic.num.partitions": "5",
    "transaction.state.log.num.partitions": "5",
    "share.coordinator.state.topic.num.partitions": "5",
    # Tests start groups all the time, and a misspelt topic must fail.
    "group.initial.rebalance.delay.ms": "0",
    "auto.create.topics.enable": "false",
    # A dead producer's transaction ends soon after its timeout, not up to 10 s later.
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
    # After a kill the controller refuses the broker until its old session ends: 9 s by default.
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
    # Small: the default for compaction alone is a buffer of 128 MB.
    "log.cleaner.dedupe.buffer.size": "4194304",
    "num.network.threads": "2",
    "num.io.threads": "4",
    "background.threads": "4",
}


def server_properties(
    *, port: int, controller_port: int, data: Path, overrides: Mapping[str, str]
) -> dict[str, str]:
    """All properties of the broker; ``overrides`` win over our defaults.

    Raises:
        ConfigError: an override is one of `OWNED`, or the data folder's path has a comma.
    """
    for name in overrides:
        if name in OWNED:
            raise ConfigError(f"property {name!r} belongs to LocalKafka and cannot be set")
    if "," in str(data):
        raise ConfigError(f"data_dir is {str(data)!r}: Kafka splits folders at commas")
    return {
        **_DEFAULTS,
        **overrides,
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@{HOST}:{controller_port}",
        "controller.listener.names": "CONTROLLER",
        "listeners": f"PLAINTEXT://{HOST}:{port},CONTROLLER://{HOST}:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{port}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "inter.broker.listener.name": "PLAINTEXT",
        "log.dirs": str(data),
    }


def format_properties(properties: Mapping[str, str]) -> str:
    """The text of a Java properties file, in ASCII, with everything escaped that needs it."""
    return "".join(
        f"{_escape(name, is_key=True)}={_escape(value)}\n" for name, value in properties.items()
    )


def _escape(text: str, *, is_key: bool = False) -> str:
    special = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    if is_key:
        special |= {" ": "\\ ", "=": "\\=", ":": "\\:", "#": "\\#", "!": "\\!"}
    escaped = []
    for index, character in enumerate(text):
        if character in special:
            escaped.append(special[character])
        elif character == " " and index == 0:
            escaped.append("\\ ")
        elif " " <= character <= "~":
            escaped.append(character)
        else:  # \uXXXX per UTF-16 unit, as Java reads it
            units = character.encode("utf-16-be")
            escaped += [f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2)]
    return "".join(escaped)
