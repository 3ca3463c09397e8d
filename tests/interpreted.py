"""Triton's interpreter, where there is no GPU: a mark for tests of kernels, and less work for it.

Every call of a function in a kernel looks for the built-in functions of Triton's language again, to
replace them by interpreted ones, which takes longer than most functions themselves. Here they are
looked for once, and left where they are replaced already.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")
from triton.runtime import interpreter  # noqa: E402

interpreted = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="a GPU is there: tests/gpu runs the kernels compiled"
)


@cache
def _builtins(package: Any) -> list[str]:
    members = inspect.getmembers(package, triton.language.core.is_builtin)
    return [name for name, _ in members]


def _replace_builtins(package: Any, builder: Any, scope: Any) -> None:
    """All of a package's are replaced, and restored, at once: the first stands for each."""
    names = _builtins(package)
    if names and triton.language.core.is_builtin(getattr(package, names[0])):
        for name in names:
            interpreter._patch_attr(package, name, getattr(package, name), builder, scope)


if hasattr(interpreter, "_patch_builtin"):
    interpreter._patch_builtin = _replace_builtins
