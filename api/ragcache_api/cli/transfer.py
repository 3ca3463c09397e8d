"""`ragcache export` and `import`: collections that travel as one file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ragcache.config import NAMESPACE, check_namespace
from ragcache.errors import UnreadableDocument
from ragcache_api.cli import console as ui
from ragcache_api.cli.options import TRAVELING, expand_options
from ragcache_api.cli.progress import stages
from ragcache_api.service_options import ServiceOptions


@expand_options
def export_collection(
    collection: Annotated[str, typer.Argument(help="The collection.")],
    file: Annotated[Path, typer.Argument(help="The file to write.")],
    options: Annotated[ServiceOptions, TRAVELING],
    namespace: ui.NamespaceOption = NAMESPACE,
    as_json: ui.JsonOption = False,
) -> None:
    """Write a collection to one file: documents, settings, states and checksums.

    After an interruption the same command goes on with FILE.part.
    """
    check_namespace(namespace)
    with ui.open_existing_rag(options) as rag, stages() as report:
        done = rag.within(namespace).collections.export_archive(collection, file, report=report)
    if as_json:
        ui.print_json(asdict(done))
        return
    ui.console.print(
        f"{done.documents:,} documents of {collection} with {done.modules:,} modules and "
        f"{done.states:,} states written to {file} ({done.nbytes:,} bytes)",
        markup=False,
    )
    _print_missing(done.missing, collection)


@expand_options
def import_collection(
    file: Annotated[Path, typer.Argument(help="A file of `ragcache export`.")],
    options: Annotated[ServiceOptions, TRAVELING],
    collection: Annotated[
        str | None, typer.Option("--as", help="Name of the collection; by default its own.")
    ] = None,
    encode: Annotated[
        bool,
        typer.Option(
            "--encode",
            help="Encode modules without states; all of them, if another model made the file.",
        ),
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace the documents of the collection.")
    ] = False,
    namespace: ui.NamespaceOption = NAMESPACE,
    as_json: ui.JsonOption = False,
) -> None:
    """Store the collection of a file, without encoding it again.

    The whole file is verified before anything is stored, and the documents appear together at the
    end. After an interruption the same command goes on.
    """
    check_namespace(namespace)
    if not file.is_file():
        raise UnreadableDocument(f"there is no file {file}; `ragcache export` writes one")
    with ui.open_rag(options) as rag, stages() as report:
        done = rag.within(namespace).collections.import_archive(
            file, collection, encode=encode, replace=replace, report=report
        )
    if as_json:
        ui.print_json(asdict(done))
        return
    ui.console.print(
        f"{done.documents:,} documents with {done.modules:,} modules stored in {done.collection}; "
        f"{done.states:,} states stored, {done.known:,} there already, {done.encoded:,} encoded",
        markup=False,
    )
    _print_missing(done.missing, done.collection)


def _print_missing(modules: int, collection: str) -> None:
    """Say how many modules have no states, if there are any."""
    if modules:
        ui.console.print(
            f"{modules:,} modules have no states; `ragcache warm {collection}` encodes them",
            markup=False,
        )
