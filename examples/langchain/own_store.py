"""A chain with its own FAISS index: nothing is ingested, and no retriever of ragcache is used.

    python examples/langchain/own_store.py [FOLDER]

Each question pastes other chunks, in another order. The first prompt with a chunk computes it, the
second one makes it a module, and from the third one on it is read from states. The share of the
prompt that comes from the cache therefore grows from question to question.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from langchain_text_splitters import RecursiveCharacterTextSplitter
from numpy.typing import NDArray

from ragcache import RagCache
from ragcache_connectors.langchain import ChatRagCache

HANDBOOK = Path(__file__).parent.parent / "handbook"
QUESTIONS = (
    "Who do I ring first if the cold store alarm goes off?",
    "At which temperature does the alarm of the cold store sound?",
    "Where is the key of the cold store?",
    "What do I do when the alarm of the cold store sounds at night?",
    "When does the alarm of the cold store sound?",
    "Whom does the alarm of the cold store ring up?",
)
PROMPT = ChatPromptTemplate.from_template(
    "Answer from the context.\n\n{context}\n\nQuestion: {question}"
)
DIMENSIONS = 4096


def embed(text: str) -> NDArray[np.float32]:
    """Count the words of a text, each in a dimension of its own or nearly so. Length 1."""
    vector = np.zeros(DIMENSIONS, np.float32)
    for word in re.findall(r"\w+", text.lower()):
        vector[zlib.crc32(word.encode()) % DIMENSIONS] += 1 / len(text)
    return vector / (np.linalg.norm(vector) or 1)


class OwnStore(BaseRetriever):
    """The chunks of a folder, and a FAISS index of their vectors."""

    chunks: list[Document]
    index: Any

    @classmethod
    def of(cls, folder: Path) -> OwnStore:
        splitter = RecursiveCharacterTextSplitter(chunk_size=1000, chunk_overlap=100)
        pages = [Document(path.read_text("utf-8")) for path in sorted(folder.glob("*.md"))]
        chunks = splitter.split_documents(pages)
        index = faiss.IndexFlatIP(DIMENSIONS)
        index.add(np.stack([embed(chunk.page_content) for chunk in chunks]))
        return cls(chunks=chunks, index=index)

    def _get_relevant_documents(self, query: str, **_: Any) -> list[Document]:
        _, [found] = self.index.search(embed(query)[None], 4)
        return [self.chunks[number] for number in reversed(found)]  # the best one last


def join(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def answers(rag: RagCache, folder: Path) -> Iterator[str]:
    """Ask the questions one after the other."""
    chain = (
        {"context": OwnStore.of(folder) | join, "question": RunnablePassthrough()}
        | PROMPT
        | ChatRagCache(rag=rag)
    )
    for question in QUESTIONS:
        answer = chain.invoke(question)
        usage: Any = answer.usage_metadata
        read = usage["input_token_details"]["cache_read"]
        yield f"{answer.content!r}: {read} of {usage['input_tokens']} tokens from the cache"


def main(folder: Path = HANDBOOK) -> None:
    with tempfile.TemporaryDirectory() as state, RagCache.open(state, embedding="none") as rag:
        for answer in answers(rag, folder):
            print(answer)
            time.sleep(2)  # the user reads the answer, and ragcache encodes what has recurred


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
