"""Relocation: turning the query equals turning the keys."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache.attention import Rotation, rotate

FREQUENCIES = 10000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)


def rotation(delta: int, *, interleaved: bool = False) -> Rotation:
    angle = torch.tensor([delta], dtype=torch.float64)[:, None] * FREQUENCIES
    return Rotation(angle.cos(), angle.sin(), interleaved)


@given(st.integers(-300, 300), st.integers(0, 10_000), st.booleans())
@settings(max_examples=50)
def test_turning_the_query_back_equals_moving_the_key(
    delta: int, seed: int, interleaved: bool
) -> None:
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    query, key = torch.randn(2, 1, 4, 16, generator=generator, dtype=torch.float64)
    moved = query @ rotate(key, rotation(delta, interleaved=interleaved)).transpose(-1, -2)
    turned = rotate(query, rotation(-delta, interleaved=interleaved)) @ key.transpose(-1, -2)
    torch.testing.assert_close(turned, moved, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("interleaved", [False, True])
def test_dimensions_beyond_the_rotated_width_pass_through(interleaved: bool) -> None:
    x = torch.randn(2, 3, 24, dtype=torch.float64)
    turned = rotate(x, rotation(5, interleaved=interleaved))
    torch.testing.assert_close(turned[..., 16:], x[..., 16:], rtol=0, atol=0)
    assert not torch.equal(turned[..., :16], x[..., :16])


def test_rows_turn_by_their_own_angles() -> None:
    x = torch.randn(2, 3, 16)
    rows = Rotation.by(torch.tensor([0, 7, -4]), FREQUENCIES)
    together = rotate(x, rows)
    for row, delta in enumerate([0, 7, -4]):
        alone = rotate(x[:, row : row + 1], Rotation.by(torch.tensor([delta]), FREQUENCIES))
        torch.testing.assert_close(together[:, row : row + 1], alone)


def test_the_heads_of_a_group_turn_alike() -> None:
    """As a plan's queries do: x is [Hkv, M, G, D], the rotation [M, 1, R/2]."""
    x = torch.randn(2, 3, 4, 16, dtype=torch.float64)
    angle = torch.tensor([0.0, 7.0, -4.0], dtype=torch.float64)[:, None, None] * FREQUENCIES
    together = rotate(x, Rotation(angle.cos(), angle.sin()))
    assert together.is_contiguous()
    for row, delta in enumerate([0, 7, -4]):
        for head in range(4):
            alone = rotate(x[:, row : row + 1, head], rotation(delta))
            torch.testing.assert_close(together[:, row : row + 1, head], alone)


def test_interleaved_pairs_are_the_halves_in_another_order() -> None:
    """Dimensions 2i and 2i+1 turn as i and i + R/2 do where the layout is by halves."""
    x = torch.randn(2, 3, 24, dtype=torch.float64)
    apart = torch.cat([x[..., 0:16:2], x[..., 1:16:2], x[..., 16:]], dim=-1)
    turned = rotate(apart, rotation(9))
    together = torch.stack([turned[..., :8], turned[..., 8:16]], dim=-1).flatten(-2)
    expected = torch.cat([together, turned[..., 16:]], dim=-1)
    torch.testing.assert_close(rotate(x, rotation(9, interleaved=True)), expected)
