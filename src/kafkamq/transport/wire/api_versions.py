"""The one request of Kafka's protocol that says how new a broker is: ApiVersions, version 3.

librdkafka sends it too, but tells nobody the answer. A broker answers it before any credentials.
Source: Kafka protocol, ApiVersions; KIP-511, KIP-584.
"""

from __future__ import annotations

import struct

from kafkamq.errors import WireError

MAX_RESPONSE_BYTES = 1 << 20
_KEY = 18
_VERSION = 3
_SUPPORTED_FEATURES = 0  # a tag of the response
_METADATA = "metadata.version"

# The highest metadata.version that each release knows; a broker says the highest of its own.
_RELEASES = (
    (7, "3.3"),
    (8, "3.4"),
    (11, "3.5"),
    (14, "3.6"),
    (19, "3.7"),
    (20, "3.8"),
    (21, "3.9"),
    (25, "4.0"),
    (27, "4.1"),
    (29, "4.2"),
)


def encode_request(client: str, version: str) -> bytes:
    """The request with its length; ``client`` and ``version`` name who asks."""
    header = struct.pack(">hhih", _KEY, _VERSION, 1, -1) + b"\0"  # no client id, no tags
    body = _compact(client) + _compact(version) + b"\0"
    return struct.pack(">i", len(header) + len(body)) + header + body


def _compact(text: str) -> bytes:
    encoded = text.encode("ascii")
    assert len(encoded) < 127, "a length of one byte"
    return bytes((len(encoded) + 1,)) + encoded


def release_of(response: bytes) -> str:
    """The release that answered, as "4.2"; "4.2 or newer" beyond those that are known."""
    level = _metadata_level(_Reader(response))
    for highest, release in _RELEASES:
        if level <= highest:
            return release
    return f"{_RELEASES[-1][1]} or newer"


def _metadata_level(reader: _Reader) -> int:
    reader.take(">i")  # correlation id
    (error,) = reader.take(">h")
    if error:
        raise WireError(f"the broker answers ApiVersions with error {error}")
    for _ in range(reader.count()):
        reader.take(">hhh")
        reader.skip_tags()
    reader.take(">i")  # throttle time
    for _ in range(reader.varint()):
        tag, size = reader.varint(), reader.varint()
        if tag == _SUPPORTED_FEATURES:
            return _feature(_Reader(reader.bytes(size)))
        reader.bytes(size)
    raise WireError("the broker names no features")


def _feature(reader: _Reader) -> int:
    for _ in range(reader.count()):
        name = reader.bytes(reader.count())
        _, highest = reader.take(">hh")
        reader.skip_tags()
        if name == _METADATA.encode():
            return int(highest)
    raise WireError(f"the broker names no feature {_METADATA}")


class _Reader:
    """Takes a response apart; running out of it is a WireError."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def bytes(self, size: int) -> bytes:
        """The next so many."""
        end = self._at + size
        if size < 0 or end > len(self._data):
            raise WireError("an ApiVersions response is cut off")
        found = self._data[self._at : end]
        self._at = end
        return found

    def take(self, form: str) -> tuple[int, ...]:
        """Numbers, as ``struct`` names them."""
        return struct.unpack(form, self.bytes(struct.calcsize(form)))

    def varint(self) -> int:
        """An unsigned one of at most five bytes."""
        value = 0
        for place in range(5):
            (digit,) = self.bytes(1)
            value |= (digit & 127) << (7 * place)
            if digit < 128:
                return value
        raise WireError("a number in an ApiVersions response is too long")

    def count(self) -> int:
        """Of a compact array or text: written plus one, 0 for null."""
        return max(0, self.varint() - 1)

    def skip_tags(self) -> None:
        """What newer brokers may add."""
        for _ in range(self.varint()):
            self.varint()
            self.bytes(self.varint())
