"""Shared parts of the benchmarks: random models, timing, and Hugging Face baselines."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ragcache.machine import keep_freed_memory
from ragcache.states import KVKey, KVStates

if TYPE_CHECKING:
    from ragcache.models import CausalLM

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes of a Llama. The default is the shape of the published figures on a CPU (0.4 B)."""

    num_layers: int = 24
    hidden: int = 896
    num_heads: int = 14
    num_kv_heads: int = 2
    intermediate: int = 4864
    vocabulary: int = 32000
    window: int = 8192
    theta: float = 10_000.0
    tied: bool = True

    @property
    def head_dim(self) -> int:
        return self.hidden // self.num_heads

    @property
    def layer_weights(self) -> int:
        """Weights of one layer's matrix products."""
        attention = 2 * self.hidden * (self.num_heads + self.num_kv_heads) * self.head_dim
        return attention + 3 * self.hidden * self.intermediate

    @property
    def head_weights(self) -> int:
        """Weights of the product that computes logits."""
        return self.hidden * self.vocabulary

    @property
    def pair_elements(self) -> int:
        """Elements of the keys and values of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim

    def flops(self, new_tokens: int, past_tokens: int) -> float:
        """Return the floating-point operations of a causal pass. Counts logits of the last row."""
        products = 2.0 * new_tokens * self.num_layers * self.layer_weights
        pairs = new_tokens * past_tokens + new_tokens * (new_tokens + 1) / 2
        attention = 4.0 * pairs * self.num_layers * self.num_heads * self.head_dim
        return products + attention + 2.0 * self.hidden * self.vocabulary

    def draw_tokens(self, rng: random.Random, count: int) -> list[int]:
        """Draw token ids uniformly from the vocabulary."""
        return [rng.randrange(self.vocabulary) for _ in range(count)]

    def config(self, dtype: torch.dtype) -> Any:
        """Return the configuration of a Hugging Face model of this shape."""
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            max_position_embeddings=self.window,
            rope_parameters={"rope_type": "default", "rope_theta": self.theta},
            tie_word_embeddings=self.tied,
            dtype=dtype,
        )

    def build(
        self,
        dtype: torch.dtype,
        device: str = "cpu",
        drawn: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> Any:
        """Return a Hugging Face model with random weights.

        Args:
            dtype: Dtype of the model.
            device: Device on which the weights are drawn, and stay. On a CPU they are the same on
                every machine.
            drawn: Dtype in which the weights are drawn.
            seed: Seed of the weights.
        """
        from transformers import LlamaForCausalLM

        torch.manual_seed(seed)
        before = torch.get_default_dtype()
        torch.set_default_dtype(drawn)
        try:
            with torch.device(device):
                return LlamaForCausalLM(self.config(dtype)).to(dtype).eval()
        finally:
            torch.set_default_dtype(before)


SHAPES: Mapping[str, LlamaShape] = {
    "7b": LlamaShape(32, 4096, 32, 32, 11008, 32000, 32768, 10_000.0, tied=False),
    "8b": LlamaShape(32, 4096, 32, 8, 14336, 128256, 32768, 500_000.0, tied=False),
}
"""The shapes of the figures on a GPU: Llama 7B with as many key heads as query heads, and 8B."""


@dataclass(frozen=True, slots=True)
class PromptSetting:
    """Lengths of a prompt of a preamble, modules and a question."""

    modules: int = 4
    module_tokens: int = 1024
    preamble_tokens: int = 32
    question_tokens: int = 48

    @property
    def cached_tokens(self) -> int:
        return self.preamble_tokens + self.modules * self.module_tokens

    def draw(self, shape: LlamaShape) -> tuple[list[int], list[list[int]], list[int]]:
        """Draw token ids of the preamble, of each module and of the question."""
        draw = partial(shape.draw_tokens, random.Random(1))
        modules = [draw(self.module_tokens) for _ in range(self.modules)]
        return draw(self.preamble_tokens), modules, draw(self.question_tokens)


def draw_model(shape: LlamaShape, device: str) -> Any:
    """Return a Hugging Face model whose random weights are drawn on a device, in bfloat16."""
    return shape.build(torch.bfloat16, device, torch.bfloat16)


def shaped_causal(
    shape: LlamaShape, dtype: str = "auto", answers: Sequence[int] | None = None
) -> CausalLM:
    """Return a model of the shape on the CPU, as `load_model` opens bfloat16 weights.

    Args:
        shape: Its sizes.
        dtype: What it computes in.
        answers: Tokens that answers consist of. Defaults to all tokens.
    """
    from ragcache.models import wrap_causal
    from ragcache.models.dtype import choose_dtypes, convert

    keep_freed_memory()  # before transformers computes; our runner calls it later
    model = shape.build(torch.bfloat16)
    if answers is not None:
        silence_others(model, answers)
    choice = choose_dtypes(model, torch.device("cpu"), dtype)
    causal = wrap_causal(convert(model, choice.compute))
    causal.states_dtype = choice.states
    return causal


@torch.no_grad()
def silence_others(model: Any, answers: Sequence[int]) -> None:
    """Let a model with random weights answer with certain tokens only.

    The logits of other tokens are 0. Of thousands of random logits the largest is above.
    """
    silent = torch.ones(model.config.vocab_size, dtype=torch.bool)
    silent[list(answers)] = False
    model.lm_head.weight[silent] = 0


def dtypes_of(causal: CausalLM) -> dict[str, str]:
    """Return the dtypes of a model's computation and states, for the JSON of every figure."""
    from ragcache.models import dtype_name

    return {"compute": dtype_name(causal.dtype), "states": dtype_name(causal.states_dtype)}


def seconds(run: Callable[[], object]) -> float:
    """Return the wall-clock seconds of one call."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


@torch.inference_mode()
def prefill(model: Any, prompt: Sequence[int]) -> int:
    """Compute a whole prompt. Returns the first token of the answer."""
    logits: Tensor = model(_ids(model, prompt), use_cache=True, logits_to_keep=1).logits
    return int(logits[0, -1].argmax())


def made_up_key(name: object) -> KVKey:
    """Return a key with the length of real digests."""
    return KVKey(hashlib.sha256(str(name).encode()).hexdigest())


def in_dtype(states: KVStates, dtype: torch.dtype) -> KVStates:
    """Convert states to the dtype that the model computes in, which Hugging Face needs."""
    return KVStates(states.keys.to(dtype), states.values.to(dtype), states.start)


@torch.inference_mode()
def concatenate(model: Any, states: Sequence[KVStates], question: Sequence[int]) -> int:
    """Return the first token over the states of every layer, concatenated in a `DynamicCache`."""
    from transformers import DynamicCache

    from ragcache.models.hf_patch import cache_name

    cache = DynamicCache()
    for layer in range(states[0].keys.shape[0]):
        keys = torch.cat([s.keys[layer] for s in states], dim=1)
        values = torch.cat([s.values[layer] for s in states], dim=1)
        cache.update(keys[None], values[None], layer)
    start = sum(s.length for s in states)
    positions = torch.arange(start, start + len(question), device=model.device)[None]
    name = cache_name(type(model.base_model).forward)
    logits: Tensor = model(
        _ids(model, question), position_ids=positions, logits_to_keep=1, **{name: cache}
    ).logits
    return int(logits[0, -1].argmax())


def _ids(model: Any, tokens: Sequence[int]) -> Tensor:
    return torch.tensor([list(tokens)], device=model.device)
