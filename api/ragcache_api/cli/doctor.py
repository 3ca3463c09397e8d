"""`ragcache doctor`: is everything here that answering needs?"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import typer
from rich.markup import escape

from ragcache_api.cli.console import DEFAULT_STATE, JsonOption, StateOption, console, print_json


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
