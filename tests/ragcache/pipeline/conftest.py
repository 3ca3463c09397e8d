"""A tiny model behind a real tokenizer, and what a context's last token leads to."""

from __future__ import annotations

import pytest
from torch import Tensor

from ragcache.engine import Context
from ragcache.engine.batch import BatchBuilder, ScheduledChunk
from ragcache.engine.kv_cache import ContiguousKV
from ragcache.models import CausalLM, LoadedModel, wrap_causal
from tests.conftest import tiny_model


@pytest.fixture
def model(reader: LoadedModel) -> LoadedModel:
    """A tiny random model behind the embedded reader's tokenizer."""
    causal = wrap_causal(tiny_model("llama", vocab_size=len(reader.tokenizer)))
    return LoadedModel("tiny", causal, reader.tokenizer)


def last_logits(causal: CausalLM, contexts: list[Context]) -> Tensor:
    """Logits of each context's last token, all in one ragged pass: [R, vocabulary]."""
    chunks = [
        ScheduledChunk(
            c.segments, ContiguousKV.allocate(causal, len(c.token_ids)), c.token_ids, c.position_ids
        )
        for c in contexts
    ]
    return causal.forward(BatchBuilder(causal).build_batch(chunks))
