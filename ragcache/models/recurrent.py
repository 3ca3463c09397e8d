"""Recurrent layers, run by transformers' own code, one request after the other.

The recurrences of transformers take boundaries of sequences (`cu_seqlens`) and pass over them in
their plain torch form, so a flat step of several requests would mix them. `patch_recurrent` gives
each mixer a forward that calls the mixer's own forward once for each run of rows that belongs to
one request, with that request's state. Requests with one new token each are one call, as a batch.

A mixer is a module with a layer's number and a convolution of its own: Gated DeltaNet (Yang et al.,
2025), Kimi Delta Attention (2025), Mamba 2 (Dao and Gu, 2024) and short convolutions (LFM2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from ragcache.attention import AttentionBackend, AttentionMetadata
from ragcache.attention.recurrent import RecurrentBatch, RecurrentRun
from ragcache.attention.triton.operator import OperatorMetadata
from ragcache.models.composition import compose_layers, is_affine, record_mixer
from ragcache.models.flat_mixer import flat_forward, run_flat
from ragcache.models.hf_patch import SegmentCache, cache_name, given_cache
from ragcache.models.model import CausalLM, ForwardBatch
from ragcache.states.recurrent import LayerMap, LayerState, RecurrentSnapshot, RecurrentStates

_WIDEST = 8  # tokens of a text whose map has its full size; convolutions see fewer


@dataclass(frozen=True, slots=True)
class LayerKinds:
    """Which layers of a model keep keys and values, and which a recurrent state. A layer may keep
    both, or neither."""

    keys: tuple[int, ...]
    """Numbers of the layers with keys and values."""
    recurrent: tuple[int, ...]
    """Numbers of the layers with a recurrent state."""

    @classmethod
    def of(cls, config: Any) -> LayerKinds:
        """Read the kinds of layers as transformers' own cache does."""
        layers = list(enumerate(DynamicCache(config=config).layers))
        return cls(
            tuple(number for number, each in layers if isinstance(each, CacheLayerMixin)),
            tuple(n for n, each in layers if isinstance(each, LinearAttentionCacheLayerMixin)),
        )


class HybridCache(SegmentCache):
    """The cache of a step whose model has recurrent layers beside attention.

    Without `recurrent` the operators of the step have the recurrent states (`flat_mixer`).
    """

    def __init__(
        self,
        metadata: AttentionMetadata | OperatorMetadata,
        backend: AttentionBackend,
        recurrent: RecurrentBatch | None,
        kinds: LayerKinds,
        mixers: Sequence[nn.Module],
    ) -> None:
        super().__init__(metadata, backend)
        self.recurrent = recurrent
        self._number = {layer: number for number, layer in enumerate(kinds.keys)}
        self._layers, self._mixers = kinds.recurrent, mixers
        self._composed: dict[RecurrentRun, dict[int, LayerState]] = {}

    @property
    def through_operators(self) -> bool:
        """See `SegmentCache.through_operators`."""
        return self.recurrent is None and super().through_operators

    def state_before(self, run: RecurrentRun, layer_idx: int) -> LayerState:
        """Return the state before the rows of a run, which a call over the rows may change.

        Documents are composed in all layers at once. A run that continues another run of the step
        composes layer by layer, since the states before its documents are not known earlier.
        """
        if not run.documents:
            return _state_before(run, layer_idx)
        composed = self._composed.setdefault(run, {})
        if layer_idx not in composed:
            first = self._layers.index(layer_idx)
            states = [
                LayerState() if run.before is None else run.before.layers[layer]
                for layer in self._layers[first:]
                if run.before is None or layer in run.before.layers
            ]
            mixers = self._mixers[first : first + len(states)]
            found = compose_layers(mixers, states, run.documents, first=first, both=run.both)
            composed.update(zip(self._layers[first:], found, strict=False))
        state = composed.pop(layer_idx)
        if run.composed is not None:
            run.composed.layers[layer_idx] = _stacked([state])  # a call may change its own
        return state

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """See `SegmentCache.update`. States are numbered over the layers that keep keys."""
        if isinstance(self.metadata, OperatorMetadata):
            # the operator writes them; a look at the number would compile each layer apart
            return key_states, value_states
        return super().update(key_states, value_states, self._number[layer_idx])


