"""Which release of Kafka a broker is; a question that librdkafka does not offer."""

from __future__ import annotations

import socket
import struct

from kafkamq.config import ServiceConfig
from kafkamq.errors import WireError
from kafkamq.transport.wire.api_versions import MAX_RESPONSE_BYTES, encode_request, release_of

_PLAIN = ("PLAINTEXT", "SASL_PLAINTEXT")


def broker_release(config: ServiceConfig, address: str, *, timeout_s: float = 5.0) -> str | None:
    """As "4.2"; None when it cannot be told: over TLS, before 3.3, or without an answer."""
    if config.kafka.get("security.protocol", "PLAINTEXT").upper() not in _PLAIN:
        return None
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_s) as connection:
            connection.sendall(encode_request("kafkamq", "1"))
            with connection.makefile("rb") as answer:
                (size,) = struct.unpack(">i", answer.read(4))
                return release_of(answer.read(min(size, MAX_RESPONSE_BYTES))) if size > 0 else None
    except (OSError, ValueError, struct.error, WireError):
        return None
