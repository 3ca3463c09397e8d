"""Statistics of ended requests by namespace: totals, a time series, the latest requests."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ragcache import Answer
from ragcache.tiers import TIERS
from ragcache_api.http.requests import ActiveRequest

POINT_SECONDS, POINTS = 5.0, 720
RECENT_REQUESTS = 100
SOURCES = (*TIERS, "encoded", "shared", "computed")
"""Sources of a prompt's tokens: the tier whose states were read, or how they were computed."""
_KINDS = ("hit", "miss")
_MEASURED = 2000  # first tokens whose times are kept for the percentiles of all time

Clock = Callable[[], float]
"""Returns Unix seconds."""


@dataclass(slots=True)
class SeriesPoint:
    """One point of the time series."""

    at: float
    """Begin of the point, in Unix seconds."""
    tokens: Counter[str] = field(default_factory=Counter)
    """Prompt tokens by source."""
    first_token: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds to the first token of each answer, by `hit` or `miss`."""
    running: int = 0
    waiting: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "at": self.at,
            "tokens": {source: self.tokens[source] for source in SOURCES},
            "running": self.running,
            "waiting": self.waiting,
            **{
                f"ttft_{kind}_p{percent}": percentile(self.first_token[kind], percent / 100)
                for kind in _KINDS
                for percent in (50, 95)
            },
        }


class NamespaceStats:
    """Statistics of one namespace, for use in the service's event loop."""

    def __init__(self, clock: Clock = time.time) -> None:
        self._clock = clock
        self.outcomes: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT_REQUESTS)
        self._first_token = {kind: deque[float](maxlen=_MEASURED) for kind in _KINDS}
        self._counts: Counter[str] = Counter()
        self._points: deque[SeriesPoint] = deque(maxlen=POINTS)

    def point(self) -> SeriesPoint:
        """Return the current point of the series."""
        at = self._clock() // POINT_SECONDS * POINT_SECONDS
        if not self._points or self._points[-1].at != at:
            self._points.append(SeriesPoint(at))
        return self._points[-1]

    def series(self) -> list[dict[str, Any]]:
        """List the points of the last hour in which anything was recorded."""
        oldest = self._clock() - POINT_SECONDS * POINTS
        return [point.to_dict() for point in self._points if point.at >= oldest]

    def record_request(self, active: ActiveRequest) -> None:
        """Record a request that has ended."""
        self.outcomes[active.outcome] += 1
        for answer, counts in with_tokens(active):
            point = self.point()
            self.tokens.update(counts)
            point.tokens.update(counts)
            if kind := hit_or_miss(answer):
                for times in (self._first_token, point.first_token):
                    times[kind].append(answer.timings.first_token)
                self._counts[kind] += 1
        self.recent.append(_summary(active, self._clock()))

    def ttft(self) -> dict[str, dict[str, float | int | None]]:
        """Return percentiles of the seconds to the first token, of hits and of misses."""
        return {
            kind: {
                "p50": percentile(times, 0.5),
                "p95": percentile(times, 0.95),
                "count": self._counts[kind],
            }
            for kind, times in self._first_token.items()
        }


class StatsRecorder:
    """The statistics of all namespaces."""

    def __init__(self, clock: Clock = time.time) -> None:
        self._namespaces = defaultdict[str, NamespaceStats](lambda: NamespaceStats(clock))

    def stats_of(self, namespace: str) -> NamespaceStats:
        """Return the statistics of a namespace, empty ones at first."""
        return self._namespaces[namespace]

    def record_request(self, active: ActiveRequest) -> None:
        """Record a request that has ended, unless its namespace was deleted."""
        if not active.deleted:
            self.stats_of(active.namespace).record_request(active)

    def forget(self, namespace: str) -> None:
        """Forget the statistics of a deleted namespace."""
        self._namespaces.pop(namespace, None)

    def count_active(self, requests: Iterable[ActiveRequest]) -> None:
        """Record how many requests of each namespace run and wait now."""
        requests = list(requests)
        for namespace, stats in self._namespaces.items():
            computing = [each.computes for each in requests if each.namespace == namespace]
            point = stats.point()
            point.running = sum(computing)
            point.waiting = len(computing) - point.running


def hit_or_miss(answer: Answer) -> str:
    """Tell whether a prompt read states from the cache.

    Returns:
        `hit` if it read any, and `miss` if it held documents and read none. Empty for a prompt
        without documents, which would make misses look fast.
    """
    reuse = answer.reuse
    if not answer.choices or not reuse.prompt_tokens:
        return ""
    if reuse.cached_tokens:
        return "hit"
    return "miss" if answer.sources or reuse.created_tokens else ""


def with_tokens(active: ActiveRequest) -> Iterator[tuple[Answer, dict[str, int]]]:
    """Yield each answer of a request with the tokens of its prompt by source."""
    for answer, read in zip(active.answers, active.read_tokens, strict=True):
        computed = answer.reuse.computed_tokens - read.get("encoded", 0)
        counts = {**read, "shared": answer.reuse.shared_tokens, "computed": computed}
        yield answer, {source: number for source, number in counts.items() if number > 0}


def percentile(values: Iterable[float], share: float) -> float | None:
    """Return the value below which a share (0 to 1) of the values lies, if there are any."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def _summary(active: ActiveRequest, now: float) -> dict[str, Any]:
    first = active.answers[0] if active.answers else None
    sources = [source for answer in active.answers for source in answer.sources]
    return {
        "id": active.id,
        "request": active.request,
        "kind": active.kind,
        "collection": active.collection,
        "at": now,
        "ttft": first.timings.first_token if first and first.reuse.prompt_tokens else None,
        "total": time.monotonic() - active.started,
        "outcome": active.outcome,
        "cached_tokens": sum(answer.reuse.cached_tokens for answer in active.answers),
        "computed_tokens": sum(answer.reuse.computed_tokens for answer in active.answers),
        "modules": [{"name": source.module, "tier": source.tier} for source in sources],
    }
