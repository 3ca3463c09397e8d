"""Hugging Face models, patched in place so that they attend to segments."""

from ragcache.models.buffer import Buffer, BufferPool
from ragcache.models.causal import CausalLM, Step
from ragcache.models.contiguous import ContiguousLM
from ragcache.models.dimensions import Dimensions
from ragcache.models.families import Family, RotaryFamily, register
from ragcache.models.language import LanguageModel
from ragcache.models.loading import LoadedModel, load_model
from ragcache.models.positions import Alibi, Learned, PositionScheme, Rotary
from ragcache.models.prompting import PromptFrame, prompt_frame

__all__ = [
    "Alibi",
    "Buffer",
    "BufferPool",
    "CausalLM",
    "ContiguousLM",
    "Dimensions",
    "Family",
    "LanguageModel",
    "Learned",
    "LoadedModel",
    "PositionScheme",
    "PromptFrame",
    "Rotary",
    "RotaryFamily",
    "Step",
    "load_model",
    "prompt_frame",
    "register",
]
