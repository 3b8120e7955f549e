"""``backends``: what each backend can do."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kafkamq.cli import output
from kafkamq.cli.options import Json
from kafkamq.queue.rules.capabilities import (
    CAPABILITIES,
    Feature,
    heads,
    markdown_table,
    rows,
)
from kafkamq.types import Backend


def backends(
    as_json: Json = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table as docs/backends.md has it.")
    ] = False,
) -> None:
    """Show what the four backends can do."""
    if markdown:
        sys.stdout.write(markdown_table())
    elif as_json:
        output.print_json({each.value: _facts(each) for each in Backend})
    else:
        output.print_table("Backends", ("", *heads()), rows())


def _facts(backend: Backend) -> dict[str, object]:
    found = CAPABILITIES[backend]
    return {
        "memory": found.memory,
        "orders": list(found.orders),
        "features": {each.name.lower(): each in found.features for each in Feature},
        "notes": {each.name.lower(): text for each, text in found.notes.items()},
        "lease": found.lease,
        "delivery_count": found.delivery_count,
        "max_workers": found.max_workers,
        "min_kafka": found.min_kafka,
    }
