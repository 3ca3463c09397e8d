"""Triton's interpreter, where there is no GPU: a mark for tests of kernels, and less work for it.

Every call of a function in a kernel looks for the built-in functions of Triton's language again, to
replace them by interpreted ones, and every tensor has its type made anew, which takes longer than
what is computed. Here both are made once. Nor are integers added a second time in 64 bits, to find
an overflow that only kernels being debugged report.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")
from triton._utils import validate_block_shape  # noqa: E402
from triton.language import core  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

interpreted = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="a GPU is there: tests/gpu runs the kernels compiled"
)


@cache
def _builtins(package: Any) -> list[str]:
    members = inspect.getmembers(package, core.is_builtin)
    return [name for name, _ in members]


def _replace_builtins(package: Any, builder: Any, scope: Any) -> None:
    """All of a package's are replaced, and restored, at once: the first stands for each."""
    names = _builtins(package)
    if names and core.is_builtin(getattr(package, names[0])):
        for name in names:
            interpreter._patch_attr(package, name, getattr(package, name), builder, scope)


_numpy_type_of = interpreter._get_np_dtype
_numpy_types: dict[str, Any] = {}


def _numpy_type(dtype: Any) -> Any:
    """Return the numpy type of a Triton type, by its name."""
    if dtype.name not in _numpy_types:
        _numpy_types[dtype.name] = _numpy_type_of(dtype)
    return _numpy_types[dtype.name]


@cache
def _shape(*sizes: int) -> tuple[Any, Any, int, str]:
    """Return the shape of a block: for its type, for its tensors, its size, and as a text."""
    numel = validate_block_shape(list(sizes))
    shape = core.tuple(sizes)
    return shape, core.tuple([core.constexpr(size) for size in sizes]), numel, str(shape)


def _make_type(block: Any, element: Any, shape: Any) -> None:
    block.element_ty = element
    block.shape, _, block.numel, text = _shape(*(getattr(size, "value", size) for size in shape))
    if not block.shape:
        raise TypeError("0d block_type is forbidden")
    block.name = f"<{text}, {element}>"


def _make_tensor(tensor: Any, handle: Any, kind: Any) -> None:
    tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
    _, tensor.shape, numel, _ = _shape(*kind.shape.values) if kind.is_block() else _shape()
    tensor.numel = core.constexpr(numel)


interpreter._patch_builtin = _replace_builtins
interpreter._get_np_dtype = _numpy_type
core.block_type.__init__ = _make_type
core.tensor.__init__ = _make_tensor
builder = interpreter.interpreter_builder
builder.options = replace(builder.options, sanitize_overflow=False)
