"""A plan in words: whether caching pays, how to keep states, and which budgets to give."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ragcache.planning.plan import Plan
from ragcache.planning.words import bandwidth, percent, setting, span

_SPARE = 0.75  # of the machine's memory that a host tier should take at most


def advise(plan: Plan, memory_bytes: int | None = None) -> list[str]:
    """Sentences, the most important first. memory_bytes: the machine's, None where unknown."""
    return [*_whether(plan), *_length(plan), *_host(plan, memory_bytes), *_disk(plan), *_time(plan)]


def _whether(plan: Plan) -> Iterator[str]:
    longest = plan.measured.cuts[-1]
    load, compute = longest.load_s["model"], longest.compute_s
    module = f"a module of {longest.tokens} tokens"
    source = "from this disk" if plan.measured.cold else "from the page cache of this disk"
    if load < compute:
        uses = max(2, math.ceil(compute / (compute - load)))
        yield (
            f"Caching pays: {module} is loaded {source} in {span(load)} and computed in "
            f"{span(compute)}, {compute / load:.1f} times as long. A module that is used {uses} "
            "times has earned its encoding."
        )
        return
    yield (
        f"Caching on this disk does not pay: {module} is loaded in {span(load)} and computed in "
        f"{span(compute)}. Loading must reach {bandwidth(plan.break_even_bandwidth)}; "
        "keep what is used in memory, by host_bytes, or take a quicker disk."
    )


def _length(plan: Plan) -> Iterator[str]:
    tokens, shortest = plan.break_even_tokens["model"], plan.measured.cuts[0].tokens
    if tokens is not None and tokens > shortest:
        yield (
            f"Modules of less than about {tokens:.0f} tokens are computed sooner than loaded: "
            "leave module_tokens well above it."
        )


def _host(plan: Plan, memory_bytes: int | None) -> Iterator[str]:
    plain, eight = plan.size("host", "model"), plan.size("host", "int8")
    assert plain is not None
    assert eight is not None
    if plain.share == 1.0:
        yield "Leave kv_dtype at model: host_bytes holds the whole corpus as the model computed it."
        return
    if eight.share == 1.0:
        yield (
            "Take kv_dtype int8: host_bytes holds the whole corpus in eight bits, and "
            f"{percent(plain.share)} of it otherwise. fp8 takes as many bytes and errs more; "
            "`ragcache bench tiers` shows by how much."
        )
    else:
        yield (
            f"host_bytes holds {percent(plain.share)} of the corpus, {percent(eight.share)} with "
            "kv_dtype int8; the rest is loaded when it is asked for."
        )
    whole = setting(plain.nbytes)
    if memory_bytes is None or plain.nbytes <= _SPARE * memory_bytes:
        yield f"host_bytes {whole} would hold all of it as the model computed it."
    else:
        yield (
            f"All of it would take host_bytes {whole}, and this machine has "
            f"{memory_bytes / 2**30:.1f} GiB of memory."
        )


def _disk(plan: Plan) -> Iterator[str]:
    plain, eight = plan.size("disk", "model"), plan.size("disk", "int8")
    assert plain is not None
    assert eight is not None
    if plain.share == 1.0:
        return
    kept = f"The disk holds {percent(plain.share)} of the corpus"
    if eight.share == 1.0:
        yield f"{kept}, and all of it with kv_dtype int8."
    else:
        yield (
            f"{kept}, {percent(eight.share)} with kv_dtype int8: give it a larger disk, or a "
            "remote tier, or what is used least is encoded again and again."
        )


def _time(plan: Plan) -> Iterator[str]:
    yield (
        f"Ingestion will encode for about {span(plan.encode_s)}, once: "
        f"{plan.measured.tokens_per_second:,.0f} tokens a second, as {plan.measured.modules} of "
        f"{plan.modules:,} modules took."
    )
