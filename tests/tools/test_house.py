"""The figures of a made-up tree that breaks both rules."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

TOOL = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "house.py"))
FILES = {
    "ragcache/__init__.py": "",
    "ragcache/store/__init__.py": "from ragcache.store.disk import Disk\n",
    "ragcache/store/disk.py": "from . import shapes\nclass Disk: ...\nclass _Row: ...\n",
    "ragcache/store/shapes.py": "from .disk import Disk\nclass Shape: ...\nclass _Row: ...\n",
    "ragcache/rag.py": (
        "from typing import TYPE_CHECKING\n"
        "from ragcache.store import Disk\n"
        "if TYPE_CHECKING:\n    from ragcache import demo\n"
        "class RagCache:\n    def ask(): ...\n    async def close(): ...\n    def _ask(): ...\n"
    ),
    "ragcache/demo.py": "import ragcache.rag\ndef run():\n    from ragcache.rag import Rag\n",
    "api/ragcache_api/__init__.py": "",
    "api/ragcache_api/shapes.py": "class Shape: ...\n",
    "api/ragcache_api/cli/__init__.py": "",
    "api/ragcache_api/cli/main.py": "from ragcache_api.http.app import App\n",
    "api/ragcache_api/http/__init__.py": "",
    "api/ragcache_api/http/app.py": "class App: ...\n",
    "api/ragcache_api/http/server.py": "from ragcache_api.cli import colors\n",
    "api/ragcache_api/cli/colors.py": "",
    "benchmarks/speed.py": "from load import Load\nfrom ragcache.rag import Rag\n",
    "benchmarks/load.py": "import speed\nclass Disk: ...\n",
    "tests/test_rag.py": "class Shape: ...\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def test_circles_are_found_through_relative_imports(tree: Path) -> None:
    house = TOOL["measure"](tree)
    assert house["circles"] == [
        ["load", "speed"],
        ["ragcache.demo", "ragcache.rag"],
        ["ragcache.store.disk", "ragcache.store.shapes"],
        ["ragcache_api.cli", "ragcache_api.http"],
    ]


def test_public_classes_of_one_name_are_found_outside_tests(tree: Path) -> None:
    house = TOOL["measure"](tree)
    assert house["doubled_classes"] == {
        "Disk": ["load", "ragcache.store.disk"],
        "Shape": ["ragcache.store.shapes", "ragcache_api.shapes"],
    }


def test_modules_with_one_importer_leave_out_packages(tree: Path) -> None:
    assert TOOL["Tree"](tree).sections() == {
        "ragcache.store.shapes": "ragcache.store.disk",
        "ragcache.rag": "ragcache.demo",
        "ragcache.demo": "ragcache.rag",
        "ragcache_api.shapes": "",
        "ragcache_api.cli.main": "",
        "ragcache_api.cli.colors": "ragcache_api.http.server",
        "ragcache_api.http.app": "ragcache_api.cli.main",
        "ragcache_api.http.server": "",
    }
    (tree / "ragcache/store/shapes.py").write_text("")
    assert "ragcache.store.disk" not in TOOL["measure"](tree)["one_importer"]
    (tree / "ragcache/store/shapes.py").write_text("import ragcache.store.disk\n")
    assert "ragcache.store.disk" not in TOOL["measure"](tree)["one_importer"], "it has two"


def test_sizes_are_of_the_source(tree: Path) -> None:
    house = TOOL["measure"](tree)
    source = [text for name, text in FILES.items() if not name.startswith(("tests", "bench"))]
    assert (house["files"], house["test_files"]) == (14, 1)
    assert house["rag_cache_methods"] == 2
    assert house["lines"] == sum(text.count("\n") for text in source)
    assert house["import_share"] == pytest.approx(10 / house["lines"])


@pytest.mark.parametrize("broken", [True, False])
def test_the_exit_code_tells_whether_a_rule_is_broken(
    tree: Path, capsys: pytest.CaptureFixture[str], broken: bool
) -> None:
    if not broken:
        (tree / "ragcache/store/shapes.py").write_text("")
        (tree / "ragcache/demo.py").write_text("")
        (tree / "api/ragcache_api/http/server.py").write_text("")
        (tree / "benchmarks/load.py").write_text("")
    assert TOOL["main"]([str(tree)]) == int(broken)
    assert (
        "class Shape: ragcache.store.shapes, ragcache_api.shapes" in capsys.readouterr().out
    ) == broken
    TOOL["main"]([str(tree), "--json"])
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert bool(figures["circles"]) == broken
