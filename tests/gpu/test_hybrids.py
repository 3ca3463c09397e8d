"""Hybrid models on a GPU beside the same model on the CPU: exact prompts, documents that compose in
both ways, and batches of them."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from ragcache.engine import (
    Context,
    EncodeJob,
    EngineConfig,
    LLMEngine,
    Request,
    RequestOutput,
    SamplingParams,
    Segment,
    encode,
)
from ragcache.models import CausalLM, wrap_causal
from ragcache.modes import Compose
from ragcache.states import KVStates
from tests.tiny_hybrids import HYBRIDS, tiny_hybrid
from tests.tiny_models import random_tokens

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu

LENGTHS = (70, 2, 33, 130, 17)
NEW = 20
NEAR = 2e-3  # of log-probabilities


class Encoded:
    """A model with a preamble and documents behind it."""

    def __init__(self, causal: CausalLM) -> None:
        self.causal = causal
        [self.root] = encode(causal, [EncodeJob(random_tokens(11, seed=1))])
        before = Segment(self.root, 0)
        jobs = [EncodeJob(random_tokens(n, seed=n), self.root.length, before) for n in LENGTHS]
        self.documents: list[KVStates] = list(encode(causal, jobs))

    def request(
        self, order: Sequence[int], seed: int, compose: Compose = "order", n: int = 1
    ) -> Request:
        segments, at = [Segment(self.root, 0, "root")], self.root.length
        for number in order:
            segments.append(Segment(self.documents[number], at, str(number)))
            at += self.documents[number].length
        question = random_tokens(3 + seed % 11, seed=seed)
        end = at + len(question)
        context = Context(tuple(segments), tuple(question), tuple(range(at, end)), end, compose)
        return Request(context, NEW, n=n, sampling=SamplingParams(logprobs=2), tenant="a")

    def requests(self) -> list[Request]:
        """Prompts of no, one and several documents, in both ways to compose."""
        rng = random.Random(3)
        orders = [rng.sample(range(len(LENGTHS)), rng.randint(0, 5)) for _ in range(8)]
        ways: tuple[Compose, ...] = ("order", "both")
        return [self.request(each, n, ways[n % 2]) for n, each in enumerate(orders)]


def answers(encoded: Encoded, requests: Sequence[Request]) -> list[RequestOutput]:
    """Ask an engine all at once. Requests join while others decode."""
    with LLMEngine(encoded.causal, EngineConfig(2**25, running=6)) as engine:
        handles = [engine.submit_request(each) for each in requests]
        return [each.result() for each in handles]


def assert_same_answers(found: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    """Equal tokens up to the first that is nearly a tie, and close log-probabilities."""
    for ours, theirs in zip(found, expected, strict=True):
        for mine, other in zip(ours.choices, theirs.choices, strict=True):
            compared = 0
            for a, b in zip(mine.chosen, other.chosen, strict=False):
                assert a.logprob == pytest.approx(b.logprob, abs=NEAR)
                compared += 1
                if a.token != b.token:
                    assert abs(b.alternatives[0][1] - b.alternatives[1][1]) < NEAR
                    break
            assert compared


@pytest.fixture(scope="module", params=HYBRIDS)
def pair(request: pytest.FixtureRequest) -> tuple[Encoded, Encoded]:
    plain = tiny_hybrid(str(request.param))
    on_gpu = copy.deepcopy(plain).to("cuda")
    return Encoded(wrap_causal(plain)), Encoded(wrap_causal(on_gpu))


def test_answers_are_those_of_the_cpu(pair: tuple[Encoded, Encoded]) -> None:
    cpu, gpu = pair
    expected = answers(cpu, cpu.requests())
    assert_same_answers(answers(gpu, gpu.requests()), expected)


def test_maps_are_those_of_the_cpu(pair: tuple[Encoded, Encoded]) -> None:
    cpu, gpu = pair
    for ours, theirs in zip(gpu.documents, cpu.documents, strict=True):
        assert ours.recurrent is not None
        assert theirs.recurrent is not None
        for name, tensor in theirs.recurrent.tensors().items():
            found = ours.recurrent.tensors()[name].cpu()
            torch.testing.assert_close(found, tensor, rtol=1e-3, atol=1e-3)


def test_several_answers_continue_one_prompt(pair: tuple[Encoded, Encoded]) -> None:
    cpu, gpu = pair
    asked = [each.request([3, 0, 2], 5, n=3) for each in pair]
    expected, found = answers(cpu, asked[:1]), answers(gpu, asked[1:])
    assert_same_answers(found, expected)


def test_a_prompt_resumes_from_an_earlier_one(pair: tuple[Encoded, Encoded]) -> None:
    """Two prompts leave a path that a third takes again, behind a snapshot."""
    _, gpu = pair
    lead = random_tokens(150, seed=77)
    requests = []
    for tail in (3, 4, 5):
        own = [*lead, *random_tokens(tail, seed=tail)]
        context = replace(
            gpu.request([0, 1], 0).context,
            token_ids=tuple(own),
            position_ids=tuple(range(100, 100 + len(own))),
            next_position=100 + len(own),
        )
        requests.append(Request(context, 4, sampling=SamplingParams(logprobs=2), tenant="a"))
    with LLMEngine(gpu.causal, EngineConfig(2**25)) as engine:
        found = [engine.submit_request(each).result() for each in requests]
    assert found[2].shared_tokens == 128
    with LLMEngine(gpu.causal, EngineConfig(2**25)) as engine:
        alone = engine.submit_request(requests[2]).result()
    assert_same_answers([found[2]], [alone])


def test_long_modules_in_bfloat16_are_near_those_of_the_cpu() -> None:
    """One pass of more rows than a graph has, in which each module attends to itself by cuDNN."""
    plain = tiny_hybrid("falcon_h1", max_position_embeddings=2048)

    def states(causal: CausalLM) -> list[KVStates]:
        with LLMEngine(causal, EngineConfig(2**25)) as engine:
            [root] = engine.encode([EncodeJob(random_tokens(11, seed=1))])
            modules = [random_tokens(1500, seed=seed) for seed in range(3)]
            jobs = [EncodeJob(each, root.length, Segment(root, 0)) for each in modules]
            return list(engine.encode(jobs))

    expected = states(wrap_causal(copy.deepcopy(plain)))
    found = states(wrap_causal(plain.to("cuda", torch.bfloat16)))
    for ours, theirs in zip(found, expected, strict=True):
        error = (ours.keys[1].cpu().float() - theirs.keys[1]).abs().mean()
        assert error < 0.15, "0.04 on a CPU, 0.7 if the modules' tokens do not see each other"


def test_short_dtypes_stay_close() -> None:
    plain = tiny_hybrid("qwen3_5_text")
    cpu = Encoded(wrap_causal(copy.deepcopy(plain)))
    gpu = Encoded(wrap_causal(plain.to("cuda", torch.bfloat16)))
    pairs = zip(answers(gpu, gpu.requests()), answers(cpu, cpu.requests()), strict=True)
    for ours, theirs in pairs:
        first = ours.choices[0].chosen[0], theirs.choices[0].chosen[0]
        assert first[0].logprob == pytest.approx(first[1].logprob, abs=0.3)
