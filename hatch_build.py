"""Writes the commit and the description into what is built.

`ragcache.build` finds the commit. The variable `SOURCE_COMMIT` names it where neither git nor an
archive does, as in a container.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from runpy import run_path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

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


class ReadmeHook(MetadataHookInterface):
    """Makes the README the description, whose links lead to the release's files from any page."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the README with absolute links."""
        files = f"{metadata['urls']['Source']}/blob/v{metadata['version']}/"
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = re.sub(r"(?<=\]\()(?!https?:|#)", files, text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
