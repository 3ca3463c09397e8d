"""Hugging Face models, patched in place so that they attend to segments."""

from ragcache.models.buffer import Buffer, BufferPool
from ragcache.models.causal import CausalLM, Step
from ragcache.models.contiguous import ContiguousLM
from ragcache.models.language import LanguageModel
from ragcache.models.loading import LoadedModel, load_model
from ragcache.models.positions import PositionScheme, Rotary
from ragcache.models.prompting import PromptFrame, prompt_frame

__all__ = [
    "Buffer",
    "BufferPool",
    "CausalLM",
    "ContiguousLM",
    "LanguageModel",
    "LoadedModel",
    "PositionScheme",
    "PromptFrame",
    "Rotary",
    "Step",
    "load_model",
    "prompt_frame",
]
