"""The one mapping of settings: what the user sets, what kafkamq owns, what is never shown."""

from __future__ import annotations

import logging
import logging.config
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from tests.waiting import wait_until

from kafkamq import Service
from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError, StateError
from kafkamq.transport.clients import ClientLog, open_admin, open_consumer, open_producer
from kafkamq.transport.errors import ErrorWatch
from kafkamq.transport.settings import (
    admin_settings,
    consumer_settings,
    is_secret,
    marker_settings,
    producer_settings,
    size_limit,
    transactional_settings,
)

Make = Callable[[ServiceConfig], dict[str, object]]
ROLES: dict[str, Make] = {
    "consumer": lambda config: consumer_settings(config, group_id="g"),
    "producer": producer_settings,
    "transactional": lambda config: transactional_settings(config, transactional_id="t"),
    "admin": admin_settings,
}


def config(**kafka: str) -> ServiceConfig:
    return ServiceConfig(bootstrap_servers="127.0.0.1:1", kafka=kafka)


def of(name: str, value: str) -> ServiceConfig:
    return ServiceConfig(bootstrap_servers="127.0.0.1:1", kafka={name: value})


@pytest.mark.parametrize("make", ROLES.values(), ids=ROLES)
def test_every_role_gets_what_the_user_set_verbatim(make: Make) -> None:
    settings = make(of("ssl.ca.location", "/ca.pem"))
    assert settings["ssl.ca.location"] == "/ca.pem"
    assert settings["bootstrap.servers"] == "127.0.0.1:1"
    assert settings["reconnect.backoff.max.ms"] == 1000


def test_topics_limit_messages_unless_the_user_does() -> None:
    assert size_limit(config(), "t") == "max.message.bytes of t"
    limited = of("message.max.bytes", "9000")
    assert producer_settings(limited)["message.max.bytes"] == "9000"
    assert size_limit(limited, "t").endswith("or message.max.bytes (9000) in the kafka settings")


@pytest.mark.parametrize("make", ROLES.values(), ids=ROLES)
@pytest.mark.parametrize(
    "name",
    [
        "enable.auto.commit",
        "isolation.level",
        "enable.idempotence",
        "acks",
        "request.required.acks",
        "transactional.id",
        "group.id",
        "group.instance.id",
        "auto.offset.reset",
        "bootstrap.servers",
        "metadata.broker.list",
    ],
)
def test_what_kafkamq_owns_is_refused_by_name(make: Make, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} .*belongs to kafkamq"):
        make(of(name, "x"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sasl.jaas.config", "sasl.username"),
        ("ssl.truststore.location", "ssl.ca.location"),
        ("ssl.keystore.key", "ssl.key.pem"),
        ("max.poll.records", "receive_many"),
        ("fetch.max.wait.ms", "fetch.wait.max.ms"),
    ],
)
def test_javas_names_say_what_to_use_instead(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        producer_settings(of(name, "the value"))
    assert name in str(caught.value)
    assert "the value" not in str(caught.value)


def test_the_guarantees_are_in_place() -> None:
    consumer = consumer_settings(config(), group_id="g")
    assert consumer["isolation.level"] == "read_committed"
    assert consumer["auto.offset.reset"] == "error"
    assert consumer["enable.auto.commit"] is False
    assert 2 <= int(str(consumer["fetch.queue.backoff.ms"])) <= 5
    assert consumer["queued.min.messages"] == 20_000
    for producer in (
        producer_settings(config()),
        transactional_settings(config(), transactional_id="t"),
    ):
        assert producer["enable.idempotence"] is True
        assert producer["acks"] == "all"
    assert producer_settings(config())["message.timeout.ms"] == 30_000
    transactional = transactional_settings(config(), transactional_id="t")
    assert transactional["transaction.timeout.ms"] == 10_000


def test_defaults_yield_to_the_user_and_to_the_caller() -> None:
    assert (
        consumer_settings(of("queued.min.messages", "7"), group_id="g")["queued.min.messages"]
        == "7"
    )
    assert consumer_settings(config(), group_id="g", enable_partition_eof=True)[
        "enable.partition.eof"
    ]
    settings = producer_settings(of("queue.buffering.max.ms", "50"))
    assert "linger.ms" not in settings  # the same property by its other name


@pytest.mark.parametrize("name", ["message.timeout.ms", "delivery.timeout.ms"])
@pytest.mark.parametrize(("value", "used"), [("120000", 30_000), ("0", 30_000), ("500", 500)])
def test_a_start_is_not_tried_for_longer_than_ended_ids_are_known(
    name: str, value: str, used: int
) -> None:
    assert int(str(marker_settings(of(name, value))[name])) == used


@pytest.mark.parametrize(("value", "used"), [("900000", 60_000), ("20000", 20_000)])
def test_a_killed_process_holds_readers_back_for_a_minute_at_most(value: str, used: int) -> None:
    long = of("transaction.timeout.ms", value)
    settings = transactional_settings(long, transactional_id="t")
    assert int(str(settings["transaction.timeout.ms"])) == used
    # Whose transactions may take long: what the user says.
    settings = transactional_settings(long, transactional_id="t", transaction_timeout_ms=60_000)
    assert settings["transaction.timeout.ms"] == value


@pytest.mark.parametrize("name", ["reconnect.backoff.ms", "reconnect.backoff.max.ms"])
def test_markers_are_not_kept_from_a_broker_that_returned(name: str) -> None:
    assert marker_settings(of(name, "600000"))[name] == 1000
    assert marker_settings(of(name, "200"))[name] == "200"
    assert consumer_settings(of(name, "600000"), group_id="g")[name] == "600000"
    open_producer(marker_settings(of(name, "600000")))


@pytest.mark.parametrize("name", ["message.timeout.ms", "delivery.timeout.ms"])
def test_a_long_message_timeout_is_no_obstacle_to_transactions(name: str) -> None:
    settings = transactional_settings(of(name, "60000"), transactional_id="t")
    open_producer(settings)  # librdkafka refuses one beyond transaction.timeout.ms


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (open_consumer, ROLES["consumer"](config())),
        (open_producer, ROLES["producer"](config())),
        (open_producer, ROLES["transactional"](config())),
        (open_admin, ROLES["admin"](config())),
    ],
    ids=ROLES,
)
def test_librdkafka_takes_them(make: Callable[..., object], settings: dict[str, object]) -> None:
    assert make(settings) is not None


