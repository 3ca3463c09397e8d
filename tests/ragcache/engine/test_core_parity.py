"""Prompts without segments: the answers of Hugging Face's own `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ragcache.engine import Request, Sampling
from ragcache.models import CausalLM, wrap_causal
from tests.conftest import FAMILIES, random_tokens, tiny_model
from tests.ragcache.engine.engines import core_of, plain, run, settings_of

PROMPTS = [random_tokens(length, seed=length) for length in (1, 4, 5, 23, 64)]
LIMIT = 12


def reference(model: Any, prompt: Sequence[int], **options: Any) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),  # no token is padding
        do_sample=False,
        max_new_tokens=LIMIT,
        pad_token_id=0,
        **options,
    )
    answer: list[int] = output[0, len(prompt) :].tolist()
    return tuple(answer)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> tuple[Any, CausalLM]:
    """A model as Hugging Face runs it, and the same one patched."""
    return tiny_model(request.param), wrap_causal(tiny_model(request.param))


def test_greedy_answers_are_those_of_generate(pair: tuple[Any, CausalLM]) -> None:
    model, causal = pair
    core = core_of(causal, settings_of(causal, step_tokens=16, prefill_tokens=16))
    completions = run(core, *(Request(plain(prompt), LIMIT) for prompt in PROMPTS))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert completion.token_ids == reference(model, prompt)


@pytest.fixture(scope="module")
def llama() -> tuple[Any, CausalLM]:
    return tiny_model("llama"), wrap_causal(tiny_model("llama"))


@pytest.mark.parametrize("penalty", [0.6, 1.4])
def test_repetitions_are_penalized_as_by_generate(
    llama: tuple[Any, CausalLM], penalty: float
) -> None:
    model, causal = llama
    sampling = Sampling(repetition_penalty=penalty)
    requests = [Request(plain(prompt), LIMIT, sampling=sampling) for prompt in PROMPTS]
    answers = [completion.token_ids for completion in run(core_of(causal), *requests)]
    assert answers == [reference(model, p, repetition_penalty=penalty) for p in PROMPTS]
    assert answers != [reference(model, p) for p in PROMPTS], "the penalty changes something"


def test_stop_tokens_end_answers_as_in_generate(llama: tuple[Any, CausalLM]) -> None:
    model, causal = llama
    for prompt in PROMPTS[2:]:
        stop = reference(model, prompt)[4]
        expected = reference(model, prompt, eos_token_id=stop)
        [completion] = run(core_of(causal), Request(plain(prompt), LIMIT, frozenset({stop})))
        assert (*completion.token_ids, stop) == expected
        assert completion.choices[0].stopped_by == stop


def test_early_stop_tokens_are_put_off_as_in_generate(llama: tuple[Any, CausalLM]) -> None:
    model, causal = llama
    for prompt in PROMPTS[2:]:
        stop = reference(model, prompt)[4]
        expected = reference(model, prompt, eos_token_id=stop, min_new_tokens=8)
        request = Request(plain(prompt), LIMIT, frozenset({stop}), min_new_tokens=8)
        [completion] = run(core_of(causal), request)
        ended = completion.finish_reason == "stop"
        assert completion.token_ids == (expected[:-1] if ended else expected)
        assert len(completion.token_ids) >= 8
