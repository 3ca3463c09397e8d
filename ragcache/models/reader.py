"""The embedded reader on a CPU, in plain torch.

transformers takes longer to import than a cached question takes to answer, so the one checkpoint
that ships in the package is read without it (docs/adr/0035): a Llama with plain rotary positions,
tied embeddings and no biases. `tests/ragcache/models/test_reader.py` compares its tokens, texts and
log-probabilities with transformers over the same files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from ragcache.attention import AttentionBackend, AttentionMetadata, backend_for
from ragcache.attention.triton.operator import OperatorMetadata
from ragcache.errors import UnsupportedModel
from ragcache.models.model import CausalLM, Dimensions, ForwardBatch
from ragcache.models.positions import Rotary

READER = Path(__file__).parent.parent / "reader"
SCALE = "_scale"  # an int8 matrix `NAME` has its scales at `NAME_scale`


@dataclass
class ReaderConfig:
    """`config.json` of the reader: all of its entries, under their names."""

    sub_configs: ClassVar[Mapping[str, Any]] = {}

    architectures: Sequence[str]
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_parameters: Mapping[str, Any]
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    pad_token_id: int
    bos_token_id: int | None
    eos_token_id: int
    dtype: torch.dtype | str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class RMSNorm(nn.Module):
    """Root mean square normalization (Zhang and Sennrich, 2019), in float32."""

    def __init__(self, config: ReaderConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self.epsilon = config.rms_norm_eps

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weight * wide.to(hidden.dtype)


class Attention(nn.Module):
    """Projections and rotation of queries, keys and values. The step's metadata holds the rest."""

    def __init__(self, config: ReaderConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        own = config.num_attention_heads * config.head_dim
        shared = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, own, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, shared, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, shared, bias=False)
        self.o_proj = nn.Linear(own, config.hidden_size, bias=False)

    def forward(
        self,
        hidden: Tensor,
        turn: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        backend: AttentionBackend,
    ) -> Tensor:
        """hidden: [T, hidden size]; turn: cosines and sines, [T, D]."""
        query, key, value = (
            projection(hidden).unflatten(-1, (-1, self.head_dim)).transpose(0, 1)  # [H, T, D]
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = _turned(query, *turn), _turned(key, *turn)
        metadata.write_states(self.layer, key, value)
        scale = self.head_dim**-0.5
        out = backend.attend(metadata, self.layer, query, key, value, scale=scale)  # [T, Hq, D]
        attended: Tensor = self.o_proj(out.flatten(1))
        return attended


class FeedForward(nn.Module):
    """The gated unit SwiGLU (Shazeer, 2020)."""

    def __init__(self, config: ReaderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


class DecoderLayer(nn.Module):
    """Attention, then the feed-forward unit, each over the normalized sum of all before it."""

    def __init__(self, config: ReaderConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = FeedForward(config)
        self.input_layernorm = RMSNorm(config)
        self.post_attention_layernorm = RMSNorm(config)

    def forward(self, hidden: Tensor, *step: Any) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), *step)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class ReaderModel(nn.Module):
    """The reader's weights under the names of its checkpoint, and their forward pass."""

    generation_config = None  # what ends an answer is the tokenizer's to say

    def __init__(self, config: ReaderConfig) -> None:
        super().__init__()
        self.config = config
        vectors = torch.empty(config.vocab_size, config.hidden_size)
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(
                    config.vocab_size, config.hidden_size, _weight=vectors
                ),
                "layers": nn.ModuleList(
                    DecoderLayer(config, layer) for layer in range(config.num_hidden_layers)
                ),
                "norm": RMSNorm(config),
            }
        )
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu")
        theta = config.rope_parameters["rope_theta"]
        # an ordinary attribute: conversions of the model leave it in float32
        self.inverse_frequency = 1.0 / theta ** (exponents / config.head_dim)  # [D / 2]

    @property
    def dtype(self) -> torch.dtype:
        return self.get_input_embeddings().weight.dtype

    @property
    def device(self) -> torch.device:
        return self.get_input_embeddings().weight.device

    def get_input_embeddings(self) -> nn.Embedding:
        embedding = self.model["embed_tokens"]
        assert isinstance(embedding, nn.Embedding)
        return embedding

    def get_output_embeddings(self) -> nn.Embedding:
        return self.get_input_embeddings()

    def forward(self, batch: ForwardBatch, backend: AttentionBackend) -> Tensor:
        """Logits of the wanted rows: [R, vocabulary]."""
        hidden = self.model["embed_tokens"](batch.token_ids)  # [T, hidden size]
        angles = batch.position_ids[:, None].float() * self.inverse_frequency  # [T, D / 2]
        angles = torch.cat((angles, angles), -1)
        turn = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)
        for layer in self.model["layers"].children():
            hidden = layer(hidden, turn, batch.metadata, backend)
        rows = self.model["norm"](hidden)[batch.logit_rows]
        return functional.linear(rows, self.get_input_embeddings().weight)


