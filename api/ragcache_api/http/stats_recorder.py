"""Statistics of ended requests by namespace: totals, a time series and the latest."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ragcache import Answer
from ragcache.tiers import TIERS
from ragcache_api.http.requests import ActiveRequest

POINT_SECONDS, POINTS = 5.0, 720
RECENT_REQUESTS = 100
SOURCES = (*TIERS, "encoded", "shared", "computed")
_MEASURED = 2000  # first tokens whose times are kept for the percentiles of all time

Clock = Callable[[], float]


@dataclass(slots=True)
class SeriesPoint:
    """One point of the time series. at: its begin, in Unix seconds."""

    at: float
    tokens: Counter[str] = field(default_factory=Counter)
    hit: list[float] = field(default_factory=list)
    miss: list[float] = field(default_factory=list)
    running: int = 0
    waiting: int = 0

    def to_dict(self) -> dict[str, Any]:
        tokens = {source: self.tokens[source] for source in SOURCES}
        return {
            "at": self.at, "tokens": tokens, "running": self.running, "waiting": self.waiting,
            "ttft_hit_p50": percentile(self.hit, 0.5), "ttft_hit_p95": percentile(self.hit, 0.95),
            "ttft_miss_p50": percentile(self.miss, 0.5),
            "ttft_miss_p95": percentile(self.miss, 0.95),
        }  # fmt: skip


class NamespaceStats:
    """Statistics of one namespace, for use in the service's event loop. clock: Unix seconds."""

    def __init__(self, clock: Clock = time.time) -> None:
        self._clock = clock
        self.outcomes: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.hit: deque[float] = deque(maxlen=_MEASURED)
        self.miss: deque[float] = deque(maxlen=_MEASURED)
        self.counts = {"hit": 0, "miss": 0}
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT_REQUESTS)
        self._points: deque[SeriesPoint] = deque(maxlen=POINTS)

    def point(self) -> SeriesPoint:
        """The current point of the series."""
        at = self._clock() // POINT_SECONDS * POINT_SECONDS
        if not self._points or self._points[-1].at != at:
            self._points.append(SeriesPoint(at))
        return self._points[-1]

    def series(self) -> list[dict[str, Any]]:
        """The points of the last hour in which anything was recorded."""
        oldest = self._clock() - POINT_SECONDS * POINTS
        return [point.to_dict() for point in self._points if point.at >= oldest]

    def record_request(self, active: ActiveRequest) -> None:
        """Records a request that has ended."""
        self.outcomes[active.outcome] += 1
        for answer, counts in with_tokens(active):
            self._record_answer(answer, counts)
        self.recent.append(_summary(active, self._clock()))

    def _record_answer(self, answer: Answer, counts: dict[str, int]) -> None:
        point = self.point()
        self.tokens.update(counts)
        point.tokens.update(counts)
        if kind := hit_or_miss(answer):
            getattr(self, kind).append(answer.timings.first_token)
            getattr(point, kind).append(answer.timings.first_token)
            self.counts[kind] += 1

    def ttft(self) -> dict[str, dict[str, float | int | None]]:
        """Seconds to the first token of hits and of misses."""
        return {
            kind: {"p50": percentile(times, 0.5), "p95": percentile(times, 0.95),
                   "count": self.counts[kind]}
            for kind, times in (("hit", self.hit), ("miss", self.miss))
        }  # fmt: skip


class StatsRecorder:
    """The statistics of all namespaces."""

    def __init__(self, clock: Clock = time.time) -> None:
        self._clock = clock
        self._namespaces: dict[str, NamespaceStats] = {}

    def stats_of(self, namespace: str) -> NamespaceStats:
        if namespace not in self._namespaces:
            self._namespaces[namespace] = NamespaceStats(self._clock)
        return self._namespaces[namespace]

    def record_request(self, active: ActiveRequest) -> None:
        """Records a request that has ended."""
        self.stats_of(active.namespace).record_request(active)

    def count_active(self, requests: Iterable[ActiveRequest]) -> None:
        """Records how many requests of each namespace run and wait now."""
        requests = list(requests)
        for namespace, stats in self._namespaces.items():
            computing = [each.computes for each in requests if each.namespace == namespace]
            point = stats.point()
            point.running = sum(computing)
            point.waiting = len(computing) - point.running


def tokens_by_source(answer: Answer, read: Mapping[str, int]) -> dict[str, int]:
    """The tokens of a prompt by where they came from. read: those whose states were read, by tier,
    or `encoded` for it."""
    computed = answer.reuse.computed_tokens - read.get("encoded", 0)
    counts = {**read, "shared": answer.reuse.shared_tokens, "computed": computed}
    return {source: number for source, number in counts.items() if number > 0}


def hit_or_miss(answer: Answer) -> str:
    """`hit` if the prompt read states from the cache, `miss` if it held documents and read none,
    "" for prompts without documents, which would make misses look fast."""
    reuse = answer.reuse
    if not answer.choices or not reuse.prompt_tokens:
        return ""
    if reuse.cached_tokens:
        return "hit"
    return "miss" if answer.sources or reuse.created_tokens else ""


def with_tokens(active: ActiveRequest) -> Iterator[tuple[Answer, dict[str, int]]]:
    """The answers of a request, each with the tokens of its prompt by source."""
    for answer, read in zip(active.answers, active.read_tokens, strict=True):
        yield answer, tokens_by_source(answer, read)


def percentile(values: Iterable[float], share: float) -> float | None:
    """The value below which a share of the values lies; None without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def _summary(active: ActiveRequest, now: float) -> dict[str, Any]:
    first = active.answers[0] if active.answers else None
    sources = [source for answer in active.answers for source in answer.sources]
    return {
        "id": active.id, "request": active.request, "kind": active.kind,
        "collection": active.collection, "at": now,
        "ttft": first.timings.first_token if first and first.reuse.prompt_tokens else None,
        "total": time.monotonic() - active.started, "outcome": active.outcome,
        "cached_tokens": sum(answer.reuse.cached_tokens for answer in active.answers),
        "computed_tokens": sum(answer.reuse.computed_tokens for answer in active.answers),
        "modules": [{"name": source.module, "tier": source.tier} for source in sources],
    }  # fmt: skip
