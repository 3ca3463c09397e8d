"""Contexts for the hybrid toy: modules of one length, and questions about any of them.

    python3 training/hybrid_samples.py --data DATA --tokenizer ragcache/reader --out training/build/hybrid

The material is the reader's (`corpus.py`), or with `--recall` pairs of words that are tokens of the
reader ("harbour: lantern."), whose questions name the first. Every module has exactly
`--module-tokens` tokens, so that a recurrent layer reads a batch without padding. Writes shards
`training-K-NNNNN.npz` of contexts with K modules, and `evaluation.npz`. Arrays of a shard of N
contexts, int16:

    modules [N, K, M]   tokens
    questions, kinds [N, Q, QUESTION_TOKENS]   tokens; 0 padding, 2 question, 3 answer
    asked [N, Q]   number of the module that answers, -1 without a question
"""

from __future__ import annotations

import argparse
import random
import re
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from corpus import Section, load_corpus, squad_passages
from registers import draw_entries
from samples import Builder, answer_tokens, only_naming
from special_tokens import END
from templates import Filled

QUESTION_TOKENS = 48
COUNTS = (1, 2, 1, 4, 2, 3, 6, 8)
"""Modules of a context in training, one shard after the other: short ones are learned first."""
EVALUATED = (1, 2, 4, 8)
SHARD = 128
_WEIGHTS = {"paragraphs": 55, "sentences": 30, "searches": 5, "papers": 4, "prose": 4}
_ALIKE_SHARE = 0.3  # of the contexts are entries of one register

Draw = Callable[[random.Random], Section]
Arrays = dict[str, np.ndarray]


def question_count(modules: int) -> int:
    """Questions of a context."""
    return 6 + 2 * modules


