"""`ragcache modules`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape

from ragcache_api.cli.console import (
    DEFAULT_STATE,
    JsonOption,
    LedgerOption,
    StateOption,
    binary_size,
    console,
    open_ledger,
    plain_table,
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
    ledger: LedgerOption = None,
    as_json: JsonOption = False,
) -> None:
    """List modules with the size, tiers and hits of their states."""
    from ragcache.store import list_modules

    database = open_ledger(state, ledger)
    try:
        listed = list_modules(database, collection)
    finally:
        database.close()
    if as_json:
        print_json([asdict(row) for row in listed])
        return
    if not listed:
        console.print("no modules yet; `ragcache ingest` makes them")
        return
    pins = any(row.pinned for row in listed)
    table = plain_table("module", "collection", "tiers", "tokens", "states", "hits", left=3)
    if pins:
        table.add_column("")
    for row in listed:
        table.add_row(
            escape(row.name),
            escape(row.collection),
            ", ".join(row.tiers) or "none",
            f"{row.tokens:,}",
            binary_size(row.nbytes),
            f"{row.hits:,}",
            *(["pinned" if row.pinned else ""] if pins else []),
        )
    console.print(table)
    console.print(
        f"{len(listed):,} modules, {sum(r.tokens for r in listed):,} tokens, "
        f"{binary_size(sum(r.nbytes for r in listed))}"
    )
