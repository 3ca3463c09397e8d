"""Gathers the natural text that the reader is pretrained on (sources.toml), cleaned.

    python3 training/gather.py --data DATA --out training/build/text [--mirror CLONES]

Each source is cloned from GitHub, or read from `CLONES/owner+name` where it was cloned before.
Writes one `NAME.jsonl.gz` a source, a document a line: `{"text", "language"}`. What is dropped:
markup and code, boilerplate (paragraphs that are hardly prose, in another language, or seen
before), near copies of documents, and every paragraph that shares a phrase with the questions and
contexts of DATA and of the example handbook, which measure the reader.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from zlib import crc32

from markup import CONVERTERS, is_chinese

HERE = Path(__file__).parent
HANDBOOK = HERE.parent / "examples"
SHORTEST_DOCUMENT = 400  # characters; 160 for Chinese
LONGEST_PARAGRAPH = 4000
_ENGLISH = frozenset("the of and to in a is that for it with as was on be by are this you or not".split())
_WORD = re.compile(r"[\u3400-\u9fff]|[^\W\d_]+|\d+")


@dataclass(frozen=True)
class Source:
    """A repository that text comes from. paths: globs over the repository's files; skip: those left out;
    megabytes: how much of it is kept, documents chosen by the hash of their path."""

    repository: str
    licence: str
    format: str
    paths: tuple[str, ...]
    skip: tuple[str, ...] = ()
    megabytes: float = 1e9
    share: float = 1.0  # how often its documents are read when training, against the others
    note: str = ""

    @property
    def name(self) -> str:
        return self.repository.replace("/", "+")


def load_sources(path: Path = HERE / "sources.toml") -> list[Source]:
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["source"]
    return [Source(**{k: tuple(v) if isinstance(v, list) else v for k, v in r.items()}) for r in rows]


def clone(source: Source, folder: Path, mirror: Path | None) -> Path:
    """The git directory of a source, cloned into `folder` where `mirror` has none."""
    for base in [mirror] if mirror else []:
        for inner in ("repo/.git", "repo", ".git", ""):
            found = base / source.name / inner
            if (found / "HEAD").exists():
                return found
    target = folder / source.name
    if not target.exists():
        address = f"https://github.com/{source.repository}"
        command = ["git", "clone", "-q", "--depth", "1", "--bare", address, str(target)]
        subprocess.run(command, check=True)
    return target


def files(source: Source, repository: Path) -> Iterator[tuple[str, str]]:
    """Paths and texts of the files of a source, in the order of their paths' hashes."""
    git = ["git", "-C", str(repository)]
    tree = subprocess.run([*git, "ls-tree", "-rz", "HEAD"], check=True, capture_output=True).stdout
    chosen = []
    for row in filter(None, tree.decode(errors="replace").split("\0")):
        meta, path = row.split("\t", 1)
        if _matches(path, source.paths) and not _matches(path, source.skip):
            chosen.append((crc32(path.encode()), meta.split()[2], path))
    chosen.sort()
    process = subprocess.Popen(
        [*git, "cat-file", "--batch"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin
    assert process.stdout
    for _, blob, path in chosen:
        process.stdin.write(blob.encode() + b"\n")
        process.stdin.flush()
        header = process.stdout.readline().split()
        if len(header) == 3:  # else the clone lacks it
            content = process.stdout.read(int(header[2]) + 1)[:-1]
            yield path, content.decode(errors="replace").replace("\r\n", "\n")
    process.stdin.close()
    process.stdout.close()
    process.wait()


def _matches(path: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatch(path, glob) for glob in globs)


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


@dataclass
class Shingles:
    """Phrases of `length` words that start at about one word in `every` (chosen by its hash, so that
    two texts choose the same phrases). Han characters count as words."""

    length: int
    every: int
    _chosen: dict[str, bool] = field(default_factory=dict)

    def of(self, tokens: list[str]) -> list[int]:
        chosen, length = self._chosen, self.length
        found = []
        for i in range(len(tokens) - length + 1):
            word = tokens[i]
            picked = chosen.get(word)
            if picked is None:
                picked = chosen[word] = crc32(word.encode()) % self.every == 0
            if picked:
                found.append(hash(" ".join(tokens[i : i + length])))
        return found


@dataclass
class Cleaner:
    """Turns blocks into a clean document, and remembers what it has seen."""

    held_out: set[int]
    seen: set[int] = field(default_factory=set)
    paragraphs: set[int] = field(default_factory=set)
    shingles: Shingles = field(default_factory=lambda: Shingles(8, 16))
    exact: Shingles = field(default_factory=lambda: Shingles(12, 4))
    dropped: dict[str, int] = field(default_factory=dict)

    def clean(self, blocks: list[str]) -> dict[str, str] | None:
        kept: list[str] = []
        heading = ""
        for block in blocks:
            if block.startswith("#"):
                heading = block if len(block) < 160 else ""
                continue
            block = block[:LONGEST_PARAGRAPH].strip()
            reason = self._fault(block)
            if reason:
                self.dropped[reason] = self.dropped.get(reason, 0) + 1
                continue
            if heading:
                kept.append(heading)
            heading = ""
            kept.append(block)
        text = "\n\n".join(kept)
        chinese = is_chinese(text)
        if len(text) < SHORTEST_DOCUMENT * (0.4 if chinese else 1) or self._is_copy(text):
            return None
        return {"text": text, "language": "zh" if chinese else "en"}

    def _fault(self, block: str) -> str | None:
        chinese = is_chinese(block)
        if len(block) < (8 if chinese else 24):
            return "short"
        if not chinese and not _is_english(block):
            return "not prose"
        tokens = words(block)
        if len(tokens) > 12:
            key = hash(" ".join(t for t in tokens if not t.isdigit()))
            if key in self.paragraphs:
                return "repeated"
            self.paragraphs.add(key)
            if not self.held_out.isdisjoint(self.exact.of(tokens)):
                return "held out"
        return None

    def _is_copy(self, text: str) -> bool:
        """Whether half of a text's phrases were seen in others."""
        phrases = set(self.shingles.of(words(text)))
        copy = len(phrases) >= 4 and len(phrases & self.seen) > 0.5 * len(phrases)
        if copy:
            self.dropped["near copies"] = self.dropped.get("near copies", 0) + 1
        self.seen |= phrases
        return copy


def _is_english(block: str) -> bool:
    letters = sum(c.isascii() and c.isalpha() or c == " " for c in block)
    if letters < 0.82 * len(block) or block.count("http") > 2:
        return False
    tokens = block.lower().split()
    common = sum(t in _ENGLISH for t in tokens)
    return common >= 0.12 * len(tokens) or (len(tokens) < 9 and letters > 0.9 * len(block))


def held_out_phrases(data: Path) -> set[int]:
    """Phrases of all question sets in DATA and of the example handbook."""
    shingles = Shingles(12, 4)
    texts = [p.read_text(encoding="utf-8") for p in HANDBOOK.rglob("*") if p.suffix in (".md", ".jsonl")]
    for path in [*data.glob("*.json"), *data.glob("*.jsonl")]:
        rows = path.read_text(encoding="utf-8")
        values = [json.loads(rows)] if path.suffix == ".json" else map(json.loads, rows.splitlines())
        for value in values:
            texts += _strings(value)
    return {phrase for text in texts for phrase in shingles.of(words(text))}


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def gather(source: Source, repository: Path, cleaner: Cleaner, target: Path) -> dict[str, int]:
    """Writes a source's documents; returns how many, and how many characters by language."""
    sizes = {"documents": 0, "en": 0, "zh": 0}
    written = 0
    with gzip.open(target, "wt", encoding="utf-8", compresslevel=4) as out:
        for _, text in files(source, repository):
            try:
                blocks = CONVERTERS[source.format](text)
            except (ValueError, SyntaxError):  # not the format that its name says
                continue
            document = cleaner.clean(blocks)
            if document is None:
                continue
            out.write(json.dumps(document, ensure_ascii=False) + "\n")
            sizes["documents"] += 1
            sizes[document["language"]] += len(document["text"])
            written += len(document["text"].encode())
            if written > source.megabytes * 1e6:
                break
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="the developers' question sets")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mirror", type=Path, help="a folder of clones named owner+name")
    parser.add_argument("--sources", type=Path, default=HERE / "sources.toml")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    cleaner = Cleaner(held_out_phrases(arguments.data))
    for source in load_sources(arguments.sources):
        repository = clone(source, arguments.out / "clones", arguments.mirror)
        sizes = gather(source, repository, cleaner, arguments.out / f"{source.name}.jsonl.gz")
        print(json.dumps({"source": source.repository, **sizes}), flush=True)
    print(json.dumps({"dropped": cleaner.dropped}), flush=True)


if __name__ == "__main__":
    main()