class ContextBuilder:
    """Draws contexts and tokenizes them."""

    def __init__(self, builder: Builder, module_tokens: int, recall: bool = False) -> None:
        self.builder, self.tokenizer = builder, builder.tokenizer
        self._size, self.recall = module_tokens, recall
        self._end = self.tokenizer.token_to_id(END)
        spaced = (token[1:] for token in sorted(self.tokenizer.get_vocab()) if token[0] == "Ġ")
        words = [word for word in spaced if re.fullmatch("[a-z]{5,}", word)]
        random.Random(0).shuffle(words)
        self._keys, self._values = words[:64], words[64:96]

    def training(self, count: int, rng: random.Random) -> Arrays:
        """A context of any kind."""
        if self.recall:
            return self.pairs(count, rng)
        if rng.random() < _ALIKE_SHARE:
            return self.alike(count, rng)
        names = list(_WEIGHTS)

        def draw(rng: random.Random) -> Section:
            source = rng.choices(names, list(_WEIGHTS.values()))[0]
            return getattr(self.builder.corpus, source).draw(rng)

        return self.of(draw, count, rng)

    def of(self, draw: Draw, count: int, rng: random.Random) -> Arrays:
        """A context whose modules are sections of one source."""
        return self._context([self._filled(draw, rng) for _ in range(count)], rng)

    def alike(self, count: int, rng: random.Random) -> Arrays:
        """Entries of one register, with the questions that name one of them."""
        drawn = iter(only_naming(draw_entries(rng, 8 * count)))
        return self.of(lambda _: next(drawn), count, rng)

    def pairs(self, count: int, rng: random.Random) -> Arrays:
        """Pairs of words. No two of a context have the same first word."""
        keys = iter(rng.sample(self._keys, len(self._keys)))
        size = -(-self._size // 4)  # a pair has four tokens

        def draw(rng: random.Random) -> Section:
            found = [(next(keys), value) for value in rng.sample(self._values, size)]
            text = "\n" + "".join(f" {key}: {value}." for key, value in found)  # one paragraph
            return Filled("", text, tuple(found))

        return self.of(draw, count, rng)

    def _filled(self, draw: Draw, rng: random.Random) -> Section:
        """Sections, until they have the tokens of a module."""
        sections = [draw(rng)]
        while True:
            module = self.builder.module(sections, rng)
            if len(self.tokenizer.encode(module.text).ids) >= self._size:
                return module
            sections.append(draw(rng))

    def _context(self, modules: list[Section], rng: random.Random) -> Arrays:
        rows, asked = [], []
        for number, module in enumerate(modules):
            encoded = self.tokenizer.encode(module.text)
            rows.append(encoded.ids[: self._size])
            for question, answer in module.questions:
                run = answer_tokens(encoded, module.text, answer, self._size)
                head = self.tokenizer.encode(f"Question: {question}<|assistant|>").ids
                if run and len(head) + len(run) < QUESTION_TOKENS:
                    asked.append((number, head, [*run, self._end]))
        rng.shuffle(asked)
        count = question_count(len(modules))
        shape = (count, QUESTION_TOKENS)
        questions, kinds = np.zeros(shape, np.int16), np.zeros(shape, np.int16)
        of = np.full(count, -1, np.int16)
        for row, (number, head, answer) in enumerate(asked[:count]):
            length = len(head) + len(answer)
            questions[row, :length] = head + answer
            kinds[row, :length] = [2] * len(head) + [3] * len(answer)
            of[row] = number
        return {
            "modules": np.array(rows, np.int16), "questions": questions, "kinds": kinds, "asked": of,
        }  # fmt: skip


def stacked(contexts: list[Arrays]) -> Arrays:
    """The arrays of a shard."""
    return {name: np.stack([each[name] for each in contexts]) for name in contexts[0]}


def evaluation_sets(builder: ContextBuilder, data: Path, size: int) -> dict[str, Arrays]:
    """Contexts of each source by `SOURCE-K`: none of their texts is in training."""
    if builder.recall:
        return {f"recall-{k}": _drawn(builder.pairs, k, size) for k in EVALUATED}
    corpus = builder.builder.corpus
    passages = squad_passages(data / "xquad.en.json")
    sources: dict[str, Callable[[int, random.Random], Arrays]] = {
        "seen": lambda k, rng: builder.of(corpus.paragraphs.draw, k, rng),
        "held_out": lambda k, rng: builder.of(corpus.held_out.draw, k, rng),
        "alike": builder.alike,
        "xquad": lambda k, rng: builder.of(lambda r: _passage(passages, r), k, rng),
    }
    return {
        f"{name}-{k}": _drawn(make, k, size) for name, make in sources.items() for k in EVALUATED
    }


def _drawn(make: Callable[[int, random.Random], Arrays], modules: int, size: int) -> Arrays:
    return stacked([make(modules, random.Random(7000 + n)) for n in range(size)])


def _passage(passages: list, rng: random.Random) -> Section:  # noqa: ANN001
    passage = rng.choice(passages)
    return Filled("", passage.text.strip(), passage.questions)


def write_shards(
    builder: ContextBuilder, folder: Path, numbers: range, seed: int, until: float
) -> None:
    """Shards of these numbers, as long as there is time."""
    for number in numbers:
        rng = random.Random(seed * 1_000_003 + number)
        count = COUNTS[number % len(COUNTS)]
        arrays = stacked([builder.training(count, rng) for _ in range(SHARD)])
        if time.time() > until:
            return
        part = folder / f"part-{number}.npz"
        np.savez(part, **arrays)
        part.rename(folder / f"training-{count}-{number:05d}.npz")  # whole, for who reads meanwhile


def write_evaluation(builder: ContextBuilder, data: Path, folder: Path, size: int) -> None:
    sets = evaluation_sets(builder, data, size)
    flat = {f"{name}.{key}": rows for name, each in sets.items() for key, rows in each.items()}
    part = folder / "part.npz"
    np.savez_compressed(part, **flat)
    part.rename(folder / "evaluation.npz")


def main() -> None:
    arguments = arguments_of()
    until = time.time() + 60 * arguments.minutes
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json"))
    corpus = load_corpus(arguments.training, arguments.data)
    builder = ContextBuilder(Builder(corpus, tokenizer, 0), arguments.module_tokens, arguments.recall)
    fork = get_context("fork")  # the corpus is shared, not copied
    out, workers = arguments.out, arguments.workers
    jobs = [fork.Process(target=write_evaluation, args=(builder, arguments.data, out, arguments.evaluated))]
    jobs += [
        fork.Process(
            target=write_shards,
            args=(builder, out, range(i, arguments.shards, workers), arguments.seed, until),
        )
        for i in range(workers)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    if any(job.exitcode for job in jobs):
        raise SystemExit("a worker failed; its error is above")


def arguments_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--training", type=Path, default=Path(__file__).parent, help="of paragraphs/ and labels/")
    parser.add_argument("--tokenizer", type=Path, default=Path(__file__).parent.parent / "ragcache" / "reader")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recall", action="store_true", help="pairs of words, in at most 32 tokens")
    parser.add_argument("--module-tokens", type=int, default=128)
    parser.add_argument("--shards", type=int, default=3000)
    parser.add_argument("--evaluated", type=int, default=96, help="contexts of each source and count")
    parser.add_argument("--minutes", type=float, default=60, help="stop after so many, at any count")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
