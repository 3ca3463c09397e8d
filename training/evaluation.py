"""Evaluation sequences: held-out paragraphs, XQuAD in both languages, held-out Chinese, registers,
questions without an answer, and the example handbook."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

from corpus import Passage, Section, chinese_passages, squad_passages
from registers import draw_entries
from samples import Builder, Sequence
from templates import Filled

HANDBOOK = Path(__file__).parent.parent / "examples" / "handbook"


def evaluation_sets(builder: Builder, data: Path) -> dict[str, list[Sequence]]:
    rng = random.Random(7)
    corpus = builder.corpus
    sets = {
        "seen": [builder.of_paragraphs(corpus.paragraphs, rng) for _ in range(64)],
        "held_out": [builder.of_paragraphs(corpus.held_out, rng) for _ in range(128)],
        "alike": [_alike(builder, rng) for _ in range(64)],
    }
    passages = {"xquad": "xquad.en.json", "xquad_zh": "xquad.zh.json"}
    for name, file in passages.items():
        if (data / file).exists():
            sets[name] = _among_others(builder, squad_passages(data / file), rng)
            sets[f"{name}_vain"] = _without_answer(builder, squad_passages(data / file), rng)
    if (data / "cmrc2018.trial.json").exists():
        held_out = chinese_passages(data / "cmrc2018.trial.json")[1]
        sets["chinese"] = _among_others(builder, held_out, rng)
    if (HANDBOOK.parent / "questions.jsonl").exists():
        sets["handbook"] = _among_others(builder, _handbook(), rng)
        sets["handbook_vain"] = _without_answer(builder, _handbook(), rng)
    return sets


def _alike(builder: Builder, rng: random.Random) -> Sequence:
    """Four entries of a register, all questions asked of the first."""
    first, *others = draw_entries(rng, 4)
    modules = [Section(first.title, first.text, first.questions), *(Section(o.title, o.text, ()) for o in others)]
    return builder.sequence([Filled("", f"# {m.title}\n\n{m.text}\n\n", m.questions) for m in modules], rng)


def _among_others(builder: Builder, passages: list[Passage], rng: random.Random) -> list[Sequence]:
    """Each passage with its questions, followed by three others, as a retriever ranks them."""
    rows = []
    for passage in passages:
        modules = [Filled("", _ended(passage.text), passage.questions), *_others(passages, passage, rng)]
        rows.append(builder.sequence(modules, rng))
    return rows


def _without_answer(builder: Builder, passages: list[Passage], rng: random.Random) -> list[Sequence]:
    """The questions of each passage, asked of four others."""
    rows = []
    for passage in passages:
        first, *others = _others(passages, passage, rng, 4)
        vain = tuple(q for q, _ in passage.questions)
        rows.append(builder.sequence([Filled("", first.text, (), vain), *others], rng, vain_share=1e9))
    return rows


def _others(passages: list[Passage], passage: Passage, rng: random.Random, count: int = 3) -> Iterable[Section]:
    picked = rng.sample([p for p in passages if p is not passage], count)
    return [Section("", _ended(p.text), ()) for p in picked]


def _ended(text: str) -> str:
    return text.strip() + "\n\n"


def _handbook() -> list[Passage]:
    questions: dict[str, list[tuple[str, str]]] = {}
    for row in (HANDBOOK.parent / "questions.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(row)
        pair = (record["question"], record["answers"][0])
        questions.setdefault(record["document"], []).append(pair)
    return [
        Passage((HANDBOOK / name).read_text(encoding="utf-8"), tuple(pairs))
        for name, pairs in questions.items()
    ]
