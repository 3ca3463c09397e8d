"""Collections that arrive: an archive is verified, then stored.

The archive is verified as a whole before anything is stored. States then belong to an ingestion
job, as in an ingestion, and the documents appear in one transaction with the end of the job: a
process that dies in between leaves no document, and the next import goes on with its states.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from ragcache.answers.confidence import read_calibrations
from ragcache.config import check_description, parse_bytes, salt_of
from ragcache.db import (
    CollectionContents,
    CollectionTexts,
    NewDocument,
    NewModule,
    RunningJob,
    collection_target,
)
from ragcache.documents import SourceDocument
from ragcache.documents.source import check_metadata, check_storable
from ragcache.errors import (
    ArchiveDamaged,
    ArchiveMismatch,
    CollectionExists,
    ConfigurationError,
    DocumentError,
)
from ragcache.modes import AFTER_PREAMBLE, Encoding
from ragcache.pipeline.archive import (
    ArchivedDocument,
    ArchivedModule,
    ArchiveReader,
    Manifest,
    damaged,
)
from ragcache.pipeline.collection_export import Report, fingerprints, joined
from ragcache.pipeline.ingest import check_collection
from ragcache.pipeline.module_states import PRIMING_TEXT, ModuleEncoder, portions
from ragcache.pipeline.namespace import Namespace
from ragcache.retrieval import embedder_name
from ragcache.states import KVKey
from ragcache.states.quantization import StoredStates, model_dtype
from ragcache.store import LeaseRequest
from ragcache_schemas import sanitize_text

_LONGEST_HEADER = 1 << 16  # bytes of a blob's header
_WRITERS = 8  # threads that store states, mostly waiting for the disk, which syncs several at once
_PORTION, _PORTION_BYTES = 64, 1 << 26  # most states that a thread stores at once, and their bytes


@dataclass(frozen=True, slots=True)
class CollectionImport:
    """Summary of an import."""

    collection: str
    documents: int
    modules: int
    states: int
    """Number of states that were stored."""
    known: int
    """Number of states of the archive that the folder held already."""
    encoded: int
    """Number of modules that were encoded here."""
    missing: int
    """Number of modules without states, which the first questions encode."""


class _ArchivedStates(NamedTuple):
    """States of an archive."""

    key: KVKey
    """Key in the archive, which is salted with the namespace of the export."""
    encoding: Encoding
    length: int
    """Number of tokens."""


@dataclass(slots=True)
class _Contents:
    """Contents of a verified archive, of which nothing but tokens stays in memory."""

    encoder: ModuleEncoder
    """Encoder of the collection."""
    exporter: ModuleEncoder
    """The same encoder in the namespace of the export, which makes the keys in the archive."""
    takes_states: bool
    tokens: list[list[array[int]]] = field(default_factory=list)
    """Tokens of the modules of each document."""
    states: dict[KVKey, _ArchivedStates] = field(default_factory=dict)
    """States of the archive by their keys in this folder."""
    scaffolds: dict[KVKey, list[str]] = field(default_factory=dict)
    """Names of the modules of each scaffold, by the key of their joint states in this folder."""

    def add_states(self, token_ids: Sequence[int], encoding: Encoding = AFTER_PREAMBLE) -> None:
        """Note that the archive has the states of these tokens."""
        theirs = self.exporter.key(token_ids, encoding)
        states = _ArchivedStates(theirs, encoding, len(token_ids))
        self.states[self.encoder.key(token_ids, encoding)] = states


@dataclass(eq=False)
class ArchiveVerifier:
    """Reads a whole archive once, and compares it with itself and with the model of this folder."""

    namespace: Namespace
    archive: ArchiveReader
    encode: bool
    """See `CollectionImporter.encode`."""
    report: Report
    _ids: set[str] = field(default_factory=set)
    """Ids of the documents so far."""
    _dimensions: set[int] = field(default_factory=set)
    """Dimensions of their vectors."""
    _originals: set[str] = field(default_factory=set)
    """Digests of the originals that they name."""
    _tokens: dict[str, Sequence[int]] = field(default_factory=dict)
    """Tokens of their modules that scaffolds name."""

    def verify(self) -> _Contents:
        """Return the contents of the archive.

        Raises:
            ArchiveDamaged: The archive was cut off or changed, or is hostile.
            ArchiveMismatch: Another model or version made it, and `encode` is not set.
        """
        manifest = self.archive.manifest
        encoder = self.namespace.ask.encoder.with_texts(_texts(manifest))
        reasons = self._differences(encoder)
        if reasons and not self.encode:
            raise ArchiveMismatch(
                f"{self.archive.name} cannot be used here: {'; '.join(reasons)}. Open the folder "
                "with the same model, or give --encode to take the texts and encode them here"
            )
        self._check_settings()
        exporter = replace(encoder, salt=salt_of(manifest.namespace))
        contents = _Contents(encoder, exporter, takes_states=not reasons)
        members = {name for names in manifest.scaffolds for name in names}
        for document in self.archive.documents():
            self._check_document(document)
            self._add_document(contents, document, members)
        self._verify_originals()
        self.namespace.ingestor.check_window([*chain.from_iterable(contents.tokens)])
        self._add_scaffolds(contents)
        if contents.takes_states:
            self._verify_states({each.key: each.length for each in contents.states.values()})
        else:
            contents.states.clear()
        return contents

    def _add_document(
        self, contents: _Contents, document: ArchivedDocument, members: set[str]
    ) -> None:
        """Add a document to the contents. `members`: names of the modules of scaffolds."""
        tokens: list[array[int]] = []
        for number, module in enumerate(document.modules, 1):
            found = contents.encoder.model.encode_untrusted(module.text)
            tokens.append(array("i", found))
            if (name := f"{document.id}#{number}") in members:
                self._tokens[name] = found
            for encoding in module.states:
                contents.add_states(found, encoding)
        contents.tokens.append(tokens)

    def _add_scaffolds(self, contents: _Contents) -> None:
        """Add the scaffolds to the contents, once these have all documents."""
        held = set(self.archive.state_keys)
        for names in self.archive.manifest.scaffolds:
            if not self._tokens.keys() >= set(names):
                raise self._damaged("a scaffold names modules that it does not hold")
            joint = joined(self._tokens, names)
            contents.scaffolds[contents.encoder.key(joint)] = names
            if contents.exporter.key(joint) in held:
                contents.add_states(joint)

    def _differences(self, encoder: ModuleEncoder) -> list[str]:
        """Return why the archive's states cannot be used with this model."""
        theirs, ours = self.archive.manifest.fingerprints, fingerprints(encoder)
        told = {
            "states_format": f"its states have format {theirs.states_format}, and this ragcache "
            f"has format {ours.states_format}",
            "model": f"it was made with the model {self.archive.manifest.model} (fingerprint "
            f"{theirs.model:.12}), and this folder is open with {encoder.model.name} "
            f"({ours.model:.12})",
            "tokenizer": f"its tokenizer differs (fingerprints {theirs.tokenizer:.12} and "
            f"{ours.tokenizer:.12})",
            "scheme": f"its positions are {theirs.scheme}, and this model's {ours.scheme}",
            "preamble": "its prompts begin with another text, because the chat template or its "
            "variables differ",
        }
        return [text for name, text in told.items() if getattr(theirs, name) != getattr(ours, name)]

    def _check_settings(self) -> None:
        try:
            check_description(self.archive.manifest.description)
        except ConfigurationError as error:
            raise self._damaged(str(error)) from None
        try:
            read_calibrations(self.archive.manifest.calibrations)
        except Exception as error:
            raise self._damaged(f"its calibrations are not readable ({error!r:.200})") from error

    def _verify_originals(self) -> None:
        """Verify the originals. The documents must name all of them, and no others."""
        if self._originals - {""} != self.archive.originals:
            raise self._damaged("it holds other originals than its documents name")
        for digest in self.archive.originals:
            self.archive.read_original(digest)

    def _check_document(self, document: ArchivedDocument) -> None:
        """Check that the database can hold a document, and that no other one has its id."""
        try:
            check_storable([SourceDocument(document.id, "", document.uri, document.attributes)])
            for module in document.modules:
                check_metadata(module.details, document.id)
        except DocumentError as error:
            raise self._damaged(str(error)) from error
        if document.id in self._ids:
            raise self._damaged(f"two documents are both called {document.id!r:.80}")
        self._ids.add(document.id)
        self._originals.add(document.original)
        for module in document.modules:
            self._check_module(module, f"a module of {document.id!r:.80}")

    def _check_module(self, module: ArchivedModule, name: str) -> None:
        if sanitize_text(module.text) != module.text or not module.text.strip():
            raise self._damaged(f"{name} has control characters or no text")
        if any(len(run) != 2 for run in module.places):
            raise self._damaged(f"{name} has places that are no pairs")
        try:
            vector = _vector(module.vector)
        except ValueError as error:
            raise self._damaged(f"{name} has a vector that cannot be read ({error})") from error
        if vector is not None:
            self._dimensions.add(len(vector))
        if len(self._dimensions) > 1:
            raise self._damaged("its vectors have different dimensions")

    def _verify_states(self, lengths: dict[KVKey, int]) -> None:
        """Verify the checksums of all states, and that they fit their tokens and the model."""
        held = self.archive.state_keys
        if lost := lengths.keys() - set(held):
            raise self._damaged(f"it lacks the states {min(lost)}")
        if set(held) - lengths.keys():
            raise self._damaged("it holds states that belong to none of its modules")
        causal, done = self.namespace.shared.model.causal, 0
        total = sum(map(self.archive.states_nbytes, held))
        for key in held:
            nbytes, length = self.archive.states_nbytes(key), lengths[key]
            if nbytes > _LONGEST_HEADER + 2 * causal.module_bytes(length + 2):  # as int8
                raise self._damaged(f"the states {key} are larger than their module's")
            states = self.archive.read_states(key)
            shape = (causal.num_layers, causal.kept_heads, length)
            shapes = tuple(states.keys.shape), tuple(states.values.shape)
            maps, wanted = states.recurrent, causal.map_shape
            fits = maps is wanted or (maps is not None and wanted is not None and maps.fits(wanted))
            if not fits or shapes != ((*shape, causal.head_dim), (*shape, causal.value_dim)):
                raise self._damaged(f"the states {key} have other shapes than their module's")
            if model_dtype(states) != causal.states_dtype:
                raise self._damaged(f"the states {key} have another dtype than the model's")
            done += nbytes
            self.report("verifying", done, total)

    def _damaged(self, reason: str) -> ArchiveDamaged:
        return damaged(self.archive.name, reason)


