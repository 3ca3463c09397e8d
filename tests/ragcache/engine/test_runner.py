"""The engine over models with windows, caps and frequencies by layer: answers and batches."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ragcache.engine import (
    Context,
    EncodeJob,
    EngineConfig,
    LLMEngine,
    Request,
    Segment,
    assemble_context,
)
from ragcache.engine.engine import complete
from ragcache.models import CausalLM, wrap_causal
from ragcache.states import KVStates
from tests.ragcache.models.reference import WINDOW, Module, reference_logits, tiny_gemma
from tests.tiny_models import random_tokens

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
BLOCK_SIZE = 64


@pytest.fixture(params=[pytest.param("gemma2", marks=pytest.mark.slow), "gemma3", "gemma4"])
def plain_model(request: pytest.FixtureRequest) -> Any:
    """A Gemma as Hugging Face computes it."""
    return tiny_gemma(request.param)


@pytest.fixture
def gemma(plain_model: Any) -> CausalLM:
    """The same, patched."""
    return wrap_causal(copy.deepcopy(plain_model))


def encoded(model: CausalLM, jobs: Sequence[EncodeJob]) -> list[KVStates]:
    with LLMEngine(model) as engine:
        return list(engine.encode(jobs))


def plain(count: int, seed: int) -> Context:
    return assemble_context([], random_tokens(count, seed), window=512, max_tokens=64)


def with_modules(model: CausalLM, modules: Sequence[Module], own: Sequence[int]) -> Context:
    states = encoded(model, [EncodeJob(tokens, 3) for tokens, _ in modules])
    return assemble_context(states, own, window=512, max_tokens=64)


def test_greedy_answers_equal_those_of_generate(plain_model: Any, gemma: CausalLM) -> None:
    tokens = random_tokens(5 * WINDOW)
    prompt = torch.tensor([tokens])
    generated = plain_model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False
    )
    context = assemble_context([], tokens, window=512, max_tokens=40)
    [completion] = complete(gemma, [Request(context, 40)])
    assert list(completion.token_ids) == generated[0, len(tokens) :].tolist()


def test_an_answer_over_moved_modules_equals_the_reference(
    plain_model: Any, gemma: CausalLM
) -> None:
    modules = [(random_tokens(11, seed=1), 0), (random_tokens(9, seed=2), 11)]
    own = random_tokens(5, seed=3)
    [completion] = complete(gemma, [Request(with_modules(gemma, modules, own), 6)])
    assert len(set(completion.token_ids)) > 1
    for token in completion.token_ids:
        assert token == int(reference_logits(plain_model, modules, (own, 20)).argmax())
        own = [*own, token]


def test_encoding_behind_a_root_equals_one_pass(gemma: CausalLM) -> None:
    preamble, tokens = random_tokens(10, seed=1), random_tokens(12, seed=2)
    [root, whole] = encoded(gemma, [EncodeJob(preamble), EncodeJob([*preamble, *tokens])])
    [rooted] = encoded(gemma, [EncodeJob(tokens, 10, Segment(root, 0))])
    torch.testing.assert_close(rooted.keys, whole.keys[:, :, 10:], **CLOSE)
    torch.testing.assert_close(rooted.values, whole.values[:, :, 10:], **CLOSE)
    assert rooted.start == 10


def test_batched_requests_equal_single_ones(gemma: CausalLM) -> None:
    modules = [(random_tokens(11, seed=1), 0)]
    requests = [
        Request(plain(40, seed=1), 9),
        Request(with_modules(gemma, modules, random_tokens(5, seed=2)), 12),
        Request(plain(70, seed=3), 5),
    ]
    together = complete(gemma, requests, EngineConfig(step_tokens=16))
    for request, completion in zip(requests, together, strict=True):
        [alone] = complete(gemma, [request])
        assert completion.token_ids == alone.token_ids