@pytest.mark.parametrize(
    "name",
    [
        "sasl.password",
        "ssl.key.password",
        "ssl.key.pem",
        "ssl.keystore.password",
        "sasl.oauthbearer.client.secret",
        "sasl.oauthbearer.config",
        "sasl.jaas.config",
        "ssl.keystore.private.key",
    ],
)
def test_secrets_are_secret(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name", ["sasl.username", "sasl.mechanism", "ssl.ca.location", "bootstrap.servers", "acks"]
)
def test_what_is_no_secret_can_be_seen(name: str) -> None:
    assert not is_secret(name)


def test_secrets_stay_out_of_reprs_and_errors() -> None:
    secret = of("sasl.password", "hush")
    assert "hush" not in repr(secret)
    # A value that librdkafka would quote in its refusal.
    settings = {**producer_settings(secret), "security.protocol": "hush"}
    with pytest.raises(ConfigError, match=r"security\.protocol") as caught:
        open_producer(settings)
    assert "hush" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("name", "value"), [("no.such.property", "1"), ("ssl.ca.location", "/nowhere/ca.pem")]
)
def test_what_librdkafka_refuses_is_a_config_error(name: str, value: str) -> None:
    kafka = {name: value, "security.protocol": "ssl"}
    settings = producer_settings(ServiceConfig(bootstrap_servers="127.0.0.1:1", kafka=kafka))
    with pytest.raises(ConfigError, match=name):
        open_producer(settings)


def test_what_librdkafka_tries_again_by_itself_is_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = "Failed to acquire idempotence PID: Coordinator load in progress: retrying"
    with caplog.at_level(logging.INFO, logger="kafkamq.librdkafka"):
        ClientLog().log(logging.WARNING, "%s %s %s", "GETPID", "kafkamq", said)
        assert not caplog.records
        ClientLog().log(logging.WARNING, "%s %s %s", "FAIL", "kafkamq", "Connection refused")
        assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize("name", ["kafkamq", "kafkamq.librdkafka"])
def test_a_quiet_client_logs_nothing_however_logging_is_configured(
    caplog: pytest.LogCaptureFixture, name: str
) -> None:
    of_name = {"level": "DEBUG", "propagate": True}
    watch = ErrorWatch("127.0.0.1:1")
    try:
        logging.config.dictConfig(
            {"version": 1, "disable_existing_loggers": False, "loggers": {name: of_name}}
        )
        with open_admin(admin_settings(config()), watch, quiet=True) as client:
            wait_until(lambda: client.poll(0.1) >= 0 and watch.is_down)
        assert not [each for each in caplog.records if each.name.startswith("kafkamq")]
    finally:
        logging.getLogger(name).setLevel(logging.NOTSET)


@pytest.mark.parametrize("module", ["threading", "queue"])
def test_threads_that_gevent_has_patched_are_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    """A client that waits would stop the only thread, and the first call would never return."""
    patched = SimpleNamespace(is_module_patched=lambda name: name == module)
    monkeypatch.setitem(sys.modules, "gevent.monkey", patched)
    service = Service("127.0.0.1:1")
    with pytest.raises(StateError, match=r"patch_all\(thread=False, queue=False\)"):
        service.queue("q").producer()
