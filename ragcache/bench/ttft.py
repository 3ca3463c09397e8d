"""Time to first token: ordinary prefill, concatenated states, and segments."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from ragcache.bench.harness import (
    LlamaShape,
    Progress,
    PromptSetting,
    describe_machine,
    dtypes_of,
    seconds,
    shaped_causal,
)
from ragcache.bench.peers import concatenate, in_dtype, prefill
from ragcache.engine import EncodeJob, LLMEngine, Request, assemble_context, encode
from ragcache.models import wrap_causal
from ragcache.planning import encode_modules
from ragcache.states import KVStates


@dataclass(frozen=True, slots=True)
class TtftSetting(PromptSetting):
    """The prompt, and repetitions of each way. dtype: what the model, whose weights are bfloat16,
    computes in by each of them."""

    shape: LlamaShape = LlamaShape()
    prefill_runs: int = 2
    cached_runs: int = 9
    device: str = "cpu"
    dtype: str = "auto"


def bench_ttft(
    setting: TtftSetting | None = None, progress: Progress = lambda _: None
) -> dict[str, Any]:
    """Runs the three ways in turn and returns medians in seconds and their ratios.

    The prompt holds the modules in another order than they were encoded in, so that all are moved.
    Times end when the first token is known and include concatenation, which every prompt needs.
    """
    setting = setting or TtftSetting()
    progress("building the model")
    causal = shaped_causal(setting.shape, setting.dtype, setting.device)
    model = causal.model
    model.set_attn_implementation("sdpa")
    preamble, modules, question = setting.draw(setting.shape)
    prompt = [t for run in (preamble, *reversed(modules), question) for t in run]

    progress("ordinary prefill (tens of seconds)")
    ordinary = partial(prefill, model, prompt)
    computed = statistics.median(seconds(ordinary) for _ in range(setting.prefill_runs))
    wrap_causal(model)
    progress("encoding the modules")
    [root] = encode(causal, [EncodeJob(preamble)])
    placed = [root, *reversed(encode_modules(causal, root, modules))]
    model.set_attn_implementation("sdpa")
    concatenated = partial(concatenate, model, [in_dtype(s, model.dtype) for s in placed], question)
    concatenated()
    times: dict[str, list[float]] = {"concat": [], "cached": []}
    progress("concatenated states and segments, in turn")
    with LLMEngine(causal) as engine:
        cached = partial(_cached, engine, causal.window, placed, question)
        for _ in range(setting.cached_runs):
            model.set_attn_implementation("sdpa")
            times["concat"].append(seconds(concatenated))
            wrap_causal(model)
            times["cached"].append(seconds(cached))
    middle, concat = (statistics.median(times[name]) for name in ("cached", "concat"))
    everything = setting.shape.flops(setting.cached_tokens + setting.question_tokens, 0)
    remaining = setting.shape.flops(setting.question_tokens, setting.cached_tokens)
    limit = computed * remaining / everything
    return {
        "ratio_to_prefill": computed / middle,
        "ratio_to_concat": concat / middle,
        "share_of_limit": limit / middle,
        "seconds": {"prefill": computed, "concat": concat, "cached": middle, "limit": limit},
        "runs": times,
        "dtypes": dtypes_of(causal),
        "setting": asdict(setting),
        "machine": describe_machine(),
    }


def _cached(
    engine: LLMEngine, window: int, states: Sequence[KVStates], question: Sequence[int]
) -> int:
    context = assemble_context(states, question, window=window, max_new_tokens=1)
    return engine.submit_request(Request(context, 1)).result().token_ids[0]
