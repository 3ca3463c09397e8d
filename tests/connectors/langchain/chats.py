"""Chat models for tests, over state folders of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ragcache import RagCache, SourceDocument
from ragcache.models import LoadedModel

DOCUMENT = (
    "The survey boat Pipit is moored at the north quay. Its engine was serviced by Marta Quill in "
    "March, and the spare key hangs in the red cupboard of the boathouse."
)


@contextmanager
def notes_open(folder: Path, model: LoadedModel) -> Iterator[RagCache]:
    """A folder with one ingested document."""
    with RagCache.open(folder, model=model) as rag:
        rag.ingest("notes", [SourceDocument(id="boats", text=DOCUMENT)])
        yield rag
