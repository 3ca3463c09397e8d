"""`ragcache verify`."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from ragcache_api.cli.console import (
    DEFAULT_STATE,
    JsonOption,
    LedgerOption,
    RemoteOption,
    StateOption,
    console,
    open_ledger,
    plain_table,
    print_json,
    progress_bar,
)

if TYPE_CHECKING:
    from ragcache.store.verify import Disagreement

_KEY = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")  # whole only in JSON


def verify(
    state: StateOption = DEFAULT_STATE,
    repair: Annotated[bool, typer.Option("--repair", help="Mend what can be mended.")] = False,
    ledger: LedgerOption = None,
    remote: RemoteOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check every row of the ledger against every blob; print what disagrees."""
    from ragcache.store import KVStore, RemoteTier
    from ragcache.store.verify import verify as check

    database = open_ledger(state, ledger)
    try:
        with progress_bar("verifying") as progress:
            far = RemoteTier.open(remote) if remote else None
            store = KVStore.inspect(state, database, far)
            try:
                report = check(store, repair=repair, progress=progress)
            finally:
                store.close()
    finally:
        database.close()
    if as_json:
        print_json({**asdict(report), "clean": report.clean})
    else:
        table = plain_table("kind", "subject", "what is wrong", "", left=4)
        for each in report.found:
            subject = escape(_KEY.sub(r"\1…", each.subject))
            table.add_row(each.kind, subject, escape(each.detail), "mended" if each.mended else "")
        if report.found:
            console.print(table)
        for target, states in report.interrupted.items():
            console.print(
                f"an ingestion was interrupted: {escape(target)} keeps {states} states for the "
                "next one; --repair forgets them"
            )
        verdict = "nothing disagrees" if not report.found else _count(report.found)
        console.print(f"{report.states:,} states, {report.modules:,} modules: {verdict}")
        if report.found and not repair:
            console.print("`ragcache verify --repair` mends what can be mended")
    if not report.clean:
        raise typer.Exit(1)


def _count(found: tuple[Disagreement, ...]) -> str:
    mended = sum(each.mended for each in found)
    return f"{len(found):,} disagreement{'s' if len(found) > 1 else ''}, {mended:,} mended"
