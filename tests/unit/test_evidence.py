"""What documents and docstrings name exists: tests, files; and each hole has a test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
EVIDENCE = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
FILES = re.compile(r"`(tests/[\w/]+(?:\.py)?)`")
NOT_FOLLOWED = {6, 16, 17, 18}
PRODUCT = ROOT / "src" / "kafkamq"
PATHS = re.compile(r"`([\w/-]*\w\.(?:py|proto))`")
ROOTS = (PRODUCT, PRODUCT.parent, ROOT, ROOT / "examples")


def test_every_named_test_exists() -> None:
    named = NAMED.findall(EVIDENCE)
    assert len(named) > 50
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / path).exists()
        or not re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text("utf-8"), re.MULTILINE)
    ]
    assert not missing


def test_every_hole_has_a_test() -> None:
    rows = [line.split("|") for line in EVIDENCE.splitlines() if re.match(r"\| \d+ \|", line)]
    holes = {int(row[1]): NAMED.findall(row[3]) for row in rows}
    assert set(holes) == set(range(1, 25)) - NOT_FOLLOWED
    assert all(holes.values())


def test_the_fault_runs_are_as_many_as_is_said() -> None:
    table = EVIDENCE.split("\n| scenario | faults |")[1].split("\n\n")[0]
    rows = [line.split("|") for line in table.splitlines()[2:]]
    faults = sum(int(count) for row in rows for count in re.findall(r"(\d+) x ", row[2]))
    messages = sum(int(row[3].replace(",", "")) for row in rows)
    assert f"{messages:,} confirmed messages, {faults:,} faults, " in EVIDENCE
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(rf"\*\*{faults:,} faults\*\* [^.]* under {messages:,} messages", readme)


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_other_pages_name_files_alone_and_those_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert path.name == "evidence.md" or not NAMED.search(text)
    assert [name for name in FILES.findall(text) if not (ROOT / name).exists()] == []
    assert [name for name in PATHS.findall(text) if "/" in name and not _exists(name)] == []


def test_architecture_names_files_that_exist() -> None:
    """A name without a folder stands behind one in the same folder, or a neighbour's."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    folders = (PRODUCT, ROOT / "harness", ROOT / "tests")
    every = {path.name for folder in folders for path in folder.rglob("*.py")}
    assert [name for name in PATHS.findall(text) if name.split("/")[-1] not in every] == []


def test_files_that_the_code_names_exist() -> None:
    """In the product, with their folder where they are not beside the file that names them."""
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted(PRODUCT.rglob("*.py"))
        for name in PATHS.findall(path.read_text(encoding="utf-8"))
        if not ("/" in name and _exists(name)) and not (path.parent / name).exists()
    ]
    assert missing == []


def _exists(name: str) -> bool:
    return any((root / name).exists() for root in ROOTS)