class ReaderLM(CausalLM):
    """The embedded reader as the engine runs it."""

    def __init__(self, model: ReaderModel) -> None:
        scheme = Rotary(model.inverse_frequency)
        super().__init__(model, scheme, backend_for(model.device), Dimensions.of(model.config))

    def _call(self, batch: ForwardBatch) -> Tensor:
        """See `CausalLM._call`."""
        assert not isinstance(batch.metadata, OperatorMetadata)
        logits: Tensor = self.model(batch, self.backend)
        return logits


class ReaderTokenizer:
    """The reader's tokenizer under the names of transformers, read only.

    Other methods are delegated to the tokenizer of transformers over the same files, which is
    imported at first use. A copy is a tokenizer of transformers.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        entries = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        self.chat_template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        self.backend_tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.eos_token, self.pad_token = entries["eos_token"], entries["pad_token"]
        self.bos_token = self.bos_token_id = None
        self.eos_token_id = self.backend_tokenizer.token_to_id(self.eos_token)
        self.all_special_tokens = [self.eos_token, self.pad_token]

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return self.backend_tokenizer.get_added_tokens_decoder()

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab()

    def encode(self, text: str, *, add_special_tokens: bool = True, **options: Any) -> list[int]:
        if options:
            ids: list[int] = self.hugging_face.encode(
                text, add_special_tokens=add_special_tokens, **options
            )
            return ids
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        return self.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def get_chat_template(self) -> str:
        return self.chat_template

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        tokenize: bool = True,
        **variables: Any,
    ) -> Any:
        """The conversation in the words of the template; tools are not among them."""
        if tokenize or chat_template not in (None, self.chat_template):
            return self.hugging_face.apply_chat_template(
                conversation, chat_template=chat_template, tokenize=tokenize, **variables
            )
        return self._template.render(messages=conversation, **variables)

    @cached_property
    def _template(self) -> Any:
        sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        return sandbox.from_string(self.chat_template)

    @cached_property
    def hugging_face(self) -> Any:
        """The tokenizer of transformers."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._folder)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(self.hugging_face, memo)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "add_")) or name == "hugging_face":
            raise AttributeError(name)
        return getattr(self.hugging_face, name)


def read_reader(folder: Path) -> tuple[ReaderModel, ReaderTokenizer]:
    """The reader's model, in its checkpoint's dtype, and its tokenizer."""
    entries = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    entries["dtype"] = getattr(torch, entries["dtype"])
    int8_rows = entries.pop("int8_rows", False)
    with torch.device("meta"):
        model = ReaderModel(ReaderConfig(**entries))
    weights = load_file(folder / "model.safetensors")
    if int8_rows:
        weights = dequantize_rows(weights, entries["dtype"])
    model.load_state_dict(weights, assign=True)
    return model.eval().requires_grad_(False), ReaderTokenizer(folder)


def dequantize_rows(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights of a checkpoint whose `config.json` says `int8_rows`, in `dtype`.

    Its matrices [rows, columns] are int8, and each has float32 scales [rows] at its name with
    `_scale`. The product is computed in float32 and rounded once.

    Raises:
        UnsupportedModel: A matrix has no scales, or scales are without a matrix, of another shape,
            or not positive numbers.
    """
    scales = {name.removesuffix(SCALE): w for name, w in weights.items() if name.endswith(SCALE)}
    kept = {name: weight for name, weight in weights.items() if not name.endswith(SCALE)}
    for name in sorted(scales.keys() | {n for n, w in kept.items() if w.dtype == torch.int8}):
        _check_scales(name, kept.get(name), scales.get(name))
        kept[name] = (kept[name].float() * scales[name][:, None]).to(dtype)
    return kept


def _check_scales(name: str, matrix: Tensor | None, scale: Tensor | None) -> None:
    if scale is None:
        wrong = f"{name} is in int8, and there is no {name}{SCALE}"
    elif matrix is None or matrix.dtype != torch.int8 or matrix.dim() != 2:
        wrong = f"{name}{SCALE} is there, and {name} is no matrix in int8"
    elif scale.shape != matrix.shape[:1] or scale.dtype != torch.float32:
        wanted = f"float32 {list(matrix.shape[:1])}"
        wrong = f"{name}{SCALE} is {scale.dtype} {list(scale.shape)} instead of {wanted}"
    elif not (scale.isfinite() & (scale > 0)).all():
        wrong = f"{name}{SCALE} holds numbers that are not positive"
    else:
        return
    raise UnsupportedModel(
        f"the checkpoint says int8_rows, but its file does not fit: {wrong}; write it again, each "
        f"matrix with one positive scale for a row"
    )


def _turned(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary positions (RoFormer, Su et al., 2021), of dimensions i and i + D/2. [H, T, D]."""
    first, second = states.chunk(2, -1)
    return states * cosines + torch.cat((-second, first), -1) * sines
