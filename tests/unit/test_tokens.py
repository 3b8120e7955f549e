"""Tokens of messages as text, and what the markers say of a message whose verdict is elsewhere."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafkamq import Service
from kafkamq.errors import ConfigError
from kafkamq.markers.rules.attempts import Fate, Fates
from kafkamq.markers.rules.leases import Lease, Leases, Sharing
from kafkamq.markers.wire.tokens import MAX_TOKEN_CHARACTERS, MessageToken, decode_token
from kafkamq.types import Marker, MarkerType, MessageBatch, MessageId, Outcome

NUMBER = st.integers(0, 2**31 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
TOKENS = st.builds(
    MessageToken,
    namespace=TEXT,
    queue_id=TEXT,
    message_id=st.builds(
        MessageId, NUMBER, st.integers(0, 2**63 - 1), st.sampled_from([b"", b"t" * 16]), NUMBER
    ),
    marker_partition=NUMBER,
    start_offset=st.integers(0, 2**63 - 1),
    holder_id=TEXT,
    delivery_count=NUMBER,
    message_ms=st.integers(-1, 2**62),
)
TOKEN = MessageToken(
    namespace="shop",
    queue_id="orders",
    message_id=MessageId(3, 5000, b"t" * 16, 8),
    marker_partition=1,
    start_offset=77,
    holder_id="c0ffee",
    delivery_count=2,
    message_ms=1_700_000_000_000,
)


@given(TOKENS)
def test_a_token_survives_its_text(token: MessageToken) -> None:
    text = token.encode()
    assert decode_token(text) == token
    assert text.replace("-", "").replace("_", "").replace(".", "").isalnum()


def test_the_longest_names_make_a_bounded_token() -> None:
    text = replace(TOKEN, namespace="n" * 249, queue_id="q" * 1024).encode()
    assert len(text) < 2100 < MAX_TOKEN_CHARACTERS
    assert len(TOKEN.encode()) < 200


@given(st.data())
def test_any_changed_character_is_noticed(data: st.DataObject) -> None:
    text = TOKEN.encode()
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.characters(exclude_characters=[text[at]], exclude_categories=["Cs"]))
    for damaged in (text[:at] + other + text[at + 1 :], text[:at], text + other):
        with pytest.raises(ConfigError, match="token begins with"):
            decode_token(damaged)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("", "damaged"),
        ("k1.", "damaged"),
        ("k2.AAAA", "another version"),
        ("x" * 5000, "5000 characters"),
        (b"k1.", "a bytes"),
        (None, "a NoneType"),
    ],
)
def test_what_is_no_token_is_refused(bad: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        decode_token(bad)


@pytest.mark.parametrize("backend", ["offsets", "share", "claims"])
def test_other_backends_refuse_by_name(backend: str) -> None:
    queue = Service("localhost:1").queue("orders", backend=backend)
    for ask in (
        lambda: queue.ack("k1."),
        lambda: queue.nack("k1."),
        lambda: queue.reject("k1.", "bad"),
        lambda: queue.extend("k1.", 5),
    ):
        with pytest.raises(ConfigError, match=f"{backend}.*markers has it"):
            ask()


@pytest.mark.parametrize("timeout", [math.nan, "5", None])
def test_what_is_no_time_to_wait_is_refused(timeout: Any) -> None:
    queue = Service("localhost:1").queue("orders")
    for ask in (
        lambda: queue.ack("k1.", timeout=timeout),
        lambda: queue.nack("k1.", timeout=timeout),
        lambda: queue.reject("k1.", "bad", timeout=timeout),
        lambda: queue.extend("k1.", 5, timeout=timeout),
    ):
        with pytest.raises(ConfigError, match="timeout is"):
            ask()


# ---- fates

ME = MessageId(0, 7)
OTHER = MessageId(0, 8)
T = 10_000


def fold(*records: tuple[int, Marker]) -> tuple[Fates, Fate]:
    fates = Fates(0, 0)
    fate = fates.watch(ME)
    for offset, (log_ms, marker) in enumerate(records):
        fates.apply(offset, log_ms, marker)
    return fates, fate


def start(*, of: MessageId = ME, by: str = "a") -> Marker:
    return Marker(MarkerType.START, of, redeliver_after_ms=T, consumer_id=by, max_lease_ms=100 * T)


def alive(by: str, after_ms: int = T, of: MessageId | None = None) -> Marker:
    return Marker(MarkerType.KEEPALIVE, of, redeliver_after_ms=after_ms, consumer_id=by)


def end(outcome: Outcome = Outcome.ACK, *, by: str = "s", after_ms: int = 0) -> Marker:
    return Marker(MarkerType.END, ME, outcome=outcome, consumer_id=by, redeliver_after_ms=after_ms)


def counted(fate: Fate) -> list[int]:
    return [each.offset for each in fate.counted]


def test_the_first_verdict_counts_and_the_second_does_not() -> None:
    _, fate = fold((0, start()), (1, end()), (2, end(Outcome.REJECT, by="other")))
    assert counted(fate) == [1]
    assert fate.first is not None
    assert (fate.first.outcome, fate.first.consumer_id) == (Outcome.ACK, "s")


def test_a_verdict_behind_the_lease_does_not_count() -> None:
    fates, fate = fold(
        (0, start()), *((ms, alive("x")) for ms in range(0, T, 2000)), (T + 1, end())
    )
    assert counted(fate) == []
    assert fates.is_due(ME)


def test_renewals_of_the_holder_count_and_those_of_others_do_not() -> None:
    renewed = [(ms, alive("a")) for ms in range(0, 3 * T, 3000)]
    _, fate = fold((0, start()), *renewed, (3 * T, end()))
    assert counted(fate) == [len(renewed) + 1]


def test_a_hold_is_renewed_by_nobody_and_stands_until_its_end() -> None:
    hold = (10, alive("hold", 5 * T, ME))
    beats = [(ms, alive("a")) for ms in range(1000, 5 * T, 1000)]
    fates, fate = fold((0, start()), hold, *beats, (5 * T + 10, end()))
    assert counted(fate) == [len(beats) + 2]  # at its end, not past it
    fates, fate = fold((0, start()), hold, *beats, (5 * T + 11, end()))
    assert counted(fate) == []
    assert fates.is_due(ME)


def test_what_is_left_of_a_hold_is_known() -> None:
    fates, _ = fold((0, start()), (10, alive("hold", 5 * T, ME)), (1010, alive("a")))
    assert fates.is_held(ME)
    assert fates.held(ME) == ("hold", 5 * T - 1000)


def test_an_ack_ends_what_waits_after_a_nack_and_nothing_else_does() -> None:
    nack = (1, end(Outcome.NACK, after_ms=T))
    _, fate = fold((0, start()), nack, (2, end(Outcome.REJECT)), (3, end(Outcome.NACK)), (4, end()))
    assert counted(fate) == [1, 4]


def test_batches_name_the_message_and_others_leave_it_alone() -> None:
    def batch(bits: int, topic_id: bytes = b"") -> tuple[MessageBatch, ...]:
        return (MessageBatch(0, topic_id, 0, 6, bits),)

    started = replace(start(), message_id=None, batches=batch(0b111))
    others = replace(end(by="x"), message_id=None, batches=batch(0b101))
    elsewhere = replace(end(by="x"), message_id=None, batches=batch(0b010, b"t" * 16))
    mine = replace(end(by="x"), message_id=None, batches=batch(0b010))
    fates, _ = fold(
        (0, started), (1, others), (2, elsewhere), (3, replace(end(), message_id=OTHER))
    )
    assert fates.is_held(ME)
    _, fate = fold((0, started), (1, others), (2, mine), (3, end()))
    assert counted(fate) == [2]


def test_without_its_start_a_message_is_unknown() -> None:
    fates, fate = fold((0, start(of=OTHER)), (1, end()))
    assert (fates.is_held(ME), counted(fate), fates.is_due(ME)) == (False, [], False)


# ---- what a holder does


def held_leases() -> tuple[Leases, Lease, Lease]:
    leases = Leases("me", redelivery_timeout_ms=T, max_lease_ms=10 * T, batch_markers=True)
    both = [leases.start(0, [offset], (b"", 0), 1) for offset in (7, 8)]
    for number, lease in enumerate(both):
        leases.started(lease, 0, 0, 40 + number)
    leases.committed(both, 0)
    return leases, *both


def test_r34_a_lease_knows_its_first_start() -> None:
    leases, first, second = held_leases()
    assert (first.start_offset, second.start_offset) == (40, 41)
    assert leases.apart(second, [8]).start_offset == 41


def test_r34_a_shared_message_is_renewed_by_its_id() -> None:
    leases, first, _ = held_leases()
    first.sharing = Sharing.TOKEN
    renewed = {renewal.message_id: renewal.leases for renewal in leases.plan_renewals(100)}
    assert set(renewed) == {None, MessageId(0, 7)}
    assert first not in renewed[None]


def test_r34_what_is_being_handed_over_is_not_renewed_and_then_held_no_more() -> None:
    leases, first, second = held_leases()
    first.sharing = Sharing.HOLDING
    (renewal,) = leases.plan_renewals(100)
    assert (renewal.message_id, renewal.leases) == (None, (second,))
    assert leases.hand_over(first, 7)
    assert not leases.hand_over(first, 7)
    assert (leases.open_count, leases.open()) == (1, (second,))
    assert first.is_over(100)  # R6: nothing that happens to the process counts against it
    assert leases.collect() == []  # nobody writes an END for it
    assert leases.expire(20 * T) == [second]
    leases.check()
