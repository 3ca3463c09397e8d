"""Ends of answers, reports on them, and failures of one request alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from ragcache.engine import Request, RequestOutput, SamplingParams, TextStream
from ragcache.engine import core as core_module
from ragcache.engine.batch import ScheduledChunk
from ragcache.errors import DeadlineExceeded, InvalidRequest, PromptTooLong, UnusableLogits
from ragcache.models import CausalLM, wrap_causal
from tests.ragcache.engine.stepped_engine import (
    BLOCK_SIZE,
    ManualClock,
    SmallBlockRunner,
    SteppedCore,
    assert_all_blocks_free,
    config_of,
    core_of,
    plain_context,
)
from tests.tiny_models import VOCABULARY, random_tokens, tiny_model

PROMPT = random_tokens(9, seed=2)


@cache
def sharp_model() -> Any:
    """A model with larger weights than usual, so that answers do not repeat one token."""
    return tiny_model("llama", initializer_range=0.2)


@pytest.fixture(scope="module")
def causal() -> CausalLM:
    return wrap_causal(deepcopy(sharp_model()))


class Words:
    """A slow tokenizer: every id is a word of its own."""

    def decode(self, ids: list[int], **options: bool) -> str:
        return "".join(f"word{token} " for token in ids)

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return f"word{token_id}"


def words(stop: Sequence[str]) -> TextStream:
    return TextStream(Words(), stop)


@pytest.fixture(scope="module")
def answer(causal: CausalLM) -> tuple[int, ...]:
    """The greedy answer to the prompt; every token of it is a different one."""
    [completion] = core_of(causal).run(Request(plain_context(PROMPT), 12))
    assert len(set(completion.token_ids)) == 12
    return completion.token_ids


def one(core: SteppedCore, **changes: object) -> RequestOutput:
    [completion] = core.run(Request(plain_context(PROMPT), 12, **changes))  # type: ignore[arg-type]
    return completion


def test_a_stop_token_ends_an_answer_and_is_not_part_of_it(
    core: SteppedCore, answer: tuple[int, ...]
) -> None:
    stops = frozenset({answer[4], answer[7]})
    handle = core.submit(Request(plain_context(PROMPT), 12, stops, text=words))
    core.drain()
    [choice] = handle.result(0).choices
    assert (choice.token_ids, choice.finish_reason) == (answer[:4], "stop")
    assert (choice.stopped_by, choice.text) == (answer[4], Words().decode(list(answer[:4])))
    assert [piece.chosen.token for piece in handle if piece.chosen] == list(answer[:4])


def test_stop_tokens_may_be_ignored_or_come_later(
    core: SteppedCore, answer: tuple[int, ...]
) -> None:
    stops = frozenset({answer[4]})
    completion = one(core, stop_ids=stops, ignore_eos=True)
    assert (completion.token_ids, completion.finish_reason) == (answer, "length")
    later = one(core, stop_ids=stops, min_tokens=9).token_ids
    assert later[:4] == answer[:4]
    assert answer[4] not in later[:9]
    assert one(core, stop_ids=stops, min_tokens=4).token_ids == answer[:4]


def test_suppressed_tokens_are_never_chosen(core: SteppedCore, answer: tuple[int, ...]) -> None:
    plain = Request(plain_context(PROMPT), 12)
    found, beside = core.run(replace(plain, suppress_tokens=frozenset(answer)), plain)
    assert len(found.token_ids) == 12
    assert not set(found.token_ids) & set(answer)
    assert beside.token_ids == answer


@pytest.mark.parametrize("cut", [0, 3])
def test_a_stop_string_ends_an_answer_and_is_not_in_its_text(
    core: SteppedCore, answer: tuple[int, ...], cut: int
) -> None:
    """Also one that spans two tokens."""
    text = Words().decode(list(answer))
    place = text.index(f"word{answer[5]} ") + cut
    stop = text[place : place + 9]
    handle = core.submit(Request(plain_context(PROMPT), 12, stop=(stop, "absent"), text=words))
    core.drain()
    [choice] = handle.result(0).choices
    assert (choice.finish_reason, choice.stopped_by) == ("stop", stop)
    assert choice.text == text[:place]
    assert "".join(piece.text for piece in handle) == text[:place]
    spelled = choice.token_ids
    assert spelled == answer[: len(spelled)], "the tokens that spelled it belong to it"
    assert stop in Words().decode(list(spelled))
    assert stop not in Words().decode(list(spelled[:-1]))


def test_text_held_back_for_a_stop_string_comes_at_the_end(
    core: SteppedCore, answer: tuple[int, ...]
) -> None:
    end = Words().decode([answer[-1]])
    handle = core.submit(Request(plain_context(PROMPT), 12, stop=(end + "and on",), text=words))
    core.drain()
    *_, last = pieces = list(handle)
    assert (last.chosen, last.text) == (None, end)
    assert "".join(piece.text for piece in pieces) == Words().decode(list(answer))
    [choice] = handle.result(0).choices
    assert (choice.text, choice.finish_reason) == (Words().decode(list(answer)), "length")


@torch.no_grad()
def logits_after(tokens: list[int]) -> Tensor:
    """Return the logits of Hugging Face's own forward pass, [T, V]."""
    logits: Tensor = sharp_model()(torch.tensor([tokens])).logits[0]
    return logits


