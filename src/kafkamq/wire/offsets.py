"""Public names of :mod:`kafkamq.parallel.wire.offsets`."""

from kafkamq.parallel.wire.offsets import OffsetMap, decode, encode

__all__ = ["OffsetMap", "decode", "encode"]
