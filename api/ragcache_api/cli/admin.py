"""`ragcache keys`."""

# MERGED ragcache_api.cli.modules: `ragcache modules`.
# MERGED ragcache_api.cli.stats: `ragcache stats`.
# MERGED ragcache_api.cli.verify: `ragcache verify`.
# MERGED ragcache_api.cli.doctor: `ragcache doctor`: is everything here that answering needs?

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    errors,
    open_ledger,
    plain_table,
    print_json,
    progress_bar,
)

if TYPE_CHECKING:
    from ragcache.db import ApiKeys
    from ragcache.store.verify import Disagreement


keys_app = typer.Typer(help="The API keys of the service.", no_args_is_help=True)


@keys_app.command("create")
def create_key(
    name: Annotated[str, typer.Argument(help="Whose key it is.")],
    role: Annotated[str, typer.Option(help="user or admin.")] = "user",
    namespace: Annotated[str, typer.Option(help="Whose documents it opens.")] = "default",
    state: StateOption = DEFAULT_STATE,
    ledger: LedgerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a key and print its secret, which is kept nowhere."""
    if ledger is None:
        state.mkdir(parents=True, exist_ok=True)  # a key may come before the first document
    with _keys(state, ledger or f"sqlite:///{state / 'ledger.sqlite'}") as keys:
        row, secret = keys.create(name, role, namespace)
    if as_json:
        print_json({**asdict(row), "secret": secret})
        return
    typer.echo(secret)
    errors.print(
        f"key {row.id} ({row.role}, namespace {row.namespace}); the secret is not shown again"
    )


@keys_app.command("ls")
def list_keys(
    state: StateOption = DEFAULT_STATE, ledger: LedgerOption = None, as_json: JsonOption = False
) -> None:
    """List keys; a secret shows its first characters alone."""
    with _keys(state, ledger) as keys:
        rows = keys.list()
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    if not rows:
        console.print("no keys yet; `ragcache keys create` makes one")
        return
    table = plain_table(
        "id", "name", "role", "namespace", "secret", "made", "last used", "", left=8
    )
    for row in rows:
        table.add_row(
            str(row.id), escape(row.name), row.role, row.namespace, f"{row.prefix}…",
            _date(row.created_at), _date(row.last_used), "revoked" if row.revoked_at else "",
        )  # fmt: skip
    console.print(table)


@keys_app.command("revoke")
def revoke_key(
    key: Annotated[int, typer.Argument(help="The id of the key, as `list_keys` shows it.")],
    state: StateOption = DEFAULT_STATE,
    ledger: LedgerOption = None,
) -> None:
    """Refuse a key from now on; a running service follows within ten seconds."""
    with _keys(state, ledger) as keys:
        keys.revoke(key)
    console.print(f"key {key} is revoked")


@contextmanager
def _keys(state: Path, ledger: str | None) -> Iterator[ApiKeys]:
    from ragcache.db import ApiKeys

    database = open_ledger(state, ledger)
    try:
        yield ApiKeys(database)
    finally:
        database.close()


def _date(seconds: float | None) -> str:
    if seconds is None:
        return "never"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


modules_app = typer.Typer(help="The modules and their states.", no_args_is_help=True)


@modules_app.callback()
def modules_callback() -> None:
    """The modules and their states."""


@modules_app.command("ls")
def list_modules_command(
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


@modules_app.command("expire")
def expire_modules(
    modules_callback: Annotated[
        list[int], typer.Argument(help="Ids, as `ls --json` names them.", min=1)
    ],
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
            keys = held_keys(database, modules_callback, DEFAULT_NAMESPACE)
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


def doctor(state: StateOption = DEFAULT_STATE, as_json: JsonOption = False) -> None:
    """Check the installation, the embedded reader and the state folder."""
    checks = {
        "machine": _machine,
        "attention backend": _backend,
        "embedded reader": _reader,
        "state folder": lambda: _state(state),
    }
    results = {name: _run(check) for name, check in checks.items()}
    if as_json:
        print_json({name: {"ok": ok, "detail": detail} for name, (ok, detail) in results.items()})
    else:
        console.print(f"ragcache {version('ragcache')}", highlight=False)
        for name, (ok, detail) in results.items():
            mark = "[green]ok[/]" if ok else "[red]failed[/]"
            console.print(f"{mark} {name}: {escape(detail)}", highlight=False)
    if not all(ok for ok, _ in results.values()):
        raise typer.Exit(1)


def _run(check: Callable[[], str]) -> tuple[bool, str]:
    try:
        return True, check()
    except Exception as error:  # a doctor reports whatever it finds
        return False, f"{type(error).__name__}: {error}"


def _machine() -> str:
    from ragcache.bench.harness import describe_machine

    facts = describe_machine()
    return (
        f"{facts['processor']}, {facts['cores']} cores, torch {facts['torch']}, "
        f"transformers {facts['transformers']}, GPU {facts['gpu'] or 'none'}"
    )


def _backend() -> str:
    import torch

    from ragcache.attention import backend_for

    return type(backend_for(torch.device("cpu"))).__name__


def _reader() -> str:
    from ragcache.models import load_model

    model = load_model()
    causal = model.causal
    return (
        f"{causal.num_layers} layers, window {causal.window} tokens, "
        f"{causal.bytes_per_token:,} bytes of states a token"
    )


def _state(state: Path) -> str:
    from ragcache.db import Database, list_modules

    path = state / "ledger.sqlite"
    if not path.exists():
        return f"{state} does not exist yet; `ragcache ingest` makes it"
    database = Database.open_existing(path)
    try:
        return f"{len(list_modules(database))} modules in {state}"
    finally:
        database.close()
