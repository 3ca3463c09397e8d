"""Hybrid models in the engine: recurrent states of each request, as Hugging Face computes them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ragcache.engine import EncodeJob, EngineConfig, Request, Segment, encode
from ragcache.engine.batch import ScheduledChunk
from ragcache.engine.kv_cache_manager import HybridCacheManager
from ragcache.errors import UnsupportedModel
from ragcache.models import CausalLM, composition, wrap_causal
from ragcache.states import KVStates
from tests.conftest import scaled
from tests.ragcache.engine.stepped_engine import (
    BLOCK_SIZE,
    Answer,
    SmallBlockRunner,
    SteppedCore,
    assert_all_blocks_free,
    plain_context,
)
from tests.tiny_hybrids import HYBRID_PARAMS, tiny_hybrid
from tests.tiny_models import random_tokens

NEAR = {"rtol": 1e-4, "atol": 1e-4}  # of log-probabilities
LIMIT = 6
PROMPT = random_tokens(22)  # five full blocks, and one that fills


class Pair:
    """A model as Hugging Face computes it, and patched."""

    def __init__(self, family: str) -> None:
        self.plain = tiny_hybrid(family)
        self.causal: CausalLM = wrap_causal(copy.deepcopy(self.plain))

    def log_probs(self, tokens: Sequence[int]) -> Tensor:
        """Log-probabilities behind every token of a text, from one pass of Hugging Face's model."""
        with torch.no_grad():
            logits: Tensor = self.plain(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return logits.log_softmax(-1)

    def check_answer(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Assert that a greedy answer has the likeliest tokens."""
        found = self.log_probs([*prompt, *answer])[len(prompt) - 1 : -1]
        chosen = found.gather(1, torch.tensor(answer)[:, None])[:, 0]
        torch.testing.assert_close(chosen, found.max(-1).values, **NEAR)

    def core(
        self,
        blocks: int = 200,
        states: int = 60,
        runner: Callable[[CausalLM], SmallBlockRunner] = SmallBlockRunner,
        **limits: int,
    ) -> SteppedCore:
        """A core with memory for some blocks and, as far as they take half of it, states."""
        nbytes = blocks * BLOCK_SIZE * self.causal.computed_bytes_per_token
        nbytes += states * self.causal.recurrent_bytes
        return SteppedCore(runner(self.causal), EngineConfig(nbytes, **limits))


@pytest.fixture(scope="module", params=HYBRID_PARAMS)
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(str(request.param))


@pytest.fixture(scope="module")
def mamba() -> Pair:
    return Pair("bamba")


def shared(tokens: Sequence[int], new: int = LIMIT, **options: Any) -> Request:
    """A request whose states others may find."""
    return Request(plain_context(tokens), new, tenant="a", **options)


def manager(core: SteppedCore) -> HybridCacheManager:
    assert isinstance(core.kv_manager, HybridCacheManager)
    return core.kv_manager


def test_the_delta_rule_answers_as_hugging_face() -> None:
    """The other families' kinds are quicker, and go through all tests."""
    delta = Pair("qwen3_5_text")
    core = delta.core(prefill_tokens=16)
    [output] = core.run(shared(PROMPT, 4))
    delta.check_answer(PROMPT, output.token_ids)


def test_log_probabilities_of_a_prompt_are_hugging_faces(pair: Pair) -> None:
    """In portions, beside another request."""
    core = pair.core(step_tokens=7, prefill_tokens=7)
    request = Request(plain_context(PROMPT), 1, prompt_logprobs=len(PROMPT))
    other = core.submit(Request(plain_context(random_tokens(31, seed=2)), 3))
    [output] = core.run(request)
    expected = pair.log_probs(PROMPT)[:-1].gather(1, torch.tensor(PROMPT)[1:, None])[:, 0]
    found = torch.tensor([each.logprob for each in output.prompt_logprobs[1:]])
    torch.testing.assert_close(found, expected, **NEAR)
    assert other.done


def test_answers_of_a_batch_are_hugging_faces(pair: Pair) -> None:
    prompts = [random_tokens(length, seed=length) for length in (1, 2, 4, 23, 50)]
    core = pair.core(step_tokens=16, prefill_tokens=16)
    for prompt, output in zip(
        prompts, core.run(*(Request(plain_context(p), LIMIT) for p in prompts)), strict=True
    ):
        pair.check_answer(prompt, output.token_ids)
    assert_all_blocks_free(core)


def test_the_next_turn_of_a_chat_resumes_behind_the_answer(pair: Pair) -> None:
    core = pair.core()
    [first] = core.run(shared(PROMPT))
    chat = [*PROMPT, *first.token_ids, 5, 6, 7]
    [second] = core.run(shared(chat))
    stands = (len(PROMPT) + LIMIT - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert second.shared_tokens == stands
    pair.check_answer(chat, second.token_ids)


def test_several_answers_continue_one_prompt(pair: Pair) -> None:
    for length in (22, 25):  # within a block, and behind one
        prompt = random_tokens(length, seed=length)
        core = pair.core()
        [output] = core.run(Request(plain_context(prompt), LIMIT, n=3))
        assert len({choice.token_ids for choice in output.choices}) == 1, "all are greedy"
        pair.check_answer(prompt, output.token_ids)
        assert core.stats.prompt_tokens == length + 2, "the others compute the last token only"
        assert_all_blocks_free(core)


def test_the_third_prompt_resumes_where_two_parted(mamba: Pair) -> None:
    core = mamba.core()
    begin = random_tokens(18)
    ends = [random_tokens(9, seed=n) for n in (1, 2, 3)]
    found = []
    for end in ends:
        [output] = core.run(shared([*begin, *end]))
        mamba.check_answer([*begin, *end], output.token_ids)
        found.append(output.shared_tokens)
    assert found == [0, 0, 16], "states are kept where the second prompt left the first one's path"


def test_blocks_without_recurrent_states_are_not_resumed(mamba: Pair) -> None:
    core = mamba.core()
    core.run(shared(PROMPT))
    [output] = core.run(shared([*PROMPT[:14], 1, 2]))
    assert output.shared_tokens == 0
    mamba.check_answer([*PROMPT[:14], 1, 2], output.token_ids)


def test_requests_without_a_tenant_keep_no_recurrent_states(mamba: Pair) -> None:
    core = mamba.core()
    core.run(Request(plain_context(PROMPT), LIMIT))
    assert manager(core).snapshots.snapshot_count == 0


def test_the_oldest_recurrent_states_are_dropped(mamba: Pair) -> None:
    core = mamba.core(states=12, running=1)
    snapshots = manager(core).snapshots
    prompts = [random_tokens(9, seed=n) for n in range(20)]
    for prompt in prompts:
        core.run(shared(prompt, 1))
        assert snapshots.snapshot_count <= snapshots.capacity
    assert snapshots.snapshot_count == snapshots.capacity
    outputs = [core.run(shared(prompt, 1))[0] for prompt in (prompts[-1], prompts[0])]
    assert [output.shared_tokens for output in outputs] == [8, 0]


def test_an_answer_keeps_states_at_its_last_block_only(mamba: Pair) -> None:
    core = mamba.core()
    core.run(shared(PROMPT, 12))
    assert manager(core).snapshots.snapshot_count == 2, "at the end of prompt and answer"


def test_memory_limits_the_sequences_that_run_together(mamba: Pair) -> None:
    states = 9
    core = mamba.core(blocks=1, states=2 * states)
    assert core.config.running == states // 3
    handles = [core.submit(Request(plain_context(PROMPT[:n]), 3)) for n in range(4, 10)]
    core.step()
    assert core.running == states // 3
    core.drain()
    assert all(handle.done for handle in handles)


def test_an_answer_that_repeats_its_prompt_is_not_drafted(mamba: Pair) -> None:
    """A recurrent state could not forget a wrong draft."""
    core = mamba.core()
    prompt = [5, 6, 7, 8] * 5
    [output] = core.run(shared(prompt))
    mamba.check_answer(prompt, output.token_ids)
    assert core.config.draft_tokens == core.stats.drafted_tokens == 0


def test_preempted_answers_are_the_same(mamba: Pair) -> None:
    core = mamba.core(running=4)
    prompts = [random_tokens(9, seed=n) for n in range(4)]
    requests = [shared(prompt, 12) for prompt in prompts]
    core.pool.allocate_blocks(core.pool.free_count - 15)  # a smaller pool
    for prompt, output in zip(prompts, core.run(*requests), strict=True):
        mamba.check_answer(prompt, output.token_ids)
    assert core.stats.preempted > 0


class ForgetfulRunner(SmallBlockRunner):
    """Runs out of memory in the middle of some passes: recurrent layers have been computed."""

    failures = 3

    def prepare_batch(self, chunks: Sequence[ScheduledChunk]) -> Callable[[], Tensor]:
        compute = super().prepare_batch(chunks)

        def fail() -> Tensor:
            compute()
            raise torch.OutOfMemoryError("no memory")

        if self.failures and len(chunks) > 1:
            self.failures -= 1
            return fail
        return compute


def test_a_step_that_failed_leaves_the_states(mamba: Pair) -> None:
    core = mamba.core(runner=ForgetfulRunner)
    prompts = [random_tokens(9, seed=n) for n in range(3)]
    outputs = core.run(*(shared(prompt) for prompt in prompts))
    for prompt, output in zip(prompts, outputs, strict=True):
        mamba.check_answer(prompt, output.token_ids)
    assert core.stats.preempted > 0


def test_unknown_recurrences_read_no_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may not be affine in their states."""
    monkeypatch.setattr(composition, "_FUNCTIONS", {})
    bamba = Pair("bamba")
    assert not bamba.causal.composes
    assert Pair("lfm2").causal.composes, "a short convolution keeps its inputs alone"
    with pytest.raises(UnsupportedModel, match="not known to be affine"):
        list(encode(bamba.causal, [EncodeJob(PROMPT)]))
    keys, values = bamba.causal.new_states(3)
    context = plain_context(PROMPT)
    segments = (Segment(KVStates(keys, values, 0), 0),)
    moved = type(context)(segments, context.token_ids, tuple(range(3, 25)), 25)
    with pytest.raises(UnsupportedModel, match="ask in mode exact"):
        bamba.core().submit(Request(moved, 1))


def play(pair: Pair, seed: int, steps: int) -> None:
    """Let requests with shared beginnings join, fork, be canceled and preempted at random.

    Every answer is greedy, so that it is known.
    """
    choose = random.Random(seed)
    core = pair.core(
        blocks=choose.choice((24, 60)),
        states=choose.choice((12, 30)),
        step_tokens=9,
        prefill_tokens=choose.choice((9, 40)),
        running=4,
    )
    core.pool.allocate_blocks(max(0, core.pool.free_count - choose.choice((14, 40))))
    texts = [random_tokens(24, seed=seed)]
    asked: list[tuple[list[int], Answer]] = []
    for _ in range(steps):
        if choose.random() < 0.5:
            begin = choose.choice(texts)
            begin = begin[: choose.randrange(len(begin) + 1)]
            end = random_tokens(choose.randrange(1, 8), seed=choose.randrange(9))
            prompt = [*begin, *end][:30]
            request = Request(
                plain_context(prompt),
                choose.randrange(1, 9),
                n=choose.choice((1, 1, 1, 3)),
                tenant=choose.choice(("a", "a", "a", None)),
            )
            asked.append((prompt, core.submit(request)))
            texts.append(prompt)
        if asked and choose.random() < 0.05:
            number = choose.randrange(len(asked))
            asked.pop(number)[1].cancel()
        core.step()
        done = [(prompt, handle) for prompt, handle in asked if handle.done]
        if done:
            prompt, handle = choose.choice(done)
            texts.append([*prompt, *handle.result(0).token_ids])
    core.drain()
    for prompt, handle in asked:
        for answer in {choice.token_ids for choice in handle.result(0).choices}:
            pair.check_answer(prompt, answer)
    assert core.stats.shared_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(scaled(4)))
def test_mixed_batches_answer_as_hugging_face(pair: Pair, seed: int) -> None:
    play(pair, seed, scaled(120, quick=0.5))


def test_a_short_mixed_batch_answers_as_hugging_face() -> None:
    play(Pair("lfm2"), 12, 15)
