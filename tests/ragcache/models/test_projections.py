"""Merged projections: the same numbers, fingerprint and bytes by fewer products."""

from __future__ import annotations

import sys
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn

from ragcache.models import projections, wrap_causal
from ragcache.models.projections import MergedLinear, merge_projections
from tests.ragcache.models.reference import Module, last_logits, prompt
from tests.tiny_models import DEVICE, random_tokens, tiny_model

GROUPS = {"llama": 2, "mistral": 2, "qwen2": 2, "qwen3": 2, "phi": 1, "opt": 1}
"""Merged in each layer; the other families' projections are one weight already."""
EXACT = {"rtol": 0, "atol": 0} if DEVICE == "cpu" else {"rtol": 1e-4, "atol": 1e-5}
PIECES = (Module(random_tokens(20)), random_tokens(9, seed=1))


def weight_bytes(model: nn.Module) -> int:
    return sum(weight.nbytes for weight in model.parameters())


@torch.no_grad()
def ordinary(model: Any, tokens: list[int]) -> Tensor:
    return model(torch.tensor([tokens])).logits


def test_merging_keeps_numbers_fingerprint_and_bytes(family: str) -> None:
    causal = wrap_causal(tiny_model(family))
    size, groups = weight_bytes(causal.model), 2 * GROUPS.get(family, 0)
    expected = ordinary(causal.model, PIECES[1]), last_logits(causal, [prompt(causal, PIECES)])
    assert merge_projections(causal) == groups
    got = ordinary(causal.model, PIECES[1]), last_logits(causal, [prompt(causal, PIECES)])
    torch.testing.assert_close(got, expected, **EXACT)
    assert causal.fingerprint == wrap_causal(tiny_model(family)).fingerprint
    assert (weight_bytes(causal.model), causal.dtype) == (size, torch.float32)
    merged = [each for each in causal.model.modules() if isinstance(each, MergedLinear)]
    assert [each.kept for each in merged] == [None] * groups, "no product is kept"
    names = [name for name, _ in causal.model.named_parameters()]
    assert merge_projections(causal) == 0, "the second time"
    assert [name for name, _ in causal.model.named_parameters()] == names


def test_weights_are_freed_group_by_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a model needs nearly twice its memory meanwhile."""
    causal = wrap_causal(tiny_model("llama"))
    weights = WeakSet(module for module in causal.model.modules() if type(module) is nn.Linear)
    left = []

    def merge(owner: nn.Module, names: tuple[str, ...], parts: list[nn.Linear]) -> None:
        merge_group(owner, names, parts)
        left.append(len(weights))

    merge_group = projections._merge
    monkeypatch.setattr(projections, "_merge", merge)
    before = len(weights)
    merge_projections(causal)
    assert left == [before - 3, before - 5, before - 8, before - 10]


def test_another_thread_may_call_a_model_between_any_two_lines() -> None:
    causal = wrap_causal(tiny_model("llama"))
    attention = causal.model.model.layers[0].self_attn
    mine, others = torch.randn(2, 1, 5, 64)
    expected = attention.q_proj(mine)
    merge_projections(causal)
    interrupted = []

    def interrupt(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code is not MergedLinear.forward.__code__:
            return None
        if event == "line":
            sys.settrace(None)
            interrupted.append(attention.k_proj(others))
            sys.settrace(interrupt)
        return interrupt

    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        got = attention.q_proj(mine)
    finally:
        sys.settrace(before)
    assert len(interrupted) >= 3
    torch.testing.assert_close(got, expected, **EXACT)


def test_biases_are_merged() -> None:
    causal = wrap_causal(tiny_model("qwen2"))
    attention = causal.model.model.layers[0].self_attn
    for each in (attention.q_proj, attention.k_proj, attention.v_proj):
        nn.init.normal_(each.bias)
    expected = ordinary(causal.model, PIECES[1])
    merge_projections(causal)
    torch.testing.assert_close(ordinary(causal.model, PIECES[1]), expected, **EXACT)


@pytest.mark.parametrize("order", [("k_proj", "v_proj", "q_proj"), ("v_proj", "q_proj", "k_proj")])
def test_any_order_and_other_inputs_give_each_its_own_product(order: tuple[str, ...]) -> None:
    causal = wrap_causal(tiny_model("llama"))
    attention = causal.model.model.layers[0].self_attn
    inputs = dict(zip(order, torch.randn(3, 1, 5, 64), strict=True))
    expected = {name: getattr(attention, name)(inputs[name]) for name in order}
    merge_projections(causal)
    got = {name: getattr(attention, name)(inputs[name]) for name in order}
    torch.testing.assert_close(got, expected, **EXACT)


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook", "forward"])
def test_layers_with_hooks_or_of_other_kinds_are_left(hook: str) -> None:
    class Adapted(nn.Linear):
        """A layer whose forward may add something."""

    causal = wrap_causal(tiny_model("llama"))
    first, second = causal.model.model.layers
    query = first.self_attn.q_proj
    if hook == "forward":
        query.forward = query.forward  # as libraries do that move weights around a call
    else:
        getattr(query, hook)(lambda *_: None)
    second.self_attn.v_proj = Adapted(64, 32, bias=False)
    assert merge_projections(causal) == 2  # those of the feed-forward layers
    assert type(first.self_attn.k_proj) is nn.Linear
