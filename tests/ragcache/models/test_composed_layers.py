"""Documents composed in several layers at once, and heads that forget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ragcache.attention.recurrent_maps import DELTA_RULE
from ragcache.models import wrap_causal
from ragcache.models.composition import compose_layers
from ragcache.models.recurrent import recurrent_mixers
from ragcache.states.recurrent import LayerState, RecurrentStates
from tests.tiny_hybrids import FULL, RECURRENT, tiny_hybrid

LAYERS = 5  # more than a CPU composes at once
NEAR = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module")
def mixers() -> list[Any]:
    types = [RECURRENT] * LAYERS + [FULL]
    model = tiny_hybrid("qwen3_5_text", num_hidden_layers=LAYERS + 1, layer_types=types)
    return list(recurrent_mixers(wrap_causal(model).model))


def draw_document(open_tokens: int = 3, last: int = 4) -> RecurrentStates:
    """A document whose heads all remember."""
    heads, size, values, channels = 4, 16, 24, 2 * 2 * 16 + 4 * 24
    return RecurrentStates(
        torch.randn(LAYERS, heads, size, size) / size,
        torch.randn(LAYERS, heads, size, values),
        -torch.rand(LAYERS, heads, open_tokens, 1),
        torch.rand(LAYERS, heads, open_tokens, 1),
        torch.randn(LAYERS, 1, channels, open_tokens),
        torch.randn(LAYERS, 1, channels, last),
    )


def draw_states() -> list[LayerState]:
    """States of all layers behind some text."""
    some = draw_document()
    return [
        LayerState({0: last}, {0: increment[None]})
        for last, increment in zip(some.last, some.increment, strict=True)
    ]


def compose_one(
    mixer: Any, state: LayerState, documents: Sequence[RecurrentStates], number: int
) -> tuple[Tensor, Tensor]:
    """Convolution and recurrent state of a layer behind documents, one operation at a time."""
    tail, here = state.convolution[0], state.recurrent[0][0]
    for each in documents:
        convolution = mixer.conv1d
        inputs = torch.cat([tail[..., 1:], each.first[number]], -1)
        mixed = nn.functional.silu(
            nn.functional.conv1d(inputs, convolution.weight, groups=convolution.groups)
        )[0]
        mixed = mixed[DELTA_RULE.channels(len(mixed), here)]
        opened = DELTA_RULE.inputs(mixed, here, each.decays[number], each.steps[number])
        here = DELTA_RULE.advance(here, opened)
        here = each.transition[number] @ here + each.increment[number]
        tail = torch.cat([tail, each.last[number]], -1)[..., -tail.shape[-1] :]
    return tail, here


@torch.no_grad()
@pytest.mark.parametrize("both", [False, True])
def test_layers_compose_as_one_after_the_other(mixers: list[Any], both: bool) -> None:
    torch.manual_seed(0)
    documents = [draw_document(), draw_document(1, 1), draw_document(3, 3), draw_document()]
    states = draw_states()
    kept = [each.clone() for state in states for each in state.tensors()]
    found = compose_layers(mixers, states, documents, both=both)
    for number, (mixer, state) in enumerate(zip(mixers, states, strict=True)):
        tail, expected = compose_one(mixer, state, documents, number)
        if both:
            expected = (expected + compose_one(mixer, state, documents[::-1], number)[1]) / 2
        torch.testing.assert_close(found[number].convolution[0], tail)
        torch.testing.assert_close(found[number].recurrent[0][0], expected, **NEAR)
        [alone] = compose_layers([mixer], [state], documents, first=number, both=both)
        torch.testing.assert_close(found[number].recurrent[0], alone.recurrent[0], **NEAR)
    for before, after in zip(kept, (t for state in states for t in state.tensors()), strict=True):
        assert torch.equal(before, after), "requests share the states before"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_forgets_what_rounding_hides(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    document, rounding = draw_document(), torch.finfo(dtype).eps / 2
    norms = torch.linalg.matrix_norm(document.transition)
    shares = torch.ones_like(norms)
    shares[:, 1], shares[:, 2] = 0.9 * rounding, 1.2 * rounding
    transition = document.transition / norms[..., None, None] * shares[..., None, None]
    forgets = replace(document, transition=transition).to(dtype).forgets
    assert forgets[:, 1].all()
    assert not forgets[:, [0, 2, 3]].any()


@torch.no_grad()
@pytest.mark.parametrize("both", [False, True])
def test_states_that_heads_forget_are_not_read(mixers: list[Any], both: bool) -> None:
    """Some heads forget at one document, and layer 2 forgets at every one."""
    torch.manual_seed(1)
    first, second, third = (draw_document() for _ in range(3))
    for document, heads in ((first, [3]), (second, [0, 1]), (third, [1])):
        document.transition[:, heads] = 0
        document.transition[2] = 0
    states, documents = draw_states(), [first, second, third]
    expected = [
        compose_one(mixer, state, documents, number)[1]
        for number, (mixer, state) in enumerate(zip(mixers, states, strict=True))
    ]
    if both:
        for number, (mixer, state) in enumerate(zip(mixers, states, strict=True)):
            reverse = compose_one(mixer, state, documents[::-1], number)[1]
            expected[number] = (expected[number] + reverse) / 2
    for state in states:
        state.recurrent[0][:, [0, 1, 3]] = float("nan")  # which some document makes forget it
    found = compose_layers(mixers, states, documents, both=both)
    for state, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(state.recurrent[0][0], wanted, **NEAR)
