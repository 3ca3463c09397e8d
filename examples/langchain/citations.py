"""Answers with the sources in their prompts, and as objects that cite them.

    python examples/langchain/citations.py [MODEL]

Without a model the embedded reader answers, which copies a few words and writes no JSON. A MODEL
(a folder or hub name) also answers with objects: they are decoded under a JSON schema, so
that every citation is the number of a document in the prompt.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate

from ragcache import RagCache
from ragcache_connectors.langchain import ChatRagCache, RagCacheRetriever

HANDBOOK = Path(__file__).parent.parent / "handbook"
QUESTION = "Where does the key of the pool car hang?"
PROMPT = ChatPromptTemplate.from_template("{context}\n\nQuestion: {question}")


def numbered(documents: list[Document]) -> str:
    return "\n\n".join(f"[{n}] {d.page_content}" for n, d in enumerate(documents, start=1))


def citation_schema(count: int) -> dict[str, Any]:
    """Build the schema of an answer that cites one of `count` documents.

    Its text is bounded, because a small model does not end every string by itself.
    """
    return {
        "title": "Cited",
        "description": "An answer, and the document that says so.",
        "type": "object",
        "properties": {
            "document": {"type": "integer", "enum": list(range(1, count + 1))},
            "answer": {"type": "string", "maxLength": 60},
        },
        "required": ["document", "answer"],
    }


def main(model: Any = None) -> None:
    with tempfile.TemporaryDirectory() as state, RagCache.open(state, model=model) as rag:
        rag.ingest("handbook", [HANDBOOK])
        retriever = RagCacheRetriever(rag=rag, collection="handbook", k=3)
        chat = ChatRagCache(rag=rag)
        documents = retriever.invoke(QUESTION)
        given = {"context": numbered(documents), "question": QUESTION}

        answer = (PROMPT | chat).invoke(given)
        print(answer.content)
        for source in answer.response_metadata["ragcache"]["sources"]:
            print(f"  read from {source['tier']}: {source['document']} ({source['uri']})")

        if model is None:
            return
        citing = ChatRagCache(rag=rag, max_tokens=200).with_structured_output(
            citation_schema(len(documents))
        )
        cited = (PROMPT | citing).invoke(given)
        print(f"{cited['answer']!r} [{documents[cited['document'] - 1].metadata['source']}]")


if __name__ == "__main__":
    main(*sys.argv[1:])
