"""Layers with heads of different shapes in states of one shape."""

from __future__ import annotations

import pytest
import torch

from ragcache.attention import AttentionMetadata, ContiguousWrite, PagedQueries
from ragcache.attention.layout import LayerHeads, StateLayout

SHAPES = {
    "few wide heads": [LayerHeads(16, 32), LayerHeads(4, 64), LayerHeads(16, 32)],
    "as many wide heads": [LayerHeads(1, 32), LayerHeads(1, 64)],
    "sizes with a smaller divisor": [LayerHeads(3, 8), LayerHeads(2, 12)],
    "all alike": [LayerHeads(2, 16)] * 3,
}


@pytest.fixture(params=SHAPES.values(), ids=SHAPES)
def layout(request: pytest.FixtureRequest) -> StateLayout:
    return StateLayout.of(request.param)


def random_layers(layout: StateLayout, tokens: int) -> list[torch.Tensor]:
    torch.manual_seed(7)
    return [torch.randn(each.count, tokens, each.size) for each in layout.layers]


def test_nothing_is_padded(layout: StateLayout) -> None:
    kept = layout.num_planes * layout.num_heads * layout.head_dim
    assert kept == sum(each.count * each.size for each in layout.layers)
    planes = [plane for layer in range(len(layout.layers)) for plane in layout.planes(layer)]
    assert planes == list(range(layout.num_planes))


def test_layers_come_back_with_whole_heads(layout: StateLayout) -> None:
    layers = random_layers(layout, 5)
    states = torch.cat([layout.split(each) for each in layers])
    assert states.shape == (layout.num_planes, layout.num_heads, 5, layout.head_dim)
    for number, expected in enumerate(layers):
        assert torch.equal(layout.of_layer(number, states), expected)


def test_planes_are_as_large_as_all_layers_allow() -> None:
    assert StateLayout.of(SHAPES["few wide heads"]).ends == (2, 3, 5)
    assert StateLayout.of(SHAPES["as many wide heads"]).ends == (1, 3)
    alike = StateLayout.of(SHAPES["all alike"])
    assert (alike.num_planes, alike.num_heads, alike.head_dim) == (3, 2, 16)


def test_blocks_of_a_layer_are_gathered_with_whole_heads(layout: StateLayout) -> None:
    size, pages = 4, torch.tensor([[5, 1], [2, 5]])
    layers = random_layers(layout, 6 * size)
    states = torch.cat([layout.split(each) for each in layers])
    mask = torch.zeros(2, 2 * size)
    paged = PagedQueries(states, states.neg(), size, torch.arange(2), pages, mask)
    slots = (pages[..., None] * size + torch.arange(size)).flatten(1)
    for number, expected in enumerate(layers):
        own = paged.of_layer(layout, number)
        assert torch.equal(own.gather_blocks(own.keys[0]), expected[:, slots])
        assert torch.equal(own.gather_blocks(own.values[0]), expected[:, slots].neg())


def test_a_layer_is_written_to_its_planes(layout: StateLayout) -> None:
    layers = random_layers(layout, 3)
    keys = torch.zeros(layout.num_planes, layout.num_heads, 5, layout.head_dim)
    values = torch.zeros_like(keys)
    metadata = AttentionMetadata(
        shared_queries=None,
        shared_kv=(),
        causal_blocks=(),
        paged_queries=None,
        writes=(ContiguousWrite(keys, values, 2, 0, 3),),
        shared_index=torch.empty(0, 3, dtype=torch.int64),
        layout=layout,
    )
    for number, each in enumerate(layers):
        metadata.write_states(number, each, each.neg())
    for number, each in enumerate(layers):
        assert torch.equal(layout.of_layer(number, keys)[:, 2:], each)
        assert torch.equal(layout.of_layer(number, values)[:, 2:], each.neg())
        assert not layout.of_layer(number, keys)[:, :2].any()
