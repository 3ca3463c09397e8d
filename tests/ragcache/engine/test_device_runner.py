"""The runner of GPUs, with its kernels in Triton's interpreter, beside that of CPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

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
    device_batch,
)
from ragcache.engine.batch import ScheduledChunk
from ragcache.engine.encoding import Encoding
from ragcache.engine.kv_cache import BlockTable
from ragcache.engine.runner import ModelRunner, RaggedModelRunner
from ragcache.models import CausalLM, wrap_causal
from ragcache.models.hf_patch import number_layers
from ragcache.states import KVStates
from ragcache.states.quantization import quantize
from tests.interpreted import interpreted
from tests.ragcache.engine.stepped_engine import SteppedCore
from tests.ragcache.models.reference import FULL, SLIDING, tiny_gemma
from tests.tiny_models import LATENT, random_tokens, tiny_model

pytestmark = interpreted

LENGTHS = (5, 3, 2)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def causal_of(family: str) -> CausalLM:
    causal = wrap_causal(
        tiny_model(family, **({} if family == "mpt" else {"num_hidden_layers": 1}))
    )
    number_layers(causal.model)
    return causal


def device_runner(causal: CausalLM) -> ModelRunner:
    from ragcache.engine.device_runner import DeviceModelRunner

    return DeviceModelRunner(causal, prefill_tokens=64)


def states_by(
    runner: ModelRunner, causal: CausalLM, lengths: Sequence[int] = LENGTHS
) -> list[KVStates]:
    """A preamble, and modules behind it."""
    jobs = [EncodeJob(random_tokens(4, seed=1))]
    found = list[KVStates]()
    while jobs:
        running = [Encoding(causal, job) for job in jobs]
        runner.prepare_batch([each.next_chunk(each.pending) for each in running])()
        for each in running:
            each.launched(each.pending)
            each.computed()
            found.append(each.states())
        root = Segment(found[0], 0)
        after = [EncodeJob(random_tokens(n, seed=n), 4, root) for n in lengths]
        jobs = after if len(found) == 1 else []
    return found


def request_over(states: list[KVStates], order: tuple[int, ...], limit: int) -> Request:
    segments, start = [Segment(states[0], 0)], states[0].length
    for number in order:
        segments.append(Segment(states[1 + number], start))
        start += states[1 + number].length
    tokens = random_tokens(3 + len(order), seed=limit)
    end = start + len(tokens)
    context = Context(tuple(segments), tuple(tokens), tuple(range(start, end)), end)
    return Request(context, limit, sampling=SamplingParams(logprobs=1))


def assert_same_states(found: list[KVStates], expected: list[KVStates]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.keys, other.keys, **CLOSE)
        torch.testing.assert_close(one.values, other.values, **CLOSE)


def assert_same_answers(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        for a, b in zip(ours.choices[0].chosen, theirs.choices[0].chosen, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "phi", "mpt", LATENT])
def test_answers_are_those_of_the_ragged_runner(
    family: str, request: pytest.FixtureRequest
) -> None:
    """One family is compiled; `tests/ragcache/models/test_compiled.py` traces every one."""
    if family != "llama":
        request.getfixturevalue("eager_layers")
    causal = causal_of(family)
    expected_states = states_by(RaggedModelRunner(causal), causal)
    found_states = states_by(device_runner(causal), causal)
    assert_same_states(found_states, expected_states)
    answers = []
    for runner in (RaggedModelRunner(causal), device_runner(causal)):
        core = SteppedCore(runner, EngineConfig(2**19, running=4))
        if runner.asynchronous:  # its kernels read nothing of a block beyond the block's tokens
            core.pool.keys.fill_(torch.nan)
            core.pool.values.fill_(torch.nan)
        requests = [
            request_over(expected_states, (1, 0), 3),
            request_over(expected_states, (2,), 2),
        ]
        answers.append(core.run(*requests))
    assert_same_answers(*answers)


@pytest.mark.slow
@pytest.mark.usefixtures("eager_layers")
@pytest.mark.parametrize("few", [-1, 99], ids=["arrays", "one by one"])
def test_answers_stay_while_requests_join_and_leave(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps behind a running one are planned over the decode batch, or repeated."""
    monkeypatch.setattr(device_batch, "FEW_SEGMENTS", few)
    causal = causal_of("llama")
    states = states_by(RaggedModelRunner(causal), causal)
    requests = [
        request_over(states, order, limit)
        for order, limit in (((1, 0), 9), ((2,), 3), ((0, 1, 2), 7), ((2, 0), 2), ((1,), 8))
    ]
    core = SteppedCore(device_runner(causal), EngineConfig(2**19, running=3))
    handles = []
    for request in requests:
        handles.append(core.submit(request))
        core.step()
        core.step()
    core.drain()
    alone = SteppedCore(RaggedModelRunner(causal), EngineConfig(2**19))
    expected = [alone.run(request)[0] for request in requests]
    assert_same_answers([handle.result(0) for handle in handles], expected)


