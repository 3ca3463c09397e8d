"""Export and import of a collection, beside the disk's own copy of the same bytes.

python benchmarks/transfer.py --json FILE
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from harness import (
    JsonFile,
    LlamaShape,
    Progress,
    describe_machine,
    plain_table,
    print_figures,
    run_benchmark,
    seconds,
    shaped_model,
)

from ragcache import RagCache, SourceDocument
from ragcache.engine import EncodeJob
from ragcache.models import LoadedModel
from ragcache.states import KVStates

_SHAPE = LlamaShape(32, 512, 4, 4, 512, 4096, 4096)
"""A shape whose states take 64 KiB a token, half as much as those of Llama 8B."""
_WAYS = ("export", "copy", "import", "copy again")
_WORDS = 100  # words of a document, of which each takes a few tokens


@dataclass(frozen=True, slots=True)
class TransferSetting:
    """Bytes of states, rounds of all ways in turn, and a folder on the disk to measure."""

    nbytes: int = 2**30
    rounds: int = 5
    folder: Path | None = None


def bench_transfer(setting: TransferSetting, progress: Progress) -> dict[str, Any]:
    """Measure all ways in turn, and return their seconds with the shares of the copy's speed."""
    with tempfile.TemporaryDirectory(dir=setting.folder) as name:
        folder = Path(name)
        model = shaped_model(_SHAPE)
        archive, times = folder / "bench.tar", dict[str, list[float]]()
        with RagCache.open(folder / "state", model, embedding="none", warm_up=False) as rag:
            progress("storing states")
            fill(rag, model, setting.nbytes)
            for number in range(setting.rounds):
                progress(f"round {number + 1} of {setting.rounds}")
                for way, taken in zip(_WAYS, measure(rag, model, archive), strict=True):
                    times.setdefault(way, []).append(taken)
        nbytes = archive.stat().st_size
    median = {way: statistics.median(each) for way, each in times.items()}
    return {
        "machine": describe_machine(),
        "setting": asdict(setting),
        "nbytes": nbytes,
        "seconds": times,
        "median_s": median,
        "export_share": median["copy"] / median["export"],
        "import_share": median["copy again"] / median["import"],
    }


def measure(rag: RagCache, model: LoadedModel, archive: Path) -> list[float]:
    """Return the seconds of an export, a copy, an import and a copy, each until it is on disk."""
    archive.unlink(missing_ok=True)
    exported = seconds(lambda: rag.collections.export_archive("bench", archive))
    copied = _copy(archive)
    other = archive.with_name("other")
    with RagCache.open(other, model, embedding="none", warm_up=False) as empty:
        imported = seconds(lambda: empty.collections.import_archive(archive))
    shutil.rmtree(other)
    return [exported, copied, imported, _copy(archive)]


def _copy(file: Path) -> float:
    """Return the seconds of a copy of a file until it is on disk. The copy is removed."""
    copy = file.with_name("copy")

    def run() -> None:
        shutil.copyfile(file, copy)
        descriptor = os.open(copy, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    taken = seconds(run)
    copy.unlink()
    return taken


def fill(rag: RagCache, model: LoadedModel, nbytes: int) -> None:
    """Store documents until their states, made-up numbers, take so many bytes."""
    encoder = rag.internals.ingestor.encoder
    encoder.encode = lambda jobs: make_states(model, jobs)
    rng, stored = random.Random(0), 0
    while stored < nbytes:
        number = rag.collections.page().items[0].documents if stored else 0
        texts = [
            " ".join("".join(rng.choices("aeioustrn", k=6)) for _ in range(_WORDS))
            for _ in range(8)
        ]
        documents = [SourceDocument(f"d{number + n}", text) for n, text in enumerate(texts)]
        stored += rag.ingest("bench", documents).tokens * model.causal.bytes_per_token


def make_states(model: LoadedModel, jobs: Sequence[EncodeJob]) -> Iterable[KVStates]:
    """Return states with random numbers, which no file system can compress."""
    causal = model.causal
    for job in jobs:
        shape = (causal.num_layers, causal.num_kv_heads, len(job.token_ids), causal.head_dim)
        numbers = torch.randint(0, 2**15 - 2**8, shape, dtype=torch.int16)
        states = numbers.view(torch.bfloat16).to(causal.states_dtype)
        yield KVStates(states, states.clone(), job.start)


def main(
    nbytes: Annotated[int, typer.Option("--bytes", min=1, help="Bytes of states.")] = 2**30,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of all ways in turn.")] = 5,
    folder: Annotated[Path | None, typer.Option(help="A folder on the disk to measure.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Export and import beside the disk's own copy."""
    setting = TransferSetting(nbytes, rounds, folder)
    result = run_benchmark(lambda progress: bench_transfer(setting, progress))
    table = plain_table("", "seconds", "GB/s", "of the copy")
    for way, taken in result["median_s"].items():
        share = f"{result[f'{way}_share']:.2f}" if f"{way}_share" in result else ""
        table.add_row(way, f"{taken:.2f}", f"{result['nbytes'] / taken / 1e9:.2f}", share)
    print_figures([table], result, json_file)


if __name__ == "__main__":
    typer.run(main)
