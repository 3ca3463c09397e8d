"""Hugging Face models, patched in place so that they attend to segments."""

from ragcache.models.causal import CausalLM, Step
from ragcache.models.loading import LoadedModel, load_model
from ragcache.models.positions import PositionScheme, Rotary
from ragcache.models.prompting import PromptFrame, prompt_frame

__all__ = [
    "CausalLM",
    "LoadedModel",
    "PositionScheme",
    "PromptFrame",
    "Rotary",
    "Step",
    "load_model",
    "prompt_frame",
]
