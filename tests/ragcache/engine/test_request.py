"""Requests and their contexts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import pytest
import torch

from ragcache.engine import Context, Request, Segment, TextStream, assemble_context, check_window
from ragcache.engine.request import MAX_CHOICES
from ragcache.errors import InvalidRequest, PromptTooLong
from ragcache.states import KVStates
from tests.ragcache.engine.stepped_engine import plain_context

PROMPT = plain_context([1, 2, 3])


def no_text(stop: Sequence[str]) -> TextStream:
    raise AssertionError("the text is made when the request is queued")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"min_tokens": 6}, "from 0 to max_tokens, 5"),
        ({"n": 0}, f"from 1 to {MAX_CHOICES}"),
        ({"n": MAX_CHOICES + 1}, f"n is {MAX_CHOICES + 1}"),
        ({"timeout": 0.0}, "timeout is 0.0"),
        ({"timeout": float("nan")}, "timeout is nan"),
        ({"stop": ("end",)}, "need `text`"),
        ({"stop": "end", "text": no_text}, "must be a list of strings"),
        ({"context": plain_context([])}, "no token of its own"),
    ],
)
def test_invalid_requests_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Request(**{"context": PROMPT, "max_tokens": 5, **changes})  # type: ignore[arg-type]


def test_bounds_are_valid() -> None:
    request = Request(PROMPT, 1, min_tokens=1, n=MAX_CHOICES, stop=("x",) * 16, text=no_text)
    assert request.n == MAX_CHOICES


def root(name: str | None, start: int, tenant: Hashable) -> Hashable:
    states = KVStates(torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 2, 1), 0)
    context = Context((Segment(states, start, name),), (1,), (9,), 10)
    return Request(context, 1, tenant=tenant).root


def test_equal_segments_and_tenants_have_one_root() -> None:
    assert root("m", 3, "a") == root("m", 3, "a") is not None
    assert len({root("m", 3, "a"), root("m", 4, "a"), root("n", 3, "a"), root("m", 3, "b")}) == 4


def test_without_a_tenant_or_a_name_nothing_is_shared() -> None:
    assert root("m", 3, None) is root(None, 3, "a") is None
    assert Request(PROMPT, 1).root is None
    assert Request(PROMPT, 1, tenant="a").root is not None


def states(length: int, start: int = 0) -> KVStates:
    """States without content: one layer, one head, one dimension."""
    return KVStates(torch.zeros(1, 1, length, 1), torch.zeros(1, 1, length, 1), start)


def test_assemble_places_states_without_gaps() -> None:
    given = [states(n, start=100) for n in (4, 1, 7)]
    context = assemble_context(given, [8, 9], window=64, max_tokens=1)
    assert [s.states for s in context.segments] == given
    assert [(s.start, s.end) for s in context.segments] == [(0, 4), (4, 5), (5, 12)]
    assert [s.delta for s in context.segments] == [-100, -96, -95]
    assert context.token_ids == (8, 9)
    assert context.position_ids == (12, 13)
    assert context.next_position == 14
    assert (context.cached_tokens, context.prompt_tokens) == (12, 14)


def test_prompt_and_answer_may_fill_the_window_but_not_exceed_it() -> None:
    given = [states(10)]
    assert assemble_context(given, [1] * 4, window=20, max_tokens=6).prompt_tokens == 14
    for tokens, answer in ((5, 6), (4, 7)):
        with pytest.raises(PromptTooLong):
            assemble_context(given, [1] * tokens, window=20, max_tokens=answer)


def test_window_message_names_the_sizes_and_a_remedy() -> None:
    with pytest.raises(PromptTooLong) as caught:
        check_window(90, 9, window=100, max_tokens=2)
    assert str(caught.value) == (
        "This model's maximum context length is 100 tokens. However, the prompt needs 99 tokens "
        "(90 of documents, 9 of question and template) and the answer 2; ask with a smaller k or a "
        "shorter question"
    )
    check_window(90, 9, window=101, max_tokens=2)


def test_a_prompt_needs_a_token_of_its_own() -> None:
    with pytest.raises(ValueError, match="at least one token of its own"):
        assemble_context([states(3)], [], window=64, max_tokens=1)
