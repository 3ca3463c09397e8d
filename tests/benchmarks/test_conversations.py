"""Kept conversations beside the pool alone, small."""

from __future__ import annotations

import json
from pathlib import Path

import plots
import pytest

from ragcache.bench.conversation_turns import SessionKind
from ragcache.bench.conversations import ConversationsSetting, bench_conversations
from ragcache.models import LoadedModel, wrap_causal
from tests.tiny_models import tiny_model

CHATS = SessionKind(6, 3, 64, (100, 200), 8, (5.0, 120.0), collections=2, document_tokens=64)
AGENTS = SessionKind(6, 3, 256, (64, 128), 4, (1.0, 60.0))
SETTING = ConversationsSetting(
    CHATS, AGENTS, concurrent=2, long_tokens=600, next_tokens=64, runs=1, host_bytes="64MiB"
)


@pytest.mark.slow
@pytest.mark.nightly
def test_conversations_resume_and_their_figures_are_drawn(
    reader: LoadedModel, tmp_path: Path
) -> None:
    size = {"vocab_size": len(reader.tokenizer), "max_position_embeddings": 4096}
    model = LoadedModel("tiny", wrap_causal(tiny_model("llama", **size)), reader.tokenizer)
    result = bench_conversations(SETTING, model)
    for kind in ("chats", "agents"):
        kept, lost = (result[f"{side}_share_{kind}"] for side in ("recomputed", "pool"))
        assert 0 <= kept < 0.5
        assert kept < lost <= 1, "the pool holds a part of the sessions alone"
        assert 0.9 <= result[f"equal_answers_share_{kind}"] <= 1
        for side in ("none", "memory"):
            shares = result[f"{kind}_by_storage"][side]["computed_share_by_turn"]
            assert len(shares) == 3
            assert all(0 <= share <= 1 for share in shares)
    assert result["agents_rate_ratio"] > 0
    assert result["restart_resumed_share"] == 1
    assert result["resume_disk_speedup"] > 0
    assert result["resume_seconds"].keys() == {"pool", "host", "computed"}
    difference = result["resume_seconds"]["host"] - result["resume_seconds"]["pool"]
    assert result["resume_host_ms_over_pool"] == pytest.approx(1000 * difference)
    assert result["decode_step_ratio"] > 0
    figures, image = tmp_path / "figures.json", tmp_path / "figures.png"
    figures.write_text(json.dumps(result, default=str))
    plots.main("conversations", str(figures), str(image))
    assert image.read_bytes().startswith(b"\x89PNG")
