"""What is fetched, what is not, and what is said when it cannot be; with a stand-in for Ivy."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from pathlib import Path

import pytest
from tests.waiting import within

from kafkamq.dev import artifacts
from kafkamq.dev.artifacts import IVY, ArtifactError, Ivy, Module, fetch_kafka, ivy_jar
from kafkamq.dev.environment import JavaError, java_command, parse_java_version


def module(name: str) -> Module:
    content = hashlib.sha256(name.encode()).hexdigest()
    return Module("org.example", name, "1.0", content)


LISTED = tuple(module(name) for name in ("one", "two", "three"))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A version 9.9.9 with a list of three jars, and an Ivy that logs what it is asked for."""
    log = tmp_path / "asked.log"

    def fetch(self: Ivy, wanted, work: Path, *, on_fetched) -> None:
        for count, each in enumerate(wanted, start=1):
            folder = work / "out" / each.organisation / each.name / each.version
            folder.mkdir(parents=True)
            (folder / each.file_name).write_bytes(each.name.encode())
            with log.open("a") as file:
                file.write(f"{each.name}\n")
            on_fetched(count)

    monkeypatch.setattr(Ivy, "fetch", fetch)
    monkeypatch.setattr(artifacts, "committed_list", lambda version: LISTED)
    monkeypatch.setattr(artifacts, "java_command", lambda java: java)
    monkeypatch.setattr(artifacts, "ivy_jar", lambda cache, work: Path("ivy.jar"))
    return log


def test_what_is_missing_is_fetched_once(stand_in: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    first = fetch_kafka("9.9.9", cache_dir=tmp_path, on_progress=lambda *args: told.append(args))
    again = fetch_kafka("9.9.9", cache_dir=tmp_path)
    assert first == again
    assert first.is_verified
    assert first.class_path.split(os.pathsep) == [
        str(tmp_path / "kafka-9.9.9" / f"{name}-1.0.jar") for name in ("one", "two", "three")
    ]
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert stand_in.read_text().split() == ["one", "two", "three"]

    (tmp_path / "kafka-9.9.9" / "two-1.0.jar").unlink()
    (tmp_path / ".fetch-kafka-9.9.9-left").mkdir()  # by a process that was killed
    fetch_kafka("9.9.9", cache_dir=tmp_path)
    assert stand_in.read_text().split() == ["one", "two", "three", "two"]
    assert not list(tmp_path.glob(".fetch-*"))


def test_a_damaged_cache_is_an_error_and_then_mended(stand_in: Path, tmp_path: Path) -> None:
    fetch_kafka("9.9.9", cache_dir=tmp_path)
    (tmp_path / "kafka-9.9.9" / "two-1.0.jar").write_bytes(b"tampered")
    with pytest.raises(ArtifactError, match=r"two-1\.0\.jar is not the published"):
        fetch_kafka("9.9.9", cache_dir=tmp_path)
    fetch_kafka("9.9.9", cache_dir=tmp_path)
    assert (tmp_path / "kafka-9.9.9" / "two-1.0.jar").read_bytes() == b"two"


def test_a_wrong_download_never_reaches_the_cache(
    stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = Module("org.example", "one", "1.0", "0" * 64)
    monkeypatch.setattr(artifacts, "committed_list", lambda version: (wrong,))
    with pytest.raises(ArtifactError, match=f"expected SHA-256 {wrong.sha256}"):
        fetch_kafka("9.9.9", cache_dir=tmp_path)
    assert not list(tmp_path.rglob("*.jar"))


def test_processes_that_fetch_at_once_take_turns(stand_in: Path, tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")  # inherits the stand-in
    workers = [
        fork.Process(target=fetch_kafka, args=("9.9.9",), kwargs={"cache_dir": tmp_path})
        for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(within(60))
    assert [worker.exitcode for worker in workers] == [0, 0, 0, 0]
    assert sorted(stand_in.read_text().split()) == ["one", "three", "two"]


@pytest.mark.parametrize("version", ["4.2", "../4.2.1", "latest", ""])
def test_a_version_must_be_one(version: str, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="not a version"):
        fetch_kafka(version, cache_dir=tmp_path)


def test_without_java_the_message_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(JavaError, match="Install Java 17"):
        fetch_kafka(cache_dir=tmp_path, java=str(tmp_path / "java"))


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('openjdk version "21" 2023-09-19', 21),
        ('java version "1.8.0_392"', 8),
        ('openjdk version "25-ea" 2025-09-16', 25),
        ("nothing of the kind", 0),
    ],
)
def test_java_versions(output: str, expected: int) -> None:
    assert parse_java_version(output) == expected


def test_an_old_java_is_refused(tmp_path: Path) -> None:
    old = tmp_path / "java"
    old.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n")
    old.chmod(0o755)
    with pytest.raises(JavaError, match=r"Java 11 .* is not enough"):
        java_command(str(old))


def test_without_pyspark_ivy_is_fetched_once_and_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache, work, published = tmp_path / "cache", tmp_path / "work", tmp_path / "published.jar"
    for folder in (cache, work):
        folder.mkdir()
    bundled = ivy_jar(cache, work)
    assert not list(cache.iterdir())

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    maven = tmp_path / "mvn"
    maven.write_text(
        f'#!/bin/sh\nfor last; do :; done\ncp "{published}" "${{last#*=}}/{IVY.file_name}"\n'
    )
    maven.chmod(0o755)
    published.write_bytes(b"something else")
    with pytest.raises(ArtifactError, match="expected SHA-256"):
        ivy_jar(cache, work, maven=str(maven))
    assert not list(cache.iterdir())

    published.write_bytes(bundled.read_bytes())  # PySpark bundles the published jar
    jar = ivy_jar(cache, work, maven=str(maven))
    assert (jar.parent, jar.read_bytes()) == (cache, bundled.read_bytes())

    published.unlink()
    assert ivy_jar(cache, work, maven=str(maven)) == jar
    jar.unlink()
    with pytest.raises(ArtifactError, match=r"put ivy-.*jar into"):
        ivy_jar(cache, work, maven=str(maven))


def test_a_failed_download_shows_the_end_of_ivys_output(tmp_path: Path) -> None:
    ivy = tmp_path / "java"
    ivy.write_text("#!/bin/sh\nseq 1 100\necho 'UNRESOLVED DEPENDENCIES: org#one'\nexit 1\n")
    ivy.chmod(0o755)
    with pytest.raises(ArtifactError, match="UNRESOLVED DEPENDENCIES: org#one") as raised:
        Ivy(java=str(ivy), jar=tmp_path / "ivy.jar").fetch(
            [Module("org", "one", "1")], tmp_path, on_fetched=lambda count: None
        )
    assert "\n50\n" not in str(raised.value)


def test_the_real_lists_parse_from_the_package() -> None:
    assert artifacts.committed_list(artifacts.DEFAULT_VERSION) is not None
