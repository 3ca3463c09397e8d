"""Writes the commit into what is built.

`ragcache.build` finds it. The variable `SOURCE_COMMIT` names it where neither git nor an archive
does, as in a container.
"""

from __future__ import annotations

import os
from pathlib import Path
from runpy import run_path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MODULE = "ragcache/build.py"


class CommitHook(BuildHookInterface[Any]):
    """Puts a copy of `ragcache/build.py` that holds the commit into wheels and sdists."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the copy. An editable install asks git whenever it is asked."""
        source = Path(self.root, MODULE)
        module = run_path(str(source))
        commit = os.environ.get("SOURCE_COMMIT") or module["find_commit"]()
        if version == "editable" or commit in (None, module["COMMIT"]):
            return
        self._folder = TemporaryDirectory()
        copy = Path(self._folder.name, source.name)
        text = source.read_text(encoding="utf-8")
        copy.write_text(text.replace(module["COMMIT"], commit), encoding="utf-8")
        build_data["force_include"][str(copy)] = MODULE
