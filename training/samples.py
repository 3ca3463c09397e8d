"""Training sequences: one context of modules, and as many independent questions as fit.

A sequence is laid out as ragcache lays out a prompt: preamble, modules, then question and answer.
All questions share the context but do not see each other, and each starts at the position where
the context ends, so one pass over the documents trains twenty questions. `block` says what each
token belongs to: 0 the preamble, 1..n the modules, above `QUESTION` the questions.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from corpus import Corpus, Paragraphs, Section, lowered

QUESTION = 64  # block numbers from here on are questions
PREAMBLE = (
    "<|user|>Answer the question from the documents below. "
    "Be brief: give only the answer, in the words of the documents.\n\n"
)
MODULE_TOKENS = 384
OTHERS_SHARE = 0.2  # of the questions about modules after the first that are asked


@dataclass(frozen=True)
class Sequence:
    """All arrays [length]; `kind` 0 padding, 1 context, 2 question, 3 answer (the target's kind)."""

    tokens: np.ndarray
    positions: np.ndarray
    blocks: np.ndarray
    kinds: np.ndarray


@dataclass(frozen=True)
class Builder:
    corpus: Corpus
    tokenizer: Tokenizer
    length: int

    def training(self, rng: random.Random) -> Sequence:
        return self.sequence(self._modules(rng, self.corpus.paragraphs), rng, ranked=True)

    def of_paragraphs(self, paragraphs: Paragraphs, rng: random.Random) -> Sequence:
        """Four filled paragraphs, all questions asked of the first."""
        first, *others = (self._module([paragraphs.draw(rng)], rng) for _ in range(4))
        return self.sequence([first, *(Section("", o.text, ()) for o in others)], rng)

    def _modules(self, rng: random.Random, paragraphs: Paragraphs) -> list[Section]:
        count = rng.choices(range(1, 7), [1, 1, 2, 8, 2, 1])[0]
        plain = rng.random() < 0.12
        modules = []
        for _ in range(count):
            source = rng.choices(["paragraphs", "sentences", "searches", "prose"], [62, 26, 4, 8])[0]
            if source == "paragraphs":
                sections = [paragraphs.draw(rng) for _ in range(rng.choices([1, 2, 3], [6, 3, 1])[0])]
            else:
                sections = [getattr(self.corpus, source).draw(rng)]
            module = self._module(sections, rng)
            modules.append(lowered(module) if plain else module)
        return modules

    def _module(self, sections: list[Section], rng: random.Random) -> Section:
        """Joins sections under Markdown headings, as a split document would read."""
        parts, questions = [], []
        for i, section in enumerate(sections):
            text = section.text
            if rng.random() < 0.4:
                text = _paragraphs(text, rng)
            if section.title and (i > 0 or rng.random() < 0.92):
                level = "#" if i == 0 or rng.random() < 0.2 else "##"
                text = f"{level} {section.title}\n\n{text}"
            parts.append(text)
            questions += section.questions
        return Section("", "\n\n".join(parts) + "\n\n", tuple(questions))

    def sequence(
        self, modules: list[Section], rng: random.Random, ranked: bool = False
    ) -> Sequence:
        """`ranked`: most questions are asked of the first module, few of the others."""
        encode = lambda text: self.tokenizer.encode(text).ids  # noqa: E731
        tokens = encode(PREAMBLE)
        positions, blocks, kinds = list(range(len(tokens))), [0] * len(tokens), [0] * len(tokens)
        asked: list[tuple[str, str]] = []
        for number, module in enumerate(modules, start=1):
            ids = encode(module.text)[:MODULE_TOKENS]
            if len(tokens) + len(ids) > self.length - 200:
                break
            text = module.text if len(ids) < MODULE_TOKENS else self.tokenizer.decode(ids)
            # The retriever's first module holds most answers when the reader serves.
            asked += [
                (q, a)
                for q, a in module.questions
                if a in text and (number == 1 or not ranked or rng.random() < OTHERS_SHARE)
            ]
            positions += range(len(tokens), len(tokens) + len(ids))
            tokens += ids
            blocks += [number] * len(ids)
            kinds += [1] * len(ids)
        rng.shuffle(asked)
        context = len(tokens)
        for number, (question, answer) in enumerate(asked):
            head = encode(f"Question: {question}<|assistant|>")
            tail = encode(f" {answer}<|end|>")
            if len(tokens) + len(head) + len(tail) > self.length:
                break
            tokens += head + tail
            positions += range(context, context + len(head) + len(tail))
            blocks += [QUESTION + number] * (len(head) + len(tail))
            kinds += [2] * len(head) + [3] * len(tail)
        return self._pad(tokens, positions, blocks, kinds)

    def _pad(self, *columns: list[int]) -> Sequence:
        fills = (0, 0, -1, 0)
        arrays = []
        for column, fill in zip(columns, fills, strict=True):
            array = np.full(self.length, fill, dtype=np.int16)
            array[: len(column)] = column[: self.length]
            arrays.append(array)
        return Sequence(*arrays)


def _paragraphs(text: str, rng: random.Random) -> str:
    """Breaks a text into paragraphs at some of its sentence ends."""
    pieces = text.split(". ")
    return "".join(
        piece + (("." + ("\n\n" if rng.random() < 0.3 else " ")) if i < len(pieces) - 1 else "")
        for i, piece in enumerate(pieces)
    )
