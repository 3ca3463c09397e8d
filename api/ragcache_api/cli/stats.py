"""`ragcache stats`."""

from __future__ import annotations

from dataclasses import asdict

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

_REASONS = ("pressure", "ttl", "manual", "superseded", "corrupt", "fetched_again")


def stats(
    state: StateOption = DEFAULT_STATE,
    ledger: LedgerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Sum up collections, tiers and evictions of a state folder."""
    from ragcache.db import Catalog, Ledger

    database = open_ledger(state, ledger)
    try:
        states = Ledger(database)
        collections = Catalog(database, "", None).collections()
        tiers = {tier: asdict(totals) for tier, totals in states.totals().items()}
        evictions = states.evictions()
    finally:
        database.close()
    if as_json:
        print_json({"collections": collections, "tiers": tiers, "evictions": evictions})
        return
    table = plain_table("collection", "documents")
    for name, documents in collections.items():
        table.add_row(escape(name), f"{documents:,}")
    console.print(table if collections else "no collections yet; `ragcache ingest` makes one")
    _show_tiers(tiers)
    _show_evictions(evictions)


def _show_tiers(tiers: dict[str, dict[str, int]]) -> None:
    if not tiers:
        return
    table = plain_table("tier", "states", "size", "tokens", "hits")
    for tier, sums in tiers.items():
        numbers = [f"{sums[name]:,}" for name in ("tokens", "hits")]
        table.add_row(tier, f"{sums['states']:,}", binary_size(sums["nbytes"]), *numbers)
    console.print()
    console.print(table)


def _show_evictions(evictions: dict[str, dict[str, int]]) -> None:
    if not evictions:
        return
    table = plain_table("evicted from", *(reason.replace("_", " ") for reason in _REASONS))
    for tier, counts in evictions.items():
        table.add_row(
            tier, *(f"{counts[reason]:,}" if reason in counts else "" for reason in _REASONS)
        )
    console.print()
    console.print(table)
