"""Hugging Face causal language models as the engine runs them.

`CausalLM` reads segments. `ContiguousLM` serves, on a CPU, models whose attention is not split over
segments there, by Prompt Cache's buffered concatenation (§3.4 and §4.2): Gemma 2 caps its scores,
Gemma 2 and 3 see some layers through a sliding window, and those of Gemma 3 have rotary frequencies
of their own. The model's own code attends to one contiguous buffer, into which cached states are
copied and turned; the masks are given by position, so that gaps and segments out of order are
right. A GPU's kernels know all three, so that such models read segments there.

`ragcache.models.families.wrap` makes either of a loaded model.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from ragcache.attention import AttentionBackend, AttentionMetadata
from ragcache.attention.ops import rotate
from ragcache.attention.triton.operator import OperatorMetadata
from ragcache.models.fingerprint import model_fingerprint
from ragcache.models.hf_patch import SegmentCache
from ragcache.models.positions import LayeredRotary, PositionScheme
from ragcache.states import KVStates

SLIDING = "sliding_attention"
SMALLEST = 64
"""Tokens of the smallest buffer. Larger ones double, so that a growing request moves seldom."""


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The sizes of a model, under one name each. window: the positions that prompt and answer may
    take together."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int

    @classmethod
    def of(
        cls, config: Any, *, num_kv_heads: int | None = None, window: int | None = None
    ) -> Dimensions:
        """From a configuration's usual names, which most of them offer, whatever their own;
        num_kv_heads and window are given where it has them under a name of its own."""
        heads = int(config.num_attention_heads)
        kv_heads = num_kv_heads or getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        limit = _positions(config) if window is None else window
        layers = int(config.num_hidden_layers)
        return cls(layers, heads, int(kv_heads), int(head_dim), int(limit))


class LanguageModel:
    """A causal language model of Hugging Face, however its attention reads cached states."""

    def __init__(
        self, model: Any, scheme: PositionScheme | LayeredRotary, dimensions: Dimensions
    ) -> None:
        self.model = model
        self.scheme = scheme
        self.num_layers = dimensions.num_layers
        self.num_heads = dimensions.num_heads
        self.num_kv_heads = dimensions.num_kv_heads
        self.head_dim = dimensions.head_dim
        self.window = dimensions.window

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    @cached_property
    def vocabulary(self) -> int:
        """How many tokens the model has a vector for: their ids are below it."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @cached_property
    def fingerprint(self) -> str:
        """Digest of configuration, dtype and weights."""
        return model_fingerprint(self.model)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        per_layer = 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return self.num_layers * per_layer

    def new_states(
        self, capacity: int, device: torch.device | None = None
    ) -> tuple[Tensor, Tensor]:
        """Room for `capacity` tokens: keys and values, [L, Hkv, capacity, D]. device: None is the
        model's."""
        shape = (self.num_layers, self.num_kv_heads, capacity, self.head_dim)
        keys = torch.empty(shape, dtype=self.dtype, device=device or self.device)
        return keys, torch.empty_like(keys)


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """One ragged forward pass: the new tokens of all requests, flattened. token_ids, position_ids:
    [T] int64; logit_rows: [R] int64, the rows whose logits are wanted. metadata: `OperatorMetadata`
    of a registered step on a device whose model `prepare_for_device` has prepared."""

    token_ids: Tensor
    position_ids: Tensor
    logit_rows: Tensor
    metadata: AttentionMetadata | OperatorMetadata


