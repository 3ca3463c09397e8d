"""What all commands share: options, consoles, opening a state folder, progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ragcache.errors import UnreadableDocument

if TYPE_CHECKING:
    from ragcache import RagCache
    from ragcache.db import Database

UNWRAPPED = 10_000  # characters: a path that a log or a pipe breaks in two is found by nobody


def _console(stream: TextIO, *, stderr: bool = False) -> Console:
    """Wraps lines on a terminal only."""
    return Console(stderr=stderr, width=None if stream.isatty() else UNWRAPPED)


console = _console(sys.stdout)
errors = _console(sys.stderr, stderr=True)


def _set(context: typer.Context, parameter: typer.CallbackParam, value: Any) -> Any:
    """What was given, or else the setting of this name."""
    from ragcache_api.settings import ServiceSettings

    name = str(parameter.name)
    source = context.get_parameter_source(name)
    given = source is not None and source.name != "DEFAULT"
    return value if given else getattr(ServiceSettings.read(), name)


StateOption = Annotated[
    Path,
    typer.Option("--state", envvar="RAGCACHE_STATE", callback=_set, help="The state folder."),
]
LedgerOption = Annotated[
    str | None,
    typer.Option(
        "--ledger", envvar="RAGCACHE_LEDGER", callback=_set,
        help="The URL of a database, where the ledger is not in the state folder.",
    ),
]  # fmt: skip
RemoteOption = Annotated[
    str | None,
    typer.Option(
        "--remote", envvar="RAGCACHE_REMOTE", callback=_set,
        help="The fsspec URL of the remote tier, such as s3://BUCKET/PATH.",
    ),
]  # fmt: skip
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        envvar="RAGCACHE_MODEL",
        callback=_set,
        help="A model folder or hub name; without it, the embedded reader.",
    ),
]
EmbeddingOption = Annotated[
    str | None,
    typer.Option(
        "--embedding",
        envvar="RAGCACHE_EMBEDDING",
        callback=_set,
        help="`minilm` adds retrieval by meaning to retrieval by words.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
KOption = Annotated[int, typer.Option("-k", "--k", help="How many modules to retrieve.")]
ModeOption = Annotated[str, typer.Option("--mode", help="rooted, linked:N, isolated or exact.")]
MaxTokensOption = Annotated[
    int | None, typer.Option("--max-new-tokens", help="The most tokens of the answer.")
]
TemperatureOption = Annotated[
    float | None, typer.Option("--temperature", help="0, the default, takes the likeliest token.")
]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Of what is drawn.")]
StopOption = Annotated[
    list[str] | None, typer.Option("--stop", help="A string that ends the answer; repeatable.")
]
StreamOption = Annotated[
    bool | None,
    typer.Option(
        "--stream/--no-stream",
        help="Print the answer as it comes; without either, on a terminal only.",
        show_default=False,
    ),
]
DEFAULT_STATE = Path("ragcache-state")


def open_rag(state: Path, model: str | None, embedding: str | None, **options: Any) -> RagCache:
    """Opens a state folder with the embedded reader or the model that was named. What `options`
    leave open is as the settings say."""
    from ragcache_api.settings import ServiceSettings

    given = {name: value for name, value in options.items() if value is not None}
    options = ServiceSettings.read().opening() | given | {"embedding": embedding}
    with errors.status("loading the model"):
        from ragcache import RagCache  # torch and transformers take seconds to import

        return RagCache.open(state, model, **options)


def open_ledger(state: Path, ledger: str | None) -> Database:
    """The ledger of a state folder that is there already. Raises `NoState`."""
    from ragcache.db import Database

    return Database.open(ledger) if ledger else Database.open_existing(state / "ledger.sqlite")


def open_existing_rag(
    state: Path, model: str | None = None, embedding: str | None = None
) -> RagCache:
    """Opens a state folder that is there already. Raises `NoState` before the model is loaded."""
    from ragcache_api.settings import ServiceSettings

    open_ledger(state, ServiceSettings.read().ledger).close()
    return open_rag(state, model, embedding)


def read_text(file: Path) -> str:
    """A text file's content. Raises `UnreadableDocument`."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableDocument(f"cannot read {file}: {error}") from error


def print_json(value: Any) -> None:
    """Plain JSON on standard output, for programs."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, if that is a terminal; yields `report(done, total)`."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    hidden = not errors.is_terminal  # rich would leave an empty line in a log
    with Progress(*columns, console=errors, transient=True, disable=hidden) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"


def binary_size(nbytes: int) -> str:
    """Bytes in the unit that reads best."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:,.1f} {unit}"
    return f"{nbytes} B"


def plain_table(*columns: str, left: int = 1) -> Table:
    """A table without lines, of which all but the first `left` columns are flush right."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for number, column in enumerate(columns):
        if number < left:
            table.add_column(column, overflow="fold")
        else:
            table.add_column(column, justify="right", overflow="fold")
    return table
