"""What is public, and what importing a part loads."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from importlib.metadata import version

import pytest

import ragcache
from ragcache import errors

PACKAGES = (
    "ragcache.attention",
    "ragcache.documents",
    "ragcache.engine",
    "ragcache.models",
    "ragcache.pipeline",
    "ragcache.recognition",
    "ragcache.retrieval",
    "ragcache.states",
    "ragcache.store",
    "ragcache.structured",
)


def loaded_by(*programs: str) -> list[set[str]]:
    """What a fresh process has imported after each of the programs, one after another."""
    show = "print(*sys.modules)"
    lines = "\n".join(f"{program}\n{show}" for program in programs)
    command = [sys.executable, "-c", f"import sys\n{lines}"]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [set(line.split()) for line in out.splitlines()]


def test_the_public_names_are_these() -> None:
    assert ragcache.__all__ == [
        "Answer",
        "AnswerStream",
        "AsyncAnswerStream",
        "Citation",
        "Generation",
        "Ingestion",
        "RagCache",
        "Reuse",
        "SourceDocument",
        "Timings",
    ]
    for name in ragcache.__all__:
        assert getattr(ragcache, name).__name__ == name
        assert name in dir(ragcache)


def test_the_version_is_that_of_the_distribution() -> None:
    assert ragcache.__version__ == version("ragcache")


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'ragcache' has no attribute 'RagCash'"):
        _ = ragcache.RagCash


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_has_what_it_exports(package: str) -> None:
    module = import_module(package)
    constants_first = sorted(module.__all__, key=lambda name: (not name.isupper(), name))
    assert module.__all__ == constants_first
    for name in module.__all__:
        assert hasattr(module, name), name


def test_every_error_is_drawn_in_the_tree() -> None:
    tree = errors.__doc__ or ""
    classes = [v for v in vars(errors).values() if isinstance(v, type)]
    assert len(classes) > 10
    for error in classes:
        assert issubclass(error, errors.RagCacheError)
        assert error.__doc__
        assert f" {error.__name__}" in tree


def test_a_package_loads_no_library_that_it_does_not_use() -> None:
    """Each line is imported after those before it: what is missing then, none of them loads."""
    top, engine, pipeline, whole = loaded_by(
        "import ragcache",
        "import ragcache.attention, ragcache.models, ragcache.engine",
        "import ragcache.structured, ragcache.pipeline",
        "from ragcache import RagCache",
    )
    heavy = {"torch", "transformers", "sqlalchemy", "faiss", "langchain_core", "numpy"}
    assert top & heavy == set()
    stores = {
        "sqlalchemy",
        "faiss",
        "bm25s",
        "langchain_core",
        "langchain_text_splitters",
        "lxml",
        "typer",
        "rich",
    }
    assert engine & (stores | {"torch"}) == {"torch"}
    assert pipeline & {"xgrammar", "torch"} == {"torch"}
    assert "torch" in whole


def test_the_command_line_starts_without_torch_and_transformers() -> None:
    [loaded] = loaded_by("import ragcache_api.cli.main")
    assert loaded & {"torch", "transformers", "typer"} == {"typer"}
