"""The engine over contiguous models: answers, batches, and where the buffers go."""

from __future__ import annotations

import time
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
    RequestOutput,
    SamplingParams,
    Segment,
    assemble_context,
    encode,
)
from ragcache.engine.core import AnswerChannel, EngineCore, StatesChannel
from ragcache.engine.engine import complete
from ragcache.engine.handle import RequestHandle
from ragcache.engine.request import TokenDelta
from ragcache.engine.runner import BufferedModelRunner, RaggedModelRunner, runner_for
from ragcache.errors import ConfigurationError, RequestCancelled
from ragcache.models import CausalLM, ContiguousLM, wrap_causal, wrap_contiguous
from ragcache.states import KVStates
from tests.ragcache.models.reference import WINDOW, Module, reference_logits, tiny_gemma
from tests.tiny_models import random_tokens, tiny_model

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
BLOCK_SIZE = 64


@pytest.fixture(params=["gemma2", "gemma3"])
def gemma(request: pytest.FixtureRequest) -> ContiguousLM:
    return wrap_contiguous(tiny_gemma(request.param))


def core_of(model: ContiguousLM, **settings: Any) -> tuple[EngineCore, BufferedModelRunner]:
    runner = BufferedModelRunner(model)
    return EngineCore(runner, EngineConfig(**settings)), runner


def add(core: EngineCore, request: Request) -> RequestHandle[TokenDelta, RequestOutput]:
    channel = AnswerChannel(lambda: None)
    core.check_request(request)
    core.add_request(request, channel, time.perf_counter())
    return RequestHandle(channel)


def finish(core: EngineCore) -> None:
    while core.busy:
        core.step()


def encoded(model: ContiguousLM, jobs: Sequence[EncodeJob]) -> list[KVStates]:
    with LLMEngine(model) as engine:
        return list(engine.encode(jobs))


def plain(count: int, seed: int) -> Context:
    return assemble_context([], random_tokens(count, seed), window=512, max_new_tokens=64)


def with_modules(model: ContiguousLM, modules: Sequence[Module], own: Sequence[int]) -> Context:
    states = encoded(model, [EncodeJob(tokens, 3) for tokens, _ in modules])
    return assemble_context(states, own, window=512, max_new_tokens=64)


