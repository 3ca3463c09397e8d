"""Consoles, common options, opening of state folders, and printing, for all commands.

Torch, transformers and the database are imported inside functions only, so that `ragcache --help`
starts without them.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.models import OptionInfo

import ragcache_api
from ragcache.config import LEDGER_FILE, NAMESPACE, check_embedding, check_reranker
from ragcache.errors import ModelNotFound, NoState, UnreadableDocument
from ragcache.modes import ReuseMode, describe_kinds

if TYPE_CHECKING:
    from ragcache import Answer, AnswerSpan, AnswerStream, RagCache
    from ragcache.db import Database
    from ragcache.store import KVStore
    from ragcache_api.cli.served import ServedAnswer
    from ragcache_api.service_options import ServiceOptions
    from ragcache_api.settings import ServiceSettings

UNWRAPPED_WIDTH = 10_000  # characters: logs and pipes keep paths on one line


def _console(stream: TextIO, *, stderr: bool = False) -> Console:
    """Create a console that wraps lines on a terminal only."""
    width = None if stream.isatty() else UNWRAPPED_WIDTH
    return Console(stderr=stderr, width=width, highlight=False)


console = _console(sys.stdout)
errors = _console(sys.stderr, stderr=True)


NamespaceOption = Annotated[str, typer.Option(help="The namespace of the collections.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def mode_option(help: str) -> OptionInfo:
    """Create the option `--mode` for a parameter of type `ReuseMode`."""
    option: OptionInfo = typer.Option(
        "--mode", parser=str, callback=_parse_mode, metavar="MODE", help=help
    )
    return option


def _parse_mode(text: str | ReuseMode | None) -> ReuseMode | None:
    return None if text is None else ReuseMode.parse(text)


ModeOption = Annotated[
    ReuseMode | None, mode_option(f"{describe_kinds()} Defaults to the model's mode.")
]
ServerOption = Annotated[
    str | None,
    typer.Option(
        envvar="RAGCACHE_SERVER",
        help="The URL of a running service that answers; "
        "its model, embedding, instruction and documents count.",
    ),
]
KeyOption = Annotated[
    str | None, typer.Option(envvar="RAGCACHE_API_KEY", help="The service's API key.")
]
StreamOption = Annotated[
    bool | None,
    typer.Option(
        "--stream/--no-stream",
        show_default=False,
        help="Print the answer as it comes; without either, on a terminal only.",
    ),
]


def open_rag(options: ServiceOptions, **changes: Any) -> RagCache:
    """Open a state folder with a model. Options that are not given come from the settings.

    Args:
        options: Options of the command.
        **changes: Settings that the command decides itself.
    """
    settings = read_settings(options.replace(**changes))
    check_model(settings.model)
    check_embedding(settings.embedding)
    check_reranker(settings.reranker)
    with loading_model():
        from ragcache import RagCache

        return RagCache.open(settings.state, **settings.open_options())


@contextmanager
def loading_model() -> Iterator[None]:
    """Report on standard error that a model is loaded, and how far its conversion is."""
    with errors.status("loading the model") as status:
        show = status.update if errors.is_terminal else partial(errors.print, markup=False)
        with _shown_logs("ragcache.models.gguf", show):
            yield


@contextmanager
def _shown_logs(name: str, show: Callable[[str], None]) -> Iterator[None]:
    """Show the INFO records of a logger, such as the progress of the conversion of a model."""
    logger, handler = logging.getLogger(name), logging.Handler()
    handler.emit = lambda record: show(record.getMessage())  # type: ignore[method-assign]  # as logging allows
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def read_settings(options: ServiceOptions, **more: Any) -> ServiceSettings:
    """Return all settings, read with the options of a command; see `ServiceSettings.read`."""
    from ragcache_api.settings import ServiceSettings  # slow to import, and no help needs it

    return ServiceSettings.read(**options.given(), **more)


def open_existing_rag(
    options: ServiceOptions, collection: str | None = None, **changes: Any
) -> RagCache:
    """Open an existing state folder with a model; see `open_rag`.

    Raises:
        NoState: The folder does not exist. Raised before torch is imported.
        UnknownCollection: The folder lacks the collection.
    """
    settings = read_settings(options)
    check_model(settings.model)
    with open_ledger(settings) as database:
        if collection is not None:
            check_collection(database, collection)
    return open_rag(options, **changes)


def check_collection(database: Database, collection: str, namespace: str = NAMESPACE) -> None:
    """Raise `UnknownCollection` if the ledger has no collection of this name."""
    from ragcache.db import Catalog

    Catalog(database, "", None, namespace).version(collection)


def check_model(name: str | None) -> None:
    """Raise `ModelNotFound` for the path of a folder that does not exist. Hub names pass."""
    if name is None:
        return
    path = Path(name).expanduser()
    spelled_as_path = path.is_absolute() or name.startswith((".", "~"))
    if path.suffix == ".gguf" and path.is_file():
        return
    if (spelled_as_path and not path.is_dir()) or path.is_file():
        raise ModelNotFound(
            f"cannot load the model {name!r}: there is no such folder. Give a folder with "
            "config.json, weights and tokenizer, or the name of a hub model"
        )


@contextmanager
def open_ledger(settings: ServiceSettings) -> Iterator[Database]:
    """Open the ledger at a URL, or the ledger in an existing state folder. Raises `NoState`."""
    check_state(settings)
    from ragcache.db import Database

    path = settings.state / LEDGER_FILE
    opened = Database.open(settings.ledger) if settings.ledger else Database.open_existing(path)
    with closing(opened) as database:
        yield database


@contextmanager
def inspect_store(settings: ServiceSettings) -> Iterator[tuple[Database, KVStore]]:
    """Open the ledger and the persistent tiers of a state folder, without background work."""
    with open_ledger(settings) as database:
        import torch

        from ragcache.store import KVStore, open_tiers
        from ragcache.tiers import persistent_tiers

        tiers = open_tiers(settings, torch.device("cpu"), persistent_tiers())
        with closing(KVStore.inspect(settings.state, database, tiers)) as store:
            yield database, store


def check_state(settings: ServiceSettings) -> None:
    """Raise `NoState` if no ledger is set and the folder has none. Imports nothing."""
    if settings.ledger is None and not (settings.state / LEDGER_FILE).exists():
        raise NoState.in_folder(settings.state)


def format_scores(bm25: float | None, cosine: float | None, rerank: float | None = None) -> str:
    """Format the scores of a hit with their names."""
    known = (("bm25", bm25), ("cosine", cosine), ("rerank", rerank))
    return " · ".join(f"{name} {score:.2f}" for name, score in known if score is not None)


def read_text(file: Path) -> str:
    """Read a text file. Raises `UnreadableDocument`."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableDocument(f"cannot read {file}: {error}") from error


