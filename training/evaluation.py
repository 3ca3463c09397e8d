"""Evaluation sequences: questions over held-out paragraphs, XQuAD and the example handbook."""

from __future__ import annotations

import json
import random
from pathlib import Path

from corpus import Passage, Section
from samples import Builder, Sequence
from templates import Filled

BATCH = 32
HANDBOOK = Path(__file__).parent.parent / "examples" / "handbook"


def evaluation_sets(builder: Builder, data: Path) -> dict[str, list[list[Sequence]]]:
    rng = random.Random(7)
    corpus = builder.corpus
    sets = {
        "seen": [builder.of_paragraphs(corpus.paragraphs, rng) for _ in range(2 * BATCH)],
        "held_out": [builder.of_paragraphs(corpus.held_out, rng) for _ in range(4 * BATCH)],
    }
    if (data / "xquad.en.json").exists():
        sets["xquad"] = _among_others(builder, _xquad(data / "xquad.en.json"), rng)
    if (HANDBOOK.parent / "questions.jsonl").exists():
        sets["handbook"] = _among_others(builder, _handbook(), rng)
    return {
        name: [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]
        for name, rows in sets.items()
    }


def _among_others(builder: Builder, passages: list[Passage], rng: random.Random) -> list[Sequence]:
    """Each passage with its questions, followed by three others, as a retriever ranks them."""
    rows = []
    for passage in passages:
        others = [Section("", p.text, ()) for p in rng.sample(passages, 3)]
        modules = [Filled("", passage.text, passage.questions), *others]
        rows.append(builder.sequence(modules, rng))
    filler = -len(rows) % BATCH  # whole batches, so that the compiled shapes stay the same
    return rows + rng.sample(rows, min(filler, len(rows)))


def _xquad(path: Path) -> list[Passage]:
    articles = json.loads(path.read_text(encoding="utf-8"))["data"]
    return [
        Passage(
            p["context"] + "\n\n",
            tuple((q["question"], q["answers"][0]["text"]) for q in p["qas"]),
        )
        for article in articles
        for p in article["paragraphs"]
    ]


def _handbook() -> list[Passage]:
    questions: dict[str, list[tuple[str, str]]] = {}
    for row in (HANDBOOK.parent / "questions.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(row)
        pair = (record["question"], record["answers"][0])
        questions.setdefault(record["document"], []).append(pair)
    return [
        Passage((HANDBOOK / name).read_text(encoding="utf-8").strip() + "\n\n", tuple(pairs))
        for name, pairs in questions.items()
    ]