class CausalLM(LanguageModel):
    """A patched Hugging Face model whose attention reads segments (`families.wrap_causal`).

    windows: of each layer, how many positions up to its own a row sees, or None for all; empty
    where no layer has a window within the model's. softcap: the bound of scores,
    cap * tanh(score / cap), or None.

    Only the kernels of a GPU compute windows, caps, and frequencies that differ by layer. They are
    exact, because scores are capped and masked one by one, before anything is summed. Key i of a
    segment is taken to be at position start + i, which `KVStates` promises: tokens that were
    encoded with gaps are read as one segment for each run without gaps (`KVStates.part`), as by
    prompts of PML. A request's own tokens, and those of an encoding under way, may have gaps
    anywhere.
    """

    scheme: PositionScheme

    def __init__(
        self, model: Any, scheme: PositionScheme, backend: AttentionBackend,
        dimensions: Dimensions, windows: tuple[int | None, ...] = (), softcap: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, scheme, dimensions)
        self.backend = backend
        self.windows, self.softcap = windows, softcap

    @property
    def needs_kernels(self) -> bool:
        """Whether only the kernels of a GPU compute its attention."""
        layered = isinstance(self.scheme, LayeredRotary)
        return layered or bool(self.windows) or self.softcap is not None

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Logits of the wanted rows: [R, vocabulary]. Writes the rows' own states.

        The whole Hugging Face model is called, so that heads and the scaling of logits are its
        own. A model that takes no positions (ALiBi) passes over them.
        """
        out = self.model(
            input_ids=batch.token_ids[None],
            position_ids=batch.position_ids[None],
            past_key_values=SegmentCache(batch.metadata, self.backend),
            attention_mask=batch.token_ids.new_empty(1, 1, 1, 1),  # a finished mask: none is built
            use_cache=True,
            logits_to_keep=batch.logit_rows,
            attention_metadata=batch.metadata,
            backend=self.backend,
        )
        logits: Tensor = out[0][0]
        return logits


class Buffer:
    """Contiguous keys and values of one request, reused by later requests.

    Prompt Cache §4.2: concatenating cached modules allocates memory for every prompt, so the states
    are written into a buffer that is allocated once and taken again for the next prompt.

    keys, values: [L, Hkv, capacity, D], of which the first `length` tokens are filled. positions:
    [capacity] int64, of the filled tokens. seen_from: [capacity] int64, the first position that may
    see it: its own, or where its segment starts.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self.positions = torch.empty(keys.shape[2], dtype=torch.int64, device=keys.device)
        self.seen_from = torch.empty_like(self.positions)
        self.length = 0

    @property
    def capacity(self) -> int:
        return int(self.keys.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def advance(self, positions: Tensor, seen_from: Tensor) -> None:
        """Counts the next tokens as filled, at positions ([T]); seen_from: [T] or one for all."""
        here = slice(self.length, self.length + len(positions))
        self.positions[here] = positions
        self.seen_from[here] = seen_from
        self.length = here.stop

    def append(
        self, keys: Tensor, values: Tensor, positions: Tensor, seen_from: Tensor | None = None
    ) -> None:
        """Copies tokens in as they are. keys, values: [L, Hkv, T, D]; seen_from: None where every
        token may be seen from its own position on."""
        here = slice(self.length, self.length + keys.shape[2])
        self.keys[:, :, here] = keys
        self.values[:, :, here] = values
        self.advance(positions, positions if seen_from is None else seen_from)


class BufferPool:
    """Buffers of powers of two, reused by capacity. Not thread-safe. keep_bytes: memory that unused
    buffers may take in all; those unused for longest go first."""

    def __init__(self, model: LanguageModel, keep_bytes: int) -> None:
        self.model, self.keep_bytes = model, keep_bytes
        self._unused: deque[Buffer] = deque()
        self._unused_bytes = 0

    @property
    def unused(self) -> int:
        """How many buffers wait for a request."""
        return len(self._unused)

    def take(self, tokens: int) -> Buffer:
        """An empty buffer for at least `tokens`."""
        capacity = max(SMALLEST, 1 << (tokens - 1).bit_length())
        # the last one given back is the likeliest to be in the processor's caches
        for buffer in reversed(self._unused):
            if buffer.capacity == capacity:
                self._unused.remove(buffer)
                self._unused_bytes -= buffer.nbytes
                buffer.length = 0
                return buffer
        return Buffer(*self.model.new_states(capacity))

    def grown(self, buffer: Buffer, tokens: int) -> Buffer:
        """The buffer, or a larger one that took over what it held: room for `tokens` in all."""
        if tokens <= buffer.capacity:
            return buffer
        larger = self.take(tokens)
        filled = slice(0, buffer.length)
        keys, values = buffer.keys[:, :, filled], buffer.values[:, :, filled]
        larger.append(keys, values, buffer.positions[filled], buffer.seen_from[filled])
        self.give(buffer)
        return larger

    def give(self, buffer: Buffer) -> None:
        """Takes a buffer back."""
        self._unused.append(buffer)
        self._unused_bytes += buffer.nbytes
        while self._unused_bytes > self.keep_bytes:
            self._unused_bytes -= self._unused.popleft().nbytes


class BufferCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """Writes each layer's new states behind the buffer's, and shows the layer all of them."""

    def __init__(self, buffer: Buffer) -> None:
        super().__init__(layers=[])
        self.buffer = buffer

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """key_states, value_states: [1, Hkv, T, D]; returns views, [1, Hkv, length + T, D]."""
        buffer = self.buffer
        end = buffer.length + key_states.shape[2]
        buffer.keys[layer_idx, :, buffer.length : end] = key_states[0]
        buffer.values[layer_idx, :, buffer.length : end] = value_states[0]
        return buffer.keys[layer_idx, None, :, :end], buffer.values[layer_idx, None, :, :end]

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        return self.buffer.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:  # noqa: ARG002
        return self.buffer.length + query_length, 0


class ContiguousLM(LanguageModel):
    """A Hugging Face model that reads one buffer (`families.wrap_contiguous`)."""

    scheme: LayeredRotary

    def __init__(
        self, model: Any, scheme: LayeredRotary, dimensions: Dimensions,
        layer_types: tuple[str, ...], sliding_window: int | None,
    ) -> None:  # fmt: skip
        super().__init__(model, scheme, dimensions)
        self.layer_types = layer_types
        # layers that see everything have no use for it
        self.sliding_window = sliding_window or self.window

    @torch.inference_mode()
    def place(self, buffer: Buffer, states: KVStates, start: int) -> None:
        """Copies states into the buffer, behind what it holds, turned to position `start`."""
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


def _positions(config: Any) -> int:
    """Those of the configuration; with LongRoPE those up to which its frequencies are fixed."""
    positions = int(config.max_position_embeddings)
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") == "longrope":
        return min(positions, int(parameters["original_max_position_embeddings"]))
    return positions