def print_error(error: Exception) -> None:
    """Print an error as one line on standard error."""
    errors.print(f"[bold red]{type(error).__name__}[/]: ", end="")
    errors.print(str(error), markup=False)


def print_json(value: Any) -> None:
    """Print plain JSON on standard output, for programs. Dataclasses become objects."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=_json_value))


def _json_value(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def format_milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"


def format_bytes(nbytes: int) -> str:
    """Format a number of bytes in the largest fitting unit."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:,.1f} {unit}"
    return f"{nbytes} B"


def format_break_even(tokens: float | None, shortest: int) -> str:
    """Format the module length from which loading is faster than computing.

    Args:
        tokens: That length. Without one, loading is never faster.
        shortest: The shortest length that was measured.
    """
    if tokens is None:
        return "at no length"
    return "at each" if tokens <= shortest else f"from {tokens:.0f} tokens"


def plain_table(*columns: str, rows: Iterable[Sequence[str]] = (), left: int = 1) -> Table:
    """Create a table without lines. All columns after the first `left` are aligned right.

    Without columns, it has no header.
    """
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), show_header=any(columns))
    for number, column in enumerate(columns):
        justify: Any = "left" if number < left else "right"
        table.add_column(column, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


_MOST_SPANS = 3  # spans of an answer that are printed
_AROUND = 80  # characters of a line before and after a quotation


def print_answer(stream: AnswerStream | ServedAnswer, *, pieces: bool | None) -> None:
    """Print an answer's text, sources, mode, tokens and times.

    Args:
        stream: The answer.
        pieces: Whether the text is printed as it arrives. By default on a terminal only.
    """
    if console.is_terminal if pieces is None else pieces:
        _print_pieces(stream)
    else:
        console.print(stream.result().text, style="bold", markup=False)
    answer = stream.answer
    for span in [each for each in answer.spans if each.choice == 0][:_MOST_SPANS]:
        console.print(format_span(span, answer), soft_wrap=True)
    if answer.finish_reason == "no_documents":
        console.print("no text in this collection fits the question", style="dim")
        return
    table = plain_table()
    for source in answer.sources:
        score = format_scores(source.bm25, source.cosine, source.rerank)
        page = source.page
        place = "" if page is None else f", page {page}"
        table.add_row(escape(source.module) + place, score, source.tier, style="dim")
    if answer.sources:
        console.print(table)
    if answer.finish_reason == "no_answer":
        console.print("an answer was refused; --min-confidence 0 shows it", style="dim")
    timings = answer.timings
    confidence = answer.confidence
    sure = "" if confidence is None else f"confidence {confidence:.2f} · "
    console.print(
        f"{sure}mode {answer.mode} · prompt {format_reuse(answer)} · first token "
        f"{format_milliseconds(timings.first_token)} · total {format_milliseconds(timings.total)}"
    )


def print_unkept(rag: RagCache, remedy: str) -> None:
    """Report on standard error how many encoded states are lost when the process ends.

    Questions keep the states that they encode in memory only.

    Args:
        rag: The state folder.
        remedy: Advice on how to keep the states, to end the message.
    """
    if count := rag.internals.shared.store.count_unkept():
        what = "1 state was" if count == 1 else f"{count} states were"
        errors.print(f"{what} encoded for this and not kept; {remedy}", markup=False)


def finish_measurement(rag: RagCache, answer: Answer) -> None:
    """Wait until the mode is measured that an answer asked for, and print the result.

    Everything is printed on standard error. Does nothing if the answer is in the mode that it asked
    for, or if the model cannot read states.
    """
    mode = answer.reuse.replaced_mode
    if mode is None or not rag.internals.shared.model.causal.composes:
        return
    text = f"answered in exact, while {mode} is measured on this model, once for this folder"
    errors.print(text, soft_wrap=True)
    with errors.status(f"measuring how far {mode} is from exact"):
        rag.gate.join()
    for result in rag.gate.results():
        if result.mode == mode:
            errors.print(str(result), markup=False, soft_wrap=True)


def print_calibration_note(
    rag: RagCache, collection: str, answer: Answer, options: ServiceOptions
) -> None:
    """Tell on standard error how a model's answers get checked, if it has no calibration yet."""
    calibration = rag.internals.shared.calibration
    if rag.internals.shared.model.extractive or rag.gate.forced or calibration.is_fitted:
        return
    command = _with_options(["ragcache", "calibrate"], options)
    in_use = rag.collections.calibration(collection)
    if in_use is None:
        note = (
            "No answer of this model is refused yet, whether the documents say it or not. "
            f"Calibrate it once, which takes some minutes: {command}"
        )
    elif in_use == calibration.general and answer.finish_reason == "no_answer":
        note = (
            "The answer was judged by the calibration of two other models. This model's own takes "
            f"some minutes, once: {command}"
        )
    else:
        return
    errors.print(note, markup=False, soft_wrap=True)


def print_reader_note(rag: RagCache, collection: str, answer: Answer) -> bool:
    """Advise on standard error to take a model, if the embedded reader refused.

    Over the example handbook, for which the reader was trained, it gives no advice.

    Returns:
        Whether the advice was printed.
    """
    refused = answer.finish_reason in ("no_answer", "no_documents")
    if not (refused and rag.internals.shared.model.extractive):
        return False
    stored = rag.documents.page(collection, limit=1).items
    if stored and stored[0].uri.startswith(example_handbook().resolve().as_uri()):
        return False
    errors.print(
        "The embedded reader is a demonstration, and refuses most questions about other texts than "
        "the example handbook. Give a model: --model Qwen/Qwen2.5-1.5B-Instruct (3.1 GB, once), a "
        "folder, or a GGUF file",
        markup=False,
    )
    return True


def example_handbook() -> Path:
    """Return the folder of the handbook: in the package, or in `examples/` of a clone."""
    package = Path(ragcache_api.__file__).parent
    installed = package / "handbook"
    return installed if installed.is_dir() else package.parent.parent / "examples" / "handbook"


def warm_command(collection: str, mode: ReuseMode | None, options: ServiceOptions) -> str:
    """Return the `ragcache warm` command that keeps the states for questions in a mode.

    Args:
        collection: The collection.
        mode: The mode that the questions name, if any.
        options: Options with which the folder was opened.
    """
    words = ["ragcache", "warm", collection]
    if mode is not None:
        words += ["--mode", str(mode)]
    return _with_options(words, options)


def _with_options(words: Sequence[str], options: ServiceOptions) -> str:
    """Return a command with the options with which the folder was opened, between backquotes."""
    given = [
        word
        for name, value in options.given().items()
        if name in ("state", "model", "dtype", "instruction")
        for word in (f"--{name}", str(value))
    ]
    return f"`{shlex.join([*words, *given])}`"


def format_span(span: AnswerSpan, answer: Answer) -> str:
    """Format a quotation or a cited passage, marked in its line, with its place."""
    text = answer.text if span.mark is None else _cited_text(span, answer)
    number = "" if span.mark is None else escape(f"[{span.mark}] ")
    before = f"...{span.prefix[-_AROUND:]}" if len(span.prefix) > _AROUND else span.prefix
    after = f"{span.suffix[:_AROUND]}..." if len(span.suffix) > _AROUND else span.suffix
    place = escape(span.document)
    place += "" if span.page is None else f", page {span.page}"
    place += "" if span.start is None else f", characters {span.start} to {span.end}"
    line = f"{escape(before)}[bold]»{escape(text)}«[/]{escape(after)}"
    return f"  {number}{line} [dim]({place})[/]"


def _cited_text(span: AnswerSpan, answer: Answer) -> str:
    """Return the passage that a mark cites, between what stands before and after it."""
    size = ".*?" if span.start is None or span.end is None else f".{{{span.end - span.start}}}"
    around = map(re.escape, (span.prefix, span.suffix))
    pattern = re.compile(f"({size})".join(around), re.DOTALL)
    texts = (source.text for source in answer.sources if source.module == span.module)
    found = next(filter(None, map(pattern.search, texts)), None)
    return "..." if found is None else found[1]


def _print_pieces(stream: AnswerStream | ServedAnswer) -> None:
    """Print pieces of an answer as they arrive, without leading white space."""
    begun = False
    for piece in stream:
        text = piece if begun else piece.lstrip()
        begun = begun or bool(text)
        console.print(text, end="", style="bold", markup=False, soft_wrap=True)
    console.print("" if begun else stream.answer.text, markup=False)


def format_reuse(answer: Answer) -> str:
    """Format the numbers of cached, shared and computed tokens of a prompt."""
    reuse = answer.reuse
    shared = f"+ {reuse.shared_tokens} shared " if reuse.shared_tokens else ""
    return (
        f"{reuse.prompt_tokens} tokens = {reuse.cached_tokens} cached {shared}"
        f"+ {reuse.computed_tokens} computed"
    )
