"""Segments give the logits that Hugging Face gives: two-layer random models of every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from ragcache.engine import Context, EncodeJob, Request, Segment, assemble, encode, generate
from ragcache.engine.batch import build_step
from ragcache.engine.layout import Work
from ragcache.engine.private import Room
from ragcache.models import CausalLM
from ragcache.states import KVStates
from tests.conftest import random_tokens, tiny_model

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def last_logits(causal: CausalLM, contexts: list[Context]) -> Tensor:
    """Logits of each context's last token, all in one ragged pass: [R, vocabulary]."""
    works = [
        Work(
            c.segments,
            Room.allocate(causal, len(c.token_ids)),
            c.token_ids,
            c.position_ids,
        )
        for c in contexts
    ]
    return causal.forward(build_step(causal, works))


def place(states: list[KVStates], question: list[int]) -> Context:
    return assemble(states, question, window=512, max_new_tokens=4)


@torch.no_grad()
def ordinary(model: Any, tokens: list[int]) -> Tensor:
    return model(torch.tensor([tokens])).logits[0, -1]


def test_a_patched_model_called_ordinarily_is_unchanged(family: str) -> None:
    model = tiny_model(family)
    tokens = random_tokens(40)
    before = ordinary(model, tokens)
    CausalLM.patch(model)
    torch.testing.assert_close(ordinary(model, tokens), before, rtol=0, atol=0)


def test_a_patched_model_still_honours_padding(family: str) -> None:
    model = tiny_model(family)
    tokens = torch.tensor([[0] * 5 + random_tokens(12), random_tokens(17, seed=1)])
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    with torch.no_grad():
        before = model(tokens, attention_mask=mask).logits[0, -1]
        CausalLM.patch(model)
        after = model(tokens, attention_mask=mask).logits[0, -1]
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_one_module_as_prefix_equals_ordinary_prefill(family: str) -> None:
    model = tiny_model(family)
    tokens = random_tokens(90)
    expected = ordinary(model, tokens)
    causal = CausalLM.patch(model)
    [states] = encode(causal, [EncodeJob(tokens[:70])])
    [logits] = last_logits(causal, [place([states], tokens[70:])])
    torch.testing.assert_close(logits, expected, **CLOSE)


def test_a_rooted_module_after_its_root_equals_ordinary_prefill(family: str) -> None:
    model = tiny_model(family)
    tokens = random_tokens(80)
    expected = ordinary(model, tokens)
    causal = CausalLM.patch(model)
    [root] = encode(causal, [EncodeJob(tokens[:20])])
    [module] = encode(causal, [EncodeJob(tokens[20:60], 20, Segment(root, 0))])
    [logits] = last_logits(causal, [place([root, module], tokens[60:])])
    torch.testing.assert_close(logits, expected, **CLOSE)


@torch.no_grad()
def concatenated(
    model: Any, causal: CausalLM, states: list[KVStates], question: list[int]
) -> Tensor:
    """Every segment's keys turned to where it stands, concatenated, run by Hugging Face."""
    cos_of, sin_of = turning(causal, model)
    keys, values, position = [], [], 0
    for each in states:
        moved = each.keys.clone()
        half = moved.shape[-1] // 2
        left, right = each.keys[..., :half], each.keys[..., half:]
        cos, sin = cos_of(position - each.start), sin_of(position - each.start)
        moved[..., :half], moved[..., half:] = left * cos - right * sin, right * cos + left * sin
        keys.append(moved)
        values.append(each.values)
        position += each.length
    cache = DynamicCache()
    for layer in range(causal.num_layers):
        k = torch.cat([each[layer] for each in keys], dim=1)[None]
        cache.update(k, torch.cat([each[layer] for each in values], dim=1)[None], layer)
    positions = torch.arange(position, position + len(question))[None]
    model.set_attn_implementation("sdpa")
    out = model(torch.tensor([question]), position_ids=positions, past_key_values=cache)
    model.set_attn_implementation("ragcache")
    return out.logits[0, -1]


def turning(causal: CausalLM, model: Any) -> tuple[Any, Any]:
    frequency = model.model.rotary_emb.inv_freq
    return lambda d: (d * frequency).cos(), lambda d: (d * frequency).sin()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_moved_segments_equal_rerotated_and_concatenated_keys(
    family: str, order: tuple[int, ...]
) -> None:
    model = tiny_model(family)
    causal = CausalLM.patch(model)
    jobs = [EncodeJob(random_tokens(n, seed=n), start=33) for n in (24, 31, 17)]
    states = list(encode(causal, jobs))
    placed, question = [states[i] for i in order], random_tokens(9, seed=5)
    expected = concatenated(model, causal, placed, question)
    [logits] = last_logits(causal, [place(placed, question)])
    torch.testing.assert_close(logits, expected, **CLOSE)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_moving_is_exact_under_fixed_scalings(scaling: dict[str, Any]) -> None:
    model = tiny_model("llama", rope_parameters={"rope_theta": 10000.0, **scaling})
    causal = CausalLM.patch(model)
    states = list(encode(causal, [EncodeJob(random_tokens(n, seed=n), 50) for n in (20, 30)]))
    question = random_tokens(6)
    expected = concatenated(model, causal, states[::-1], question)
    [logits] = last_logits(causal, [place(states[::-1], question)])
    torch.testing.assert_close(logits, expected, **CLOSE)


def test_three_requests_in_one_ragged_batch_equal_one_by_one(family: str) -> None:
    causal = CausalLM.patch(tiny_model(family))
    jobs = [EncodeJob(random_tokens(n, seed=n), 10) for n in (40, 25, 33)]
    a, b, c = encode(causal, jobs)
    contexts = [
        place([a, b], random_tokens(5, seed=1)),
        place([b, c, a], random_tokens(11, seed=2)),
        place([], random_tokens(8, seed=3)),
    ]
    together = last_logits(causal, contexts)
    alone = torch.cat([last_logits(causal, [context]) for context in contexts])
    torch.testing.assert_close(together, alone, **CLOSE)
    requests = [Request(context, 4, frozenset()) for context in contexts]
    batched = [completion.token_ids for completion in generate(causal, requests)]
    single = [generate(causal, [request])[0].token_ids for request in requests]
    assert batched == single


def test_the_same_module_twice_in_one_prompt(family: str) -> None:
    model = tiny_model(family)
    causal = CausalLM.patch(model)
    [states] = encode(causal, [EncodeJob(random_tokens(22))])
    question = random_tokens(7, seed=9)
    expected = concatenated(model, causal, [states, states], question)
    [logits] = last_logits(causal, [place([states, states], question)])
    torch.testing.assert_close(logits, expected, **CLOSE)


def test_greedy_tokens_equal_generate(family: str) -> None:
    model = tiny_model(family)
    tokens = random_tokens(30)
    with torch.no_grad():
        out = model.generate(torch.tensor([tokens]), max_new_tokens=8, do_sample=False)
    causal = CausalLM.patch(model)
    context = assemble([], tokens, window=512, max_new_tokens=8)
    [completion] = generate(causal, [Request(context, 8, frozenset())])
    assert list(completion.token_ids) == out[0, 30:].tolist()


def test_bfloat16_stays_close(family: str) -> None:
    model = tiny_model(family, torch.bfloat16)
    tokens = random_tokens(60)
    expected = ordinary(model, tokens).float()
    causal = CausalLM.patch(model)
    [states] = encode(causal, [EncodeJob(tokens[:40])])
    [logits] = last_logits(causal, [place([states], tokens[40:])])
    relative = (logits.float() - expected).norm() / expected.norm()
    assert relative < 0.03
