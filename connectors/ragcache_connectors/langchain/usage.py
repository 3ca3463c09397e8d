"""What a request read and wrote, counted as LangChain counts it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from langchain_core.messages.ai import InputTokenDetails, UsageMetadata

if TYPE_CHECKING:
    from ragcache import Answer


def usage(answer: Answer) -> UsageMetadata:
    """Tokens of the whole request: its prompt once, and the tokens of all its choices.

    cache_read: their states were in the store, or an earlier request had left them. cache_creation:
    their states were encoded for this request and kept. Both are parts of input_tokens.
    """
    reuse = answer.reuse
    written = sum(len(choice.token_ids) for choice in answer.choices)
    return UsageMetadata(
        input_tokens=reuse.prompt_tokens,
        output_tokens=written,
        total_tokens=reuse.prompt_tokens + written,
        input_token_details=InputTokenDetails(
            cache_read=reuse.cached_tokens + reuse.shared_tokens,
            cache_creation=reuse.created_tokens,
        ),
    )


def told(answer: Answer) -> dict[str, Any]:
    """What was recognized, and what it saved: plain values, for `response_metadata["ragcache"]`."""
    return {
        "mode": answer.mode,
        "sources": [asdict(source) for source in answer.sources],
        "reuse": asdict(answer.reuse),
        "timings": asdict(answer.timings),
    }
