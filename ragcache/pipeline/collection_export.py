"""Collections that leave: a collection as the entries of an archive."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
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
    _counted: dict[str, int] = field(default_factory=dict)
    _keys: dict[KVKey, None] = field(default_factory=dict)

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
        names = list(catalog.documents(collection))
        scaffolds = self._scaffolds()
        yield text_entry(MANIFEST, self._manifest(encoder, len(names), scaffolds))
        tokens: dict[str, Sequence[int]] = {}
        members = {name for scaffold in scaffolds for name in scaffold}
        originals: dict[str, int] = {}  # documents by the digests of their files
        self._counted = {"documents": len(names), "modules": 0, "missing": 0}
        for begin in range(0, len(names), _DOCUMENTS):
            part = names[begin : begin + _DOCUMENTS]
            documents = self._read(encoder, part, members, tokens, originals)
            for number, document in enumerate(documents, begin):
                yield text_entry(document_name(number), document)
        for digest, number in originals.items():
            yield ArchiveEntry(original_name(digest), partial(self._original, number))
        if catalog.version(collection).revision != version.revision:
            raise self._changed()
        joint = [encoder.key(joined(tokens, each)) for each in scaffolds]
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

    def _read(
        self,
        encoder: ModuleEncoder,
        names: Sequence[str],
        members: set[str],
        tokens: dict[str, Sequence[int]],
        originals: dict[str, int],
    ) -> Iterator[ArchivedDocument]:
        """Read some documents with their modules, and note the keys of their states.

        Args:
            encoder: The collection's encoder.
            names: Ids of the documents.
            members: Names of modules whose tokens are wanted.
            tokens: Takes these tokens, by name.
            originals: Takes ids of documents by the digests of the files that are kept of them.
        """
        namespace, catalog = self.namespace, self.namespace.catalog
        rows, texts = (
            catalog.documents(self.collection, names),
            catalog.texts(self.collection, names),
        )
        if len(rows) < len(names) or len(texts) < len(names):
            raise self._changed()
        wanted = [f"{name}#{n + 1}" for name in names for n in range(rows[name].modules)]
        modules = catalog.modules(self.collection, wanted)
        if len(modules) < len(wanted):
            raise self._changed()
        ids = dict(zip(wanted, namespace.ask.tokens.of(modules), strict=True))
        tokens |= {name: ids[name] for name in members & ids.keys()}
        keys = {name: [encoder.key(each, e) for e in ENCODINGS] for name, each in ids.items()}
        stored = set(self._stored([key for each in keys.values() for key in each]))
        vectors = self._vectors([module.id for module in modules])
        archived: dict[str, list[ArchivedModule]] = {name: [] for name in names}
        for module in modules:
            found = dict(zip(ENCODINGS, keys[module.name], strict=True))
            held = {encoding: key for encoding, key in found.items() if key in stored}
            self._keys |= dict.fromkeys(held.values())
            self._counted["modules"] += 1
            self._counted["missing"] += AFTER_PREAMBLE not in held
            archived[module.document].append(
                ArchivedModule(
                    text=module.text,
                    details=dict(module.details),
                    places=[list(each) for each in module.places],
                    states=list(held),
                    vector=vectors.get(module.id),
                )
            )
        for name in names:
            row = rows[name]
            kept = row.original and has_original(self.namespace.shared.database, row.id)
            original = row.original if kept else ""
            if original:
                originals[original] = row.id
            yield ArchivedDocument(
                id=name,
                uri=row.uri,
                digest=row.digest,
                attributes=dict(row.attributes),
                text=texts[name],
                original=original,
                modules=archived[name],
            )

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
