"""A folder with Gemma 4, whose layers have heads of two sizes: modes, tiers, archives and plans."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ragcache import Answer, GenerationParams, RagCache
from ragcache.models import LoadedModel, wrap_causal
from ragcache.planning import bytes_per_token, shape_of, tier_sizes
from ragcache.store.verify import verify
from tests.ragcache.models.reference import tiny_gemma
from tests.ragcache.pipeline.conftest import DOCUMENTS

QUESTION = "Where does the spare key of the boathouse hang, and who keeps the key figures?"
OPTIONS: dict[str, Any] = {"max_tokens": 6, "private_bytes": "64MB", "force_modes": True}
LOGPROBS = GenerationParams(first_logprobs=True)


@pytest.fixture(scope="module")
def gemma(reader: LoadedModel) -> LoadedModel:
    count = len(reader.tokenizer)
    sizes = {"vocab_size": count, "vocab_size_per_layer_input": count}
    plain = tiny_gemma("gemma4", **sizes, max_position_embeddings=4096, sliding_window=40)
    return LoadedModel("gemma4", wrap_causal(plain), reader.tokenizer)


@pytest.fixture
def rag(tmp_path: Path, gemma: LoadedModel) -> Iterator[RagCache]:
    with RagCache.open(tmp_path / "state", gemma, **OPTIONS) as opened:
        opened.ingest("notes", DOCUMENTS)
        yield opened


def asked(rag: RagCache, mode: str = "rooted", k: int = 3) -> Answer:
    return rag.ask(QUESTION, collection="notes", k=k, mode=mode, generation=LOGPROBS)


def first_logprobs(answer: Answer) -> torch.Tensor:
    found = answer.choices[0].first_logprobs
    assert found is not None
    return found


@pytest.mark.parametrize(("mode", "k"), [("rooted", 1), ("rooted:4096", 3)])
def test_modes_that_leave_nothing_out_equal_exact(rag: RagCache, mode: str, k: int) -> None:
    """One document was encoded where it stands; the other mode computes documents again."""
    read, exact = asked(rag, mode, k), asked(rag, "exact", k)
    assert read.reuse.cached_tokens > 0
    expected = first_logprobs(exact)
    torch.testing.assert_close(first_logprobs(read), expected, rtol=0, atol=1e-4)
    assert read.text == exact.text


def test_some_tokens_are_computed_again(rag: RagCache) -> None:
    rooted, some = asked(rag), asked(rag, "rooted:4")
    assert 0 < some.reuse.cached_tokens < rooted.reuse.cached_tokens
    assert not torch.equal(first_logprobs(some), first_logprobs(rooted))


@pytest.mark.parametrize("kv_dtype", ["model", "int8"])
def test_states_are_kept_on_disk(tmp_path: Path, gemma: LoadedModel, kv_dtype: str) -> None:
    with RagCache.open(tmp_path / "state", gemma, kv_dtype=kv_dtype, **OPTIONS) as rag:
        rag.ingest("notes", DOCUMENTS)
        first = asked(rag)
        assert verify(rag.internals.shared.store).found == ()
    with RagCache.open(tmp_path / "state", gemma, kv_dtype=kv_dtype, **OPTIONS) as rag:
        again = asked(rag)
        assert again.reuse.created_tokens == 0 < again.reuse.cached_tokens
    bound = 1e-5 if kv_dtype == "model" else 0.2
    torch.testing.assert_close(first_logprobs(again), first_logprobs(first), rtol=0, atol=bound)


def test_states_travel_with_their_collection(
    tmp_path: Path, gemma: LoadedModel, rag: RagCache
) -> None:
    first = asked(rag)
    rag.collections.export_archive("notes", tmp_path / "notes.tar")
    with RagCache.open(tmp_path / "other", gemma, **OPTIONS) as other:
        other.collections.import_archive(tmp_path / "notes.tar")
        again = asked(other)
        assert again.text == first.text
        assert again.reuse.created_tokens <= len(other.internals.ingestor.encoder.preamble_ids)


def test_a_plan_counts_each_layers_heads(gemma: LoadedModel) -> None:
    """Two heads of 16 in two layers, two heads of 32 in one; the last two layers keep none. In
    eight bits each head of a plane has a scale."""
    causal = gemma.causal
    elements = 2 * (2 * 2 * 16 + 2 * 32)  # keys and values
    assert causal.bytes_per_token == bytes_per_token(causal)["model"] == 4 * elements
    assert bytes_per_token(causal)["int8"] == elements + 4 * elements // 32
    assert shape_of(causal, 10).nbytes == 10 * 4 * elements
    [host] = tier_sizes(causal, [10, 10], {"disk": None})[:1]
    assert host.nbytes >= 20 * 4 * elements
