"""An ordinary LCEL chain whose prompts are read from the cache.

    python examples/langchain/lcel_chain.py [FOLDER]

The retriever's documents are pasted into the prompt; the model finds their texts there and starts
from their states. The same chain with `recognize=False` reads everything again.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough

from ragcache import RagCache
from ragcache_connectors.langchain import ChatRagCache, RagCacheRetriever

HANDBOOK = Path(__file__).parent.parent / "handbook"
QUESTION = "Who do I ring first if the cold store alarm goes off?"
PROMPT = ChatPromptTemplate.from_template(
    "Answer from the context.\n\n{context}\n\nQuestion: {question}"
)


def join(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def main(folder: Path = HANDBOOK) -> None:
    with tempfile.TemporaryDirectory() as state, RagCache.open(state) as rag:
        rag.ingest("handbook", [folder])
        retriever = RagCacheRetriever(rag=rag, collection="handbook", k=4)
        for recognize in (True, False):
            model = ChatRagCache(rag=rag, recognize=recognize)
            chain = (
                {"context": retriever | join, "question": RunnablePassthrough()} | PROMPT | model
            )
            answer = chain.invoke(QUESTION)
            details = answer.response_metadata["ragcache"]
            usage = answer.usage_metadata
            read = usage["input_token_details"]["cache_read"]
            print(
                f"{answer.content!r}: {read} of {usage['input_tokens']} tokens from "
                f"the cache ({details['mode']}), first token after "
                f"{1000 * details['timings']['first_token']:.0f} ms"
            )


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
