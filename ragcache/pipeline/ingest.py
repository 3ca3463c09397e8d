"""Ingestion: compare documents with what is stored, split, encode and store what changed.

`Ingestor` does so in its caller's thread, when it is its turn in the queue;
`ragcache.pipeline.ingestion_jobs` in the background.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ragcache.db import (
    Catalog,
    DocumentRow,
    Jobs,
    MovedDocument,
    NewDocument,
    NewModule,
    RunningJob,
    collection_target,
)
from ragcache.documents import (
    LoadedSources,
    SkippedFile,
    SourceDocument,
    SplitModule,
    split_document,
)
from ragcache.documents.split import SPLIT_VERSION
from ragcache.errors import ConfigurationError, DocumentError, DocumentsChanged
from ragcache.params import OpenConfig
from ragcache.pipeline.module_states import ModuleEncoder, ModuleTokens, portions
from ragcache.retrieval import Retriever
from ragcache.store import KVStore

_SHOWN = 3  # collisions in an error
_ATTEMPTS = 3  # at documents that others change meanwhile

Progress = Callable[[int, int], None]
Preparing = Callable[[str, int, int], None]
"""Called with a stage (`reading` bytes, `splitting` characters), what is done, and the total."""
Prepared = tuple[SourceDocument, list[SplitModule]]


def check_collection(name: str) -> str:
    """The name, unless it is blank. Raises `ConfigurationError`."""
    if not name.strip():
        raise ConfigurationError("a collection needs a name")
    return name


@dataclass(frozen=True, slots=True)
class Ingestion:
    """Summary of an ingestion.

    Attributes:
        collection: The collection that holds the documents.
        added: Documents that were new.
        updated: Documents that replaced another version.
        unchanged: Documents that cost nothing.
        modules: Modules of the added and updated documents.
        tokens: Tokens of these modules.
        encoded: Module states that were computed.
        skipped: Files that were not ingested, each with the reason.
        vanished: Documents of the same folders whose files are gone; they are still stored.
        removed: Documents that `sync` removed.
        renamed: Documents that `sync` renamed, with their new ids.
    """

    collection: str
    added: int
    updated: int
    unchanged: int
    modules: int
    tokens: int
    encoded: int
    skipped: tuple[SkippedFile, ...] = ()
    vanished: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def failed(self) -> tuple[SkippedFile, ...]:
        """The skipped files that should have been ingested: damaged, binary or not accessible."""
        return tuple(file for file in self.skipped if file.failed)


@dataclass(frozen=True, slots=True)
class _Changes:
    """Changes that an ingestion makes to a collection. gone: documents whose files are gone; moved:
    gone documents whose content has come back under another name."""

    documents: tuple[SourceDocument, ...]
    changed: tuple[SourceDocument, ...]
    known: Mapping[str, DocumentRow]
    gone: tuple[str, ...] = ()
    moved: tuple[MovedDocument, ...] = ()

    @property
    def unchanged(self) -> frozenset[str]:
        """Documents that are stored as they are."""
        other = {each.id for each in self.changed} | {each.to for each in self.moved}
        return frozenset(each.id for each in self.documents) - other

    def report(self, loaded: LoadedSources, *, sync: bool) -> dict[str, Any]:
        """The fields of an `Ingestion` that are not counts."""
        return {
            "skipped": tuple(loaded.skipped),
            "vanished": () if sync else self.gone,
            "removed": self.gone if sync else (),
            "renamed": {each.source_id: each.to for each in self.moved},
        }


@dataclass(frozen=True, slots=True)
class Ingestor:
    """Stores documents with their modules, vectors and states."""

    catalog: Catalog
    store: KVStore
    encoder: ModuleEncoder
    retriever: Retriever
    config: OpenConfig

    def ingest(
        self, collection: str, loaded: LoadedSources, progress: Progress | None = None, *,
        sync: bool = False, preparing: Preparing | None = None,
    ) -> Ingestion:  # fmt: skip
        """Upserts documents by id, once the earlier jobs of the collection have ended. sync:
        whether documents that are gone are removed, or renamed where their content has moved; of
        the loaded folders, or of the whole collection. Raises as `store_sources`."""
        check_collection(collection)
        with self._jobs.turn(collection_target(collection)) as job:
            return self.store_sources(
                job, collection, loaded, progress, sync=sync, preparing=preparing
            )

    def store_sources(
        self, job: int, collection: str, loaded: LoadedSources, progress: Progress | None = None, *,
        sync: bool = False, preparing: Preparing | None = None,
    ) -> Ingestion:  # fmt: skip
        """As `ingest`, for a job that runs. States are on disk before a row refers to them, and all
        rows change in one transaction, which ends the job: no answer mixes old and new.

        Raises:
            DocumentsChanged: Documents to rename were renamed or deleted meanwhile, each time that
                the sources were compared again.
            JobCanceled: The job was canceled.
            JobTaken: Another process runs the job.
        """
        encoder = self.encoder.with_instruction(self.catalog.instruction(collection))
        own = replace(self, encoder=encoder)
        attempt = partial(
            own._attempt, job, collection, loaded, progress, sync=sync, preparing=preparing
        )
        for _ in range(_ATTEMPTS - 1):
            with suppress(DocumentsChanged):
                return attempt()
        return attempt()

    @property
    def _jobs(self) -> Jobs:
        return self.store.jobs.within(self.catalog.namespace)

    def _attempt(
        self, job: int, collection: str, loaded: LoadedSources, progress: Progress | None, *,
        sync: bool, preparing: Preparing | None,
    ) -> Ingestion:  # fmt: skip
        changes = self._compare(collection, loaded, sync=sync)
        report = changes.report(loaded, sync=sync)
        prepared = self._prepare(changes.changed, preparing)
        modules = [module for _, each in prepared for module in each]
        self._check_window([module.token_ids for module in modules])
        skipped = [asdict(each) for each in loaded.skipped]
        self._jobs.describe(job, len(modules), {**report, "skipped": skipped})
        encoded, stores = 0, bool(prepared or report["removed"] or changes.moved)
        if stores:
            rows, encoded = self._encode(job, prepared, progress)
            freed = self.catalog.replace_documents(
                collection, rows, removed=report["removed"], moved=changes.moved,
                job=RunningJob(job, self._jobs.session),
            )  # fmt: skip
            self.store.discard(freed)
            self.retriever.indexes.update(collection)
        encoded += self._encode_lost(collection, changes.unchanged)
        if not stores:
            self._jobs.finish(job)
        updated = sum(d.id in changes.known for d in changes.changed)
        return Ingestion(
            collection,
            added=len(changes.changed) - updated,
            updated=updated,
            unchanged=len(changes.documents) - len(changes.changed) - len(changes.moved),
            modules=len(modules),
            tokens=sum(len(each.token_ids) for each in modules),
            encoded=encoded,
            **report,
        )

    def _encode_lost(self, collection: str, documents: frozenset[str]) -> int:
        """Encodes modules of these documents whose states no tier has any more, as after a repair;
        returns how many. Not where the disk has a budget: there they may have been evicted."""
        if not documents or self.store.disk.budget_bytes is not None:
            return 0
        rows = [row for row in self.catalog.modules(collection) if row.document in documents]
        tokens = ModuleTokens(self.catalog, self.encoder.model).of(rows)
        keys = [self.encoder.key(ids) for ids in tokens]
        held = [any(key in index.entries for index in self.store.memory.every) for key in keys]
        for row, key, is_held in zip(rows, keys, held, strict=True):
            if not is_held:
                self.catalog.add_key(row.id, key)
        lost = [ids for ids, is_held in zip(tokens, held, strict=True) if not is_held]
        for part in portions(lost):
            with self.encoder.lease(part, origin="ingest"):
                pass
        return len(lost)

    def _compare(self, collection: str, loaded: LoadedSources, *, sync: bool) -> _Changes:
        """Compare the sources with the stored documents. Raises `DocumentError` for collisions."""
        ids = [d.id for d in loaded.documents]
        every = sync or loaded.files or loaded.folders
        known = self.catalog.documents(collection, None if every else ids)
        documents = loaded.documents if sync else _with_known_ids(loaded, known)
        if loaded.folders or not sync:  # else the files are all that the collection is to hold
            _check_collisions(loaded, documents, known)
        gone = {row.source_id: row for row in _gone(loaded, documents, known, sync=sync)}
        by_digest = {row.digest: row for row in gone.values()} if sync else {}
        changed, moved = [], []
        for document in documents:
            row, digest = known.get(document.id), self._digest(document)
            if row is not None and (row.digest, row.uri) == (digest, document.uri):
                continue
            source = by_digest.pop(digest, None) if row is None else None
            if source is None:
                changed.append(document)
            else:
                moved.append(MovedDocument(source.source_id, document.id, document.uri))
                del gone[source.source_id]
        return _Changes(tuple(documents), tuple(changed), known, tuple(gone), tuple(moved))

    def _prepare(
        self, documents: Sequence[SourceDocument], preparing: Preparing | None
    ) -> list[Prepared]:
        """Splits documents."""
        total, done = sum(len(d.text) for d in documents), 0

        def note(characters: int) -> None:
            nonlocal done
            done = min(done + characters, total)
            if preparing is not None:
                preparing("splitting", done, total)

        tokenize = self.encoder.model.encode_untrusted
        limit = self.config.module_tokens
        return [(d, split_document(d, limit, tokenize, note)) for d in documents]

    def _encode(
        self, job: int, prepared: Sequence[Prepared], progress: Progress | None
    ) -> tuple[list[NewDocument], int]:
        """The documents to store, and how many of their modules were encoded. New states belong to
        the job; if it is interrupted, the next job of the collection finds them."""
        jobs, rows, done, encoded = self._jobs, [], 0, 0
        total = sum(len(modules) for _, modules in prepared)
        note = jobs.progress(job)
        with ExitStack() as writing:  # the lease whose blobs are written beside the next encoding
            for document, modules in prepared:
                for part in portions([module.token_ids for module in modules]):
                    jobs.expect(job, [self.encoder.key(ids) for ids in part])
                    lease = self.encoder.lease(part, origin="ingest")
                    done += len(part)
                    encoded += sum(tier == "encoded" for tier in lease.source.values())
                    before = writing.pop_all()
                    writing.callback(lease.release)
                    before.close()
                    if not lease.is_writing:
                        writing.close()
                    note(done)
                    if progress is not None:
                        progress(done, total)
                rows.append(self._row(document, modules))
        return rows, encoded

    def _digest(self, document: SourceDocument) -> str:
        """Digest of text, metadata and everything that decides how the text is split."""
        metadata = json.dumps(dict(document.metadata), sort_keys=True, default=str)
        size = str(self.config.module_tokens)
        parts = (document.digest, metadata, str(SPLIT_VERSION), size)
        return hashlib.sha256("|".join(parts).encode()).hexdigest()

    def _check_window(self, modules: Sequence[Sequence[int]]) -> None:
        window = self.encoder.model.causal.window
        taken = len(self.encoder.preamble_ids) + self.config.max_tokens
        longest = max(map(len, modules), default=0)
        if longest + taken >= window:
            raise ConfigurationError(
                f"a module takes {longest} tokens, but of the model's window of {window} preamble "
                f"and answer leave {window - taken}; give a smaller module_tokens"
            )

    def _row(self, document: SourceDocument, modules: Sequence[SplitModule]) -> NewDocument:
        vectors = self.retriever.indexes.embed_texts([module.text for module in modules])
        rows = []
        for number, module in enumerate(modules):
            name = f"{document.id}#{number + 1}"
            key = self.encoder.key(module.token_ids)
            vector = None if vectors is None else vectors[number]
            details = _storable(module.metadata)
            rows.append(
                NewModule(name, module.text, module.token_ids, key, vector, details, module.places)
            )
        return NewDocument(
            document.id, document.uri, self._digest(document), rows, document.metadata,
            document.text,
        )  # fmt: skip


def _storable(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata as JSON can hold it; other values (dates, paths) become text."""
    stored: dict[str, Any] = json.loads(json.dumps(dict(metadata), default=str))
    return stored


