"""Commands on stored documents: list, remove, retrieve and warm them, and set texts."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from ragcache.config import (
    NAMESPACE,
    check_description,
    check_embedding,
    check_instruction,
    check_namespace,
    check_priming,
    check_reranker,
)
from ragcache.errors import ConfigurationError, DocumentError
from ragcache.modes import ReuseMode
from ragcache.params import SearchParams
from ragcache_api.cli import console as ui
from ragcache_api.cli.options import ENCODING, LEDGER, STORE, Offer, expand_options
from ragcache_api.service_options import ServiceOptions

if TYPE_CHECKING:
    from ragcache.db import DocumentRow
    from ragcache.retrieval import Hit

_PAGE = 500  # rows of one page
CollectionOption = Annotated[str, typer.Option("--collection", "-c", help="Where to look.")]
CollectionArgument = Annotated[str, typer.Argument(help="The collection.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print what would change.")]


@expand_options
def collections(
    options: Annotated[ServiceOptions, LEDGER],
    namespace: ui.NamespaceOption = NAMESPACE,
    as_json: ui.JsonOption = False,
) -> None:
    """List collections, with their documents and modules."""
    check_namespace(namespace)
    with ui.open_ledger(ui.read_settings(options)) as database:
        from ragcache.db import collection_page

        rows = _all_rows(lambda cursor: collection_page(database, namespace, cursor, _PAGE))
    if as_json:
        ui.print_json(rows)
    elif not rows:
        ui.console.print("no collections yet; `ragcache ingest` makes one")
    else:
        cells = [
            (escape(r.name), f"{r.documents:,}", f"{r.modules:,}", escape(r.description))
            for r in rows
        ]
        titles = ("collection", "documents", "modules", "description")
        ui.console.print(ui.plain_table(*titles, rows=cells))


@expand_options
def documents(
    collection: CollectionArgument,
    search: Annotated[SearchParams, Offer(("filters",))],
    options: Annotated[ServiceOptions, LEDGER],
    namespace: ui.NamespaceOption = NAMESPACE,
    as_json: ui.JsonOption = False,
) -> None:
    """List the documents of a collection, with their modules and metadata."""
    check_namespace(namespace)
    with ui.open_ledger(ui.read_settings(options)) as database:
        from ragcache.db import document_page
        from ragcache.retrieval.filters import compile_filters

        passes = compile_filters(search.filters or {})
        rows = _all_rows(
            lambda cursor: document_page(database, namespace, collection, cursor, _PAGE)
        )
    rows = [row for row in rows if passes(row.attributes)]
    if as_json:
        ui.print_json([_document_values(row) for row in rows])
    elif not rows:
        ui.console.print("no documents")
    else:
        cells = [(escape(r.source_id), escape(r.uri), f"{r.modules:,}") for r in rows]
        ui.console.print(ui.plain_table("document", "from", "modules", rows=cells, left=2))
        ui.console.print(f"{len(rows):,} documents, {sum(r.modules for r in rows):,} modules")


def _document_values(row: DocumentRow) -> dict[str, object]:
    return {"id": row.source_id, "uri": row.uri, "modules": row.modules, "metadata": row.attributes}


def _all_rows(page_at: Any) -> list[Any]:
    """Return the rows of all pages."""
    rows: list[Any] = []
    cursor = None
    while True:
        page = page_at(cursor)
        rows += page.items
        cursor = page.next
        if cursor is None:
            return rows


@expand_options
def remove(
    collection: CollectionArgument,
    options: Annotated[ServiceOptions, STORE],
    ids: Annotated[
        list[str] | None, typer.Argument(help="Ids of documents, as `ragcache documents` lists.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Remove the collection with all of its documents.")
    ] = False,
    dry_run: DryRunOption = False,
    namespace: ui.NamespaceOption = NAMESPACE,
    as_json: ui.JsonOption = False,
) -> None:
    """Remove documents, or a collection, with the states that nothing else needs."""
    check_namespace(namespace)
    if everything == bool(ids):
        raise ConfigurationError(
            "give ids of documents, or --all to remove the collection with all of them"
        )
    with ui.inspect_store(ui.read_settings(options)) as (database, store):
        from ragcache.db import Catalog
        from ragcache.store.admin import delete_documents

        catalog = Catalog(database, "", None, namespace)
        catalog.version(collection)
        known = catalog.documents(collection, None if everything else ids or [])
        _check_ids(collection, ids, known)
        taken = catalog.preview_deletion(collection, None if everything else list(known))
        if not dry_run:
            delete_documents(catalog, store, collection, None if everything else list(known))
    if as_json:
        ui.print_json(
            {
                "dry_run": dry_run,
                "documents": list(known),
                "collection": everything,
                "modules": taken.modules,
                "states": taken.states,
                "tiers": dict(taken.tiers),
            }
        )
        return
    would = "would be removed" if dry_run else "removed"
    ui.console.print(
        f"{len(known):,} documents {would} from {collection}, with {taken.modules:,} modules and "
        f"{taken.states:,} states ({taken.nbytes:,} bytes)",
        markup=False,
    )
    if everything:
        ui.console.print(f"the collection {collection} {would}", markup=False)


def _check_ids(collection: str, ids: list[str] | None, known: Collection[str]) -> None:
    """Raise `DocumentError` for ids that are not known."""
    if unknown := [each for each in ids or [] if each not in known]:
        raise DocumentError(
            f"the collection {collection!r} has no document {unknown[0]!r}; nothing was changed. "
            f"`ragcache documents {collection}` lists them"
        )


@expand_options
def description(
    collection: CollectionArgument,
    options: Annotated[ServiceOptions, LEDGER],
    text: Annotated[
        str | None, typer.Argument(help="The description; without it, the present one is printed.")
    ] = None,
    namespace: ui.NamespaceOption = NAMESPACE,
) -> None:
    """Set the description of a collection, which lists show and no prompt contains.

    An assistant that speaks the Model Context Protocol chooses a collection by it.
    """
    check_namespace(namespace)
    check_description(text or "")
    with ui.open_ledger(ui.read_settings(options)) as database:
        from ragcache.db import Catalog

        catalog = Catalog(database, "", None, namespace)
        if text is not None:
            catalog.settings.set_description(collection, text)
        ui.console.print(catalog.settings.description(collection), markup=False)


@expand_options
def instruction(
    collection: CollectionArgument,
    options: Annotated[ServiceOptions, LEDGER],
    text: Annotated[
        str | None, typer.Argument(help="The instruction; without it, the present one is printed.")
    ] = None,
    default: Annotated[
        bool, typer.Option("--default", help="Use the folder's instruction again.")
    ] = False,
    namespace: ui.NamespaceOption = NAMESPACE,
) -> None:
    """Set the instruction with which the model reads the documents of a collection.

    States depend on the instruction: the next `ingest`, `warm` or questions encode the modules
    again.
    """
    check_namespace(namespace)
    check_instruction(text)
    if default and text is not None:
        raise ConfigurationError("give an instruction or --default, not both")
    with ui.open_ledger(ui.read_settings(options)) as database:
        from ragcache.db import Catalog

        catalog = Catalog(database, "", None, namespace)
        if default or text is not None:
            catalog.settings.set_instruction(collection, text)
        own = catalog.version(collection).instruction
    ui.console.print("the folder's (--instruction)" if own is None else own, markup=False)


@expand_options
def priming(
    collection: CollectionArgument,
    options: Annotated[ServiceOptions, STORE],
    file: Annotated[
        Path | None,
        typer.Argument(help="A file with the text; without it, the present one is printed."),
    ] = None,
    default: Annotated[bool, typer.Option("--default", help="Use the built-in text.")] = False,
    similar: Annotated[
        bool, typer.Option("--similar", help="Use the most similar other module of each.")
    ] = False,
    namespace: ui.NamespaceOption = NAMESPACE,
) -> None:
    """Set the text behind which modules in later places are encoded, for mode `primed`.

    States behind the earlier text are removed: the next `warm --mode primed` or questions encode
    them again. About 300 tokens, like the documents of the collection, are enough.
    """
    check_namespace(namespace)
    if default + similar + (file is not None) > 1:
        raise ConfigurationError("give one of a file, --default and --similar")
    text = None if file is None else ui.read_text(file)
    check_priming(text)
    with ui.inspect_store(ui.read_settings(options)) as (database, store):
        from ragcache.db import Catalog

        catalog = Catalog(database, "", None, namespace)
        if default or similar or text is not None:
            store.discard(catalog.settings.set_priming(collection, text, similar=similar))
        version = catalog.version(collection)
    named = "the most similar other module of each" if version.similar else "the built-in text"
    ui.console.print(version.priming or named, markup=False)


@expand_options
def retrieve(
    query: Annotated[str, typer.Argument(help="What to look for.")],
    collection: CollectionOption,
    search: SearchParams,
    options: Annotated[ServiceOptions, Offer(("embedding", "reranker", "ledger", "state"))],
    namespace: ui.NamespaceOption = NAMESPACE,
    as_json: ui.JsonOption = False,
) -> None:
    """Find the best modules for a query, with their scores; no model is loaded."""
    check_namespace(namespace)
    settings = ui.read_settings(options)
    check_embedding(settings.embedding)
    check_reranker(settings.reranker)
    with ui.open_ledger(settings) as database:
        ui.check_collection(database, collection, namespace)
        from ragcache.db import Catalog
        from ragcache.retrieval import Retrievers
        from ragcache.retrieval.resolve import resolve_embedder, resolve_reranker

        embedder = resolve_embedder(settings.embedding)
        catalog = Catalog(database, "", None, namespace)
        retriever = Retrievers(
            catalog, database, embedder, resolve_reranker(settings.reranker)
        ).retriever_for()
        found = retriever.retrieve(query, collection, search)
    if as_json:
        ui.print_json([_hit_values(hit) for hit in found.hits])
        return
    if not found.hits:
        ui.console.print("nothing in this collection matches the query")
    for hit in found.hits:
        scores = ui.format_scores(hit.bm25, hit.cosine, hit.rerank)
        ui.console.print(f"[bold]{escape(hit.module.name)}[/]  [dim]{scores}[/]")
        ui.console.print(hit.module.text.strip(), markup=False, style="dim")


def _hit_values(hit: Hit) -> dict[str, object]:
    module = hit.module
    return {
        "module": module.name,
        "document": module.document,
        "uri": module.uri,
        "score": hit.score,
        "bm25": hit.bm25,
        "cosine": hit.cosine,
        "rerank": hit.rerank,
        "text": module.text,
        "metadata": module.attributes,
    }


@expand_options
def warm(
    collection: CollectionArgument,
    options: Annotated[ServiceOptions, ENCODING],
    ids: Annotated[
        list[str] | None, typer.Argument(help="Ids of documents; without any, all of them.")
    ] = None,
    mode: Annotated[
        ReuseMode | None,
        ui.mode_option("Mode of the questions to come. Defaults to the model's mode."),
    ] = None,
    dry_run: DryRunOption = False,
    as_json: ui.JsonOption = False,
) -> None:
    """Encode the states that no tier has any more, and keep them on the disk."""
    with ui.open_existing_rag(options, collection, embedding="none") as rag:
        known = {row.source_id for row in rag.documents.get(collection, ids or None)}
        _check_ids(collection, ids, known)
        changes = rag.modules.warm(collection, ids or None, mode=mode, dry_run=dry_run)
    encoded = sum(change.action == "encode" for change in changes)
    if as_json:
        ui.print_json({"dry_run": dry_run, "documents": len(known), "encoded": encoded})
        return
    would = "would be encoded" if dry_run else "encoded"
    ui.console.print(f"{len(known):,} documents: {encoded:,} states {would}")