def allocations(model: ContiguousLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that receives the capacity of every room allocated from now on."""
    capacities: list[int] = []
    new_states = model.new_states

    def counted(capacity: int, *args: Any) -> Any:
        capacities.append(capacity)
        return new_states(capacity, *args)

    monkeypatch.setattr(model, "new_states", counted)
    return capacities


def test_greedy_answers_equal_those_of_generate(gemma: ContiguousLM) -> None:
    tokens = random_tokens(5 * WINDOW)
    prompt = torch.tensor([tokens])
    generated = gemma.model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False
    )
    context = assemble_context([], tokens, window=512, max_new_tokens=40)
    [completion] = complete(gemma, [Request(context, 40)])
    assert list(completion.token_ids) == generated[0, len(tokens) :].tolist()


def test_an_answer_over_moved_modules_equals_the_reference(gemma: ContiguousLM) -> None:
    modules = [(random_tokens(11, seed=1), 0), (random_tokens(9, seed=2), 11)]
    own = random_tokens(5, seed=3)
    [completion] = complete(gemma, [Request(with_modules(gemma, modules, own), 6)])
    assert len(set(completion.token_ids)) > 1
    for token in completion.token_ids:
        assert token == int(reference_logits(gemma.model, modules, (own, 20)).argmax())
        own = [*own, token]


def test_text_between_modules(gemma: ContiguousLM) -> None:
    modules = [(random_tokens(11, seed=1), 0), (random_tokens(9, seed=2), 15)]
    between, after = random_tokens(4, seed=3), random_tokens(3, seed=4)
    states = encoded(gemma, [EncodeJob(tokens) for tokens, _ in modules])
    segments = tuple(Segment(each, start) for each, (_, start) in zip(states, modules, strict=True))
    positions = (*range(11, 15), *range(24, 27))
    context = Context(segments, (*between, *after), positions, 27)
    [completion] = complete(gemma, [Request(context, 4)])
    for token in completion.token_ids:
        runs = [(between, 11), (after, 24)]
        assert token == int(reference_logits(gemma.model, modules, runs).argmax())
        after = [*after, token]


def test_encoding_behind_a_root_equals_one_pass(gemma: ContiguousLM) -> None:
    preamble, tokens = random_tokens(10, seed=1), random_tokens(12, seed=2)
    [root, whole] = encoded(gemma, [EncodeJob(preamble), EncodeJob([*preamble, *tokens])])
    [rooted] = encoded(gemma, [EncodeJob(tokens, 10, Segment(root, 0))])
    torch.testing.assert_close(rooted.keys, whole.keys[:, :, 10:], **CLOSE)
    torch.testing.assert_close(rooted.values, whole.values[:, :, 10:], **CLOSE)
    assert rooted.start == 10


def test_encoding_in_portions_equals_one_pass(gemma: ContiguousLM) -> None:
    [root] = encoded(gemma, [EncodeJob(random_tokens(10, seed=1))])
    jobs = [EncodeJob(random_tokens(30, seed=2), 10, Segment(root, 0)), EncodeJob([5, 6])]
    settings = EngineConfig(prefill_tokens=7)
    with LLMEngine(gemma, settings) as engine:
        portions = list(engine.encode(jobs))
    for one, other in zip(portions, encoded(gemma, jobs), strict=True):
        torch.testing.assert_close(one.keys, other.keys, **CLOSE)
        torch.testing.assert_close(one.values, other.values, **CLOSE)


def test_encoding_equals_that_of_the_segment_design() -> None:
    jobs = [EncodeJob([3, 1, 4], 7), EncodeJob([1, 5, 9], 2, None, (2, 3, 9))]
    expected = encode(wrap_causal(tiny_model("llama")), jobs)
    mine = encoded(wrap_contiguous(tiny_model("llama")), jobs)
    for one, other in zip(mine, expected, strict=True):
        torch.testing.assert_close(one.keys, other.keys, **CLOSE)
        torch.testing.assert_close(one.values, other.values, **CLOSE)


def test_batched_requests_equal_single_ones(gemma: ContiguousLM) -> None:
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


def test_several_answers_to_one_prompt(gemma: ContiguousLM) -> None:
    context = plain(2 * BLOCK_SIZE + 9, seed=4)
    [greedy] = complete(gemma, [Request(context, 6)])
    core, runner = core_of(gemma)
    handle = add(core, Request(context, 6, n=3, tenant="t"))
    finish(core)
    assert [choice.token_ids for choice in handle.result().choices] == [greedy.token_ids] * 3
    assert (runner.held, core.stats.shared_tokens) == (0, 0)
    sampled = Request(context, 6, n=3, sampling=SamplingParams(temperature=5.0, seed=1))
    [completion] = complete(gemma, [sampled])
    assert len({choice.token_ids for choice in completion.choices}) > 1


def test_equal_prompts_of_one_tenant_share_nothing(gemma: ContiguousLM) -> None:
    request = Request(plain(2 * BLOCK_SIZE, seed=4), 3, tenant="t")
    core, _ = core_of(gemma)
    first = add(core, request)
    finish(core)
    second = add(core, request)
    finish(core)
    assert second.result().token_ids == first.result().token_ids
    assert second.result().shared_tokens == 0
    assert core.kv_manager.radix_cache.retained == 0


def test_preempted_requests_equal_single_ones(gemma: ContiguousLM) -> None:
    requests = [Request(plain(50 + 3 * n, seed=n), 20) for n in range(3)]
    core, runner = core_of(gemma, pool_bytes=3 * BLOCK_SIZE * gemma.bytes_per_token)
    handles = [add(core, request) for request in requests]
    finish(core)
    assert core.stats.preempted > 0
    assert (runner.held, core.pool.used_count) == (0, 0)
    for request, handle in zip(requests, handles, strict=True):
        [alone] = complete(gemma, [request])
        assert handle.result().token_ids == alone.token_ids


def test_a_cancelled_request_gives_its_buffer_back(gemma: ContiguousLM) -> None:
    core, runner = core_of(gemma)
    stays, goes = (add(core, Request(plain(30, seed=n), 8)) for n in range(2))
    core.step()
    core.step()
    assert runner.held == 2
    goes.cancel()
    core.step()
    assert (runner.held, runner.buffers.unused) == (1, 1)
    finish(core)
    assert len(stays.result().token_ids) == 8
    assert (runner.held, core.pool.used_count) == (0, 0)
    with pytest.raises(RequestCancelled):
        goes.result()


def test_failing_gives_all_buffers_back(gemma: ContiguousLM) -> None:
    core, runner = core_of(gemma)
    handle = add(core, Request(plain(30, seed=1), 8))
    core.add_encoding([EncodeJob(random_tokens(9)), EncodeJob([1, 2])], StatesChannel(lambda: None))
    core.step()
    assert runner.held == 1
    core.fail_all(RuntimeError("the end"))
    assert (runner.held, runner.buffers.unused, core.busy) == (0, 2, False)
    with pytest.raises(RuntimeError, match="the end"):
        handle.result()


def test_nothing_is_allocated_after_the_first_prompt_of_a_size(
    gemma: ContiguousLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = [(random_tokens(30, seed=1), 0), (random_tokens(20, seed=2), 30)]
    contexts = [with_modules(gemma, modules, random_tokens(9, seed=n)) for n in range(3)]
    core, _ = core_of(gemma)
    taken = allocations(gemma, monkeypatch)
    handles = [add(core, Request(contexts[0], 12))]
    finish(core)
    assert taken == [128]
    for context in contexts[1:]:
        handles.append(add(core, Request(context, 12)))
        finish(core)
    assert [len(handle.result().token_ids) for handle in handles] == [12] * 3
    assert taken == [128]


def test_a_long_answer_moves_to_a_larger_buffer(
    gemma: ContiguousLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = plain(50, seed=1)
    [long] = complete(gemma, [Request(context, 100)])
    core, runner = core_of(gemma)
    taken = allocations(gemma, monkeypatch)
    handle = add(core, Request(context, 100))
    finish(core)
    assert handle.result().token_ids == long.token_ids
    assert taken == [64, 128, 256]
    assert runner.buffers.unused == 3


def test_the_pool_counts_blocks_and_takes_no_memory(gemma: ContiguousLM) -> None:
    pool = BufferedModelRunner(gemma).create_pool(5 * BLOCK_SIZE * gemma.bytes_per_token)
    assert (pool.num_blocks, pool.keys.device.type) == (5, "meta")
    assert pool.allocate_blocks(5) == [0, 1, 2, 3, 4]
    with pytest.raises(ConfigurationError):
        BufferedModelRunner(gemma).create_pool(1)


def test_an_ordinary_model_answers_as_in_the_segment_design() -> None:
    causal = wrap_causal(tiny_model("llama"))
    [states] = encode(causal, [EncodeJob(random_tokens(20), 4)])
    context = assemble_context([states], random_tokens(9, seed=1), window=512, max_new_tokens=30)
    [expected] = complete(causal, [Request(context, 30)])
    [mine] = complete(wrap_contiguous(tiny_model("llama")), [Request(context, 30)])
    assert mine.token_ids == expected.token_ids


def test_the_runner_follows_the_model(gemma: ContiguousLM, causal: CausalLM) -> None:
    assert isinstance(runner_for(gemma), BufferedModelRunner)
    assert isinstance(runner_for(causal), RaggedModelRunner)
