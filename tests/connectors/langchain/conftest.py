"""Open `RagCache`s for LangChain's classes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ragcache import RagCache, SourceDocument
from ragcache.models import LoadedModel

DOCUMENT = (
    "The survey boat Pipit is moored at the north quay. Its engine was serviced by Marta Quill in "
    "March, and the spare key hangs in the red cupboard of the boathouse."
)


@pytest.fixture
def rag(tmp_path: Path, reader: LoadedModel) -> Iterator[RagCache]:
    """Without an embedder, with modules of 64 tokens at most."""
    with RagCache.open(tmp_path / "state", reader, max_tokens=4, module_tokens=64) as opened:
        yield opened


@contextmanager
def open_with_notes(folder: Path, model: LoadedModel) -> Iterator[RagCache]:
    """A state folder with one ingested document."""
    with RagCache.open(folder, model=model) as rag:
        rag.ingest("notes", [SourceDocument(id="boats", text=DOCUMENT)])
        yield rag


def wait_until_idle(rag: RagCache) -> None:
    """Waits for the engine to drop an abandoned request: at most a step or two, not 4,000."""
    for _ in range(100):
        if not rag.internals.shared.engine.core.busy:
            return
        time.sleep(0.01)
    raise AssertionError("the request goes on")
