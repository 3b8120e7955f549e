"""Where the commands take their settings from, and that secrets go nowhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kafkamq.cli.options import load_settings, parse_properties, service_config
from kafkamq.errors import ConfigError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.upper().startswith("KAFKAMQ_"):
            monkeypatch.delenv(name)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_options_stand_above_environment_above_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(
        tmp_path,
        "k.toml",
        'bootstrap_servers = "file:1"\nnamespace = "file"\nmarker_topic = "marks"\n'
        '[kafka]\nlinger.ms = 5\n"client.id" = "file"\nsocket.keepalive.enable = true\n',
    )
    settings = load_settings(config=file)
    assert (settings.bootstrap_servers, settings.namespace) == ("file:1", "file")
    assert settings.kafka == {
        "linger.ms": "5",
        "client.id": "file",
        "socket.keepalive.enable": "true",
    }
    monkeypatch.setenv("KAFKAMQ_NAMESPACE", "environment")
    monkeypatch.setenv("KAFKAMQ_KAFKA__CLIENT_ID", "environment")
    settings = load_settings(config=file)
    assert (settings.namespace, settings.kafka["client.id"]) == ("environment", "environment")
    assert settings.kafka["linger.ms"] == "5"
    settings = load_settings(config=file, namespace="option", properties=["client.id=option"])
    assert (settings.namespace, settings.kafka["client.id"]) == ("option", "option")
    config = service_config(settings)
    assert (config.marker_topic, config.message_topic) == ("marks", "option.messages")


def test_java_properties_give_the_servers_too(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "client.properties",
        "# ours\nbootstrap.servers=host:9092\nkafkamq.namespace=shop\n"
        "kafkamq.dead-letter-topic=dead\nsasl.password=a=b\n",
    )
    config = service_config(load_settings(config=file))
    assert (config.bootstrap_servers, config.namespace) == ("host:9092", "shop")
    assert config.dead_letter_topic == "dead"
    assert config.kafka == {"sasl.password": "a=b"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.properties", "\ufeffbootstrap.servers=host:9092\nclient.id=a=b c\n"),
        ("A.PROPERTIES", "bootstrap.servers: host:9092\r\n! no\rclient.id : a=b c\n"),
        ("a.properties", "bootstrap.servers=\\\n   host:9092\nclient.id=a\\u003Db\\ c"),
        ("a.toml", "\ufeffbootstrap_servers='host:9092'\nkafka.client.id='a=b c'\n"),
    ],
)
def test_files_are_read_as_editors_and_java_write_them(
    tmp_path: Path, name: str, text: str
) -> None:
    config = service_config(load_settings(config=write(tmp_path, name, text)))
    assert (config.bootstrap_servers, config.kafka) == ("host:9092", {"client.id": "a=b c"})


@pytest.mark.parametrize(
    "name", ["sasl.password", "ssl.key.password", "ssl.key.pem", "sasl.oauthbearer.client.secret"]
)
def test_a_secret_is_refused_on_the_command_line_and_not_repeated(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_properties([f"{name}=hunter2"])
    assert "hunter2" not in str(caught.value)
    assert "KAFKAMQ_KAFKA__" + name.upper().replace(".", "_") in str(caught.value)


def test_settings_do_not_show_what_is_in_kafka() -> None:
    settings = load_settings(bootstrap_servers="h:1")
    with_secret = replace(settings, kafka={"sasl.password": "hunter2"})
    assert "hunter2" not in repr(with_secret)
    assert "hunter2" not in repr(service_config(with_secret))


@pytest.mark.parametrize("value", ["12345", "none", "null", "true", '{"a": 1}', "[1", '"quoted"'])
def test_whatever_a_password_looks_like_it_is_a_text(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("KAFKAMQ_KAFKA__SASL_PASSWORD", value)
    assert load_settings().kafka == {"sasl.password": value}


@pytest.mark.parametrize(
    "value", ["canary", '{"sasl.password": "canary"', '["canary"]', '{"sasl.password": ["canary"]}']
)
def test_properties_that_are_no_object_are_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("KAFKAMQ_KAFKA", value)
    with pytest.raises(ConfigError, match="KAFKAMQ_") as raised:
        load_settings()
    assert "canary" not in str(raised.value)


def test_a_property_with_an_underscore_has_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKAMQ_KAFKA__LOG_LEVEL", "7")
    assert load_settings().kafka == {"log_level": "7"}


def test_variables_beside_the_object_are_properties_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKAMQ_KAFKA", '{"client.id": "a", "Linger.MS": "1"}')
    monkeypatch.setenv("kafkamq_kafka__client_id", "b")
    monkeypatch.setenv("KAFKAMQ_MARKER_TOPIC", "m")
    monkeypatch.setenv("KAFKAMQ_NOTHING", "x")
    settings = load_settings()
    assert settings.kafka == {"client.id": "b", "linger.ms": "1"}
    assert settings.marker_topic == "m"


def test_no_broker_says_how_to_name_one() -> None:
    with pytest.raises(ConfigError, match=r"KAFKAMQ_BOOTSTRAP_SERVERS.*kafkamq dev"):
        service_config(load_settings())


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.toml", "bootstrap = 'x'", "unknown setting 'bootstrap'"),
        ("a.toml", "namespace = 7", "namespace must be a text"),
        ("a.toml", "kafka = 7", "kafka must be a table"),
        ("a.toml", "[kafka]\nx = [1]", "kafka.x must be"),
        ("a.toml", "namespace = ", "a.toml"),
        ("a.properties", "just words", "line 1"),
        ("a.properties", "kafkamq.nothing=1", "unknown setting 'nothing'"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_settings(config=write(tmp_path, name, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: cannot read it"):
        load_settings(config=tmp_path / "nowhere.toml")


@pytest.mark.parametrize("text", ["novalue", "=x"])
def test_a_property_needs_a_name_and_a_value(text: str) -> None:
    with pytest.raises(ConfigError, match="name=value"):
        parse_properties([text])
