"""What the fake server tells: a service with many or few modules, alike at every start."""

from __future__ import annotations

import random
import time
from typing import Any

TEXT = "An invoice is due thirty days after it was sent. The grace period is fourteen days."
SUBJECTS = (
    "invoices returns leave travel security onboarding pensions expenses parking training".split()
)
COLLECTIONS = ("handbook", "contracts", "wiki")
SOURCES = ("device", "host", "disk", "remote", "shared", "encoded", "computed")
POINTS = 720


def modules(number: int) -> list[dict[str, Any]]:
    """Modules of a few or many documents, a few of them popular."""
    choose = random.Random(7)
    return [_module(index, number, choose) for index in range(number)]


def _module(index: int, number: int, choose: random.Random) -> dict[str, Any]:
    subject = SUBJECTS[index % len(SUBJECTS)]
    document = f"{subject}-{index // (4 * len(SUBJECTS)):03d}.md"
    popularity = choose.paretovariate(0.9)
    hits = 0 if choose.random() < 0.2 else int(popularity * 3)
    tiers = [tier for tier, least in (("device", 60), ("host", 9), ("disk", 0)) if hits >= least]
    tokens = choose.randrange(60, 385)
    return {
        "id": index + 1,
        "name": f"{document[:-3]}-{index // len(SUBJECTS) % 4 + 1}",
        "document": document,
        "collection": COLLECTIONS[0] if number < 100 else COLLECTIONS[index % 3],
        "tokens": tokens,
        "nbytes": tokens * 28672,
        "tiers": tiers if choose.random() > 0.03 else [],
        "hits": hits,
        "last_use": time.time() - choose.expovariate(1 / 4000) if hits else None,
        "pinned": choose.random() < (0.3 if hits > 2000 else 0.04),
        "expires_at": None,
    }


def series(now: float) -> list[dict[str, Any]]:
    """A point for every five seconds of the last hour: a cache that fills, and a busy quarter."""
    choose = random.Random(11)
    return [_point(now, index, choose) for index in range(POINTS)]


def _point(now: float, index: int, choose: random.Random) -> dict[str, Any]:
    age = index / POINTS
    load = (2.5 if 0.55 < age < 0.75 else 1.0) * choose.uniform(0.6, 1.4)
    kept = 0.35 + 0.55 * min(1.0, age * 1.6)
    asked = 4200 * load
    shares = {"device": 0.5, "host": 0.24, "disk": 0.12, "remote": 0.02, "shared": 0.12}
    tokens = {name: int(asked * kept * share) for name, share in shares.items()}
    tokens["encoded"] = int(asked * (1 - kept) * 0.4)
    tokens["computed"] = int(asked * (1 - kept) * 0.6)
    hit, miss = 0.036 * load**0.5, 0.62 * load**0.6
    quiet = choose.random() < 0.5
    return {
        "at": now - (POINTS - index) * 5,
        "tokens": tokens,
        "ttft_hit_p50": hit, "ttft_hit_p95": hit * choose.uniform(1.8, 2.6),
        "ttft_miss_p50": None if quiet else miss,
        "ttft_miss_p95": None if quiet else miss * choose.uniform(1.3, 1.8),
        "running": int(load * 6), "waiting": int(max(0.0, load - 2) * 5),
    }  # fmt: skip


def stats(
    items: list[dict[str, Any]], points: list[dict[str, Any]], uptime: float
) -> dict[str, Any]:
    """GET /admin/stats."""
    documents: dict[str, set[str]] = {}
    for each in items:
        documents.setdefault(each["collection"], set()).add(each["document"])
    busy = bool(points)
    evictions = {
        "device": {"pressure": 412, "ttl": 0, "manual": 6, "superseded": 18, "corrupt": 0},
        "host": {"pressure": 129, "ttl": 40, "manual": 2, "superseded": 18, "corrupt": 0},
        "disk": {"pressure": 0, "ttl": 40, "manual": 2, "superseded": 18, "corrupt": 1},
    }
    return {
        "model": "Qwen2.5-1.5B-Instruct",
        "uptime": uptime,
        "collections": {name: len(found) for name, found in documents.items()},
        "requests": {
            "running": 6 * busy, "waiting": 2 * busy, "finished": 18234 * busy,
            "failed": 3 * busy, "cancelled": 21 * busy,
        },
        "tokens": {name: sum(point["tokens"][name] for point in points) for name in SOURCES},
        "ttft": {
            "hit": _times(0.0382, 0.0911, 15002) if busy else _times(None, None, 0),
            "miss": _times(0.671, 1.18, 3232) if busy else _times(None, None, 0),
        },
        "engine": {
            "steps": 912345 * busy, "batch_mean": 5.7 if busy else None,
            "queued_s": 76.4 * busy, "preempted": 4 * busy,
        },
        "series": points,
        "evictions": evictions if busy else {},
        "refetched": 37 * busy,
    }  # fmt: skip


def _times(p50: float | None, p95: float | None, count: int) -> dict[str, Any]:
    return {"p50": p50, "p95": p95, "count": count}


