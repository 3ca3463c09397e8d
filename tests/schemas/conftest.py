"""Fixtures of the language's tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def reference_files() -> list[Path]:
    """The reference implementation's example schemas, where they are at hand."""
    folder = Path(os.environ.get("RAGCACHE_DATA", ROOT / "../shared/data")) / "pml"
    files = sorted(folder.glob("*.xml"))
    if not files:
        pytest.skip(f"no reference schemas in {folder}; set RAGCACHE_DATA")
    return files
