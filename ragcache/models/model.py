"""Hugging Face causal language models as the engine runs them: their attention reads segments.

`ragcache.models.families.wrap` makes a `CausalLM` of a loaded model.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ragcache.attention import (
    AttentionBackend,
    AttentionMetadata,
    attention_bytes,
)
from ragcache.attention.layout import LayerHeads, StateLayout
from ragcache.attention.recurrent import RecurrentBatch
from ragcache.attention.triton.operator import OperatorMetadata
from ragcache.errors import EngineFailed
from ragcache.models.positions import PositionScheme, changes_at_length
from ragcache.states.recurrent import RecurrentStates

if TYPE_CHECKING:
    from ragcache.models.hf_patch import SegmentCache  # imports transformers

_PIECE_BYTES = 64 * 2**20  # of a weight, hashed at once
_MOST_HASHERS = 8
MODULE_TOKENS, RECURRING_TOKENS, MOST_MODULE_TOKENS = 384, 576, 2048
"""Default limits of a module in tokens: of documents, of recurring texts, and the highest one of
models with recurrent layers."""
MANY_TO_ONE = 4
"""The last layer computes the wanted rows alone if a step has this many rows for each of them."""
VOLATILE = (
    *("transformers_version", "_name_or_path", "_attn_implementation"),
    *("architectures", "dtype", "torch_dtype"),
)


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The sizes of a model, under one name each."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    """Positions that prompt and answer may take together."""
    latent: int = 0
    """Width of the latent at the end of a key, which serves as the value. Then no values are
    kept."""
    layout: StateLayout | None = None
    """The planes of each layer, if layers have heads of different shapes. `num_layers` counts
    layers; `num_kv_heads` and `head_dim` are the shape of a plane."""

    @classmethod
    def of(
        cls, config: Any, *, num_kv_heads: int | None = None, window: int | None = None
    ) -> Dimensions:
        """Read the sizes under their usual names from a configuration. `num_kv_heads` and `window`
        are given if it has them under other names."""
        heads = int(config.num_attention_heads)
        kv_heads = num_kv_heads or getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        limit = _positions(config) if window is None else window
        layers = int(config.num_hidden_layers)
        return cls(layers, heads, int(kv_heads), int(head_dim), int(limit))


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """One ragged forward pass: the new tokens of all requests, flattened."""

    token_ids: Tensor
    """[T] int64."""
    position_ids: Tensor
    """[T] int64."""
    logit_rows: Tensor
    """[R] int64, the rows whose logits are wanted."""
    metadata: AttentionMetadata | OperatorMetadata
    """`OperatorMetadata` of a registered step on a device whose model `prepare_for_device` has
    prepared."""
    recurrent: RecurrentBatch | None = None
    """The runs of rows for recurrent layers, if the model has them."""

    @property
    def last_rows(self) -> Tensor | None:
        """Rows whose output the last layer computes: `logit_rows`, if they are so few that leaving
        the others out pays. None if it computes all rows."""
        few = MANY_TO_ONE * len(self.logit_rows) <= len(self.token_ids)
        return self.logit_rows if few else None


class CausalLM:
    """A patched Hugging Face model whose attention reads segments (`families.wrap_causal`).

    Key i of a segment is at position start + i, which `KVStates` promises: tokens that were encoded
    with gaps are read as one segment for each run without gaps (`KVStates.part`), as by prompts of
    PML. A request's own tokens, and an encoding in progress, may have gaps anywhere.

    Attributes:
        by_position: Whether attention needs the positions of keys beside their rotation: ALiBi,
            windows.
        states_dtype: Dtype of kept states: the dtype of the computation, unless that is wider
            than the checkpoint's. Set before anything is encoded.
        num_layers: L of states [L, Hkv, S, D]: layers with keys and values, or their planes if
            there is a layout.
        layout: The planes of each layer, if layers have heads of different shapes.
        latent: Width of the latent at the end of a key, which serves as the value. 0 if keys hold
            none.
        value_dim: Width of kept values: `head_dim`, or 0 if the keys hold latents.
        windows: Number of positions up to its own that a row sees, for each layer with a
            window. Empty if no layer has a window within the model's.
        softcap: Bound of the scores: softcap * tanh(score / softcap). Windows and caps are
            exact over segments, because scores are capped and masked one by one, before
            anything is summed.
        kernels: Whether the kernels of a GPU compute the attention.
        recurrent_bytes: Bytes of the recurrent states of one text. 0 if all layers are attention.
        composes: Whether prompts can be made of states of modules that were encoded one by one.
            False for models whose recurrent layers are not known to be affine.
        whole_layers: Whether every layer computes all rows (`Family.whole_layers`).
        divides: Whether any part of a module's states can be read. Recurrent layers keep one map
            of the whole module.
    """

    recurrent_bytes = 0
    composes = divides = True
    whole_layers = False
    ranks = 1
    """Number of processes that compute the model together."""
    host_memory: Callable[[int], NDArray[np.uint8]] | None = None
    """Allocates main memory for states, uint8 [N], if the model needs memory of its own kind."""
    copies: Any = None
    """Copies of states between tiers, if several devices compute the model (`LeaderCopies`)."""

    def __init__(
        self,
        model: Any,
        scheme: PositionScheme,
        backend: AttentionBackend,
        dimensions: Dimensions,
        windows: tuple[int | None, ...] = (),
        softcap: float | None = None,
        *,
        kernels: bool = True,
    ) -> None:
        self.model, self.scheme, self.backend = model, scheme, backend
        self.windows, self.softcap, self.kernels = windows, softcap, kernels
        self.by_position = scheme.slopes is not None or bool(windows)
        self.states_dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.layout = layout = dimensions.layout
        self.num_layers = dimensions.num_layers if layout is None else layout.num_planes
        self.num_heads = dimensions.num_heads
        self.num_kv_heads = dimensions.num_kv_heads
        self.head_dim = dimensions.head_dim
        self.latent = dimensions.latent
        self.value_dim = 0 if dimensions.latent else dimensions.head_dim
        self.window = dimensions.window

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and activations."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def depth(self) -> int:
        """Number of layers, with or without keys and values."""
        return self.num_layers

    @property
    def kept_heads(self) -> int:
        """Key heads of kept states in main memory. More than `num_kv_heads` if several devices have
        a part of the heads each."""
        return self.num_kv_heads

    @cached_property
    def vocabulary(self) -> int:
        """How many tokens the model has a vector for: their ids are below it."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @cached_property
    def logits_width(self) -> int:
        """V of the logits; it may exceed the number of the tokenizer's tokens."""
        head = self.model.get_output_embeddings()
        if head is not None:
            return int(getattr(head, "out_features", head.weight.shape[0]))
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return int(self.model.get_input_embeddings().weight.shape[1])

    @cached_property
    def fingerprint(self) -> str:
        """Digest of configuration, weights, and the dtypes of weights and kept states."""
        return model_fingerprint(self.model, self.states_dtype)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers, as they are kept."""
        return self._elements_per_token * self.states_dtype.itemsize

    def module_bytes(self, tokens: int) -> int:
        """Bytes of the states of a module, as they are kept.

        Args:
            tokens: Number of tokens of the module.
        """
        return tokens * self.bytes_per_token + self.map_bytes

    @property
    def map_shape(self) -> RecurrentStates | None:
        """Shapes of the maps of recurrent layers in a module's states, on the meta device. Unset if
        all layers are attention."""
        return None

    @property
    def map_bytes(self) -> int:
        """Bytes of the maps of recurrent layers in a module's states."""
        shape = self.map_shape
        return 0 if shape is None else shape.nbytes

    @property
    def map_tokens(self) -> int:
        """Tokens whose keys and values take as many bytes as the maps of recurrent layers."""
        return -(-self.map_bytes // self.bytes_per_token)

    def module_limit(self, given: int | str = "auto", default: int = MODULE_TOKENS) -> int:
        """Return the most tokens of a module.

        Args:
            given: The limit that the user has set. See `OpenConfig.module_tokens`.
            default: The limit of `auto`, unless the maps of recurrent layers ask for a longer one
                or the window has no room.
        """
        if given != "auto":
            return int(given)
        wanted = min(max(self.map_tokens, default), MOST_MODULE_TOKENS, self.window // 4)
        return max(MODULE_TOKENS, wanted)

    @property
    def computed_bytes_per_token(self) -> int:
        """The same as they are computed: of requests' own tokens, and of encodings under way."""
        return self._elements_per_token * self.dtype.itemsize

    @property
    def _elements_per_token(self) -> int:
        return self.num_layers * self.num_kv_heads * (self.head_dim + self.value_dim)

    def new_states(
        self, capacity: int, device: torch.device | None = None
    ) -> tuple[Tensor, Tensor]:
        """Allocate keys and values for `capacity` tokens, in the dtype of the computation.

        Returns:
            [L, Hkv, capacity, D] each, D of the values `value_dim`. On the model's device unless
                `device` is given.
        """
        shape = (self.num_layers, self.num_kv_heads, capacity)
        keys = torch.empty((*shape, self.head_dim), dtype=self.dtype, device=device or self.device)
        return keys, keys.new_empty((*shape, self.value_dim))

    def copy_states(self, target: Tensor, source: Tensor) -> None:
        """Copy states, [L, Hkv, S, D] each, between tensors of `new_states`."""
        target.copy_(source)

    def pass_bytes(self, rows: int, tokens: int, logit_rows: int = 0) -> int:
        """The most memory that a forward pass takes on a CPU, beside weights and states: all
        products of a layer twice, the residual stream with its norms, attention
        (`attention_bytes`), and logits with their shares.

        Args:
            rows: New tokens, of all requests.
            tokens: The longest run of states that they attend to, their own included.
            logit_rows: How many rows the next tokens are sampled from.
        """
        width = 2 * _layer_width(self.model) + 4 * self.hidden_size
        activations = rows * width * self.dtype.itemsize
        logits = logit_rows * self.vocabulary * (self.dtype.itemsize + 4)
        return activations + logits + self._attention_bytes(rows, tokens)

    def _attention_bytes(self, rows: int, tokens: int) -> int:
        """The most memory that attention of a layer takes (`attention_bytes`)."""
        if self.layout is None:
            heads = LayerHeads(self.num_kv_heads, self.head_dim)
            return attention_bytes(rows, tokens, self.num_heads, heads)
        joined = 2 * tokens * self.dtype.itemsize  # keys and values whose heads are joined
        return max(
            attention_bytes(rows, tokens, self.num_heads, each) + joined * each.count * each.size
            for each in set(self.layout.layers)
        )

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Logits of the wanted rows: [R, vocabulary]. Writes the rows' own states.

        The whole Hugging Face model is called, so that heads and the scaling of logits are its
        own. A model that takes no positions (ALiBi) passes over them.
        """
        return self._call(batch)

    @cached_property
    def _cache_name(self) -> str:
        """The name under which the model takes its cache."""
        from ragcache.models.hf_patch import cache_name  # transformers

        return cache_name(type(self.model.base_model).forward)

    @property
    def failure(self) -> EngineFailed | None:
        """The reason for which the processes of the model compute no more. None while they do."""
        return None

    def on_failure(self, call: Callable[[EngineFailed], object]) -> None:
        """Have a function called, in any thread, when `failure` is set. A model of one process
        never fails."""

    def close(self) -> None:
        """End the other processes of the model. A model of one process has none."""

    def _call(self, batch: ForwardBatch) -> Tensor:
        """Calls the model itself."""
        from ragcache.models.hf_patch import SegmentCache  # transformers

        return self._call_with(batch, SegmentCache(batch.metadata, self.backend))

    @cached_property
    def _last_layer(self) -> nn.Module | None:
        """The last layer, if it can compute its output of some rows. Models whose last layers share
        states have no list of `depth` layers."""
        layers = None if self.whole_layers else layer_list(self.model, self.depth)
        return None if layers is None else layers[-1]

    def _call_with(self, batch: ForwardBatch, cache: SegmentCache) -> Tensor:
        """Calls the model with a cache for this step."""
        from ragcache.models.hf_patch import step_in_context
        from ragcache.models.last_layer import Attended, divide_layer

        rows = batch.last_rows
        # latents that go through operators have values of their own, which segments do not hold
        known = not (self.latent and isinstance(batch.metadata, OperatorMetadata))
        if rows is not None and known and (last := self._last_layer) is not None:
            divide_layer(last)
            cache.rows = rows
        with step_in_context(batch.metadata, self.backend), suppress(Attended):
            out = self.model(
                input_ids=batch.token_ids[None],
                position_ids=batch.position_ids[None],
                # a finished mask: none is built
                attention_mask=batch.token_ids.new_empty(1, 1, 1, 1),
                use_cache=True,
                logits_to_keep=batch.logit_rows if cache.rows is None else 0,
                attention_metadata=batch.metadata,
                backend=self.backend,
                **{self._cache_name: cache},
            )
            logits: Tensor = out[0][0]
            return logits
        return torch.empty(0, self.logits_width, dtype=self.dtype, device=self.device)


def layer_list(model: nn.Module, depth: int) -> nn.ModuleList | None:
    """The list of a model's layers, if it has one of `depth` layers."""
    lists = (each for each in model.modules() if isinstance(each, nn.ModuleList))
    return next((each for each in lists if len(each) == depth), None)


def _layer_width(model: Any) -> int:
    """Elements that the products of the widest decoder layer make of one token, all of them. A
    token of a mixture of experts goes to some of them, or to all where none says how many."""
    config = model.config
    layers = layer_list(model, int(config.num_hidden_layers))
    chosen = getattr(config, "num_experts_per_tok", getattr(config, "top_k_experts", None))
    return max((_width(layer, chosen) for layer in layers or [model]), default=0)


def _width(layer: nn.Module, experts: int | None) -> int:
    """experts: of a token, of which a weight [E, out, in] or [E, in, out] holds E."""
    width = 0
    for module in layer.modules():
        features = getattr(module, "out_features", None)  # of a linear layer, packed or not
        if isinstance(features, int):
            width += features
        else:
            own = [each for each in module.parameters(recurse=False) if each.dim() > 1]
            width += sum(max(x.shape[-2:]) * (experts or x[..., 0, 0].numel()) for x in own)
    return width


def _positions(config: Any) -> int:
    """Positions of the configuration. With LongRoPE, positions up to which its frequencies are
    fixed, unless they are the same for all lengths (`checkpoint.use_long_factors`)."""
    positions = int(config.max_position_embeddings)
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") == "longrope" and changes_at_length(parameters):
        return min(positions, int(parameters["original_max_position_embeddings"]))
    return positions


def model_fingerprint(model: Any, states_dtype: torch.dtype | None = None) -> str:
    """A SHA-256 of configuration, dtypes and weights: of every weight tensor the name, shape, dtype
    and all bytes, hashed in threads. Tied weights count once. Weights whose digests were kept with
    them (`content_digests` of a model, by `content_name`) are not read again.

    Args:
        model: The Hugging Face model.
        states_dtype: Dtype of kept states, if the model computes in another.
    """
    digest = hashlib.sha256(_config_text(model.config).encode())
    if states_dtype not in (None, model.dtype):
        digest.update(f"states|{states_dtype}|".encode())
    parts = distinct_weights(model)
    known: Mapping[str, bytes] = getattr(model, "content_digests", {})
    rest = {name: each for name, each in parts.items() if content_name(name, each) not in known}
    digests = {**known, **content_digests(rest)}
    for name, tensor in parts.items():
        called = content_name(name, tensor)
        digest.update(called.encode() + digests[called])
    return digest.hexdigest()[:32]


def distinct_weights(model: Any) -> dict[str, Tensor]:
    """All tensors of a model in the order of their names. Tied weights have one name."""
    named = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied = named - {name for name, _ in model.named_parameters()}
    state = sorted(model.state_dict().items())
    return {name: weight.detach() for name, weight in state if name not in tied}


def content_digests(weights: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Digests of weights by `content_name`, computed in threads."""
    with ThreadPoolExecutor(min(_MOST_HASHERS, os.cpu_count() or 1)) as threads:
        found = threads.map(content_digest, weights.values())
        names = [content_name(*each) for each in weights.items()]
        return dict(zip(names, found, strict=True))


def content_name(name: str, tensor: Tensor) -> str:
    """Name of a tensor, with its shape and dtype."""
    return f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|"


def content_digest(weight: Tensor) -> bytes:
    """SHA-256 of a tensor's bytes, a piece at a time: a GPU's weights are not copied whole."""
    digest = hashlib.sha256()
    for piece in torch.split(weight.contiguous().view(-1).view(torch.uint8), _PIECE_BYTES):
        digest.update(piece.cpu().numpy().data)
    return digest.digest()


def _config_text(config: Any) -> str:
    """The configuration less what saving adds; the dtype counts with every weight."""
    entries = config.to_dict()
    nested = [entries[name] for name in config.sub_configs if isinstance(entries.get(name), dict)]
    for part in (entries, *nested):
        for name in VOLATILE:
            part.pop(name, None)
    return json.dumps(entries, sort_keys=True, default=str)
