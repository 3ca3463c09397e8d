"""Training sequences: one context of modules, and as many independent questions as fit.

A sequence is laid out as ragcache lays out a prompt: preamble, modules, then question and answer.
All questions share the context but do not see each other, and each starts at the position where
the context ends, so one pass over the documents trains twenty questions. `block` says what each
token belongs to: 0 the preamble, 1..n the modules, above `QUESTION` the questions.

An answer is the document's own run of tokens. Where the documents answer nothing it is the token
`NO_ANSWER`: questions whose sentence was taken out, that a text of the subject leaves open, or that
ask for another entry of a register.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

import numpy as np
from tokenizers import Encoding, Tokenizer

from corpus import Corpus, Paragraphs, Section, lowered
from registers import draw_entries
from templates import Filled, fill
from special_tokens import END, NO_ANSWER

QUESTION = 64  # block numbers from here on are questions
PREAMBLE = (
    "<|user|>Answer the question from the documents below. "
    "Be brief: give only the answer, in the words of the documents.\n\n"
)
MODULE_TOKENS = 384
OTHERS_SHARE = 0.2  # of the questions about modules after the first that are asked
ALIKE_SHARE = 0.25  # of the contexts hold near copies
CHINESE_SHARE = 0.25  # of the contexts are Chinese
STRANGERS_SHARE = 0.6  # of the other contexts get questions that belong to a text not shown
VAIN_SHARE = 0.25  # unanswerable questions for one that has an answer, at most

# How often each source is drawn from, by the language of the context.
_WEIGHTS = {
    "en": {"paragraphs": 42, "sentences": 24, "searches": 4, "papers": 3, "prose": 4, "natural": 24},
    "zh": {"chinese": 45, "natural": 55},
}


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
        if rng.random() < ALIKE_SHARE:
            return self.sequence(self._alike(rng), rng)
        return self.sequence(self._modules(rng), rng, ranked=rng.random() < 0.8)

    def of_paragraphs(self, paragraphs: Paragraphs, rng: random.Random) -> Sequence:
        """Four filled paragraphs, all questions asked of the first."""
        first, *others = (self.module([paragraphs.draw(rng)], rng) for _ in range(4))
        first = Filled("", first.text, first.questions)
        return self.sequence([first, *(Section("", o.text, ()) for o in others)], rng)

    def _modules(self, rng: random.Random) -> list[Section]:
        language = "zh" if rng.random() < CHINESE_SHARE else "en"
        weights = dict(_WEIGHTS[language])
        if language not in self.corpus.natural:
            del weights["natural"]
        count = rng.choices(range(1, 7), [1, 1, 2, 8, 2, 1])[0]
        plain = rng.random() < 0.12
        modules = []
        for _ in range(count + 1):
            source = rng.choices(list(weights), list(weights.values()))[0]
            if source == "paragraphs":
                drawn = rng.choices([1, 2, 3], [6, 3, 1])[0]
                sections = [self.corpus.paragraphs.draw(rng) for _ in range(drawn)]
            elif source == "natural":
                sections = [self.corpus.natural[language].draw(rng)]
            else:
                sections = [getattr(self.corpus, source).draw(rng)]
            module = self.module(sections, rng)
            modules.append(lowered(module) if plain else module)
        *shown, absent = modules
        if rng.random() < STRANGERS_SHARE:
            shown[0] = _asked_in_vain(shown, absent, rng)
        return shown

    def _alike(self, rng: random.Random) -> list[Section]:
        """Near copies, each with the questions that name it. One that is not among them is asked
        for too: that cannot be answered."""
        count = rng.randint(3, 6) + 1
        chance = rng.random()
        if chance < 0.55:
            sections = draw_entries(rng, count)
        elif chance < 0.8:
            template = rng.choice(self.corpus.paragraphs.templates)
            sections = [fill(template, rng) for _ in range(count)]
        else:
            natural = self.corpus.natural.get("en", self.corpus.sentences)
            section = natural.draw(rng)
            swapper = self.corpus.sentences.swapper
            sections = [section, *(swapper.swapped(section, rng) for _ in range(count - 1))]
        *shown, absent = only_naming(sections)
        shown[0] = _asked_in_vain(shown, absent, rng)
        return [self.module([section], rng) for section in shown]

    def module(self, sections: list[Section], rng: random.Random) -> Section:
        """Joins sections under Markdown headings, as a split document would read."""
        parts, questions, vain = [], [], []
        for i, section in enumerate(sections):
            text = section.text
            if rng.random() < 0.4 and "\n" not in text:
                text = _paragraphs(text, rng)
            if section.title and (i > 0 or rng.random() < 0.92):
                level = "#" if i == 0 or rng.random() < 0.2 else "##"
                text = f"{level} {section.title}\n\n{text}"
            parts.append(text)
            questions += section.questions
            vain += section.unanswerable
        return Filled("", "\n\n".join(parts) + "\n\n", tuple(questions), tuple(vain))

    def sequence(
        self, modules: list[Section], rng: random.Random, ranked: bool = False,
        vain_share: float = VAIN_SHARE,
    ) -> Sequence:  # fmt: skip
        """`ranked`: most questions are asked of the first module, few of the others."""
        encode = lambda text: self.tokenizer.encode(text).ids  # noqa: E731
        tokens = encode(PREAMBLE)
        positions, blocks, kinds = list(range(len(tokens))), [0] * len(tokens), [0] * len(tokens)
        asked: list[tuple[str, list[int]]] = []
        vain: list[tuple[str, list[int]]] = []
        nothing = [self.tokenizer.token_to_id(NO_ANSWER)]
        for number, module in enumerate(modules, start=1):
            encoded = self.tokenizer.encode(module.text)
            ids = encoded.ids[:MODULE_TOKENS]
            if len(tokens) + len(ids) > self.length - 200:
                break
            # The retriever's first module holds most answers when the reader serves.
            for question, answer in module.questions:
                if number == 1 or not ranked or rng.random() < OTHERS_SHARE:
                    run = answer_tokens(encoded, module.text, answer, MODULE_TOKENS)
                    if run:
                        asked.append((question, run))
            vain += [(question, nothing) for question in module.unanswerable]
            positions += range(len(tokens), len(tokens) + len(ids))
            tokens += ids
            blocks += [number] * len(ids)
            kinds += [1] * len(ids)
        rng.shuffle(vain)
        asked += vain[: 1 + int(min(vain_share * (1 + len(asked)), len(vain)))]
        rng.shuffle(asked)
        context = len(tokens)
        for number, (question, answer) in enumerate(asked[: 127 - QUESTION]):
            head = encode(f"Question: {question}<|assistant|>")
            tail = [*answer, self.tokenizer.token_to_id(END)]
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
        for column, fill_value in zip(columns, fills, strict=True):
            array = np.full(self.length, fill_value, dtype=np.int16)
            array[: len(column)] = column[: self.length]
            arrays.append(array)
        return Sequence(*arrays)


def answer_tokens(encoded: Encoding, text: str, answer: str, limit: int) -> list[int]:
    """The tokens of the first place among `limit` where a text holds an answer and where tokens
    begin and end with it (the first may bring its space); none if there is no such place."""
    start = text.find(answer)
    while start >= 0:
        end = start + len(answer)
        first, last = encoded.char_to_token(start), encoded.char_to_token(end - 1)
        if first is not None and last is not None and last < limit:
            begins = encoded.offsets[first][0]
            if encoded.offsets[last][1] == end and (begins == start or text[begins:start] == " "):
                return encoded.ids[first : last + 1]
        start = text.find(answer, start + 1)
    return []


def _asked_in_vain(shown: list[Section], absent: Section, rng: random.Random) -> Section:
    """The first section, with a few unanswerable questions: those of a section not shown."""
    pairs = rng.sample(absent.questions, min(3, len(absent.questions)))
    strangers = tuple(q for q, a in pairs if not any(a in section.text for section in shown))
    first = shown[0]
    return Filled(first.title, first.text, first.questions, first.unanswerable + strangers)


_NAMES = re.compile(r"[\u3400-\u9fff]{2,}|(?:(?![\u3400-\u9fff])[^\W_]){2,}(?:-[^\W_]+)*|\d+-?\w*")


def only_naming(sections: list[Section]) -> list[Section]:
    """The sections with those questions alone that hold a word of theirs that no other has."""
    texts = [f"{s.title}\n{s.text}" for s in sections]
    kept = []
    for i, section in enumerate(sections):
        others = "\n".join(texts[:i] + texts[i + 1 :])

        def names(question: str, text: str = texts[i], others: str = others) -> bool:
            return any(w in text and w not in others for w in _distinguishing(question))

        questions = tuple((q, a) for q, a in section.questions if names(q))
        vain = tuple(q for q in section.unanswerable if names(q))
        kept.append(Filled(section.title, section.text, questions, vain))
    return kept


def _distinguishing(question: str) -> list[str]:
    """Words, and for Chinese all pairs of characters."""
    found = []
    for word in _NAMES.findall(question):
        chinese = "\u3400" <= word[0] <= "\u9fff"
        found += [word[i : i + 2] for i in range(len(word) - 1)] if chinese else [word]
    return found


def _paragraphs(text: str, rng: random.Random) -> str:
    """Breaks a text into paragraphs at some of its sentence ends."""
    pieces = text.split(". ")
    return "".join(
        piece + (("." + ("\n\n" if rng.random() < 0.3 else " ")) if i < len(pieces) - 1 else "")
        for i, piece in enumerate(pieces)
    )
