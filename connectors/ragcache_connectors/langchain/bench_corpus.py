"""Synthetic modules and a model for them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ragcache import RagCache
    from ragcache.store import ModuleRow

HEADER = "Handbook of the harbour, third edition > Rules\nNot to be copied without leave.\n\n"
_SYLLABLES = "ba be bo da de do fa fi fo ga ge go ka ki ko la le lo ma mi mo na ne no pa".split()
_COMMON = (
    "the of and to in is was for on with at by from that which are were be has had its every "
    "water harbour engine report winter office boat paper window quiet number answer market"
).split()


def subjects(count: int) -> list[str]:
    """Names that stand in one module each: "bakido", ... in an order of their own."""
    names = (a + b + c for a in _SYLLABLES for b in _SYLLABLES for c in _SYLLABLES)
    chosen = [name for name, _ in zip(names, range(count), strict=False)]
    random.Random(5).shuffle(chosen)
    return chosen


def text_of(subject: str, others: Sequence[str], words: int) -> str:
    """A module's text: its subject twice, three others once, common words between."""
    rng = random.Random(subject)
    said = rng.choices(_COMMON, k=words)
    for place, name in zip((3, words // 2, words // 3, words // 4, words - 2),
                           (subject, subject, *others), strict=False):  # fmt: skip
        said[place] = name
    return " ".join(said).capitalize() + "."


def fill(rag: RagCache, collection: str, count: int, words: int) -> None:
    """Stores modules without encoding them: those that are read are encoded at the first use."""
    from ragcache.store import NewDocument, NewModule

    names = subjects(count)
    rng = random.Random(6)
    encoder = rag.parts.ingestor.encoder
    rows = []
    for name in names:
        text = text_of(name, rng.choices(names, k=3), words)
        ids = encoder.model.encode_untrusted(text)
        module = NewModule(f"{name}#1", text, ids, encoder.key(ids, "rooted"))
        rows.append(NewDocument(name, name, name, [module], {}, text))
    rag.parts.catalogue.replace(collection, rows)


def headed(rows: Sequence[ModuleRow], words: int) -> list[ModuleRow]:
    """Modules of so many words, with the subjects of these, all under one header."""
    return [replace(row, text=HEADER + text_of(row.document, (), words)) for row in rows]


def prompt_of(texts: Sequence[str], length: int) -> str:
    """A prompt of so many characters: texts with words of its own between them."""
    parts, size = [], 0
    for number, text in enumerate(cycle(texts)):
        parts.append(f"Part {number}, which nobody ingested, says what follows:\n\n{text}\n\n")
        size += len(parts[-1])
        if size >= length:
            return "".join(parts)[:length]
    return ""
