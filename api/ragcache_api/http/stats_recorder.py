"""What happened lately, by namespace: for the operator's statistics, log and heat map."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ragcache import Answer
from ragcache_api.http.requests import ActiveRequest

POINT_SECONDS, POINTS = 5.0, 720
KEPT_REQUESTS = 100
HEAT_MINUTES = 24 * 60
SOURCES = ("device", "host", "disk", "remote", "encoded", "shared", "computed")
_MEASURED = 2000  # first tokens whose times are kept for the percentiles of all time

Clock = Callable[[], float]


@dataclass(slots=True)
class Span:
    """What happened within one point of the series."""

    at: float
    tokens: Counter[str] = field(default_factory=Counter)
    hit: list[float] = field(default_factory=list)
    miss: list[float] = field(default_factory=list)
    running: int = 0
    waiting: int = 0

    def told(self) -> dict[str, Any]:
        return {
            "at": self.at,
            "tokens": {source: self.tokens[source] for source in SOURCES},
            "ttft_hit_p50": percentile(self.hit, 0.5),
            "ttft_hit_p95": percentile(self.hit, 0.95),
            "ttft_miss_p50": percentile(self.miss, 0.5),
            "ttft_miss_p95": percentile(self.miss, 0.95),
            "running": self.running,
            "waiting": self.waiting,
        }


class Record:
    """Of one namespace. Used in the service's event loop alone. clock: Unix seconds."""

    def __init__(self, clock: Clock = time.time) -> None:
        self._clock = clock
        self.outcomes: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.hit: deque[float] = deque(maxlen=_MEASURED)
        self.miss: deque[float] = deque(maxlen=_MEASURED)
        self.counts = {"hit": 0, "miss": 0}
        self.recent: deque[dict[str, Any]] = deque(maxlen=KEPT_REQUESTS)
        self._spans: deque[Span] = deque(maxlen=POINTS)
        self._heat: dict[int, Counter[str]] = {}

    def span(self) -> Span:
        """The point of now."""
        at = self._clock() // POINT_SECONDS * POINT_SECONDS
        if not self._spans or self._spans[-1].at != at:
            self._spans.append(Span(at))
        return self._spans[-1]

    def series(self) -> list[dict[str, Any]]:
        """One value for each point of the last hour in which anything was noted."""
        oldest = self._clock() - POINT_SECONDS * POINTS
        return [span.told() for span in self._spans if span.at >= oldest]

    def ended(self, entry: ActiveRequest) -> None:
        """Takes a request that has ended."""
        self.outcomes[entry.outcome] += 1
        for answer, counts in with_tokens(entry):
            self._note(answer, counts)
        self.recent.append(_told(entry, self._clock()))

    def _note(self, answer: Answer, counts: dict[str, int]) -> None:
        span = self.span()
        self.tokens.update(counts)
        span.tokens.update(counts)
        if kind := hit_or_miss(answer):
            getattr(self, kind).append(answer.timings.first_token)
            getattr(span, kind).append(answer.timings.first_token)
            self.counts[kind] += 1
        minute = int(self._clock()) // 60 * 60
        for old in [at for at in self._heat if at <= minute - 60 * HEAT_MINUTES]:
            del self._heat[old]
        self._heat.setdefault(minute, Counter()).update(each.module for each in answer.sources)

    def ttft(self) -> dict[str, dict[str, float | int | None]]:
        """Seconds to the first token of hits and of misses."""
        return {
            kind: {
                "p50": percentile(times, 0.5),
                "p95": percentile(times, 0.95),
                "count": self.counts[kind],
            }
            for kind, times in (("hit", self.hit), ("miss", self.miss))
        }

    def heat(self, minutes: int) -> Heat:
        """How often modules stood in a prompt, minute by minute."""
        now = int(self._clock()) // 60 * 60
        buckets = [now - 60 * (minutes - 1 - i) for i in range(minutes)]
        return Heat(buckets, [self._heat.get(at, Counter()).copy() for at in buckets])


@dataclass(frozen=True, slots=True)
class Heat:
    """A copy, of which any thread may make a map. buckets: minutes, in Unix seconds; used: the
    modules of each, with numbers."""

    buckets: list[int]
    used: list[Counter[str]]

    def map(self, modules: int) -> dict[str, Any]:
        """Of the most used modules. counts: [modules, minutes]."""
        total: Counter[str] = Counter()
        for counter in self.used:
            total.update(counter)
        names = [name for name, _ in total.most_common(modules)]
        counts = [[counter[name] for counter in self.used] for name in names]
        return {"modules": names, "buckets": self.buckets, "counts": counts}


class StatsRecorder:
    """The records of all namespaces."""

    def __init__(self, clock: Clock = time.time) -> None:
        self._clock = clock
        self._records: dict[str, Record] = {}

    def of(self, namespace: str) -> Record:
        if namespace not in self._records:
            self._records[namespace] = Record(self._clock)
        return self._records[namespace]

    def ended(self, entry: ActiveRequest) -> None:
        """Takes a request that has ended."""
        self.of(entry.namespace).ended(entry)

    def tick(self, entries: Iterable[ActiveRequest]) -> None:
        """Notes how many requests of each namespace run and wait now."""
        alive = list(entries)
        for namespace, record in self._records.items():
            mine = [entry.computes for entry in alive if entry.namespace == namespace]
            span = record.span()
            span.running = sum(mine)
            span.waiting = len(mine) - span.running


def tokens_by_source(answer: Answer, read: Mapping[str, int]) -> dict[str, int]:
    """The tokens of a prompt by where they came from. read: by tier, and `encoded` for it."""
    reuse = answer.reuse
    counts = dict(read)
    counts["shared"] = reuse.shared_tokens
    counts["computed"] = reuse.computed_tokens - counts.get("encoded", 0)
    return {source: number for source, number in counts.items() if number > 0}


def hit_or_miss(answer: Answer) -> str:
    """`hit` where the prompt read states from the cache, `miss` where it held documents and read
    none. "" of prompts without documents, which would make misses look fast."""
    reuse = answer.reuse
    if not answer.choices or not reuse.prompt_tokens:
        return ""
    if reuse.cached_tokens:
        return "hit"
    return "miss" if answer.sources or reuse.created_tokens else ""


def with_tokens(entry: ActiveRequest) -> Iterator[tuple[Answer, dict[str, int]]]:
    """The answers of a request, each with the tokens of its prompt by source."""
    for answer, read in zip(entry.answers, entry.read_tokens, strict=True):
        yield answer, tokens_by_source(answer, read)


def percentile(values: Iterable[float], share: float) -> float | None:
    """Of sorted values that at which the share lies; None of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def _told(entry: ActiveRequest, now: float) -> dict[str, Any]:
    first = entry.answers[0] if entry.answers else None
    return {
        "id": entry.id,
        "kind": entry.kind,
        "collection": entry.collection,
        "at": now,
        "ttft": first.timings.first_token if first and first.reuse.prompt_tokens else None,
        "total": time.monotonic() - entry.started,
        "cached_tokens": sum(answer.reuse.cached_tokens for answer in entry.answers),
        "computed_tokens": sum(answer.reuse.computed_tokens for answer in entry.answers),
        "outcome": entry.outcome,
        "modules": [
            {"name": source.module, "tier": source.tier}
            for answer in entry.answers
            for source in answer.sources
        ],
    }