@dataclass(frozen=True, eq=False)
class CollectionImporter:
    """Stores the collection of an archive."""

    namespace: Namespace
    archive: ArchiveReader
    collection: str
    encode: bool
    """Whether to encode modules whose states the archive lacks, or cannot give to this model."""
    replaces: bool
    """Whether the archive replaces the documents of the collection."""
    report: Report

    def run(self) -> CollectionImport:
        """Verify the archive, then store its states and its documents.

        Raises:
            ArchiveDamaged: The archive was cut off or changed, or is hostile. Nothing is stored.
            ArchiveMismatch: Another model or version made it, and `encode` is not set.
            CollectionExists: The collection has documents already.
            JobCanceled: The import was canceled.
            StoreError: The states cannot be stored.
        """
        check_collection(self.collection)
        self._check_free()
        verifier = ArchiveVerifier(self.namespace, self.archive, self.encode, self.report)
        contents = verifier.verify()
        jobs = self.namespace.shared.store.jobs.within(self.namespace.name)
        with jobs.turn(collection_target(self.collection)) as job:
            jobs.describe(job, sum(map(len, contents.tokens)), {})
            stored = self._store_states(job, contents)
            encoded, missing = self._encode(job, contents)
            self._bring_originals(job)
            self._store_documents(RunningJob(job, jobs.session), contents)
        return CollectionImport(
            self.collection,
            documents=len(contents.tokens),
            modules=sum(map(len, contents.tokens)),
            states=stored,
            known=len(contents.states) - stored,
            encoded=encoded,
            missing=missing,
        )

    @property
    def _manifest(self) -> Manifest:
        return self.archive.manifest

    def _check_free(self) -> None:
        known = self.namespace.catalog.collections().get(self.collection, 0)
        if known and not self.replaces:
            raise CollectionExists.with_documents(self.collection, known)

    def _store_states(self, job: int, contents: _Contents) -> int:
        """Store the states that no tier has, and return how many."""
        store = self.namespace.shared.store
        jobs = store.jobs.within(self.namespace.name)
        keys = list(contents.states)
        jobs.expect(job, keys)  # so that nobody retires them meanwhile
        store.look_up(keys)
        lacking = [key for key in keys if not store.persistent.holds(key)]

        def store_portion(portion: Sequence[KVKey]) -> Sequence[KVKey]:
            jobs.expect(job, portion)  # ends the import if it was canceled
            self._store(contents, portion)
            return portion

        stored = 0
        with ThreadPoolExecutor(_WRITERS, "ragcache-import") as writers:
            try:
                for portion in writers.map(store_portion, self._portions(contents, lacking)):
                    for _ in portion:
                        stored += 1
                        self.report("storing", stored, len(lacking))
            except BaseException:
                writers.shutdown(cancel_futures=True)
                raise
        return len(lacking)

    def _portions(self, contents: _Contents, keys: Sequence[KVKey]) -> Iterator[Sequence[KVKey]]:
        """Yield the keys in portions, each of which is stored by one thread in few transactions."""
        portion, nbytes = list[KVKey](), 0
        for key in keys:
            portion.append(key)
            nbytes += self.archive.states_nbytes(contents.states[key].key)
            if nbytes >= _PORTION_BYTES or len(portion) == _PORTION:
                yield portion
                portion, nbytes = [], 0
        if portion:
            yield portion

    def _store(self, contents: _Contents, keys: Sequence[KVKey]) -> None:
        alike: dict[tuple[Encoding, KVKey | None], tuple[LeaseRequest, dict[KVKey, StoredStates]]]
        alike = {}
        for key in keys:
            archived = contents.states[key]
            request = contents.encoder.request_of(archived.length, archived.encoding)
            _, found = alike.setdefault((archived.encoding, request.root), (request, {}))
            found[key] = self.archive.read_states(archived.key)
        for request, found in alike.values():
            self.namespace.shared.store.add_states(found, request)

    def _encode(self, job: int, contents: _Contents) -> tuple[int, int]:
        """Encode modules without states, if wanted.

        Returns how many were encoded, and how many still have no states.
        """
        store, ingestor = self.namespace.shared.store, self.namespace.ingestor
        jobs = store.jobs.within(self.namespace.name)
        every = {contents.encoder.key(ids): ids for each in contents.tokens for ids in each}
        tokens = {key: ids for key, ids in every.items() if not store.memory.is_known(key)}
        if not (self.encode and ingestor.encoder.model.causal.composes):
            return 0, len(tokens)
        done = 0
        for portion in portions(list(tokens)):
            jobs.expect(job, portion)
            with ingestor.turns.turn(self.namespace.name):
                modules = [tokens[key] for key in portion]
                contents.encoder.lease(modules, origin="ingest").release()
            done += len(portion)
            self.report("encoding", done, len(tokens))
        return done, 0

    def _bring_originals(self, job: int) -> None:
        """Keep the originals for the documents, in portions of a few in memory."""
        jobs = self.namespace.shared.store.jobs.within(self.namespace.name)
        budget = parse_bytes(self.namespace.ingestor.config.originals_bytes)
        portion, nbytes = dict[str, bytes](), 0
        for digest in self.archive.originals:
            portion[digest] = self.archive.read_original(digest)
            nbytes += len(portion[digest])
            if nbytes >= _PORTION_BYTES:
                jobs.bring_originals(job, portion, budget)
                portion, nbytes = {}, 0
        jobs.bring_originals(job, portion, budget)

    def _store_documents(self, job: RunningJob, contents: _Contents) -> None:
        """Make the documents visible, in one transaction that ends the job."""
        namespace, shared = self.namespace, self.namespace.shared
        instruction, priming = _texts(self._manifest)
        own = CollectionTexts(
            None if instruction == shared.instruction else instruction,
            None if priming == PRIMING_TEXT else priming,
        )
        new = CollectionContents(
            self._rows(contents),
            own,
            self._manifest.calibrations,
            self._manifest.description,
            contents.scaffolds,
            self._manifest.similar,
        )
        freed = namespace.catalog.fill_collection(self.collection, new, job, replaces=self.replaces)
        shared.store.discard(freed)
        namespace.ingestor.retriever.indexes.update(self.collection)

    def _rows(self, contents: _Contents) -> Iterator[NewDocument]:
        embedder = self.namespace.shared.embedder
        same = embedder is not None and embedder_name(embedder) == self._manifest.embedder
        for document, tokens in zip(self.archive.documents(), contents.tokens, strict=True):
            modules = []
            for number, (module, ids) in enumerate(zip(document.modules, tokens, strict=True), 1):
                keys = [contents.encoder.key(ids, each) for each in module.states]
                own = contents.encoder.key(ids)
                modules.append(
                    NewModule(
                        f"{document.id}#{number}",
                        module.text,
                        ids,
                        own,
                        _vector(module.vector) if same else None,
                        module.details,
                        [(run[0], run[1]) for run in module.places],
                        [key for key in keys if key != own] if contents.takes_states else (),
                    )
                )
            yield NewDocument(
                document.id,
                document.uri,
                document.digest,
                modules,
                document.attributes,
                document.text,
                document.original,
            )


def _texts(manifest: Manifest) -> CollectionTexts:
    return CollectionTexts(manifest.instruction, manifest.priming)


def _vector(text: str | None) -> np.ndarray | None:
    """Return an archived embedding, float32 [D]. Raises `ValueError` if it is none."""
    if text is None:
        return None
    vector = np.frombuffer(base64.b64decode(text, validate=True), dtype="<f4")
    if not len(vector) or not np.isfinite(vector).all():
        raise ValueError("a vector is empty or not finite")
    return vector
