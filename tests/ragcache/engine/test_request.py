"""A request: what cannot be asked, and what its states depend on."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import pytest
import torch

from ragcache.engine import Context, Request, Segment, TextStream
from ragcache.engine.request import MAX_CHOICES
from ragcache.errors import InvalidRequest
from ragcache.states import KVStates
from tests.ragcache.engine.engines import plain

PROMPT = plain([1, 2, 3])


def no_text(stop: Sequence[str]) -> TextStream:
    raise AssertionError("the text is made when the request is queued")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"min_new_tokens": 6}, "from 0 to max_new_tokens, 5"),
        ({"n": 0}, f"from 1 to {MAX_CHOICES}"),
        ({"n": MAX_CHOICES + 1}, f"n is {MAX_CHOICES + 1}"),
        ({"timeout": 0.0}, "timeout is 0.0"),
        ({"timeout": float("nan")}, "timeout is nan"),
        ({"stop": ("end",)}, "need `text`"),
        ({"stop": ("",), "text": no_text}, "a string of 0 characters"),
        ({"stop": ("x",) * 17, "text": no_text}, "stop has 17 strings"),
        ({"stop": "end", "text": no_text}, "must be a list of strings"),
        ({"context": plain([])}, "no token of its own"),
    ],
)
def test_what_cannot_be_asked_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Request(**{"context": PROMPT, "max_new_tokens": 5, **changes})  # type: ignore[arg-type]


def test_the_bounds_themselves_may_be_asked() -> None:
    request = Request(PROMPT, 1, min_new_tokens=1, n=MAX_CHOICES, stop=("x",) * 16, text=no_text)
    assert request.n == MAX_CHOICES


def root(name: str | None, start: int, tenant: Hashable) -> Hashable:
    states = KVStates(torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 2, 1), 0)
    context = Context((Segment(states, start, name),), (1,), (9,), 10)
    return Request(context, 1, tenant=tenant).root


def test_requests_of_one_tenant_over_equal_segments_have_one_root() -> None:
    assert root("m", 3, "a") == root("m", 3, "a") is not None
    assert len({root("m", 3, "a"), root("m", 4, "a"), root("n", 3, "a"), root("m", 3, "b")}) == 4


def test_without_a_tenant_or_a_name_nothing_is_shared() -> None:
    assert root("m", 3, None) is root(None, 3, "a") is None
    assert Request(PROMPT, 1).root is None
    assert Request(PROMPT, 1, tenant="a").root is not None
