"""Hugging Face models, patched in place so that they attend to segments."""

from ragcache.models.dtype import DTypeChoice, dtype_name
from ragcache.models.families import Family, register, wrap_causal
from ragcache.models.loader import (
    INSTRUCTION,
    LoadedModel,
    PromptFrame,
    load_model,
    prompt_frame,
    render_undated,
)
from ragcache.models.model import (
    CausalLM,
    Dimensions,
    ForwardBatch,
    LanguageModel,
)
from ragcache.models.positions import Alibi, LayeredRotary, Learned, PositionScheme, Rotary
from ragcache.models.tokenizer import PromptTokenizer
from ragcache.models.trial import wrap

__all__ = [
    "INSTRUCTION", "Alibi", "CausalLM", "DTypeChoice", "Dimensions", "Family", "ForwardBatch",
    "LanguageModel", "LayeredRotary", "Learned", "LoadedModel", "PositionScheme", "PromptFrame",
    "PromptTokenizer", "Rotary", "dtype_name", "load_model", "prompt_frame", "register",
    "render_undated", "wrap", "wrap_causal",
]  # fmt: skip
