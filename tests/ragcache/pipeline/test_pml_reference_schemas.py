"""The reference implementation's example schemas load unchanged, and prompts over them run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragcache import RagCache
from tests.conftest import REPOSITORY

FOLDER = Path(os.environ.get("RAGCACHE_DATA", REPOSITORY / "../shared/data")) / "pml"
PROMPTS = {
    "code_generation_bookstore.xml": (
        '<prompt schema="code-generation-bookstore"><book.py/><user.py/><store.py/>'
        "<user>Write a main function that lends a book.</user></prompt>"
    ),
    "parameterized_prompts.xml": (
        '<prompt schema="travel"><travel-plan duration="nine days"><overseas><tokyo/></overseas>'
        "</travel-plan><user>Make a plan.</user></prompt>"
    ),
    "personalization-education.xml": (
        '<prompt schema="personalization-education"><middle-school/><beginner/>'
        "<never-studied/><visual/><essay/><high-intrinsic-motivation/>"
        "<user>Explain rain.</user></prompt>"
    ),
}

pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason=f"the reference schemas are not at hand in {FOLDER}"
)


@pytest.fixture
def rag(tmp_path: Path) -> Iterator[RagCache]:
    with RagCache.open(tmp_path / "state", max_new_tokens=4) as opened:
        yield opened


@pytest.mark.parametrize("name", PROMPTS)
def test_a_reference_schema_loads_and_a_prompt_over_it_runs(rag: RagCache, name: str) -> None:
    path = FOLDER / name
    schema = rag.add_schema(path.read_text(encoding="utf-8"), source=str(path))
    assert f'schema="{schema.name}"' in PROMPTS[name]
    encoded = rag.stats().encoded
    answer = rag.prompt(PROMPTS[name])
    assert rag.stats().encoded == encoded, "everything was encoded when the schema was added"
    assert answer.reuse.cached_tokens > 0.75 * answer.reuse.prompt_tokens
    exact = rag.prompt(PROMPTS[name], mode="exact")
    assert exact.reuse.prompt_tokens == answer.reuse.prompt_tokens
    assert exact.reuse.cached_tokens == 0


def test_a_stored_schema_serves_the_next_process_without_encoding(tmp_path: Path) -> None:
    name = "code_generation_bookstore.xml"
    with RagCache.open(tmp_path / "state", max_new_tokens=4) as rag:
        rag.add_schema((FOLDER / name).read_text(encoding="utf-8"))
        first = rag.prompt(PROMPTS[name])
    with RagCache.open(tmp_path / "state", max_new_tokens=4) as rag:
        second = rag.prompt(PROMPTS[name])
        assert rag.stats().encoded == 0
    assert second.text == first.text
    assert {source.tier for source in second.sources} == {"disk"}
