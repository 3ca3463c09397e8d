"""The GPU backend's table: every figure beside what it must be, its goal, its floor and its peers.

    python benchmarks/gpu.py --check --json FILE

One model a shape; a part that fails loses no other. Needs torch, transformers, triton, numpy and
safetensors only, and for `tiers` SQLAlchemy.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gpu_device import bench_attention, measure_ceilings
from gpu_parts import ENGINE_PARTS
from gpu_served import SERVED_PARTS
from gpu_session import GpuSession, median_ms
from gpu_table import Ceilings, GpuWorkload, missed, render_markdown, render_text, rows_of

from ragcache.bench.harness import SHAPES, LlamaShape, Progress, concatenate, prefill
from ragcache.machine import describe_machine

SESSION_PARTS = ENGINE_PARTS | SERVED_PARTS
PARTS = ("attention", *SESSION_PARTS)
DEFAULT_PARTS = tuple(part for part in PARTS if part != "profile")
QUICK = GpuWorkload(runs=9, serve_runs=2, decode_tokens=32, peer_runs=1)
"""Fewer repetitions of everything."""

Save = Callable[[dict[str, Any]], None]


class SuiteRun:
    """A run under way: its document grows part by part.

    limit: seconds until a part that hangs ends the process, with the stacks of all threads; None
    for ever. save: called with the document after every part.
    """

    def __init__(
        self, shapes: Mapping[str, LlamaShape], parts: Sequence[str], load: GpuWorkload,
        device: str = "cuda", progress: Progress = lambda _: None, save: Save = lambda _: None,
        limit: float | None = None, quantization: str | None = None,
    ) -> None:  # fmt: skip
        self.quantization = quantization
        self.load, self.device, self.progress = load, device, progress
        self.save, self.limit = save, limit
        self.shapes = shapes
        chosen = [part for part in PARTS if part in parts]
        self.document = new_document(shapes, chosen, load, device) | {"quantization": quantization}

    def run(self) -> dict[str, Any]:
        """Runs everything. Returns the document, with the table's rows."""
        if self.device != "cpu":
            torch.cuda.set_device(torch.device(self.device).index or 0)
        with without_cudnn_attention():
            measured = self._part("ceilings", lambda: asdict(measure_ceilings(self.device)))
            self.document["ceilings"] = measured or {}
            for name, shape in self.shapes.items():
                self._shape(name, shape)
        self.document["rows"] = rows_of(self.document)
        self.document["missed"] = [f"{row.shape} {row.name}" for row in missed(self.document)]
        self.save(self.document)
        return self.document

    def _shape(self, name: str, shape: LlamaShape) -> None:
        parts, results = self.document["parts"], self.document["results"][name]
        if "attention" in parts:
            run = partial(bench_attention, shape, self.load, self.device)
            results["attention"] = self._part(f"{name} attention", run) or {}
        session_parts = [part for part in SESSION_PARTS if part in parts]
        if not session_parts:
            return
        session = GpuSession(shape, self.load, self.device, self.progress, self.quantization)
        try:
            self._part(f"{name} model", lambda: session.model)
            if "ttft" in parts:
                results["hf"] = self._part(f"{name} hf", lambda: bench_hugging_face(session)) or {}
            session.free_memory()
            if any(part in ENGINE_PARTS for part in session_parts):
                self._part(f"{name} engine", lambda: session.engine)
            ceilings = Ceilings(**self.document["ceilings"])
            for part in session_parts:
                run = partial(SESSION_PARTS[part], session, ceilings)
                results[part] = self._part(f"{name} {part}", run) or {}
                self.save(self.document)
        except Exception as error:  # the other shapes are measured, whatever this one raised
            self.document["errors"][name] = repr(error)
        finally:
            self._part(f"{name} close", session.close)

    def _part(self, name: str, run: Callable[[], Any]) -> Any:
        """Run a part and return its result, or record its error in the document and return None."""
        self.progress(name)
        begin = time.perf_counter()
        if self.limit is not None:
            faulthandler.dump_traceback_later(self.limit, exit=True)
        try:
            return run()
        except Exception as error:  # the other parts go on
            self.document["errors"][name] = f"{error!r}\n{traceback.format_exc()}"
            return None
        finally:
            if self.limit is not None:
                faulthandler.cancel_dump_traceback_later()
            self.document["seconds"][name] = round(time.perf_counter() - begin, 2)
            self.progress(f"{name}: {self.document['seconds'][name]:.1f} s")
            self.save(self.document)


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Turns cuDNN's attention off: on Hopper it adds 30 to 40 ms at each new length."""
    # PyTorch types the setter alone
    before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]  # torch gives it no types
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def new_document(
    shapes: Mapping[str, LlamaShape], parts: Sequence[str], load: GpuWorkload, device: str
) -> dict[str, Any]:
    """Return the document that a run writes to its file, before anything is measured."""
    return {
        "machine": describe_machine(),
        "device": device,
        "parts": list(parts),
        "shapes": {name: asdict(shape) for name, shape in shapes.items()},
        "workload": asdict(load),
        "peers": _peers(),
        "ceilings": {},
        "results": {name: {} for name in shapes},
        "errors": {},
        "seconds": {},
    }


def bench_hugging_face(session: GpuSession) -> dict[str, Any]:
    """Ordinary prefill, and states concatenated in a `DynamicCache`, by number of documents. Runs
    before the engine has the model, whose modules are still those of Hugging Face then."""
    load, model = session.load, session.model
    found: dict[str, Any] = {}
    preamble = session.random_states(load.preamble, 0)
    for count in load.placed:
        states = [session.random_states(load.document_tokens, load.preamble) for _ in range(count)]
        question = session.tokens(load.question)
        prompt = session.tokens(load.preamble + count * load.document_tokens) + question
        computed, _ = median_ms(partial(prefill, model, prompt), load.peer_runs, warm=1)
        joined = partial(concatenate, model, [preamble, *states], question)
        concatenated, _ = median_ms(joined, load.peer_runs, warm=1)
        found[str(count)] = {"prefill_ms": computed, "concat_ms": concatenated}
    return found


def _peers() -> dict[str, str]:
    """Return notes on peers other than Hugging Face."""
    measured = "its cascade is measured in the part attention"
    absent = "does not import here, so it is not measured"
    return {"FlashInfer": measured if find_spec("flashinfer") is not None else absent}


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
    shapes = {name: SHAPES[name] for name in options.shape.split(",")}
    parts = options.part.split(",")
    limit, quantization = options.limit, options.quantization
    run = SuiteRun(shapes, parts, load, options.device, progress, save, limit, quantization)
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", default=",".join(DEFAULT_PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--shape", default=",".join(SHAPES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quantization", choices=["fp8"], help="default: bfloat16")
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
