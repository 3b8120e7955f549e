"""Writes the table of docs/backends.md from the code; ``--check``: says whether it is current."""

from __future__ import annotations

import sys
from pathlib import Path

from kafkamq.queue.rules.capabilities import markdown_table

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "backends.md"
BEGIN = "<!-- table: kafkamq backends --markdown -->\n"
END = "<!-- end of table -->\n"


def current(text: str) -> str:
    """The document with the table as the code has it."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{markdown_table()}\n{END}{tail}"


def main() -> int:
    """Exit code 1: it was not current."""
    text = DOCUMENT.read_text(encoding="utf-8")
    wanted = current(text)
    if "--check" not in sys.argv[1:]:
        DOCUMENT.write_text(wanted, encoding="utf-8")
        return 0
    return int(text != wanted)


if __name__ == "__main__":
    sys.exit(main())
