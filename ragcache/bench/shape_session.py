"""A model of a shape with random weights and its engine, as benchmarks use them on any device."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from dataclasses import fields
from functools import cached_property, partial
from typing import Any

import torch

from ragcache.bench.harness import LlamaShape, Progress, draw_model
from ragcache.engine import (
    Context,
    EncodeJob,
    EngineConfig,
    EngineStats,
    LLMEngine,
    Request,
    TextStream,
    assemble_context,
)
from ragcache.models import CausalLM, wrap_causal
from ragcache.models.dtype import FP8
from ragcache.models.fp8 import quantize_fp8
from ragcache.states import KVStates
from ragcache.states.quantization import StoredStates

PATIENCE = 120.0
"""Seconds until a request counts as lost."""


class ShapeText(TextStream):
    """Text of a model whose vocabulary is larger than the tokenizer's: ids wrap around."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        super().__init__(tokenizer, stop)
        self._size = len(tokenizer)

    def push(self, token_id: int) -> str:
        return super().push(token_id % self._size)


class ShapeSession:
    """The model of a shape with random weights, and its engine. No figure depends on the weights.

    Args:
        shape: Sizes of the model.
        preamble: Number of tokens before all documents.
        device: Device of the model.
        progress: Called with a text at each part.
        pool_bytes: Memory of the engine's pool. Defaults to the engine's own choice.
        quantization: `fp8` rounds the weights. Defaults to bfloat16.
    """

    def __init__(
        self,
        shape: LlamaShape,
        preamble: int,
        device: str,
        progress: Progress = lambda _: None,
        pool_bytes: int | None = None,
        quantization: str | None = None,
    ) -> None:
        self.shape, self.preamble, self.device = shape, preamble, device
        self.progress, self.pool_bytes = progress, pool_bytes
        self.quantization, self.int8_states = quantization, False
        self.max_gap_ms: float | None = None
        self.rng = random.Random(1)

    @cached_property
    def model(self) -> Any:
        """The Hugging Face model, drawn on the device."""
        return draw_model(self.shape, self.device)

    @cached_property
    def causal(self) -> CausalLM:
        """The model, as the engine runs it."""
        if self.quantization == FP8:
            head = self.model.get_output_embeddings()
            quantize_fp8(self.model, head, torch.device(self.device))
        causal = wrap_causal(self.model)
        causal.fingerprint = "random weights"  # their digest would take longer than all parts
        return causal

    @cached_property
    def engine(self) -> LLMEngine:
        """The engine, at the defaults of the device."""
        config = EngineConfig.for_device(
            torch.device(self.device),
            warm_up=True,
            pool_bytes=self.pool_bytes,
            int8_states=self.int8_states,
            max_gap_ms=self.max_gap_ms,
        )
        return LLMEngine(self.causal, config)

    @cached_property
    def tokenizer(self) -> Any:
        """Tokenizer of the embedded reader."""
        from transformers import AutoTokenizer

        from ragcache.models.reader import READER

        return AutoTokenizer.from_pretrained(str(READER))

    @cached_property
    def root(self) -> KVStates:
        """States of the preamble."""
        [states] = self.engine.encode([EncodeJob(self.tokens(self.preamble))])
        return states

    def random_states(self, tokens: int, start: int) -> KVStates:
        """Draw states in place of encoded ones. Needs no engine, so that peers can read these
        before the model is patched."""
        shape = self.shape
        size = (2, shape.num_layers, shape.num_kv_heads, tokens, shape.head_dim)
        keys, values = torch.empty(size, dtype=torch.bfloat16, device=self.device).normal_()
        self.synchronize()  # the engine reads on a stream of its own
        return KVStates(keys, values, start)

    def tokens(self, count: int) -> list[int]:
        """Draw token ids."""
        return self.shape.draw_tokens(self.rng, count)

    def context(
        self, states: Sequence[StoredStates], new_tokens: int, question: Sequence[int]
    ) -> Context:
        """Return a prompt of these states behind the preamble, with a question."""
        window = self.causal.window
        return assemble_context(
            [self.root, *states], question, window=window, max_tokens=new_tokens
        )

    def request(self, context: Context, new_tokens: int) -> Request:
        """Return a request whose tokens are turned into text."""
        return Request(context, new_tokens, text=partial(ShapeText, self.tokenizer))

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device != "cpu":
            torch.cuda.synchronize()

    def free_memory(self) -> None:
        """Give memory without an owner back to the device."""
        gc.collect()
        if self.device != "cpu":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """End the engine and free everything."""
        if "engine" in self.__dict__:
            self.engine.close()
        self.__dict__ = {"device": self.device}
        if self.device != "cpu":
            torch._dynamo.reset()  # compiled layers refer to the model
        self.free_memory()


def counters_between(before: EngineStats, after: EngineStats) -> dict[str, float]:
    """Return the growth of each counter of an engine."""
    names = [field.name for field in fields(after)]
    return {name: getattr(after, name) - getattr(before, name) for name in names}
