"""The paper's three use cases (Prompt Cache, §5.6): time to first token, cached and ordinary.

    python examples/pml/run.py [--model FOLDER_OR_NAME] [--runs 3] [FOLDER ...]

Each folder holds schema.xml and prompts for it. Cached and ordinary runs take turns, and the
medians are printed; the times include everything from the prompt's text to the first token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
USE_CASES = ("code-generation", "personalization", "trip-plan")


@dataclass(frozen=True, slots=True)
class Row:
    """Measurements of one prompt. Times are seconds."""

    prompt: str
    tokens: int
    cached_tokens: int
    ordinary: float
    cached: float
    same: bool
    """Whether both answers have the same text."""

    @property
    def ratio(self) -> float:
        return self.ordinary / self.cached


def measure(rag: Any, file: Path, runs: int) -> Row:
    """Run one prompt both ways in turn; the first pair warms up and does not count."""
    text = file.read_text(encoding="utf-8")
    times: dict[str, list[float]] = {"isolated": [], "exact": []}
    answers: dict[str, Any] = {}
    for number in range(runs + 1):
        for mode, seconds in times.items():
            answers[mode] = rag.prompt(text, mode=mode, source=str(file))
            if number:
                seconds.append(answers[mode].timings.first_token)
    reuse = answers["isolated"].reuse
    return Row(
        file.stem.removeprefix("prompt-"),
        reuse.prompt_tokens,
        reuse.cached_tokens,
        statistics.median(times["exact"]),
        statistics.median(times["isolated"]),
        answers["isolated"].text == answers["exact"].text,
    )


def run_folder(rag: Any, folder: Path, runs: int) -> list[Row]:
    """Add the schema of a folder and measure its prompts."""
    schema = folder / "schema.xml"
    rag.schemas.add(schema.read_text(encoding="utf-8"), source=str(schema))
    return [measure(rag, file, runs) for file in sorted(folder.glob("prompt-*.xml"))]


def print_rows(folder: Path, rows: Sequence[Row]) -> None:
    """Print a table of one use case."""
    print(f"\n{folder.name}")
    print(f"  {'prompt':<22}{'tokens':>8}{'cached':>8}{'ordinary':>12}{'cached':>12}{'ratio':>9}")
    for row in rows:
        print(
            f"  {row.prompt:<22}{row.tokens:>8,}{row.cached_tokens:>8,}"
            f"{1000 * row.ordinary:>9.1f} ms{1000 * row.cached:>9.1f} ms{row.ratio:>8.1f}x"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the use cases and print a table for each."""
    parser = argparse.ArgumentParser(description="TTFT of the paper's use cases.")
    parser.add_argument("folders", nargs="*", type=Path, help="folders with schema.xml and prompts")
    parser.add_argument("--model", help="a model folder or hub name; else the embedded reader")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    folders = options.folders or [HERE / name for name in USE_CASES]

    from ragcache import RagCache

    results: dict[str, list[dict[str, Any]]] = {}
    with (
        tempfile.TemporaryDirectory() as state,
        RagCache.open(state, options.model, max_tokens=4) as rag,
    ):
        for folder in folders:
            rows = run_folder(rag, folder, options.runs)
            results[folder.name] = [{**asdict(row), "ratio": row.ratio} for row in rows]
            if not options.json:
                print_rows(folder, rows)
    if options.json:
        json.dump(results, sys.stdout, indent=2)
        print()


if __name__ == "__main__":
    main()
