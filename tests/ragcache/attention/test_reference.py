"""The reference backend is the definition, on any metadata."""

from __future__ import annotations

import torch
from hypothesis import given, settings

from ragcache.attention import ReferenceAttentionBackend
from tests.ragcache.attention.scenes import Shape, make_scene, shapes


@given(shapes())
@settings(max_examples=80)
def test_every_row_equals_the_definition(shape: Shape) -> None:
    scene = make_scene(shape)
    out = ReferenceAttentionBackend().attend(*scene.inputs, scale=scene.scale)
    torch.testing.assert_close(out, scene.expected(), rtol=1e-10, atol=1e-10)


@given(shapes())
@settings(max_examples=40)
def test_every_row_equals_the_definition_under_alibi(shape: Shape) -> None:
    scene = make_scene(shape, alibi=True)
    out = ReferenceAttentionBackend().attend(*scene.inputs, scale=scene.scale)
    torch.testing.assert_close(out, scene.expected(), rtol=1e-10, atol=1e-10)


def test_paged_rows_before_causal_blocks_are_put_in_order() -> None:
    shape = Shape((-6, 3, -2, 2), ((5, ((0, 7, 0),)),))
    scene = make_scene(shape)
    assert scene.metadata.own_index is not None, "the case that this is about"
    out = ReferenceAttentionBackend().attend(*scene.inputs, scale=scene.scale)
    torch.testing.assert_close(out, scene.expected(), rtol=1e-10, atol=1e-10)


def test_half_precision_is_computed_in_float32() -> None:
    shape = Shape((4, -7), ((9, ((0, 5, 30),)), (3, ((2, 4, -8), (0, 1, 0)))))
    for dtype, tolerance in ((torch.bfloat16, 2**-7), (torch.float16, 2**-10)):
        scene = make_scene(shape, dtype)
        out = ReferenceAttentionBackend().attend(*scene.inputs, scale=scene.scale)
        assert out.dtype == dtype
        expected = scene.expected()
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
