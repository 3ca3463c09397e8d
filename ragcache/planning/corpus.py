"""The modules of a corpus, in tokens: of files, or of a collection that is stored already."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ragcache.documents import load_sources, split_text
from ragcache.documents.source import Source
from ragcache.models import LoadedModel
from ragcache.store import Catalogue, Database

Progress = Callable[[int, int], None]

_CHUNK = 500  # modules whose token ids are read at once


@dataclass(frozen=True, slots=True)
class Corpus:
    """documents: how many. modules: the token ids of each."""

    documents: int
    modules: tuple[Sequence[int], ...]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.modules))


def corpus_of_sources(
    model: LoadedModel, sources: Iterable[Source] | Source, module_tokens: int, progress: Progress
) -> Corpus:
    """Documents, split as ingestion splits them. Raises `DocumentError`."""
    documents = load_sources(sources).documents
    modules: list[array[int]] = []
    for number, document in enumerate(documents, start=1):
        count = lambda text: len(model.encode_untrusted(text))  # noqa: E731
        texts = split_text(document.text, module_tokens, count)
        modules += [array("i", model.encode_untrusted(text)) for text in texts]
        progress(number, len(documents))
    return Corpus(len(documents), tuple(modules))


def corpus_of_collection(
    model: LoadedModel, database: Database, collection: str, progress: Progress
) -> Corpus:
    """A collection as it is stored, in this model's tokens; nothing is written. Raises
    `UnknownCollection`."""
    catalogue = Catalogue(database, model.tokenizer_fingerprint, None)
    rows = catalogue.modules(collection)
    modules: list[array[int]] = []
    for start in range(0, len(rows), _CHUNK):
        part = rows[start : start + _CHUNK]
        known = catalogue.token_ids([row.id for row in part])
        for row in part:
            ids = known.get(row.id) or model.encode_untrusted(row.text)
            modules.append(array("i", ids))
        progress(len(modules), len(rows))
    return Corpus(len({row.document for row in rows}), tuple(modules))
