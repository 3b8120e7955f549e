"""A look at SQL before Spark starts, which takes ten seconds: what cannot be right is said at once.

It knows no grammar. It finds quotes and parentheses that do not close, a first word that begins no
statement, and names behind FROM and JOIN that are no table here. Spark judges what it lets through.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from kafkamq.errors import ConfigError

TABLES = ("messages", "deliveries", "in_flight", "dead_letters", "markers")
_STATEMENTS = (
    "SELECT", "WITH", "FROM", "VALUES", "TABLE", "DESCRIBE", "DESC", "SHOW", "EXPLAIN", "CREATE",
    "DROP", "CACHE", "UNCACHE", "CLEAR", "REFRESH", "SET", "RESET", "USE", "DECLARE", "EXECUTE",
    "INSERT", "ALTER", "ANALYZE", "MERGE", "UPDATE", "DELETE", "TRUNCATE", "MAP", "REDUCE", "ADD",
    "LIST", "LOAD", "BEGIN", "CALL",
)  # fmt: skip
_QUERIES = ("SELECT", "WITH", "FROM", "VALUES", "TABLE")
_TOKEN = re.compile(
    r"--[^\n]*|/\*.*?\*/|'(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.|\"\")*\"|`(?:[^`]|``)*`"
    r"|[A-Za-z_][A-Za-z0-9_]*|\d[\w.]*|\s+|.",
    re.DOTALL,
)
_OPEN = {"(": ")", "[": "]"}


def split_statements(text: str) -> tuple[list[str], str]:
    """Whole statements, each without its semicolon, and what is left behind the last one."""
    done: list[str] = []
    begin = 0
    for match in _TOKEN.finditer(text):
        if match[0] == ";":
            done.append(text[begin : match.start()].strip())
            begin = match.end()
    return [each for each in done if each], text[begin:]


def check_statement(statement: str, *, option: str) -> None:
    """Refuse what cannot be right."""
    tokens = _checked(statement, option)
    if not tokens:
        raise ConfigError(f"{option}: the statement is empty")
    first = next(token for token in tokens if token != "(") if set(tokens) - {"("} else ""
    if first.upper() not in _STATEMENTS:
        raise ConfigError(
            f"{option}: a statement cannot begin with {first!r}"
            f"{_place(statement, statement.index(first))}{_meant(first, _STATEMENTS) or '.'} "
            f"Tables are {', '.join(TABLES)}"
        )
    if first.upper() in _QUERIES:
        _check_tables(tokens, option)


def check_condition(condition: str, *, option: str) -> None:
    """Raise ConfigError if a condition, which stands behind WHERE, cannot be right."""
    tokens = _checked(condition, option)
    if not tokens:
        raise ConfigError(f"{option}: the condition is empty")
    _check_tables(tokens, option)


def _checked(text: str, option: str) -> list[str]:
    """Return the tokens without comments and blanks; quotes and parentheses close."""
    tokens: list[str] = []
    closing: list[tuple[str, int]] = []
    for match in _TOKEN.finditer(text):
        token, at = match[0], match.start()
        if token.isspace() or token.startswith(("--", "/*")):
            continue
        if token in "'\"`":
            raise ConfigError(f"{option}: the quote {token} does not close{_place(text, at)}")
        if token in _OPEN:
            closing.append((_OPEN[token], at))
        elif token in ")]" and (not closing or closing.pop()[0] != token):
            raise ConfigError(f"{option}: {token} closes nothing{_place(text, at)}")
        tokens.append(token)
    if closing:
        wanted, at = closing[-1]
        raise ConfigError(f"{option}: {wanted} is missing for the one{_place(text, at)}")
    return tokens


def _check_tables(tokens: Sequence[str], option: str) -> None:
    known = {*TABLES, *_named(tokens)}
    for name in _tables(tokens):
        if name.lower() not in known:
            raise ConfigError(
                f"{option}: there is no table {name}{_meant(name, TABLES)}. "
                f"Tables are {', '.join(TABLES)}"
            )


def _named(tokens: Sequence[str]) -> Iterable[str]:
    """Names that the statement gives to queries of its own: ``name AS (``, ``name (a, b) AS (``."""
    for at, token in enumerate(tokens):
        if token.upper() == "AS" and tokens[at + 1 : at + 2] == ["("] and at:
            before = at - 1
            if tokens[before] == ")":
                while before and tokens[before] != "(":
                    before -= 1
                before -= 1
            yield tokens[max(0, before)].strip("`").lower()


def _tables(tokens: Sequence[str]) -> Iterable[str]:
    """Plain names behind FROM and JOIN, where these belong to a query.

    FROM also stands in functions, ``extract(YEAR FROM t)``, and in IS DISTINCT FROM.
    """
    in_query = [True]
    for at, token in enumerate(tokens):
        word = token.upper()
        following = tokens[at + 1 : at + 3]
        if token == "(":
            in_query.append(bool(following) and following[0].upper() in _QUERIES)
        elif token == ")":
            in_query.pop()
        elif word in ("FROM", "JOIN") and in_query[-1] and following:
            name, behind = following[0], following[1] if len(following) > 1 else ""
            is_plain = name.strip("`").isidentifier() and behind not in ("(", ".", "`")
            is_distinct = at > 0 and tokens[at - 1].upper() == "DISTINCT" and word == "FROM"
            if is_plain and not is_distinct and name.upper() not in ("LATERAL", *_QUERIES):
                yield name.strip("`")


def _place(text: str, at: int) -> str:
    line = text.count("\n", 0, at) + 1
    return f" (line {line}, column {at - text.rfind(chr(10), 0, at)})"


def _meant(word: str, known: Sequence[str]) -> str:
    by_name = {each.lower(): each for each in known}
    found = get_close_matches(word.lower(), by_name, n=1)
    return f": did you mean {by_name[found[0]]}?" if found else ""
