"""Options, declared once: all faces take them from here."""

from ragcache.params.base import Params, Size, Surface, explain, parse_bytes, parse_optional_bytes
from ragcache.params.generation import REFUSAL, GenerationParams

__all__ = [
    "REFUSAL", "GenerationParams", "Params", "Size", "Surface", "explain", "parse_bytes",
    "parse_optional_bytes",
]  # fmt: skip
