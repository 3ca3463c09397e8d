"""What the commands share: consoles, options, opening a state folder, printing.

Torch, transformers and the database are imported inside functions only, so that `ragcache --help`
starts without them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

from ragcache.errors import UnreadableDocument

if TYPE_CHECKING:
    from ragcache import Answer, AnswerStream, RagCache
    from ragcache.db import Database

UNWRAPPED_WIDTH = 10_000  # characters: a path that a log or a pipe breaks in two is not found again
DEFAULT_STATE = Path("ragcache-state")


def _console(stream: TextIO, *, stderr: bool = False) -> Console:
    """A console that wraps lines on a terminal only."""
    width = None if stream.isatty() else UNWRAPPED_WIDTH
    return Console(stderr=stderr, width=width, highlight=False)


console = _console(sys.stdout)
errors = _console(sys.stderr, stderr=True)


def _or_setting(context: typer.Context, parameter: typer.CallbackParam, value: Any) -> Any:
    """The option's value if it was given, else the service setting of the same name."""
    from ragcache_api.settings import ServiceSettings

    name = str(parameter.name)
    source = context.get_parameter_source(name)
    given = source is not None and source.name != "DEFAULT"
    return value if given else getattr(ServiceSettings.read(), name)


def _setting(name: str, text: str) -> Any:
    """An option whose default is the service setting of its name."""
    variable = f"RAGCACHE_{name.upper()}"
    return typer.Option(f"--{name}", envvar=variable, callback=_or_setting, help=text)


_LEDGER = "The URL of a database, where the ledger is not in the state folder."
_REMOTE = "The fsspec URL of the remote tier, such as s3://BUCKET/PATH."
_MODEL = "A model folder or hub name; without it, the embedded reader."
_EMBEDDING = "`minilm` adds retrieval by meaning to retrieval by words."
StateOption = Annotated[Path, _setting("state", "The state folder.")]
LedgerOption = Annotated[str | None, _setting("ledger", _LEDGER)]
RemoteOption = Annotated[str | None, _setting("remote", _REMOTE)]
ModelOption = Annotated[str | None, _setting("model", _MODEL)]
EmbeddingOption = Annotated[str | None, _setting("embedding", _EMBEDDING)]
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
        "--stream/--no-stream", show_default=False,
        help="Print the answer as it comes; without either, on a terminal only.",
    ),
]  # fmt: skip


def open_rag(state: Path, model: str | None, embedding: str | None, **options: Any) -> RagCache:
    """Opens a state folder with a model, or the embedded reader; `options` that are None come from
    the settings."""
    from ragcache_api.settings import ServiceSettings

    given = {name: value for name, value in options.items() if value is not None}
    options = ServiceSettings.read().opening() | given | {"embedding": embedding}
    with errors.status("loading the model"):
        from ragcache import RagCache

        return RagCache.open(state, model, **options)


def open_existing_rag(
    state: Path, model: str | None = None, embedding: str | None = None
) -> RagCache:
    """Opens a state folder that exists. Raises `NoState` before the model is loaded."""
    from ragcache_api.settings import ServiceSettings

    with open_ledger(state, ServiceSettings.read().ledger):
        pass
    return open_rag(state, model, embedding)


@contextmanager
def open_ledger(state: Path, ledger: str | None = None) -> Iterator[Database]:
    """The ledger at a URL, or else that of a state folder, which must exist. Raises `NoState`."""
    from ragcache.db import Database

    path = state / "ledger.sqlite"
    with closing(Database.open(ledger) if ledger else Database.open_existing(path)) as database:
        yield database


def read_text(file: Path) -> str:
    """A text file's content. Raises `UnreadableDocument`."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableDocument(f"cannot read {file}: {error}") from error


def print_json(value: Any) -> None:
    """Plain JSON on standard output, for programs; dataclasses become objects."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=_json_value))


def _json_value(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, if that is a terminal; yields `report(done, total)`."""
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    hidden = not errors.is_terminal  # rich would leave an empty line in a log
    with Progress(*columns, console=errors, transient=True, disable=hidden) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def format_milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"


def format_bytes(nbytes: int) -> str:
    """Bytes in the unit that reads best."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:,.1f} {unit}"
    return f"{nbytes} B"


def format_break_even(tokens: float | None, shortest: int) -> str:
    """The length of a module from which loading is quicker; shortest: the least one measured."""
    if tokens is None:
        return "at no length"
    return "at each" if tokens <= shortest else f"from {tokens:.0f} tokens"


def plain_table(*columns: str, rows: Iterable[Sequence[str]] = (), left: int = 1) -> Table:
    """A table without lines, of which all but the first `left` columns are flush right; without
    columns it has no header."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), show_header=any(columns))
    for number, column in enumerate(columns):
        justify: Any = "left" if number < left else "right"
        table.add_column(column, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def print_answer(stream: AnswerStream, *, pieces: bool | None) -> None:
    """Prints an answer's text (by pieces; None does so on a terminal only), sources, mode, tokens
    and times."""
    if console.is_terminal if pieces is None else pieces:
        _print_pieces(stream)
    else:
        console.print(_text_or_reason(stream.result()), style="bold", markup=False)
    answer = stream.answer
    table = plain_table()
    for source in answer.sources:
        score = f"{source.score:.3f}" if source.score else ""
        table.add_row(escape(source.module), score, source.tier, style="dim")
    console.print(table)
    timings = answer.timings
    console.print(
        f"mode {answer.mode} · prompt {format_reuse(answer)} · first token "
        f"{format_milliseconds(timings.first_token)} · total {format_milliseconds(timings.total)}"
    )


def _print_pieces(stream: AnswerStream) -> None:
    """Prints pieces of an answer as they come, without white space at the front."""
    begun = False
    for piece in stream:
        text = piece if begun else piece.lstrip()
        begun = begun or bool(text)
        console.print(text, end="", style="bold", markup=False, soft_wrap=True)
    console.print("" if begun else _text_or_reason(stream.answer), markup=False)


def format_reuse(answer: Answer) -> str:
    """The tokens of the prompt: cached, shared and computed."""
    reuse = answer.reuse
    shared = f"+ {reuse.shared_tokens} shared " if reuse.shared_tokens else ""
    return (
        f"{reuse.prompt_tokens} tokens = {reuse.cached_tokens} cached {shared}"
        f"+ {reuse.computed_tokens} computed"
    )


def _text_or_reason(answer: Answer) -> str:
    if answer.finish_reason == "no_documents":
        return "nothing in this collection shares a word with the question"
    return answer.text
