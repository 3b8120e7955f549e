"""Fetches the jars of a Kafka version into a cache folder that all processes share.

A version with a committed list is fetched exactly as listed and every jar is checked against its
SHA-256, when it is fetched and each time it is used. A version without one is resolved from its
published POMs with a warning; what came is written down, so that later changes are noticed.

Processes that fetch at the same time take turns (a lock file that the system releases when its
holder dies), and a jar appears in the folder only when it is complete and checked.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kafkamq.dev.errors import ArtifactError
from kafkamq.dev.ivy import Ivy, copy_with_maven, fetched, ivy_jar
from kafkamq.dev.java import java_command
from kafkamq.dev.modules import Module, committed_list, format_list, parse_list, sha256_of, verify

DEFAULT_VERSION = "4.2.1"
_VERSION = re.compile(r"\d+\.\d+\.\d+(-[A-Za-z0-9]+)?")
_KAFKA = ("org.apache.kafka", "kafka_2.13")
_SLF4J_API = ("org.slf4j", "slf4j-api")
_SLF4J_BINDING = ("org.slf4j", "slf4j-simple")  # without one a broken broker dies in silence
_OWN_LIST = "modules.txt"  # in the cache, for a version without a committed list

_log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (jars fetched, jars to fetch); the second is 0 while it is unknown."""


@dataclass(frozen=True, slots=True)
class KafkaJars:
    """The checked jars of one version."""

    version: str
    folder: Path
    modules: tuple[Module, ...]
    is_verified: bool  # the list is a committed one

    @property
    def class_path(self) -> str:
        return os.pathsep.join(str(self.folder / module.file_name) for module in self.modules)


def fetch_kafka(
    version: str = DEFAULT_VERSION,
    *,
    cache_dir: Path | None = None,
    java: str = "java",
    ivy_settings: Path | None = None,
    on_progress: Progress | None = None,
) -> KafkaJars:
    """The jars of ``version``, from the cache or, what is missing, from the public repository.

    Args:
        version: As published, for example ``4.2.1``.
        cache_dir: Shared by all versions and processes; ``~/.cache/kafkamq`` by default.
        java: The Java that runs Ivy.
        ivy_settings: Your own Ivy settings file, for a mirror.
        on_progress: Called in this thread while jars are fetched.

    Raises:
        ArtifactError: a download failed, or a jar is not the listed one.
        JavaError: Java is missing or too old; only when something has to be fetched.
    """
    if _VERSION.fullmatch(version) is None:
        raise ArtifactError(f"{version!r} is not a version of Kafka: give one like 4.2.1")
    cache = (cache_dir or Path.home() / ".cache" / "kafkamq").absolute()
    folder = cache / f"kafka-{version}"
    listed = committed_list(version)
    modules = listed or _own_list(folder)
    if modules is None or verify(folder, modules):
        folder.mkdir(parents=True, exist_ok=True)
        tell = on_progress or _silent
        with _turn(cache / f"kafka-{version}.lock"), _work_folder(cache, version) as work:
            ivy = Ivy(java=java_command(java), jar=ivy_jar(cache, work), settings=ivy_settings)
            modules = listed or _own_list(folder)  # another process may have had its turn
            if modules is None:
                modules = _resolve(version, ivy, folder, work, tell)
            elif missing := verify(folder, modules):
                _fetch(missing, ivy, folder, work, tell)
    return KafkaJars(version, folder, modules, is_verified=listed is not None)


def fetch_modules(
    name: str,
    modules: Sequence[Module],
    *,
    cache_dir: Path | None = None,
    java: str = "java",
    ivy_settings: Path | None = None,
) -> Path:
    """The folder that holds the jars of a list, each of them checked."""
    cache = (cache_dir or Path.home() / ".cache" / "kafkamq").absolute()
    folder = cache / name
    if verify(folder, modules):
        folder.mkdir(parents=True, exist_ok=True)
        with _turn(cache / f"{name}.lock"), _work_folder(cache, name) as work:
            if missing := verify(folder, modules):
                ivy = Ivy(java=java_command(java), jar=ivy_jar(cache, work), settings=ivy_settings)
                _fetch(missing, ivy, folder, work, _silent)
    return folder


