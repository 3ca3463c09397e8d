"""The patch: Hugging Face's own hooks, no copied modeling code.

`AttentionInterface` lets a model call `ragged_attention` instead of its attention kernel, and a
`Cache` subclass receives each layer's new keys and values. Models that know no attention interface
get other forwards in a few places (`ragcache.models.replaced`). Without a plan (an ordinary call of
the patched model) everything goes the way that it went before.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ragcache.attention import AttentionBackend, StepPlan
from ragcache.errors import UnsupportedModel

IMPLEMENTATION = "ragcache"


class StepCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """Keeps each layer's new states where the step's plan wants them."""

    def __init__(self, plan: StepPlan, backend: AttentionBackend) -> None:
        super().__init__(layers=[])
        self.plan = plan
        self.backend = backend

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """key_states, value_states: [1, Hkv, T, D]; returned as they are."""
        self.plan.write(layer_idx, key_states[0], value_states[0])
        return key_states, value_states

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float
    ) -> Tensor:
        """Keeps a layer's new states, then attends to all that the plan says.

        query: [Hq, T, D]; key, value: [Hkv, T, D]. Returns [1, T, Hq * D].
        """
        self.plan.write(layer, key, value)
        out = self.backend.attend(self.plan, layer, query, key, value, scale=scale)
        return out.flatten(1)[None]

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:  # noqa: ARG002
        return query_length, 0


def ragged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    plan: StepPlan | None = None,
    backend: AttentionBackend | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query: [1, Hq, T, D]; returns [1, T, Hq, D]. See `AttentionInterface`."""
    if plan is None or backend is None:
        out: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return out
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = module.layer_idx
    assert isinstance(layer, int)
    return backend.attend(plan, layer, query[0], key[0], value[0], scale=scale)[None], None


def patch(model: Any) -> None:
    """Makes a Hugging Face model attend through `ragged_attention`, in place. Raises
    `UnsupportedModel` where it does not call the attention interface."""
    AttentionInterface.register(IMPLEMENTATION, ragged_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
    model.set_attn_implementation(IMPLEMENTATION)
    if model.config._attn_implementation != IMPLEMENTATION:  # transformers only warned
        raise UnsupportedModel(
            f"this {model.config.model_type} model does not call transformers' attention "
            "interface; its family has to replace its attention (`Family.patch`)"
        )


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Gives one module another forward. It calls the class's own where it is given no plan."""
    module.forward = MethodType(forward, module)
