"""The properties of a small single-node broker, and their file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kafkamq.errors import ConfigError

HOST = "127.0.0.1"
_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_OUR_LISTENERS = ("PLAINTEXT", "CONTROLLER")

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


@dataclass(frozen=True, kw_only=True)
class Listener:
    """One more door of a broker, beside the open one that it uses itself.

    Its properties (certificates, SASL mechanisms, JAAS) are Kafka's names without the prefix
    ``listener.name.NAME.``. They may hold secrets, so they are not shown.
    """

    name: str  # capital letters and digits
    protocol: str  # PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL
    properties: Mapping[str, str] = field(default_factory=dict, repr=False)
    advertised: str = ""  # host:port that clients are sent to, e.g. a proxy's; "": the listener's

    def __post_init__(self) -> None:
        if not re.fullmatch("[A-Z][A-Z0-9]*", self.name) or self.name in _OUR_LISTENERS:
            taken = " or ".join(_OUR_LISTENERS)
            raise ConfigError(
                f"listener name is {self.name!r}: capital letters and digits, not {taken}"
            )
        if self.protocol not in _PROTOCOLS:
            known = ", ".join(_PROTOCOLS)
            raise ConfigError(f"listener protocol is {self.protocol!r}: one of {known}")


@dataclass(frozen=True, kw_only=True)
class Node:
    """A broker's place in a cluster: who it is, where it is, and who votes."""

    node_id: int
    host: str  # an address that the broker has
    voters: Mapping[int, str]  # node id -> host:port of its controller
    cluster_id: str  # 22 characters of base64, the same for all
    port: int = 9092
    controller_port: int = 9093


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
    # A member gets its partitions at its next heartbeat: after 5 s by default.
    "group.consumer.min.heartbeat.interval.ms": "500",
    "group.consumer.heartbeat.interval.ms": "500",
    "group.share.min.heartbeat.interval.ms": "500",
    "group.share.heartbeat.interval.ms": "500",
    # A dead member's partitions have no reader until its session ends; 45 s by default.
    "group.consumer.min.session.timeout.ms": "3000",
    "group.share.min.session.timeout.ms": "3000",
    "auto.create.topics.enable": "false",
    # A dead producer's transaction ends soon after its timeout, not up to 10 s later.
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
    # After a kill the controller refuses the broker until its old session ends: 9 s by default.
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
    # A controller that has nothing to do writes a record each 500 ms by default.
    "metadata.max.idle.interval.ms": "30000",
    # Small: the default for compaction alone is a buffer of 128 MB.
    "log.cleaner.dedupe.buffer.size": "4194304",
    "num.network.threads": "2",
    "num.io.threads": "4",
    "background.threads": "4",
}


def server_properties(
    *,
    port: int,
    controller_port: int,
    data: Path,
    overrides: Mapping[str, str],
    listeners: Sequence[tuple[Listener, int]] = (),
    node: Node | None = None,
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
    host = HOST if node is None else node.host
    voters = {1: f"{host}:{controller_port}"} if node is None else node.voters
    bound = {"PLAINTEXT": f"{host}:{port}", "CONTROLLER": f"{host}:{controller_port}"}
    advertised = {"PLAINTEXT": bound["PLAINTEXT"]}
    protocols = {"PLAINTEXT": "PLAINTEXT", "CONTROLLER": "PLAINTEXT"}
    special: dict[str, str] = {}
    for listener, number in listeners:
        bound[listener.name] = f"{host}:{number}"
        advertised[listener.name] = listener.advertised or bound[listener.name]
        protocols[listener.name] = listener.protocol
        prefix = f"listener.name.{listener.name.lower()}."
        special |= {prefix + name: value for name, value in listener.properties.items()}
    return {
        **_DEFAULTS,
        **overrides,
        **special,
        "process.roles": "broker,controller",
        "node.id": str(1 if node is None else node.node_id),
        "controller.quorum.voters": ",".join(f"{id_}@{place}" for id_, place in voters.items()),
        "controller.listener.names": "CONTROLLER",
        "listeners": ",".join(f"{name}://{place}" for name, place in bound.items()),
        "advertised.listeners": ",".join(f"{name}://{at}" for name, at in advertised.items()),
        "listener.security.protocol.map": ",".join(map(":".join, protocols.items())),
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
