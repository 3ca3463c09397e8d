"""`ragcache keys`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from ragcache_api.cli.console import (
    DEFAULT_STATE,
    JsonOption,
    LedgerOption,
    StateOption,
    console,
    errors,
    open_ledger,
    plain_table,
    print_json,
)

if TYPE_CHECKING:
    from ragcache.db import ApiKeys

app = typer.Typer(help="The API keys of the service.", no_args_is_help=True)


@app.command("create")
def create(
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


@app.command("ls")
def ls(
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


@app.command("revoke")
def revoke(
    key: Annotated[int, typer.Argument(help="The id of the key, as `ls` shows it.")],
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
