"""`ragcache namespaces`: the tenants of a state folder, and their deletion."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from ragcache.config import check_namespace
from ragcache_api.cli import console as ui
from ragcache_api.cli.options import LEDGER, STORE, expand_options
from ragcache_api.service_options import ServiceOptions

if TYPE_CHECKING:
    from ragcache.db import NamespaceDeletion

app = typer.Typer(help="The namespaces.", no_args_is_help=True)


@app.command("ls")
@expand_options
def list_names(
    options: Annotated[ServiceOptions, LEDGER],
    as_json: ui.JsonOption = False,
) -> None:
    """List the names of all namespaces."""
    with ui.open_ledger(ui.read_settings(options)) as database:
        from ragcache.db import NamespaceRows

        names = NamespaceRows(database).names()
    if as_json:
        ui.print_json(names)
    else:
        typer.echo("\n".join(names))


@app.command("rm")
@expand_options
def remove(
    name: Annotated[str, typer.Argument(help="The namespace. `default` keeps its API keys.")],
    options: Annotated[ServiceOptions, STORE],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would change.")] = False,
    as_json: ui.JsonOption = False,
) -> None:
    """Delete a namespace with everything in it. A running service follows within seconds."""
    check_namespace(name)
    settings = ui.read_settings(options)
    ui.check_state(settings)
    from ragcache.store.admin import delete_namespace

    with ui.inspect_store(settings) as (_, store):
        deleted = delete_namespace(store, name, dry_run=dry_run)
    if as_json:
        ui.print_json({"name": name, "dry_run": dry_run, **asdict(deleted)})
        return
    would = "would be deleted" if dry_run else "is deleted"
    ui.console.print(f"the namespace {escape(name)} {would}")
    ui.console.print(ui.plain_table("of it", "number", rows=_rows(deleted)))


def _rows(deleted: NamespaceDeletion) -> list[tuple[str, str]]:
    """Return what there was of each kind, with its number."""
    counts = asdict(deleted)
    tiers = counts.pop("tiers")
    counts |= counts.pop("objects") | {f"bytes of {tier}": n for tier, n in tiers.items()}
    return [(kind.replace("_", " "), f"{number:,}") for kind, number in counts.items() if number]
