"""`ragcache ledger`: the revision of the ledger, who has it open, and migrating it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.markup import escape

from ragcache_api.cli import console as ui

if TYPE_CHECKING:
    from ragcache.db import LedgerStatus

app = typer.Typer(help="The ledger's tables, and migrating them.", no_args_is_help=True)

_CONDITIONS = {
    "empty": "there are no tables yet; `ragcache ledger upgrade` makes them",
    "outdated": "`ragcache ledger upgrade` migrates it",
    "current": "up to date",
    "newer": "of a later ragcache, and serves this one",
    "too new": "of a later ragcache, and does not serve this one: upgrade ragcache",
}


@app.command("status")
def status(
    state: ui.StateOption = ui.DEFAULT_STATE,
    ledger: ui.LedgerOption = None,
    as_json: ui.JsonOption = False,
) -> None:
    """Show the revision of the ledger and who has it open; nothing is changed."""
    from ragcache.db import Database

    _print(Database.status(_where(state, ledger)), as_json)


@app.command("upgrade")
def upgrade(
    state: ui.StateOption = ui.DEFAULT_STATE,
    ledger: ui.LedgerOption = None,
    as_json: ui.JsonOption = False,
) -> None:
    """Migrate the ledger to the revision of this ragcache, beside running processes that the new
    tables serve."""
    from ragcache.db import Database

    _print(Database.upgrade(_where(state, ledger)), as_json)


def _where(state: Path, ledger: str | None) -> Path | str:
    ui.check_state(state, ledger)
    return ledger or state / "ledger.sqlite"


def _print(found: LedgerStatus, as_json: bool) -> None:
    if as_json:
        ui.print_json({**asdict(found), "condition": found.condition})
        return
    ui.console.print(
        f"revision {found.revision or 'none'}, this ragcache {found.head}: "
        f"{_CONDITIONS[found.condition]}"
    )
    if not found.sessions:
        ui.console.print("no process has it open")
        return
    table = ui.plain_table("machine", "process", "revision", "format", "silent", left=1)
    for each in found.sessions:
        machine, silent = escape(each.machine.split()[0]), f"{each.silent:.0f} s"
        table.add_row(machine, str(each.pid), each.revision, str(each.format), silent)
    ui.console.print(table)
