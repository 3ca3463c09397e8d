"""The reader as a plain Llama in PyTorch, for training: flex attention over block masks.

The weights carry Hugging Face's names, so that `export` is a plain save.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from samples import QUESTION

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 3,
    "dtype": "bfloat16",
}
HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 384, 6, 2, 64


def block_mask(blocks: Tensor, rooted: Tensor) -> BlockMask:
    """Who sees whom: causal; questions see the context and themselves; and where `rooted` [B] is
    true, a module sees only the preamble and itself. blocks: [B, T]."""

    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        of_q, of_k = blocks[b, q], blocks[b, k]
        context_k = (of_k >= 0) & (of_k < QUESTION)
        alone = (of_q < QUESTION) & rooted[b] & (of_k != 0)
        return (q >= k) & ((of_q == of_k) | (context_k & ~alone))

    batch, length = blocks.shape
    return create_block_mask(allowed, batch, None, length, length, device=blocks.device)


def rope(positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos, sin: [B, 1, T, head_dim]."""
    inverse = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=positions.device) / HEAD_DIM)
    angles = positions[..., None].float() * inverse
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-right, left], dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: BlockMask) -> Tensor:
        batch, length, _ = x.shape
        split = lambda y: y.view(batch, length, -1, HEAD_DIM).transpose(1, 2)  # noqa: E731
        query = rotate(split(self.q_proj(x)), cos, sin)
        key = rotate(split(self.k_proj(x)), cos, sin)
        value = split(self.v_proj(x))
        out = flex_attention(query, key, value, block_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        inner = CONFIG["intermediate_size"]
        self.gate_proj = nn.Linear(HIDDEN, inner, bias=False)
        self.up_proj = nn.Linear(HIDDEN, inner, bias=False)
        self.down_proj = nn.Linear(inner, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.input_layernorm = nn.RMSNorm(HIDDEN, eps=CONFIG["rms_norm_eps"])
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, eps=CONFIG["rms_norm_eps"])
        self.mlp = MLP()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: BlockMask) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin, mask))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class Reader(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.embed_tokens = nn.Embedding(CONFIG["vocab_size"], HIDDEN)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(CONFIG["num_hidden_layers"]))
        self.norm = nn.RMSNorm(HIDDEN, eps=CONFIG["rms_norm_eps"])
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                scale = 0.02 / 4 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
                nn.init.normal_(weight, std=scale)

    def forward(self, tokens: Tensor, positions: Tensor, mask: BlockMask) -> Tensor:
        """tokens, positions: [B, T]; hidden states: [B, T, hidden]."""
        x = self.dropout(self.embed_tokens(tokens))
        cos, sin = rope(positions)
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return self.norm(x)

    def export(self) -> dict[str, Tensor]:
        """The weights under Hugging Face's names, in bfloat16."""
        return {
            f"model.{name}": weight.detach().to(torch.bfloat16).contiguous().cpu()
            for name, weight in self.named_parameters()
        }
