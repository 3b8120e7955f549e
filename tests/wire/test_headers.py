"""Headers: ours are read strictly and never stop anybody, the user's travel untouched."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.wire.strategies import INT64, bounded, header_lists

from kafkamq.errors import WireError
from kafkamq.queue.wire.headers import (
    RESERVED,
    MessageHeaders,
    Origin,
    copy_headers,
    cut_text,
    dead_letter_headers,
    message_headers,
    read_message_headers,
    redrive_headers,
)
from kafkamq.types import DeadLetterReason, Headers

HERE = Origin("ns.messages", 3, 42, 1_700_000_000_000)
FIRST = Origin("ns.messages", 0, 7, 1_600_000_000_000)

users_headers = header_lists().map(lambda hs: tuple(h for h in hs if h[0] not in RESERVED))
mixed_headers = st.lists(
    st.tuples(
        st.sampled_from(sorted(RESERVED)) | st.text(max_size=5),
        st.none() | st.binary(max_size=30) | st.just(b"5") | st.just(HERE.encode()),
    ),
    max_size=8,
).map(tuple)


@bounded
@given(
    st.builds(
        Origin,
        topic=st.from_regex(r"[A-Za-z0-9._-]{1,249}", fullmatch=True),
        partition=st.integers(0, 2**31 - 1),
        offset=st.integers(0, INT64),
        timestamp_ms=st.integers(0, INT64),
    )
)
def test_origins_are_read_as_written(origin: Origin) -> None:
    assert Origin.decode(origin.encode()) == origin


def test_golden_origin() -> None:
    assert HERE.encode() == b"ns.messages/3/42/1700000000000"


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"t/1/2",
        b"t/1/2/3/4",
        b"/1/2/3",
        b"t/-1/2/3",
        b"t/1/+2/3",
        b"t/1/ 2/3",
        b"t/1/2/",
        b"t/1/2_0/3",
        b"t/1/2/9223372036854775808",
        b"t/1/2/" + b"0" * 400,
        b"\xff/1/2/3",
        "t/\u0661/2/3".encode(),
    ],
)
def test_other_origins_are_refused(value: bytes) -> None:
    with pytest.raises(WireError):
        Origin.decode(value)
    read = read_message_headers([("kafkamq-origin", value)])
    assert read.origin is None  # in a message it counts as absent


def test_a_message_without_headers_is_a_first_delivery() -> None:
    for nothing in (None, [], ()):
        assert read_message_headers(nothing) == MessageHeaders()


def test_our_headers_are_read_and_the_users_kept_in_order() -> None:
    headers = [
        ("b", b"1"),
        ("kafkamq-id", "grün".encode()),
        ("a", None),
        ("kafkamq-delivery-count", b"3"),
        ("b", b""),
        ("kafkamq-ttl-ms", b"0"),
        ("kafkamq-origin", FIRST.encode()),
        ("kafkamq-Id", b"not ours"),
    ]
    assert read_message_headers(headers) == MessageHeaders(
        id="grün",
        delivery_count=3,
        ttl_ms=0,
        origin=FIRST,
        user=(("b", b"1"), ("a", None), ("b", b""), ("kafkamq-Id", b"not ours")),
    )


@pytest.mark.parametrize(
    "value", [b"", b"0", b"-1", b"+1", b"1.0", b" 1", b"2147483648", b"9" * 5000, b"\xff", None]
)
def test_a_foreign_delivery_count_counts_as_absent(value: bytes | None) -> None:
    assert read_message_headers([("kafkamq-delivery-count", value)]).delivery_count == 1


@pytest.mark.parametrize("value", [b"", b"-1", b"1e3", b"9223372036854775808", b"9" * 99, None])
def test_a_foreign_ttl_counts_as_absent(value: bytes | None) -> None:
    assert read_message_headers([("kafkamq-ttl-ms", value)]).ttl_ms is None


def test_a_foreign_id_cannot_be_huge_nor_break_text() -> None:
    assert read_message_headers([("kafkamq-id", b"x" * 4097)]).id == ""
    assert read_message_headers([("kafkamq-id", b"a\xffb")]).id == "a\ufffdb"


@bounded
@given(mixed_headers)
def test_reading_is_total_and_leaves_the_users_headers(headers: Headers) -> None:
    read = read_message_headers(headers)
    assert read.user == tuple(h for h in headers if h[0] not in RESERVED)
    assert read.delivery_count >= 1


@bounded
@given(users_headers, st.integers(1, 9))
def test_a_copy_carries_everything_and_its_count(user: Headers, count: int) -> None:  # R14
    sent = message_headers(user, id="m-1", ttl_ms=500)
    copy = copy_headers(sent, delivery_count=count, origin=HERE)
    assert read_message_headers(copy) == MessageHeaders("m-1", count, 500, HERE, user)
    later = copy_headers(copy, delivery_count=count + 1, origin=Origin("ns.messages", 9, 9, 9))
    assert read_message_headers(later) == MessageHeaders("m-1", count + 1, 500, HERE, user)
    assert len(later) <= len(user) + 4  # nothing piles up from copy to copy


def test_the_first_copy_of_a_schedule_names_no_origin() -> None:
    headers = message_headers([("a", b"1")], id="m-1")
    copy = copy_headers(headers, delivery_count=1, origin=None)
    assert copy == (("a", b"1"), ("kafkamq-id", b"m-1"))


def test_golden_dead_letter() -> None:
    headers = (
        ("a", b"1"),
        ("kafkamq-id", b"m-1"),
        ("a", None),
        ("kafkamq-origin", FIRST.encode()),
        ("kafkamq-delivery-count", b"4"),
        ("kafkamq-ttl-ms", b"500"),
    )
    assert dead_letter_headers(
        headers,
        reason=DeadLetterReason.MAX_DELIVERIES,
        error="boom",
        delivery_count=5,
        origin=HERE,
        queue_id="orders",
    ) == (
        ("a", b"1"),
        ("kafkamq-id", b"m-1"),
        ("a", None),
        ("kafkamq-ttl-ms", b"500"),
        ("kafkamq-reason", b"max-deliveries"),
        ("kafkamq-error", b"boom"),
        ("kafkamq-delivery-count", b"5"),
        ("kafkamq-origin", b"ns.messages/0/7/1600000000000"),
        ("kafkamq-queue-id", b"orders"),
    )


def test_a_dead_letter_without_id_is_named_by_its_first_place() -> None:
    def dead(headers: Headers) -> dict[str, bytes | None]:
        return dict(
            dead_letter_headers(
                headers,
                reason=DeadLetterReason.PAYLOAD_LOST,
                error="",
                delivery_count=1,
                origin=HERE,
                queue_id=b"\xff",
                payload_at=HERE,
            )
        )

    assert dead(())["kafkamq-id"] == b"ns.messages/3/42"
    moved = copy_headers((), delivery_count=2, origin=FIRST)
    assert dead(moved)["kafkamq-id"] == b"ns.messages/0/7"
    assert dead(())["kafkamq-payload-at"] == HERE.encode()
    assert dead(())["kafkamq-queue-id"] == b"\xff"
    assert dead((("kafkamq-id", None),))["kafkamq-id"] == b"ns.messages/3/42"


@bounded
@given(mixed_headers, st.text())
def test_dead_letters_hold_all_that_the_api_promises(headers: Headers, error: str) -> None:
    dead = dead_letter_headers(
        headers,
        reason=DeadLetterReason.REJECTED,
        error=error,
        delivery_count=2,
        origin=HERE,
        queue_id="q",
    )
    names = [name for name, _ in dead]
    for name in ("reason", "error", "delivery-count", "origin", "queue-id"):
        assert names.count(f"kafkamq-{name}") == 1
    assert "kafkamq-id" in names
    assert dict(dead)["kafkamq-error"] == cut_text(error).encode()
    assert read_message_headers(dead).user == read_message_headers(headers).user
    assert read_message_headers(dead).origin is not None


def test_the_error_of_a_dead_letter_is_cut() -> None:  # R11
    dead = dead_letter_headers(
        (),
        reason=DeadLetterReason.REJECTED,
        error="é" * 5000,
        delivery_count=1,
        origin=HERE,
        queue_id="q",
    )
    assert dict(dead)["kafkamq-error"] == ("é" * 2048).encode()


def test_a_redriven_message_starts_again() -> None:
    dead = dead_letter_headers(
        message_headers([("a", b"1"), ("a", None)], id="m-1", ttl_ms=500),
        reason=DeadLetterReason.EXPIRED,
        error="",
        delivery_count=5,
        origin=HERE,
        queue_id="q",
        payload_at=HERE,
    )
    assert redrive_headers(dead) == (
        ("a", b"1"),
        ("a", None),
        ("kafkamq-id", b"m-1"),
        ("kafkamq-ttl-ms", b"500"),
    )


@bounded
@given(st.text(), st.integers(0, 50))
def test_texts_are_cut_between_characters(text: str, limit: int) -> None:  # R11
    cut = cut_text(text, limit)
    assert len(cut.encode()) <= limit
    whole = text.encode("utf-8", "replace").decode()
    assert whole.startswith(cut)
    assert len(cut) == len(whole) or len((cut + whole[len(cut)]).encode()) > limit
