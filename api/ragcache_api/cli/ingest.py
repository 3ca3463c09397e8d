"""`ragcache ingest` and `sync`: files and folders become documents of a collection; `jobs`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from ragcache.config import NAMESPACE
from ragcache.errors import ConfigurationError, UnreadableDocument
from ragcache_api.cli import console as ui
from ragcache_api.cli.options import INGESTING, LEDGER, expand_options
from ragcache_api.cli.progress import stages
from ragcache_api.service_options import ServiceOptions

if TYPE_CHECKING:
    from ragcache import Ingestion, RagCache
    from ragcache.db import Jobs
    from ragcache.documents import SkippedFile
    from ragcache_api.settings import ServiceSettings

INCOMPLETE = 3  # exit status if some files could not be read
_LARGE = 2**30  # bytes of states that an ingestion remarks on
_SHOWN = 20  # names printed for one reason

IncludeOption = Annotated[
    list[str] | None,
    typer.Option(help="Only files of folders that match, as in a .gitignore; repeatable."),
]
ExcludeOption = Annotated[
    list[str] | None, typer.Option(help="Files and folders to leave out; repeatable.")
]
StrictOption = Annotated[
    bool, typer.Option("--strict", help="Store nothing if a file cannot be read.")
]


@expand_options
def ingest(
    collection: Annotated[str, typer.Argument(help="The collection to put the documents in.")],
    paths: Annotated[list[Path], typer.Argument(help="Files, or folders of them.")],
    options: Annotated[ServiceOptions, INGESTING],
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    strict: StrictOption = False,
    as_json: ui.JsonOption = False,
) -> None:
    """Store documents and encode their attention states, once.

    Files that cannot be read are named and skipped; the exit status is then 3.
    """
    _check(collection, paths)
    _store(
        lambda rag, **reading: rag.ingest(collection, paths, **reading),
        options,
        include,
        exclude,
        strict=strict,
        as_json=as_json,
    )


@expand_options
def sync(
    collection: Annotated[str, typer.Argument(help="The collection.")],
    folder: Annotated[Path, typer.Argument(help="The folder that it mirrors.")],
    options: Annotated[ServiceOptions, INGESTING],
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    strict: StrictOption = False,
    as_json: ui.JsonOption = False,
) -> None:
    """Bring a collection up to date with a folder.

    Changed files are encoded, missing ones removed and moved ones renamed. Documents from elsewhere
    stay. Files that cannot be read are named and skipped; the exit status is then 3.
    """
    _check(collection, [folder])
    if not folder.is_dir():
        raise UnreadableDocument(
            f"{folder} is no folder; give the folder to mirror, or `ingest` it"
        )
    _store(
        lambda rag, **reading: rag.sync(collection, folder, **reading),
        options,
        include,
        exclude,
        strict=strict,
        as_json=as_json,
    )


def _store(
    run: Callable[..., Ingestion],
    options: ServiceOptions,
    include: Sequence[str] | None,
    exclude: Sequence[str] | None,
    *,
    strict: bool,
    as_json: bool,
) -> None:
    """Run an ingestion with its progress, and report it."""
    with ui.open_rag(options) as rag, _progress() as shown, _unread(strict=strict):
        done = run(rag, include=include or (), exclude=exclude or (), strict=strict, **shown)
        advice = _advise_size(rag, done)
    _report(done, advice, as_json=as_json)


def _check(collection: str, paths: Sequence[Path]) -> None:
    """Check the arguments before torch is imported."""
    if not collection.strip():
        raise ConfigurationError("a collection needs a name")
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        raise UnreadableDocument(
            f"there is no file or folder {', '.join(missing)}; nothing was ingested"
        )


@contextmanager
def _unread(*, strict: bool) -> Iterator[None]:
    """Exit with `INCOMPLETE` if no file can be read, as if some could be."""
    try:
        yield
    except UnreadableDocument as error:
        if strict:
            raise
        ui.print_error(error)
        raise typer.Exit(INCOMPLETE) from error


@contextmanager
def _progress() -> Iterator[dict[str, Callable[..., None]]]:
    """Yield arguments of `RagCache.ingest` that report its stages."""
    with stages() as report:
        yield {"progress": partial(report, "encoding modules"), "preparing": report}


def _report(done: Ingestion, advice: str, *, as_json: bool) -> None:
    """Print the summary of an ingestion. Exits with `INCOMPLETE` if files failed."""
    if as_json:
        ui.print_json(done)
    else:
        _print_summary(done)
        if advice:
            ui.console.print(f"[dim]{advice}[/]")
    if done.failed:
        raise typer.Exit(INCOMPLETE)


def _advise_size(rag: RagCache, done: Ingestion) -> str:
    """Return the proposal to keep states that take much of the disk in eight bits, or nothing."""
    ingestor = rag.internals.ingestor
    causal = ingestor.encoder.model.causal
    nbytes = done.tokens * causal.bytes_per_token + done.modules * causal.map_bytes
    if nbytes < _LARGE or ingestor.config.kv_dtype != "model":
        return ""
    return (
        f"the states take {ui.format_bytes(nbytes)}; `ragcache plan` measures whether "
        "kv_dtype=int8, about half of it, is near enough to exact"
    )


def _print_summary(done: Ingestion) -> None:
    moved = f", {len(done.renamed)} renamed" if done.renamed else ""
    removed = f", {len(done.removed)} removed" if done.removed else ""
    new = ""
    if done.modules:
        preamble = " with the preamble's" if done.encoded > done.modules else ""
        new = (
            f": {done.modules} modules of {done.tokens:,} tokens, "
            f"{done.encoded} states encoded{preamble}"
        )
    elif done.encoded:
        new = f": {done.encoded} states of unchanged documents encoded, which this model lacked"
    ui.console.print(
        f"{done.added} documents added, {done.updated} updated, {done.unchanged} unchanged"
        f"{moved}{removed} in [bold]{escape(done.collection)}[/]{new}"
    )
    for old, new in done.renamed.items():
        ui.console.print(f"[dim]renamed: {escape(old)} to {escape(new)}[/]")
    _print_names("removed", done.removed)
    print_unread(done.skipped, done.omitted)
    if done.vanished:
        _print_names("vanished", done.vanished)
        ui.console.print(
            "[yellow]these documents still answer; `ragcache sync` removes what is gone[/]"
        )


def print_unread(skipped: Sequence[SkippedFile], omitted: Mapping[str, Sequence[str]]) -> None:
    """Print the files that were not read, by reason, and the content that documents omit."""
    _print_skipped("[dim]skipped", (file for file in skipped if not file.failed))
    _print_skipped("[bold red]not read[/][dim]", (file for file in skipped if file.failed))
    for name, lacks in omitted.items():
        ui.console.print(f"[yellow]left out of {escape(name)}:[/] {escape('; '.join(lacks))}")


def _print_skipped(label: str, files: Iterable[SkippedFile]) -> None:
    """Print files by reason, one line for each reason."""
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for file in files:
        reasons[file.reason].append(file.name)
    for reason, names in reasons.items():
        ui.console.print(f"{label}: {_listed(names)}: {escape(reason)}[/]")


def _print_names(label: str, names: Sequence[str]) -> None:
    if names:
        ui.console.print(f"[dim]{label}: {_listed(names)}[/]")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return escape(", ".join(names[:_SHOWN])) + more


jobs_app = typer.Typer(help="The ingestions of a state folder.", no_args_is_help=True)
NamespaceOption = Annotated[str, typer.Option(help="The namespace of the jobs.")]


@jobs_app.command("ls")
@expand_options
def list_jobs(
    options: Annotated[ServiceOptions, LEDGER],
    namespace: NamespaceOption = NAMESPACE,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Most jobs to list.")] = 20,
    as_json: ui.JsonOption = False,
) -> None:
    """List ingestions, the newest first, with their progress."""
    with _jobs(ui.read_settings(options), namespace) as jobs:
        rows = jobs.page(limit=limit).items
    if as_json:
        ui.print_json(rows)
        return
    table = ui.plain_table("id", "target", "status", "modules", "error", left=5)
    for row in rows:
        progress = f"{row.done:,} of {row.total:,}"
        table.add_row(str(row.id), escape(row.target), row.status, progress, escape(row.error))
    ui.console.print(table if rows else "no jobs yet; `ragcache ingest` makes them")


@jobs_app.command("cancel")
@expand_options
def cancel_job(
    job: Annotated[int, typer.Argument(help="The id of the job, as `ragcache jobs ls` shows it.")],
    options: Annotated[ServiceOptions, LEDGER],
    namespace: NamespaceOption = NAMESPACE,
) -> None:
    """End a job that waits or runs, in whichever process; it then changes nothing more."""
    with _jobs(ui.read_settings(options), namespace) as jobs:
        row = jobs.cancel(job)
    ui.console.print(f"job {job} is {row.status}")


@contextmanager
def _jobs(settings: ServiceSettings, namespace: str) -> Iterator[Jobs]:
    with ui.open_ledger(settings) as database:
        from ragcache.db import Jobs

        yield Jobs(database, "", namespace)
