"""The engine beside `generate`, what requests share, and that nothing is left behind."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from ragcache.engine import Context, EncodeJob, Request, SamplingParams, Segment, encode
from ragcache.engine.sampler import Sampler
from ragcache.errors import InvalidRequest
from ragcache.models import CausalLM, wrap_causal
from tests.conftest import scaled
from tests.ragcache.engine.stepped_engine import (
    BLOCK_SIZE,
    SmallBlockRunner,
    SteppedCore,
    assert_all_blocks_free,
    config_of,
    core_of,
    plain_context,
)
from tests.tiny_models import FAMILY_PARAMS, random_tokens, tiny_model

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


@pytest.fixture(scope="module", params=FAMILY_PARAMS)
def pair(request: pytest.FixtureRequest) -> tuple[Any, CausalLM]:
    """A model as Hugging Face runs it, and the same one patched."""
    return tiny_model(request.param), wrap_causal(tiny_model(request.param))


def test_greedy_answers_are_those_of_generate(pair: tuple[Any, CausalLM]) -> None:
    model, causal = pair
    core = core_of(causal, config_of(causal, step_tokens=16, prefill_tokens=16))
    completions = core.run(*(Request(plain_context(prompt), LIMIT) for prompt in PROMPTS))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert completion.token_ids == reference(model, prompt)


@pytest.fixture(scope="module")
def llama() -> tuple[Any, CausalLM]:
    return tiny_model("llama"), wrap_causal(tiny_model("llama"))


@pytest.mark.parametrize("penalty", [pytest.param(0.6, marks=pytest.mark.slow), 1.4])
def test_repetitions_are_penalized_as_by_generate(
    llama: tuple[Any, CausalLM], penalty: float
) -> None:
    model, causal = llama
    sampling = SamplingParams(repetition_penalty=penalty)
    requests = [Request(plain_context(prompt), LIMIT, sampling=sampling) for prompt in PROMPTS]
    answers = [completion.token_ids for completion in core_of(causal).run(*requests)]
    assert answers == [reference(model, p, repetition_penalty=penalty) for p in PROMPTS]
    assert answers != [reference(model, p) for p in PROMPTS], "the penalty changes something"


def penalized(causal: CausalLM, prompt: list[int], cached: int, penalty: float) -> Request:
    """A request that reads the states of its first tokens."""
    [states] = encode(causal, [EncodeJob(prompt[:cached])])
    segments = (Segment(states, 0, token_ids=prompt[:cached]),)
    positions = tuple(range(cached, len(prompt)))
    context = Context(segments, tuple(prompt[cached:]), positions, len(prompt))
    return Request(context, LIMIT, sampling=SamplingParams(repetition_penalty=penalty))


class DeviceSampledRunner(SmallBlockRunner):
    """Samples as on a GPU."""

    def create_sampler(self) -> Sampler:
        return Sampler(torch.device("cpu"), kernels=True)


@pytest.mark.parametrize(
    "runner", [pytest.param(SmallBlockRunner, marks=pytest.mark.slow), DeviceSampledRunner]
)
def test_repeated_cached_tokens_are_penalized_as_by_generate(
    llama: tuple[Any, CausalLM], runner: type[SmallBlockRunner]
) -> None:
    model, causal = llama
    for prompt, penalty in product(PROMPTS[3:], (0.6, 1.4)):
        core = SteppedCore(runner(causal))
        [output] = core.run(penalized(causal, prompt, len(prompt) - 2, penalty))
        assert output.token_ids == reference(model, prompt, repetition_penalty=penalty)


def test_a_repetition_penalty_needs_known_tokens(llama: tuple[Any, CausalLM]) -> None:
    request = penalized(llama[1], PROMPTS[3], 9, 1.4)
    [segment] = request.context.segments
    for known, found in ((None, "none"), (PROMPTS[3][:8], "8")):
        context = replace(request.context, segments=(replace(segment, token_ids=known),))
        with pytest.raises(InvalidRequest, match=f"segment 0 of 9 tokens has {found} in"):
            replace(request, context=context)
        replace(request, context=context, sampling=SamplingParams(frequency_penalty=0.5))


@pytest.mark.parametrize("least", [0, 8])
def test_stop_tokens_end_answers_as_in_generate(llama: tuple[Any, CausalLM], least: int) -> None:
    model, causal = llama
    for prompt in PROMPTS[2:]:
        stop = reference(model, prompt)[4]
        options = {"min_new_tokens": least} if least else {}
        expected = reference(model, prompt, eos_token_id=stop, **options)
        request = Request(plain_context(prompt), LIMIT, frozenset({stop}), min_tokens=least)
        [completion] = core_of(causal).run(request)
        ended = completion.finish_reason == "stop"
        assert completion.token_ids == (expected[:-1] if ended else expected)
        assert completion.choices[0].stopped_by == (stop if ended else None)
        assert len(completion.token_ids) >= least


PROMPT = random_tokens(22)  # five full blocks, and one that fills


@pytest.fixture
def sharing_core(causal: CausalLM) -> SteppedCore:
    return core_of(causal)


@pytest.mark.parametrize(("steps", "full"), [(1, 5), (12, 8)])
def test_identical_prompts_and_answers_share_their_full_blocks(
    sharing_core: SteppedCore, steps: int, full: int
) -> None:
    """Though each request wrote its own 22 and 33 tokens."""
    request = Request(plain_context(PROMPT), 20, tenant="a")
    handles = [sharing_core.submit(request) for _ in range(4)]
    for _ in range(steps):
        sharing_core.step()
    assert sharing_core.pool.used_count == full + 4, "and one that fills for each"
    sharing_core.drain()
    assert len({handle.result(0).token_ids for handle in handles}) == 1
    assert_all_blocks_free(sharing_core)


def test_a_later_prompt_finds_retained_blocks(sharing_core: SteppedCore) -> None:
    first = sharing_core.submit(Request(plain_context(PROMPT), 30, tenant="a"))
    sharing_core.step()
    [second] = sharing_core.run(Request(plain_context([*PROMPT[:17], 1, 2]), 2, tenant="a"))
    assert second.shared_tokens == 16
    assert sharing_core.stats.shared_tokens == 16
    assert sharing_core.stats.prompt_tokens == 22 + 3
    assert first.done


@pytest.mark.parametrize("tenant", [None, "b"])
def test_nothing_is_found_across_tenants(sharing_core: SteppedCore, tenant: str | None) -> None:
    sharing_core.run(
        Request(plain_context(PROMPT), 2, tenant="a"), Request(plain_context(PROMPT), 2)
    )
    [completion] = sharing_core.run(Request(plain_context(PROMPT), 2, tenant=tenant))
    assert completion.shared_tokens == 0


def test_the_next_turn_of_a_chat_finds_question_and_answer(
    sharing_core: SteppedCore, causal: CausalLM
) -> None:
    [states] = encode(causal, [EncodeJob(random_tokens(9))])
    segments = (Segment(states, 0, "handbook"),)

    def turn(tokens: list[int]) -> Request:
        end = 9 + len(tokens)
        context = Context(segments, tuple(tokens), tuple(range(9, end)), end)
        return Request(context, 11, tenant="a")

    [first] = sharing_core.run(turn(PROMPT))
    chat = [*PROMPT, *first.token_ids, 5, 6, 7]
    [second] = sharing_core.run(turn(chat))
    # the last token of the answer was never an input: its states do not stand
    stands = (len(PROMPT) + len(first.token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert second.shared_tokens == stands == 32
    [alone] = core_of(causal).run(turn(chat))
    assert (alone.shared_tokens, alone.token_ids) == (0, second.token_ids)


@pytest.mark.parametrize(("name", "start"), [("other", 0), ("handbook", 1), (None, 0)])
def test_blocks_behind_other_segments_are_not_found(
    sharing_core: SteppedCore, causal: CausalLM, name: str | None, start: int
) -> None:
    [states] = encode(causal, [EncodeJob(random_tokens(9))])
    for segment, shared in ((Segment(states, 0, "handbook"), 0), (Segment(states, start, name), 0)):
        context = Context((segment,), tuple(PROMPT), tuple(range(10, 32)), 32)
        [completion] = sharing_core.run(Request(context, 2, tenant="a"))
        assert completion.shared_tokens == shared
    context = Context((Segment(states, 0, "handbook"),), tuple(PROMPT), tuple(range(10, 32)), 32)
    assert sharing_core.run(Request(context, 2, tenant="a"))[0].shared_tokens == 20


def test_a_block_that_begins_alike_is_copied(
    causal: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragcache.engine.kv_cache.FEWEST_ALIKE", 1)
    core = core_of(causal)
    core.run(Request(plain_context([*PROMPT, *PROMPT]), 2, tenant="a"))
    for length in (1, 3, 15, 18, 21):
        request = Request(plain_context([*PROMPT[:length], 1, 2, 3]), 9, tenant="a")
        [output] = core.run(request)
        assert output.shared_tokens == length
        [alone] = core_of(causal).run(request)
        assert output.token_ids == alone.token_ids
    assert_all_blocks_free(core)


@pytest.mark.parametrize(("fewest", "shared"), [(8, [0, 12, 8, 16]), (1, [0, 14, 10, 16])])
def test_blocks_before_segments_are_found_whatever_follows_them(
    sharing_core: SteppedCore,
    causal: CausalLM,
    monkeypatch: pytest.MonkeyPatch,
    fewest: int,
    shared: list[int],
) -> None:
    """A chat whose documents move shares its instruction and history."""
    monkeypatch.setattr("ragcache.engine.kv_cache.FEWEST_ALIKE", fewest)
    here, there = encode(causal, [EncodeJob([*random_tokens(8), last]) for last in (1, 2)])

    def request(*segments: Segment, own: int) -> Request:
        tokens = [*PROMPT[:14], *random_tokens(own)]
        places = [at for at in range(60) if not any(s.start <= at < s.end for s in segments)]
        end = max(places[len(tokens) - 1] + 1, *(each.end for each in segments))
        return Request(
            Context(segments, tuple(tokens), tuple(places[: len(tokens)]), end), 6, tenant="a"
        )

    found = []
    for each in (
        request(Segment(here, 14, "one"), own=5),
        request(Segment(there, 14, "other"), own=5),
        request(Segment(there, 10, "other"), own=9),
        request(Segment(there, 14, "other"), Segment(here, 25, "one"), own=9),
    ):
        [output] = sharing_core.run(each)
        [alone] = core_of(causal).run(each)
        assert output.token_ids == alone.token_ids
        found.append(output.shared_tokens)
    assert found == shared, "the last one shares a block between its documents, too"


@pytest.mark.parametrize("tenant", [None, "a"])
def test_the_answers_of_one_request_share_its_prompt(
    sharing_core: SteppedCore, causal: CausalLM, tenant: str | None
) -> None:
    sampling = SamplingParams(temperature=2, seed=4)
    request = Request(plain_context(PROMPT), 3, n=4, sampling=sampling, tenant=tenant)
    handle = sharing_core.submit(request)
    sharing_core.step()
    assert (sharing_core.running, sharing_core.pool.used_count) == (4, 5 + 4)
    sharing_core.drain()
    assert sharing_core.stats.prompt_tokens == 22 + 3, "only the last token is computed for each"
    choices = [choice.token_ids for choice in handle.result(0).choices]
    assert len(set(choices)) == 4, "each has random numbers of its own"
    for index, answer in enumerate(choices):
        own = [p.chosen.token for p in handle if p.choice == index and p.chosen is not None]
        assert tuple(own) == answer
    assert_all_blocks_free(sharing_core)
    [one] = core_of(causal).run(replace(request, n=1))
    assert one.token_ids == choices[0]


def test_retained_blocks_never_keep_a_request_out(causal: CausalLM) -> None:
    sharing_core = core_of(causal, config_of(causal, blocks=8))
    for seed in range(6):
        tokens = random_tokens(26, seed=seed)
        [completion] = sharing_core.run(Request(plain_context(tokens), 5, tenant="a"))
        [alone] = core_of(causal).run(Request(plain_context(tokens), 5))
        assert completion.token_ids == alone.token_ids
        assert sharing_core.kv_manager.radix_cache.retained <= 4, (
            "half of the pool, as the settings say"
        )
    assert_all_blocks_free(sharing_core)


FEW, MANY = 200, scaled(10_000)
BATCH = 50


@pytest.fixture(scope="module")
def smallest_model() -> CausalLM:
    """As small as a model can be."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "head_dim": 4, "vocab_size": 16}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    return wrap_causal(tiny_model("llama", **sizes, **heads))


