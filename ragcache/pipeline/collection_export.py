"""Collections that leave: a collection as the entries of an archive."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

from ragcache.db import ScaffoldRows, Vectors
from ragcache.db.originals import has_original, read_original
from ragcache.errors import DocumentsChanged
from ragcache.modes import AFTER_OTHER_TEXT, AFTER_PREAMBLE, WITHOUT_CONTEXT, Encoding
from ragcache.pipeline.archive import (
    MANIFEST,
    ArchivedDocument,
    ArchivedModule,
    ArchiveEntry,
    ArchiveFingerprints,
    Manifest,
    Parts,
    document_name,
    original_name,
    states_name,
    stream_entries,
    text_entry,
    write_entries,
)
from ragcache.pipeline.module_states import ModuleEncoder
from ragcache.pipeline.namespace import Namespace
from ragcache.pipeline.pml import generated_schema
from ragcache.retrieval import embedder_name
from ragcache.states import FORMAT_VERSION, KVKey
from ragcache.states.serialization import blob_parts
from ragcache_schemas.writer import write_schema

ENCODINGS: tuple[Encoding, ...] = (AFTER_PREAMBLE, AFTER_OTHER_TEXT, WITHOUT_CONTEXT)
_DOCUMENTS = 64  # that are read from the ledger at once
_SLOTS = 4  # of the schema in the manifest

Report = Callable[[str, int, int], None]
"""Called as `report(stage, done, total)`: `exporting`, `verifying`, `storing` or `encoding`."""


def no_report(stage: str, done: int, total: int) -> None:
    """Report nothing."""


@dataclass(frozen=True, slots=True)
class CollectionExport:
    """Summary of an export."""

    collection: str
    documents: int
    modules: int
    states: int
    """Number of states that were found."""
    missing: int
    """Number of modules without states for the default mode, which no tier holds."""
    nbytes: int
    """Size of the archive."""


def fingerprints(encoder: ModuleEncoder) -> ArchiveFingerprints:
    """Return the fingerprints of a collection's states, from the encoder of the collection."""
    causal = encoder.model.causal
    return ArchiveFingerprints(
        states_format=FORMAT_VERSION,
        model=causal.fingerprint,
        tokenizer=encoder.model.tokenizer_fingerprint,
        scheme=causal.scheme.name,
        preamble=encoder.frame.preamble,
    )


