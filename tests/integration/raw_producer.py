"""Writes what confluent-kafka refuses to, through the C library that it brings along."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

import confluent_kafka

_TOPIC, _PARTITION, _VALUE, _KEY, _FLAGS, _HEADER, _END = 1, 3, 4, 5, 7, 9, 0
_COPY, _PRODUCER = 2, 0


def write_raw(
    bootstrap: str, topic: str, *, key: bytes, value: bytes, headers: Mapping[bytes, bytes]
) -> None:
    """One record to partition 0; header names may be any bytes but NUL."""
    package = Path(confluent_kafka.__file__).parent
    (library,) = package.parent.glob("confluent_kafka.libs/librdkafka*")
    kafka = ctypes.CDLL(str(library))
    kafka.rd_kafka_conf_new.restype = kafka.rd_kafka_new.restype = ctypes.c_void_p
    message = ctypes.create_string_buffer(512)
    settings = ctypes.c_void_p(kafka.rd_kafka_conf_new())
    kafka.rd_kafka_conf_set(settings, b"bootstrap.servers", bootstrap.encode(), message, 512)
    producer = ctypes.c_void_p(kafka.rd_kafka_new(_PRODUCER, settings, message, 512))
    assert producer, message.value
    arguments: list[object] = [_TOPIC, topic.encode(), _PARTITION, ctypes.c_int32(0)]
    arguments += [_FLAGS, _COPY, _KEY, key, ctypes.c_size_t(len(key))]
    arguments += [_VALUE, value, ctypes.c_size_t(len(value))]
    for name, content in headers.items():
        arguments += [_HEADER, name, content, ctypes.c_ssize_t(len(content))]
    try:
        assert kafka.rd_kafka_producev(producer, *arguments, _END) == 0
        assert kafka.rd_kafka_flush(producer, 30_000) == 0
    finally:
        kafka.rd_kafka_destroy(producer)
