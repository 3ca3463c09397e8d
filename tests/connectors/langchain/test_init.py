"""The package's names are loaded on first use, without a model library."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ragcache_connectors import langchain

HEAVY = ("torch", "transformers", "xgrammar", "faiss", "sqlalchemy", "sentence_transformers")


def test_every_name_is_exported_and_listed() -> None:
    assert langchain.__all__ == sorted(langchain.__all__)
    for name in langchain.__all__:
        assert getattr(langchain, name).__name__ == name
        assert name in dir(langchain)
    with pytest.raises(AttributeError, match="has no attribute 'RagCash'"):
        _ = langchain.RagCash


def test_importing_and_constructing_loads_no_model_and_opens_nothing() -> None:
    program = f"""
import sys
from ragcache_connectors.langchain import *
ChatRagCache(state="nowhere", temperature=0.5)
RagCacheRetriever(collection="notes", state="nowhere")
RagCacheVectorStore(collection="notes", state="nowhere").as_retriever()
RagCacheEmbeddings(), RagCacheRecordManager("notes")
RagCacheLoader([], collection="notes")
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
