"""Recurrent layers over the rows of all requests at once, on a GPU.

A mixer's own forward computes everything around its convolution and its recurrence. `flat_forward`
makes a copy of it in which these two are the operators `ragcache::convolve` and `ragcache::recur`:
they know which rows belong together, and where their states are. The copy takes the layer and the
handle of the step in its keyword arguments, which transformers passes on to these functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN

from ragcache.attention.triton.operator import convolve, recur
from ragcache.models.hf_patch import cache_name

Place = tuple[Tensor, int]
"""Number of the recurrent layer, 0-dim on the CPU, and handle of the step."""

_SILU = ("silu", "swish")


class _FlatCache:
    """A mixer's cache, in transformers' interface, that has no states: the operators have them."""

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        return None

    def get_recurrent_state(self, *_: Any, **__: Any) -> None:
        return None

    def is_recording_past(self, *_: Any, **__: Any) -> bool:
        return False

    def update_conv_state(self, conv_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return recurrent_states


def _convolved(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    ragcache_place: Place,
    **_: Any,
) -> Tensor:
    """`causal_conv1d_fn`. hidden_states: [1, channels, T]."""
    silu = activation in _SILU
    out = convolve(hidden_states, weight, bias, silu, *ragcache_place)
    if activation is not None and not silu:
        out = ACT2FN[activation](out)
    turned: Tensor = out.transpose(1, 2)
    return turned


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    ragcache_place: Place,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """`torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention`, in float32."""
    scale = key.shape[-1] ** -0.5
    out = recur(query, key, value, g.float(), beta.float(), True, scale, *ragcache_place)
    return out.to(value.dtype), out


def _scanned(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    *,
    D: Tensor,  # noqa: N803
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    ragcache_place: Place,
    return_final_states: bool,  # noqa: ARG001  # there are none to return
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """`mamba2_chunk_scan`, in float32."""
    steps = nn.functional.softplus((dt + dt_bias).float()).clamp(*dt_limit)
    out = recur(C, B, hidden_states, steps * A.float(), steps, False, 1.0, *ragcache_place)
    return out + hidden_states.float() * D[:, None], out


_CONVOLUTION = "causal_conv1d_fn"
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    _CONVOLUTION: _convolved,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _scanned,
}


def is_flat(module: nn.Module) -> bool:
    """Tell whether the convolution and the recurrence of a mixer are known to have operators."""
    forward = inspect.unwrap(type(module).forward)
    names, parameters = forward.__code__.co_names, inspect.signature(forward).parameters
    recurs = any(name in names for name in _FUNCTIONS if name != _CONVOLUTION)
    passes_on = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return passes_on and _CONVOLUTION in names and recurs == ("update_recurrent_state" in names)


@cache
def flat_forward(kind: Any) -> tuple[Callable[..., Tensor], str]:
    """Return the forward of a class of mixers over the rows of all requests, and the name under
    which it takes its cache."""
    forward = inspect.unwrap(kind.forward)
    assert inspect.isfunction(forward)
    # without a name, the compiler looks for these functions here, and not in transformers' module
    scope = {name: each for name, each in forward.__globals__.items() if name != "__name__"}
    names = {n: each for n, each in _FUNCTIONS.items() if n in forward.__code__.co_names}
    changed = FunctionType(
        forward.__code__,
        {**scope, **names},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    changed.__kwdefaults__ = forward.__kwdefaults__
    return changed, cache_name(forward)


def run_flat(module: Any, hidden_states: Tensor, handle: int) -> Tensor:
    """Run a mixer whose class has a `flat_forward`, over [1, T, hidden size]."""
    forward, place = module.ragcache_flat
    options = {place: _FlatCache(), "ragcache_place": (module.ragcache_layer, handle)}
    out: Tensor = forward(module, hidden_states, **options)
    return out
