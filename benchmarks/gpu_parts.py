"""The parts that run through the engine: encoding, first tokens from device and host, serving,
orders, decoding."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from gpu_session import GpuSession, median_ms, time_steps
from gpu_table import Ceilings

from ragcache.bench.harness import made_up_key
from ragcache.bench.shape_session import PATIENCE, counters_between
from ragcache.states import KVStates
from ragcache.states.quantization import quantize


def bench_encode(session: GpuSession, ceilings: Ceilings) -> dict[str, Any]:
    """Encodes all documents twice, and keeps the second states for the parts that follow."""
    load, shape = session.load, session.shape
    few = max(1, 8192 // load.document_tokens)
    session.encode(session.texts[:few])  # warm
    times: list[float] = []
    for _ in range(2):
        session.keep_documents([])
        session.free_memory()
        begin = time.perf_counter()
        session.keep_documents(session.encode(session.texts))
        times.append(time.perf_counter() - begin)
    seconds, tokens = min(times), load.documents * load.document_tokens
    flops = 2.0 * tokens * shape.num_layers * shape.layer_weights
    return {
        "seconds": seconds,
        "runs_s": times,
        "tokens_s": tokens / seconds,
        "share_of_product": flops / seconds / (1e12 * ceilings.bf16_tflops),
    }


def bench_ttft(session: GpuSession, _: Ceilings) -> dict[str, Any]:
    """First tokens over documents in a new random order each time: from the states to the answer
    of one token, with everything that the host does."""
    found: dict[str, Any] = {}
    for count in session.load.placed:
        session.progress(f"first tokens after {count} documents")
        before = replace(session.engine.stats)
        middle, times = _first_tokens(session, session.documents, count, session.load.runs)
        found[str(count)] = {
            "ms": middle,
            "runs_ms": times,
            "stats": counters_between(before, session.engine.stats),
        }
    return found


def _first_tokens(
    session: GpuSession, documents: Sequence[KVStates], count: int, runs: int,
    upload: _TierUpload | None = None,
) -> tuple[float, list[float]]:  # fmt: skip
    """The median, and all times, of first tokens over so many of the documents, which an upload
    brings to the device. Documents, their order and the question are new each time."""
    drawn: list[tuple[list[KVStates], list[int]]] = []

    def draw() -> None:
        drawn.append((session.rng.sample(documents, count), session.tokens(session.load.question)))
        if upload is not None:
            upload.forget()

    def ask() -> None:
        states, question = drawn.pop()
        session.first_token(states if upload is None else upload(states), question)

    return median_ms(ask, runs, before=draw)


def bench_decode(session: GpuSession, _: Ceilings) -> dict[str, Any]:
    """Requests with questions of their own over one shared run of states."""
    found: dict[str, Any] = {}
    for name, rows, tokens in session.load.decode:
        session.progress(f"decoding {name}")
        states = session.random_states(tokens, session.load.preamble)
        found[name] = _steps(session, [[states]] * rows)
        found[name]["tokens_s"] = 1e3 * rows / found[name]["step_ms"]
        del states
        session.free_memory()
    return found


def _steps(session: GpuSession, states: Sequence[Sequence[KVStates]]) -> dict[str, Any]:
    """A step in which a request for each of these lists of states decodes, after a warm batch."""
    tokens = session.load.decode_tokens
    for count in (8, tokens):
        contexts = [session.context(each, count) for each in states]
        steps = time_steps(session, contexts, count)
    return steps.figures()


def bench_order(session: GpuSession, _: Ceilings) -> dict[str, Any]:
    """The step over documents in another order for every request, beside one over a single run of
    as many tokens."""
    load = session.load
    documents = session.documents[: load.each]
    one = session.random_states(load.each * load.document_tokens, load.preamble)
    found: dict[str, Any] = {}
    for name, rows in load.order:
        session.progress(f"any order against one segment, {rows} rows")
        orders = [session.rng.sample(documents, load.each) for _ in range(rows)]
        segment, several = _steps(session, [[one]] * rows), _steps(session, orders)
        found[name] = {
            "ratio": several["step_ms"] / segment["step_ms"],
            "one_ms": segment["step_ms"],
            "orders_ms": several["step_ms"],
        }
    return found


def bench_serve(session: GpuSession, _: Ceilings) -> dict[str, Any]:
    """A batch of requests over documents in random order, from its submission to its end: over the
    states as the model computed them, and in eight bits where attention reads those."""
    found = {"model": _batches(session, session.documents)}
    if not session.engine.core.runner.asynchronous:
        found["int8"] = {"skipped": "int8 states are restored here"}
        return found
    session.progress("int8 states")
    states: Any = [quantize(each, "int8") for each in session.documents]
    found["int8"] = _batches(session, states)
    return found


def _batches(session: GpuSession, documents: Sequence[KVStates]) -> dict[str, Any]:
    load = session.load
    _batch(session, documents)  # warm
    before = replace(session.engine.stats)
    runs = [_batch(session, documents) for _ in range(load.serve_runs)]
    total = statistics.median(run["total_s"] for run in runs)
    return {
        "total_s": total,
        "ttft_p50_s": statistics.median(run["ttft_p50_s"] for run in runs),
        "ttft_max_s": statistics.median(run["ttft_max_s"] for run in runs),
        "tokens_s": load.requests * load.new_tokens / total,
        "runs": runs,
        "stats": counters_between(before, session.engine.stats),
    }


def _batch(session: GpuSession, documents: Sequence[KVStates]) -> dict[str, float]:
    load = session.load
    chosen = [session.rng.sample(documents, load.each) for _ in range(load.requests)]
    begin = time.perf_counter()
    contexts = [session.context(states, load.new_tokens) for states in chosen]
    requests = [session.request(context, load.new_tokens) for context in contexts]
    handles = [session.engine.submit_request(request) for request in requests]
    outputs = [handle.result(PATIENCE) for handle in handles]
    total = time.perf_counter() - begin
    first = [output.first_token_at - begin for output in outputs]
    return {
        "total_s": total,
        "ttft_p50_s": statistics.median(first),
        "ttft_max_s": max(first),
    }


def bench_tiers(session: GpuSession, _: Ceilings) -> dict[str, Any]:
    """The first token over documents that are on the host, in random order: from the copies' being
    queued to the answer. The preamble is on the device."""
    if find_spec("sqlalchemy") is None:
        return {"skipped": "the tiers of the store need SQLAlchemy"}
    load = session.load
    count, runs = load.placed[0], max(2, load.runs // 2)
    pinned = [_pinned(states, session.device) for states in session.documents[:count]]
    tensors = [tensor for states in pinned for tensor in (states.keys, states.values)]
    room = [torch.empty_like(tensor, device=session.device) for tensor in tensors]

    def copy() -> None:
        for here, there in zip(room, tensors, strict=True):
            here.copy_(there, non_blocking=True)
        session.synchronize()

    copied, copies = median_ms(copy, runs)
    room.clear()
    upload = _TierUpload(session, sum(states.nbytes for states in pinned))
    middle, times = _first_tokens(session, pinned, count, runs, upload)
    return {
        "over_copy_ms": middle - copied,
        "ms": middle,
        "copy_ms": copied,
        "gb_s": sum(states.nbytes for states in pinned) / copied / 1e6,
        "runs_ms": times,
        "copies_ms": copies,
    }


def _pinned(states: KVStates, device: str) -> KVStates:
    keys, values = (each.to("cpu") for each in (states.keys, states.values))
    if device != "cpu":
        keys, values = keys.pin_memory(), values.pin_memory()
    return KVStates(keys, values, states.start)


class _TierUpload:
    """Brings states to the device by the device tier of the store."""

    def __init__(self, session: GpuSession, nbytes: int) -> None:
        """nbytes: of the states of one upload."""
        from ragcache.store import DeviceTier

        self.tier = DeviceTier(4 * nbytes, session.device)  # the engine lets go of the last late
        self.tier.bind(session.engine.stream, keep_free=0)
        self.keys = [made_up_key(number) for number in range(session.load.placed[0])]

    def forget(self) -> None:
        """Let go of what was uploaded."""
        for key in self.keys:
            self.tier.delete(key)

    def __call__(self, states: Sequence[KVStates]) -> list[KVStates]:
        """Queue copies, layer by layer, and return the states as they will be there."""
        self.tier.put_all(list(zip(self.keys, states, strict=True)))
        return [self.tier.get(key).restore() for key in self.keys]


def bench_profile(session: GpuSession, _: Ceilings) -> dict[str, Any]:
    """Profile the device in first tokens after four documents and in decoding over them.

    The profiler itself costs time, mostly between kernels.
    """
    if session.device == "cpu":
        return {"skipped": "there is no device"}
    load = session.load

    first_tokens = partial(_first_tokens, session, session.documents, load.placed[0], 1)
    found = {"ttft": profile_kernels(first_tokens)}
    for count in load.new_texts[-1:]:
        session.first_token([], session.tokens(count))
        text = session.tokens(count)
        found[f"new_{count}"] = profile_kernels(partial(session.first_token, [], text))
    for name, rows in load.order:
        states = [session.rng.sample(session.documents, load.each) for _ in range(rows)]
        contexts = [session.context(each, 12) for each in states]
        found[f"decode_{name}"] = profile_kernels(partial(time_steps, session, contexts, 12))
    return found


def profile_kernels(run: Callable[[], object]) -> dict[str, Any]:
    """Microseconds and calls by kernel, the longest first, and the share of the time between the
    first kernel and the last in which one ran."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    spans: dict[str, list[float]] = {}
    busy, end, first = 0.0, -math.inf, math.inf
    events: list[Any] = [e for e in profiled.events() or [] if e.device_type.name == "CUDA"]
    for event in sorted(events, key=lambda e: e.time_range.start):
        begin, until = event.time_range.start, event.time_range.end
        spans.setdefault(event.name[:80], []).append(until - begin)
        busy += max(0.0, until - max(begin, end))
        first, end = min(first, begin), max(end, until)
    longest = sorted(spans.items(), key=lambda item: -sum(item[1]))[:24]
    return {
        "busy_share": busy / (end - first) if events else None,
        "kernels": [
            {"name": name, "calls": len(each), "us": round(sum(each), 1)} for name, each in longest
        ],
    }


ENGINE_PARTS: dict[str, Callable[[GpuSession, Ceilings], dict[str, Any]]] = {
    "encode": bench_encode,
    "ttft": bench_ttft,
    "tiers": bench_tiers,
    "order": bench_order,
    "decode": bench_decode,
    "profile": bench_profile,
    "serve": bench_serve,
}
"""In the order in which they run: the others read what was encoded, and once a step has read int8
states, all graphs are for both kinds."""
