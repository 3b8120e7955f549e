"""Checks that no test reaches into the privates of the product.

A private name of ``src/kafkamq`` (``_name``) is reached when a test takes it as an attribute of
anything but ``self`` and ``cls``, imports it, or names it as text to ``getattr`` and its like or to
``monkeypatch``. A name that the test's own file defines is the test's. What is left from before
the rule stands in ``tools/privates.txt``, a line per file; that list can only shrink: the check
fails on what is not listed, and on what is listed and gone. ``--shrink`` takes the latter out.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tools" / "privates.txt"
_PRIVATE = re.compile(r"_[A-Za-z]\w*")
_BY_TEXT = frozenset({"getattr", "setattr", "delattr", "hasattr", "object", "attrgetter"})
_OWN = frozenset({"self", "cls"})
_OF_OTHERS = frozenset({"KafkaError"})  # its codes, documented with an underscore


def defined(tree: ast.AST) -> set[str]:
    """The private names that a file gives to anything."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in _OWN:
                names.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg:
            names.add(node.arg)
    return set(filter(_PRIVATE.fullmatch, names))


def reached(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields (line, private name) for each that is not one of the file's own objects'."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _PRIVATE.fullmatch(node.attr):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if owner not in _OWN | _OF_OTHERS:
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kafkamq"):
            for alias in node.names:
                if _PRIVATE.fullmatch(alias.name):
                    yield node.lineno, alias.name
        elif isinstance(node, ast.Call):
            yield from _by_text(node)


def _by_text(call: ast.Call) -> Iterator[tuple[int, str]]:
    name = getattr(call.func, "attr", None) or getattr(call.func, "id", None)
    if name in _BY_TEXT:
        for argument in call.args[:2]:
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                last = argument.value.rpartition(".")[2]
                if _PRIVATE.fullmatch(last):
                    yield call.lineno, last


def findings(root: Path) -> dict[str, list[tuple[int, str]]]:
    """By test file: where it reaches which private name of the product."""
    product: set[str] = set()
    for path in (root / "src").rglob("*.py"):
        product |= defined(ast.parse(path.read_text(encoding="utf-8")))
    found = {}
    for path in sorted((root / "tests").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        own = defined(tree)
        places = [(line, name) for line, name in reached(tree) if name in product - own]
        if places:
            found[str(path.relative_to(root))] = sorted(places)
    return found


def parse_list(text: str) -> dict[str, set[str]]:
    """By test file: what it may reach until it is mended."""
    lines = [line.partition(":") for line in text.splitlines() if line and line[0] != "#"]
    return {file: set(names.split()) for file, _, names in lines}


def compare(
    found: dict[str, list[tuple[int, str]]], listed: dict[str, set[str]]
) -> tuple[list[str], dict[str, set[str]]]:
    """What is reached and not listed, and what is listed and gone."""
    fresh = [
        f"{file}:{line}: reaches the private {name}"
        for file, places in found.items()
        for line, name in places
        if name not in listed.get(file, ())
    ]
    now = {file: {name for _, name in places} for file, places in found.items()}
    gone = {file: names - now.get(file, set()) for file, names in listed.items()}
    return fresh, {file: names for file, names in gone.items() if names}


def shrunk(text: str, gone: dict[str, set[str]]) -> str:
    """The list without what is gone."""
    lines = []
    for line in text.splitlines():
        file, colon, names = line.partition(":")
        if colon and line[0] != "#":
            left = sorted(set(names.split()) - gone.get(file, set()))
            if not left:
                continue
            line = f"{file}: {' '.join(left)}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def main() -> int:
    found = findings(ROOT)
    text = LIST.read_text(encoding="utf-8")
    fresh, gone = compare(found, parse_list(text))
    if "--shrink" in sys.argv[1:] and gone:
        LIST.write_text(shrunk(text, gone), encoding="utf-8")
        gone = {}
    for complaint in fresh:
        print(complaint)
    if fresh:
        print("test by public names, or at the level where the effect is public")
    for file, names in gone.items():
        print(
            f"{file}: {' '.join(sorted(names))}: gone, take it out of tools/privates.txt (--shrink)"
        )
    counts = Counter(name for places in found.values() for _, name in places)
    print(f"tests reach {len(counts)} privates in {counts.total()} places of {len(found)} files")
    return 1 if fresh or gone else 0


if __name__ == "__main__":
    sys.exit(main())
