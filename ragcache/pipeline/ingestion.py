"""Documents in: load, split, encode, and store in one transaction."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ragcache.config import Settings
from ragcache.documents import SourceDocument, load_sources, split_document
from ragcache.documents.source import DocumentSource
from ragcache.documents.split import SPLIT_VERSION
from ragcache.errors import ConfigurationError
from ragcache.pipeline.module_states import ModuleEncoder, portions
from ragcache.retrieval import Retriever
from ragcache.store import Catalogue, KVStore, NewDocument, NewModule

Progress = Callable[[int, int], None]
Prepared = tuple[SourceDocument, list[tuple[str, list[int]]]]
"""A document with the texts and token ids of its modules."""


@dataclass(frozen=True, slots=True)
class Ingestion:
    """What an ingestion did. encoded: states that were computed. ignored: files of folders that
    were passed over because of their suffix."""

    collection: str
    added: int
    updated: int
    unchanged: int
    modules: int
    tokens: int
    encoded: int
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ingestor:
    """Stores documents with their modules, vectors and states."""

    catalogue: Catalogue
    store: KVStore
    encoder: ModuleEncoder
    retriever: Retriever
    settings: Settings

    def ingest(
        self,
        collection: str,
        sources: Iterable[DocumentSource] | DocumentSource,
        progress: Progress | None = None,
        job: int | None = None,
    ) -> Ingestion:
        """Upserts documents by id. States are on disk before a row speaks of them, and all rows
        change in one transaction: no answer mixes old and new. job: one that was queued for it."""
        loaded = load_sources(sources)
        documents = loaded.documents
        known = self.catalogue.documents(collection, [d.id for d in documents])
        changed = [
            d for d in documents if d.id not in known or known[d.id].digest != self._digest(d)
        ]
        prepared = [(d, self._split(d)) for d in changed]
        self._check_window([ids for _, modules in prepared for _, ids in modules])
        total = sum(len(modules) for _, modules in prepared)
        encoded = self._store(collection, prepared, progress, job) if prepared else 0
        updated = sum(d.id in known for d in changed)
        return Ingestion(
            collection,
            added=len(changed) - updated,
            updated=updated,
            unchanged=len(documents) - len(changed),
            modules=total,
            tokens=sum(len(ids) for _, modules in prepared for _, ids in modules),
            encoded=encoded,
            ignored=tuple(str(path) for path in loaded.ignored),
        )

    def delete(self, collection: str, document_ids: Sequence[str]) -> int:
        """Deletes documents with modules, vectors and states; returns how many there were."""
        known = self.catalogue.documents(collection, document_ids)
        self.store.discard(self.catalogue.delete(collection, document_ids))
        return len(known)

    def rename(self, collection: str, document_id: str, to: str) -> None:
        """Gives a document another id; nothing is encoded. Raises `UnknownCollection` or
        `DocumentError`."""
        self.catalogue.rename(collection, document_id, to)

    def delete_collection(self, collection: str) -> int:
        """Deletes a collection with everything in it; returns how many documents there were."""
        documents, freed = self.catalogue.delete_collection(collection)
        self.store.discard(freed)
        return documents

    def _store(
        self,
        collection: str,
        prepared: Sequence[Prepared],
        progress: Progress | None,
        queued: int | None,
    ) -> int:
        """Encodes, then replaces documents in one transaction; returns how many modules were
        encoded. What is encoded belongs to the job until then, and stays for the next one should
        this one be interrupted."""
        jobs = self.store.jobs.within(self.catalogue.namespace)
        rows, done, encoded = [], 0, 0
        total = sum(len(modules) for _, modules in prepared)
        with jobs.running(f"collection {collection}", total, queued) as job:
            note = jobs.progress(job)
            for document, modules in prepared:
                for part in portions([ids for _, ids in modules]):
                    jobs.expect(job, [self.encoder.key(ids, "rooted") for ids in part])
                    with self.encoder.lease(part, "rooted", "ingest") as lease:
                        done += len(part)
                        encoded += sum(tier == "encoded" for tier in lease.source.values())
                    note(done)
                    if progress is not None:
                        progress(done, total)
                rows.append(self._row(document, modules))
            self.store.discard(self.catalogue.replace(collection, rows, job))
        return encoded

    def _digest(self, document: SourceDocument) -> str:
        """Of text and metadata, and of all that decides how the text becomes modules."""
        metadata = json.dumps(dict(document.metadata), sort_keys=True, default=str)
        size = str(self.settings.module_tokens)
        parts = (document.digest, document.uri, metadata, str(SPLIT_VERSION), size)
        return hashlib.sha256("|".join(parts).encode()).hexdigest()

    def _split(self, document: SourceDocument) -> list[tuple[str, list[int]]]:
        model = self.encoder.model
        return split_document(document, self.settings.module_tokens, model.encode_untrusted)

    def _check_window(self, modules: Sequence[Sequence[int]]) -> None:
        window = self.encoder.model.causal.window
        taken = len(self.encoder.preamble_ids) + self.settings.max_new_tokens
        longest = max(map(len, modules), default=0)
        if longest + taken >= window:
            raise ConfigurationError(
                f"a module takes {longest} tokens, but of the model's window of {window} preamble "
                f"and answer leave {window - taken}; give a smaller module_tokens"
            )

    def _row(self, document: SourceDocument, modules: list[tuple[str, list[int]]]) -> NewDocument:
        vectors = self.retriever.embed([text for text, _ in modules])
        rows = [
            NewModule(
                name=f"{document.id}#{number + 1}",
                text=text,
                token_ids=ids,
                key=self.encoder.key(ids, "rooted"),
                vector=None if vectors is None else vectors[number],
            )
            for number, (text, ids) in enumerate(modules)
        ]
        return NewDocument(
            document.id,
            document.uri,
            self._digest(document),
            rows,
            document.metadata,
            document.text,
        )
