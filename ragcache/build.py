"""The commit that this code comes from.

`git archive` writes it into this file, and so does the build of a wheel or a source distribution
(`hatch_build.py`). In a clone, git knows it.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

COMMIT = "$Format:%H$"
_SOURCES = ("ragcache", "schemas", "connectors", "api", "pyproject.toml")


def find_commit() -> str | None:
    """Return the commit of this code, with `+changed` where files of a clone differ from it.

    Returns:
        The 40 digits of the commit, or None where nothing is known about it.
    """
    if not COMMIT.startswith("$"):
        return COMMIT
    clone = Path(__file__).resolve().parent.parent
    if not (clone / ".git").exists():
        return None
    commit = _git(clone, "rev-parse", "HEAD")
    changes = _git(clone, "status", "--porcelain", "--", *_SOURCES)
    if not commit or changes is None:
        return None
    return f"{commit}+changed" if changes else commit


def _git(clone: Path, *arguments: str) -> str | None:
    """Return what git says about a clone, or None if it fails or is not installed."""
    here = {name: each for name, each in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(clone), *arguments]
    try:
        done = subprocess.run(command, env=here, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout.strip()
