"""The families of models that are served. `register` adds one of a user's own."""

from ragcache.models.families.bloom import Bloom
from ragcache.models.families.falcon import Falcon
from ragcache.models.families.family import Family, RotaryFamily
from ragcache.models.families.learned import LearnedFamily
from ragcache.models.families.mpt import Mpt
from ragcache.models.families.registry import family_of, register, served_types
from ragcache.models.families.rotary import Gemma, GPTNeoX, LlamaLike, Phi

for _family in (
    LlamaLike(),
    Phi(),
    GPTNeoX(),
    Gemma(),
    Falcon(),
    Mpt(),
    Bloom(),
    LearnedFamily(),
):
    register(_family)

__all__ = ["Family", "RotaryFamily", "family_of", "register", "served_types"]