@dataclass(eq=False)
class CollectionExporter:
    """Reads a collection as the entries of an archive, once."""

    namespace: Namespace
    collection: str
    report: Report = no_report
    _encodings: tuple[Encoding, ...] = ENCODINGS
    """Encodings whose states the archive gets."""
    _counted: dict[str, int] = field(default_factory=dict)
    _keys: dict[KVKey, None] = field(default_factory=dict)
    _tokens: dict[str, Sequence[int]] = field(default_factory=dict)
    """Tokens of the modules of scaffolds, by name."""
    _originals: dict[str, int] = field(default_factory=dict)
    """Ids of documents, by the digests of the files that are kept of them."""

    def write(self, path: Path) -> CollectionExport:
        """Write the archive to a file; see `write_entries`. Raises as `entries`."""
        nbytes = write_entries(path, self.entries())
        return CollectionExport(
            self.collection, states=len(self._keys), nbytes=nbytes, **self._counted
        )

    def stream(self) -> Iterator[memoryview]:
        """Yield the archive in pieces. Raises as `entries`."""
        return stream_entries(self.entries())

    def entries(self) -> Iterator[ArchiveEntry]:
        """Yield the files of the archive.

        Raises:
            UnknownCollection: There is no such collection.
            DocumentsChanged: The collection was changed while its documents were read.
        """
        catalog, collection = self.namespace.catalog, self.collection
        version = catalog.version(collection)
        encoder = self.namespace.encoder_of(collection)
        if version.similar:  # which modules they were encoded behind is known here alone
            self._encodings = tuple(each for each in ENCODINGS if each != AFTER_OTHER_TEXT)
        names = list(catalog.documents(collection))
        scaffolds = self._scaffolds()
        yield text_entry(MANIFEST, self._manifest(encoder, len(names), scaffolds))
        members = {name for scaffold in scaffolds for name in scaffold}
        self._counted = {"documents": len(names), "modules": 0, "missing": 0}
        for begin in range(0, len(names), _DOCUMENTS):
            part = names[begin : begin + _DOCUMENTS]
            documents = self._read_documents(encoder, part, members)
            for number, document in enumerate(documents, begin):
                yield text_entry(document_name(number), document)
        for digest, number in self._originals.items():
            yield ArchiveEntry(original_name(digest), partial(self._original, number))
        if catalog.version(collection).revision != version.revision:
            raise self._changed()
        joint = [encoder.key(joined(self._tokens, each)) for each in scaffolds]
        self._keys |= dict.fromkeys(self._stored(joint))
        for done, key in enumerate(self._keys, 1):
            yield ArchiveEntry(states_name(key), partial(self._blob, key), key)
            self.report("exporting", done, len(self._keys))

    def _manifest(
        self, encoder: ModuleEncoder, documents: int, scaffolds: list[list[str]]
    ) -> Manifest:
        shared, version = self.namespace.shared, self.namespace.catalog.version(self.collection)
        return Manifest(
            collection=self.collection,
            namespace=self.namespace.name,
            revision=version.revision,
            model=shared.model.name,
            fingerprints=fingerprints(encoder),
            module_schema=write_schema(generated_schema(self.collection, encoder.frame, _SLOTS)),
            instruction=encoder.frame.instruction,
            priming=encoder.priming,
            similar=version.similar,
            embedder=None if shared.embedder is None else embedder_name(shared.embedder),
            calibrations=version.calibrations,
            description=self.namespace.catalog.settings.description(self.collection),
            scaffolds=scaffolds,
            documents=documents,
        )

    def _scaffolds(self) -> list[list[str]]:
        """Return the names of the modules of each scaffold."""
        namespace = self.namespace
        rows = ScaffoldRows(namespace.shared.database, namespace.name)
        kept = rows.read_scaffolds(self.collection)
        if not kept:
            return []
        names = {module.id: module.name for module in namespace.catalog.modules(self.collection)}
        return sorted([names[each] for each in members] for members, _ in kept)

    def _read_documents(
        self, encoder: ModuleEncoder, names: Sequence[str], members: set[str]
    ) -> Iterator[ArchivedDocument]:
        """Read some documents with their modules, and note which states and files they have.

        Args:
            encoder: The collection's encoder.
            names: Ids of the documents.
            members: Names of the modules of scaffolds.
        """
        catalog = self.namespace.catalog
        rows = catalog.documents(self.collection, names)
        texts = catalog.texts(self.collection, names)
        if len(rows) < len(names) or len(texts) < len(names):
            raise self._changed()
        counts = {name: rows[name].modules for name in names}
        modules = self._read_modules(encoder, counts, members)
        for name in names:
            row = rows[name]
            kept = row.original and has_original(self.namespace.shared.database, row.id)
            original = row.original if kept else ""
            if original:
                self._originals[original] = row.id
            yield ArchivedDocument(
                id=name,
                uri=row.uri,
                digest=row.digest,
                attributes=dict(row.attributes),
                text=texts[name],
                original=original,
                modules=modules[name],
            )

    def _read_modules(
        self, encoder: ModuleEncoder, counts: Mapping[str, int], members: set[str]
    ) -> dict[str, list[ArchivedModule]]:
        """Read the modules of some documents, and note their states.

        Args:
            encoder: The collection's encoder.
            counts: Number of modules of each document, by its id.
            members: Names of the modules of scaffolds.

        Returns:
            The modules of each document, by its id.
        """
        names = [f"{name}#{number + 1}" for name in counts for number in range(counts[name])]
        rows = self.namespace.catalog.modules(self.collection, names)
        if len(rows) < len(names):
            raise self._changed()
        tokens = dict(zip(names, self.namespace.ask.tokens.of(rows), strict=True))
        self._tokens |= {name: tokens[name] for name in members & tokens.keys()}
        keys = {
            name: [encoder.key(ids, e) for e in self._encodings] for name, ids in tokens.items()
        }
        stored = set(self._stored([*chain.from_iterable(keys.values())]))
        vectors = self._vectors([row.id for row in rows])
        found: dict[str, list[ArchivedModule]] = {name: [] for name in counts}
        for row in rows:
            pairs = zip(self._encodings, keys[row.name], strict=True)
            held = {encoding: key for encoding, key in pairs if key in stored}
            self._keys |= dict.fromkeys(held.values())
            self._counted["modules"] += 1
            self._counted["missing"] += AFTER_PREAMBLE not in held
            found[row.document].append(
                ArchivedModule(
                    text=row.text,
                    details=dict(row.details),
                    places=[list(each) for each in row.places],
                    states=list(held),
                    vector=vectors.get(row.id),
                )
            )
        return found

    def _stored(self, keys: Sequence[KVKey]) -> list[KVKey]:
        """Return the keys that a persistent tier holds, in their order."""
        store = self.namespace.shared.store
        store.look_up(keys)
        return [key for key in keys if store.persistent.holds(key)]

    def _vectors(self, modules: Sequence[int]) -> dict[int, str]:
        """Return the embeddings of modules as text."""
        shared = self.namespace.shared
        if shared.embedder is None:
            return {}
        name = embedder_name(shared.embedder)
        vectors = Vectors(shared.database, name, self.namespace.name)
        found = vectors.read_vectors(self.collection, modules)
        return {n: base64.b64encode(each.tobytes()).decode() for n, each in found.items()}

    def _blob(self, key: KVKey) -> Parts | None:
        states = self.namespace.shared.store.peek(key)
        return None if states is None else blob_parts(key, states)

    def _original(self, document: int) -> Parts:
        content = read_original(self.namespace.shared.database, document)
        if content is None:
            raise self._changed()
        return [memoryview(content)]

    def _changed(self) -> DocumentsChanged:
        return DocumentsChanged(
            f"the collection {self.collection!r} was changed while it was exported; export it again"
        )


def joined(tokens: Mapping[str, Sequence[int]], names: Sequence[str]) -> tuple[int, ...]:
    """Return the tokens of modules one after the other, as a scaffold encodes them."""
    return tuple(token for name in names for token in tokens[name])
