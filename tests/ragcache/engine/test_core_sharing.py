"""What requests share that nobody declared: chunks of equal first tokens, while they run and
after."""

from __future__ import annotations

import pytest

from ragcache.engine import Context, EncodeJob, Request, Sampling, Segment, encode
from ragcache.engine.core import EngineCore
from ragcache.models import CausalLM
from tests.conftest import random_tokens
from tests.ragcache.engine.engines import (
    CHUNK,
    check_whole,
    core_of,
    drain,
    plain,
    run,
    settings_of,
    submit,
)

PROMPT = random_tokens(22)  # five full chunks, and one that fills


@pytest.fixture
def core(causal: CausalLM) -> EngineCore:
    return core_of(causal)


def test_identical_prompts_submitted_together_share_their_chunks(core: EngineCore) -> None:
    handles = [submit(core, Request(plain(PROMPT), 9, tenant="a")) for _ in range(4)]
    core.step()
    assert core.pool.used_count == 5 + 4, "full chunks once, one that fills for each"
    drain(core)
    assert len({handle.result(0).token_ids for handle in handles}) == 1
    check_whole(core)


def test_answers_that_go_on_alike_go_on_sharing(core: EngineCore) -> None:
    handles = [submit(core, Request(plain(PROMPT), 20, tenant="a")) for _ in range(3)]
    for _ in range(12):
        core.step()
    assert core.pool.used_count == 8 + 3, "33 tokens, though each request wrote its own"
    drain(core)
    assert len({handle.result(0).token_ids for handle in handles}) == 1


def test_a_later_prompt_finds_what_stands(core: EngineCore) -> None:
    first = submit(core, Request(plain(PROMPT), 30, tenant="a"))
    core.step()
    [second] = run(core, Request(plain([*PROMPT[:17], 1, 2]), 2, tenant="a"))
    assert second.shared_tokens == 16
    assert core.tally.shared_tokens == 16
    assert core.tally.prompt_tokens == 22 + 3
    assert first.done


@pytest.mark.parametrize("tenant", [None, "b"])
def test_nothing_is_found_across_tenants(core: EngineCore, tenant: str | None) -> None:
    run(core, Request(plain(PROMPT), 2, tenant="a"), Request(plain(PROMPT), 2))
    [completion] = run(core, Request(plain(PROMPT), 2, tenant=tenant))
    assert completion.shared_tokens == 0


def test_the_next_turn_of_a_chat_finds_question_and_answer(
    core: EngineCore, causal: CausalLM
) -> None:
    [states] = encode(causal, [EncodeJob(random_tokens(9))])
    segments = (Segment(states, 0, "handbook"),)

    def turn(tokens: list[int]) -> Request:
        end = 9 + len(tokens)
        context = Context(segments, tuple(tokens), tuple(range(9, end)), end)
        return Request(context, 11, tenant="a")

    [first] = run(core, turn(PROMPT))
    chat = [*PROMPT, *first.token_ids, 5, 6, 7]
    [second] = run(core, turn(chat))
    # the last token of the answer was never an input: its states do not stand
    stands = (len(PROMPT) + len(first.token_ids) - 1) // CHUNK * CHUNK
    assert second.shared_tokens == stands == 32
    [alone] = run(core_of(causal), turn(chat))
    assert (alone.shared_tokens, alone.token_ids) == (0, second.token_ids)


@pytest.mark.parametrize(("name", "start"), [("other", 0), ("handbook", 1), (None, 0)])
def test_what_stands_behind_other_segments_is_not_found(
    core: EngineCore, causal: CausalLM, name: str | None, start: int
) -> None:
    [states] = encode(causal, [EncodeJob(random_tokens(9))])
    for segment, shared in ((Segment(states, 0, "handbook"), 0), (Segment(states, start, name), 0)):
        context = Context((segment,), tuple(PROMPT), tuple(range(10, 32)), 32)
        [completion] = run(core, Request(context, 2, tenant="a"))
        assert completion.shared_tokens == shared
    context = Context((Segment(states, 0, "handbook"),), tuple(PROMPT), tuple(range(10, 32)), 32)
    assert run(core, Request(context, 2, tenant="a"))[0].shared_tokens == 20


@pytest.mark.parametrize("tenant", [None, "a"])
def test_the_answers_of_one_request_share_its_prompt(core: EngineCore, tenant: str | None) -> None:
    sampling = Sampling(temperature=3, seed=4)
    request = Request(plain(PROMPT), 3, n=4, sampling=sampling, tenant=tenant)
    handle = submit(core, request)
    core.step()
    assert (core.running, core.pool.used_count) == (4, 5 + 4)
    drain(core)
    assert core.tally.prompt_tokens == 22 + 3, "only the last token is computed for each"
    choices = [choice.token_ids for choice in handle.result(0).choices]
    assert len(set(choices)) == 4, "each has random numbers of its own"
    check_whole(core)


def test_the_first_of_several_answers_is_that_of_one(core: EngineCore, causal: CausalLM) -> None:
    sampling = Sampling(temperature=3, seed=4)
    [several] = run(core, Request(plain(PROMPT), 6, n=3, sampling=sampling))
    [one] = run(core_of(causal), Request(plain(PROMPT), 6, sampling=sampling))
    assert several.choices[0].token_ids == one.token_ids


def test_more_answers_than_may_run_wait_for_each_other(causal: CausalLM) -> None:
    sampling = Sampling(temperature=3, seed=4)
    request = Request(plain(PROMPT), 6, n=5, sampling=sampling)
    narrow = core_of(causal, settings_of(causal, running=2))
    handle = submit(narrow, request)
    while narrow.busy:
        narrow.step()
        assert narrow.running <= 2
    [wide] = run(core_of(causal), request)
    assert handle.result(0).choices == wide.choices


def test_pieces_of_several_answers_name_theirs(core: EngineCore) -> None:
    request = Request(plain(PROMPT), 5, n=3, sampling=Sampling(temperature=3, seed=4))
    handle = submit(core, request)
    drain(core)
    pieces = list(handle)
    for index, choice in enumerate(handle.result(0).choices):
        own = [p.chosen.token for p in pieces if p.choice == index and p.chosen is not None]
        assert tuple(own) == choice.token_ids


def test_what_is_retained_never_keeps_a_request_out(causal: CausalLM) -> None:
    core = core_of(causal, settings_of(causal, chunks=8))
    for seed in range(6):
        tokens = random_tokens(26, seed=seed)
        [completion] = run(core, Request(plain(tokens), 5, tenant="a"))
        [alone] = run(core_of(causal), Request(plain(tokens), 5))
        assert completion.token_ids == alone.token_ids
        assert core.memory.tree.retained <= 4, "half of the pool, as the settings say"
    check_whole(core)
