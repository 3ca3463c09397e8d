"""The sdist is the whole repository, the wheel its packages with their reader and nothing else.
`.ci/wheel` tries in an empty environment that the wheel installs and its demo runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import packages_distributions
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
LEFTOVERS = shutil.ignore_patterns(
    *".git .venv .*_cache .hypothesis .demo *.egg-info __pycache__ build dist site".split()
)
MOST_BYTES = 40_000_000

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that was built from it.

    The sdist is made from a copy, so that no earlier build and no leftover comes in or stays.
    """
    copy, out = tmp_path_factory.mktemp("repository") / "copy", tmp_path_factory.mktemp("dist")
    shutil.copytree(REPOSITORY, copy, ignore=LEFTOVERS)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out)]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.Path:
    [file] = built.glob("*.whl")
    return zipfile.Path(file)


def test_the_wheel_is_small_enough(built: Path) -> None:
    [file] = built.glob("*.whl")
    assert file.stat().st_size <= MOST_BYTES


@pytest.mark.nightly
def test_the_sdist_holds_the_repository_and_its_tests_run(built: Path, tmp_path: Path) -> None:
    [file] = built.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        archive.extractall(tmp_path, filter="data")
    [unpacked] = tmp_path.iterdir()
    missing = {each.name for each in REPOSITORY.iterdir() if each.suffix in (".md", ".toml")}
    missing |= {"tests", "docs", "tools", "training", "benchmarks", "deploy", ".ci", ".github"}
    assert missing - {each.name for each in unpacked.iterdir()} == set()
    folders = {str(unpacked / home) for home in PACKAGES.values()}
    command = [sys.executable, "-m", "pytest", "tests/schemas", "tests/ragcache/test_build.py"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"], cwd=unpacked, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]


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


def test_links_of_the_description_lead_to_the_release(wheel: zipfile.Path) -> None:
    """Pages of registries show the README without the files that it links to."""
    [metadata] = [each for each in wheel.iterdir() if each.name.endswith(".dist-info")]
    headers, _, description = (metadata / "METADATA").read_text("utf-8").partition("\n\n")
    version = re.findall(r"^Version: (.+)$", headers, re.MULTILINE)[0]
    links = re.findall(r"\]\(([^)]+)\)", description)
    assert links
    for link in links:
        assert link.startswith(f"https://github.com/ragcache/ragcache/blob/v{version}/"), link
        assert (REPOSITORY / link.split("/", 7)[-1].split("#")[0]).exists(), link


def test_the_license_goes_along(wheel: zipfile.Path) -> None:
    [metadata] = [each for each in wheel.iterdir() if each.name.endswith(".dist-info")]
    text = (metadata / "licenses" / "LICENSE").read_bytes()
    assert text == (REPOSITORY / "LICENSE").read_bytes()


NOT_IMPORTED = {
    "fastapi-offline": "its files are served",
    "httptools": "uvicorn imports it",
    "python-multipart": "fastapi imports it",
    "uvloop": "uvicorn imports it",
}
"""Required libraries that no module imports, and why they are required."""


def test_every_required_library_is_imported() -> None:
    metadata = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    required = {re.split(r"[^\w.-]", each)[0] for each in metadata["project"]["dependencies"]}
    sources = "\n".join(
        file.read_text(encoding="utf-8")
        for package, home in PACKAGES.items()
        for file in (REPOSITORY / home / package).rglob("*.py")
    )
    imported = set(re.findall(r"^ *(?:import|from) ([a-z]\w*)", sources, re.MULTILINE))
    modules: dict[str, set[str]] = {}
    for module, distributions in packages_distributions().items():
        for name in distributions:
            modules.setdefault(name.lower().replace("_", "-"), set()).add(module)
    unused = {name for name in required if not modules[name.lower()] & imported}
    assert unused == set(NOT_IMPORTED)
