"""Randomly initialised models of known shapes, and the arithmetic that they cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ragcache.models import LoadedModel


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The sizes of a Llama; the default is the shape of all our CPU figures (0.4 B)."""

    num_layers: int = 24
    hidden: int = 896
    num_heads: int = 14
    num_kv_heads: int = 2
    intermediate: int = 4864
    vocabulary: int = 32000
    window: int = 8192

    @property
    def head_dim(self) -> int:
        return self.hidden // self.num_heads

    @property
    def layer_weights(self) -> int:
        """Weights of one layer's products."""
        attention = 2 * self.hidden * (self.num_heads + self.num_kv_heads) * self.head_dim
        return attention + 3 * self.hidden * self.intermediate

    def flops(self, new_tokens: int, past_tokens: int) -> float:
        """Floating-point operations of a causal pass over `new_tokens` after `past_tokens`, with
        logits of the last row only."""
        products = 2.0 * new_tokens * self.num_layers * self.layer_weights
        pairs = new_tokens * past_tokens + new_tokens * (new_tokens + 1) / 2
        attention = 4.0 * pairs * self.num_layers * self.num_heads * self.head_dim
        return products + attention + 2.0 * self.hidden * self.vocabulary

    def build(self, dtype: torch.dtype, seed: int = 0) -> Any:
        """A Hugging Face model with random weights."""
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            max_position_embeddings=self.window,
            tie_word_embeddings=True,
            dtype=dtype,
        )
        return LlamaForCausalLM(config).to(dtype).eval()


def shaped_model(shape: LlamaShape) -> LoadedModel:
    """A random model of the shape, in bfloat16, with the tokenizer of the embedded reader."""
    from ragcache.models import LoadedModel, load_model, wrap_causal

    model = wrap_causal(shape.build(torch.bfloat16))
    return LoadedModel("shape", model, load_model().tokenizer)
