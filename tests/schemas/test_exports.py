"""The exports of the package, what importing it loads, and the examples in its docstrings."""

from __future__ import annotations

import doctest
import inspect
import subprocess
import sys
from types import ModuleType

import pytest

import ragcache_schemas
from ragcache_schemas import layout, parser, text


def test_exported_names_exist() -> None:
    assert sorted(ragcache_schemas.__all__) == ragcache_schemas.__all__
    assert all(hasattr(ragcache_schemas, name) for name in ragcache_schemas.__all__)


def test_public_functions_and_classes_have_docstrings() -> None:
    for name in ragcache_schemas.__all__:
        thing = getattr(ragcache_schemas, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert thing.__doc__, name


def test_importing_loads_no_torch_database_or_network() -> None:
    heavy = ("torch", "transformers", "sqlalchemy", "numpy", "urllib.request")
    code = f"import sys, ragcache_schemas; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("module", [layout, parser, text])
def test_docstring_examples(module: ModuleType) -> None:
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0
