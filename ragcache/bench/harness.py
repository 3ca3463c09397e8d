"""Shared parts of the benchmarks: machine, model shapes, timing, JSON files and plots."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ragcache.errors import MissingExtra
from ragcache.machine import keep_freed_memory
from ragcache.states import KVKey

if TYPE_CHECKING:
    from ragcache.models import CausalLM, LanguageModel, LoadedModel

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The sizes of a Llama; the default is the shape of the figures on a CPU (0.4 B)."""

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
        """Weights of the product that makes logits."""
        return self.hidden * self.vocabulary

    @property
    def pair_elements(self) -> int:
        """Elements of the keys and values of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim

    def flops(self, new_tokens: int, past_tokens: int) -> float:
        """Floating-point operations of a causal pass over `new_tokens` after `past_tokens`, with
        logits of the last row only."""
        products = 2.0 * new_tokens * self.num_layers * self.layer_weights
        pairs = new_tokens * past_tokens + new_tokens * (new_tokens + 1) / 2
        attention = 4.0 * pairs * self.num_layers * self.num_heads * self.head_dim
        return products + attention + 2.0 * self.hidden * self.vocabulary

    def draw_tokens(self, rng: random.Random, count: int) -> list[int]:
        """Token ids drawn uniformly from the vocabulary."""
        return [rng.randrange(self.vocabulary) for _ in range(count)]

    def build(self, dtype: torch.dtype, seed: int = 0, device: str | None = None) -> Any:
        """A Hugging Face model with random weights. device: where the weights are drawn, in `dtype`
        at once; None draws them in float32 on the CPU, the same on every machine."""
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
            rope_parameters={"rope_type": "default", "rope_theta": self.theta},
            tie_word_embeddings=self.tied,
            dtype=dtype,
        )
        if device is None:
            return LlamaForCausalLM(config).to(dtype).eval()
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                return LlamaForCausalLM(config).eval()
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
        """Token ids of the preamble, of each module and of the question."""
        draw = partial(shape.draw_tokens, random.Random(1))
        modules = [draw(self.module_tokens) for _ in range(self.modules)]
        return draw(self.preamble_tokens), modules, draw(self.question_tokens)


def shaped_causal(shape: LlamaShape, dtype: str = "auto", device: str = "cpu") -> CausalLM:
    """A model of the shape as `load_model` opens one whose random weights are in bfloat16."""
    from ragcache.models import wrap_causal
    from ragcache.models.dtype import choose_dtypes, convert

    keep_freed_memory()  # also for what transformers computes before a runner of ours does
    model = shape.build(torch.bfloat16)
    choice = choose_dtypes(model, torch.device(device), dtype)
    causal = wrap_causal(convert(model, choice.compute).to(device))
    causal.states_dtype = choice.states
    return causal


def dtypes_of(causal: LanguageModel) -> dict[str, str]:
    """What a model computes in and keeps states in, for the JSON of every figure."""
    from ragcache.models import dtype_name

    return {"compute": dtype_name(causal.dtype), "states": dtype_name(causal.states_dtype)}


def shaped_model(shape: LlamaShape, device: str | None = None, dtype: str = "auto") -> LoadedModel:
    """A model of the shape with random bfloat16 weights and the embedded reader's tokenizer.
    dtype: what it computes in on a CPU, as in `load_model`. device: see `LlamaShape.build`; what is
    drawn there has no digest, which would take minutes, and answers with tokens that are text."""
    from ragcache.models import LoadedModel, load_model, wrap_causal

    tokenizer = load_model().tokenizer
    if device is None:
        return LoadedModel("shape", shaped_causal(shape, dtype), tokenizer)
    model = shape.build(torch.bfloat16, device=device)
    silent = torch.ones(shape.vocabulary, dtype=torch.bool)
    for token in range(min(shape.vocabulary, len(tokenizer))):
        text = tokenizer.decode([token], skip_special_tokens=True)
        silent[token] = not text.isprintable() or not text.isascii() or not text
    with torch.no_grad():
        model.lm_head.weight[silent] = 0  # of thousands of logits the largest is above zero
    causal = wrap_causal(model)
    causal.fingerprint = f"random weights of {shape}"
    return LoadedModel("shape", causal, tokenizer)


def both_seconds(run: Callable[[], object]) -> tuple[float, float]:
    """Wall-clock seconds of one call on the CPU, and processor seconds of all threads."""
    busy = time.process_time()
    return seconds(run), time.process_time() - busy


def seconds(run: Callable[[], object], device: str = "cpu") -> float:
    """Wall-clock seconds of one call, including its work on a GPU."""
    begin = time.perf_counter()
    run()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def made_up_key(name: object) -> KVKey:
    """A key with the length of real digests."""
    return KVKey(hashlib.sha256(str(name).encode()).hexdigest())


def new_figure(columns: int) -> Any:
    """A matplotlib figure and its axes. Raises `MissingExtra` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra(
            "plots need matplotlib: install it with `pip install 'ragcache[plot]'`"
        ) from error
    figure = Figure(figsize=(5.5 * columns, 4), layout="constrained", dpi=150)
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def draw_bars(axes: Any, title: str, values: Mapping[str, float]) -> None:
    """Draws horizontal bars with their values."""
    names = list(values)[::-1]
    axes.barh(names, [values[name] for name in names], color="#4878a8")
    for row, name in enumerate(names):
        axes.annotate(f" {values[name]:.3g}", (values[name], row), va="center")
    axes.set_title(title)
    axes.margins(x=0.2)
    axes.spines[["top", "right"]].set_visible(False)
