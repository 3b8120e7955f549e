"""Public names of :mod:`kafkamq.claims.wire.marshal`."""

from kafkamq.claims.wire.marshal import coordination_partition, decode, encode

__all__ = ["coordination_partition", "decode", "encode"]
