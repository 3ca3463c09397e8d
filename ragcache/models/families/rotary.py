"""Families whose attention goes through the attention interface, with rotary positions."""

from __future__ import annotations

from ragcache.models.families.family import RotaryFamily


class LlamaLike(RotaryFamily):
    """Llama 2 and 3, CodeLlama, Mistral, Qwen2, Qwen3."""

    model_types = ("llama", "mistral", "qwen2", "qwen3")


class Phi(RotaryFamily):
    """Phi and Phi-3: all of a head turns, or a part of it."""

    model_types = ("phi", "phi3")


class Gemma(RotaryFamily):
    """Gemma 2 and 3: soft caps and sliding windows, so their attention reads one buffer."""

    model_types = ("gemma2", "gemma3_text")


class GPTNeoX(RotaryFamily):
    """GPT-NeoX and Pythia: a quarter of a head turns."""

    model_types = ("gpt_neox",)
