"""The lists of jars: read strictly, and every jar checked against them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from kafkamq.dev.artifacts import (
    ArtifactError,
    Module,
    committed_list,
    format_list,
    parse_list,
    verify,
)

SHA = "ab" * 32


def test_a_list_is_read_as_it_was_written() -> None:
    modules = (Module("org.b", "two", "2.0", SHA), Module("org.a", "one", "1.0-rc.1", SHA))
    text = format_list("1.2.3", modules)
    assert text.startswith("# Apache Kafka 1.2.3")
    assert parse_list(text, source="x") == tuple(reversed(modules))


@pytest.mark.parametrize(
    "line",
    [
        "org.a:one:1.0",
        f"org.a:one {SHA}",
        f"org.a:one:1.0 {SHA[:-1]}",
        f"org.a:one:1.0 {SHA.upper()}",
        f"org.a:../one:1.0 {SHA}",
        f"org.a:one:1.0  {SHA}",
        f"org.a:one:1.0 {SHA} more",
    ],
)
def test_a_malformed_line_is_refused_with_its_place(line: str) -> None:
    with pytest.raises(ArtifactError, match=r"list\.txt:2"):
        parse_list(f"# head\n{line}\n", source="list.txt")


def test_an_empty_list_and_equal_file_names_are_refused() -> None:
    with pytest.raises(ArtifactError, match="empty"):
        parse_list("# nothing\n\n", source="list.txt")
    with pytest.raises(ArtifactError, match="same file name"):
        parse_list(f"org.a:one:1.0 {SHA}\norg.b:one:1.0 {SHA}\n", source="list.txt")


@pytest.mark.parametrize("version", ["4.4.0", "4.2.1", "3.9.1"])
def test_committed_lists_are_whole(version: str) -> None:
    modules = committed_list(version)
    assert modules is not None
    names = {(module.organisation, module.name): module.version for module in modules}
    assert names["org.apache.kafka", "kafka_2.13"] == version
    assert names["org.apache.kafka", "kafka-clients"] == version
    # Without a binding of the same version a broker that fails says nothing.
    assert names["org.slf4j", "slf4j-simple"] == names["org.slf4j", "slf4j-api"]


def test_a_version_without_a_list_has_none() -> None:
    assert committed_list("0.0.1") is None


def test_missing_jars_are_named_and_good_ones_pass(tmp_path: Path) -> None:
    good = Module("org.a", "good", "1", hashlib.sha256(b"jar").hexdigest())
    missing = Module("org.a", "missing", "1", SHA)
    (tmp_path / good.file_name).write_bytes(b"jar")
    assert verify(tmp_path, [good, missing]) == [missing]


def test_a_wrong_jar_is_reported_and_removed(tmp_path: Path) -> None:
    module = Module("org.a", "one", "1.0", SHA)
    jar = tmp_path / module.file_name
    jar.write_bytes(b"tampered")
    with pytest.raises(ArtifactError) as raised:
        verify(tmp_path, [module])
    text = str(raised.value)
    assert str(jar) in text
    assert SHA in text
    assert hashlib.sha256(b"tampered").hexdigest() in text
    assert not jar.exists()
    assert verify(tmp_path, [module]) == [module]
