"""Requests run in the caller's thread: when one ends, and that nobody else notices."""

from __future__ import annotations

from ragcache.engine import Completion, Context, EncodeJob, Request, assemble, complete, encode
from ragcache.models import CausalLM
from tests.conftest import random_tokens

NEVER: frozenset[int] = frozenset()


def prompt(causal: CausalLM, seed: int, modules: int = 1) -> Context:
    jobs = [EncodeJob(random_tokens(9 + n, seed=seed + n), 4) for n in range(modules)]
    states = list(encode(causal, jobs)) if jobs else []
    return assemble(states, random_tokens(6, seed=seed), window=512, max_new_tokens=20)


def run(
    causal: CausalLM, context: Context, limit: int, stops: frozenset[int] = NEVER
) -> Completion:
    [completion] = complete(causal, [Request(context, limit, stops)])
    return completion


def fresh_at(tokens: tuple[int, ...]) -> int:
    """An index above zero whose token did not come before."""
    return next(i for i, token in enumerate(tokens) if i and token not in tokens[:i])


def test_no_requests_give_no_completions(causal: CausalLM) -> None:
    assert complete(causal, []) == []


def test_completions_come_in_the_order_of_the_requests(causal: CausalLM) -> None:
    limits = (6, 1, 3)
    completions = complete(causal, [Request(prompt(causal, seed=n), n) for n in limits])
    assert tuple(len(completion.token_ids) for completion in completions) == limits


def test_a_shorter_answer_begins_the_longer_one(causal: CausalLM) -> None:
    context = prompt(causal, seed=1)
    longest = run(causal, context, 12)
    assert (len(longest.token_ids), longest.finish_reason) == (12, "length")
    for limit in (1, 5):
        shorter = run(causal, context, limit)
        assert shorter.token_ids == longest.token_ids[:limit]
        assert shorter.finish_reason == "length"


def test_a_stop_token_at_once_gives_an_empty_answer(causal: CausalLM) -> None:
    context = prompt(causal, seed=3)
    first = run(causal, context, 1).token_ids[0]
    completion = run(causal, context, 1, frozenset({first}))
    assert (completion.token_ids, completion.finish_reason) == ((), "stop")
    assert 0 < completion.first_token_at <= completion.finished_at


def test_a_stop_token_right_after_the_limit_changes_nothing(causal: CausalLM) -> None:
    context = prompt(causal, seed=2)
    tokens = run(causal, context, 12).token_ids
    at = fresh_at(tokens)
    completion = run(causal, context, at, frozenset({tokens[at]}))
    assert (completion.token_ids, completion.finish_reason) == (tokens[:at], "length")


def test_requests_that_leave_early_change_nothing_for_the_others(causal: CausalLM) -> None:
    contexts = [prompt(causal, seed=10 * n, modules=n) for n in range(4)]
    long = [run(causal, context, 12).token_ids for context in contexts]
    stop = frozenset({long[1][fresh_at(long[1])]})
    requests = [
        Request(contexts[0], 1),
        Request(contexts[1], 12, stop),
        Request(contexts[2], 12),
        Request(contexts[3], 4),
    ]
    together = complete(causal, requests)
    assert [c.token_ids for c in together] == [
        long[0][:1],
        long[1][: fresh_at(long[1])],
        long[2],
        long[3][:4],
    ]
    assert [c.finish_reason for c in together] == ["length", "stop", "length", "length"]


def test_times_follow_the_order_of_leaving(causal: CausalLM) -> None:
    requests = [Request(prompt(causal, seed=n), n) for n in (6, 1, 3)]
    a, b, c = complete(causal, requests)
    assert b.finished_at < c.finished_at < a.finished_at
    for completion in (a, c):
        assert completion.submitted_at < completion.admitted_at < completion.first_token_at
        assert completion.first_token_at < completion.finished_at
    assert b.first_token_at == b.finished_at, "its first token was its last"


def test_the_answer_stands_where_the_context_says(causal: CausalLM) -> None:
    """Positions count on after the prompt even where the prompt has gaps."""
    plain = prompt(causal, seed=6)
    moved = Context(plain.segments, plain.token_ids, plain.position_ids, plain.next_position + 40)
    first, other = run(causal, plain, 1), run(causal, moved, 1)
    assert first.token_ids == other.token_ids, "the first token depends on the prompt alone"
    tokens = []
    for context in (plain, moved):
        start = context.next_position
        own = (*context.token_ids, first.token_ids[0])
        positions = (*context.position_ids, start)
        again = Context(context.segments, own, positions, start + 1)
        tokens.append(run(causal, again, 4).token_ids)
        assert run(causal, context, 5).token_ids[1:] == tokens[-1]
