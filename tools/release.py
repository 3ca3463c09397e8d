"""Checks that a release is named alike everywhere, and prints its notes.

Without a tag it compares the version of the package, of the Helm chart and of the changelog, as
`make check` does. With one it also refuses entries that no version has, and another repository than
the package's metadata name.

Example:
    $ python tools/release.py --tag v0.1.0    # exit status 1, with the reasons
    $ python tools/release.py --notes --registry HOST/PATH  # the changelog's section, and images
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

_HEADING = re.compile(r"^## (\S+)(?: - (\d{4}-\d\d-\d\d))?$", re.MULTILINE)
_UNRELEASED = "Unreleased"


class Release:
    """The version of a source tree, and what the tree says about it."""

    def __init__(self, root: Path) -> None:
        """Read the metadata of a source tree."""
        self._root = root
        metadata = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
        self.version: str = metadata["project"]["version"]
        self.source: str = metadata["project"]["urls"]["Source"]
        parts = _HEADING.split((root / "CHANGELOG.md").read_text(encoding="utf-8"))[1:]
        self._dates = dict(zip(parts[::3], parts[1::3], strict=True))
        self._sections = dict(zip(parts[::3], map(str.strip, parts[2::3]), strict=True))

    @property
    def notes(self) -> str:
        """Section of the version in the changelog. Raises `KeyError` if there is none."""
        return self._sections[self.version]

    def artifacts(self, registry: str) -> str:
        """List the images and the chart of the version in a registry, as Markdown."""
        names = (
            f"{registry}/ragcache:{self.version}-cpu",
            f"{registry}/ragcache:{self.version}-cu130",
            f"oci://{registry}/charts/ragcache --version {self.version}",
        )
        return "\n".join(["### Images and chart", "", *(f"- `{name}`" for name in names)])

    def problems(self) -> Iterator[str]:
        """Yield each place that has another version."""
        released = [name for name in self._dates if name != _UNRELEASED]
        if released[:1] != [self.version]:
            yield f"CHANGELOG.md: the newest version is {released[:1]}, not {self.version}"
        elif not self._dates[self.version]:
            yield f"CHANGELOG.md: {self.version} has no date"
        for place, pattern in (
            ("ragcache/__init__.py", r'^__version__ = "(.+)"$'),
            ("deploy/helm/ragcache/Chart.yaml", r'^version: "?([^"\s]+)"?$'),
            ("deploy/helm/ragcache/Chart.yaml", r'^appVersion: "?([^"\s]+)"?$'),
        ):
            file = self._root / place
            if file.exists():
                found = re.search(pattern, file.read_text(encoding="utf-8"), re.MULTILINE)
                if found is None or found[1] != self.version:
                    yield f"{place}: {found[0] if found else 'no version'}, not {self.version}"

    def problems_of_tag(self, tag: str, source: str) -> Iterator[str]:
        """Yield the reasons against a release by a tag of a repository."""
        if tag != f"v{self.version}":
            yield f"the tag is {tag}, and the version {self.version}"
        if self._sections.get(_UNRELEASED):
            yield f"CHANGELOG.md: there are entries under {_UNRELEASED}"
        if source != self.source:
            yield f"pyproject.toml: Source is {self.source}, and the tag is in {source}"


def main(arguments: list[str] | None = None) -> int:
    """Print what was asked for. Returns 1 if something disagrees."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, default=Path())
    parser.add_argument("--tag", help="the tag of a release")
    parser.add_argument("--source", default="", help="address of the repository with the tag")
    parser.add_argument("--notes", action="store_true", help="print the changelog's section")
    parser.add_argument("--registry", help="also list images and chart of HOST/PATH in the notes")
    parser.add_argument("--version", action="store_true", help="print the version")
    options = parser.parse_args(arguments)
    release = Release(options.root)
    if options.version or options.notes:
        print(release.version if options.version else release.notes)
        if options.notes and options.registry:
            print(f"\n{release.artifacts(options.registry)}")
        return 0
    problems = [*release.problems()]
    if options.tag is not None:
        problems += release.problems_of_tag(options.tag, options.source)
    print(*problems, sep="\n", end="\n" if problems else "")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
