"""Record keys and the partitions that follow from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.wire.strategies import bounded

from kafkamq.errors import ConfigError
from kafkamq.queue.wire.keys import (
    join_key,
    key_partition,
    marker_key,
    marker_partition,
    murmur2,
    split_key,
)


@bounded
@given(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1),
    st.none() | st.binary(),
)
def test_keys_split_as_they_were_joined(queue_id: str, user_key: bytes | None) -> None:
    assert split_key(join_key(queue_id, user_key)) == (queue_id.encode(), user_key)


def test_golden_keys() -> None:
    assert join_key("orders") == b"orders"
    assert join_key("orders", "k") == b"orders\0k"
    assert join_key(b"orders", b"a\0b") == b"orders\0a\0b"
    assert join_key("orders", b"") == b"orders\0"
    assert split_key(b"orders\0a\0b") == (b"orders", b"a\0b")
    assert split_key(b"orders\0") == (b"orders", b"")
    assert split_key(b"\0k") == (b"", b"k")
    assert split_key(b"") == (b"", None)
    assert split_key(None) == (b"", None)


@pytest.mark.parametrize("queue_id", ["", "a\0b", b"\0"])
def test_queue_ids_that_would_be_read_as_another(queue_id: str | bytes) -> None:
    with pytest.raises(ConfigError, match="queue_id"):
        join_key(queue_id, b"k")


@pytest.mark.parametrize(
    ("data", "java"),
    [  # vectors of Kafka's Java client: signed 32-bit numbers
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_murmur2_is_kafkas(data: bytes, java: int) -> None:
    assert murmur2(data) == java & 0xFFFFFFFF
    assert key_partition(data, 97) == (java & 0x7FFFFFFF) % 97


def test_markers_of_4096_offsets_share_a_partition() -> None:  # R26
    assert marker_key(3, 4095) == b"3:0"
    assert marker_key(3, 4096) == b"3:1"
    for count in (1, 2, 8, 50):
        for offset in (0, 4095, 4096, 10**12):
            expected = key_partition(b"3:%d" % (offset // 4096), count)
            assert marker_partition(3, offset, count) == expected


def test_a_hot_queue_spreads_over_all_marker_partitions() -> None:  # R26
    chunks = [marker_partition(0, chunk * 4096, 8) for chunk in range(800)]
    assert all(50 < chunks.count(partition) < 150 for partition in range(8))
