"""Marshal's records: what the Go client reads and writes, and what it refuses."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.wire.strategies import INT64, bounded

from kafkamq.claims.wire.marshal import (
    MAX_RECORD_LENGTH,
    MarshalRecord,
    MarshalType,
    coordination_partition,
    decode,
    decode_value,
    encode,
    encode_value,
)
from kafkamq.errors import ConfigError, WireError

VECTORS = json.loads(
    (Path(__file__).parents[1] / "vectors" / "marshal-scenarios.json").read_text(encoding="utf-8")
)

FORMS = (  # every number of every type
    "Heartbeat/{}/2/ii/cl/gr/t/3/5",
    "Heartbeat/1/{}/ii/cl/gr/t/3/5",
    "Heartbeat/1/2/ii/cl/gr/t/{}/5",
    "Heartbeat/1/2/ii/cl/gr/t/3/{}",
    "ClaimingPartition/1/2/ii/cl/gr/t/{}",
    "ReleasingPartition/1/2/ii/cl/gr/t/3/{}",
    "ClaimingMessages/1/2/ii/cl/gr/t/3/{}",
    "ReleaseGroup/1/2/ii/cl/gr//0/{}",
)

ONE_OF_EACH = {
    "Heartbeat/1/2/ii/cl/gr/t/3/5": MarshalRecord(
        MarshalType.HEARTBEAT, 2, "ii", "cl", "gr", "t", 3, offset=5
    ),
    "ClaimingPartition/1/2/ii/cl/gr/t/3": MarshalRecord(
        MarshalType.CLAIMING_PARTITION, 2, "ii", "cl", "gr", "t", 3
    ),
    "ReleasingPartition/1/2/ii/cl/gr/t/3/7": MarshalRecord(
        MarshalType.RELEASING_PARTITION, 2, "ii", "cl", "gr", "t", 3, offset=7
    ),
    "ClaimingMessages/1/2/ii/cl/gr/t/3/9": MarshalRecord(
        MarshalType.CLAIMING_MESSAGES, 2, "ii", "cl", "gr", "t", 3, offset=9
    ),
    "ReleaseGroup/0/2/ii/cl/gr//0/12": MarshalRecord(
        MarshalType.RELEASE_GROUP, 2, "ii", "cl", "gr", expires_at_s=12, version=0
    ),
}


@pytest.mark.parametrize(("text", "record"), ONE_OF_EACH.items())
def test_the_five_records_both_ways(text: str, record: MarshalRecord) -> None:
    assert decode(text) == record
    assert encode(record) == text
    assert decode_value(text.encode()) == record
    assert encode_value(record) == text.encode()


@pytest.mark.parametrize("case", VECTORS["decode"], ids=lambda case: case["value"][:40])
def test_decodes_what_the_go_client_decodes(case: dict[str, str | None]) -> None:
    """The reader is that of the last Go version that knew ReleaseGroup."""
    value, again = case["value"], case["peer_with_admin_reencode"]
    assert value is not None
    if again is None:
        with pytest.raises(WireError):
            decode(value)
    else:
        assert encode(decode(value)) == again


@pytest.mark.parametrize("case", VECTORS["hash"], ids=lambda c: f"{c['topic']}-{c['partitions']}")
def test_coordination_partitions(case: dict[str, int | str]) -> None:
    topic, n = case["topic"], case["partitions"]
    assert isinstance(topic, str)
    assert isinstance(n, int)
    assert coordination_partition(topic, n) == case["coordination_partition"]


@pytest.mark.parametrize("n", [0, -1])
def test_a_topic_without_partitions_is_refused(n: int) -> None:
    with pytest.raises(ConfigError):
        coordination_partition("t", n)


@pytest.mark.parametrize(
    ("number", "again"),
    [
        ("0", "0"),
        ("-0", "0"),
        ("+0", "0"),
        ("+5", "5"),
        ("007", "7"),
        ("-1", "-1"),
        ("-007", "-7"),
        ("0" * 5000 + "1", "1"),
        (str(INT64), str(INT64)),
        (str(-INT64 - 1), str(-INT64 - 1)),
        ("0" + str(INT64), str(INT64)),
    ],
)
def test_numbers_are_gos(number: str, again: str) -> None:
    for form in FORMS:
        assert encode(decode(form.format(number))) == form.format(again)


@pytest.mark.parametrize(
    "number",
    ["", "+", "-", "+-1", "--1", " 5", "5 ", "5\n", "1_0", "1_000", "0x10", "1e3", "2.5", "NaN",
     "\uff15", "\u0665", "\u00b2", str(INT64 + 1), str(-INT64 - 2), "9" * 20, "9" * 10_000],
)  # fmt: skip
def test_other_numbers_are_malformed(number: str) -> None:
    for form in FORMS:
        with pytest.raises(WireError):
            decode(form.format(number))


@pytest.mark.parametrize("text", list(ONE_OF_EACH))
def test_the_number_of_fields_is_exact(text: str) -> None:
    for wrong in (text + "/1", text + "/", text.rpartition("/")[0], "/" + text, text + "/1/2/3"):
        with pytest.raises(WireError):
            decode(wrong)


@pytest.mark.parametrize(
    "type", ["", "heartbeat", "HEARTBEAT", "Heartbeat ", "ClaimingRange", "HEARTBEAT\0", "\u0397"]
)
def test_other_types_are_malformed(type: str) -> None:
    for rest in ("/1/2/ii/cl/gr/t/3/5", "/1/2/ii/cl/gr/t/3", ""):
        with pytest.raises(WireError):
            decode(type + rest)


def test_a_release_of_a_group_names_no_partition() -> None:
    for text in ("ReleaseGroup/0/1/ii/adm/gr/t/0/2", "ReleaseGroup/0/1/ii/adm/gr//1/2"):
        with pytest.raises(WireError):
            decode(text)
    record = ONE_OF_EACH["ReleaseGroup/0/2/ii/cl/gr//0/12"]
    for wrong in (replace(record, topic="t"), replace(record, partition=1)):
        with pytest.raises(WireError):
            encode(wrong)


@pytest.mark.parametrize("record", ONE_OF_EACH.values(), ids=lambda r: r.type.value)
def test_what_nobody_could_read_is_not_written(record: MarshalRecord) -> None:
    for name in ("instance", "client", "group", "topic"):
        for wrong in ("/", "a/b"):
            with pytest.raises(WireError, match=name):
                encode(replace(record, **{name: wrong}))
    for name in ("version", "time_s", "partition", "offset", "expires_at_s"):
        for number in (INT64 + 1, -INT64 - 2):
            with pytest.raises(WireError):
                encode(replace(record, **{name: number}))


def test_length_is_bounded() -> None:
    fits = "Heartbeat/1/2/ii/cl/gr/{}/3/5"
    topic = "t" * (MAX_RECORD_LENGTH - len(fits) + 2)
    assert encode(decode(fits.format(topic))) == fits.format(topic)
    with pytest.raises(WireError):
        decode(fits.format(topic + "t"))
    with pytest.raises(WireError):
        decode_value(fits.format(topic + "t").encode())
    with pytest.raises(WireError):
        encode(replace(decode(fits.format(topic)), topic=topic + "t"))
    with pytest.raises(WireError):  # as fast as a short one
        decode("/" * MAX_RECORD_LENGTH)


def test_values_are_bytes() -> None:
    """The Go client's strings are bytes: an owner whose id is not UTF-8 is still an owner."""
    with pytest.raises(WireError):
        decode_value(None)
    with pytest.raises(WireError):
        decode_value(b"")
    value = b"Heartbeat/1/2/\xff\xfe/c\xc3/g\xc3\xa9/t\x00\n/3/5"
    record = decode_value(value)
    assert record.group == "g\u00e9"
    assert encode_value(record) == value
    with pytest.raises(WireError):
        encode_value(replace(record, client="\ud800"))
    assert coordination_partition("t\udcff", 7) in range(7)