@pytest.mark.parametrize("count", [0, 3])
def test_log_probabilities_are_those_of_the_model(
    core: SteppedCore, answer: tuple[int, ...], count: int
) -> None:
    handle = core.submit(
        Request(plain_context(PROMPT), 12, sampling=SamplingParams(logprobs=count))
    )
    core.drain()
    [choice] = handle.result(0).choices
    assert tuple(chosen.token for chosen in choice.chosen) == choice.token_ids == answer
    assert [piece.chosen for piece in handle] == list(choice.chosen)
    expected = logits_after([*PROMPT, *answer])[len(PROMPT) - 1 : -1].log_softmax(-1)
    for row, chosen in zip(expected, choice.chosen, strict=True):
        assert chosen.logprob == pytest.approx(float(row[chosen.token]), abs=1e-4)
        values, tokens = row.topk(count)
        assert [token for token, _ in chosen.alternatives] == tokens.tolist()
        assert [logprob for _, logprob in chosen.alternatives] == pytest.approx(
            values.tolist(), abs=1e-4
        )


@pytest.mark.parametrize("stop", [False, True])
def test_the_first_place_has_the_log_probabilities_of_all_tokens(
    core: SteppedCore, answer: tuple[int, ...], stop: bool
) -> None:
    """Also where a stop token stands there, and whatever is drawn."""
    stops = frozenset({answer[0]}) if stop else frozenset()
    [choice] = one(core, stop_ids=stops, sampling=SamplingParams(first_logprobs=True)).choices
    assert choice.token_ids == (() if stop else answer)
    assert choice.first_logprobs is not None
    expected = logits_after(list(PROMPT))[-1].log_softmax(-1)
    torch.testing.assert_close(choice.first_logprobs, expected, rtol=0, atol=1e-4)
    assert one(core).choices[0].first_logprobs is None


@pytest.mark.parametrize(("prefill", "rows"), [(3, 256), (64, 256), (64, 2)])
def test_log_probabilities_of_the_prompt_come_with_it(
    causal: CausalLM, prefill: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_module, "SCORED_ROWS", rows)
    core = core_of(causal, config_of(causal, step_tokens=prefill, prefill_tokens=prefill))
    other = core.submit(Request(plain_context(PROMPT[:4]), 2))
    scored = Request(plain_context(PROMPT), 1, prompt_logprobs=5, tenant="shared")
    handles = [core.submit(scored) for _ in range(2)]
    core.drain()
    expected = logits_after([*PROMPT]).log_softmax(-1)
    wanted = [float(expected[at - 1, PROMPT[at]]) for at in range(len(PROMPT) - 5, len(PROMPT))]
    for handle in handles:
        output = handle.result(0)
        assert [each.token for each in output.prompt_logprobs] == list(PROMPT[-5:])
        found = [each.logprob for each in output.prompt_logprobs]
        assert found == pytest.approx(wanted, abs=1e-4)
        assert output.shared_tokens == 0, "every token is computed"
        assert output.token_ids == (int(expected[-1].argmax()),)
    assert other.result(0).prompt_logprobs == ()
    with pytest.raises(InvalidRequest, match="prompt_logprobs is 10"):
        Request(plain_context(PROMPT), 1, prompt_logprobs=10)


