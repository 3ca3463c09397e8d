"""Statistics of requests that the service keeps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

from ragcache import Answer, AsyncAnswerStream, Citation, Reuse, Timings
from ragcache.engine import Choice
from ragcache_api.http.requests import ActiveRequest, RequestRegistry
from ragcache_api.http.stats_recorder import (
    POINT_SECONDS,
    POINTS,
    NamespaceStats,
    StatsRecorder,
    percentile,
)


def answer(module: str, cached: int, first_token: float) -> Answer:
    source = Citation(module, module, "", 1.0, "host")
    reuse = Reuse(cached + 10, cached, 10)
    return Answer(
        "q", "a", (source,), "rooted", "stop", reuse, Timings(0, 0, first_token, 1, 0),
        (Choice((1,), "a", "stop"),),
    )  # fmt: skip


def active(namespace: str, *answers: Answer, outcome: str = "finished") -> ActiveRequest:
    made = ActiveRequest("id", "answer", namespace, "notes", RequestRegistry())
    made.answers += answers
    made.streams += [
        cast("AsyncAnswerStream", SimpleNamespace(read_tokens={"host": each.reuse.cached_tokens}))
        for each in answers
    ]
    made.outcome = outcome
    return made


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def test_first_tokens_are_told_apart_by_what_the_cache_had() -> None:
    record = NamespaceStats(Clock())
    record.record_request(active("a", answer("m", 90, 0.1)))
    record.record_request(active("a", answer("m", 0, 0.9)))
    told = record.ttft()
    assert told["hit"] == {"p50": 0.1, "p95": 0.1, "count": 1}
    assert told["miss"] == {"p50": 0.9, "p95": 0.9, "count": 1}
    assert record.tokens == {"host": 90, "computed": 20}


def test_prompts_without_documents_are_neither_hit_nor_miss() -> None:
    record = NamespaceStats(Clock())
    plain = replace(answer("m", 0, 0.01), sources=())
    record.record_request(active("a", plain))
    assert {kind: told["count"] for kind, told in record.ttft().items()} == {"hit": 0, "miss": 0}
    assert record.series()[-1]["ttft_miss_p50"] is None
    pasted = replace(plain, reuse=Reuse(40, 0, 40, created_tokens=30))
    record.record_request(active("a", pasted))
    assert record.ttft()["miss"]["count"] == 1


def test_the_series_holds_one_hour() -> None:
    clock = Clock()
    record = NamespaceStats(clock)
    for _ in range(POINTS + 10):
        record.record_request(active("a", answer("m", 90, 0.1)))
        clock.now += POINT_SECONDS
    series = record.series()
    assert len(series) == POINTS
    assert {b["at"] - a["at"] for a, b in pairwise(series)} == {POINT_SECONDS}
    assert series[0]["tokens"]["computed"] == 10


def test_only_the_last_requests_are_kept() -> None:
    record = NamespaceStats(Clock())
    for _ in range(150):
        record.record_request(active("a", outcome="failed"))
    assert len(record.recent) == 100
    assert record.outcomes["failed"] == 150


def test_namespaces_have_records_of_their_own() -> None:
    recorder = StatsRecorder(Clock())
    recorder.record_request(active("a", answer("m", 1, 0.1)))
    assert recorder.stats_of("a").outcomes["finished"] == 1
    assert recorder.stats_of("b").outcomes["finished"] == 0
    running = ActiveRequest("id", "answer", "a", "notes", RequestRegistry())
    recorder.count_active([running])
    assert recorder.stats_of("a").series()[-1]["waiting"] == 1
    assert recorder.stats_of("b").series()[-1]["waiting"] == 0


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile(range(100), 0.95) == 95