class _CallCache:
    """The cache of one call of a mixer: the states of one layer, in transformers' interface.

    Steps of one token change their states in place, so `state` is the call's own.
    """

    def __init__(self, state: LayerState) -> None:
        self.state = state
        self._inputs: Tensor | None = None

    @property
    def inputs(self) -> Tensor:
        """Inputs of the convolution in this call, [B, channels, T]."""
        if self._inputs is None:  # a step of one token, whose input is the last kept one
            return self.state.convolution[0][..., -1:]
        return self._inputs

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:  # noqa: ARG002
        return self.state.convolution.get(state_idx)

    def get_recurrent_state(
        self,
        layer_idx: int,  # noqa: ARG002
        state_idx: int = 0,
    ) -> Tensor | None:
        return self.state.recurrent.get(state_idx)

    def is_recording_past(self, layer_idx: int) -> bool:  # noqa: ARG002
        return False

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,  # noqa: ARG002
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> Tensor:
        """Add inputs [B, channels, T]. Returns them behind the kept ones."""
        kept, self._inputs = self.state.convolution.get(state_idx), conv_states
        whole = conv_states if kept is None else torch.cat([kept, conv_states], -1)
        width = conv_kernel_size or (conv_states if kept is None else kept).shape[-1]
        missing = max(0, width - whole.shape[-1])
        last = nn.functional.pad(whole, (missing, 0))[..., -width:]
        self.state.convolution[state_idx] = last.clone()
        return whole

    def update_recurrent_state(
        self,
        recurrent_states: Tensor,
        layer_idx: int,  # noqa: ARG002
        state_idx: int = 0,
    ) -> Tensor:
        self.state.recurrent[state_idx] = recurrent_states
        return recurrent_states


@dataclass(frozen=True, slots=True, eq=False)
class _RecurrentSizes:
    """Sizes of the states and of the maps of a text."""

    states: int
    """Bytes of the states behind it."""
    maps: RecurrentStates | None
    """Shapes of its maps, in float32. None if some recurrence is not known to be affine."""


class HybridLM(CausalLM):
    """A patched Hugging Face model with recurrent layers. See `CausalLM`."""

    divides = False
    whole_layers = True

    def __init__(self, *args: Any, kinds: LayerKinds, **options: Any) -> None:
        super().__init__(*args, **options)
        self.kinds = kinds

    @property
    def depth(self) -> int:
        """See `CausalLM.depth`."""
        return int(self.model.config.num_hidden_layers)

    @property
    def composes(self) -> bool:  # type: ignore[override]  # a number that the base knows
        """See `CausalLM`. False for recurrences that are not known to be affine."""
        return self._sizes.maps is not None

    @property
    def recurrent_bytes(self) -> int:  # type: ignore[override]
        """See `CausalLM`."""
        return self._sizes.states

    @property
    def map_shape(self) -> RecurrentStates | None:
        """See `CausalLM.map_shape`."""
        maps = self._sizes.maps
        return None if maps is None else maps.to(self.states_dtype)

    def layer_states(self) -> list[LayerState]:
        """States of all recurrent layers behind some text, for their shapes and dtypes."""
        hidden = torch.zeros(1, _WIDEST, self.hidden_size, dtype=self.dtype, device=self.device)
        states = [LayerState() for _ in recurrent_mixers(self.model)]
        with torch.inference_mode():
            for module, state in zip(recurrent_mixers(self.model), states, strict=True):
                _call_mixer(module, hidden, state)
        return states

    @cached_property
    def _sizes(self) -> _RecurrentSizes:
        hidden = torch.zeros(1, _WIDEST, self.hidden_size, dtype=self.dtype, device=self.device)
        mixers = list(recurrent_mixers(self.model))
        states, maps = self.layer_states(), list[LayerMap]()
        with torch.inference_mode():
            if all(map(is_affine, mixers, states)):
                for module in mixers:
                    call = partial(_call_mixer, module, hidden, LayerState())
                    maps.append(record_mixer(module, call, None)[1])
        nbytes = RecurrentSnapshot(dict(enumerate(states))).nbytes
        shapes = {tuple(tensor.shape for tensor in each.tensors()) for each in maps}
        if len(shapes) != 1:
            return _RecurrentSizes(nbytes, None)
        return _RecurrentSizes(
            nbytes, RecurrentStates.of(maps, torch.float32).to(torch.float32, "meta")
        )

    def _call(self, batch: ForwardBatch) -> Tensor:
        """See `CausalLM._call`."""
        mixers = list(recurrent_mixers(self.model))
        cache = HybridCache(batch.metadata, self.backend, batch.recurrent, self.kinds, mixers)
        return self._call_with(batch, cache)


