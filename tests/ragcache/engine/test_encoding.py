"""Encoding modules: in one pass, in portions, and beside requests."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from ragcache.attention import AttentionBackend, ReferenceAttentionBackend, cpu, reference
from ragcache.attention.cpu import CpuAttentionBackend
from ragcache.engine import Context, EncodeJob, LLMEngine, Request, Segment, encode
from ragcache.engine.batch import BatchBuilder
from ragcache.engine.config import EngineConfig
from ragcache.engine.contiguous_kv import ContiguousKV
from ragcache.engine.encoding import Encoding, StatesChannel
from ragcache.engine.handle import RequestHandle, Waiter
from ragcache.errors import EncodingOutOfMemory
from ragcache.models import CausalLM, wrap_causal
from ragcache.models.model import ForwardBatch
from ragcache.states import KVStates
from tests.peak_memory import peak_bytes
from tests.ragcache.engine.stepped_engine import SteppedCore, config_of, core_of, plain_context
from tests.tiny_models import LATENT, random_tokens, tiny_model

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def same(one: KVStates, other: KVStates) -> None:
    assert one.start == other.start
    torch.testing.assert_close(one.keys, other.keys, **CLOSE)
    torch.testing.assert_close(one.values, other.values, **CLOSE)


def count_passes(causal: CausalLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that receives the number of rows of every pass from now on."""
    passes: list[int] = []
    forward = causal.forward

    def counted(step: ForwardBatch) -> torch.Tensor:
        passes.append(len(step.token_ids))
        return forward(step)

    monkeypatch.setattr(causal, "forward", counted)
    return passes


def begin_jobs(core: SteppedCore, jobs: list[EncodeJob]) -> RequestHandle[KVStates, None]:
    channel = StatesChannel(lambda: None)
    core.add_encoding(jobs, channel)
    return RequestHandle(channel)


def test_jobs_of_one_pass_equal_jobs_one_by_one(causal: CausalLM) -> None:
    [root] = encode(causal, [EncodeJob(random_tokens(10))])
    jobs = [
        EncodeJob(random_tokens(20, seed=1), 10, Segment(root, 0)),
        EncodeJob(random_tokens(7, seed=2)),
        EncodeJob(random_tokens(1, seed=3), 10, Segment(root, 0)),
        EncodeJob(random_tokens(15, seed=4), 50),
    ]
    for job, states in zip(jobs, encode(causal, jobs), strict=True):
        [alone] = encode(causal, [job])
        same(states, alone)


def test_states_depend_on_the_root(causal: CausalLM) -> None:
    tokens = random_tokens(12, seed=1)
    [root] = encode(causal, [EncodeJob(random_tokens(10))])
    [rooted, alone] = encode(
        causal, [EncodeJob(tokens, 10, Segment(root, 0)), EncodeJob(tokens, 10)]
    )
    assert not torch.allclose(rooted.values[1], alone.values[1], atol=1e-3)
    torch.testing.assert_close(rooted.values[0], alone.values[0], **CLOSE)


