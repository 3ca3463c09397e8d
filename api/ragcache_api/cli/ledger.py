"""`ragcache ledger`: the revision of the ledger and the processes that have it open."""

from __future__ import annotations

from dataclasses import asdict

import typer
from rich.markup import escape

from ragcache_api.cli import console as ui

app = typer.Typer(help="Show the ledger's tables and who has it open.", no_args_is_help=True)


@app.command("status")
def status(
    state: ui.StateOption = ui.DEFAULT_STATE,
    ledger: ui.LedgerOption = None,
    as_json: ui.JsonOption = False,
) -> None:
    """Show the revision of the ledger and who has it open; nothing is changed."""
    from ragcache.db import Database

    ui.check_state(state, ledger)
    found = Database.status(ledger or state / "ledger.sqlite")
    if as_json:
        ui.print_json(asdict(found))
        return
    ui.console.print(
        f"revision {found.revision or 'none'}, this ragcache reads and writes {found.head}"
    )
    if not found.sessions:
        ui.console.print("no process has it open")
        return
    table = ui.plain_table("machine", "process", "silent", left=1)
    for each in found.sessions:
        table.add_row(escape(each.machine.split()[0]), str(each.pid), f"{each.silent:.0f} s")
    ui.console.print(table)
