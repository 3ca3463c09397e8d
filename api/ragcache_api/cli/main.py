"""The command `ragcache`: the table of its commands, and the printing of errors."""

from __future__ import annotations

import atexit
import gc
import re
import sys
from functools import cache
from importlib import import_module
from inspect import cleandoc
from io import TextIOWrapper
from typing import Annotated, Any

import typer

from ragcache import __version__
from ragcache.build import find_commit
from ragcache.errors import RagCacheError
from ragcache_api.cli.console import errors, print_error

_AFTER_CTRL_C = {
    "bench": "nothing was written",
    "chat": "the conversation is not kept, the collection is as it was",
    "export": "what was written is kept; the same command goes on",
    "import": "states that were stored are kept, no document is; the same command goes on",
    "ingest": "what was encoded is kept, no document is half stored; the same command goes on",
    "modules": "what was changed stays so; the same command goes on",
    "rm": "a document is removed whole or not at all; `ragcache documents` lists what is left",
    "schema": "what was encoded is kept, no schema is half stored; the same command goes on",
    "sync": "what was encoded is kept, no document is half stored; the same command goes on",
    "verify": "what was repaired stays so; the same command goes on",
    "warm": "states that were encoded are kept; the same command goes on",
}
"""State after Ctrl-C, by command. Other commands leave the state folder as it was."""


_STYLE: dict[str, Any] = {"pretty_exceptions_enable": False, "rich_markup_mode": "rich"}

_COMMANDS = {
    "demo": (
        "ask.demo",
        "Ingest the example handbook and answer five questions, cached and "
        "ordinary side by side, and refuse one that it does not answer.",
    ),
    "ingest": ("ingest.ingest", "Store documents and encode their attention states, once."),
    "sync": ("ingest.sync", "Bring a collection up to date with a folder."),
    "jobs": ("ingest.jobs_app", "List ingestions, and end one that waits or runs."),
    "ask": ("ask.ask", "Answer a question from the documents of a collection."),
    "chat": ("chat.chat", "Talk with the model about the documents of a collection."),
    "retrieve": ("documents.retrieve", "Find the best modules for a query, with their scores."),
    "collections": ("documents.collections", "List collections, with their sizes."),
    "documents": ("documents.documents", "List the documents of a collection."),
    "description": ("documents.description", "Set the description of a collection, for lists."),
    "instruction": (
        "documents.instruction",
        "Set the instruction with which the model reads the documents of a collection.",
    ),
    "priming": (
        "documents.priming",
        "Set the text behind which modules of a collection in later places are encoded.",
    ),
    "rm": ("documents.remove", "Remove documents, or a collection, with their states."),
    "warm": ("documents.warm", "Encode the states that no tier has any more."),
    "export": ("transfer.export_collection", "Write a collection with its states to one file."),
    "import": ("transfer.import_collection", "Store the collection of a file."),
    "prompt": ("ask.prompt", "Answer a PML prompt over a schema that was added before."),
    "eval": ("evaluate.evaluate_command", "Mark the answers to known questions, mode by mode."),
    "calibrate": (
        "evaluate.calibrate",
        "Fit which answers of a model are refused, once, on built-in questions.",
    ),
    "doctor": ("admin.doctor", "Check the installation, the model and the state folder."),
    "serve": ("admin.serve", "Serve a state folder over HTTP, with OpenAI's interface."),
    "mcp": ("mcp.mcp", "Serve collections to a program by the Model Context Protocol."),
    "stats": ("admin.stats", "Sum up collections, tiers and evictions of a state folder."),
    "plan": ("measure.plan", "Estimate the costs and gains of caching a corpus."),
    "verify": ("admin.verify", "Check every row of the ledger against every blob."),
    "modules": ("admin.modules_app", "The modules and their states."),
    "conversations": ("conversations.app", "The kept conversations of a namespace."),
    "namespaces": ("namespaces.app", "The namespaces, and their deletion with everything."),
    "keys": ("admin.keys_app", "The API keys of the service."),
    "ledger": ("admin.ledger_app", "The ledger's tables and who has it open."),
    "schema": ("schema.app", "PML schemas: written ones and generated ones."),
    "bench": ("measure.bench_app", "Measure, as ratios of things run side by side in one process."),
}
"""Commands in the order of `ragcache --help`: module and object, and the line of help.

A module is imported when one of its commands runs, so that the help is printed at once."""


@cache
def load_command(name: str) -> Any:
    """Load a command or group of commands by its name."""
    module, _, attribute = _COMMANDS[name][0].partition(".")
    found = getattr(import_module(f"ragcache_api.cli.{module}"), attribute)
    if isinstance(found, typer.Typer):
        group = typer.main.get_group(found)
        for command in group.commands.values():
            _join_lines(command)
        return group
    single = typer.Typer(**_STYLE, add_completion=False)
    single.command(name)(found)
    return _join_lines(typer.main.get_command(single))


def _join_lines(command: Any) -> Any:
    """Join the lines of each paragraph of a command's help, for narrow terminals."""
    command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", cleandoc(command.help or ""))
    return command


class InterruptibleCommands(typer.core.TyperGroup):
    """Commands that are loaded when they run. After Ctrl-C they report the state that is left."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Load the named command."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, load_command(str(name)), rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Exits with status 130 after Ctrl-C."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            kept = _AFTER_CTRL_C.get(ctx.invoked_subcommand, "the state folder is as it was")
            errors.print(f"\ninterrupted: {kept}", markup=False)
            raise typer.Exit(130) from None


_OBJECTS_BETWEEN_COLLECTIONS = 50_000
"""Threshold of Python's garbage collector. Imports create hundreds of thousands of objects and no
garbage: with the default of 700, collections took a fifth of a cold question's time, and as much
again at its end."""

app = typer.Typer(
    name="ragcache",
    cls=InterruptibleCommands,
    help="Question answering over your documents, whose attention states are computed once.",
    no_args_is_help=True,
    **_STYLE,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        commit, _, changed = (find_commit() or "").partition("+")
        told = f" ({', '.join(filter(None, (commit[:12], changed)))})" if commit else ""
        typer.echo(f"ragcache {__version__}{told}")
        raise typer.Exit


@app.callback()
def root(
    *,
    version: Annotated[
        bool | None,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and the commit, and end.",
        ),
    ] = None,
) -> None:
    """Question answering over your documents, whose attention states are computed once."""


for _name, (_, _line) in _COMMANDS.items():
    app.command(_name, help=_line)(lambda: None)


def _leave_heap() -> None:
    """Skip the garbage collection at exit, except with Triton, which would report a leak."""
    if "triton" not in sys.modules:
        gc.freeze()


def main() -> None:
    """Run a command. Prints a ragcache error as one line, and exits with status 1."""
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # encodings of Windows lack letters of documents
    atexit.register(_leave_heap)
    try:
        app()
    except Exception as error:  # errors of PML are not imported here
        if not isinstance(error, RagCacheError) and not _is_pml_error(error):
            raise
        print_error(error)
        sys.exit(1)


def _is_pml_error(error: Exception) -> bool:
    """Return whether an error is from PML, which few commands import."""
    language = sys.modules.get("ragcache_schemas")
    return language is not None and isinstance(error, language.PMLError)


if __name__ == "__main__":
    main()
