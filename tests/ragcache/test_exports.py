"""What the package exports, and its configuration."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from importlib.metadata import version

import pytest

import ragcache
from ragcache import errors
from ragcache.config import MODES, RagCacheConfig, check_mode, linked_tokens, parse_bytes
from ragcache.errors import ConfigurationError

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


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_command_line_starts_without_torch_and_transformers() -> None:
    [loaded] = loaded_by("import ragcache_api.cli.main")
    assert loaded & {"torch", "transformers", "typer"} == {"typer"}


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1048576, 1048576),
        ("1048576", 1048576),
        ("12B", 12),
        ("8GiB", 8 * 2**30),
        ("512 MB", 512_000_000),
        ("1.5kib", 1536),
        ("0.5 TiB", 2**39),
        (" 3 kb ", 3000),
        ("2gb", 2_000_000_000),
        ("1TB", 10**12),
        ("7MiB", 7 * 2**20),
    ],
)
def test_sizes_are_read_with_binary_and_decimal_units(size: int | str, expected: int) -> None:
    assert parse_bytes(size) == expected


@pytest.mark.parametrize("size", ["", "GiB", "8 Gib s", "-1GiB", "1,5GiB", "8 gigs", "1e9", "."])
def test_other_sizes_are_refused_with_an_example(size: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_bytes(size)
    assert str(caught.value) == f"cannot read the size {size!r}; write it like 8GiB or 512MB"


@pytest.mark.parametrize("name", [field.name for field in fields(RagCacheConfig)])
def test_options_are_positive(name: str) -> None:
    assert getattr(RagCacheConfig(**{name: 1}), name) == 1
    for value in (0, -5):
        with pytest.raises(ConfigurationError, match=f"{name} is {value}; it must be positive"):
            RagCacheConfig(**{name: value})


def test_defaults_are_documented() -> None:
    config = RagCacheConfig()
    assert (config.module_tokens, config.max_new_tokens) == (384, 64)
    assert config.host_bytes == parse_bytes("2GiB")


def test_every_mode_is_known() -> None:
    assert MODES == ("rooted", "linked:N", "isolated", "exact")
    modes = [mode.replace("N", "16") for mode in MODES]
    assert [check_mode(mode) for mode in modes] == modes
    assert [linked_tokens(mode) for mode in modes] == [0, 16, 0, 0]


@pytest.mark.parametrize(
    "mode", ["Rooted", "", "fast", "linked", "linked:", "linked:0", "linked:-1", "linked:1.5"]
)
def test_an_unknown_mode_is_refused_with_the_known_ones(mode: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_mode(mode)
    assert str(caught.value) == (
        f"unknown mode {mode!r}; modes: rooted, linked:N, isolated, exact, where N is a number "
        "such as 16"
    )