ids = st.text(st.characters(codec="utf-8", exclude_characters="/"), max_size=20)
numbers = st.integers(-5, 20_000) | st.integers(-INT64 - 1, INT64)


@st.composite
def records(draw: st.DrawFn) -> MarshalRecord:
    type = draw(st.sampled_from(MarshalType))
    pause = type is MarshalType.RELEASE_GROUP
    moves = not pause and type is not MarshalType.CLAIMING_PARTITION
    return MarshalRecord(
        type,
        time_s=draw(numbers),
        instance=draw(ids),
        client=draw(ids),
        group=draw(ids),
        topic="" if pause else draw(ids),
        partition=0 if pause else draw(numbers),
        offset=draw(numbers) if moves else 0,
        expires_at_s=draw(numbers) if pause else 0,
        version=draw(numbers),
    )


@bounded
@given(records())
def test_what_is_encoded_is_decoded(record: MarshalRecord) -> None:
    assert decode(encode(record)) == record
    assert decode_value(encode_value(record)) == record


@bounded
@given(st.lists(st.sampled_from([*ONE_OF_EACH, "/", "1", "-", "", "\0", "t"]), max_size=6))
@example(["Heartbeat/1/2/ii/cl/gr/t/3/5", "\n"])
def test_pieces_decode_or_are_refused(pieces: list[str]) -> None:
    text = "".join(pieces)
    with suppress(WireError):
        assert decode(encode(decode(text))) == decode(text)


@bounded
@given(st.binary(max_size=60) | st.binary(max_size=20).map(lambda b: b"Heartbeat/1/2/" + b))
def test_random_bytes_decode_or_are_refused(data: bytes) -> None:
    with suppress(WireError):
        assert decode_value(encode_value(decode_value(data))) == decode_value(data)
