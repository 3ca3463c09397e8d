"""Tokens as they come, from threads and from asyncio; the last chunk holds usage and sources.

python examples/langchain/streaming.py
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from langchain_core.messages import AIMessageChunk

from ragcache import RagCache
from ragcache_connectors.langchain import ChatRagCache

NOTE = Path(__file__).parent.parent / "handbook" / "cold-store.md"


async def both(model: ChatRagCache, prompts: list[str]) -> None:
    """Read two streams at once: one ragged batch in the engine."""

    async def read(number: int, prompt: str) -> None:
        async for chunk in model.astream(prompt):
            print(f"[{number}] {chunk.content!r}")

    await asyncio.gather(*(read(*each) for each in enumerate(prompts)))


def main() -> None:
    with tempfile.TemporaryDirectory() as state, RagCache.open(state) as rag:
        rag.ingest("handbook", [NOTE.parent], include=[NOTE.name])
        model = ChatRagCache(rag=rag, max_tokens=16)
        prompt = f"{NOTE.read_text(encoding='utf-8')}\n\nWho is rung first if the alarm goes off?"
        whole: AIMessageChunk | None = None
        for chunk in model.stream(prompt, stop=["\n"]):
            print(chunk.content, end="|", flush=True)
            whole = chunk if whole is None else whole + chunk
        assert whole is not None
        print(f"\n{whole.usage_metadata}")
        print([source["document"] for source in whole.response_metadata["ragcache"]["sources"]])
        asyncio.run(both(model, [prompt, f"{prompt} And why?"]))


if __name__ == "__main__":
    main()
