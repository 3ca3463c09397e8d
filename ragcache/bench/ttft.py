"""Time to first token: ordinary prefill, concatenated states, and segments."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from ragcache.bench.harness import (
    LlamaShape,
    Progress,
    PromptSetting,
    concatenate,
    dtypes_of,
    in_dtype,
    prefill,
    seconds,
    shaped_causal,
)
from ragcache.engine import EncodeJob, LLMEngine, Request, assemble_context, encode
from ragcache.machine import describe_machine
from ragcache.models import wrap_causal
from ragcache.planning import encode_modules
from ragcache.states import KVStates


@dataclass(frozen=True, slots=True)
class TtftSetting(PromptSetting):
    """The prompt, and the repetitions of each way."""

    shape: LlamaShape = LlamaShape()
    prefill_runs: int = 2
    cached_runs: int = 9
    dtype: str = "auto"
    """Dtype of computation. The weights are bfloat16."""


def bench_ttft(setting: TtftSetting, progress: Progress = lambda _: None) -> dict[str, Any]:
    """Run the three ways in turn, and return median seconds and their ratios.

    The prompt has the modules in another order than they were encoded in, so that all are moved.
    Times end when the first token is known and include concatenation, which every prompt needs.
    `processor` has the same in processor seconds of all threads, which exclude waiting for other
    processes: with one thread they approximate an idle machine.
    """
    progress("building the model")
    causal = shaped_causal(setting.shape, setting.dtype)
    model = causal.model
    model.set_attn_implementation("sdpa")
    preamble, modules, question = setting.draw(setting.shape)
    prompt = [t for run in (preamble, *reversed(modules), question) for t in run]

    progress("ordinary prefill (tens of seconds)")
    ordinary = partial(prefill, model, prompt)
    prefills = [_both_seconds(ordinary) for _ in range(setting.prefill_runs)]
    wrap_causal(model)
    progress("encoding the modules")
    [root] = encode(causal, [EncodeJob(preamble)])
    placed = [root, *reversed(encode_modules(causal, root, modules))]
    model.set_attn_implementation("sdpa")
    concatenated = partial(concatenate, model, [in_dtype(s, model.dtype) for s in placed], question)
    concatenated()
    times: dict[str, list[tuple[float, float]]] = {"concat": [], "cached": []}
    progress("concatenated states and segments, in turn")
    with LLMEngine(causal) as engine:
        cached = partial(_cached, engine, causal.window, placed, question)
        for _ in range(setting.cached_runs):
            model.set_attn_implementation("sdpa")
            times["concat"].append(_both_seconds(concatenated))
            wrap_causal(model)
            times["cached"].append(_both_seconds(cached))
    runs = {"prefill": prefills, **times}
    by_clock, by_processor = (
        {name: [each[clock] for each in found] for name, found in runs.items()} for clock in (0, 1)
    )
    return {
        **_ratios(setting, by_clock),
        "runs": {name: by_clock[name] for name in times},
        "processor": _ratios(setting, by_processor),
        "dtypes": dtypes_of(causal),
        "setting": asdict(setting),
        "machine": describe_machine(),
    }


def _ratios(setting: TtftSetting, runs: dict[str, list[float]]) -> dict[str, Any]:
    """Return the medians of each way, the limit, and their ratios."""
    prefill, concat, cached = (statistics.median(runs[n]) for n in ("prefill", "concat", "cached"))
    everything = setting.shape.flops(setting.cached_tokens + setting.question_tokens, 0)
    remaining = setting.shape.flops(setting.question_tokens, setting.cached_tokens)
    limit = prefill * remaining / everything
    return {
        "ratio_to_prefill": prefill / cached,
        "ratio_to_concat": concat / cached,
        "share_of_limit": limit / cached,
        "seconds": {"prefill": prefill, "concat": concat, "cached": cached, "limit": limit},
    }


def _cached(
    engine: LLMEngine, window: int, states: Sequence[KVStates], question: Sequence[int]
) -> int:
    context = assemble_context(states, question, window=window, max_tokens=1)
    return engine.submit_request(Request(context, 1)).result().token_ids[0]


def _both_seconds(run: Callable[[], object]) -> tuple[float, float]:
    """Return the wall-clock seconds of one call, and the processor seconds of all threads."""
    busy = time.process_time()
    return seconds(run), time.process_time() - busy
