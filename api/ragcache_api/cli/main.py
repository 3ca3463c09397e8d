"""`ragcache`: the table of its commands, and how their errors are printed."""

from __future__ import annotations

import atexit
import gc
import sys
from typing import Any

import typer

from ragcache.errors import RagCacheError
from ragcache.openmp import spin_briefly
from ragcache_api.cli import admin, ask, chat, documents, evaluate, ingest, measure, schema
from ragcache_api.cli.console import errors

_AFTER_CTRL_C = {
    "bench": "nothing was written",
    "chat": "the conversation is not kept, the collection is as it was",
    "ingest": "what was encoded is kept, no document is half stored; the same command goes on",
    "modules": "what was changed stays so; the same command goes on",
    "rm": "a document is removed whole or not at all; `ragcache documents` lists what is left",
    "schema": "what was encoded is kept, no schema is half stored; the same command goes on",
    "sync": "what was encoded is kept, no document is half stored; the same command goes on",
    "verify": "what was repaired stays so; the same command goes on",
    "warm": "states that were encoded are kept; the same command goes on",
}
"""What is left after Ctrl-C, by command; of all others the state folder is as it was."""


class InterruptibleCommands(typer.core.TyperGroup):
    """Commands that say after Ctrl-C what is kept and how to go on."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command; ends with status 130 where it was interrupted."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            kept = _AFTER_CTRL_C.get(ctx.invoked_subcommand, "the state folder is as it was")
            errors.print(f"\ninterrupted: {kept}", markup=False)
            raise typer.Exit(130) from None


_OBJECTS_BETWEEN_COLLECTIONS = 50_000
"""Imports make hundreds of thousands of objects and no garbage: at Python's 700 a fifth of a cold
question's time went to looking for it, and as much again at its end."""

app = typer.Typer(
    name="ragcache",
    cls=InterruptibleCommands,
    help="Question answering over your documents, whose attention states are computed once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("demo")(ask.demo)
app.command("ingest")(ingest.ingest)
app.command("sync")(ingest.sync)
app.command("ask")(ask.ask)
app.command("chat")(chat.chat)
app.command("retrieve")(documents.retrieve)
app.command("collections")(documents.collections)
app.command("documents")(documents.documents)
app.command("instruction")(documents.instruction)
app.command("rm")(documents.remove)
app.command("warm")(documents.warm)
app.command("prompt")(ask.prompt)
app.command("eval")(evaluate.evaluate_command)
app.command("doctor")(admin.doctor)
app.command("serve")(admin.serve)
app.command("stats")(admin.stats)
app.command("plan")(measure.plan)
app.command("verify")(admin.verify)
app.add_typer(admin.modules_app, name="modules")
app.add_typer(admin.keys_app, name="keys")
app.add_typer(admin.ledger_app, name="ledger")
app.add_typer(schema.app, name="schema")
app.add_typer(measure.bench_app, name="bench")


def _leave_heap() -> None:
    """What is left is not looked through when the process ends; Triton would call it a leak."""
    if "triton" not in sys.modules:
        gc.freeze()


def main() -> None:
    """Runs a command; a named error becomes one line on standard error and exit status 1."""
    spin_briefly()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    atexit.register(_leave_heap)
    try:
        app()
    except Exception as error:  # the language's errors may not be imported, so none can be listed
        if not isinstance(error, RagCacheError) and not _is_pml_error(error):
            raise
        errors.print(f"[bold red]{type(error).__name__}[/]: ", end="")
        errors.print(str(error), markup=False)
        sys.exit(1)


def _is_pml_error(error: Exception) -> bool:
    """The language is imported only where a command reads some of it."""
    language = sys.modules.get("ragcache_schemas")
    return language is not None and isinstance(error, language.PMLError)


if __name__ == "__main__":
    main()
