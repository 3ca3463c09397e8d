"""`python -m ragcache.bench.gpu`: the table, where only torch, transformers and triton are."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ragcache.bench.gpu.suite import DEFAULT_PARTS, PARTS, QUICK, SuiteRun, shapes_named
from ragcache.bench.gpu.table import GpuWorkload, missed, render_markdown, render_text
from ragcache.bench.harness import SHAPES


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts and prints the table. Returns the exit status."""
    options = _parser().parse_args(arguments)
    if options.render is not None:
        table = render_markdown(json.loads(options.render.read_text(encoding="utf-8")))
        if options.into is None:
            print(table, end="")
        else:
            page = options.into.read_text(encoding="utf-8")
            options.into.write_text(with_table(page, table), encoding="utf-8")
        return 0
    begin = time.perf_counter()

    def progress(text: str) -> None:
        print(f"[{time.perf_counter() - begin:6.1f} s] {text}", file=sys.stderr, flush=True)

    def save(document: dict[str, Any]) -> None:
        if options.json is not None:
            text = json.dumps(document, indent=1, default=str) + "\n"
            options.json.write_text(text, encoding="utf-8")

    load = QUICK if options.quick else GpuWorkload()
    shapes, parts = shapes_named(options.shape.split(",")), options.part.split(",")
    run = SuiteRun(shapes, parts, load, options.device, progress, save, options.limit)
    return report(run.run(), check=options.check)


def report(document: dict[str, Any], *, check: bool) -> int:
    """Prints the table and the errors. Returns 1 where a part failed, or with `check` a must was
    missed."""
    print(render_text(document))
    for part, error in document["errors"].items():
        print(f"\n{part}\n{error}", file=sys.stderr)
    return int(bool(document["errors"]) or (check and bool(missed(document))))


MARKS = ("<!-- gpu table -->", "<!-- end of gpu table -->")
"""Before and after the table of a page."""


def with_table(page: str, table: str) -> str:
    """A page with another table between its marks."""
    before, after = page.split(MARKS[0], maxsplit=1)[0], page.split(MARKS[1])[1]
    return f"{before}{MARKS[0]}\n{table}{MARKS[1]}{after}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ragcache.bench.gpu", description=__doc__)
    parser.add_argument("--part", default=",".join(DEFAULT_PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--shape", default=",".join(SHAPES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything here")
    parser.add_argument("--check", action="store_true", help="exit 1 where a must is missed")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument(
        "--limit", type=float, default=150.0, help="seconds until a part that hangs ends all"
    )
    parser.add_argument(
        "--render", type=Path, metavar="FILE", help="print a file's table as Markdown; run nothing"
    )
    parser.add_argument(
        "--into", type=Path, metavar="PAGE", help="with --render: put it between the page's marks"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
