"""Serving: Poisson arrivals over a pool of documents, cached and in mode `exact`."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ragcache.bench.harness import LlamaShape, Progress, describe_machine, new_figure, save_figure
from ragcache.engine import (
    EncodeJob,
    EngineConfig,
    LLMEngine,
    Request,
    RequestOutput,
    Segment,
    assemble,
)
from ragcache.models import CausalLM, wrap_causal
from ragcache.states import KVStates


@dataclass(frozen=True, slots=True)
class ServeSetting:
    """The load. Each rate is offered for `seconds`, and for `requests` requests at least, after the
    rate before has drained; rates grow by `growth` until the latency is above the limit or
    `most_rates` were tried."""

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
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """What a rate (requests a second) gave. ttft in seconds; normalized latency in seconds a token
    of the answer, from the arrival to the end (Orca §6.2, vLLM §6.1), the mean."""

    rate: float
    throughput: float
    ttft_p50: float
    ttft_p99: float
    normalized: float


@dataclass(frozen=True, slots=True, eq=False)
class _Prompt:
    """A request in both forms."""

    cached: Request
    exact: Request


def bench_serve(
    setting: ServeSetting | None = None, progress: Progress = lambda _: None
) -> dict[str, Any]:
    """The same requests, at growing rates, through the same engine in both modes.

    The knee is the highest rate at which the normalized latency stays under the limit, which is the
    same for both: twice that of a single request in mode `exact`. Between the rates it is found by
    interpolation. knee_ratio_to_exact: the knee with cached documents over that in `exact`.
    """
    setting = setting or ServeSetting()
    progress("building the model and encoding the documents")
    causal = wrap_causal(setting.shape.build(torch.bfloat16).to(setting.device))
    own = setting.preamble_tokens + setting.each * setting.document_tokens
    own += setting.question_tokens + setting.new_tokens
    room = 32 * (own + 64) * causal.bytes_per_token
    with LLMEngine(causal, EngineConfig(room, running=32)) as engine:
        prompts = _prompts(setting, causal, engine)
        alone = {mode: _alone(engine, prompts, mode) for mode in ("exact", "cached")}
        limit = 2 * alone["exact"]
        loads, knees = {}, {}
        for mode in ("exact", "cached"):
            loads[mode] = _sweep(setting, engine, prompts, mode, alone[mode], limit, progress)
            knees[mode] = knee_of(loads[mode], limit)
    return {
        "knee_ratio_to_exact": knees["cached"] / knees["exact"],
        "knee": knees,
        "limit_s_a_token": limit,
        "alone_s_a_token": alone,
        "loads": {mode: [asdict(load) for load in found] for mode, found in loads.items()},
        "setting": asdict(setting),
        "machine": describe_machine(),
    }


def _prompts(setting: ServeSetting, causal: CausalLM, engine: LLMEngine) -> list[_Prompt]:
    rng = random.Random(4)

    tokens = partial(setting.shape.draw_tokens, rng)

    preamble = tokens(setting.preamble_tokens)
    texts = [tokens(setting.document_tokens) for _ in range(setting.documents)]
    [root] = engine.encode([EncodeJob(preamble)])
    jobs = [EncodeJob(text, root.length, Segment(root, 0)) for text in texts]
    states = list(engine.encode(jobs))
    prompts = []
    for _ in range(setting.requests):
        picked = rng.sample(range(setting.documents), setting.each)
        question = tokens(setting.question_tokens)
        whole = [*preamble, *(t for each in picked for t in texts[each]), *question]
        prompts.append(
            _Prompt(
                _request(setting, causal, [root, *(states[each] for each in picked)], question),
                _request(setting, causal, [], whole),
            )
        )
    return prompts


def _request(
    setting: ServeSetting, causal: CausalLM, states: Sequence[KVStates], own: Sequence[int]
) -> Request:
    new = setting.new_tokens
    return Request(assemble(states, own, window=causal.window, max_new_tokens=new), new)


def _alone(engine: LLMEngine, prompts: Sequence[_Prompt], mode: str) -> float:
    """Normalized latency of a request that runs alone: the median of three."""
    return statistics.median(
        _normalized(engine.submit_request(getattr(prompt, mode)).result()) for prompt in prompts[:3]
    )


def _sweep(
    setting: ServeSetting,
    engine: LLMEngine,
    prompts: Sequence[_Prompt],
    mode: str,
    alone: float,
    limit: float,
    progress: Progress,
) -> list[LoadPoint]:
    """Rates from half of what one request after another would reach."""
    rate = 0.5 / (alone * setting.new_tokens)
    loads: list[LoadPoint] = []
    while len(loads) < setting.most_rates:
        progress(f"{mode}: {rate:.2f} requests a second")
        count = max(setting.requests, int(rate * setting.seconds))
        offered = [getattr(prompt, mode) for prompt in islice(cycle(prompts), count)]
        loads.append(_offer(engine, offered, rate))
        if loads[-1].normalized > limit:
            break
        rate *= setting.growth
    return loads


def _offer(engine: LLMEngine, requests: Sequence[Request], rate: float) -> LoadPoint:
    """Submits the requests at random intervals of the mean 1/rate, and waits for all."""
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
    """Where the normalized latency crosses the limit, on a straight line between two rates."""
    below = loads[0]
    if below.normalized > limit:
        return below.rate * limit / below.normalized
    for load in loads[1:]:
        if load.normalized > limit:
            share = (limit - below.normalized) / (load.normalized - below.normalized)
            return below.rate + share * (load.rate - below.rate)
        below = load
    return below.rate


def plot_serve(result: dict[str, Any], file: Path) -> None:
    """Normalized latency and time to first token against the rate, in both modes."""
    figure, (left, right) = new_figure(2)
    for mode, loads in result["loads"].items():
        rates = [load["rate"] for load in loads]
        [line] = left.plot(rates, [load["normalized"] for load in loads], "o-", label=mode)
        left.axvline(result["knee"][mode], color=line.get_color(), ls=":", alpha=0.6)
        right.plot(rates, [load["ttft_p50"] for load in loads], "o-", label=f"{mode}, p50")
        p99 = [load["ttft_p99"] for load in loads]
        right.plot(rates, p99, "o--", color=line.get_color(), label=f"{mode}, p99")
    left.axhline(result["limit_s_a_token"], color="gray", lw=0.8)
    left.set_ylabel("normalized latency, seconds a token")
    right.set_ylabel("time to first token, seconds")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("requests a second")
        axes.legend(frameon=False)
    save_figure(figure, file)
