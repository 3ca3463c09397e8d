"""Hugging Face models, patched in place so that they attend to segments."""

from ragcache.models.families import Family, register, wrap, wrap_causal, wrap_contiguous
from ragcache.models.loader import (
    LoadedModel,
    PromptFrame,
    ThreadSafeTokenizer,
    load_model,
    prompt_frame,
)
from ragcache.models.model import (
    Buffer,
    BufferPool,
    CausalLM,
    ContiguousLM,
    Dimensions,
    ForwardBatch,
    LanguageModel,
)
from ragcache.models.positions import Alibi, LayeredRotary, Learned, PositionScheme, Rotary

__all__ = [
    "Alibi", "Buffer", "BufferPool", "CausalLM", "ContiguousLM", "Dimensions", "Family",
    "ForwardBatch", "LanguageModel", "LayeredRotary", "Learned", "LoadedModel", "PositionScheme",
    "PromptFrame", "Rotary", "ThreadSafeTokenizer", "load_model", "prompt_frame", "register",
    "wrap", "wrap_causal", "wrap_contiguous",
]  # fmt: skip
