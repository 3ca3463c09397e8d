"""The page of models is as the registry says."""

from __future__ import annotations

from ragcache.models.families import FAMILIES
from tools.models import PAGE, page_with_table


def test_the_table_is_generated_from_the_registry() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == page_with_table(page), "run python tools/models.py --write"
    for model_type in FAMILIES:
        assert f"\n| `{model_type}` | " in page
