"""The numbers that the rules name, and how they hang together."""

from __future__ import annotations

from kafkamq.markers.rules import chunks, handout, leases, redelivery
from kafkamq.markers.rules import pipeline as intake
from kafkamq.queue.wire import headers, keys


def test_r05_r12_the_memory_of_ends_is_longer_than_a_start_can_be_late() -> None:
    start_timeout_ms = 30_000  # message.timeout.ms of the producer of STARTs
    assert intake.MAX_AGE_MS == 20_000
    assert chunks.ENDED_MEMORY_MS == 60_000 > intake.MAX_AGE_MS + start_timeout_ms


def test_r07_a_new_partitions_messages_are_renewed_one_by_one_for_as_long() -> None:
    assert leases.NEW_PARTITION_MS == 60_000 > intake.MAX_AGE_MS + 30_000


def test_r03_grace_is_three_seconds_at_most() -> None:
    assert redelivery.MAX_GRACE_MS == 3000


def test_r08_a_nack_waits_a_quarter_of_the_retention_at_most() -> None:
    assert handout.RETENTION_SHARE == 4


def test_r11_error_texts_have_4_kib_at_most() -> None:
    assert headers.MAX_ERROR_BYTES == 4096


def test_r16_actions_of_one_transaction() -> None:
    assert redelivery.MAX_PLAN == 50_000


def test_r26_a_chunk_of_state_is_what_shares_a_marker_partition() -> None:
    assert chunks.CHUNK_OFFSETS == keys.CHUNK_OFFSETS == 4096