def fetch_archive(module: Module, *, cache_dir: Path | None = None) -> Path:
    """The folder that a checked ``tar.gz`` was unpacked into, with its members' own names."""
    cache = (cache_dir or Path.home() / ".cache" / "kafkamq").absolute()
    folder = cache / module.file_name.removesuffix(f".{module.kind}")
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with _turn(cache / f"{folder.name}.lock"), _work_folder(cache, folder.name) as work:
            if not folder.is_dir():
                if verify(cache, [module]):  # else the user has put it there
                    copy_with_maven(module, work, cache)
                    verify(work, [module])
                    (work / module.file_name).replace(cache / module.file_name)
                unpacked = work / "unpacked"
                shutil.unpack_archive(cache / module.file_name, unpacked, filter="data")
                (cache / module.file_name).unlink()
                unpacked.replace(folder)
    return folder


def _silent(done: int, total: int) -> None:
    """The progress that nobody asked for."""


def _own_list(folder: Path) -> tuple[Module, ...] | None:
    path = folder / _OWN_LIST
    if not path.is_file():
        return None
    return parse_list(path.read_text(encoding="ascii"), source=str(path))


def _fetch(modules: Sequence[Module], ivy: Ivy, folder: Path, work: Path, tell: Progress) -> None:
    _log.info("fetching jars", extra={"modules": len(modules), "folder": str(folder)})
    tell(0, len(modules))
    wanted = [(module.organisation, module.name, module.version) for module in modules]
    ivy.fetch(wanted, work, on_fetched=lambda count: tell(count, len(modules)))
    jars = dict(fetched(work))
    for module, coordinates in zip(modules, wanted, strict=True):
        jar = jars.get(coordinates)
        if jar is None:
            raise ArtifactError(f"Ivy reports success but has not fetched {module}")
        jar.rename(jar.with_name(module.file_name))
        verify(jar.parent, [module])
        (jar.parent / module.file_name).replace(folder / module.file_name)


def _resolve(
    version: str, ivy: Ivy, folder: Path, work: Path, tell: Progress
) -> tuple[Module, ...]:
    _log.warning(
        "no list of checked jars for this version of Kafka: its artifacts are not verified",
        extra={"version": version},
    )
    ivy.resolve((*_KAFKA, version), work, on_fetched=lambda count: tell(count, 0))
    apis = [key[2] for key, _ in fetched(work) if key[:2] == _SLF4J_API]
    if not apis:
        raise ArtifactError(f"Kafka {version} came without slf4j-api; this version is unknown")
    with _work_folder(work, version) as second:
        ivy.fetch([(*_SLF4J_BINDING, apis[0])], second, on_fetched=lambda count: None)
        found = fetched(work) + fetched(second)
        modules = tuple(Module(*key, sha256=sha256_of(jar)) for key, jar in found)
        for module, (_, jar) in zip(modules, found, strict=True):
            jar.replace(folder / module.file_name)
    text = format_list(version, modules)
    checked = parse_list(text, source=f"Kafka {version}")
    written = work / _OWN_LIST
    written.write_text(text, encoding="ascii")
    written.replace(folder / _OWN_LIST)
    return checked


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Waits until no other process fetches this version."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released with the file, even by kill -9
        yield


@contextmanager
def _work_folder(parent: Path, version: str) -> Iterator[Path]:
    """A folder beside the cached jars, so that a jar moves into place in one step."""
    prefix = f".fetch-{version}-"
    for left in parent.glob(f"{prefix}*"):  # by a process that was killed: it is our turn now
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as name:
        yield Path(name)
