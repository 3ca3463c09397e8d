"""`tools/release.py`: places that name another version, tags that fit no release, the notes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tools.release import main

SOURCE = "https://example.org/ragcache"
FILES = {
    "pyproject.toml": f'[project]\nversion = "1.2.0"\n[project.urls]\nSource = "{SOURCE}"\n',
    "CHANGELOG.md": "# Changelog\n\n## Unreleased\n\n## 1.2.0 - 2027-01-31\n\n- New.\n\n"
    "## 1.1.0 - 2026-12-01\n\n- Old.\n",
    "ragcache/__init__.py": '__version__ = "1.2.0"\n',
    "deploy/helm/ragcache/Chart.yaml": 'version: 1.2.0\nappVersion: "1.2.0"\n',
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_this_tree_names_one_version() -> None:
    assert main(["--root", str(REPOSITORY)]) == 0


def test_a_tag_that_fits_is_released(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--root", str(tree), "--tag", "v1.2.0", "--source", SOURCE]) == 0
    assert main(["--root", str(tree), "--notes"]) == 0
    assert main(["--root", str(tree), "--version"]) == 0
    assert capsys.readouterr().out == "- New.\n1.2.0\n"


def test_notes_name_the_images_that_the_workflow_pushes(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--root", str(tree), "--notes", "--registry", "example.org/team"]) == 0
    named = re.findall(r"`(?:oci://)?example\.org/team/(\S+?)[` ]", capsys.readouterr().out)
    workflow = (REPOSITORY / ".github/workflows/release.yml").read_text(encoding="utf-8")
    [variants] = re.findall(r"variant: \[(.+)\]", workflow)
    images = [f"ragcache:1.2.0-{each}" for each in variants.split(", ")]
    [charts] = re.findall(r'\.ci/chart "\$REGISTRY/(\w+)"', workflow)
    assert named == [*images, f"{charts}/ragcache"]


@pytest.mark.parametrize(
    ("name", "old", "new", "told"),
    [
        ("ragcache/__init__.py", "1.2.0", "1.2.1", 'ragcache/__init__.py: __version__ = "1.2.1"'),
        ("deploy/helm/ragcache/Chart.yaml", "version: 1.2.0", "version: 1.1.0", "version: 1.1.0"),
        ("deploy/helm/ragcache/Chart.yaml", '"1.2.0"', "1.1.0", "appVersion: 1.1.0"),
        ("CHANGELOG.md", "## 1.2.0 - 2027-01-31", "### 1.2.0", "newest version is ['1.1.0']"),
        ("CHANGELOG.md", " - 2027-01-31", "", "1.2.0 has no date"),
        ("CHANGELOG.md", "## Unreleased\n", "## Unreleased\n\n- Newer.\n", "under Unreleased"),
        ("pyproject.toml", "example.org", "example.com", "the tag is in https://example.org"),
        ("pyproject.toml", "1.2.0", "1.3.0", "the tag is v1.2.0, and the version 1.3.0"),
    ],
)
def test_another_version_or_place_is_refused(
    name: str, old: str, new: str, told: str, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (tree / name).read_text(encoding="utf-8")
    assert text.count(old) == 1
    (tree / name).write_text(text.replace(old, new), encoding="utf-8")
    assert main(["--root", str(tree), "--tag", "v1.2.0", "--source", SOURCE]) == 1
    assert told in capsys.readouterr().out
