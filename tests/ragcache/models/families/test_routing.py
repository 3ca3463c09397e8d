"""Which models read segments, which read one buffer, and which neither."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ragcache.engine import EncodeJob, Request, assemble, encode
from ragcache.engine.offline import complete
from ragcache.errors import UnsupportedModel
from ragcache.models import BufferPool, CausalLM, ContiguousLM
from ragcache.models.families import Family, family_of
from ragcache.models.loading import patched
from ragcache.models.patch import IMPLEMENTATION
from ragcache.models.positions import Learned
from tests.conftest import random_tokens, tiny_config, tiny_model
from tests.ragcache.gemma import tiny_gemma

WINDOWED = ("mistral", "phi3", "qwen2")


def windowed(family: str, window: int = 9) -> Any:
    changes = {"use_sliding_window": True, "max_window_layers": 1} if family == "qwen2" else {}
    return tiny_model(family, sliding_window=window, **changes)


def test_every_family_reads_segments_where_it_can(family: str) -> None:
    assert isinstance(patched(tiny_model(family)), CausalLM)


@pytest.mark.parametrize("family", WINDOWED)
def test_a_short_window_goes_to_the_buffer(family: str) -> None:
    model = windowed(family)
    tokens = random_tokens(40)
    ids = torch.tensor([tokens])
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=6, do_sample=False)
    served = patched(model)
    assert isinstance(served, ContiguousLM)
    context = assemble([], tokens, window=512, max_new_tokens=6)
    [completion] = complete(served, [Request(context, 6, frozenset())])
    assert list(completion.token_ids) == out[0, 40:].tolist()


@pytest.mark.parametrize("family", WINDOWED)
def test_a_short_window_is_refused_where_segments_are_demanded(family: str) -> None:
    with pytest.raises(UnsupportedModel, match="sliding window of 9 tokens"):
        CausalLM.patch(windowed(family))


@pytest.mark.parametrize(
    ("family", "property_"), [("gemma2", "caps its attention scores"), ("gemma3", "sliding window")]
)
def test_gemmas_go_to_the_buffer(family: str, property_: str) -> None:
    with pytest.raises(UnsupportedModel, match=property_):
        CausalLM.patch(tiny_gemma(family))
    assert isinstance(patched(tiny_gemma(family)), ContiguousLM)


def test_layers_with_frequencies_of_their_own_go_to_the_buffer() -> None:
    config = tiny_gemma("gemma3", sliding_window=512).config
    why = family_of(config).obstacle(config)
    assert why == "turns queries and keys by other frequencies in some layers than in others"


@pytest.mark.parametrize("family", ["falcon-40b", "falcon-rw", "mpt", "bloom", "gpt2", "opt"])
def test_what_no_buffer_serves_is_refused(family: str) -> None:
    with pytest.raises(UnsupportedModel, match="not served from one buffer"):
        ContiguousLM.patch(tiny_model(family))


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gpt_neox"])
def test_the_buffer_serves_what_segments_serve(family: str) -> None:
    """Modules moved into the buffer answer as modules that queries turn to."""
    causal = CausalLM.patch(tiny_model(family))
    states = list(encode(causal, [EncodeJob(random_tokens(n, seed=n), 33) for n in (24, 17)]))
    question = random_tokens(6)
    context = assemble(states, question, window=512, max_new_tokens=4)
    [expected] = complete(causal, [Request(context, 4, frozenset())])
    buffered = ContiguousLM.patch(tiny_model(family))
    [found] = complete(buffered, [Request(context, 4, frozenset())])
    assert found.token_ids == expected.token_ids
    buffer = BufferPool(buffered, 0).take(64)
    for segment in context.segments:
        buffered.place(buffer, segment.states, segment.start)
    logits: Tensor = buffered.forward(
        buffer, torch.tensor(question), torch.tensor(context.position_ids)
    )
    assert int(logits.argmax()) == expected.token_ids[0]


def test_a_model_without_the_attention_interface_needs_replaced_attention() -> None:
    class Plain(Family):
        model_types = ("mpt",)

        def scheme(self, model: Any) -> Learned:
            return Learned()

    model = tiny_model("mpt").train()
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModel, match="does not call transformers' attention interface"):
        Plain().serve(model)
    assert model.config._attn_implementation == before != IMPLEMENTATION
    assert model.training


@pytest.mark.parametrize(
    ("changes", "property_"),
    [
        (
            {"layer_types": ["linear_attention", "full_attention"]},
            "layers of type linear_attention",
        ),
        ({"mamba_d_state": 16}, "state space layers"),
        ({"no_rope_layers": [1, 0]}, "layers without positions"),
        ({"kv_lora_rank": 8}, "compressed states"),
        ({"attention_chunk_size": 64}, "within chunks"),
        ({"use_bidirectional_attention": True}, "both directions"),
        ({"model_type": "gpt_oss"}, "attention sinks"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_served_in_no_way_is_named(changes: dict[str, Any], property_: str) -> None:
    config = tiny_config("llama")
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(UnsupportedModel, match=property_):
        _check(config)


def _check(config: Any) -> None:
    family_of(config).check(config)


def test_a_cap_keeps_the_fused_attention_away() -> None:
    """It would leave the cap out, and some versions of transformers choose it by themselves."""
    model = tiny_gemma("gemma2")
    model._supports_sdpa = True
    assert patched(model).model.config._attn_implementation == "eager"
    assert patched(tiny_gemma("gemma3")).model.config._attn_implementation == "sdpa"
