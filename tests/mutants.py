"""Mutants: for each rule, an edit of a function that breaks it, and the tests that must notice.

``tools/run_mutants.py`` puts each into a copy of the tree and runs its tests; one that survives is
a rule that no test guards. The lists are ``tests/mutant_lists/*.txt``:

    redelivery:RedeliveryTracker._expire
    R2: an entry is due at its deadline [core_time, redelivery_agreement]
        entry.deadline_ms < now_ms => entry.deadline_ms <= now_ms

First comes the place: a module's last name, and a function or class in it, or nothing: all of it.
Where no module of that name has the function, it may be in any other, so files may move. Then, for
each mutant, its rule, what breaks, its tests (NAME or FOLDER/NAME for
``tests/FOLDER/test_NAME.py``, and options of pytest) and the edit: an expression or statements,
``=>``, and what takes their place (nothing: they are left out). A long edit has ``=>`` on a line of
its own. Both sides are compared as syntax: layout and comments do not count. A body ``...`` is any
body, and stays. ``tests/unit/test_mutants.py`` checks that each edit fits exactly one place.
"""

from __future__ import annotations

import ast
import copy
import functools
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MUTANTS", "MisfitError", "Mutant", "mutated", "place"]

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "src/kafkamq"
_LISTS = Path(__file__).with_name("mutant_lists")
_PLACE = re.compile(r"(\w+):([\w.]*)")
_HEAD = re.compile(r"([^:]+): (.+) \[(.+)\]")


class MisfitError(Exception):
    """A mutant that fits no place, or more than one."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One edit that breaks a rule."""

    rule: str
    breaks: str  # what is wrong with it
    module: str  # the last part of its name
    function: str  # with its class; or a class; or nothing: the whole module
    old: str
    new: str
    tests: tuple[str, ...]  # arguments of pytest


# What the lists say.


def _read(text: str) -> Iterator[Mutant]:
    module = function = ""
    for block in re.split(r"\n(?=\S)", text):
        first, *rest = [line for line in block.splitlines() if not line.startswith("#")] or [""]
        if place := _PLACE.fullmatch(first):
            module, function = place.groups()
        elif head := _HEAD.fullmatch(first):
            rule, breaks, tests = head.groups()
            edit = textwrap.dedent("\n".join(rest)).strip()
            old, _, new = (f"\n{edit}\n" if "\n" in edit else f"{edit} ").partition("=>")
            old, new = old.strip(" \n"), new.strip(" \n")
            yield Mutant(rule, breaks, module, function, old, new, _tests(tests))
        elif first:
            raise ValueError(f"neither a place nor a mutant: {first!r}")


def _tests(text: str) -> tuple[str, ...]:
    names, _, options = text.partition(" -")
    paths = []
    for name in names.split(", "):
        folder, _, name = name.rpartition("/")
        found = sorted((ROOT / "tests").glob(f"{folder or '*'}/test_{name}.py"))
        if len(found) != 1:
            raise ValueError(f"{len(found)} files are tests/*/test_{name}.py")
        paths.append(str(found[0].relative_to(ROOT)))
    return (*paths, *(f"-{options}".split() if options else ()))


# Where an edit fits, and what becomes of the file.


def place(mutant: Mutant, root: Path = ROOT) -> tuple[Path, int]:
    """The file below `root` that the mutant changes, and which of the functions of that name.

    Raises:
        MisfitError: There is no such place, or more than one; or the edit changes nothing.
    """
    edit = _Edit(mutant.old, mutant.new)
    fits = [
        (path, index)
        for path, index, scope in _scopes(mutant, root)
        for _ in range(edit.count(scope))
    ]
    if len(fits) != 1 or edit.is_empty:
        found = "no change" if edit.is_empty else f"{len(fits)} places"
        raise MisfitError(f"{mutant.module}:{mutant.function}: {found} for {mutant.old!r}")
    return fits[0]