def recurrent_mixers(model: nn.Module) -> Iterator[nn.Module]:
    """The recurrent mixers of a model, in the order of their layers."""
    for module in model.modules():
        numbered = isinstance(getattr(module, "layer_idx", None), int)
        if numbered and any(isinstance(each, nn.Conv1d) for each in module.children()):
            yield module


def patch_recurrent(model: Any, kinds: LayerKinds) -> None:
    """Make a model's mixers run request by request where the cache is a `HybridCache`, in place."""
    numbers = {layer: number for number, layer in enumerate(kinds.keys)}
    mixers: list[Any] = list(recurrent_mixers(model))
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and layer in numbers:
            module.ragcache_states_layer = numbers[layer]
    for number, mixer in enumerate(mixers):
        mixer.forward = MethodType(run_by_request, mixer)
        mixer.ragcache_states_layer = number
        kind: Any = type(mixer)
        mixer.ragcache_flat = flat_forward(kind)


def run_by_request(module: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The forward of a patched mixer. hidden_states: [1, T, hidden size]; returns the same."""
    _, cache = given_cache(kwargs)
    if not isinstance(cache, HybridCache):
        out: Tensor = type(module).forward(module, hidden_states, *args, **kwargs)
        return out
    if cache.recurrent is None:
        assert isinstance(cache.metadata, OperatorMetadata)
        return run_flat(module, hidden_states, cache.metadata.handle)
    batch, layer, found = cache.recurrent, module.layer_idx, []
    if batch.steps:
        before = [run.before.layers[layer] for run in batch.steps if run.before is not None]
        state = _stacked(before)
        rows = hidden_states[0, batch.step_rows][:, None]  # [n, 1, hidden size]
        output, _ = _call_mixer(module, rows, state)
        found.append(output[:, 0])
        for number, run in enumerate(batch.steps):
            run.after.layers[layer] = _row_of(state, number)
    for run in batch.texts:
        state = cache.state_before(run, layer)
        rows = hidden_states[:, run.begin : run.end]
        if run.maps is None:
            output, _ = _call_mixer(module, rows, state)
        else:
            call = partial(_call_mixer, module, rows, state)
            output, run.maps.after[layer] = record_mixer(module, call, run.maps.before.get(layer))
        found.append(output[0])
        run.after.layers[layer] = state
    out = torch.cat(found)
    return (out if batch.row_order is None else out[batch.row_order])[None]


def _call_mixer(
    module: Any,
    hidden_states: Tensor,
    state: LayerState,
    forward: Callable[..., Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """Run a mixer over [B, T, hidden size]. Leaves the states behind in `state`.

    Args:
        module: The mixer.
        hidden_states: Its inputs.
        state: The states before.
        forward: Forward to call. Defaults to the mixer's own.

    Returns:
        The output [B, T, hidden size], and the inputs of the convolution [B, channels, T].
    """
    forward = type(module).forward if forward is None else forward
    assert forward is not None
    cache = _CallCache(state)
    out: Tensor = forward(module, hidden_states, **{cache_name(forward): cache})
    return out, cache.inputs


def _stacked(states: Sequence[LayerState]) -> LayerState:
    """A copy of several requests' states, [n, ...] each."""
    first = states[0]
    return LayerState(
        {
            index: torch.cat([each.convolution[index] for each in states])
            for index in first.convolution
        },
        {index: torch.cat([each.recurrent[index] for each in states]) for index in first.recurrent},
    )


def _row_of(state: LayerState, row: int) -> LayerState:
    """One request's part of stacked states."""
    here = slice(row, row + 1)
    return LayerState(
        {index: each[here] for index, each in state.convolution.items()},
        {index: each[here] for index, each in state.recurrent.items()},
    )


def _state_before(run: RecurrentRun, layer: int) -> LayerState:
    """The state that a call over a run may change."""
    if run.before is None:
        return LayerState()
    state = run.before.layers[layer]
    if run.end - run.begin == 1:
        return _stacked([state])
    return LayerState(
        dict(state.convolution), dict(state.recurrent)
    )  # longer ones make new tensors