def _check_collisions(
    loaded: LoadedSources, documents: Sequence[SourceDocument], known: Mapping[str, DocumentRow]
) -> None:
    """Raises `DocumentError` for files whose id is that of another file which is stored and still
    there with another content: of two folders, each would replace the other's."""
    pairs = []
    for given, each in zip(loaded.documents, documents, strict=True):
        other = _collides(each, known.get(each.id)) if given.id in loaded.files else None
        if other is not None:
            pairs.append(f"{_file_at(each.uri)} and {other} are both called {each.id!r}")
    if pairs:
        more = f" (and {len(pairs) - _SHOWN} more)" if len(pairs) > _SHOWN else ""
        raise DocumentError(
            f"{'; '.join(pairs[:_SHOWN])}{more}, and the second is stored; files are called by "
            "their paths within the folder. Ingest the folder above both, use another collection, "
            "or remove what is stored first. Nothing was ingested"
        )


def _collides(document: SourceDocument, stored: DocumentRow | None) -> Path | None:
    """The stored file that a file's document would replace; None where there is none any more."""
    if stored is None or stored.uri == document.uri:
        return None
    if urlsplit(stored.uri).scheme != "file":
        return None
    this, other = _file_at(document.uri), _file_at(stored.uri)
    try:
        equal = this.samefile(other) or this.read_bytes() == other.read_bytes()
    except OSError:  # it was moved, or is on another machine
        return None
    return None if equal else other


