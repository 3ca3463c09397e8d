"""Families with a learned vector for each position."""

from __future__ import annotations

from typing import Any

from ragcache.models.families.family import Family
from ragcache.models.positions import Learned, PositionScheme


class LearnedFamily(Family):
    """GPT-2 and OPT."""

    model_types = ("gpt2", "opt")

    def scheme(self, model: Any) -> PositionScheme:  # noqa: ARG002
        return Learned()
