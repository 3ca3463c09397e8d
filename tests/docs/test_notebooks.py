"""The notebooks run, and show what is stored in them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from tools.notebooks import NOTEBOOKS, notebook_page, run_notebook

_NAMES = "annual-leave cold-store fire key-loan lone-working sick-days travel visitors"
ANSWERING = tuple(f"{name}.md" for name in _NAMES.split())
"""Documents of the handbook with the answers. The others would be read for nothing."""
FACTS = {
    "ten-minutes": ("unchanged, 0 modules read", "Yuki Tanabe", "harbour office", "1 April",
                    "rooted serves", "The documents do not answer this question."),
    "langchain": ("tokens read from states", "Yuki Tanabe", "harbour office", "1 April"),
    "is-reuse-safe": ("rooted serves", "isolated serves", "points of F1", "answers differ"),
}  # fmt: skip
"""Words that a notebook shows, whatever machine it runs on."""
NAMES = tuple(FACTS)


def stored(name: str) -> Any:
    return json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))


def kinds(notebook: Any) -> list[tuple[str, list[str]]]:
    """The id of each cell and the kinds of its outputs."""
    return [
        (cell["id"], [kind for each in cell.get("outputs", [])
                      for kind in sorted(each.get("data", [each["output_type"]]))])
        for cell in notebook["cells"]
    ]  # fmt: skip


def missing_facts(name: str, notebook: Any) -> list[str]:
    outputs = json.dumps([cell.get("outputs", []) for cell in notebook["cells"]])
    return [fact for fact in FACTS[name] if fact not in outputs]


@pytest.mark.slow
@pytest.mark.enable_socket  # by which the kernel is talked to
@pytest.mark.allow_hosts(["127.0.0.1"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "ten-minutes" else pytest.mark.nightly)
        for name in NAMES
    ],
)
def test_a_notebook_runs_and_shows_what_is_stored(name: str) -> None:
    ran = run_notebook(NOTEBOOKS / f"{name}.ipynb", ANSWERING)
    assert kinds(ran) == kinds(stored(name)), "python -m tools.notebooks --write"
    assert not missing_facts(name, ran)


def test_all_notebooks_are_named_and_in_the_site() -> None:
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(NAMES)
    site = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
    assert all(f"- notebooks/{name}.md\n" in site for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_short_and_ends_with_a_chart(name: str) -> None:
    notebook = stored(name)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert max(len("".join(cell["source"]).splitlines()) for cell in code) <= 16
    assert not missing_facts(name, notebook)
    assert any("image/svg+xml" in each for _, each in kinds(notebook)), "a chart of the tokens"
    bars = [output for cell in code for output in cell["outputs"]
            if "<progress" in "".join(output.get("data", {}).get("text/html", ""))]  # fmt: skip
    assert bars, "a progress bar"
    assert not any(output["output_type"] == "error" for cell in code for output in cell["outputs"])
    page = notebook_page(notebook)
    assert page.startswith("# ")
    assert "<svg " in page
    for link in re.findall(r"\]\(([^)#:]+)[^)]*\)", page):
        target = NOTEBOOKS / link
        assert target.exists() or target.with_suffix(".ipynb").exists(), link
