"""Which families are served. A user adds one with a small class:

class Cohere(RotaryFamily):
    model_types = ("cohere",)
    interleaved = True

register(Cohere())
"""

from __future__ import annotations

from typing import Any

from ragcache.errors import UnsupportedModel
from ragcache.models.families.family import Family
from ragcache.models.families.refusals import check_properties

_FAMILIES: dict[str, Family] = {}


def register(family: Family) -> None:
    """Serves models of the family's types from now on, in place of what served them before."""
    for model_type in family.model_types:
        _FAMILIES[model_type] = family


def served_types() -> tuple[str, ...]:
    """The `model_type`s that are served, sorted."""
    return tuple(sorted(_FAMILIES))


def family_of(config: Any) -> Family:
    """The family of a configuration. Raises `UnsupportedModel` where none is registered."""
    family = _FAMILIES.get(config.model_type)
    if family is None:
        check_properties(config)  # names the obstacle, where there is one beyond the name
        raise UnsupportedModel(
            f"models of type {config.model_type!r} are not served; served types: "
            f"{', '.join(served_types())}. If its attention is causal and over plain keys and "
            "values, serve it with a class of your own: ragcache.models.families.register"
        )
    return family
