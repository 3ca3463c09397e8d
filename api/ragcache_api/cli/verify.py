"""`ragcache verify`."""

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
    print_json,
    progress_bar,
)


def verify(
    state: StateOption = DEFAULT_STATE,
    repair: Annotated[bool, typer.Option("--repair", help="Mend what can be mended.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check every row of the ledger against every blob; print what disagrees."""
    from ragcache.store import Database, KVStore
    from ragcache.store.verify import verify as check

    database = Database.open_existing(state / "ledger.sqlite")
    try:
        with progress_bar("verifying") as progress:
            store = KVStore.inspect(state, database)
            try:
                report = check(store, repair=repair, progress=progress)
            finally:
                store.close()
    finally:
        database.close()
    if as_json:
        print_json({**asdict(report), "clean": report.clean})
    else:
        table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
        for name in ("kind", "subject", "what is wrong", ""):
            table.add_column(name, overflow="fold")
        for each in report.found:
            subject = escape(each.subject)
            table.add_row(each.kind, subject, escape(each.detail), "mended" if each.mended else "")
        if report.found:
            console.print(table)
        for target, states in report.interrupted.items():
            console.print(
                f"an ingestion was interrupted: {escape(target)} keeps {states} states for the "
                "next one; --repair forgets them"
            )
        verdict = "nothing disagrees" if not report.found else _count(report.found)
        console.print(f"{report.states} states, {report.modules} modules: {verdict}")
    if not report.clean:
        raise typer.Exit(1)


def _count(found: tuple[object, ...]) -> str:
    mended = sum(bool(getattr(each, "mended", False)) for each in found)
    return f"{len(found)} disagreements, {mended} mended"
