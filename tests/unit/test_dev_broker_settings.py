"""Pure parts of the local broker: properties, environment, ports and what its log says."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kafkamq.dev import LocalKafka, LocalKafkaError, cache_dir_from, java_from
from kafkamq.dev.broker import OWNED, errors_in, format_properties, server_properties
from kafkamq.dev.environment import free_port_pair
from kafkamq.errors import ConfigError, StateError

LOG = """\
2026-01-02T03:04:05.678 [main] INFO kafka.Kafka$ - starting
2026-01-02T03:04:05.700 [main] ERROR kafka.Kafka$ - Exiting Kafka due to fatal exception
org.apache.kafka.common.config.ConfigException: Invalid value many for num.io.threads
\tat org.apache.kafka.common.config.ConfigDef.parseType(ConfigDef.java:751)
Caused by: java.lang.NumberFormatException
\t... 4 more
2026-01-02T03:04:05.710 [main] INFO kafka.Kafka$ - stopping
"""


def properties(**overrides: str) -> dict[str, str]:
    named = {name.replace("_", "."): value for name, value in overrides.items()}
    return server_properties(port=1, controller_port=2, data=Path("/data"), overrides=named)


def test_properties_of_the_user_win_over_the_defaults() -> None:
    assert properties()["num.io.threads"] == "4"
    assert properties(num_io_threads="9")["num.io.threads"] == "9"
    assert properties(compression_type="zstd")["compression.type"] == "zstd"


def test_the_broker_is_on_the_loopback_only() -> None:
    for name in ("listeners", "advertised.listeners"):
        addresses = properties()[name].split(",")
        assert all("://127.0.0.1:" in address for address in addresses)


@pytest.mark.parametrize("name", sorted(OWNED))
def test_owned_properties_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        server_properties(port=1, controller_port=2, data=Path("/d"), overrides={name: "x"})


def test_a_folder_that_kafka_would_split_is_refused() -> None:
    with pytest.raises(ConfigError, match="data_dir"):
        server_properties(port=1, controller_port=2, data=Path("/a,b"), overrides={})


def test_properties_are_escaped_as_java_reads_them() -> None:
    text = format_properties({"a key": " C:\\x\ny", "p": "/tmp/ä 😀"})
    assert text == "a\\ key=\\ C:\\\\x\\ny\np=/tmp/\\u00e4 \\ud83d\\ude00\n"


def test_the_environment_names_the_cache() -> None:
    assert cache_dir_from({}) is None
    assert cache_dir_from({"XDG_CACHE_HOME": "relative"}) is None
    assert cache_dir_from({"XDG_CACHE_HOME": "/x"}) == Path("/x/kafkamq")
    assert cache_dir_from({"XDG_CACHE_HOME": "/x", "KAFKAMQ_CACHE": "/own"}) == Path("/own")


def test_the_environment_names_java() -> None:
    assert java_from({}) == "java"
    assert java_from({"JAVA_HOME": "/jdk"}) == "/jdk/bin/java"


def test_ports_differ() -> None:
    first, second = free_port_pair()
    assert first != second
    assert free_port_pair(first)[0] == first


def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LocalKafkaError, match=f"port {port} .* is in use"):
            free_port_pair(port)


def test_errors_are_picked_out_of_a_log_without_stack_frames() -> None:
    assert errors_in(LOG).splitlines() == [
        "2026-01-02T03:04:05.700 [main] ERROR kafka.Kafka$ - Exiting Kafka due to fatal exception",
        "org.apache.kafka.common.config.ConfigException: Invalid value many for num.io.threads",
        "Caused by: java.lang.NumberFormatException",
    ]


def test_a_log_without_errors_shows_its_end() -> None:
    assert errors_in("\n".join(f"line {n}" for n in range(100))).endswith("line 98\nline 99")


def test_a_broker_that_does_not_run_says_so() -> None:
    broker = LocalKafka()
    for action in (broker.kill, broker.pause, broker.resume):
        with pytest.raises(StateError, match="does not run"):
            action()
    with pytest.raises(StateError, match="not been started"):
        _ = broker.bootstrap_servers
    broker.stop()
    assert not broker.is_running
