"""Models whose attention cannot be split over segments: Prompt Cache's buffered concatenation.

Gemma 2 caps its scores and both Gemma 2 and 3 see some layers through a sliding window, each with
rotary frequencies of its own. Here the model's own code attends to one contiguous buffer, into
which cached states are copied and turned (Prompt Cache §3.4 and §4.2); the masks are given by
position, so that gaps and segments out of order are right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ragcache.attention.rotary import Rotation, rotate
from ragcache.models.buffer import Buffer, BufferCache
from ragcache.models.dimensions import Dimensions
from ragcache.models.language import LanguageModel
from ragcache.models.positions import Rotary
from ragcache.states import KVStates

SLIDING = "sliding_attention"


class LayeredRotary:
    """Rotary positions whose frequencies may differ from layer to layer. layers: one a layer."""

    movable = True
    slopes = None

    def __init__(self, layers: tuple[Rotary, ...]) -> None:
        self.layers = layers

    @classmethod
    def of(
        cls,
        config: Any,
        rotary_embedding: nn.Module,
        layer_types: Sequence[str],
        *,
        interleaved: bool = False,
    ) -> LayeredRotary:
        """From a configuration and the model's rotary module. Raises `UnsupportedModel`."""
        rotaries = {
            each: Rotary.of(config, rotary_embedding, interleaved=interleaved, layer_type=each)
            for each in set(layer_types)
        }
        return cls(tuple(rotaries[each] for each in layer_types))

    @property
    def name(self) -> str:
        return "+".join(dict.fromkeys(layer.name for layer in self.layers))

    def rotations(self, delta: int) -> list[Rotation]:
        """How the keys of each layer turn when they move by `delta` positions."""
        moved: dict[Rotary, Rotation] = {}
        for layer in self.layers:
            if layer not in moved:
                frequency = layer.inverse_frequency
                by = torch.tensor([delta], device=frequency.device)
                moved[layer] = Rotation.by(by, frequency, interleaved=layer.interleaved)
        return [moved[layer] for layer in self.layers]


class ContiguousLM(LanguageModel):
    """Wraps a Hugging Face model that reads one buffer. Make one with `ContiguousLM.patch`."""

    scheme: LayeredRotary

    def __init__(
        self,
        model: Any,
        scheme: LayeredRotary,
        dimensions: Dimensions,
        layer_types: tuple[str, ...],
        sliding_window: int | None,
    ) -> None:
        super().__init__(model, scheme, dimensions)
        self.layer_types = layer_types
        # layers that see everything have no use for it
        self.sliding_window = sliding_window or self.window

    @classmethod
    def patch(cls, model: Any) -> ContiguousLM:
        """Readies a loaded model in place, as its family says (`ragcache.models.families`).

        Raises `UnsupportedModel` before it changes anything.
        """
        from ragcache.models.families import family_of  # families make ContiguousLMs

        return family_of(model.config).contiguous(model)

    @torch.inference_mode()
    def place(self, buffer: Buffer, states: KVStates, start: int) -> None:
        """Copies states into the buffer, behind what it holds, turned to stand at `start`."""
        begin, delta = buffer.length, start - states.start
        positions = torch.arange(start, start + states.length, device=self.device)
        buffer.append(states.keys, states.values, positions, positions.new_tensor(start))
        if delta:
            for layer, rotation in enumerate(self.scheme.rotations(delta)):
                keys = buffer.keys[layer, :, begin : buffer.length]  # [Hkv, S, D]
                keys.copy_(rotate(keys, rotation))

    @torch.inference_mode()
    def forward(self, buffer: Buffer, token_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Logits of the last token: [vocabulary]. Writes the tokens' states into the buffer.

        token_ids, position_ids: [T] int64; positions ascend. A token sees the buffer's tokens from
        the position on that they say, and the new tokens up to itself.
        """
        logits: Tensor = self.model(
            input_ids=token_ids[None],
            position_ids=position_ids[None],
            attention_mask=self._masks(buffer, position_ids),
            past_key_values=BufferCache(buffer),
            use_cache=True,
            logits_to_keep=1,
        ).logits
        buffer.advance(position_ids, position_ids)
        return logits[0, -1]

    def _masks(self, buffer: Buffer, position_ids: Tensor) -> Tensor | dict[str, Tensor]:
        """Added to the scores: [1, 1, T, length + T], by layer type where there are several."""
        past = buffer.length
        queries = position_ids[:, None]
        positions = torch.cat([buffer.positions[:past], position_ids])
        seen = torch.cat([buffer.seen_from[:past], position_ids]) <= queries
        seen[:, past:].tril_()
        masks = {}
        for each in set(self.layer_types):
            visible = seen
            if each == SLIDING:
                visible = seen & (queries - positions < self.sliding_window)
            mask = torch.zeros(visible.shape, dtype=self.dtype, device=self.device)
            masks[each] = mask.masked_fill_(~visible, torch.finfo(self.dtype).min)[None, None]
        return masks if len(masks) > 1 else masks.popitem()[1]
