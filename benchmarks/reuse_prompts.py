"""Prompts for `reuse_variants.py`, and the order in which they are measured."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from reuse_ideas import AT_MOST_5, CORE, LATER, VARIANTS, WIDE

MAIN = 4, 384
"""Number and size of the modules that are measured first."""
KEYS = "set", "k", "module_tokens", "number"
Key = tuple[str, int, int, int]
"""Values of `KEYS`, which a prompt is known by."""


def key_of(row: dict[str, Any]) -> Key:
    return row["set"], row["k"], row["module_tokens"], row["number"]


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt in tokens."""

    row: dict[str, Any]
    modules: list[list[int]]
    question: list[int]
    own: list[int]
    """Tokens of other modules of the same set."""
    similar: list[list[list[int]]] = field(default_factory=list)
    """Tokens of the modules of the same set that are most similar to each module, by BM25."""

    @property
    def setting(self) -> tuple[int, int]:
        return self.row["k"], self.row["module_tokens"]

    @property
    def length(self) -> int:
        """Number of tokens of the modules and the question."""
        return sum(map(len, self.modules)) + len(self.question)

    def starts(self, preamble: int) -> list[int]:
        return list(accumulate(map(len, self.modules), initial=preamble))


def read_prompts(file: Path) -> list[TokenizedPrompt]:
    """Read prompts of `reuse.py prepare`. Each takes text of its set from another prompt."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["set"], row["k"], row["module_tokens"]), []).append(row)
    found = []
    for group in groups.values():
        for at, row in enumerate(group):
            here = {tuple(module) for module in row["modules"]}
            others = (
                module
                for other in [*group[at + 1 :], *group[:at]]
                for module in other["modules"]
                if tuple(module) not in here
            )
            own: list[int] = []
            while len(own) < 300 and (more := next(others, None)) is not None:
                own += more
            similar = row.get("similar", [])
            found.append(TokenizedPrompt(row, row["modules"], row["question"], own[:300], similar))
    return found


def schedule(
    prompts: Sequence[TokenizedPrompt], parts: Sequence[str], full: int, known: Set[Key]
) -> Iterator[tuple[list[str], list[TokenizedPrompt]]]:
    """Yield variants, and the prompts that they are measured on."""
    main = [p for p in prompts if p.setting == MAIN]
    first = [p for p in main if p.row["number"] < full]
    done = set(known)
    for part in parts:
        if part == "masses":
            yield [], first
        elif part == "core":
            left = [p for p in prompts if key_of(p.row) not in done]
            yield CORE, [p for p in left if p.setting == MAIN]
            yield CORE, [p for p in left if p.setting != MAIN]
        elif part == "other settings":
            yield CORE, [p for p in prompts if p.setting != MAIN and key_of(p.row) not in known]
        elif part == "wide":
            yield WIDE, [p for p in main if key_of(p.row) not in known]
        elif part == "at most 5":
            yield AT_MOST_5, [p for p in main if p.similar]
        else:
            chosen = [p for p in first if p.similar or part == "all"]
            yield list(VARIANTS) if part == "all" else LATER, chosen
            done.update(key_of(p.row) for p in chosen)


def batches(prompts: Sequence[TokenizedPrompt], tokens: int) -> Iterator[list[TokenizedPrompt]]:
    """Yield batches of one setting and all sets, of at most `tokens` tokens with padding."""
    waves: dict[tuple[int, int, int], list[TokenizedPrompt]] = {}
    for prompt in prompts:
        waves.setdefault((prompt.row["number"] // 25, *prompt.setting), []).append(prompt)
    for _, wave in sorted(waves.items(), key=lambda item: item[0]):
        wave.sort(key=lambda prompt: prompt.length)
        batch: list[TokenizedPrompt] = []
        for prompt in wave:
            if batch and (len(batch) + 1) * prompt.length > tokens:
                yield batch
                batch = []
            batch.append(prompt)
        yield batch
