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


def loaded_by(program: str, names: tuple[str, ...]) -> list[str]:
    """Those of the names that a fresh process has imported after the program."""
    check = f"import sys\n{program}\nprint(*[n for n in {names!r} if n in sys.modules])"
    command = [sys.executable, "-c", check]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


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


def test_importing_ragcache_loads_no_heavy_library() -> None:
    heavy = ("torch", "transformers", "sqlalchemy", "faiss", "langchain_core", "numpy")
    assert loaded_by("import ragcache", heavy) == []
    assert loaded_by("from ragcache import RagCache", ("torch",)) == ["torch"]


def test_attention_models_and_engine_run_without_the_stores_libraries() -> None:
    program = "import ragcache.attention, ragcache.models, ragcache.engine"
    forbidden = (
        "sqlalchemy",
        "faiss",
        "bm25s",
        "langchain_core",
        "langchain_text_splitters",
        "lxml",
        "typer",
        "rich",
    )
    assert loaded_by(program, (*forbidden, "torch")) == ["torch"]


def test_grammars_are_compiled_only_where_they_are_used() -> None:
    program = "import ragcache.structured, ragcache.pipeline"
    assert loaded_by(program, ("xgrammar", "torch")) == ["torch"]


def test_the_command_line_starts_without_torch_and_transformers() -> None:
    names = ("torch", "transformers", "typer")
    assert loaded_by("import ragcache_api.cli.main", names) == ["typer"]
