"""The commit of the code: in a clone, an archive, what is built, and where nothing is known."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from runpy import run_path

import pytest

from tests.conftest import REPOSITORY

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "ragcache"
version = "1"
[tool.hatch.build]
dev-mode-dirs = ["."]
[tool.hatch.build.hooks.custom]
"""


def git(folder: Path, *arguments: str) -> str:
    identity = {
        f"GIT_{role}_{what}": "test"
        for role in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    }
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(
        command, env=os.environ | identity, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository of one commit, which is built as this one is."""
    folder = tmp_path / "clone"
    for name in ("ragcache/build.py", "hatch_build.py", ".gitattributes", ".gitignore"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, folder / name)
    (folder / "ragcache" / "__init__.py").touch()
    (folder / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def commit_in(folder: Path) -> str | None:
    found: str | None = run_path(str(folder / "ragcache" / "build.py"))["find_commit"]()
    return found


def build(folder: Path, target: str, out: Path) -> Path:
    """Unpack what hatchling builds from a folder."""
    code = f"import hatchling.build as b, sys; print(b.build_{target}(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    built = out / done.stdout.split()[-1]
    if target == "sdist":
        with tarfile.open(built) as archive:
            archive.extractall(out, filter="data")
        return out / "ragcache-1"
    with zipfile.ZipFile(built) as wheel:
        assert len(wheel.namelist()) == len(set(wheel.namelist()))
        wheel.extractall(out / target)
    return out / target


def test_a_clone_knows_its_commit_and_its_changes(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = git(clone, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "another.git"))
    assert commit_in(clone) == head
    (clone / "notes.txt").touch()
    assert commit_in(clone) == head
    (clone / "ragcache" / "new.py").touch()
    assert commit_in(clone) == f"{head}+changed"


def test_an_archive_carries_its_commit(clone: Path, tmp_path: Path) -> None:
    git(clone, "archive", "--output", str(tmp_path / "archive.tar"), "HEAD")
    with tarfile.open(tmp_path / "archive.tar") as archive:
        archive.extractall(tmp_path / "archive", filter="data")
    assert commit_in(tmp_path / "archive") == git(clone, "rev-parse", "HEAD")


def test_nothing_is_said_where_nothing_is_known(clone: Path, tmp_path: Path) -> None:
    shutil.copytree(clone / "ragcache", clone / "site-packages" / "ragcache")
    assert commit_in(clone / "site-packages") is None, "the commit of a repository around it"
    shutil.rmtree(clone / ".git")
    (clone / ".git").write_text("gitdir: nowhere", encoding="utf-8")
    assert commit_in(clone) is None


def test_wheels_and_sdists_carry_the_commit(clone: Path, tmp_path: Path) -> None:
    head = git(clone, "rev-parse", "HEAD")
    unpacked = build(clone, "sdist", tmp_path / "out")
    assert commit_in(unpacked) == head
    git(unpacked, "init", "-q")
    assert commit_in(build(unpacked, "wheel", tmp_path / "out")) == head
    assert git(clone, "status", "--porcelain") == "", "building changes no file"


def test_a_build_without_git_takes_the_named_commit(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(clone / ".git")
    monkeypatch.setenv("SOURCE_COMMIT", "ab" * 20)
    assert commit_in(build(clone, "wheel", tmp_path / "out")) == "ab" * 20


def test_an_editable_install_writes_no_commit(clone: Path, tmp_path: Path) -> None:
    assert not list(build(clone, "editable", tmp_path / "out").rglob("build.py"))
