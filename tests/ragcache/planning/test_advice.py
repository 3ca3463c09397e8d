"""What is advised for plans with known figures."""

from __future__ import annotations

from dataclasses import replace

from ragcache.planning.advice import advise
from ragcache.planning.measuring import Cut, Measured
from ragcache.planning.plan import Plan
from ragcache.planning.sizes import TierSize

GIB = 2**30


def sizes(host: int, disk: int) -> tuple[TierSize, ...]:
    """A corpus of 10 GiB, half of that in eight bits."""
    return tuple(
        TierSize(tier, kind, 10 * GIB // (1 if kind == "model" else 2), budget)
        for tier, budget in (("host", host), ("disk", disk))
        for kind in ("model", "fp8", "int8")
    )


def plan(load: float = 0.1, even: float | None = 50.0) -> Plan:
    def cut(tokens: int, compute: float) -> Cut:
        return Cut(tokens, compute, {"model": 10**6}, {"model": load})

    return Plan(
        "m", "bfloat16", {}, 1, 1000, 400_000, 400, 28, sizes(20 * GIB, 20 * GIB),
        Measured(6, 2400, 6.0, (cut(50, 0.05), cut(400, 0.4)), cold=True),
        1000.0, {"model": even}, 2.5e6,
    )  # fmt: skip


def advice(of: Plan, memory: int | None = None) -> str:
    return " ".join(advise(of, memory))


def test_caching_pays_where_loading_is_quicker() -> None:
    said = advice(plan())
    assert "loaded from this disk in 100.0 ms and computed in 400.0 ms, 4.0 times" in said
    assert "used 2 times" in said
    assert "used 5 times" in advice(plan(load=0.31))
    page_cache = replace(plan(), measured=replace(plan().measured, cold=False))
    assert "from the page cache" in advice(page_cache)


def test_caching_does_not_pay_where_computing_is_quicker() -> None:
    said = advice(plan(load=0.5, even=None))
    assert "does not pay" in said
    assert "must reach 2.5 MB/s" in said


def test_short_modules_are_warned_of_only_where_they_lose() -> None:
    assert "Modules of less than" not in advice(plan())
    assert "less than about 120 tokens" in advice(plan(even=120.0))


def test_the_host_is_advised_by_what_fits() -> None:
    assert "Leave kv_dtype at model" in advice(plan())
    tight = replace(plan(), tiers=sizes(6 * GIB, 20 * GIB))
    assert "Take kv_dtype int8" in advice(tight)
    assert "60% of it otherwise" in advice(tight)
    small = replace(plan(), tiers=sizes(GIB, 20 * GIB))
    assert "10% of the corpus, 20% with kv_dtype int8" in advice(small)
    assert "host_bytes 10GiB would hold all" in advice(small, 64 * GIB)
    assert "this machine has 8.0 GiB" in advice(small, 8 * GIB)


def test_the_disk_is_spoken_of_where_it_is_too_small() -> None:
    assert "The disk" not in advice(plan())
    assert "all of it with kv_dtype int8" in advice(replace(plan(), tiers=sizes(GIB, 6 * GIB)))
    assert "encoded again and again" in advice(replace(plan(), tiers=sizes(GIB, GIB)))
