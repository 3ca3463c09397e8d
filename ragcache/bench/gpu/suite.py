"""Runs parts over shapes, one model a shape, and keeps what was measured when a part fails."""

from __future__ import annotations

import faulthandler
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from ragcache.bench.gpu.device import bench_attention, measure_ceilings
from ragcache.bench.gpu.parts import ENGINE_PARTS
from ragcache.bench.gpu.session import GpuSession, median_ms
from ragcache.bench.gpu.table import Ceilings, GpuWorkload, missed, rows_of
from ragcache.bench.harness import SHAPES, LlamaShape, Progress
from ragcache.bench.peers import concatenate, prefill, without_cudnn_attention
from ragcache.machine import describe_machine

PARTS = ("attention", *ENGINE_PARTS)
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
        limit: float | None = None,
    ) -> None:  # fmt: skip
        self.load, self.device, self.progress = load, device, progress
        self.save, self.limit = save, limit
        self.shapes = shapes
        chosen = [part for part in PARTS if part in parts]
        self.document = new_document(shapes, chosen, load, device)

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
        engine_parts = [part for part in ENGINE_PARTS if part in parts]
        if not engine_parts:
            return
        session = GpuSession(shape, self.load, self.device, self.progress)
        try:
            self._part(f"{name} model", lambda: session.model)
            if "ttft" in parts:
                results["hf"] = self._part(f"{name} hf", lambda: bench_hugging_face(session)) or {}
            session.free_memory()
            self._part(f"{name} engine", lambda: session.engine)
            ceilings = Ceilings(**self.document["ceilings"])
            for part in engine_parts:
                run = partial(ENGINE_PARTS[part], session, ceilings)
                results[part] = self._part(f"{name} {part}", run) or {}
        except Exception as error:  # the other shapes are measured, whatever this one raised
            self.document["errors"][name] = repr(error)
        finally:
            self._part(f"{name} close", session.close)

    def _part(self, name: str, run: Callable[[], Any]) -> Any:
        """What a part returns; None where it failed, with its error in the document."""
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


def new_document(
    shapes: Mapping[str, LlamaShape], parts: Sequence[str], load: GpuWorkload, device: str
) -> dict[str, Any]:
    """What a run writes to its file, before anything was measured."""
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
    """What is said of peers beside Hugging Face."""
    measured = "its cascade is measured in the part attention"
    absent = "does not import here, so it is not measured"
    return {"FlashInfer": measured if find_spec("flashinfer") is not None else absent}


def shapes_named(names: Sequence[str]) -> dict[str, LlamaShape]:
    """Shapes by name. Raises `KeyError` for one that does not exist."""
    return {name: SHAPES[name] for name in names}
