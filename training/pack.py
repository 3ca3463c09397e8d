"""Packs the gathered text into small compressed shards that a training machine can be sent.

    python3 training/pack.py --text training/build/text --out training/build/packs --megabytes 50 --packs 3

Writes `pack-0/`, `pack-1/`, …, each of at most so many megabytes: the first holds a share of every
source by its `share` in sources.toml, the others what is left. A shard is text of one language,
documents separated by `SEPARATOR`, in bzip2 (of prose no larger than xz, and sooner done): a machine with 16 cores unpacks and tokenizes all of them
in seconds. `read_pack` does.
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import json
import random
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from gather import load_sources
from special_tokens import END

SEPARATOR = "\x1e"
SHARD_BYTES = 16_000_000  # of text
RATIO = {"en": 0.26, "zh": 0.26}  # compressed bytes for one of text, about


@dataclass(frozen=True)
class Document:
    source: str
    language: str
    text: str

    @property
    def packed(self) -> float:
        return RATIO[self.language] * len(self.text.encode())


def read_documents(folder: Path) -> Iterator[Document]:
    for file in sorted(folder.glob("*.jsonl.gz")):
        with gzip.open(file, "rt", encoding="utf-8") as rows:
            for row in rows:
                value = json.loads(row)
                yield Document(file.name.removesuffix(".jsonl.gz"), value["language"], value["text"])


def divide(documents: list[Document], shares: dict[str, float], size: float, packs: int) -> list[list[Document]]:
    """Documents of each pack of `size` compressed bytes: a document comes the earlier, the larger
    its source's share is. Which of a source come first is chance."""
    rng = random.Random(0)
    order = sorted(documents, key=lambda d: rng.random() ** 2 / shares.get(d.source, 1.0) ** 2)
    divided: list[list[Document]] = [[]]
    filled = 0.0
    for document in order:
        if filled + document.packed > size:
            if len(divided) == packs:
                break
            divided.append([])
            filled = 0.0
        divided[-1].append(document)
        filled += document.packed
    return divided


def write_pack(documents: list[Document], folder: Path) -> int:
    """Writes the shards of a pack; returns their bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    number = total = 0
    for language in RATIO:
        chosen = sorted((d for d in documents if d.language == language), key=lambda d: d.source)
        for texts in _shards([d.text for d in chosen]):
            packed = bz2.compress(SEPARATOR.join(texts).encode())
            (folder / f"{language}-{number:02d}.bz2").write_bytes(packed)
            number, total = number + 1, total + len(packed)
    return total


def _shards(texts: list[str]) -> Iterator[list[str]]:
    """Runs of texts of about SHARD_BYTES each."""
    shard: list[str] = []
    size = 0
    for text in texts:
        shard.append(text)
        size += len(text.encode())
        if size > SHARD_BYTES:
            yield shard
            shard, size = [], 0
    if shard:
        yield shard


def read_shard(file: Path) -> list[str]:
    return bz2.decompress(file.read_bytes()).decode().split(SEPARATOR)


def read_texts(folders: list[Path], workers: int) -> list[str]:
    """All documents of packs."""
    with ProcessPoolExecutor(workers) as pool:
        return [text for texts in pool.map(read_shard, _files(folders)) for text in texts]


def _files(folders: list[Path]) -> list[Path]:
    return sorted(file for folder in folders for file in folder.glob("*.bz2"))


def shard_tokens(file: Path, tokenizer_file: Path) -> np.ndarray:
    """All documents of a shard in random order, each followed by END: uint16 [tokens]."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    end = tokenizer.token_to_id(END)
    texts = read_shard(file)
    random.Random(file.name).shuffle(texts)
    pieces = [np.array([*e.ids, end], np.uint16) for e in tokenizer.encode_batch_fast(texts)]
    return np.concatenate(pieces)


def read_pack(folders: list[Path], tokenizer_file: Path, workers: int) -> list[Future[np.ndarray]]:
    """The tokens of each shard, as they become ready."""
    pool = ProcessPoolExecutor(workers)
    return [pool.submit(shard_tokens, file, tokenizer_file) for file in _files(folders)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--megabytes", type=float, default=50, help="of a pack")
    parser.add_argument("--packs", type=int, default=1)
    arguments = parser.parse_args()
    shares = {source.name: source.share for source in load_sources()}
    documents = list(read_documents(arguments.text))
    divided = divide(documents, shares, arguments.megabytes * 1e6, arguments.packs)
    for number, chosen in enumerate(divided):
        size = write_pack(chosen, arguments.out / f"pack-{number}")
        characters = {k: sum(len(d.text) for d in chosen if d.language == k) for k in RATIO}
        print(json.dumps({"pack": number, "bytes": size, "characters": characters}), flush=True)


if __name__ == "__main__":
    main()
