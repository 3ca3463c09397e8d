"""Requests that arrive over time, and figures of their answers: shared by a service and its peer.

Needs the standard library alone, so that it runs in the environment of another server.
"""

from __future__ import annotations

import random
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal

Order = Literal["random", "sorted"]
"""Order of a request's documents: as drawn, or by number, in which prefixes recur most often."""


@dataclass(frozen=True)
class LoadSetting:
    """A corpus, and requests over it that arrive as a Poisson process."""

    documents: int = 1000
    document_tokens: int = 1024
    preamble: int = 64
    each: int = 8
    """Documents of a request, all different."""
    skew: float = 0.9
    """Exponent of Zipf's law, by which documents are drawn."""
    question: int = 64
    new_tokens: int = 128
    seconds: float = 20.0
    """Time in which requests arrive."""
    order: Order = "random"
    seed: int = 1

    def arrivals(self, rate: float) -> list[Arriving]:
        """The requests of one run at `rate` a second, in order of time.

        The first request arrives at once. Equal rates draw equal requests.
        """
        rng, at, found = random.Random(f"{self.seed} {rate}"), 0.0, list[Arriving]()
        while at < self.seconds:
            found.append(Arriving(at, self._draw(rng), rng.randrange(2**31)))
            at += rng.expovariate(rate)
        return found

    def _draw(self, rng: random.Random) -> tuple[int, ...]:
        chosen: dict[int, None] = {}
        while len(chosen) < self.each:
            chosen[bisect_left(self._weights, rng.random() * self._weights[-1])] = None
        return tuple(sorted(chosen) if self.order == "sorted" else chosen)

    @cached_property
    def _weights(self) -> list[float]:
        return [*accumulate((rank + 1) ** -self.skew for rank in range(self.documents))]

    def document(self, number: int, vocabulary: int) -> list[int]:
        """Token ids of a document."""
        return draw_tokens(f"{self.seed} document {number}", self.document_tokens, vocabulary)


@dataclass(frozen=True, slots=True)
class Arriving:
    """A request that is about to arrive."""

    at: float
    """Seconds after the begin of the run."""
    documents: tuple[int, ...]
    """Numbers of its documents, in the order of the prompt."""
    seed: int
    """Seed of its question."""

    def question(self, tokens: int, vocabulary: int) -> list[int]:
        """Token ids of the question."""
        return draw_tokens(f"question {self.seed}", tokens, vocabulary)


def draw_tokens(seed: str, count: int, vocabulary: int) -> list[int]:
    """Draw token ids uniformly."""
    rng = random.Random(seed)
    return [rng.randrange(vocabulary) for _ in range(count)]


@dataclass(slots=True)
class LoadResult:
    """A request that was sent, and its answer. Times are seconds after the begin of the run."""

    at: float
    """Time of its arrival."""
    tokens: list[float] = field(default_factory=list)
    """Times of its tokens."""
    sources: list[str] = field(default_factory=list)
    """Tier of each document, where the server tells it."""
    error: str = ""
    """Name of the error, if it failed."""


def figures(setting: LoadSetting, rate: float, served: Sequence[LoadResult]) -> dict[str, Any]:
    """Figures of one run.

    `answered` is tokens delivered in the last three quarters of the time in which requests arrive,
    as answers a second. First tokens are counted from the arrivals, and gaps between the tokens of
    each answer.
    """
    begin, end = setting.seconds / 4, setting.seconds
    delivered = sum(begin <= time < end for each in served for time in each.tokens)
    done = [each for each in served if not each.error]
    refused = [each.error for each in served if each.error]
    first = [each.tokens[0] - each.at for each in done if each.tokens]
    gaps = [b - a for each in done for a, b in pairwise(each.tokens)]
    sources = [source for each in served for source in each.sources]
    return {
        "rate": rate,
        "arrived": len(served) / setting.seconds,
        "answered": delivered / setting.new_tokens / (end - begin),
        "requests": len(served),
        "refused": len(refused),
        "errors": {name: refused.count(name) for name in sorted(set(refused))},
        "ttft_ms": _spread(first),
        "gap_ms": _spread(gaps),
        "sources": {name: sources.count(name) / len(sources) for name in sorted(set(sources))},
    }


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    ordered = sorted(1e3 * each for each in seconds)
    return {
        "p50": statistics.median(ordered),
        "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "longest": ordered[-1],
    }


def is_saturated(run: dict[str, Any]) -> bool:
    """Whether a run was refused requests, or answered fewer than nine tenths of those arriving."""
    return bool(run["refused"]) or run["answered"] < 0.9 * run["arrived"]