def logits_of_steps(
    runner: ModelRunner, segments: Sequence[Segment], steps: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Return the logits of the last rows of one request's steps."""
    private = BlockTable(runner.create_pool(2**19))
    blocks = private.pool.allocate_blocks(1)
    assert blocks is not None
    private.block_ids += blocks
    found = []
    for positions in steps:
        tokens = random_tokens(len(positions), seed=positions[0])
        chunk = ScheduledChunk(tuple(segments), private, tokens, positions)
        found.append(runner.prepare_batch([chunk])())
        private.advance(positions)
    return torch.cat(found)


def assert_same_logits(runner: ModelRunner, causal: CausalLM, segments: list[Segment]) -> None:
    """Three rows after the segments have the logits of the ragged runner."""
    end = max(segment.end for segment in segments)
    found, expected = (
        logits_of_steps(each, segments, [range(end, end + 3)])
        for each in (runner, RaggedModelRunner(causal))
    )
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.slow
@pytest.mark.usefixtures("eager_layers")
@pytest.mark.parametrize("memory_ends_once", [False, True])
def test_states_in_eight_bits_are_read_in_place(
    memory_ends_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ragcache.engine import device_runner as module

    causal = causal_of("llama")
    runner = device_runner(causal)
    first, *modules = states_by(RaggedModelRunner(causal), causal)
    plain = [Segment(first, 0), Segment(modules[0], 4), Segment(modules[1], 9)]
    eight = [plain[0], *(Segment(quantize(s.states, "int8"), s.start) for s in plain[1:])]

    def no_memory(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    if memory_ends_once:
        with monkeypatch.context() as patch:
            patch.setattr(module, "TritonKernels", no_memory)
            with pytest.raises(torch.OutOfMemoryError):
                assert_same_logits(runner, causal, eight)
    assert_same_logits(runner, causal, plain)
    assert_same_logits(runner, causal, eight)
    prepared = module.DeviceModelRunner(causal, prefill_tokens=64, int8_states=True)
    kernels = prepared._kernels
    assert kernels.quantized
    assert_same_logits(prepared, causal, plain)
    assert_same_logits(prepared, causal, eight)
    assert prepared._kernels is kernels, "they were not replaced"


@pytest.mark.usefixtures("eager_layers")
def test_tables_grow_where_a_step_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    from ragcache.attention.triton.plan import TableCapacity
    from ragcache.engine import device_runner as module

    causal = causal_of("llama")
    segments = [Segment(states, 0) for states in states_by(RaggedModelRunner(causal), causal)]
    monkeypatch.setattr(module, "GRAPH_CAPACITY", TableCapacity(4, 4, 4, 2, 9))
    monkeypatch.setattr(module, "ENTRIES_PER_ROW", 0)
    runner = module.DeviceModelRunner(causal, prefill_tokens=4)
    assert_same_logits(runner, causal, segments)


WINDOW = 8


def windowed_pair(family: str) -> tuple[CausalLM, CausalLM]:
    """A model whose window hides a part of every prompt, twice: for the definition, and for
    kernels."""
    sizes = {"sliding_window": WINDOW, "num_attention_heads": 2, "num_key_value_heads": 1}

    def model() -> Any:
        if family == "mistral":
            return tiny_model(family, **sizes, num_hidden_layers=1)
        return tiny_gemma(family, **sizes, num_hidden_layers=2, layer_types=[SLIDING, FULL])

    causal = wrap_causal(model())
    number_layers(causal.model)
    return wrap_causal(model()), causal


GAPS = ((*range(16, 20), 27, 28), (29, 33), (34,))
"""Steps of a text between the modules and of one after them, and a token over a gap."""
LONG = (range(27, 36), (36,))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3"])
@pytest.mark.usefixtures("eager_layers")
def test_windows_and_caps_are_those_of_the_definition(family: str) -> None:
    """Each reads the states of the other, which are interchangeable: their keys are the same."""
    defined, causal = windowed_pair(family)
    assert causal.scheme.name == defined.scheme.name
    assert causal.fingerprint == defined.fingerprint
    runners = RaggedModelRunner(defined), device_runner(causal)
    expected_states = states_by(runners[0], defined, (7, 12))
    found_states = states_by(runners[1], causal, (7, 12))
    assert_same_states(found_states, expected_states)
    for steps in (GAPS, LONG):
        logits = []
        for runner, (root, *modules) in zip(runners, (found_states, expected_states), strict=True):
            segments = Segment(root, 0), Segment(modules[1], 4), Segment(modules[0], 20)
            logits.append(logits_of_steps(runner, segments, steps))
        torch.testing.assert_close(*logits, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3"])
@pytest.mark.usefixtures("eager_layers")
def test_answers_through_windows_are_those_of_the_definition(family: str) -> None:
    """Prefilled in portions, and longer than the window."""
    defined, causal = windowed_pair(family)
    states = states_by(RaggedModelRunner(defined), defined)
    answers = []
    for runner in (RaggedModelRunner(defined), device_runner(causal)):
        config = EngineConfig(2**19, step_tokens=5, prefill_tokens=5, running=4)
        requests = [request_over(states, (1, 0), WINDOW + 2), request_over(states, (2,), 3)]
        answers.append(SteppedCore(runner, config).run(*requests))
    assert_same_answers(*answers)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", LATENT])
def test_the_last_layer_computes_few_rows(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind compiled layers, in steps that no graph has: one row of a prompt, and of an encoding
    none. Over latents, whose operator takes other values than segments hold, all rows."""
    from ragcache.engine import device_runner as module
    from ragcache.models.last_layer import LastLayer
    from ragcache.models.model import layer_list

    causal = causal_of(family)
    expected_states = states_by(RaggedModelRunner(causal), causal)
    last = layer_list(causal.model, causal.depth)[-1]
    rows = list[int]()
    last.mlp.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[1]))
    small = dataclasses.replace(module.GRAPH_CAPACITY, rows=2)
    runner = device_runner(causal)
    monkeypatch.setattr(module, "GRAPH_CAPACITY", small)
    rows.clear()
    assert_same_states(states_by(runner, causal), expected_states)
    assert isinstance(last.forward, LastLayer)
    answers = []
    for each in (RaggedModelRunner(causal), runner):
        core = SteppedCore(each, EngineConfig(2**19, running=4))
        rows.clear()
        answers.append(core.run(request_over(expected_states, (1, 0, 2, 2, 0, 1), 3)))
    assert (rows[0] == 1) == (family != LATENT), "of all rows of the prompt"
    assert_same_answers(*answers)


@pytest.mark.usefixtures("eager_layers")
def test_a_warm_up_that_fails_leaves_no_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine goes on without it, and a graph that is captured later must not have them."""
    from ragcache.engine import device_runner as module

    def end_memory(runner: Any, *_: Any) -> Any:
        assert [tuple(each) for each in runner._step.squares] == [(0, 3), (3, 2048)]
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(module.DeviceModelRunner, "_try_squares", lambda _: 3)
    monkeypatch.setattr(module.DeviceModelRunner, "_compute", end_memory)
    runner: Any = device_runner(causal_of("llama"))
    with pytest.raises(torch.OutOfMemoryError):
        runner.warm_up()
    assert not runner._step.squares


@pytest.mark.slow
@pytest.mark.usefixtures("eager_layers")
def test_long_new_texts_attend_to_themselves_as_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks in a pool and in memory of their own, behind documents and behind earlier chunks."""
    from ragcache.attention.triton import launch
    from ragcache.engine import device_runner as module

    causal = causal_of("llama")
    expected_states = states_by(RaggedModelRunner(causal), causal)
    small = dataclasses.replace(module.GRAPH_CAPACITY, rows=2)
    sizes = list[int]()

    def square(query: Any, *others: Any) -> Any:
        sizes.append(query.shape[1])
        return attend(query, *others)

    attend = launch.attend_square
    monkeypatch.setattr(launch, "attend_square", square)
    monkeypatch.setattr(module.DeviceModelRunner, "_try_squares", lambda _: 3)
    runner = device_runner(causal)
    monkeypatch.setattr(module, "GRAPH_CAPACITY", small)  # steps of more rows have no graph
    assert_same_states(states_by(runner, causal), expected_states)
    assert sizes == [4, 5, 3], "a module of 2 tokens is no square"
    answers = []
    for each in (RaggedModelRunner(causal), runner):
        core = SteppedCore(each, EngineConfig(2**19, running=4, prefill_tokens=5))
        sizes.clear()
        requests = [request_over(expected_states, (1, 0, 2, 2, 0, 1), 3)]
        answers.append(core.run(*requests))
    assert sizes == [5, 4], "9 tokens in two chunks"
    assert_same_answers(*answers)


def test_sums_of_graphs_are_never_left_to_nccl() -> None:
    module = pytest.importorskip("ragcache.engine.device_runner", reason="needs triton")
    one_shot = pytest.importorskip("ragcache.models.parallel.one_shot", reason="needs triton")
    assert module.GRAPH_CAPACITY.rows == one_shot.GRAPH_ROWS
    assert module.BUCKETS["mixed"][-1] <= one_shot.GRAPH_ROWS
