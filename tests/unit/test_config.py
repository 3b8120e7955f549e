"""Settings that cannot work say which one, its value and the limit; nothing else is raised."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import kafkamq
from kafkamq import aio
from kafkamq.claims import Member, RangeClaims, init_topic
from kafkamq.config import (
    Backoff,
    Option,
    Options,
    QueueConfig,
    ServiceConfig,
    TrackerConfig,
    converted,
    milliseconds,
    options_of,
    utf8,
)
from kafkamq.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("queue_id", None),
        ("queue_id", b"q"),
        ("queue_id", ""),
        ("queue_id", "\ud800"),
        ("queue_id", "a\0b"),
        ("queue_id", "x" * 1025),
        ("max_deliveries", "3"),
        ("max_deliveries", 2.5),
        ("max_deliveries", True),
        ("max_deliveries", 0),
        ("max_deliveries", 2**31),
        ("max_in_flight", None),
        ("receive_buffer", 0),
        ("max_messages_per_commit", [1]),
        ("max_inline_payload_bytes", -1),
        ("next_message_timeout_ms", 1000.0),
        ("backoff", None),
        ("backoff", 1.0),
        ("exactly_once", "no"),
        ("on_data_loss", None),
    ],
)
def test_queues_that_cannot_be(field: str, value: object) -> None:
    settings: dict[str, Any] = {"queue_id": "q", field: value}
    with pytest.raises(ConfigError, match=field) as raised:
        QueueConfig(**settings)
    assert repr(value)[:70] in str(raised.value)
    assert "must be" in str(raised.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("first", "x"), ("first", None), ("first", -1), ("max", 0.5), ("max", float("nan")),
        ("jitter", "x"), ("jitter", 1.1), ("jitter", True), ("first", timedelta(seconds=1)),
    ],
)  # fmt: skip
def test_backoffs_that_cannot_be(field: str, value: object) -> None:
    settings: dict[str, Any] = {field: value}
    with pytest.raises(ConfigError, match=rf"backoff\.{field}"):
        Backoff(**settings)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bootstrap_servers", None), ("bootstrap_servers", ""), ("bootstrap_servers", 9092),
        ("namespace", None), ("namespace", "a/b"), ("message_topic", 5), ("marker_topic", None),
        ("kafka", "a=b"), ("kafka", [("a", "b")]), ("kafka", None),
    ],
)  # fmt: skip
def test_services_that_cannot_be(field: str, value: object) -> None:
    settings: dict[str, Any] = {"bootstrap_servers": "localhost:9092", field: value}
    with pytest.raises(ConfigError, match=field):
        ServiceConfig(**settings)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_silence_ms", "5"), ("max_transaction_bytes", 0), ("position_interval_ms", True),
        ("max_offsets_per_commit", 50_001), ("max_deliveries", 0), ("max_lease_ms", 0),
        ("max_lease_ms", "10"), ("max_lease_ms", 10.5), ("max_lease_ms", float("inf")),
        ("max_lease_ms", 10**30), ("max_lease_ms", 10**400),
    ],
)  # fmt: skip
def test_trackers_that_cannot_be(field: str, value: object) -> None:
    settings: dict[str, Any] = {field: value}
    with pytest.raises(ConfigError, match=field.removesuffix("_ms")):
        TrackerConfig(**settings)


@pytest.mark.parametrize(
    "value", ["1", None, True, float("nan"), -0.001, pytest.param(10**5000, id="huge"), 10**400]
)
def test_durations_that_cannot_be(value: Any) -> None:
    with pytest.raises(ConfigError, match="delay") as raised:
        milliseconds(value, name="delay")
    assert len(str(raised.value)) < 200


def test_durations() -> None:
    assert milliseconds(1.5, name="delay") == 1500
    assert milliseconds(timedelta(minutes=1), name="delay") == 60_000


@pytest.mark.parametrize("option", options_of(Options), ids=lambda each: each.name)
def test_an_option_may_be_its_default_and_nothing_beyond_its_limits(option: Option[Any]) -> None:
    default_ms = option.convert(option.default)
    if option.default is not None and option.is_time:
        assert default_ms == round(option.default * 1000)
    wrong: list[Any] = ["nothing that it can be", [1]]
    if option.kind in (int, float):
        beyond = 2 * (option.most if option.most < math.inf else 1_500_000_000)
        wrong += [option.least - 1, beyond, True, float("nan")]
    if option.kind is str and not option.choices:
        wrong = [None, b"text"]
    for value in wrong:
        with pytest.raises(ConfigError, match=f"^here: {option.name} is .*: it must be"):
            option.convert(value, of="here: ")


def test_a_limit_is_told_whole() -> None:
    with pytest.raises(ConfigError, match=r"a whole number >= 1 and <= 4,611,686,018,427,387,904"):
        Option(int, 1, name="bytes", most=1 << 62).check(0)
    with pytest.raises(ConfigError, match=r"^max_rate is 0: it must be records a second >= 1e-06"):
        Options.max_rate.check(0)


def test_what_settings_have_of_options() -> None:
    given = {"timeout": None, "batch_linger": timedelta(seconds=2), "threads": 3, "other": 1}
    table = (Options.timeout, Options.batch_linger, Options.threads, Options.processes)
    found = {"timeout_ms": 0, "batch_linger_ms": 2000, "threads": 3}
    assert converted(table, given) == found


@pytest.mark.parametrize(
    "door",
    [
        kafkamq.Service.queue, kafkamq.Service.create_topics, kafkamq.Queue.create_topics,
        kafkamq.Worker.__init__, kafkamq.ParallelConsumer.__init__, aio.Worker.__init__,
        aio.ParallelConsumer.__init__, Member.consumer, RangeClaims.__init__, init_topic,
    ],
)  # fmt: skip
def test_an_option_has_one_default_wherever_it_is_given(door: Callable[..., object]) -> None:
    parameters = inspect.signature(door).parameters
    named = [each for each in options_of(Options) if each.name in parameters]
    assert named
    for option in named:
        default = parameters[option.name].default
        # A request's timeout is another thing than a handler's, and ranges are short.
        is_another = (option.name, default) in (("timeout", 30.0), ("heartbeat_interval", 3.0))
        assert default in (option.default, None) or is_another, option.name


@pytest.mark.parametrize("value", [None, b"a", 5, "\ud800", "a\udcff"])
def test_texts_that_utf8_does_not_have(value: Any) -> None:
    with pytest.raises(ConfigError, match="key"):
        utf8(value, name="key")
    assert utf8("é\0", name="key") == b"\xc3\xa9\0"