def test_a_whole_prompt_is_scored_as_by_a_dense_forward(
    causal: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of at most `SCORED_ROWS` prompt tokens exist at once."""
    monkeypatch.setattr(core_module, "SCORED_ROWS", 4)
    widths = []
    take = core_module.take_scores
    monkeypatch.setattr(
        core_module,
        "take_scores",
        lambda work, logits, *rest: (widths.append(len(logits)), take(work, logits, *rest))[1],
    )
    sampling = SamplingParams(logprobs=3)
    request = Request(plain_context(PROMPT), 1, prompt_logprobs=len(PROMPT), sampling=sampling)
    outputs = core_of(causal).run(*[request] * 3)
    expected = logits_after([*PROMPT]).log_softmax(-1)
    for output in outputs:
        first, *others = output.prompt_logprobs
        assert (first.token, first.logprob, first.alternatives) == (PROMPT[0], None, ())
        for at, each in enumerate(others, start=1):
            top = expected[at - 1].topk(3)
            assert each.token == PROMPT[at]
            assert each.logprob == pytest.approx(float(expected[at - 1, PROMPT[at]]), abs=1e-4)
            assert [token for token, _ in each.alternatives] == top.indices.tolist()
            likeliest = [value for _, value in each.alternatives]
            assert likeliest == pytest.approx(top.values.tolist(), abs=1e-4)
    assert max(widths) <= 4 + len(outputs)


@pytest.mark.parametrize(
    ("frequency", "presence"),
    [(-1.5, 0.0), pytest.param(2.0, 0.0, marks=pytest.mark.slow), (0.5, 2.0)],
)
def test_tokens_of_the_answer_are_penalized(
    core: SteppedCore, answer: tuple[int, ...], frequency: float, presence: float
) -> None:
    sampling = SamplingParams(frequency_penalty=frequency, presence_penalty=presence)
    [completion] = core.run(Request(plain_context(PROMPT), 20, sampling=sampling))
    expected: list[int] = []
    for _ in range(20):
        logits = logits_after([*PROMPT, *expected])[-1]
        for token in set(expected):
            logits[token] -= frequency * expected.count(token) + presence
        expected.append(int(logits.argmax()))
    assert completion.token_ids == tuple(expected)


def test_times_are_those_of_the_clock(causal: CausalLM) -> None:
    clock = ManualClock(50.0)
    core = core_of(causal, config_of(causal, running=1), clock)
    handles = [core.submit(Request(plain_context(PROMPT), limit)) for limit in (2, 1)]
    while core.busy:
        clock.now += 1
        core.step()
    first, second = (handle.result(0) for handle in handles)
    assert (first.submitted_at, first.admitted_at) == (50, 51)
    assert (first.first_token_at, first.finished_at) == (51, 52)
    assert (second.admitted_at, second.first_token_at, second.finished_at) == (53, 53, 53)
    assert (core.stats.admitted, core.stats.queued) == (2, 1 + 3)


def test_request_fails_at_its_deadline(causal: CausalLM) -> None:
    clock = ManualClock()
    core = core_of(causal, config_of(causal, running=1), clock)
    running = core.submit(Request(plain_context(PROMPT), 50, timeout=5.0, tenant="a"))
    queued = core.submit(Request(plain_context(PROMPT), 50, timeout=3.0))
    patient = core.submit(Request(plain_context(PROMPT), 2, timeout=60.0))
    for _ in range(3):
        core.step()
        clock.now += 1
    core.step()
    with pytest.raises(DeadlineExceeded, match=r"3\.0 s were over while it waited in the queue"):
        queued.result(0)
    assert not running.done
    clock.now += 2
    core.step()
    with pytest.raises(DeadlineExceeded, match=r"5\.0 s were over while it ran"):
        running.result(0)
    assert running.channel.count == 4, "what came before is there"
    core.drain()
    assert patient.result(0).finish_reason == "length"
    assert_all_blocks_free(core)


def test_requests_that_could_never_run_are_refused(causal: CausalLM) -> None:
    core = core_of(causal, config_of(causal, blocks=5))
    core.checker.check_request(Request(plain_context(PROMPT), 5 * BLOCK_SIZE - len(PROMPT)))
    with pytest.raises(PromptTooLong, match=r"length is 20 tokens .* needs 21 tokens"):
        core.checker.check_request(Request(plain_context(PROMPT), 5 * BLOCK_SIZE - len(PROMPT) + 1))
    core = core_of(causal, config_of(causal, blocks=500))
    core.checker.check_request(Request(plain_context(PROMPT), causal.window - len(PROMPT)))
    with pytest.raises(PromptTooLong, match=f"length is {causal.window} tokens.* position 9"):
        core.checker.check_request(Request(plain_context(PROMPT), causal.window - len(PROMPT) + 1))


class NanLogitsRunner(SmallBlockRunner):
    """Returns NaN logits for requests whose last token is `token`."""

    def __init__(self, model: CausalLM, token: int) -> None:
        super().__init__(model)
        self.token = token

    def prepare_batch(self, chunks: Sequence[ScheduledChunk]) -> Callable[[], Tensor]:
        step = super().prepare_batch(chunks)
        asked = [chunk for chunk in chunks if chunk.wants_logits]
        broken = [row for row, chunk in enumerate(asked) if chunk.token_ids[-1] == self.token]

        def spoiled() -> Tensor:
            logits = step().clone()
            logits[broken] = torch.nan
            return logits

        return spoiled


def test_unusable_logits_fail_their_request_alone(
    causal: CausalLM, answer: tuple[int, ...]
) -> None:
    core = SteppedCore(NanLogitsRunner(causal, token=11))
    fine = core.submit(Request(plain_context(PROMPT), 12))
    bad = core.submit(Request(plain_context([*PROMPT, 11]), 12, n=3))
    core.drain()
    with pytest.raises(UnusableLogits):
        bad.result(0)
    assert fine.result(0).token_ids == answer
    assert_all_blocks_free(core)


def test_where_all_tokens_are_forbidden_the_request_fails(core: SteppedCore) -> None:
    everything = frozenset(range(VOCABULARY))
    request = Request(plain_context(PROMPT), 12, everything, min_tokens=1, n=2)
    handle = core.submit(request)
    core.drain()
    with pytest.raises(UnusableLogits):
        handle.result(0)
    assert_all_blocks_free(core)
