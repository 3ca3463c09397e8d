"""An open `RagCache` for LangChain's classes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ragcache import RagCache
from ragcache.models import LoadedModel


@pytest.fixture
def rag(tmp_path: Path, reader: LoadedModel) -> Iterator[RagCache]:
    """Without an embedder, with modules of 64 tokens at most."""
    with RagCache.open(tmp_path / "state", reader, max_new_tokens=4, module_tokens=64) as opened:
        yield opened
