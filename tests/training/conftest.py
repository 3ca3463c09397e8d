"""The pipeline that trains the embedded reader: scripts beside each other, on made-up text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "training"))

SHAPE = {
    "vocabulary": 600, "hidden": 32, "inner": 64, "layers": 2, "heads": 4, "kv_heads": 2,
    "head_dim": 8,
}  # fmt: skip
WORDS = (
    "harbour lantern keeper ledger meadow ferry orchard copper signal garden window letter".split()
)


@pytest.fixture(scope="session")
def passages() -> list[Any]:
    from corpus import Passage

    made = []
    for i, word in enumerate(WORDS):
        text = (
            f"The {word} office was opened in {1900 + i} by Anna Quill{i}. It keeps {i + 3} boats. "
            f"Visitors must bring a {word} permit."
        )
        asked = (
            (f"When was the {word} office opened?", str(1900 + i)),
            (f"Who opened the {word} office?", f"Anna Quill{i}"),
            (f"What must visitors of the {word} office bring?", f"a {word} permit"),
        )
        made.append(Passage(text, asked))
    return made


@pytest.fixture(scope="session")
def corpus(passages: list[Any]) -> Any:
    """Templates of the repository's first file, and the made-up passages for all other sources."""
    from corpus import Corpus, Natural, Paragraphs, Passages, Prose, Swapper
    from templates import parse_file

    templates = tuple(parse_file(Path(__file__).parents[2] / "training/paragraphs/sport.txt")[:6])
    swapper = Swapper.over([p.text for p in passages])
    swapper = Swapper(swapper.frequent, tuple("velmora tarnish quindle brestow hallam".split()))
    asked = Passages(tuple(passages), swapper)
    text = "\n\n".join(["# Offices", *(p.text for p in passages)])
    return Corpus(
        Paragraphs(templates, swapper), Paragraphs(templates, swapper), asked, asked, asked, asked,
        Prose((tuple(p.text for p in passages),)), {"en": Natural((text,), swapper)},
    )  # fmt: skip


@pytest.fixture(scope="session")
def tokenizer(corpus: Any) -> Any:
    import random

    from tokenizer import train

    return train(corpus.texts(random.Random(0)), vocabulary=600)
