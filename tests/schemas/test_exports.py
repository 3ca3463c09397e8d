"""What the package exports, and what importing it brings in."""

from __future__ import annotations

import inspect
import subprocess
import sys

import ragcache_schemas


def test_everything_that_is_exported_exists() -> None:
    assert sorted(ragcache_schemas.__all__) == ragcache_schemas.__all__
    assert all(hasattr(ragcache_schemas, name) for name in ragcache_schemas.__all__)


def test_every_public_function_and_class_says_what_it_is() -> None:
    for name in ragcache_schemas.__all__:
        thing = getattr(ragcache_schemas, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert thing.__doc__, name


def test_the_language_needs_no_model_no_database_and_no_network() -> None:
    heavy = ("torch", "transformers", "sqlalchemy", "numpy", "urllib.request")
    code = f"import sys, ragcache_schemas; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
