"""`ragcache`: the commands, and how their errors are shown."""

from __future__ import annotations

import sys

import typer

from ragcache.errors import RagCacheError
from ragcache.openmp import spin_briefly
from ragcache_api.cli import (
    ask,
    bench,
    demo,
    doctor,
    evaluate,
    ingest,
    keys,
    modules,
    plan,
    prompt,
    schema,
    serve,
    stats,
    verify,
)
from ragcache_api.cli.console import errors
from ragcache_schemas import PMLError

app = typer.Typer(
    name="ragcache",
    help="Question answering over your documents, whose attention states are computed once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("demo")(demo.demo)
app.command("ingest")(ingest.ingest)
app.command("ask")(ask.ask)
app.command("prompt")(prompt.prompt)
app.command("eval")(evaluate.evaluate_command)
app.command("doctor")(doctor.doctor)
app.command("serve")(serve.serve)
app.command("stats")(stats.stats)
app.command("plan")(plan.plan)
app.command("verify")(verify.verify)
app.add_typer(modules.app, name="modules")
app.add_typer(keys.app, name="keys")
app.add_typer(schema.app, name="schema")
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Runs a command; a named error becomes one line on standard error and exit status 1."""
    spin_briefly()
    try:
        app()
    except (RagCacheError, PMLError) as error:
        errors.print(f"[bold red]{type(error).__name__}[/]: ", end="")
        errors.print(str(error), markup=False, highlight=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
