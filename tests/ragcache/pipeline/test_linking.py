"""Modes `rooted` and `linked:n` give the logits of one ordinary forward pass with an explicit mask
that is built by hand from what each token saw."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ragcache.engine import EncodeJob, Segment, encode
from ragcache.models import wrap_causal
from ragcache.pipeline.linking import Run, link, recomputed
from ragcache.states import KVKey, KVStates
from tests.conftest import random_tokens, tiny_model
from tests.ragcache.pipeline.conftest import last_logits

PREAMBLE, OWN = random_tokens(7, seed=1), random_tokens(6, seed=2)
MODULES = [tuple(random_tokens(n, seed=n)) for n in (11, 9, 14)]


def runs_of(modules: list[tuple[int, ...]]) -> list[Run]:
    return [Run(number, number + 1, module) for number, module in enumerate(modules)]


def keys_of(runs: list[Run]) -> list[KVKey]:
    return [KVKey(f"{number:064x}") for number in range(len(runs) + 1)]


@torch.no_grad()
def reference(plain: Any, linked: int) -> Tensor:
    """Every module after the preamble, then its first tokens again in context, then the question.

    A module's cached rest saw the preamble right before it and the module's first tokens as they
    were encoded. So these stand in the pass twice: for their module alone, and for everything that
    is computed."""
    size = len(PREAMBLE)
    rows = [(position, token, "root", True) for position, token in enumerate(PREAMBLE)]
    computed, position = [], size
    for number, module in enumerate(MODULES):
        count = min(linked, len(module)) if number else 0
        rows += [
            (position - size + i, t, f"module {number}", False) for i, t in enumerate(PREAMBLE)
        ]
        for offset, token in enumerate(module):
            rows.append((position + offset, token, f"module {number}", offset >= count))
            if offset < count:
                computed.append((position + offset, token, "computed", True))
        position += len(module)
    computed += [(position + i, token, "computed", True) for i, token in enumerate(OWN)]
    rows += computed
    sees = torch.zeros(len(rows), len(rows), dtype=torch.bool)
    for q, (at, _, group, _) in enumerate(rows):
        for k, (stands, _, other, read) in enumerate(rows[: q + 1]):
            sees[q, k] = group == other or (group == "computed" and read and stands < at)
    mask = torch.where(sees, 0.0, torch.finfo(torch.float32).min)[None, None]
    positions, tokens = [row[0] for row in rows], [row[1] for row in rows]
    logits: Tensor = plain(
        torch.tensor([tokens]), attention_mask=mask, position_ids=torch.tensor([positions])
    ).logits
    return logits[0, -1]


@pytest.mark.parametrize("linked", [0, 1, 4, 9, 12, 99])
def test_a_linked_context_equals_the_pass_built_by_hand(linked: int) -> None:
    causal = wrap_causal(tiny_model("llama"))
    [root] = encode(causal, [EncodeJob(PREAMBLE)])
    start = len(PREAMBLE)
    jobs = [EncodeJob(module, start, Segment(root, 0)) for module in MODULES]
    states = [root, *encode(causal, jobs)]
    runs = runs_of(MODULES)
    context = link(keys_of(runs), states, runs, OWN, linked)
    [logits] = last_logits(causal, [context])
    expected = reference(tiny_model("llama"), linked)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    if linked == 99:  # all that comes after the first module is computed, so nothing was lost
        tokens = [*PREAMBLE, *(t for module in MODULES for t in module), *OWN]
        with torch.no_grad():
            plain = tiny_model("llama")(torch.tensor([tokens])).logits[0, -1]
        torch.testing.assert_close(logits, plain, rtol=1e-4, atol=1e-5)


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), max_size=5),
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
    st.integers(0, 8),
)
def test_every_position_stands_in_a_segment_or_is_computed(
    modules: list[list[int]], own: list[int], linked: int
) -> None:
    runs = runs_of(list(map(tuple, modules)))
    empty = partial(torch.zeros, 1, 1)
    states = [KVStates(empty(n, 2), empty(n, 2), 3) for n in (3, *map(len, modules))]
    context = link(keys_of(runs), states, runs, own, linked)
    kept = [at for segment in context.segments for at in range(segment.start, segment.end)]
    assert sorted([*kept, *context.position_ids]) == list(range(context.next_position))
    assert list(context.position_ids) == sorted(context.position_ids)
    again = sum(recomputed(runs, linked))
    assert len(context.token_ids) == len(own) + again
    assert context.cached_tokens == 3 + sum(map(len, modules)) - again
    tokens = dict(zip(context.position_ids, context.token_ids, strict=True))
    plain = [t for module in modules for t in module] + own
    assert all(plain[at - 3] == token for at, token in tokens.items())
    names = [segment.name for segment in context.segments]
    assert len(set(names)) == len(names)