def test_more_tokens_than_one_pass_takes_are_split(
    causal: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [EncodeJob(random_tokens(n, seed=n)) for n in (12, 8, 1, 19, 20, 25, 3)]
    alone = [states for job in jobs for states in encode(causal, [job])]
    monkeypatch.setattr("ragcache.engine.engine.MAX_TOKENS_PER_PASS", 20)
    passes = count_passes(causal, monkeypatch)
    for states, expected in zip(encode(causal, jobs), alone, strict=True):
        same(states, expected)
    assert passes == [20, 20, 20, 20, 5, 3], "full passes; a longer job by itself, in portions"
    assert list(encode(causal, [])) == []
    assert len(passes) == 6, "no jobs, no pass"


def test_positions_with_a_gap_place_the_keys_behind_it(causal: CausalLM) -> None:
    """In the first layer a key depends on its token and its position alone."""
    tokens = random_tokens(6)
    [gapped] = encode(causal, [EncodeJob(tokens, 5, position_ids=[5, 6, 7, 20, 21, 22])])
    [left] = encode(causal, [EncodeJob(tokens[:3], 5)])
    [right] = encode(causal, [EncodeJob(tokens[3:], 20)])
    torch.testing.assert_close(gapped.keys[0, :, :3], left.keys[0], **CLOSE)
    torch.testing.assert_close(gapped.keys[0, :, 3:], right.keys[0], **CLOSE)
    same(KVStates(gapped.keys[:, :, :3], gapped.values[:, :, :3], 5), left)


def test_a_job_without_tokens_gives_empty_states(causal: CausalLM) -> None:
    jobs = [EncodeJob([], 3), EncodeJob(random_tokens(4)), EncodeJob([])]
    found = list(encode(causal, jobs))
    assert [(states.start, states.length) for states in found] == [(3, 0), (0, 4), (0, 0)]
    [alone] = encode(causal, jobs[1:2])
    same(found[1], alone)
    assert [states.length for states in encode(causal, [EncodeJob([])])] == [0]


def test_a_job_in_portions_equals_a_job_at_once(causal: CausalLM) -> None:
    [root] = encode(causal, [EncodeJob(random_tokens(10))])
    positions = [*range(10, 19), *range(25, 29)]
    job = EncodeJob(random_tokens(13, seed=1), 10, Segment(root, 0), positions)
    encoding = Encoding(causal, job)
    for count in (1, 5, 1, 4, 2):
        causal.forward(BatchBuilder(causal).build_batch([encoding.next_chunk(count)]))
        encoding.launched(count)
        encoding.computed()
    assert encoding.pending == 0
    [whole] = encode(causal, [job])
    same(encoding.states(), whole)


def test_encoding_does_not_stall_decoding_requests(causal: CausalLM) -> None:
    core = core_of(causal, config_of(causal, step_tokens=8))
    answering = core.submit(Request(plain_context(random_tokens(3)), 30))
    core.step()
    jobs = [EncodeJob(random_tokens(n, seed=n), 2) for n in (20, 0, 3, 12)]
    handle, steps = begin_jobs(core, jobs), 0
    while not handle.done:
        core.step()
        steps += 1
        assert answering.channel.count == 1 + steps
    assert steps == 5, "35 tokens in portions of 7"
    assert core.stats.encoded_tokens == 35
    for states, expected in zip(handle, encode(causal, jobs), strict=True):
        same(states, expected)
    core.drain()


@pytest.mark.parametrize("jobs", [[], [EncodeJob([])]])
def test_encoding_without_jobs_ends_at_once(causal: CausalLM, jobs: list[EncodeJob]) -> None:
    core = core_of(causal)
    handle = begin_jobs(core, jobs)
    core.step()
    assert not core.busy
    assert [states.length for states in handle] == [0] * len(jobs)


def test_jobs_of_a_cancelled_call_are_dropped(causal: CausalLM) -> None:
    core = core_of(causal, config_of(causal, prefill_tokens=4))
    handle = begin_encoding(core, [10])
    core.step()
    handle.cancel()
    core.step()
    assert (core.stats.encoded_tokens, core.busy) == (4, False)


def test_an_idle_engine_holds_no_states(causal: CausalLM) -> None:
    """Neither of what it answered nor of what it encoded last."""
    core = core_of(causal)
    handle = begin_encoding(core, [10])
    core.step()
    [states] = handle
    keys = weakref.ref(states.keys)
    context = Context((Segment(states, 0),), (1, 2), (10, 11), 12)
    core.run(Request(context, 3))
    del states, context, handle
    gc.collect()
    assert keys() is None


def bounded_config(causal: CausalLM, tokens: int) -> EngineConfig:
    return replace(config_of(causal), encode_bytes=tokens * causal.bytes_per_token)


def bounded_core(causal: CausalLM, tokens: int) -> SteppedCore:
    """A core whose encodings may take the bytes of so many tokens."""
    return core_of(causal, bounded_config(causal, tokens))


def begin_encoding(core: SteppedCore, lengths: Sequence[int]) -> RequestHandle[KVStates, None]:
    return begin_jobs(core, [EncodeJob(random_tokens(n, seed=n)) for n in lengths])


def test_jobs_begin_within_the_budget_as_states_are_taken(causal: CausalLM) -> None:
    core = bounded_core(causal, 25)
    handle = begin_encoding(core, [10, 12, 11, 3])
    core.step()
    assert (handle.channel.count, core.stats.encoded_tokens) == (2, 22)
    core.step()
    assert core.stats.encoded_tokens == 22
    assert core.is_stalled
    states = iter(handle)
    assert next(states).length == 10
    assert not core.is_stalled
    core.step()
    assert (handle.channel.count, core.stats.encoded_tokens) == (3, 33)
    assert [next(states).length, next(states).length] == [12, 11]
    core.step()
    assert [each.length for each in states] == [3]
    assert not core.busy


def test_a_job_beyond_the_budget_runs_by_itself(causal: CausalLM) -> None:
    core = bounded_core(causal, 5)
    handle = begin_encoding(core, [2, 20, 1])
    states = iter(handle)
    core.step()
    assert handle.channel.count == 1
    assert next(states).length == 2
    core.step()
    assert (handle.channel.count, next(states).length) == (2, 20)
    core.step()
    assert [each.length for each in states] == [1]


def test_a_waiting_caller_does_not_wait_for_others_to_take(causal: CausalLM) -> None:
    core = bounded_core(causal, 10)
    slow, quick = begin_encoding(core, [10, 10]), begin_encoding(core, [4, 5])
    core.step()
    assert (slow.channel.count, quick.channel.count) == (1, 0)
    quick.channel.add_waiter(Waiter(0, lambda: None))
    assert not core.is_stalled
    core.step()
    assert (slow.channel.count, quick.channel.count) == (1, 1)
    core.step()
    assert (slow.channel.count, quick.channel.count) == (1, 1)


def test_states_of_a_cancelled_call_leave_room(causal: CausalLM) -> None:
    core = bounded_core(causal, 10)
    left, other = begin_encoding(core, [10, 10]), begin_encoding(core, [8])
    core.step()
    core.step()
    assert core.is_stalled
    left.cancel()
    core.step()
    assert [states.length for states in other] == [8]


def test_states_that_were_taken_end_with_their_caller(causal: CausalLM) -> None:
    core = core_of(causal)
    handle = begin_encoding(core, [10, 12])
    core.step()
    states = iter(handle)
    keys = weakref.ref(next(states).keys)
    gc.collect()
    assert keys() is None
    with pytest.raises(AssertionError, match="once"):
        next(iter(handle))


def test_an_engine_waits_idle_until_states_are_taken(causal: CausalLM) -> None:
    with LLMEngine(causal, bounded_config(causal, 10)) as engine:
        jobs = [EncodeJob(random_tokens(8, seed=n)) for n in range(6)]
        taken = []
        for states in engine.encode(jobs):
            time.sleep(0.01)
            taken.append(states.length)
            assert engine.stats.encoded_tokens <= 8 * (len(taken) + 1)
        assert taken == [8] * 6
        assert engine.encode(jobs).result(timeout=10) is None, "who waits for the end gets there"


def test_a_closing_engine_encodes_what_nobody_takes(causal: CausalLM) -> None:
    engine = LLMEngine(causal, bounded_config(causal, 1))
    handle = engine.encode([EncodeJob(random_tokens(8, seed=n)) for n in range(4)])
    engine.close(drain=True)
    assert [states.length for states in handle] == [8] * 4


class Memory:
    """A device that holds rooms of so many tokens."""

    def __init__(self, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = tokens
        self._allocate = ContiguousKV.allocate
        monkeypatch.setattr(ContiguousKV, "allocate", self.allocate)

    def allocate(self, model: CausalLM, capacity: int) -> ContiguousKV:
        if capacity > self.left:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.left -= capacity
        room = self._allocate(model, capacity)
        weakref.finalize(room.keys, self.free, capacity)
        return room

    def free(self, capacity: int) -> None:
        self.left += capacity


def test_a_job_without_memory_waits_for_the_others(
    causal: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    Memory(20, monkeypatch)
    core = core_of(causal)
    handle = begin_encoding(core, [8, 9, 12, 3])
    states = iter(handle)
    core.step()
    assert handle.channel.count == 2
    core.step()
    assert core.is_stalled, "there may be memory when these are taken"
    assert [next(states).length, next(states).length] == [8, 9]
    core.step()
    assert [each.length for each in states] == [12, 3]


def test_a_job_that_no_memory_holds_fails_its_call_alone(
    causal: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    Memory(20, monkeypatch)
    core = core_of(causal)
    failing, other = begin_encoding(core, [4, 30, 4]), begin_encoding(core, [5])
    states = iter(failing)
    core.step()
    assert next(states).length == 4
    assert [each.length for each in other] == [5]
    core.step()
    with pytest.raises(EncodingOutOfMemory, match="states of 30 tokens"):
        next(states)
    assert not core.busy
    again = begin_encoding(core, [20])
    core.step()
    assert [each.length for each in again] == [20]


PASS = 64  # rows
BLOCK = 2**15  # scores, and elements of partial results, at a time
LATER = (pytest.mark.slow, pytest.mark.nightly)

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", {}),
    "dense, ALiBi": ("mpt", {"max_seq_len": 4096}),
    "windows": ("mistral", {"sliding_window": 300}),
    "a mixture of experts": (
        "qwen3_moe",
        {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 4},
    ),
    "latents": (LATENT, {}),
}


@pytest.mark.parametrize(
    "shape",
    [pytest.param(shape, marks=() if shape == "dense" else pytest.mark.slow) for shape in SHAPES],
)
@pytest.mark.parametrize(
    "backend",
    [CpuAttentionBackend(), pytest.param(ReferenceAttentionBackend(), marks=LATER)],
)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=LATER)])
def test_memory_of_an_encoding_is_bounded(
    shape: str, backend: AttentionBackend, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `pass_bytes`, which is not far above. Beyond the states, a module of 2,000 tokens takes no
    more than one of 500; all scores of a layer would take 64 MB."""
    monkeypatch.setattr("ragcache.engine.engine.MAX_TOKENS_PER_PASS", PASS)
    for module in (reference, cpu):
        monkeypatch.setattr(module, "MOST_SCORES", BLOCK)
        monkeypatch.setattr(module, "MOST_RESULTS", BLOCK)
    monkeypatch.setattr(cpu, "WORKSPACE", BLOCK)
    family, changes = SHAPES[shape]
    sizes = {} if family == "mpt" else {"max_position_embeddings": 4096}
    causal = wrap_causal(tiny_model(family, dtype, **sizes, **changes))
    causal.backend = backend
    passes = count_passes(causal, monkeypatch)

    def beyond_states(tokens: int) -> int:
        job = EncodeJob(random_tokens(tokens))
        list(encode(causal, [job]))  # workspaces stay
        peak = peak_bytes(lambda: list(encode(causal, [job])))
        return peak - tokens * causal.computed_bytes_per_token

    short, long = beyond_states(500), beyond_states(2000)
    bounds = [causal.pass_bytes(PASS, tokens) for tokens in (500, 2000)]
    assert short < bounds[0] < 8 * short
    assert long < bounds[1] < 8 * long
    assert long - short < 2000 * 2 * causal.bytes_per_token  # keys and values, as multiplied
    assert set(passes) <= {PASS, 500 % PASS, 2000 % PASS}


def test_prompts_leave_a_part_of_every_step_to_encodings(causal: CausalLM) -> None:
    core = core_of(causal, config_of(causal, step_tokens=16, prefill_tokens=16))
    prompts = [plain_context(random_tokens(40, seed=number)) for number in range(9)]
    handles = [core.submit(Request(prompt, 1)) for prompt in prompts]
    core.add_encoding([EncodeJob(random_tokens(8))], StatesChannel(lambda: None))
    for step in range(1, 3):
        core.step()
        assert core.stats.encoded_tokens == 4 * step
        assert core.stats.prompt_tokens == 12 * step
    core.step()
    assert core.stats.prompt_tokens == 12 * 2 + 16, "nothing is left to encode"
    assert not any(handle.done for handle in handles[4:])
