"""Documents that compose in recurrent layers: maps of encoded texts, and states behind several.

A text that is encoded is read by transformers' own layers. `record_mixer` calls the forward of a
mixer with one change: the recurrence also hands over its inputs, from which the map of the text is
computed (`ragcache.attention.recurrent_maps`). `compose_layer` applies the maps of a prompt's
documents, in order, to the state before them.

The convolution of a mixer reaches over the seam between two texts. It is computed when documents
are composed, for the first tokens of each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ragcache.attention.recurrent_maps import (
    DELTA_RULE,
    STATE_SPACE,
    Recurrence,
    RecurrentInputs,
    apply_map,
)
from ragcache.states.recurrent import LayerMap, LayerState

Arguments = Mapping[str, Any]
"""Arguments of one call of a recurrence of transformers, by name."""


@dataclass(frozen=True, slots=True)
class _KnownFunction:
    """A recurrence as transformers computes it."""

    recurrence: Recurrence
    inputs: Callable[[Arguments], RecurrentInputs]
    """Returns the inputs of the recurrence from the arguments of a call."""


def _delta_inputs(arguments: Arguments) -> RecurrentInputs:
    """key, value: [1, T, H, D]; beta [1, T, H]; g [1, T, H], or [1, T, H, dk]."""
    keys, values, decays, steps = (
        arguments[name][0].transpose(0, 1) for name in ("key", "value", "g", "beta")
    )
    decays = decays if decays.dim() == 3 else decays[..., None]
    return DELTA_RULE.prepared(keys, values, decays, steps[..., None])


def _scan_inputs(arguments: Arguments) -> RecurrentInputs:
    """hidden_states [1, T, H, P]; dt [1, T, H]; A, dt_bias: [H]; B [1, T, G, N]."""
    dt = nn.functional.softplus(arguments["dt"][0] + arguments["dt_bias"]).float()  # [T, H]
    steps = dt.clamp(*arguments.get("dt_limit", (0.0, float("inf")))).mT[..., None]
    keys, values = (arguments[name][0].transpose(0, 1) for name in ("B", "hidden_states"))
    decays = steps * arguments["A"].float()[:, None, None]
    return STATE_SPACE.prepared(keys, values, decays, steps)


def _update_inputs(arguments: Arguments) -> RecurrentInputs:
    """One token: hidden_states, dt: [1, H, P]; A [H, P, N]; dt_bias [H, P]; B [1, G, N]."""
    return _scan_inputs(
        {
            "hidden_states": arguments["hidden_states"][:, None],
            "dt": arguments["dt"][:, None, :, 0],
            "dt_bias": arguments["dt_bias"][:, 0],
            "A": arguments["A"][:, 0, 0],
            "B": arguments["B"][:, None],
        }
    )


_DELTA = _KnownFunction(DELTA_RULE, _delta_inputs)
_FUNCTIONS = {
    "torch_chunk_gated_delta_rule": _DELTA,
    "torch_recurrent_gated_delta_rule": _DELTA,
    "chunk_kimi_delta_attention": _DELTA,
    "recurrent_kimi_delta_attention": _DELTA,
    "mamba2_chunk_scan": _KnownFunction(STATE_SPACE, _scan_inputs),
    "mamba2_selective_state_update": _KnownFunction(STATE_SPACE, _update_inputs),
}
"""Functions of transformers that are known to be affine in the state."""


def recurrence_of(module: nn.Module) -> Recurrence | None:
    """Return the recurrence of a mixer, if it has one and its functions are known."""
    names = inspect.unwrap(type(module).forward).__code__.co_names
    found = [_FUNCTIONS[name].recurrence for name in names if name in _FUNCTIONS]
    return found[0] if found else None


def is_affine(module: nn.Module, state: LayerState) -> bool:
    """Tell whether the states of a mixer are known to be affine maps of earlier states.

    Args:
        module: The mixer.
        state: A state of its layer.
    """
    known = recurrence_of(module) is not None or not state.recurrent
    return known and len(state.convolution) == 1 and len(state.recurrent) <= 1


def record_mixer(
    module: nn.Module,
    call: Callable[[Callable[..., Any]], tuple[Tensor, Tensor]],
    before: LayerMap | None,
) -> tuple[Tensor, LayerMap]:
    """Run a mixer over the next tokens of a text that is encoded, and extend the text's map.

    Args:
        module: The mixer.
        call: Calls a forward of the mixer. Returns the mixer's output, and the inputs of its
            convolution, [1, channels, T].
        before: Map of the text before these tokens. None at its beginning.

    Returns:
        The output of the mixer, and the map up to the last token.
    """
    forward = inspect.unwrap(type(module).forward)
    recorded: list[RecurrentInputs] = []
    names = {
        name: _recording(forward.__globals__[name], known, recorded)
        for name, known in _FUNCTIONS.items()
        if name in forward.__code__.co_names
    }
    changed = FunctionType(
        forward.__code__,
        {**forward.__globals__, **names},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    changed.__kwdefaults__ = forward.__kwdefaults__
    out, inputs = call(changed)
    tokens = recorded[0] if recorded else None
    return out, _extended(before, inputs, tokens, recurrence_of(module), _kernel(module))


def compose_layer(
    module: nn.Module, state: LayerState, documents: Sequence[LayerMap], *, both: bool
) -> LayerState:
    """Return the state of a layer behind several documents.

    Args:
        module: The mixer of the layer, whose convolution reaches over the seams.
        state: The state before the documents. A `LayerState` without tensors begins a text.
        documents: Maps of the documents, in order.
        both: Whether the recurrent state is the mean over the order and its reverse.
    """
    if not state.convolution:  # the first one begins the text, and stays first
        state, documents = _behind(module, state, documents[:1]), documents[1:]
    behind = _behind(module, state, documents)
    if both and behind.recurrent and len(documents) > 1:
        reverse = _behind(module, state, documents[::-1])
        behind.recurrent = {
            index: (each + reverse.recurrent[index]) / 2 for index, each in behind.recurrent.items()
        }
    return behind


def _recording(
    function: Callable[..., Any], known: _KnownFunction, recorded: list[RecurrentInputs]
) -> Callable[..., Any]:
    signature = inspect.signature(inspect.unwrap(function))

    def recording(*args: Any, **kwargs: Any) -> Any:
        recorded.append(known.inputs(signature.bind(*args, **kwargs).arguments))
        return function(*args, **kwargs)

    return recording


def _extended(
    before: LayerMap | None,
    inputs: Tensor,
    tokens: RecurrentInputs | None,
    recurrence: Recurrence | None,
    kernel: int,
) -> LayerMap:
    """Extend a map by tokens with these inputs of the convolution, [1, channels, T]."""
    if before is None:
        before = _empty_map(inputs, tokens, recurrence)
    open_tokens = min(inputs.shape[-1], kernel - 1 - before.first.shape[-1])
    first = torch.cat([before.first, inputs[..., :open_tokens]], -1)
    # a copy of its own: a view would keep the inputs of all tokens
    last = torch.cat([before.last, inputs[..., -kernel:]], -1)[..., -kernel:].clone()
    if tokens is None or recurrence is None:
        return LayerMap(
            before.transition, before.increment, before.decays, before.steps, first, last
        )
    opened = tokens.part(0, open_tokens)
    transition, increment = before.transition, before.increment
    if open_tokens < tokens.length:
        rest = tokens.part(open_tokens, tokens.length)
        transition, increment = recurrence.extend(transition, increment, rest)
    return LayerMap(
        transition,
        increment,
        torch.cat([before.decays, opened.decays], 1),
        torch.cat([before.steps, opened.steps], 1),
        first,
        last,
    )


def _empty_map(
    inputs: Tensor, tokens: RecurrentInputs | None, recurrence: Recurrence | None
) -> LayerMap:
    """The map of no text."""
    first = inputs[..., :0]
    if tokens is None or recurrence is None:
        nothing = inputs.new_zeros(0, 0, 0, dtype=torch.float32)
        return LayerMap(nothing, nothing, nothing, nothing, first, first)
    increment = recurrence.empty_state(tokens)
    none = tokens.part(0, 0)
    identity = recurrence.identity(increment)
    return LayerMap(identity, increment, none.decays, none.steps, first, first)


def _behind(module: nn.Module, state: LayerState, documents: Sequence[LayerMap]) -> LayerState:
    """The state behind documents in this order."""
    recurrence, kernel = recurrence_of(module), _kernel(module)
    [tail] = state.convolution.values() or [None]
    [recurrent] = state.recurrent.values() or [None]
    for each in documents:
        first, last = each.first.to(_weight(module).dtype), each.last.to(_weight(module).dtype)
        if tail is None:
            tail = first.new_zeros(*first.shape[:2], kernel)
        if recurrence is not None:
            here = torch.zeros_like(each.increment) if recurrent is None else recurrent[0]
            here = here.float()
            mixed = _convolved(module, torch.cat([tail[..., 1:], first], -1))
            opened = recurrence.inputs(mixed, here, each.decays, each.steps)
            here = recurrence.advance(here, opened)
            recurrent = apply_map(each.transition, each.increment, here)[None]
        tail = torch.cat([tail, last], -1)[..., -kernel:]
    return LayerState(
        {} if tail is None else {0: tail}, {} if recurrent is None else {0: recurrent}
    )


def _convolution(module: nn.Module) -> nn.Conv1d:
    return next(each for each in module.children() if isinstance(each, nn.Conv1d))


def _weight(module: nn.Module) -> Tensor:
    return _convolution(module).weight


def _kernel(module: nn.Module) -> int:
    return int(_weight(module).shape[-1])


def _convolved(module: nn.Module, inputs: Tensor) -> Tensor:
    """Output of a mixer's convolution for the inputs [1, channels, kernel - 1 + T]:
    [channels, T]."""
    convolution = _convolution(module)
    out = nn.functional.conv1d(
        inputs, convolution.weight, convolution.bias, groups=convolution.groups
    )
    activation = getattr(module, "activation", None)
    out = out if activation is None else ACT2FN[activation](out)
    return out[0]
