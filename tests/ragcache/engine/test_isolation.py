"""No request can end or change another: states that are no numbers, windows, unknown tokens, texts
that cannot be made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from ragcache.attention import ReferenceAttentionBackend
from ragcache.engine import (
    Context,
    EncodeJob,
    EngineConfig,
    LLMEngine,
    Request,
    RequestOutput,
    SamplingParams,
    Segment,
    TextStream,
    encode,
)
from ragcache.engine.runner import ModelRunner, RaggedModelRunner
from ragcache.errors import InvalidRequest, PromptTooLong, TextFailed, UnusableLogits
from ragcache.models import CausalLM, wrap_causal
from ragcache.models.hf_patch import number_layers
from ragcache.states import KVStates
from tests.interpreted import interpreted
from tests.ragcache.engine.delayed_runner import delayed_core
from tests.ragcache.engine.stepped_engine import (
    BLOCK_SIZE,
    SteppedCore,
    assert_all_blocks_free,
    core_of,
    plain_context,
)
from tests.ragcache.engine.test_core_answers import Words
from tests.ragcache.engine.test_device_runner import device_runner
from tests.ragcache.models.test_positions import PARAMETERS
from tests.tiny_models import VOCABULARY, random_tokens, tiny_model

PROMPT = random_tokens(9, seed=2)
SAMPLING = SamplingParams(logprobs=0)


@pytest.fixture(scope="module")
def causal() -> CausalLM:
    """With larger weights than usual: every answer depends on every token before it."""
    causal = wrap_causal(tiny_model("llama", initializer_range=0.2, num_hidden_layers=1))
    number_layers(causal.model)
    return causal


def reference_runner(causal: CausalLM) -> ModelRunner:
    """Computes attention by definition."""
    own = copy(causal)
    own.backend = ReferenceAttentionBackend()
    return RaggedModelRunner(own)


RUNNERS = {"cpu": RaggedModelRunner, "reference": reference_runner, "device": device_runner}


CASES = [
    pytest.param(*case, marks=[interpreted, pytest.mark.slow] if case[0] == "device" else [])
    for case in product(RUNNERS, ("while they decode", "from the start"), ("values", "keys"))
]


def segments_of(causal: CausalLM, lengths: Sequence[int]) -> tuple[Segment, ...]:
    """New states in a row, each in memory of its own."""
    found, start = [], 0
    for length in lengths:
        [states] = encode(causal, [EncodeJob(random_tokens(length, seed=length))])
        found.append(Segment(states, start))
        start += length
    return tuple(found)


def over(segments: tuple[Segment, ...], own: int, limit: int) -> Request:
    start = segments[-1].end if segments else 0
    end = start + own
    tokens = tuple(random_tokens(own, seed=own))
    return Request(
        Context(segments, tokens, tuple(range(start, end)), end), limit, sampling=SAMPLING
    )


def spoil(states: Any, part: str) -> None:
    tensor: Tensor = getattr(states, part)
    tensor.fill_(torch.nan)


def logprobs_of(output: RequestOutput) -> list[float | None]:
    return [each.logprob for each in output.choices[0].chosen]


@pytest.mark.usefixtures("eager_layers")
@pytest.mark.parametrize(("runner", "when", "part"), CASES)
def test_states_that_are_no_numbers_fail_their_own_request_alone(
    causal: CausalLM, runner: str, when: str, part: str
) -> None:
    make: Any = RUNNERS[runner]
    shared = segments_of(causal, (7,))
    neighbours = [over((), 4, 3), over(shared, 2, 4)]
    config = EngineConfig(2**18, running=8)
    expected = SteppedCore(make(causal), config).run(*neighbours)
    core = SteppedCore(make(causal), config)
    handles = [core.submit(request) for request in neighbours]
    bad = [replace(each, start=each.start + 7) for each in segments_of(causal, (5, 6))]
    failing = core.submit(over((*shared, *bad), 2, 5))
    if when == "while they decode":
        core.step()
        core.step()
    for segment in bad:
        spoil(segment.states, part)
    core.drain()
    with pytest.raises(UnusableLogits):
        failing.result(0)
    for handle, alone in zip(handles, expected, strict=True):
        assert handle.result(0).token_ids == alone.token_ids
        assert logprobs_of(handle.result(0)) == pytest.approx(logprobs_of(alone), abs=1e-4)
    [again] = core.run(over((), 4, 1))  # in the blocks of the request that failed
    assert again.token_ids == expected[0].token_ids[:1]


@pytest.mark.parametrize("make", [core_of, delayed_core])
def test_blocks_of_states_that_are_no_numbers_are_not_read_again(
    make: Callable[[CausalLM], SteppedCore],
) -> None:
    """The same prompt is right once its segment is: nothing of the failed request is shared."""
    causal = wrap_causal(tiny_model("llama", initializer_range=0.2))
    [segment] = segments_of(causal, (7,))
    request = over((replace(segment, name="notes"),), 3 * BLOCK_SIZE + 2, 3)
    request = replace(request, tenant="a")
    [expected] = make(causal).run(request)
    core, keys = make(causal), segment.states.keys.clone()
    spoil(segment.states, "keys")
    failing = [core.submit(each) for each in (request, replace(request, n=2))]
    core.drain()
    for handle in failing:
        with pytest.raises(UnusableLogits):
            handle.result(0)
    segment.states.keys.copy_(keys)
    shared = []
    for _ in range(2):
        [found] = core.run(request)
        assert found.token_ids == expected.token_ids
        shared.append(found.shared_tokens)
    assert shared == [0, 3 * BLOCK_SIZE]
    assert_all_blocks_free(core)


class FailingWords(Words):
    """A slow tokenizer that cannot decode some token."""

    def __init__(self, unknown: int) -> None:
        self.unknown = unknown

    def decode(self, ids: list[int], **options: bool) -> str:
        if self.unknown in ids:
            raise OverflowError("out of range integral type conversion attempted")
        return super().decode(ids, **options)


@pytest.mark.parametrize("make", [core_of, delayed_core])
@pytest.mark.parametrize("at", [0, 3, 11, "the second text"])
def test_a_text_that_cannot_be_made_fails_its_request_alone(
    causal: CausalLM, make: Any, at: int | str
) -> None:
    [alone] = core_of(causal).run(Request(plain_context(PROMPT), 12))
    words, made = (
        FailingWords(alone.token_ids[at] if isinstance(at, int) else -1),
        list[TextStream](),
    )

    def text(stop: Sequence[str]) -> TextStream:
        if made and not isinstance(at, int):
            raise OverflowError("no second one")
        made.append(TextStream(words, stop))
        return made[-1]

    core = make(causal)
    good = core.submit(Request(plain_context(PROMPT), 12))
    bad = core.submit(Request(plain_context(PROMPT), 12, n=3, text=text))
    core.drain()
    with pytest.raises(TextFailed, match="could not be made: OverflowError") as caught:
        bad.result(0)
    assert isinstance(caught.value.__cause__, OverflowError)
    assert good.result(0).token_ids == alone.token_ids
    assert_all_blocks_free(core)


SWITCH = 64
LONGROPE = PARAMETERS | {"original_max_position_embeddings": SWITCH}


def windowed(family: str) -> CausalLM:
    """A model of 64 positions: beyond, it fails or takes other frequencies for the whole batch."""
    if family == "llama":
        return wrap_causal(tiny_model(family, rope_parameters=dict(LONGROPE)))
    return wrap_causal(tiny_model(family, max_position_embeddings=SWITCH))


BEYOND = {
    "longer": EncodeJob(random_tokens(SWITCH + 1)),
    "begins late": EncodeJob([1, 2], SWITCH - 1),
    "over a gap": EncodeJob([1, 2], 0, None, (0, SWITCH)),
    "before the first": EncodeJob([1, 2], -1),
    "unknown token": EncodeJob([1, VOCABULARY]),
    "negative token": EncodeJob([-1, 1]),
    "too few positions": EncodeJob([1, 2], 0, None, (0,)),
}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_encoding_outside_of_the_window_is_refused(family: str) -> None:
    causal = windowed(family)
    request = Request(plain_context(PROMPT), 20, sampling=SAMPLING)
    with LLMEngine(causal, EngineConfig(2**22)) as engine:
        alone = engine.submit_request(request).result()
        running = engine.submit_request(request)
        events = iter(running)
        next(events)
        for job in BEYOND.values():
            with pytest.raises((PromptTooLong, InvalidRequest)):
                list(engine.encode([EncodeJob([1]), job]))
            with pytest.raises((PromptTooLong, InvalidRequest)):
                list(encode(causal, [job]))
        [states] = engine.encode([EncodeJob([1, 2], SWITCH - 2)])
        found = running.result()
    assert states.length == 2, "the window may be filled"
    assert found.token_ids == alone.token_ids
    assert logprobs_of(found) == pytest.approx(logprobs_of(alone), abs=1e-4)


def test_refusals_name_the_place() -> None:
    causal = windowed("gpt2")
    with pytest.raises(PromptTooLong, match="position 65, but the model's window holds 64"):
        list(encode(causal, [EncodeJob([1, 2], 64)]))
    with pytest.raises(InvalidRequest, match=f"token {VOCABULARY} is none of the model's"):
        list(encode(causal, [BEYOND["unknown token"]]))
    with pytest.raises(InvalidRequest, match="2 tokens at 1 positions"):
        list(encode(causal, [BEYOND["too few positions"]]))


def test_requests_outside_of_the_window_are_refused() -> None:
    core = core_of(windowed("llama"))
    model = core.runner.model
    keys, values = model.new_states(4)
    states = KVStates(keys.zero_(), values.zero_(), 0)
    fine = Context((Segment(states, SWITCH - 4),), (1,), (9,), 10)
    core.checker.check_request(Request(fine, 2))
    refused = [
        replace(fine, segments=(Segment(states, SWITCH - 3),)),
        replace(fine, segments=(Segment(states, -1),)),
        replace(fine, segments=(Segment(replace(states, start=SWITCH), 0),)),
        replace(fine, position_ids=(SWITCH,)),
        replace(fine, token_ids=(VOCABULARY,)),
    ]
    for context in refused:
        with pytest.raises((PromptTooLong, InvalidRequest)):
            core.checker.check_request(Request(context, 2))
    with pytest.raises(PromptTooLong, match="placed at 61 to 65"):
        core.checker.check_jobs([EncodeJob([1], 60, Segment(states, SWITCH - 3))])
