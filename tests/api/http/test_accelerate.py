"""A client that retrieves by itself: its prompts are read from states, and nothing is ingested."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from ragcache import RagCache
from ragcache.models import LoadedModel
from tests.api.http.conftest import client_of

TRACE = Path(__file__).parents[3] / "examples" / "open_webui" / "trace.jsonl"


@pytest.mark.slow
def test_open_webui_reads_what_it_has_pasted_twice(
    tmp_path: Path, quick_reader: LoadedModel
) -> None:
    seen: Counter[str] = Counter()
    cached, repeated = [], []
    with RagCache.open(tmp_path / "state", quick_reader, embedding="none", force_modes=True) as rag:
        client = client_of(rag)
        for line in TRACE.read_text(encoding="utf-8").splitlines():
            turn = json.loads(line)
            body = {"messages": turn["messages"], "max_tokens": 1}
            usage = client.post("/v1/chat/completions", json=body).json()["usage"]
            rag.internals.shared.observing.submit(int).result()  # the user reads the answer
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
            known = [text for text in turn["chunks"] if seen[text] > 1]
            repeated.append(sum(len(quick_reader.encode_untrusted(text)) for text in known))
            seen.update(turn["chunks"])
        assert rag.collections.names() == []
    first = next(n for n, tokens in enumerate(repeated) if tokens)
    assert sum(cached[first:]) > 0.95 * sum(repeated) > 2000, "read from the third prompt on"
    assert sum(cached[20:]) > 2 * sum(cached[:10])
