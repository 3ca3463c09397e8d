"""Decoding of many requests over shared documents, compared with copies of them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ragcache.bench.harness import (
    LlamaShape,
    Progress,
    PromptSetting,
    dtypes_of,
    in_dtype,
    shaped_causal,
)
from ragcache.engine import (
    Context,
    EngineConfig,
    EngineStats,
    Request,
    RequestHandle,
    assemble_context,
)
from ragcache.engine.core import EngineCore
from ragcache.engine.queues import AnswerChannel
from ragcache.engine.runner import RaggedModelRunner
from ragcache.machine import describe_machine
from ragcache.models import CausalLM
from ragcache.states import KVStates


@dataclass(frozen=True, slots=True)
class DecodeSetting(PromptSetting):
    """Size of the batch and lengths of its prompts."""

    shape: LlamaShape = LlamaShape()
    requests: int = 16
    new_tokens: int = 64
    copies_tokens: int = 8
    """Tokens to generate over copies, whose steps are slow."""
    dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class _Decoded:
    """Seconds of each decoding step, the engine's statistics, and peak bytes of its blocks."""

    steps: list[float]
    stats: EngineStats
    pool_bytes: int


def bench_decode(setting: DecodeSetting, progress: Progress = lambda _: None) -> dict[str, Any]:
    """Decode the same requests over shared documents and over copies of them, in turn.

    Returns:
        Medians over the steps in which all requests decode. `ratio_to_copies` is tokens per second
        as a multiple of Hugging Face `generate` with a copy of the documents for each request.
        `kv_bytes_ratio` is the bytes held, as a multiple of one copy of the documents and the
        private tokens. `scheduler_share` is the share of a step outside the model and the choice of
        tokens.
    """
    progress("building the model")
    causal = shaped_causal(setting.shape, setting.dtype)
    states = _states(setting, causal)
    contexts = _contexts(setting, causal, states)
    requests = [Request(context, setting.new_tokens) for context in contexts]
    progress("segments")
    ours = _decode(causal, requests)
    progress("copies")
    prompts = [
        [in_dtype(segment.states.restore(), causal.dtype) for segment in context.segments]
        for context in contexts
    ]
    questions = [context.token_ids for context in contexts]
    copies = generate_copies(causal.model, prompts, questions, setting.copies_tokens)
    steps = {"segments": ours.steps + _decode(causal, requests).steps, "copies": copies}
    medians = {way: statistics.median(run) for way, run in steps.items()}
    one_copy = sum(each.nbytes for each in states)
    own = setting.question_tokens + setting.new_tokens
    private = setting.requests * own * causal.computed_bytes_per_token
    total = ours.stats.planning + ours.stats.forward + ours.stats.sampling
    return {
        "ratio_to_copies": medians["copies"] / medians["segments"],
        "kv_bytes_ratio": (one_copy + ours.pool_bytes) / (one_copy + private),
        "scheduler_share": ours.stats.planning / total,
        "shared": {
            "tokens_per_second": setting.requests / medians["segments"],
            "dtypes": dtypes_of(causal),
            "step_s": medians,
            "runs": steps,
        },
        "setting": asdict(setting),
        "machine": describe_machine(),
    }


def _states(setting: DecodeSetting, causal: CausalLM) -> list[KVStates]:
    """Return random states, since the time of a step does not depend on their values."""
    torch.manual_seed(1)
    found, start = list[KVStates](), 0
    for length in (setting.preamble_tokens, *[setting.module_tokens] * setting.modules):
        keys, values = causal.new_states(length)
        states = KVStates(keys.normal_(), values.normal_(), start)
        found.append(in_dtype(states, causal.states_dtype))
        start = setting.preamble_tokens
    return found


def _contexts(
    setting: DecodeSetting, causal: CausalLM, states: Sequence[KVStates]
) -> list[Context]:
    """Return a context for each request, with the same modules in another order."""
    rng = random.Random(2)
    new, contexts = setting.new_tokens, []
    for _ in range(setting.requests):
        order = [states[0], *rng.sample(states[1:], setting.modules)]
        question = setting.shape.draw_tokens(rng, setting.question_tokens)
        contexts.append(assemble_context(order, question, window=causal.window, max_tokens=new))
    return contexts


def _decode(causal: CausalLM, requests: Sequence[Request]) -> _Decoded:
    """Run the requests on the engine core, and time the steps in which all of them decode."""
    own = sum(len(r.context.token_ids) + r.max_tokens for r in requests)
    room = (own + 3 * 64 * len(requests)) * causal.computed_bytes_per_token
    core = EngineCore(RaggedModelRunner(causal), EngineConfig(room, prefill_tokens=10**6))
    handles = []
    for request in requests:
        channel = AnswerChannel(lambda: None)
        core.add_request(request, channel, time.perf_counter())
        handles.append(RequestHandle(channel))
    core.step()  # prefills the questions
    core.stats = EngineStats()
    steps: list[float] = []
    while core.busy:
        begin = time.perf_counter()
        core.step()
        steps.append(time.perf_counter() - begin)
    for handle in handles:
        handle.result()
    return _Decoded(steps, core.stats, core.pool.peak_count * core.pool.bytes_per_block)


def generate_copies(
    model: Any, prompts: Sequence[Sequence[KVStates]], questions: Sequence[Sequence[int]], new: int
) -> list[float]:
    """Return the seconds of each decoding step of a batch, after the first token.

    This is Hugging Face `generate` over states of which every request has a copy, in one
    `DynamicCache` of [B, Hkv, S, D] for each layer.

    Args:
        model: A Hugging Face model.
        prompts: States before each question, with the same number of tokens for all.
        questions: Token ids of each question.
        new: Number of tokens to generate.
    """
    from transformers import DynamicCache, LogitsProcessorList

    from ragcache.models.hf_patch import cache_name

    implementation = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    cached = sum(states.length for states in prompts[0])
    cache = DynamicCache()
    for layer in range(prompts[0][0].keys.shape[0]):
        keys = [torch.cat([s.keys[layer] for s in states], dim=1) for states in prompts]
        values = [torch.cat([s.values[layer] for s in states], dim=1) for states in prompts]
        cache.update(torch.stack(keys), torch.stack(values), layer)
    ids = torch.tensor([[0] * cached + list(question) for question in questions])
    times: list[float] = []

    def note(_ids: Tensor, scores: Tensor) -> Tensor:
        times.append(time.perf_counter())
        return scores

    with torch.inference_mode():
        model.generate(
            ids.to(model.device),
            attention_mask=torch.ones_like(ids).to(model.device),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            logits_processor=LogitsProcessorList([note]),
            **{cache_name(type(model.base_model).forward): cache},
        )
    model.set_attn_implementation(implementation)
    return [after - before for before, after in pairwise(times)]
