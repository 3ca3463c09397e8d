"""The page of models is as the registry says."""

from __future__ import annotations

from ragcache.models.families import FAMILIES
from tools.models import PAGE


def test_the_table_is_generated_from_the_registry() -> None:
    assert PAGE.stored == PAGE.written, f"run {PAGE.command}"
    for model_type in FAMILIES:
        assert f"\n| `{model_type}` | " in PAGE.stored
