"""Options, each declared once. REST, command line, LangChain and settings inherit them."""

from ragcache.params.base import Params, Surface, TakesOptions, explain
from ragcache.params.keys import KeyParams, Role
from ragcache.params.open import OpenConfig
from ragcache.params.request import REFUSAL, GenerationParams, SearchKind, SearchParams

__all__ = [
    "REFUSAL",
    "GenerationParams",
    "KeyParams",
    "OpenConfig",
    "Params",
    "Role",
    "SearchKind",
    "SearchParams",
    "Surface",
    "TakesOptions",
    "explain",
]
