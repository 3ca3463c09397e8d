"""Runs the notebooks of docs/notebooks, and turns them into pages of the site.

python -m tools.notebooks          # runs them, and prints how long each takes
python -m tools.notebooks --write  # also stores their outputs
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent
NOTEBOOKS = REPOSITORY / "docs" / "notebooks"
_CELL_SECONDS = 300
_PLAIN = 200  # characters of a text beside a drawing
_SHOWN = ("text/html", "image/svg+xml", "text/plain")
"""Kinds of outputs, the ones that a page prefers first."""


def run_notebook(path: Path, documents: Iterable[str] = ("*.md",)) -> Any:
    """Run a notebook where it finds the example handbook, and return it with its outputs.

    Its state folder is temporary.

    Args:
        path: The notebook.
        documents: Patterns of the handbook's documents that it finds.

    Raises:
        CellExecutionError: A cell failed.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as scratch:
        clone = Path(scratch)
        (clone / "docs" / "notebooks").mkdir(parents=True)
        handbook = clone / "examples" / "handbook"
        handbook.mkdir(parents=True)
        for pattern in documents:
            for document in (REPOSITORY / "examples" / "handbook").glob(pattern):
                shutil.copy(document, handbook)
        shutil.copy(REPOSITORY / "examples" / "questions.jsonl", clone / "examples")
        resources = {"metadata": {"path": str(clone / "docs" / "notebooks")}}
        client = NotebookClient(
            notebook,
            timeout=_CELL_SECONDS,
            kernel_name="python3",
            coalesce_streams=True,
            resources=resources,
        )
        client.execute()
    tidy_outputs(notebook)
    return notebook


def tidy_outputs(notebook: Any) -> None:
    """Remove what changes with each run or machine, and long texts beside what is drawn."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of the run
        if cell.cell_type != "code":
            continue
        # standard error has advice on extras that are not installed
        cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
        for output in cell.outputs:
            data = output.get("data", {})
            if len(data) > 1:
                data["text/plain"] = data["text/plain"][:_PLAIN]


def notebook_page(notebook: Any) -> str:
    """Return a notebook with its outputs as Markdown."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif source:
            parts.append(f"```python\n{source}\n```")
            parts += _outputs(cell)
    page = "\n\n".join(parts) + "\n"
    return re.sub(r"\]\(([\w-]+)\.ipynb\)", r"](\1.md)", page)


def _outputs(cell: Any) -> Iterator[str]:
    """Write the outputs of a cell. Lines without blanks keep Markdown from ending its HTML."""
    for output in cell["outputs"]:
        if output["output_type"] == "stream":
            yield f"```text\n{''.join(output['text']).rstrip()}\n```"
            continue
        data = output["data"]
        kind = next(kind for kind in _SHOWN if kind in data)
        text = "".join(data[kind]).strip()
        if kind == "text/plain":
            yield f"```text\n{text}\n```"
        else:
            lines = [line for line in text.splitlines() if line.strip()]
            yield '<div class="output">\n' + "\n".join(lines) + "\n</div>"


def main(arguments: list[str]) -> None:
    """Run all notebooks, or the ones whose names are given, and store them on request."""
    import nbformat

    names = [each for each in arguments if not each.startswith("--")]
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if names and path.stem not in names:
            continue
        began = time.monotonic()
        notebook = run_notebook(path)
        if "--write" in arguments:
            nbformat.write(notebook, path)
        print(f"{path.name}: {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
