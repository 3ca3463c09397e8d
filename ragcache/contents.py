"""Contents of a folder: namespaces, and their collections, documents and hand-written schemas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from io import BytesIO
from pathlib import Path
from typing import IO, BinaryIO

from ragcache.answers.confidence import (
    Calibration,
    calibration_key,
    find_calibration,
    read_calibrations,
    write_calibrations,
)
from ragcache.config import (
    DEFAULT_K,
    check_description,
    check_placement,
    check_priming,
    check_texts,
)
from ragcache.db import (
    CollectionRow,
    Deletion,
    DocumentRow,
    NamespaceDeletion,
    NamespaceRows,
    Page,
    collection_page,
    document_page,
)
from ragcache.db.originals import has_original, read_original
from ragcache.documents.originals import open_original
from ragcache.errors import OriginalMissing, StoreError, UnreadableDocument
from ragcache.pipeline import Namespace, SharedServices, generated_schema, members
from ragcache.pipeline.archive import ArchiveReader
from ragcache.pipeline.chat_template import resolve_instruction
from ragcache.pipeline.collection_export import (
    CollectionExport,
    CollectionExporter,
    Report,
    no_report,
)
from ragcache.pipeline.collection_import import CollectionImport, CollectionImporter
from ragcache.pipeline.ingest import check_collection
from ragcache.pipeline.module_states import PRIMING_TEXT, scaffold_modules
from ragcache.store.admin import delete_documents
from ragcache.store.tiers.base import named_os_error
from ragcache_schemas import Placement, Schema, expand_slots


@dataclass(frozen=True, slots=True)
class Collections:
    """The collections of a namespace; `RagCache.collections`.

    Every method that takes the name of a collection raises `UnknownCollection` if there is none of
    that name.
    """

    _namespace: Namespace

    def _repr_html_(self) -> str:
        """Return a table of the first collections for notebooks."""
        rows = "".join(
            f"<tr><td>{escape(row.name)}</td><td>{row.documents:,}</td><td>{row.modules:,}</td></tr>"
            for row in self.page(limit=20).items
        )
        names = "<th>collection</th><th>documents</th><th>modules</th>"
        return f"<table><tr>{names}</tr>{rows}</table>" if rows else ""

    def create(self, collection: str, description: str = "") -> bool:
        """Create an empty collection. `RagCache.ingest` creates collections by itself.

        Args:
            collection: Name of the collection.
            description: Its description, as in `set_description`. A collection that exists keeps
                its own.

        Returns:
            True, or False if the collection exists.

        Raises:
            ConfigurationError: The name or the description cannot be used.
        """
        check_description(description)
        return self._namespace.catalog.add_collection(check_collection(collection), description)

    def delete(self, collection: str) -> int:
        """Delete a collection with its documents, and return how many it had."""
        namespace = self._namespace
        deleted = delete_documents(namespace.catalog, namespace.shared.store, collection)
        namespace.retrievers.retriever_for().indexes.update(collection)
        return deleted

    def preview_deletion(
        self, collection: str, document_ids: Sequence[str] | None = None
    ) -> Deletion:
        """Count what `RagCache.delete` or, without ids, `delete` would remove.

        Counts documents, modules, and the states that nothing else needs. Unknown ids are skipped.
        """
        check_texts("document_ids", document_ids)
        self._namespace.shared.store.ledger.flush()
        return self._namespace.catalog.preview_deletion(collection, document_ids)

    def names(self) -> list[str]:
        """Return the names of all collections, sorted."""
        return sorted(self._namespace.catalog.versions())

    def page(self, cursor: str | None = None, limit: int = 100) -> Page[CollectionRow]:
        """List a page of the collections by name, with their sizes.

        Raises:
            InvalidRequest: The cursor or the limit cannot be used.
        """
        namespace = self._namespace
        return collection_page(namespace.shared.database, namespace.name, cursor, limit)

    def instruction(self, collection: str) -> str:
        """Return the collection's instruction, or by default the instruction of `RagCache.open`."""
        own = self._namespace.catalog.version(collection).instruction
        return self._namespace.shared.instruction if own is None else own

    def set_instruction(self, collection: str, instruction: str | None) -> None:
        """Set the instruction that precedes a collection's documents, for all processes.

        The instruction is part of the prompt of every question and of the key of states:
        `RagCache.modules.warm`, or the first questions, encode the modules again.

        Args:
            collection: The collection.
            instruction: The instruction. None restores the instruction of `RagCache.open`.

        Raises:
            ConfigurationError: The instruction is blank or contains a control token of the model.

        Example:
            >>> rag.collections.set_instruction("handbook", "Answer in French, in one sentence.")
            >>> rag.collections.set_instruction("handbook", None)
        """
        if instruction is not None:
            resolve_instruction(self._namespace.shared.model, instruction)
        self._namespace.catalog.settings.set_instruction(collection, instruction)

    def priming(self, collection: str) -> str:
        """Return the text that the collection's modules in later places are encoded behind.

        Where `similar_priming` holds, only modules without a similar one are encoded behind it.
        """
        own = self._namespace.catalog.version(collection).priming
        return PRIMING_TEXT if own is None else own

    def similar_priming(self, collection: str) -> bool:
        """Return whether modules are encoded behind the most similar other module."""
        return self._namespace.catalog.version(collection).similar

    def set_priming(
        self, collection: str, text: str | None = None, *, similar: bool = False
    ) -> None:
        """Set the text that a collection's modules are encoded behind, for mode `primed`.

        Modules after the first of a prompt are read from states that were encoded behind the
        preamble and this text, which prompts do not contain. States behind the earlier text are
        removed; `RagCache.modules.warm`, or the first questions, encode them again.

        Text like the collection's own may suit it better than the built-in one, which is about
        anything. Measure it with `ragcache eval`.

        With `similar`, each module is encoded behind the module of the collection that is most
        similar to it, of another document if there is one, and behind the built-in text if there is
        none. The choice is made once. When that module's document is deleted or replaced, the
        states behind it are removed, and another module is chosen.

        Args:
            collection: The collection.
            text: The text, such as a document of the collection: about 300 tokens, at most 20,000
                characters. None restores the built-in text.
            similar: Whether similar modules take the place of a text.

        Raises:
            ConfigurationError: The text is blank, too long or no valid text, or is given with
                `similar`.

        Example:
            >>> minutes = "Minutes. Present: Ida and Jon. The boats are painted in May."
            >>> rag.collections.set_priming("handbook", minutes)
            >>> rag.collections.set_priming("handbook", similar=True)
            >>> rag.collections.set_priming("handbook", None)
        """
        check_priming(text, similar=similar)
        shared = self._namespace.shared
        shared.store.ledger.flush()  # rows of states that were made just now
        settings = self._namespace.catalog.settings
        shared.store.discard(settings.set_priming(collection, text, similar=similar))

    def description(self, collection: str) -> str:
        """Return the description of a collection, or an empty text."""
        return self._namespace.catalog.settings.description(collection)

    def set_description(self, collection: str, description: str) -> None:
        """Set the description of a collection, for people and for models that choose among several.

        It is listed with the collection, also for assistants (Model Context Protocol), and is part
        of no prompt.

        Args:
            collection: The collection.
            description: At most 2,000 characters.

        Raises:
            ConfigurationError: The description is too long or is no valid text.

        Example:
            >>> rag.collections.set_description("handbook", "Rules of the harbour: leave, boats.")
        """
        check_description(description)
        self._namespace.catalog.settings.set_description(collection, description)

    def calibration(self, collection: str, *, extractive: bool | None = None) -> Calibration | None:
        """Return the calibration of this model's answers from a collection.

        By default it is the calibration in the package for the embedded reader's quotations, and
        for a model's free answers the calibration that `ragcache.calibration.calibrate_model` has
        fitted, or else a general one.

        Args:
            collection: The collection.
            extractive: Whether the answers are quotations. Defaults to the model's own way of
                answering.
        """
        version, shared = self._namespace.catalog.version(collection), self._namespace.shared
        return find_calibration(
            version.calibrations,
            shared.model,
            shared.calibration if version.instruction is None else None,
            extractive=self._quotes(extractive),
        )

    def set_calibration(
        self, collection: str, calibration: Calibration | None, *, extractive: bool | None = None
    ) -> None:
        """Set the calibration of this model's answers from a collection, for all processes.

        It decides how confident an answer is, and below which confidence it is refused.
        `ragcache.calibration.fit_calibration` fits one to known questions.

        Args:
            collection: The collection.
            calibration: The calibration. None removes it.
            extractive: Whether the answers are quotations. Defaults to the model's own way of
                answering.

        Example:
            >>> rag.collections.set_calibration("handbook", None)
        """
        model = self._namespace.shared.model
        key = calibration_key(model, extractive=self._quotes(extractive))

        def change(before: str | None) -> str | None:
            kept = {name: each for name, each in read_calibrations(before).items() if name != key}
            return write_calibrations(kept if calibration is None else {**kept, key: calibration})

        self._namespace.catalog.settings.change_calibrations(collection, change)

    def _quotes(self, extractive: bool | None) -> bool:
        return self._namespace.shared.model.extractive if extractive is None else extractive

    def add_scaffold(self, collection: str, ids: Sequence[str]) -> tuple[str, ...]:
        """Encode modules as one, each attending to the modules before it (Prompt Cache §3.3).

        Questions that retrieve these modules next to each other in this order read the joint
        states, until one of their documents changes.

        Args:
            collection: The collection of the modules.
            ids: Ids of documents, for all of their modules, or names of modules.

        Returns:
            The names of the modules.

        Raises:
            ConfigurationError: An id is unknown, or there are fewer than two modules.
            PromptTooLong: The modules do not fit the model's window.
        """
        check_texts("ids", ids)
        namespace = self._namespace
        namespace.shared.deferred.release()
        encoder, ask = namespace.encoder_of(collection), namespace.ask
        modules = scaffold_modules(namespace.catalog.modules(collection), ids)
        token_ids = tuple(token for each in ask.tokens.of(modules) for token in each)
        namespace.submitter.check_sizes(own=len(encoder.preamble_ids), documents=len(token_ids))
        key = encoder.key(token_ids)
        ask.scaffolds.keep(collection, [module.id for module in modules], key)
        with encoder.lease([token_ids], origin="warm"):
            return tuple(module.name for module in modules)

    def export_archive(
        self, collection: str, path: str | Path, *, report: Report = no_report
    ) -> CollectionExport:
        """Write a collection to one file: documents, settings, states and checksums.

        The file appears when it is complete. The next call with the same path goes on where an
        interrupted one stopped (`PATH.part`). States are read from the disk, and take no room in
        memory.

        Args:
            collection: The collection.
            path: The file, which is replaced if it exists.
            report: Called as `report("exporting", done, total)` with numbers of states.

        Raises:
            DocumentsChanged: The collection was changed meanwhile.
            StoreError: The file cannot be written.

        Example:
            >>> done = rag.collections.export_archive("handbook", "handbook.tar")
            >>> done.documents
            1
        """
        exporter = CollectionExporter(self._namespace, collection, report)
        path = Path(path)
        try:
            return exporter.write(path)
        except OSError as error:
            if isinstance(error, StoreError):
                raise
            raise named_os_error(error, path) from error

    def stream_archive(self, collection: str) -> Iterator[memoryview]:
        """Yield the file of `export_archive` in pieces, for a response. Raises its errors."""
        return CollectionExporter(self._namespace, collection).stream()

    def import_archive(
        self,
        source: str | Path | BinaryIO,
        collection: str | None = None,
        *,
        encode: bool = False,
        replace: bool = False,
        report: Report = no_report,
    ) -> CollectionImport:
        """Store the collection of a file of `export_archive`.

        The whole file is verified before anything is stored. Documents appear together at the end.
        An import that was interrupted leaves states alone, with which the next one goes on.

        Args:
            source: The file: its path, or an open file of the operating system.
            collection: Name of the collection. Defaults to its name in the file.
            encode: Encode modules whose states the file lacks. If another model or version made the
                file, take the texts alone and encode all modules.
            replace: Replace the documents of a collection that exists.
            report: Called as `report(stage, done, total)`: `verifying` in bytes, `storing` and
                `encoding` in states.

        Raises:
            ArchiveDamaged: The file is incomplete, was changed, or is no archive.
            ArchiveMismatch: Another model or version made the file, and `encode` is not set.
            CollectionExists: The collection has documents, and `replace` is not set.
            UnreadableDocument: There is no such file, or it cannot be read.
            StoreError: The states cannot be stored.

        Example:
            >>> done = rag.collections.import_archive("handbook.tar", "copy")
            >>> done.documents, done.encoded
            (1, 0)
        """
        self._namespace.shared.deferred.release()
        if isinstance(source, str | Path):
            try:
                file: BinaryIO = Path(source).open("rb")  # noqa: SIM115  # closed below
            except OSError as error:
                reason = error.strerror or error
                raise UnreadableDocument(f"cannot read the archive {source}: {reason}") from error
            with file:
                return self.import_archive(
                    file, collection, encode=encode, replace=replace, report=report
                )
        name = Path(source.name).name if isinstance(source.name, str) else "the archive"
        archive = ArchiveReader(source, name)
        target = archive.manifest.collection if collection is None else collection
        return CollectionImporter(
            self._namespace, archive, target, encode=encode, replaces=replace, report=report
        ).run()

    def prepare_indexes(self) -> None:
        """Build the indexes of all collections in the background, and return at once.

        The first question then does not wait for an index. `ragcache serve` calls this.
        """
        for collection in self._namespace.catalog.collections():
            self._namespace.retrievers.retriever_for().indexes.prepare(collection)


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of a namespace's collections; `RagCache.documents`.

    `RagCache.ingest`, `sync` and `delete` change them. All methods raise `UnknownCollection`.
    """

    _namespace: Namespace

    def get(self, collection: str, ids: Sequence[str] | None = None) -> list[DocumentRow]:
        """Return a collection's documents in the order in which they were stored.

        Args:
            collection: The collection.
            ids: Ids of documents; unknown ids are skipped. By default all documents.
        """
        check_texts("ids", ids)
        self._namespace.catalog.version(collection)
        return list(self._namespace.catalog.documents(collection, ids).values())

    def texts(self, collection: str, document_ids: Sequence[str]) -> dict[str, str]:
        """Return the texts of documents by id. Unknown ids are skipped."""
        check_texts("document_ids", document_ids)
        return self._namespace.catalog.texts(collection, document_ids)

    def pages(self, collection: str, document_id: str) -> dict[int, int]:
        """Return where the pages of a document begin.

        Returns:
            The first character in the document's text by page or slide. Empty for a document
            without pages and for an unknown one.
        """
        return self._namespace.catalog.pages(collection, document_id)

    def original(self, collection: str, document_id: str) -> IO[bytes]:
        """Open a copy of the file that a document was read from.

        The ledger keeps uploaded files. Other files are copied from their places.

        Returns:
            The file's content at the ingestion. The caller closes it.

        Raises:
            OriginalMissing: There is no such document, it was not read from a file, or the file
                is not kept or cannot be read any more.
            OriginalChanged: The file has another content now.

        Example:
            >>> with rag.documents.original("notes", "leave.pdf") as file:  # doctest: +SKIP
            ...     content = file.read()
        """
        for row in self.get(collection, [document_id]):
            database = self._namespace.shared.database
            kept = read_original(database, row.id) if row.original else None
            return open_original(row.uri, row.original) if kept is None else BytesIO(kept)
        raise OriginalMissing(f"the collection {collection!r} holds no document {document_id!r}")

    def has_original(self, collection: str, document_id: str) -> bool:
        """Whether the file that a document was read from is kept, or was one of this machine."""
        database = self._namespace.shared.database
        return any(
            bool(row.original) and (row.uri.startswith("file:") or has_original(database, row.id))
            for row in self.get(collection, [document_id])
        )

    def page(
        self, collection: str, cursor: str | None = None, limit: int = 100
    ) -> Page[DocumentRow]:
        """List a page of a collection's documents by id.

        Raises:
            InvalidRequest: The cursor or the limit cannot be used.
        """
        namespace = self._namespace
        return document_page(namespace.shared.database, namespace.name, collection, cursor, limit)

    def rename(self, collection: str, document_id: str, to: str) -> None:
        """Change the id of a document without encoding it again.

        Raises:
            DocumentError: There is no such document, or the new id is taken.
        """
        self._namespace.catalog.rename_document(collection, document_id, to)


@dataclass(frozen=True, slots=True)
class Schemas:
    """The PML schemas of a namespace; `RagCache.schemas`."""

    _namespace: Namespace

    def add(
        self, text: str, *, placement: Placement = "schema", source: str = "<string>"
    ) -> Schema:
        """Store a hand-written PML schema and encode its modules (Prompt Cache §3.3).

        A schema of the same name is replaced.

        Args:
            text: The schema.
            placement: `schema`, the fixed positions of the paper, or `compact`, which moves modules
                so that a prompt has no gaps.
            source: A file name for error messages.

        Returns:
            The parsed schema.

        Raises:
            PMLError: The schema is not valid.
            PromptTooLong: A module ends outside of the model's window.
            ConfigurationError: The placement is unknown.

        Example:
            >>> trip = '<schema name="trip"><module name="sea">The tide is out.</module></schema>'
            >>> rag.schemas.add(trip).name
            'trip'
        """
        check_placement(placement)
        self._namespace.shared.deferred.release()
        return self._namespace.pml.add(text, source, placement)

    def names(self) -> list[str]:
        """Return the names of the hand-written schemas."""
        return self._namespace.pml.texts.names()

    def delete(self, name: str) -> None:
        """Delete a schema with the states of its modules. Raises `UnknownSchema`."""
        self._namespace.pml.delete(name)

    def generate(self, collection: str, *, k: int = DEFAULT_K, expanded: bool = False) -> Schema:
        """Generate the schema whose prompt a question to a collection is.

        Args:
            collection: The collection.
            k: Number of slots for the collection's modules.
            expanded: Whether the modules are written into the slots.

        Raises:
            UnknownCollection: There is no such collection.
        """
        modules = self._namespace.catalog.modules(collection)
        schema = generated_schema(collection, self._namespace.encoder_of(collection).frame, k)
        return expand_slots(schema, {collection: members(modules)}) if expanded else schema


@dataclass(frozen=True, slots=True)
class Namespaces:
    """All namespaces of a folder; `RagCache.namespaces`."""

    _shared: SharedServices

    def names(self) -> list[str]:
        """Return the names of all namespaces, sorted."""
        return NamespaceRows(self._shared.database).names()

    def delete(self, namespace: str, *, dry_run: bool = False) -> NamespaceDeletion:
        """Delete a namespace with everything in it, in this and all other processes.

        Deletes collections, documents, schemas, conversations, recurring texts, files, responses
        and other stored objects, pins, ingestion jobs, API keys, and the states on all tiers that
        no other namespace needs. The ledger changes in one transaction. Other processes forget the
        namespace within seconds, and can store nothing in it until then.

        A running `ingest` of the namespace raises `JobCanceled` or `NamespaceDeleted`, and stores
        nothing. Answers that run go on, and nothing of them is kept; a service ends them with
        `NamespaceDeleted`. The name can be used again, for a new namespace.

        Args:
            namespace: The namespace. `default` keeps its API keys, since operators use them.
            dry_run: Change nothing.

        Returns:
            The contents of the namespace, as numbers.

        Raises:
            UnknownNamespace: There is no such namespace.
            ConfigurationError: The name cannot be used, or the namespace has the only API keys:
                without a key, the service would be open to its machine.
            StoreError: The ledger cannot be changed.

        Example:
            >>> tenant = rag.within("tenant-3")
            >>> tenant.ingest("handbook", [leave]).added
            1
            >>> rag.namespaces.delete("tenant-3", dry_run=True).documents
            1
            >>> rag.namespaces.delete("tenant-3").documents
            1
        """
        return self._shared.delete_namespace(namespace, dry_run=dry_run)
