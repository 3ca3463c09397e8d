"""Generation: when a request ends, what it reports, and that nobody else notices."""

from __future__ import annotations

from ragcache.engine import Completion, Context, EncodeJob, Request, assemble, encode, generate
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
    [completion] = generate(causal, [Request(context, limit, stops)])
    return completion


def fresh_at(tokens: tuple[int, ...]) -> int:
    """An index above zero whose token did not come before."""
    return next(i for i, token in enumerate(tokens) if i and token not in tokens[:i])


def test_an_answer_ends_at_the_limit(causal: CausalLM) -> None:
    context = prompt(causal, seed=1)
    longest = run(causal, context, 12)
    assert (len(longest.token_ids), longest.finish_reason) == (12, "length")
    for limit in (1, 5):
        shorter = run(causal, context, limit)
        assert shorter.token_ids == longest.token_ids[:limit]
        assert shorter.finish_reason == "length"


def test_a_stop_token_ends_an_answer_and_is_not_emitted(causal: CausalLM) -> None:
    context = prompt(causal, seed=2)
    tokens = run(causal, context, 12).token_ids
    at = fresh_at(tokens)
    seen: list[tuple[int, int]] = []
    request = Request(context, 12, frozenset({tokens[at]}))
    [stopped] = generate(causal, [request], lambda *token: seen.append(token))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == tokens[:at]
    assert seen == [(0, token) for token in tokens[:at]]


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


def test_every_token_is_reported_in_order_as_it_is_chosen(causal: CausalLM) -> None:
    requests = [
        Request(prompt(causal, seed=4), 3, NEVER),
        Request(prompt(causal, seed=5, modules=2), 5, NEVER),
    ]
    seen: list[tuple[int, int]] = []
    completions = generate(causal, requests, lambda *token: seen.append(token))
    for index, completion in enumerate(completions):
        assert tuple(token for i, token in seen if i == index) == completion.token_ids
    assert [index for index, _ in seen] == [0, 1, 0, 1, 0, 1, 1, 1]


def test_requests_that_leave_early_change_nothing_for_the_others(causal: CausalLM) -> None:
    contexts = [prompt(causal, seed=10 * n, modules=n) for n in range(4)]
    long = [run(causal, context, 12).token_ids for context in contexts]
    stop = frozenset({long[1][fresh_at(long[1])]})
    requests = [
        Request(contexts[0], 1, NEVER),
        Request(contexts[1], 12, stop),
        Request(contexts[2], 12, NEVER),
        Request(contexts[3], 4, NEVER),
    ]
    together = generate(causal, requests)
    assert [c.token_ids for c in together] == [
        long[0][:1],
        long[1][: fresh_at(long[1])],
        long[2],
        long[3][:4],
    ]
    assert [c.finish_reason for c in together] == ["length", "stop", "length", "length"]


def test_times_follow_the_order_of_leaving(causal: CausalLM) -> None:
    limits = (6, 1, 3)
    requests = [Request(prompt(causal, seed=n), n, NEVER) for n in limits]
    a, b, c = generate(causal, requests)
    assert b.finished_at < c.finished_at < a.finished_at
    for completion in (a, c):
        assert 0 < completion.first_token_at < completion.finished_at
    assert b.first_token_at == b.finished_at, "its first token was its last"


def test_no_requests_give_no_completions(causal: CausalLM) -> None:
    assert generate(causal, []) == []


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
