"""Gemma 4 on a GPU, whose layers have heads of two sizes, beside the same model on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch

from ragcache.engine import (
    EncodeJob,
    EngineConfig,
    LLMEngine,
    Request,
    RequestOutput,
    SamplingParams,
    assemble_context,
)
from ragcache.models import CausalLM, wrap_causal
from tests.ragcache.models.reference import tiny_gemma
from tests.tiny_models import random_tokens

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu
LENGTHS, NEW = (70, 9, 33), 24
NEAR = 1e-3  # of log-probabilities
PROMPTS: tuple[tuple[Sequence[int], int], ...] = (((0, 1, 2), 5), ((2, 0), 40), ((), 90), ((1,), 1))
"""Modules of each prompt, encoded at another position, and the number of its own tokens."""


def answers(causal: CausalLM) -> list[RequestOutput]:
    """Answer all prompts in one batch."""
    with LLMEngine(causal, EngineConfig(64 * 2**20)) as engine:
        states = list(engine.encode([EncodeJob(random_tokens(n, seed=n), 41) for n in LENGTHS]))
        requests = [
            Request(
                assemble_context(
                    [states[n] for n in modules],
                    random_tokens(own, seed=own),
                    window=causal.window,
                    max_tokens=NEW,
                ),
                NEW,
                sampling=SamplingParams(logprobs=0),
            )
            for modules, own in PROMPTS
        ]
        handles = [engine.submit_request(each) for each in requests]
        return [handle.result() for handle in handles]


def test_answers_are_those_of_the_cpu() -> None:
    plain = tiny_gemma("gemma4")
    on_cpu = answers(wrap_causal(copy.deepcopy(plain)))
    on_gpu = answers(wrap_causal(plain.to("cuda")))
    for expected, found in zip(on_cpu, on_gpu, strict=True):
        assert found.token_ids == expected.token_ids
        for one, other in zip(found.choices[0].chosen, expected.choices[0].chosen, strict=True):
            assert abs(one.logprob - other.logprob) < NEAR
