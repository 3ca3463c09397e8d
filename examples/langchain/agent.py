"""An agent that searches a collection: LangChain's `create_agent` and `create_retriever_tool`.

    pip install langchain
    python examples/langchain/agent.py MODEL

MODEL is a folder or hub name of a model whose chat template takes tools (Qwen, Llama 3, Mistral);
the embedded reader's takes none. The next prompt holds the tool's result word for word, so the
documents are read from their states.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import create_retriever_tool

from ragcache import RagCache
from ragcache_connectors.langchain import ChatRagCache, RagCacheRetriever

HANDBOOK = Path(__file__).parent.parent / "handbook"
QUESTION = "Where does the key of the pool car hang?"


def main(model: Any) -> None:
    with tempfile.TemporaryDirectory() as state, RagCache.open(state, model=model) as rag:
        rag.ingest("handbook", [HANDBOOK])
        search = create_retriever_tool(
            RagCacheRetriever(rag=rag, collection="handbook", k=2),
            name="search_handbook",
            description="Searches the handbook of the station.",
        )
        agent = create_agent(
            ChatRagCache(rag=rag, max_tokens=300),
            tools=[search],
            system_prompt="Answer from the handbook.",
        )
        done = agent.invoke({"messages": [("user", QUESTION)]})
        for message in done["messages"]:
            print(f"{message.type}: {message.text[:200]}")
            for call in getattr(message, "tool_calls", []):
                print(f"  calls {call['name']}({call['args']})")
        details = done["messages"][-1].response_metadata["ragcache"]
        print(details["mode"], [source["document"] for source in details["sources"]])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(sys.argv[1])
