"""What the metadata of a document may hold: what JSON gives back, and what can be kept as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ragcache.errors import UnstorableMetadata

DEPTH = 32  # values within values; serialisers that answer with them stop at some depth
_BITS = 8192  # of a whole number; Python spells longer ones not at all


def check_metadata(metadata: Mapping[str, Any], name: str, *, exact: bool = False) -> None:
    """Dates, paths and other values that JSON does not know are kept as their text. name: of the
    document, for errors. exact: refuses what would come back otherwise than it was given. Raises
    `UnstorableMetadata` for numbers that are not finite, text that is not UTF-8, keys that are
    neither text nor numbers, and values that are nested too deep."""
    problem = _problem(dict(metadata), "metadata", DEPTH, exact)
    if problem is not None:
        raise UnstorableMetadata(
            f"document {name!r}: {problem}; write it otherwise, or leave it out"
        )


def is_text(value: str) -> bool:
    """Whether UTF-8 can spell it: half of a surrogate pair it cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _problem(value: Any, where: str, depth: int, exact: bool) -> str | None:
    if value is None:
        return None
    if isinstance(value, int):
        return None if value.bit_length() <= _BITS else f"{where} is a number of too many digits"
    if isinstance(value, str):
        return None if is_text(value) else f"{where} is no text: {value!r:.80}"
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{where} is {value!r}, which JSON cannot hold"
    if isinstance(value, dict):
        for key in value:
            kinds = str if exact else str | int | float | None
            if not (isinstance(key, kinds) and is_text(str(key))):
                return f"the key {key!r:.80} of {where} is no text"
        return _first(
            ((each, f"{where}[{key!r:.80}]") for key, each in value.items()), depth, exact
        )
    if isinstance(value, list if exact else list | tuple):
        return _first(
            ((each, f"{where}[{number}]") for number, each in enumerate(value)), depth, exact
        )
    if exact:
        return f"{where} is a {type(value).__name__}, which JSON cannot hold"
    return _problem(str(value), where, depth, exact)


def _first(items: Iterable[tuple[Any, str]], depth: int, exact: bool) -> str | None:
    """The first problem among the items of a list or mapping."""
    if depth == 0:
        return f"metadata is nested more than {DEPTH} deep"
    problems = (_problem(each, where, depth - 1, exact) for each, where in items)
    return next((each for each in problems if each is not None), None)