def _with_known_ids(
    loaded: LoadedSources, known: Mapping[str, DocumentRow]
) -> tuple[SourceDocument, ...]:
    """The documents, where a file that is stored under another id keeps that."""
    ids = {document.id for document in loaded.documents}
    by_uri = {row.uri: row.source_id for row in known.values() if row.source_id not in ids}
    return tuple(
        replace(each, id=by_uri.pop(each.uri))
        if each.id in loaded.files and each.uri in by_uri and not _is_known(each, known)
        else each
        for each in loaded.documents
    )


def _gone(
    loaded: LoadedSources, documents: Sequence[SourceDocument], known: Mapping[str, DocumentRow], *,
    sync: bool,
) -> Iterator[DocumentRow]:  # fmt: skip
    """Stored documents that the sources lack: of folders, those whose files do not exist or have
    another id now; if there are no folders, all but those of files that failed."""
    ids = loaded.present.union(document.id for document in documents)
    uris = {document.uri for document in documents if document.id in loaded.files}
    for row in known.values():
        if row.source_id in ids:
            continue
        if not loaded.folders:
            if sync:
                yield row
        elif any(row.uri.startswith(f"{folder.rstrip('/')}/") for folder in loaded.folders) and (
            row.uri in uris or _has_vanished(_file_at(row.uri))
        ):
            yield row


def _is_known(document: SourceDocument, known: Mapping[str, DocumentRow]) -> bool:
    """Whether this file is stored under this id."""
    return document.id in known and known[document.id].uri == document.uri


def _file_at(uri: str) -> Path:
    """The file of an address that `load_sources` gave."""
    return Path(unquote(urlsplit(uri).path))


def _has_vanished(path: Path) -> bool:
    """Whether there is no such file; one that cannot be looked at is there."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False
