"""The list of jars that make up a version of Kafka: one ``org:name:version sha256`` per line."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kafkamq.dev.errors import ArtifactError

_LISTS = Path(__file__).parent / "jars"
_PART = r"[A-Za-z0-9._-]+"
_LINE = re.compile(rf"({_PART}):({_PART}):({_PART}) ([0-9a-f]{{64}})")


@dataclass(frozen=True, slots=True)
class Module:
    """One published jar."""

    organisation: str
    name: str
    version: str
    sha256: str
    kind: str = "jar"
    classifier: str = ""

    @property
    def file_name(self) -> str:
        classifier = f"-{self.classifier}" if self.classifier else ""
        return f"{self.name}-{self.version}{classifier}.{self.kind}"

    def __str__(self) -> str:
        plain = f"{self.organisation}:{self.name}:{self.version}"
        return f"{plain}:{self.kind}:{self.classifier}" if self.classifier else plain


def parse_list(text: str, *, source: str) -> tuple[Module, ...]:
    """Reads a list; empty lines and lines that begin with ``#`` are skipped."""
    modules: list[Module] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        found = _LINE.fullmatch(line.strip())
        if found is None:
            raise ArtifactError(f"{source}:{number}: not 'org:name:version sha256': {line!r}")
        modules.append(Module(*found.groups()))
    if len({module.file_name for module in modules}) != len(modules):
        raise ArtifactError(f"{source}: two modules have the same file name")
    if not modules:
        raise ArtifactError(f"{source}: the list is empty")
    return tuple(modules)


def format_list(version: str, modules: Iterable[Module]) -> str:
    lines = sorted(f"{module} {module.sha256}" for module in modules)
    head = (
        f"# Apache Kafka {version} as published: org:name:version and the SHA-256 of its jar.\n"
        f"# Written by: python -m kafkamq.dev {version}\n"
    )
    return head + "".join(f"{line}\n" for line in lines)


def committed_list(version: str) -> tuple[Module, ...] | None:
    """The list that comes with this package, or None for a version without one."""
    path = _LISTS / f"kafka-{version}.txt"
    if not path.is_file():
        return None
    return parse_list(path.read_text(encoding="ascii"), source=path.name)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def verify(folder: Path, modules: Sequence[Module]) -> list[Module]:
    """Checks jars; returns those that are not there. One that differs is removed, and raises."""
    missing: list[Module] = []
    for module in modules:
        path = folder / module.file_name
        if not path.is_file():
            missing.append(module)
            continue
        got = sha256_of(path)
        if got != module.sha256:
            path.unlink(missing_ok=True)
            raise ArtifactError(
                f"{path} is not the published {module}: expected SHA-256 {module.sha256}, "
                f"got {got}. The file has been removed; the next try fetches it."
            )
    return missing
