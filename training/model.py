"""The reader as a plain Llama in PyTorch, for training.

Pretraining uses causal attention over packed text, finetuning flex attention over block masks. The
weights carry Hugging Face's names, so that `export` is a plain save.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from samples import QUESTION

THETA = 10000.0
WINDOW = 4096


@dataclass(frozen=True)
class Shape:
    """The sizes of a reader. The default has 30.9 M parameters, 31 MB in int8."""

    vocabulary: int = 16384
    hidden: int = 512
    inner: int = 1408
    layers: int = 8
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64

    def config(self) -> dict[str, Any]:
        """config.json as Hugging Face reads it."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": WINDOW,
            "rms_norm_eps": 1e-5,
            "rope_theta": THETA,
            "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": 3,
            "dtype": "bfloat16",
        }


Mask = BlockMask | Tensor


def block_mask(blocks: Tensor, rooted: Tensor, dense: bool = False) -> Mask:
    """Who sees whom: causal; questions see the context and themselves; and where `rooted` [B] is
    true, a module sees only the preamble and itself. blocks: [B, T]. Dense, a tensor [B, 1, T, T]:
    on CPUs, where flex attention has no backward pass, and for models that are not compiled."""

    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        of_q, of_k = blocks[b, q], blocks[b, k]
        context_k = (of_k >= 0) & (of_k < QUESTION)
        alone = (of_q < QUESTION) & rooted[b] & (of_k != 0)
        return (q >= k) & ((of_q == of_k) | (context_k & ~alone))

    batch, length = blocks.shape
    if dense or not blocks.is_cuda:
        rows = torch.arange(batch, device=blocks.device)
        places = torch.arange(length, device=blocks.device)
        return allowed(rows[:, None, None], rows, places[:, None], places)[:, None]
    return create_block_mask(allowed, batch, None, length, length, device=blocks.device)


def rope(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos, sin: [B, 1, T, head_dim]."""
    inverse = THETA ** (-torch.arange(0, head_dim, 2, device=positions.device) / head_dim)
    angles = positions[..., None].float() * inverse
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-right, left], dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        inner, shared = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, inner, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shared, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shared, bias=False)
        self.o_proj = nn.Linear(inner, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None) -> Tensor:
        batch, length, _ = x.shape
        split = lambda y: y.view(batch, length, -1, self.head_dim).transpose(1, 2)  # noqa: E731
        query = rotate(split(self.q_proj(x)), cos, sin)
        key = rotate(split(self.k_proj(x)), cos, sin)
        value = split(self.v_proj(x))
        if isinstance(mask, BlockMask):
            out = flex_attention(query, key, value, block_mask=mask, enable_gqa=True)
        else:
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
            )
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin, mask))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class Reader(nn.Module):
    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.dropout = nn.Dropout(dropout)
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                scale = 0.02 / 4 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
                nn.init.normal_(weight, std=scale)

    def forward(self, tokens: Tensor, positions: Tensor, mask: Mask | None = None) -> Tensor:
        """Hidden states [B, T, hidden]. tokens, positions: [B, T]. Without a mask: causal."""
        x = self.dropout(self.embed_tokens(tokens))
        cos, sin = rope(positions, self.shape.head_dim)
        dtype = torch.bfloat16 if torch.is_autocast_enabled(x.device.type) else x.dtype
        cos, sin = cos.to(dtype), sin.to(dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return self.norm(x)

    def export(self) -> dict[str, Tensor]:
        """The weights under Hugging Face's names, in bfloat16."""
        return {
            f"model.{name}": weight.detach().to(torch.bfloat16).contiguous().cpu()
            for name, weight in self.named_parameters()
        }