def tiers(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """GET /admin/tiers."""
    budgets = {"device": 8 << 30, "host": 32 << 30, "disk": None}
    if len(items) < 100:
        budgets = {"device": 48 << 20, "host": 96 << 20, "disk": None}
    lines = []
    for name, budget in budgets.items():
        held = [each for each in items if name in each["tiers"]]
        used = sum(each["nbytes"] for each in held)
        lines.append(
            {
                "name": name,
                "used_bytes": used if budget is None else min(used, budget),
                "budget_bytes": budget,
                "pinned_bytes": sum(each["nbytes"] for each in held if each["pinned"]),
                "states": len(held),
                "hits": sum(each["hits"] for each in held),
                "persistent": name == "disk",
            }
        )
    return lines


def requests(items: list[dict[str, Any]], now: float) -> dict[str, Any]:
    """GET /admin/requests: six requests over shared segments, and forty that ended."""
    choose = random.Random(3)
    popular = sorted(items, key=lambda each: -each["hits"])[:12]
    running = [
        {
            "id": f"req-{choose.getrandbits(48):012x}", "kind": "answer", "collection": "handbook",
            "age": choose.uniform(0.05, 3), "prompt_tokens": choose.randrange(700, 1500),
            "generated": choose.randrange(0, 60), "state": "prefill" if index == 5 else "decode",
        }
        for index in range(6 * bool(items))
    ]  # fmt: skip
    segments = [{"name": "preamble of handbook", "module": None, "tokens": 42, "requests": 6}]
    segments += [
        {
            "name": each["name"], "module": each["id"], "tokens": each["tokens"],
            "requests": max(1, 5 - index),
        }
        for index, each in enumerate(popular)
    ]  # fmt: skip
    recent = [_ended(index, popular, now, choose) for index in range(40 * bool(popular))]
    batch = {"rows": 5 + 118, "requests": 6, "segments": segments}
    idle: dict[str, Any] = {"rows": 0, "requests": 0, "segments": []}
    return {"running": running, "batch": batch if running else idle, "recent": recent}


def _ended(
    index: int, popular: list[dict[str, Any]], now: float, choose: random.Random
) -> dict[str, Any]:
    used = choose.sample(popular, min(4, len(popular)))
    cached = sum(each["tokens"] for each in used)
    hit = choose.random() < 0.8
    return {
        "id": f"req-{choose.getrandbits(48):012x}",
        "kind": choose.choice(["answer", "chat", "prompt"]),
        "collection": "handbook",
        "at": now - 4 * index,
        "ttft": choose.uniform(0.02, 0.09) if hit else choose.uniform(0.4, 1.2),
        "total": choose.uniform(1.2, 3.5),
        "cached_tokens": cached if hit else 0,
        "computed_tokens": choose.randrange(18, 60) + (0 if hit else cached),
        "outcome": choose.choices(["stop", "length", "failed"], [90, 8, 2])[0],
        "modules": [
            {"name": each["name"], "tier": (each["tiers"] or ["computed"])[0]} for each in used
        ],
    }


def heat(items: list[dict[str, Any]], minutes: int, number: int, now: float) -> dict[str, Any]:
    """GET /admin/heat."""
    choose = random.Random(5)
    slot = minutes * 60 / 48
    popular = [each for each in sorted(items, key=lambda each: -each["hits"]) if each["hits"]][
        :number
    ]
    counts = []
    for rank, _ in enumerate(popular):
        peak, height = choose.uniform(0, 48), 22 / (1 + rank / 5)
        counts.append(
            [
                int(height * choose.random() ** 2 * (1.4 if abs(column - peak) < 9 else 0.4))
                for column in range(48)
            ]
        )
    return {
        "modules": [each["name"] for each in popular],
        "buckets": [int(now - (48 - column) * slot) for column in range(48)],
        "counts": counts,
    }  # fmt: skip


def tree(collection: str, items: list[dict[str, Any]]) -> dict[str, Any]:
    """GET /admin/schemas/{id}/tree of a generated schema: a preamble and slots, each a union."""
    members = [
        {"name": each["name"], "kind": "module", "tokens": each["tokens"], "children": []}
        for each in items
        if each["collection"] == collection
    ]
    longest = max((each["tokens"] for each in members), default=0)
    slots = [
        {"name": f"slot-{number}", "kind": "union", "tokens": longest, "children": members}
        for number in range(1, 5)
    ]
    preamble = {"name": "preamble", "kind": "module", "tokens": 42, "children": []}
    question = {"name": "question", "kind": "parameter", "tokens": 64, "children": []}
    children = [preamble, *slots, question]
    return {"name": collection, "kind": "schema", "tokens": 106 + 4 * longest, "children": children}


def sources(items: list[dict[str, Any]], k: int) -> list[dict[str, Any]]:
    """Of an answer: the k modules with most hits that are held somewhere."""
    held = sorted((each for each in items if each["tiers"]), key=lambda each: -each["hits"])[:k]
    return [
        {
            "document": each["document"], "module": each["name"], "uri": each["document"],
            "score": 0.91 - index / 10, "tier": each["tiers"][0], "scaffold": None,
        }
        for index, each in enumerate(held)
    ]  # fmt: skip


def answer(
    asked: dict[str, Any], text: str, used: list[dict[str, Any]], first: float, total: float
) -> dict[str, Any]:
    """The last event of POST /v1/answers."""
    cached = 271 * len(used)
    return {
        "id": "ans-1", "question": asked["question"], "text": text, "finish_reason": "stop",
        "mode": asked["mode"], "sources": used,
        "reuse": {
            "prompt_tokens": cached + 73, "cached_tokens": cached, "computed_tokens": 31,
            "shared_tokens": 42, "bytes_moved": {},
        },
        "timings": {
            "retrieve": 0.004, "assemble": 0.002, "first_token": first, "total": total,
            "queued": 0.001,
        },
    }  # fmt: skip


def job(number: int, target: str, total: int) -> dict[str, Any]:
    """A job that waits."""
    return {
        "id": number, "target": target, "status": "queued", "done": 0, "total": total,
        "error": "", "started_at": None, "finished_at": None,
    }  # fmt: skip
