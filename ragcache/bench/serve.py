"""Serving: Poisson arrivals of requests over a pool of documents, cached and `exact`."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np

from ragcache.bench.harness import LlamaShape, Progress, dtypes_of, shaped_causal
from ragcache.engine import (
    EncodeJob,
    EngineConfig,
    LLMEngine,
    Request,
    RequestOutput,
    assemble_context,
    encode,
)
from ragcache.machine import describe_machine
from ragcache.models import CausalLM
from ragcache.modes import EXACT
from ragcache.planning import encode_modules
from ragcache.states import KVStates

COMPUTED = str(EXACT)
"""Name, in the results, of the mode that computes every token."""


@dataclass(frozen=True, slots=True)
class ServeSetting:
    """The load: rates of requests, and their prompts.

    Each rate is offered for `seconds`, and for at least `requests` requests, after the previous one
    has drained. Rates grow by `growth` until the latency exceeds the limit or `most_rates` have
    run.
    """

    shape: LlamaShape = LlamaShape(num_layers=6)
    documents: int = 64
    document_tokens: int = 256
    each: int = 4
    preamble_tokens: int = 32
    question_tokens: int = 32
    new_tokens: int = 24
    requests: int = 24
    seconds: float = 20.0
    growth: float = 1.6
    most_rates: int = 8
    dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """Results of one rate."""

    rate: float
    """Offered requests per second."""
    throughput: float
    """Completed requests per second."""
    ttft_p50: float
    """Median time to first token, in seconds."""
    ttft_p99: float
    normalized: float
    """Mean of each request's latency divided by its output tokens, in seconds (Orca §6.2, vLLM
    §6.1)."""


def bench_serve(setting: ServeSetting, progress: Progress = lambda _: None) -> dict[str, Any]:
    """Run the same requests at growing rates through one engine in both modes.

    The knee is the highest rate at which the normalized latency stays below the limit, interpolated
    between the rates. The limit is the same for both modes: twice the latency of a single request
    in mode `exact`. `knee_ratio_to_exact` is the knee with cached documents over the knee in
    `exact`.
    """
    progress("building the model and encoding the documents")
    causal = shaped_causal(setting.shape, setting.dtype)
    own = setting.preamble_tokens + setting.each * setting.document_tokens
    own += setting.question_tokens + setting.new_tokens
    room = 32 * (own + 64) * causal.computed_bytes_per_token
    with LLMEngine(causal, EngineConfig(room, running=32)) as engine:
        prompts = _requests(setting, causal)
        alone = {  # normalized latency of a single request, the median of three
            mode: statistics.median(_normalized(engine.submit_request(r).result()) for r in three)
            for mode, three in ((mode, requests[:3]) for mode, requests in prompts.items())
        }
        limit = 2 * alone[COMPUTED]
        loads: dict[str, list[LoadPoint]] = {}
        for mode, requests in prompts.items():
            first = 0.5 / (alone[mode] * setting.new_tokens)  # half the rate one after another
            loads[mode] = []
            for rate in (first * setting.growth**n for n in range(setting.most_rates)):
                progress(f"{mode}: {rate:.2f} requests a second")
                count = max(setting.requests, int(rate * setting.seconds))
                loads[mode].append(_offer(engine, islice(cycle(requests), count), rate))
                if loads[mode][-1].normalized > limit:
                    break
        knees = {mode: knee_of(found, limit) for mode, found in loads.items()}
    return {
        "knee_ratio_to_exact": knees["cached"] / knees[COMPUTED],
        "knee": knees,
        "limit_s_a_token": limit,
        "alone_s_a_token": alone,
        "loads": {mode: [asdict(load) for load in found] for mode, found in loads.items()},
        "dtypes": dtypes_of(causal),
        "setting": asdict(setting),
        "machine": describe_machine(),
    }


def _requests(setting: ServeSetting, causal: CausalLM) -> dict[str, list[Request]]:
    """Return the same prompts for each mode: computed in full, or over states of documents."""
    rng = random.Random(4)
    tokens = partial(setting.shape.draw_tokens, rng)
    preamble = tokens(setting.preamble_tokens)
    texts = [tokens(setting.document_tokens) for _ in range(setting.documents)]
    [root] = encode(causal, [EncodeJob(preamble)])
    states = encode_modules(causal, root, texts)
    new = setting.new_tokens

    def request(cached: Sequence[KVStates], own: Sequence[int]) -> Request:
        return Request(assemble_context(cached, own, window=causal.window, max_tokens=new), new)

    requests: dict[str, list[Request]] = {COMPUTED: [], "cached": []}
    for _ in range(setting.requests):
        picked = rng.sample(range(setting.documents), setting.each)
        question = tokens(setting.question_tokens)
        whole = [*preamble, *(t for each in picked for t in texts[each]), *question]
        requests[COMPUTED].append(request([], whole))
        requests["cached"].append(request([root, *(states[each] for each in picked)], question))
    return requests


def _offer(engine: LLMEngine, requests: Iterable[Request], rate: float) -> LoadPoint:
    """Submit the requests as a Poisson process of the rate, and wait for all."""
    rng = random.Random(5)
    handles = []
    begin = time.perf_counter()
    due = begin
    for request in requests:
        due += rng.expovariate(rate)
        time.sleep(max(0.0, due - time.perf_counter()))
        handles.append(engine.submit_request(request))
    done = [handle.result() for handle in handles]
    first = [completion.first_token_at - completion.submitted_at for completion in done]
    last = max(completion.finished_at for completion in done)
    return LoadPoint(
        rate=rate,
        throughput=len(done) / (last - begin),
        ttft_p50=float(np.percentile(first, 50)),
        ttft_p99=float(np.percentile(first, 99)),
        normalized=statistics.mean(map(_normalized, done)),
    )


def _normalized(completion: RequestOutput) -> float:
    return (completion.finished_at - completion.submitted_at) / len(completion.token_ids)


def knee_of(loads: Sequence[LoadPoint], limit: float) -> float:
    """Return the rate at which the normalized latency crosses the limit, interpolated."""
    below = loads[0]
    if below.normalized > limit:
        return below.rate * limit / below.normalized
    for load in loads[1:]:
        if load.normalized > limit:
            share = (limit - below.normalized) / (load.normalized - below.normalized)
            return below.rate + share * (load.rate - below.rate)
        below = load
    return below.rate
