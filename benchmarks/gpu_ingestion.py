"""Ingestion on a GPU: with room, while states go down to pinned memory, and beside requests.

    python benchmarks/gpu_ingestion.py --shape 8b --json FILE

Documents of 1,024 tokens are encoded in portions of eight, as by `ragcache ingest`, without a disk.
The host tier is empty at first, so that its memory is mapped and registered as states come down;
then it is full. Requests beside read eight of the documents that were there before.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ragcache.bench.harness import SHAPES, LlamaShape
from ragcache.bench.load import LoadRun, LoadSession, NewDocuments, ServiceLoad
from ragcache.bench.load_workload import LoadSetting
from ragcache.machine import describe_machine
from ragcache.store import KVStore

PORTION = 8
"""Documents that are encoded at once, as by the pipeline."""


@dataclass(frozen=True)
class IngestionSetting:
    """Sizes of one run."""

    setting: LoadSetting = field(default_factory=lambda: LoadSetting(documents=64, seconds=5.0))
    """The documents that are there before, which fill the device tier, and the requests."""
    new: int = 96
    """Documents of each part without requests."""
    host: int = 96
    """Documents that fit into the host tier."""
    rate: float = 10.0
    """Requests a second beside an ingestion."""


class IngestionBench:
    """The parts of a run over one engine.

    Args:
        shape: Sizes of the model.
        sizes: Sizes of the run.
        device: Device of the model.
        max_gap_ms: Longest gap between tokens that the engine may cause by encoding.
    """

    def __init__(
        self, shape: LlamaShape, sizes: IngestionSetting, device: str, max_gap_ms: float | None
    ) -> None:
        self.sizes, self.next = sizes, sizes.setting.documents
        load = ServiceLoad(shape, sizes.setting, max_gap_ms=max_gap_ms)
        self.session = LoadSession(load, device, lambda text: print(text, flush=True))

    def with_budgets(self, device: int, host: int) -> None:
        """Size the tiers of the next store, in documents."""
        of_one = self.sizes.setting.document_tokens * self.session.causal.bytes_per_token
        self.session.load = replace(
            self.session.load, device_bytes=device * of_one, host_bytes=host * of_one
        )

    def tokens_s(self, store: KVStore) -> float:
        """Ingest documents, and return the tokens a second until the device has all states."""
        begin, count = time.perf_counter(), self.sizes.new
        for first in range(self.next, self.next + count, PORTION):
            numbers = range(first, first + PORTION)
            self.session.fetch(store, numbers, "ingest").release()
        self.session.synchronize()
        self.next += count
        return count * self.sizes.setting.document_tokens / (time.perf_counter() - begin)

    def with_room(self) -> float:
        """Tokens a second where the device tier holds all."""
        documents = self.sizes.setting.documents + 2 * self.sizes.new
        self.with_budgets(documents, 0)
        with self.session.filled_store() as store:
            self.tokens_s(store)
            return self.tokens_s(store)

    def with_demotion(self) -> dict[str, float]:
        """Tokens a second where each new document pushes another out."""
        self.with_budgets(self.sizes.setting.documents, self.sizes.host)
        with self.session.filled_store() as store:
            names = ("host memory is new", "host memory is full")
            return {name: self.tokens_s(store) for name in names}

    def beside(self) -> dict[str, Any]:
        """Requests alone, and beside an ingestion that fills the device tier and then demotes."""
        session, rate = self.session, self.sizes.rate
        self.with_budgets(2 * self.sizes.setting.documents, self.sizes.host)
        with session.filled_store() as store:
            alone = LoadRun(session, store, rate).run()
            with NewDocuments(session, store, PORTION) as ingestion:
                run = LoadRun(session, store, rate).run()
        return {"alone": alone, "beside": run | {"ingested_tokens_s": ingestion.tokens_s}}


def rows_of(document: dict[str, Any]) -> list[str]:
    """Return the lines of the printed table."""
    lines = list[str]()
    for name, value in document["results"].items():
        if isinstance(value, float):
            lines.append(f"{name}: {value:,.0f} tokens/s")
            continue
        first, gap = value["ttft_ms"], value["gap_ms"]
        lines.append(
            f"{name}: {value['answered']:.1f} answers/s; TTFT {first['p50']:.0f}/{first['p99']:.0f}"
            f"; gap {gap['p50']:.1f}/{gap['p99']:.0f}/{gap['longest']:.0f} ms"
            f"; ingested {value.get('ingested_tokens_s', 0.0):,.0f} tokens/s; {value['sources']}"
        )
    return lines


def bench_ingestion(
    shape: LlamaShape, sizes: IngestionSetting, device: str, bounds: Sequence[float], save: Any
) -> dict[str, Any]:
    """Run all parts; with bounds of the gap, the requests beside once more for each of them."""
    document: dict[str, Any] = {"machine": describe_machine(), "results": {}}
    found = document["results"]
    bench = IngestionBench(shape, sizes, device, None)
    try:
        found["with room"] = bench.with_room()
        save(document)
        found |= bench.with_demotion()
        save(document)
        found |= bench.beside()
        save(document)
    finally:
        bench.session.close()
    for bound in bounds:
        bench = IngestionBench(shape, sizes, device, bound)
        try:
            for name, run in bench.beside().items():
                found[f"{name}, max_gap_ms={bound:g}"] = run
            save(document)
        finally:
            bench.session.close()
    return document


def main(
    shape: Annotated[str, typer.Option(help="Sizes of the model: 7b, 8b.")] = "8b",
    device: Annotated[str, typer.Option(help="cuda, or cpu for a tiny model.")] = "cuda",
    max_gap_ms: Annotated[str, typer.Option(help="Bounds, with commas between.")] = "30",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures.")] = None,
) -> None:
    """Print tokens a second, and the figures of the requests beside."""
    sizes, of = IngestionSetting(), SHAPES.get(shape)
    if device == "cpu" or of is None:
        tiny = ServiceLoad.reduced()
        of = tiny.shape
        sizes = IngestionSetting(replace(tiny.setting, documents=16), new=16, host=16, rate=5.0)

    def save(document: dict[str, Any]) -> None:
        if json_file is not None:
            json_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    bounds = [float(each) for each in max_gap_ms.split(",") if each]
    document = bench_ingestion(of, sizes, device, bounds, save)
    print("\n".join(rows_of(document)))


if __name__ == "__main__":
    typer.run(main)
