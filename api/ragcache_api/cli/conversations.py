"""`ragcache conversations`: the kept conversations of a namespace."""

from __future__ import annotations

from typing import Annotated

import typer

from ragcache.config import NAMESPACE
from ragcache_api.cli import console as ui
from ragcache_api.cli.options import STORE, expand_options
from ragcache_api.service_options import ServiceOptions

app = typer.Typer(help="The kept conversations.", no_args_is_help=True)

Namespace = Annotated[str, typer.Option(help="The namespace of the conversations.")]


@app.command("ls")
@expand_options
def sizes(
    options: Annotated[ServiceOptions, STORE],
    namespace: Namespace = NAMESPACE,
    as_json: ui.JsonOption = False,
) -> None:
    """Show the bytes of conversations in each tier, on all machines."""
    settings = ui.read_settings(options)
    ui.check_state(settings)
    from ragcache.db import ConversationStates

    with ui.open_ledger(settings) as database:
        found = ConversationStates(database, namespace).sizes()
    if as_json:
        ui.print_json(found)
    elif not found:
        ui.console.print("no conversation is kept")
    else:
        rows = [(tier, f"{nbytes:,}") for tier, nbytes in found.items()]
        ui.console.print(ui.plain_table("tier", "bytes", rows=rows))


@app.command("rm")
@expand_options
def remove(
    options: Annotated[ServiceOptions, STORE],
    name: Annotated[
        str | None, typer.Argument(help="Its `prompt_cache_key`. `--all` in place of a name.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All of the namespace.")] = False,
    namespace: Namespace = NAMESPACE,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would change.")] = False,
    as_json: ui.JsonOption = False,
) -> None:
    """Delete a conversation from every tier. A running service follows within seconds."""
    if every == (name is not None):
        raise typer.BadParameter("give either the NAME of a conversation or --all")
    settings = ui.read_settings(options)
    ui.check_state(settings)
    from ragcache.db import ConversationStates

    with ui.inspect_store(settings) as (database, store):
        deleted = ConversationStates(database, namespace).delete(name, dry_run=dry_run)
        store.discard(deleted.keys)
    if as_json:
        counts = {"conversations": deleted.conversations, "states": deleted.states}
        ui.print_json({"dry_run": dry_run, **counts, "bytes": deleted.freed})
        return
    would = "would be deleted" if dry_run else "deleted"
    freed = sum(deleted.freed.values())
    ui.console.print(f"{deleted.conversations:,} conversations {would}, {freed:,} bytes")
