"""Checks the sizes that the code style allows: files, functions, lines, and files in a folder.

Prints each place that is too long and exits with 1 when there is one. Generated code is left out.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 50
MAX_COLUMNS = 100
MAX_FILES = 25  # in a folder of the product
LONG = Path(__file__).with_name("long_functions.txt")
FOLDERS = ("src", "tests", "tools", "benchmarks", "examples")
GENERATED = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def sources(root: Path) -> Iterator[Path]:
    """Yields the Python files below `root` that people write."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            if not path.name.endswith(GENERATED):
                yield path


def long_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yields (line number, complaint) for each line over the limit."""
    for number, line in enumerate(text.splitlines(), start=1):
        if len(line) > MAX_COLUMNS:
            yield number, f"line has {len(line)} columns, {MAX_COLUMNS} at most"


def functions(path: str, text: str) -> Iterator[tuple[tuple[str, str], int]]:
    """Yields (file, function) and its lines, docstring included, of those over the limit."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield (path, node.name), length


def exceptions(text: str) -> dict[tuple[str, str], int]:
    """By file and function: how many lines it may have."""
    rows = [line.split() for line in text.splitlines() if line and line[0] != "#"]
    return {(path, name): int(lines) for path, name, lines in rows}


def long_functions(
    found: dict[tuple[str, str], int], allowed: dict[tuple[str, str], int]
) -> Iterator[str]:
    """Yields what is too long, and exceptions that are not needed: the list can only shrink."""
    for place, length in sorted(found.items()):
        limit = allowed.get(place, MAX_FUNCTION_LINES)
        if length > limit:
            yield f"{place[0]}: {place[1]} has {length} lines, {limit} at most"
    for place, limit in sorted(allowed.items()):
        if found.get(place, 0) < limit:
            yield f"{place[0]}: {place[1]} is shorter than tools/{LONG.name} says, or gone"


def complaints(text: str) -> Iterator[tuple[int, str]]:
    """Yields the lines that are too long in one file, and the file if it is."""
    count = len(text.splitlines())
    if count > MAX_FILE_LINES:
        yield count, f"file has {count} lines, {MAX_FILE_LINES} at most"
    yield from long_lines(text)


def full_folders(root: Path) -> Iterator[str]:
    """Yields a complaint for each folder of the product with too many files."""
    folders = Counter(path.parent for path in sources(root) if path.is_relative_to(root / "src"))
    for folder, count in sorted(folders.items()):
        name = str(folder.relative_to(root))
        if count > MAX_FILES:
            yield f"{name}: {count} files, {MAX_FILES} at most"


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    found = list(full_folders(root))
    lengths: dict[tuple[str, str], int] = {}
    for path in sources(root):
        name, text = str(path.relative_to(root)), path.read_text(encoding="utf-8")
        found += [f"{name}:{line}: {complaint}" for line, complaint in complaints(text)]
        for place, length in functions(name, text):
            lengths[place] = max(length, lengths.get(place, 0))
    found += long_functions(lengths, exceptions(LONG.read_text(encoding="utf-8")))
    for complaint in found:
        print(complaint)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
