"""`ragcache modules`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from ragcache_api.cli.console import (
    DEFAULT_STATE,
    JsonOption,
    StateOption,
    console,
    mebibytes,
    print_json,
)

app = typer.Typer(help="The modules and their states.", no_args_is_help=True)


@app.callback()
def modules() -> None:
    """The modules and their states."""


@app.command("ls")
def ls(
    collection: Annotated[str | None, typer.Argument(help="Only this collection.")] = None,
    state: StateOption = DEFAULT_STATE,
    as_json: JsonOption = False,
) -> None:
    """List modules with the size, tiers and hits of their states."""
    from ragcache.store import Database, list_modules

    database = Database.open_existing(state / "ledger.sqlite")
    try:
        listed = list_modules(database, collection)
    finally:
        database.close()
    if as_json:
        print_json([asdict(row) for row in listed])
        return
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("module", "collection", "tokens", "states", "tiers", "hits"):
        table.add_column(name, justify="right" if name in ("tokens", "states", "hits") else "left")
    for row in listed:
        table.add_row(
            escape(row.name),
            escape(row.collection),
            str(row.tokens),
            mebibytes(row.nbytes),
            ", ".join(row.tiers) or "-",
            str(row.hits),
        )
    console.print(table)
    console.print(
        f"{len(listed)} modules, {sum(r.tokens for r in listed):,} tokens, "
        f"{mebibytes(sum(r.nbytes for r in listed))}"
    )
