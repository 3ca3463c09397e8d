"""What all commands share: options, consoles, opening a state folder, progress."""

# MERGED ragcache_api.cli.showing: An answer as people read it: its text, whole or as it comes,
#   its sources and what it cost.
# MERGED ragcache_api.cli.tokens: Counting tokens for commands that need no model: its
#   tokenizer alone is loaded.

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, cast

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ragcache.errors import ModelNotFound, UnreadableDocument
from ragcache.models import LoadedModel
from ragcache.models.loader import READER
from ragcache.pipeline import ChatTemplate

if TYPE_CHECKING:
    from ragcache import Answer, AnswerStream, RagCache
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


def report(stream: AnswerStream, *, pieces: bool | None) -> None:
    """Prints an answer; piece by piece if asked to, or on a terminal unless asked not to."""
    if console.is_terminal if pieces is None else pieces:
        show_text(stream)
    else:
        console.print(_said(stream.result()), style="bold", markup=False, highlight=False)
    show_account(stream.answer)


def show_text(stream: AnswerStream) -> None:
    """The pieces of an answer as they come, without outer whitespace at the front."""
    begun = False
    for piece in stream:
        text = piece if begun else piece.lstrip()
        begun = begun or bool(text)
        console.print(text, end="", style="bold", markup=False, highlight=False, soft_wrap=True)
    console.print("" if begun else _said(stream.answer), markup=False, highlight=False)


def show_account(answer: Answer) -> None:
    """Sources, mode, tokens and times."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for source in answer.sources:
        score = f"{source.score:.3f}" if source.score else ""
        table.add_row(escape(source.module), score, source.tier, style="dim")
    console.print(table)
    timings = answer.timings
    console.print(
        f"mode {answer.mode} · prompt {tokens(answer)} · "
        f"first token {milliseconds(timings.first_token)} · total {milliseconds(timings.total)}",
        highlight=False,
    )


def tokens(answer: Answer) -> str:
    """The tokens of the prompt, summed up."""
    reuse = answer.reuse
    shared = f"+ {reuse.shared_tokens} shared " if reuse.shared_tokens else ""
    return (
        f"{reuse.prompt_tokens} tokens = {reuse.cached_tokens} cached {shared}"
        f"+ {reuse.computed_tokens} computed"
    )


def _said(answer: Answer) -> str:
    if answer.finish_reason == "no_documents":
        return "nothing in this collection shares a word with the question"
    return answer.text


_MARK = re.compile("[\U00100000-\U0010fffd]")


@dataclass(frozen=True, slots=True)
class Tokens:
    """A tokenizer and its chat template."""

    model: LoadedModel
    template: ChatTemplate

    @classmethod
    def load(cls, model: str | None) -> Tokens:
        """Those of a model folder or hub name; None is the embedded reader."""
        from transformers import AutoTokenizer

        source = model or str(READER)
        try:
            tokenizer = AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError) as error:
            raise ModelNotFound(
                f"cannot load the tokenizer of {source!r}: {error}. Give a folder with a "
                "tokenizer, or the name of a hub model that this machine can reach"
            ) from error
        loaded = LoadedModel(source, cast("Any", None), tokenizer)  # text needs no weights
        return cls(loaded, ChatTemplate(loaded))

    def count_trusted(self, text: str) -> int:
        """Tokens of a text in which control tokens are recognized, as in a generated schema."""
        return len(self.model.encode(text))

    def shown(self, text: str) -> str:
        """`text` with the template's control tokens spelled out."""

        def spelled(mark: re.Match[str]) -> str:
            found: str = self.model.tokenizer.decode(self.template.encode(mark[0]))
            return found

        return _MARK.sub(spelled, text)
