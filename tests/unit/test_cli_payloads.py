"""JSON lines: every field, and an error that names the line for everything else."""

from __future__ import annotations

import json

import pytest

from kafkamq.cli.output import bytes_fields, headers_object, text_of
from kafkamq.cli.payloads import parse_header, read_lines
from kafkamq.errors import ConfigError
from kafkamq.types import OutgoingMessage


def read(*lines: object) -> list[OutgoingMessage]:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    return [line.message for line in read_lines(texts, source="f.jsonl")]


def test_every_field_is_read() -> None:
    (message,) = read(
        {
            "payload": "é",
            "key": "k",
            "headers": {"a": "1", "b": {"base64": "/w=="}, "c": None},
            "delay": 2,
            "ttl": 3.5,
            "id": "i",
        }
    )
    assert message == OutgoingMessage(
        payload="é".encode(),
        key=b"k",
        headers={"a": b"1", "b": b"\xff"},
        delay=2.0,
        ttl=3.5,
        id="i",
    )


def test_a_json_value_becomes_compact_json() -> None:
    (message,) = read({"json": {"a": [1, "é"]}})
    assert message.payload == '{"a":[1,"é"]}'.encode()


def test_null_and_binary_payloads() -> None:
    assert [message.payload for message in read({"payload": None}, {"payload_base64": "AP8="})] == [
        None,
        b"\x00\xff",
    ]


def test_a_byte_order_mark_is_no_part_of_the_first_line() -> None:
    (line,) = read_lines(['\ufeff{"payload": "x"}'], source="s")
    assert line.message.payload == b"x"


def test_empty_lines_do_not_count_but_number() -> None:
    lines = list(read_lines(["", '{"payload":"x"}', "  ", '{"payload":"y"}'], source="f"))
    assert [line.number for line in lines] == [2, 4]


def test_what_receive_prints_can_be_sent_again() -> None:
    printed = {
        "id": "i",
        **bytes_fields("payload", b"\xff"),
        **bytes_fields("key", None),
        "headers": headers_object({"h": b"1", "binary": b"\xfe"}),
        "queue_id": "q",
        "delivery_count": 2,
        "timestamp_ms": 1,
        "partition": 0,
        "offset": 7,
        "verdict": "ack",
    }
    (message,) = read(printed)
    assert (message.payload, message.id, message.key) == (b"\xff", "i", None)
    assert message.headers == {"h": b"1", "binary": b"\xfe"}


def test_extra_fields_are_handed_out() -> None:
    (line,) = read_lines(['{"payload":"x","queue":"q"}'], source="f", extra_fields=("queue",))
    assert line.extra == {"queue": "q"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ("[1]", "write an object"),
        ({}, "give one of payload"),
        ({"payload": "a", "json": 1}, "give one of payload"),
        ({"payload": 7}, "payload must be a text"),
        ({"payload": "x", "queue": "q"}, "unknown field 'queue'"),
        ({"payload": "x", "delay": "1"}, "delay is '1': it must be seconds"),
        ({"payload": "x", "ttl": True}, "ttl is True"),
        ({"payload": "x", "id": 7}, "id is 7: it must be a text"),
        ({"payload": "x", "headers": ["a"]}, "headers must be an object"),
        ({"payload": "x", "headers": {"a": 1}}, "header 'a'"),
        ({"payload_base64": "!"}, "no base64"),
        ('{"payload":"\\ud800"}', "surrogate"),
        ('{"json":"\\ud800"}', "surrogate"),
        ('{"payload":"x","id":"\\ud800"}', "surrogate"),
        ('{"payload":"x","headers":{"\\ud800":"1"}}', "surrogate"),
        ('{"payload":"x","headers":{"a\\u0000b":"1"}}', "NUL"),
        ({"payload": "x", "headers": {"kafkamq-id": "1"}}, "names of the protocol"),
        ({"payload": "x", "delay": 10**400}, "delay is 1000.*finite"),
        ({"payload": "x", "ttl": -1}, "ttl is -1: it must be at least 0 s"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_line_is_named(line: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        read({"payload": "good"}, line)
    assert "f.jsonl, line 2" in str(caught.value)


def test_headers_of_the_command_line() -> None:
    assert parse_header("a=b=c") == ("a", b"b=c")
    with pytest.raises(ConfigError, match="name=value"):
        parse_header("a")
    with pytest.raises(ConfigError, match="--header 'a'"):
        parse_header("a=\udcff")


def test_cells_show_text_or_size_and_never_control_characters() -> None:
    assert text_of(b"hello") == "hello"
    assert text_of(None) == "null"
    assert text_of(b"\xff\xfe") == "<2 bytes>"
    assert text_of(b"a\x1b[31m\n") == "a\\x1b[31m\\n"
    assert len(text_of(b"x" * 1000)) == 60
