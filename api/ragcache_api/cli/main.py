"""`ragcache`: the table of its commands, and how their errors are printed."""

from __future__ import annotations

import sys

import typer

from ragcache.errors import RagCacheError
from ragcache.openmp import spin_briefly
from ragcache_api.cli import admin, ask, measure, schema
from ragcache_api.cli.console import errors
from ragcache_schemas import PMLError

app = typer.Typer(
    name="ragcache",
    help="Question answering over your documents, whose attention states are computed once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("demo")(ask.demo)
app.command("ingest")(ask.ingest)
app.command("ask")(ask.ask)
app.command("prompt")(ask.prompt)
app.command("eval")(measure.evaluate_command)
app.command("doctor")(admin.doctor)
app.command("serve")(admin.serve)
app.command("stats")(admin.stats)
app.command("plan")(measure.plan)
app.command("verify")(admin.verify)
app.add_typer(admin.modules_app, name="modules")
app.add_typer(admin.keys_app, name="keys")
app.add_typer(schema.app, name="schema")
app.add_typer(measure.bench_app, name="bench")


def main() -> None:
    """Runs a command; a named error becomes one line on standard error and exit status 1."""
    spin_briefly()
    try:
        app()
    except (RagCacheError, PMLError) as error:
        errors.print(f"[bold red]{type(error).__name__}[/]: ", end="")
        errors.print(str(error), markup=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
