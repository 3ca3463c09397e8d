"""Chat models for tests, over state folders of their own."""

from __future__ import annotations

import time
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


def idle(rag: RagCache) -> None:
    """Waits for the engine to see that nobody waits: at most a step or two, not 4,000."""
    for _ in range(100):
        if not rag.internals.shared.engine.core.busy:
            return
        time.sleep(0.01)
    raise AssertionError("the request goes on")
