"""Llama and models like it on a CPU, in plain torch.

transformers takes longer to import than a cached question takes to answer, so a model of these
architectures is computed without it (docs/internals/adr/0105): rotary positions of fixed
frequencies, grouped key heads, a gated unit, and what Mistral, Qwen2 and Qwen3 add to that. Modules
have the names of their checkpoints. `tests/ragcache/models/test_plain.py` compares logits with
transformers over the same files.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ragcache.attention import AttentionBackend, AttentionMetadata, backend_for
from ragcache.attention.triton.operator import OperatorMetadata
from ragcache.errors import UnsupportedModel
from ragcache.models.model import CausalLM, Dimensions, ForwardBatch
from ragcache.models.positions import Rotary, rotary_scaling

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
HEAD = "lm_head.weight"
_SCALINGS = ("default", "linear", "llama3")
_SIZES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim max_position_embeddings rms_norm_eps rope_parameters rope_theta "
    "tie_word_embeddings attention_bias mlp_bias"
)
_WITHOUT_EFFECT = (
    "architectures attention_dropout bos_token_id chunk_size_feed_forward dtype eos_token_id "
    "id2label initializer_range label2id max_window_layers output_attentions output_hidden_states "
    "pad_token_id problem_type return_dict transformers_version use_cache _name_or_path "
    "_model_name_or_path"
)
_KNOWN = frozenset(f"{_SIZES} {_WITHOUT_EFFECT}".split())
_ROTARY = frozenset(
    "rope_theta rope_type factor low_freq_factor high_freq_factor "
    "original_max_position_embeddings".split()
)


class PlainConfig(SimpleNamespace):
    """The entries of a `config.json`, under their names."""

    sub_configs: ClassVar[Mapping[str, Any]] = {}

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def unknown_entry(config: PlainConfig) -> str | None:
    """The name of an entry of a configuration with which this module does not compute, if any."""
    entries = config.to_dict()
    window, length = entries.get("sliding_window"), entries.get("max_position_embeddings", 0)
    rotary = entries.get("rope_parameters") or {}
    served = {
        "model_type": entries.get("model_type") in MODEL_TYPES,
        "hidden_act": entries.get("hidden_act") == "silu",
        "use_sliding_window": not entries.get("use_sliding_window"),
        "sliding_window": window is None or window >= length,
        "layer_types": set(entries.get("layer_types") or ()) <= {"full_attention"},
        "pretraining_tp": entries.get("pretraining_tp", 1) == 1,
        "is_encoder_decoder": not entries.get("is_encoder_decoder"),
        "rope_parameters": set(rotary) <= _ROTARY and rotary.get("rope_type") in _SCALINGS,
    }
    served |= {name: name in _KNOWN for name in entries if name not in served}
    return next((name for name, fits in served.items() if not fits), None)


class RMSNorm(nn.Module):
    """Root mean square normalization (Zhang and Sennrich, 2019), in float32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weight * wide.to(hidden.dtype)


