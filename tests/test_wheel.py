"""The wheel: the packages with their reader, and nothing else of the repository. `.ci/wheel` tries
in an empty environment that it installs and its demo runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

READER = (
    "chat_template.jinja",
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
PACKAGES = {
    "ragcache": ".",
    "ragcache_schemas": "schemas",
    "ragcache_connectors": "connectors",
    "ragcache_api": "api",
}
LEFTOVERS = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    """Built from a copy, so that no earlier build and no leftover comes in or stays."""
    copy = tmp_path_factory.mktemp("repository")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, copy)
    for folder in ("ragcache", "schemas", "connectors", "api", "tests", "examples"):
        shutil.copytree(REPOSITORY / folder, copy / folder, ignore=LEFTOVERS)
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [built] = out.glob("*.whl")
    return zipfile.Path(built)


def test_the_top_level_holds_the_packages_and_the_metadata_only(wheel: zipfile.Path) -> None:
    top = {each.name for each in wheel.iterdir()}
    [metadata] = [name for name in top if name.endswith(".dist-info")]
    assert metadata.startswith("ragcache-")
    assert top - {metadata} == set(PACKAGES)
    handbook = {each.name for each in (wheel / "ragcache_api" / "handbook").iterdir()}
    assert handbook == {file.name for file in (REPOSITORY / "examples" / "handbook").iterdir()}


def test_every_package_is_typed(wheel: zipfile.Path) -> None:
    for package in PACKAGES:
        assert (wheel / package / "py.typed").is_file(), package


@pytest.mark.parametrize("name", READER)
def test_the_reader_is_there_byte_for_byte(wheel: zipfile.Path, name: str) -> None:
    expected = (REPOSITORY / "ragcache" / "reader" / name).read_bytes()
    assert (wheel / "ragcache" / "reader" / name).read_bytes() == expected


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_and_data_file_of_a_package_is_there(
    wheel: zipfile.Path, package: str
) -> None:
    home = REPOSITORY / PACKAGES[package]
    files = [p for p in (home / package).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert files
    missing = [str(p) for p in files if not wheel.joinpath(p.relative_to(home).as_posix()).exists()]
    assert missing == []


def test_an_editable_install_is_a_path_file(tmp_path: Path) -> None:
    """Type checkers read path files, and none of the finders that run code."""
    hook = (
        "import sys; from hatchling.build import build_editable\nprint(build_editable(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", hook, str(tmp_path)], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(tmp_path / done.stdout.split()[-1]) as built:
        [path_file] = [name for name in built.namelist() if name.endswith(".pth")]
        lines = built.read(path_file).decode().splitlines()
    assert {Path(line).resolve() for line in lines} == {
        (REPOSITORY / home).resolve() for home in PACKAGES.values()
    }


def test_the_command_is_declared(wheel: zipfile.Path) -> None:
    [metadata] = [each for each in wheel.iterdir() if each.name.endswith(".dist-info")]
    declared = (metadata / "entry_points.txt").read_text(encoding="utf-8")
    assert "ragcache = ragcache_api.cli.main:main" in declared


def test_the_license_goes_along(wheel: zipfile.Path) -> None:
    [metadata] = [each for each in wheel.iterdir() if each.name.endswith(".dist-info")]
    text = (metadata / "licenses" / "LICENSE").read_bytes()
    assert text == (REPOSITORY / "LICENSE").read_bytes()
