"""The library of products, chosen for the process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ragcache.cuda import prefer_cublaslt


@pytest.mark.parametrize(("said", "expected"), [(None, ["cublaslt"]), ("0", []), ("1", [])])
def test_cublaslt_unless_the_environment_speaks(
    monkeypatch: pytest.MonkeyPatch, said: str | None, expected: list[str]
) -> None:
    chosen: list[Any] = []
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", chosen.append)
    monkeypatch.delenv("TORCH_BLAS_PREFER_CUBLASLT", raising=False)
    if said is not None:
        monkeypatch.setenv("TORCH_BLAS_PREFER_CUBLASLT", said)
    prefer_cublaslt()
    assert chosen == expected