def mutated(mutant: Mutant, root: Path = ROOT) -> tuple[Path, str]:
    """The file below `root` that the mutant changes, and its new text.

    Raises:
        MisfitError: As `place`.
    """
    path, index = place(mutant, root)
    tree = copy.deepcopy(_parsed(path))
    _Edit(mutant.old, mutant.new).apply(_named(tree, mutant.function)[index])
    return path, ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def _scopes(mutant: Mutant, root: Path) -> Iterator[tuple[Path, int, ast.AST]]:
    """The functions of that name, in modules of that name, else in all."""
    files = sorted((root / PACKAGE).rglob(f"{mutant.module}.py"))
    if mutant.function and not any(_named(_parsed(path), mutant.function) for path in files):
        files = sorted((root / PACKAGE).rglob("*.py"))
    for path in files:
        for index, scope in enumerate(_named(_parsed(path), mutant.function)):
            yield path, index, scope


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _named(tree: ast.Module, name: str) -> list[ast.AST]:
    found: list[ast.AST] = [tree]
    for part in name.split(".") if name else ():
        found = [
            node
            for scope in found
            for node in getattr(scope, "body", ())
            if getattr(node, "name", None) == part
        ]
    return found


class _Edit:
    """One expression for another, or some statements for others."""

    def __init__(self, old: str, new: str) -> None:
        self._old = ast.parse(old).body
        self._new = ast.parse(new).body
        self._is_expression = all(
            len(side) == 1 and isinstance(side[0], ast.Expr) for side in (self._old, self._new)
        )

    @property
    def is_empty(self) -> bool:
        """Whether both sides are the same."""
        return list(map(ast.dump, self._old)) == list(map(ast.dump, self._new))

    def count(self, scope: ast.AST) -> int:
        """In how many places it fits."""
        if self._is_expression:
            return sum(_fits(self._value, node) for node in ast.walk(scope))
        return sum(1 for _ in self._runs(scope))

    def apply(self, scope: ast.AST) -> None:
        """Make it, where it fits."""
        if self._is_expression:
            (new,) = self._new
            assert isinstance(new, ast.Expr)
            _Replacing(self._value, new.value).visit(scope)
            return
        for block, start in list(self._runs(scope)):
            end = start + len(self._old)
            kept = block[start:end]
            block[start:end] = [_filled(node, kept) for node in self._new]
            if not block:
                block.append(ast.Pass())

    @property
    def _value(self) -> ast.expr:
        (old,) = self._old
        assert isinstance(old, ast.Expr)
        return old.value

    def _runs(self, scope: ast.AST) -> Iterator[tuple[list[ast.stmt], int]]:
        for node in ast.walk(scope):
            for name in ("body", "orelse", "finalbody"):
                block = getattr(node, name, None)
                if isinstance(block, list):
                    for start in range(len(block) - len(self._old) + 1):
                        pairs = zip(self._old, block[start:], strict=False)
                        if all(_fits(old, there) for old, there in pairs):
                            yield block, start


class _Replacing(ast.NodeTransformer):
    def __init__(self, old: ast.expr, new: ast.expr) -> None:
        self._old = old
        self._new = new

    def visit(self, node: ast.AST) -> ast.AST:
        return self._new if _fits(self._old, node) else super().generic_visit(node)


def _is_any(body: object) -> bool:
    return isinstance(body, list) and [ast.dump(node) for node in body] == [_ANY]


_ANY = ast.dump(ast.parse("...").body[0])


def _fits(old: object, there: object) -> bool:
    """Whether it is the same syntax; what is read or written where is not told apart."""
    if isinstance(old, ast.AST):
        return type(old) is type(there) and all(
            (name == "body" and _is_any(value)) or _fits(value, getattr(there, name, None))
            for name, value in ast.iter_fields(old)
            if not isinstance(value, ast.expr_context)
        )
    if isinstance(old, list):
        return isinstance(there, list) and len(old) == len(there) and all(map(_fits, old, there))
    return bool(old == there and type(old) is type(there))


def _filled(node: ast.stmt, kept: Sequence[ast.stmt]) -> ast.stmt:
    """The new statement, with the body that stood there in the place of `...`."""
    for each in ast.walk(node):
        if _is_any(getattr(each, "body", None)) and not isinstance(each, ast.Lambda):
            each.body = kept[0].body  # type: ignore[attr-defined]
    return node


MUTANTS = [
    mutant for path in sorted(_LISTS.glob("*.txt")) for mutant in _read(path.read_text("utf-8"))
]
