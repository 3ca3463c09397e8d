"""Builds the sequences that the reader is finetuned on, on CPUs, while a GPU pretrains.

    python3 training/sequences.py --data DATA --tokenizer training/build/tokenizer \\
        --packs training/build/packs/pack-* --out training/build/sequences --count 200000

Writes `training-NNNNN.npy`, each of 512 sequences as int16 [sequence, column, token], and
`evaluation.npz`, the evaluation sets in the same form. Columns: `COLUMNS`.
"""

from __future__ import annotations

import argparse
import random
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from corpus import load_corpus
from evaluation import evaluation_sets
from pack import read_texts
from samples import Builder, Sequence

COLUMNS = ("tokens", "positions", "blocks", "kinds")
SHARD = 512


def stacked(sequences: list[Sequence]) -> np.ndarray:
    """int16 [sequence, column, token]."""
    return np.stack([np.stack([getattr(s, name) for name in COLUMNS]) for s in sequences])


def write_shards(builder: Builder, folder: Path, numbers: range, seed: int, until: float) -> None:
    """Shards of these numbers, each with a random state of its own, as long as there is time."""
    for number in numbers:
        rng = random.Random(seed * 1_000_003 + number)
        rows = stacked([builder.training(rng) for _ in range(SHARD)])
        if time.time() > until:
            return
        part = folder / f"part-{number}.npy"
        np.save(part, rows)
        part.rename(folder / f"training-{number:05d}.npy")  # whole, for who reads meanwhile


def write_evaluation(builder: Builder, data: Path, folder: Path) -> None:
    sets = evaluation_sets(builder, data)
    part = folder / "part.npz"
    np.savez(part, **{name: stacked(sequences) for name, sequences in sets.items()})
    part.rename(folder / "evaluation.npz")


def main(command: list[str] | None = None) -> None:
    arguments = arguments_of(command)
    until = time.time() + 60 * arguments.minutes
    arguments.out.mkdir(parents=True, exist_ok=True)
    documents = read_texts(arguments.packs, arguments.workers) if arguments.packs else []
    corpus = load_corpus(Path(__file__).parent, arguments.data, arguments.swap, documents)
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json"))
    builder = Builder(corpus, tokenizer, arguments.length)
    shards = -(-arguments.count // SHARD)
    fork = get_context("fork")  # the corpus is shared, not copied
    seed, out, workers = arguments.seed, arguments.out, arguments.workers
    jobs = [fork.Process(target=write_evaluation, args=(builder, arguments.data, out))]
    jobs += [
        fork.Process(target=write_shards, args=(builder, out, range(i, shards, workers), seed, until))
        for i in range(workers)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    if any(job.exitcode for job in jobs):
        raise SystemExit("a worker failed; its error is above")


def arguments_of(command: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--packs", type=Path, nargs="*", default=[], help="natural text: pack.py's")
    parser.add_argument("--count", type=int, default=200_000, help="of training sequences")
    parser.add_argument("--minutes", type=float, default=60, help="stop after so many, at any count")
    parser.add_argument("--swap", type=float, default=0.3, help="share of fillings swapped")
    parser.add_argument("--length", type=int, default=1792)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(command)


if __name__ == "__main__":
    main()
