"""A client that retrieves by itself: its prompts are read from states, and nothing is ingested."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from ragcache import RagCache
from ragcache.models import LoadedModel
from tests.api.http.conftest import client_of
from tests.conftest import REPOSITORY

TRACE = REPOSITORY / "examples" / "open_webui" / "trace.jsonl"


PAGE = (REPOSITORY / "examples/handbook/cold-store.md").read_text(encoding="utf-8")


def test_a_key_without_recurring_texts_reads_none(
    tmp_path: Path, quick_reader: LoadedModel
) -> None:
    with RagCache.open(tmp_path / "state", quick_reader, embedding="none", force_modes=True) as rag:
        client = client_of(rag)
        cached = {}
        operator = rag.keys.create("operator", role="admin")[1]
        for recognize in (True, False):
            body = {"name": "chat", "namespace": f"n{recognize}", "recognize_recurring": recognize}
            headers = {"Authorization": f"Bearer {operator}"}
            made = client.post("/admin/keys", json=body, headers=headers).json()
            assert made["recognize_recurring"] is recognize
            headers = {"Authorization": f"Bearer {made['secret']}"}
            for turn in ("One.", "Another one.", "A third."):
                body = {
                    "messages": [{"role": "user", "content": f"{turn}\n\n{PAGE}\n\nWho?"}],
                    "max_tokens": 1,
                }
                answer = client.post("/v1/chat/completions", json=body, headers=headers)
                usage = answer.json()["usage"]
                rag.internals.shared.observing.submit(int).result()
            cached[recognize] = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached[True] > 96 > cached[False]


@pytest.mark.slow
@pytest.mark.nightly
def test_open_webui_reads_what_it_has_pasted_twice(tmp_path: Path, reader: LoadedModel) -> None:
    """Without a setting: the mode is measured, and not forced."""
    seen: Counter[str] = Counter()
    cached, repeated = [], []
    with RagCache.open(tmp_path / "state", reader, embedding="none", force_modes=False) as rag:
        client = client_of(rag)
        for line in TRACE.read_text(encoding="utf-8").splitlines():
            turn = json.loads(line)
            body = {"messages": turn["messages"], "max_tokens": 1}
            usage = client.post("/v1/chat/completions", json=body).json()["usage"]
            rag.internals.shared.observing.submit(int).result()  # the user reads the answer
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
            known = [text for text in turn["chunks"] if seen[text] > 1]
            repeated.append(sum(len(reader.encode_untrusted(text)) for text in known))
            seen.update(turn["chunks"])
        assert rag.collections.names() == []
        assert [each.mode for each in rag.gate.results()] == ["rooted"]
    first = next(n for n, tokens in enumerate(repeated) if tokens)
    assert sum(cached[first:]) > 0.95 * sum(repeated) > 2000, "read from the third prompt on"
    assert sum(cached[20:]) > 2 * sum(cached[:10])