class Attention(nn.Module):
    """Projections and rotation of queries, keys and values. The step's metadata holds the rest."""

    def __init__(self, config: PlainConfig, layer: int) -> None:
        super().__init__()
        sizes, width = Dimensions.of(config), config.hidden_size
        self.layer, self.head_dim = layer, sizes.head_dim
        own, shared = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        biased = bool(getattr(config, "attention_bias", False))
        inward = biased or config.model_type == "qwen2"
        self.q_proj = nn.Linear(width, own, bias=inward)
        self.k_proj = nn.Linear(width, shared, bias=inward)
        self.v_proj = nn.Linear(width, shared, bias=inward)
        self.o_proj = nn.Linear(own, width, bias=biased)
        self.norms_heads = config.model_type == "qwen3"
        if self.norms_heads:
            self.q_norm = RMSNorm(sizes.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(sizes.head_dim, config.rms_norm_eps)

    def forward(
        self,
        hidden: Tensor,
        turn: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        backend: AttentionBackend,
        rows: Tensor | None = None,
    ) -> Tensor:
        """hidden: [T, hidden size]; turn: cosines and sines, [T, D]; rows: [R], the rows that are
        returned, if not all."""
        query, key, value = (
            projection(hidden).unflatten(-1, (-1, self.head_dim))  # [T, H, D]
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.norms_heads:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (each.transpose(0, 1) for each in (query, key, value))  # [H, T, D]
        query, key = _turned(query, *turn), _turned(key, *turn)
        metadata.write_states(self.layer, key, value)
        scale = self.head_dim**-0.5
        if rows is not None and not len(rows):
            return hidden.new_empty(0, hidden.shape[1])
        out = backend.attend(metadata, self.layer, query, key, value, scale=scale)  # [T, Hq, D]
        if rows is not None:
            out = out[rows]
        attended: Tensor = self.o_proj(out.flatten(1))
        return attended


class FeedForward(nn.Module):
    """The gated unit SwiGLU (Shazeer, 2020)."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        biased = bool(getattr(config, "mlp_bias", False))
        self.gate_proj = nn.Linear(width, inner, bias=biased)
        self.up_proj = nn.Linear(width, inner, bias=biased)
        self.down_proj = nn.Linear(inner, width, bias=biased)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


class DecoderLayer(nn.Module):
    """Attention, then the feed-forward unit, each over the normalized sum of all before it."""

    def __init__(self, config: PlainConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = FeedForward(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor, *step: Any, rows: Tensor | None = None) -> Tensor:
        """Compute the layer for some rows. All rows write their states."""
        attended = self.self_attn(self.input_layernorm(hidden), *step, rows)
        hidden = (hidden if rows is None else hidden[rows]) + attended
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Decoder(nn.Module):
    """Embeddings, layers, and the norm after them."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        words, width = config.vocab_size, config.hidden_size
        self.embed_tokens = nn.Embedding(words, width, _weight=torch.empty(words, width))
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class PlainForCausalLM(nn.Module):
    """Weights under the names of their checkpoint, and their forward pass.

    A new model has no weights (`torch.device("meta")`): `load_weights` gives it some.

    Args:
        config: The configuration.
        inverse_frequency: [D / 2] float32, radians a position. Defaults to the frequencies of
            positions without scaling.
        eos_token_id: Tokens that end an answer, beside the tokenizer's own.

    Raises:
        UnsupportedModel: An entry of the configuration is unknown.
    """

    def __init__(
        self,
        config: PlainConfig,
        inverse_frequency: Tensor | None = None,
        eos_token_id: list[int] | None = None,
    ) -> None:
        if (name := unknown_entry(config)) is not None:
            raise UnsupportedModel(
                f"plain torch computes no {config.model_type} model whose configuration has "
                f"{name}={getattr(config, name, None)!r}"
            )
        super().__init__()
        self.config = config
        self.generation_config = SimpleNamespace(eos_token_id=eos_token_id)
        self.content_digests: Mapping[str, bytes] = {}
        with torch.device("meta"):
            self.model = Decoder(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if inverse_frequency is None:
            size = Dimensions.of(config).head_dim
            exponents = torch.arange(0, size, 2, dtype=torch.float32, device="cpu")
            theta = config.rope_parameters["rope_theta"]
            inverse_frequency = 1.0 / theta ** (exponents / size)
        # an ordinary attribute: conversions of the model leave it in float32
        self.inverse_frequency = inverse_frequency
        self.eval().requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    @property
    def base_model(self) -> Decoder:
        return self.model

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def load_weights(self, weights: Mapping[str, Tensor], *, complete: bool = True) -> None:
        """Take weights as they are, by their names. A tied head takes its own from the embeddings.

        Args:
            weights: The weights.
            complete: Whether they are all. Layers that will be replaced need none.

        Raises:
            RuntimeError: A name is unknown or missing, or a weight has another size.
        """
        found = self.load_state_dict(weights, strict=False, assign=True)
        if HEAD in found.missing_keys and self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
            found.missing_keys.remove(HEAD)
        wrong = found.unexpected_keys or (found.missing_keys if complete else [])
        if wrong:
            what = "unknown" if found.unexpected_keys else "missing"
            raise RuntimeError(f"weights of the model are {what}: {', '.join(wrong)}")
        self.requires_grad_(False)

    def forward(self, batch: ForwardBatch, backend: AttentionBackend) -> Tensor:
        """Logits of the wanted rows: [R, vocabulary]."""
        hidden = self.model.embed_tokens(batch.token_ids)  # [T, hidden size]
        angles = batch.position_ids[:, None].float() * self.inverse_frequency  # [T, D / 2]
        angles = torch.cat((angles, angles), -1)
        turn = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)
        *layers, last = self.model.layers
        for layer in layers:
            hidden = layer(hidden, turn, batch.metadata, backend)
        rows = batch.last_rows
        hidden = last(hidden, turn, batch.metadata, backend, rows=rows)
        wanted = hidden if rows is not None else hidden[batch.logit_rows]
        logits: Tensor = self.lm_head(self.model.norm(wanted))
        return logits


class PlainLM(CausalLM):
    """A plain model as the engine runs it."""

    def __init__(self, model: PlainForCausalLM) -> None:
        scheme = Rotary(model.inverse_frequency, rotary_scaling(model.config))
        super().__init__(model, scheme, backend_for(model.device), Dimensions.of(model.config))

    def _call(self, batch: ForwardBatch) -> Tensor:
        """See `CausalLM._call`."""
        assert not isinstance(batch.metadata, OperatorMetadata)
        logits: Tensor = self.model(batch, self.backend)
        return logits


def _turned(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary positions (RoFormer, Su et al., 2021), of dimensions i and i + D/2. [H, T, D]."""
    first, second = states.chunk(2, -1)
    return states * cosines + torch.cat((-second, first), -1) * sines
