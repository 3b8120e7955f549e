"""Checks the sizes that the code style allows: files, functions, lines, and files in a folder.

Prints each place that is too long and exits with 1 when there is one. Generated code is left out.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 70
MAX_COLUMNS = 100
MAX_FILES = 25  # in a folder of the product
FOLDERS = ("src", "harness", "tests", "tools", "benchmarks", "examples")
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


def long_functions(text: str) -> Iterator[tuple[int, str]]:
    """Yields (line number, complaint) for each function over the limit, docstring included."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {length} lines, {MAX_FUNCTION_LINES} at most"


def complaints(text: str) -> Iterator[tuple[int, str]]:
    """Yields the lines and functions that are too long in one file, and the file if it is."""
    count = len(text.splitlines())
    if count > MAX_FILE_LINES:
        yield count, f"file has {count} lines, {MAX_FILE_LINES} at most"
    yield from long_lines(text)
    yield from long_functions(text)


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
    for path in sources(root):
        name, text = str(path.relative_to(root)), path.read_text(encoding="utf-8")
        found += [f"{name}:{line}: {complaint}" for line, complaint in complaints(text)]
    for complaint in found:
        print(complaint)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
