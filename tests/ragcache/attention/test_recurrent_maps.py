"""Maps of recurrent layers, against the recurrences token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ragcache.attention.recurrent_maps import (
    DELTA_RULE,
    STATE_SPACE,
    Recurrence,
    RecurrentInputs,
    apply_map,
    join_maps,
)

HEADS, KEY, VALUE = 3, 5, 7
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def draw(
    length: int, channels: int = 1, *, seed: int = 0, strongest: float = 2.0
) -> RecurrentInputs:
    """Inputs with keys of length one, steps up to `strongest`, and slow and fast decays."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(size: int) -> Tensor:
        return torch.rand(HEADS, length, size, generator=generator)

    keys = torch.nn.functional.normalize(uniform(KEY) - 0.5, dim=-1)
    values = torch.randn(HEADS, length, VALUE, generator=generator)
    return RecurrentInputs(keys, values, -(uniform(channels) ** 4), strongest * uniform(1))


def delta_loop(state: Tensor, inputs: RecurrentInputs) -> Tensor:
    """S <- (I - b k k^T) exp(g) S + b k v^T, for one token after the other."""
    for t in range(inputs.length):
        key, value = inputs.keys[:, t, :, None], inputs.values[:, t, None]  # [H, dk, 1], [H, 1, dv]
        state = inputs.decays[:, t, :, None].exp() * state
        state = state + inputs.steps[:, t, :, None] * key @ (value - key.mT @ state)
    return state


def space_loop(state: Tensor, inputs: RecurrentInputs) -> Tensor:
    """S <- exp(g) S + b x k^T, for one token after the other."""
    for t in range(inputs.length):
        key, value = inputs.keys[:, t, None], inputs.values[:, t, :, None]  # [H, 1, N], [H, P, 1]
        state = inputs.decays[:, t, :, None].exp() * state
        state = state + inputs.steps[:, t, :, None] * value @ key
    return state


def map_of(rule: Recurrence, inputs: RecurrentInputs) -> tuple[Tensor, Tensor]:
    """The map (M, N) of a text."""
    if rule is DELTA_RULE:
        return DELTA_RULE.read(inputs.keys, inputs, rule.empty_map(inputs)[1], 0).map
    return STATE_SPACE.map_of(inputs)


RULES = {
    "delta": (DELTA_RULE, delta_loop, 1),
    "delta by channel": (DELTA_RULE, delta_loop, KEY),
    "space": (STATE_SPACE, space_loop, 1),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("length", [1, 2, 16, 63, 64, 65, 300])
def test_a_map_is_its_text_token_by_token(name: str, length: int) -> None:
    rule, loop, channels = RULES[name]
    inputs = draw(length, channels)
    state = 3 * torch.randn(rule.empty_map(inputs)[1].shape)
    expected = loop(state, inputs)
    torch.testing.assert_close(rule.advance(state, inputs), expected, **CLOSE)
    torch.testing.assert_close(apply_map(*map_of(rule, inputs), state), expected, **CLOSE)


@pytest.mark.parametrize("channels", [1, KEY])
@pytest.mark.parametrize(("length", "first"), [(1, 3), (3, 3), (4, 3), (40, 3), (70, 0), (2200, 3)])
def test_a_text_is_read_token_by_token(channels: int, length: int, first: int) -> None:
    """Outputs, the state behind, and the map without the first tokens."""
    inputs = draw(length, channels)
    queries, state = torch.randn(HEADS, length, KEY), 3 * torch.randn(HEADS, KEY, VALUE)
    found = DELTA_RULE.read(queries, inputs, state, first)
    opened = delta_loop(state, inputs.part(0, first))
    for t in range(length):
        state = delta_loop(state, inputs.part(t, t + 1))
        expected = (queries[:, t, None] @ state)[:, 0]
        torch.testing.assert_close(found.outputs[:, t], expected, **CLOSE)
    torch.testing.assert_close(found.state, state, **CLOSE)
    torch.testing.assert_close(apply_map(*found.map, opened), state, **CLOSE)


@pytest.mark.parametrize("name", RULES)
def test_a_map_grows_by_portions(name: str) -> None:
    rule, _, channels = RULES[name]
    inputs = draw(90, channels)
    whole, found = map_of(rule, inputs), rule.empty_map(inputs)
    for begin, end in ((0, 1), (1, 40), (40, 90)):
        found = join_maps(found, map_of(rule, inputs.part(begin, end)))
    for one, other in zip(found, whole, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


@pytest.mark.parametrize("name", ["delta", "delta by channel"])
def test_transitions_shrink_states_without_steps_beyond_one(name: str) -> None:
    """Rounding errors of earlier documents therefore do not grow."""
    rule, _, channels = RULES[name]
    inputs = draw(100, channels, strongest=1.0)
    transition, _ = map_of(rule, inputs)
    assert torch.linalg.matrix_norm(transition, 2).max() <= 1 + 1e-5


@pytest.mark.parametrize(
    ("rule", "channels"), [(DELTA_RULE, 2 * 2 * KEY), (STATE_SPACE, 2 * 2 * KEY)]
)
def test_channels_of_the_convolution_are_split(rule: Recurrence, channels: int) -> None:
    """Keys of two groups serve four heads."""
    heads, length = 4, 3
    width = heads * VALUE
    mixed = torch.arange(float((channels + width) * length)).view(-1, length)
    decays = steps = torch.zeros(heads, length, 1)
    shape = (heads, KEY, VALUE) if rule is DELTA_RULE else (heads, VALUE, KEY)
    state = torch.zeros(shape)
    found = rule.inputs(mixed[rule.channels(len(mixed), state)], state, decays, steps)
    keys = mixed[channels // 2 : channels] if rule is DELTA_RULE else mixed[width:][: channels // 2]
    values = mixed[channels:] if rule is DELTA_RULE else mixed[:width]
    torch.testing.assert_close(found.values[1], values[VALUE : 2 * VALUE].T)
    expected = keys[KEY:].T if rule is STATE_SPACE else torch.nn.functional.normalize(keys[KEY:].T)
    torch.testing.assert_close(found.keys[2], expected)
    torch.testing.assert_close(found.keys[3], expected)
