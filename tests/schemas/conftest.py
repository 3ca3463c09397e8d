"""What the tests of the language share: the reference files, and a token counter."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for pml_trees

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def reference_files() -> list[Path]:
    """The reference implementation's example schemas, where they are at hand."""
    folder = Path(os.environ.get("RAGCACHE_DATA", ROOT / "../shared/data")) / "pml"
    files = sorted(folder.glob("*.xml"))
    if not files:
        pytest.skip(f"no reference schemas in {folder}; set RAGCACHE_DATA")
    return files
