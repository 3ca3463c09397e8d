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
    RemoteOption,
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
    from ragcache.db import list_modules

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


@app.command("expire")
def expire(
    modules: Annotated[list[int], typer.Argument(help="Ids, as `ls --json` names them.", min=1)],
    after: Annotated[
        float | None, typer.Option(min=0, help="Seconds from now until the states go.")
    ] = None,
    never: Annotated[bool, typer.Option("--never", help="Lift the limit.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would change.")] = False,
    state: StateOption = DEFAULT_STATE,
    ledger: LedgerOption = None,
    remote: RemoteOption = None,
    as_json: JsonOption = False,
) -> None:
    """Limit how long the states of modules are kept; the documents stay."""
    from ragcache.db import held_keys
    from ragcache.db.tables import DEFAULT_NAMESPACE
    from ragcache.store import KVStore, RemoteTier, admin

    if never == (after is not None):
        raise typer.BadParameter("give either --after SECONDS or --never")
    database = open_ledger(state, ledger)
    try:
        far = RemoteTier.open(remote) if remote else None
        store = KVStore.inspect(state, database, far)
        try:
            keys = held_keys(database, modules, DEFAULT_NAMESPACE)
            done = admin.expire(store, keys, after, dry_run=dry_run)
        finally:
            store.close()
    finally:
        database.close()
    if as_json:
        print_json([{**asdict(change), "key": str(change.key)} for change in done])
        return
    would = "would be" if dry_run else "are"
    until = "without a limit" if after is None else f"for {after:,g} s, unless they are pinned"
    console.print(f"{len(done):,} states {would} kept {until}")