@pytest.fixture
def tracing() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def request(number: int) -> Request:
    """Some leave a block to be found, some find one, some have several answers."""
    sampling = (
        SamplingParams(temperature=1, presence_penalty=1) if number % 5 == 0 else SamplingParams()
    )
    several = 1 + (number % 20 == 0)
    if number % 3:
        return Request(plain_context([number % 7]), 1 + number % 2, n=several, sampling=sampling)
    digits = [number % 16, number // 16 % 16, number // 256 % 16, number % 2, 5]
    return Request(plain_context(digits), 1, tenant=number % 4, n=several, sampling=sampling)


def serve(core: SteppedCore, count: int) -> None:
    for begin in range(0, count, BATCH):
        handles = [core.submit(request(begin + at)) for at in range(BATCH)]
        handles[7].cancel()
        core.step()
        handles[8].cancel()
        core.drain()
        assert all(handle.done for handle in handles)


def held(core: SteppedCore) -> tuple[int, int, int]:
    """Python objects that the collector knows; nodes of the radix cache; traced bytes."""
    gc.collect()
    cache = core.kv_manager.radix_cache
    traced, _ = tracemalloc.get_traced_memory()
    return len(gc.get_objects()), len(cache), traced


@pytest.mark.slow
def test_thousands_of_requests_leave_nothing_behind(
    smallest_model: CausalLM, tracing: None
) -> None:
    core = core_of(smallest_model, config_of(smallest_model, blocks=60))
    cache = core.kv_manager.radix_cache
    serve(core, FEW)
    assert cache.retained == cache.budget, "what is retained grows no more"
    serve(core, MANY)  # tables of the interpreter have grown to their size, too
    objects, nodes, traced = held(core)
    serve(core, MANY)
    objects_now, nodes_now, traced_now = held(core)
    assert core.stats.admitted > 0.9 * 2 * MANY
    assert nodes_now == nodes == cache.retained
    assert objects_now - objects < 100
    assert traced_now - traced < 32 * MANY, "one object a request would be more"
    assert_all_blocks_free(core)
