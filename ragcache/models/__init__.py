"""Hugging Face models, patched in place so that they attend to segments; the embedded reader."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragcache.models.dtype import DTypeChoice, dtype_name
from ragcache.models.loader import (
    INSTRUCTION,
    READER_INSTRUCTION,
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
)
from ragcache.models.positions import Absolute, Alibi, LayeredRotary, PositionScheme, Rotary
from ragcache.models.tokenizer import PromptTokenizer

if TYPE_CHECKING:
    from ragcache.models.families import Family, register, wrap_causal
    from ragcache.models.trial import wrap

__all__ = [
    "INSTRUCTION",
    "READER_INSTRUCTION",
    "Absolute",
    "Alibi",
    "CausalLM",
    "DTypeChoice",
    "Dimensions",
    "Family",
    "ForwardBatch",
    "LayeredRotary",
    "LoadedModel",
    "PositionScheme",
    "PromptFrame",
    "PromptTokenizer",
    "Rotary",
    "dtype_name",
    "load_model",
    "prompt_frame",
    "register",
    "render_undated",
    "wrap",
    "wrap_causal",
]

_HOMES = {
    **dict.fromkeys(("Family", "register", "wrap_causal"), "ragcache.models.families"),
    "wrap": "ragcache.models.trial",
}


def __getattr__(name: str) -> object:
    """Loads names that need transformers on first use: the embedded reader does without."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ragcache.models' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
