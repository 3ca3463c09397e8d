"""Hybrid models on the runner of GPUs, with its kernels in Triton's interpreter, beside the runner
of CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from ragcache.engine import (
    Context,
    EncodeJob,
    EngineConfig,
    Request,
    RequestOutput,
    SamplingParams,
    Segment,
    encode,
)
from ragcache.engine.encoding import StatesChannel
from ragcache.engine.handle import RequestHandle
from ragcache.engine.runner import RaggedModelRunner
from ragcache.models import CausalLM, wrap_causal
from ragcache.models.hf_patch import number_layers
from ragcache.modes import Compose
from ragcache.states import KVStates
from tests.interpreted import interpreted
from tests.ragcache.engine.stepped_engine import SteppedCore, plain_context
from tests.tiny_hybrids import HYBRIDS, OFTEN, tiny_hybrid
from tests.tiny_models import random_tokens

pytestmark = interpreted

LENGTHS = (6, 2, 5)
FAMILIES = [
    pytest.param(name, marks=() if name in OFTEN else pytest.mark.nightly) for name in HYBRIDS
]


def device_core(causal: CausalLM, running: int = 4) -> SteppedCore:
    from ragcache.engine.device_recurrent import HybridDeviceRunner

    return SteppedCore(HybridDeviceRunner(causal, prefill_tokens=64), config_of(causal, running))


def config_of(causal: CausalLM, running: int = 4) -> EngineConfig:
    nbytes = 2**19 + 12 * running * causal.recurrent_bytes
    return EngineConfig(nbytes, running=running)


class Encoded:
    """A model with a preamble and documents behind it."""

    def __init__(self, causal: CausalLM) -> None:
        self.causal = causal
        [self.root] = encode(causal, [EncodeJob(random_tokens(5, seed=1))])
        before = Segment(self.root, 0)
        jobs = [EncodeJob(random_tokens(n, seed=n), self.root.length, before) for n in LENGTHS]
        self.documents: list[KVStates] = list(encode(causal, jobs))

    def request(
        self, order: Sequence[int], seed: int, compose: Compose = "order", **options: int
    ) -> Request:
        segments, at = [Segment(self.root, 0)], self.root.length
        for number in order:
            segments.append(Segment(self.documents[number], at))
            at += self.documents[number].length
        question = random_tokens(2 + seed % 3, seed=seed)
        end = at + len(question)
        context = Context(tuple(segments), tuple(question), tuple(range(at, end)), end, compose)
        return Request(context, 3, sampling=SamplingParams(logprobs=1), tenant="a", **options)


def tiny_causal(family: str) -> CausalLM:
    causal = wrap_causal(tiny_hybrid(family))
    number_layers(causal.model)
    return causal


def assert_same_answers(found: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        for mine, other in zip(ours.choices, theirs.choices, strict=True):
            assert mine.token_ids == other.token_ids
            for a, b in zip(mine.chosen, other.chosen, strict=True):
                assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("eager_layers")
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_the_ragged_runner(family: str) -> None:
    """Documents in both ways to compose, several answers to one prompt, and a prompt without
    documents, which all run beside each other."""
    causal = tiny_causal(family)
    assert causal.kernels
    encoded = Encoded(causal)
    requests = [
        encoded.request([1, 0], 4),
        encoded.request([2, 0, 1], 5, "both"),
        encoded.request([0], 6, n=2),
        Request(plain_context(random_tokens(7, seed=9)), 3, sampling=SamplingParams(logprobs=1)),
    ]
    expected = SteppedCore(RaggedModelRunner(causal), config_of(causal)).run(*requests)
    core = device_core(causal)
    assert_same_answers(core.run(*requests), expected)


@pytest.mark.slow
@pytest.mark.usefixtures("eager_layers")
@pytest.mark.parametrize(("portion", "squares"), [(64, [6, 5]), (3, [3, 3, 3])])
def test_long_modules_attend_to_themselves_as_squares(
    portion: int, squares: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules that are encoded whole and in portions, in steps of more rows than a graph has."""
    from ragcache.attention.triton import launch
    from ragcache.engine import device_runner as module
    from ragcache.engine.device_recurrent import HybridDeviceRunner

    sizes, attend = list[int](), launch.attend_square

    def square(query: torch.Tensor, *others: object) -> object:
        sizes.append(query.shape[1])
        return attend(query, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(launch, "attend_square", square)
    monkeypatch.setattr(HybridDeviceRunner, "_try_squares", lambda _: 3)
    causal = tiny_causal("falcon_h1")
    [root] = encode(causal, [EncodeJob(random_tokens(5, seed=1))])
    before = Segment(root, 0)
    jobs = [EncodeJob(random_tokens(n, seed=n), root.length, before) for n in LENGTHS]
    runner = HybridDeviceRunner(causal, prefill_tokens=64)
    small = replace(module.GRAPH_CAPACITY, rows=2)
    monkeypatch.setattr(module, "GRAPH_CAPACITY", small)
    core = SteppedCore(runner, replace(config_of(causal), prefill_tokens=portion))
    channel = StatesChannel(lambda: None)
    core.add_encoding(jobs, channel)
    core.drain()
    for found, expected in zip(RequestHandle(channel), encode(causal, jobs), strict=True):
        torch.testing.assert_close(found.keys, expected.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.values, expected.values, rtol=1e-4, atol=1e-4)
        assert found.recurrent is not None
        assert expected.recurrent is not None
        for name, each in expected.recurrent.tensors().items():
            torch.testing.assert_close(
                found.recurrent.tensors()[name], each, rtol=1e-3, atol=1e-3, msg=name
            )
    assert sorted(sizes) == sorted(causal.num_layers * squares), "others are shorter"
    assert not runner._step.squares


@pytest.mark.slow
@pytest.mark.usefixtures("eager_layers")
def test_own_tokens_between_documents_end_a_step() -> None:
    """Documents are composed before a step, so that a step ends where some stand between rows."""
    causal = tiny_causal("bamba")
    encoded = Encoded(causal)
    first, second = encoded.documents[:2]
    at = encoded.root.length + first.length
    own, question = random_tokens(4, seed=2), random_tokens(3, seed=3)
    behind = at + len(own) + second.length
    context = Context(
        (Segment(encoded.root, 0), Segment(first, encoded.root.length), Segment(second, at + 4)),
        (*own, *question),
        (*range(at, at + 4), *range(behind, behind + 3)),
        behind + 3,
    )
    request = Request(context, 3, sampling=SamplingParams(logprobs=1))
    expected = SteppedCore(RaggedModelRunner(causal), config_of(causal)).run(request)
    core = device_core(causal)
    assert_same_answers(core.run(request), expected)
    assert core.stats.steps == 4, "two for the prompt, and one for each further token"
