"""Decoding: many requests over the same documents in different orders, against copies of them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ragcache.attention import AttentionMetadata
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
from ragcache.engine.core import AnswerChannel, EngineCore
from ragcache.engine.runner import RaggedModelRunner
from ragcache.machine import describe_machine
from ragcache.models import CausalLM
from ragcache.states import KVStates
from ragcache.states.quantization import restored


@dataclass(frozen=True, slots=True)
class DecodeSetting(PromptSetting):
    """The batch. copies_tokens: tokens generated over copies, whose steps are long;
    unshared_tokens: the prompt of each request in the comparison without sharing."""

    shape: LlamaShape = LlamaShape()
    requests: int = 16
    new_tokens: int = 64
    copies_tokens: int = 8
    unshared_tokens: int = 256
    dtype: str = "auto"


class _NoAttention:
    """A backend without attention: the upper bound of Hydragen (§4.1)."""

    def attend(
        self, metadata: AttentionMetadata, layer: int, query: Tensor, key: Tensor, value: Tensor,
        *, scale: float, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        del metadata, layer, key, value, scale, sinks
        return query.transpose(0, 1)


@dataclass(frozen=True, slots=True)
class _Decoded:
    """Seconds of each decoding step, the engine's statistics, and peak bytes of its blocks."""

    steps: list[float]
    stats: EngineStats
    pool_bytes: int


def bench_decode(
    setting: DecodeSetting | None = None, progress: Progress = lambda _: None
) -> dict[str, Any]:
    """Ratios of tokens a second while all requests decode; medians over the steps.

    ratio_to_copies: to Hugging Face `generate` where each request has a copy of its documents;
    ratio_to_copies_mha: the same with as many key heads as query heads. share_of_ceiling: of the
    rate with the attention left out. kv_bytes_ratio: bytes held over one copy of the documents and
    the private tokens. ratio_unshared: to `generate` where no request shares anything.
    scheduler_share: of the time of a step, what is neither the model nor the choice of tokens.
    """
    setting = setting or DecodeSetting()
    result = _shared(setting, setting.shape, progress)
    unshared = _unshared(setting, progress)
    whole = replace(setting.shape, num_kv_heads=setting.shape.num_heads)
    mha = _shared(setting, whole, progress)
    names = ("ratio_to_copies", "share_of_ceiling", "kv_bytes_ratio", "scheduler_share")
    return {
        **{key: result[key] for key in names},
        "ratio_to_copies_mha": mha["ratio_to_copies"],
        "ratio_unshared": unshared["ratio_unshared"],
        "shared": result,
        "shared_mha": mha,
        "unshared": unshared,
        "setting": asdict(setting),
        "machine": describe_machine(),
    }


def _shared(setting: DecodeSetting, shape: LlamaShape, progress: Progress) -> dict[str, Any]:
    heads = f"{shape.num_heads} query heads over {shape.num_kv_heads}"
    progress(f"building the model ({heads} key heads)")
    causal = shaped_causal(shape, setting.dtype)
    model = causal.model
    states = _states(setting, causal)
    contexts = _contexts(setting, causal, states)
    requests = [Request(context, setting.new_tokens) for context in contexts]
    progress("segments")
    ours = _decode(causal, requests)
    progress("attention left out")
    backend, causal.backend = causal.backend, _NoAttention()
    ceiling = _decode(causal, requests)
    causal.backend = backend
    progress("copies")
    prompts = [
        [in_dtype(restored(segment.states), causal.dtype) for segment in context.segments]
        for context in contexts
    ]
    questions = [context.token_ids for context in contexts]
    copies = generate_copies(model, prompts, questions, setting.copies_tokens)
    again = _decode(causal, requests)
    steps = {"segments": ours.steps + again.steps, "ceiling": ceiling.steps, "copies": copies}
    medians = {way: statistics.median(run) for way, run in steps.items()}
    step = medians["segments"]
    one_copy = sum(each.nbytes for each in states)
    computed = sum(each.length for each in states) * causal.computed_bytes_per_token
    own = setting.question_tokens + setting.new_tokens
    private = setting.requests * own * causal.computed_bytes_per_token
    copied = setting.requests * computed + private
    total = ours.stats.planning + ours.stats.forward + ours.stats.sampling
    return {
        "ratio_to_copies": medians["copies"] / step,
        "share_of_ceiling": medians["ceiling"] / step,
        "kv_bytes_ratio": (one_copy + ours.pool_bytes) / (one_copy + private),
        "kv_bytes_ratio_to_copies": (one_copy + ours.pool_bytes) / copied,
        "scheduler_share": ours.stats.planning / total,
        "sampling_share": ours.stats.sampling / total,
        "tokens_per_second": setting.requests / step,
        "dtypes": dtypes_of(causal),
        "step_s": medians,
        "runs": steps,
    }


def _unshared(setting: DecodeSetting, progress: Progress) -> dict[str, Any]:
    progress("no sharing")
    causal = shaped_causal(setting.shape, setting.dtype)
    model = causal.model
    rng = random.Random(3)
    questions = [
        setting.shape.draw_tokens(rng, setting.unshared_tokens) for _ in range(setting.requests)
    ]
    new = setting.copies_tokens
    requests = [
        Request(assemble_context((), question, window=causal.window, max_tokens=new), new)
        for question in questions
    ]
    ours, copies = [], []
    for _ in range(2):
        ours += _decode(causal, requests).steps
        copies += generate_copies(model, [], questions, new)
    step, copied = statistics.median(ours), statistics.median(copies)
    return {
        "ratio_unshared": copied / step,
        "step_s": {"segments": step, "generate": copied},
        "runs": {"segments": ours, "generate": copies},
    }


def _states(setting: DecodeSetting, causal: CausalLM) -> list[KVStates]:
    """Random states, since the time of a step does not depend on their values."""
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
    """The same modules in another order for every request."""
    rng = random.Random(2)
    new, contexts = setting.new_tokens, []
    for _ in range(setting.requests):
        order = [states[0], *rng.sample(states[1:], setting.modules)]
        question = setting.shape.draw_tokens(rng, setting.question_tokens)
        contexts.append(assemble_context(order, question, window=causal.window, max_tokens=new))
    return contexts


def _decode(causal: CausalLM, requests: Sequence[Request]) -> _Decoded:
    """Runs the requests on the engine core and times the steps in which all of them decode."""
    own = sum(len(r.context.token_ids) + r.max_tokens for r in requests)
    room = (own + 3 * 64 * len(requests)) * causal.computed_bytes_per_token
    core = EngineCore(RaggedModelRunner(causal), EngineConfig(room, prefill_tokens=10**6))
    handles = []
    for request in requests:
        channel = AnswerChannel(lambda: None)
        core.add_request(request, channel, time.perf_counter())
        handles.append(RequestHandle(channel))
    core.step()  # the questions
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
    """Seconds of each decoding step of a batch, after the first token.

    prompts: the states before each question, equally many tokens for all. They are copied into one
    `DynamicCache` of [B, Hkv, S, D] a layer: Hugging Face `generate` over states that every request
    has a copy of.
    """
    from transformers import DynamicCache, LogitsProcessorList

    implementation = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    cached = sum(states.length for states in prompts[0]) if prompts else 0
    cache = DynamicCache()
    if cached:
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
            past_key_values=cache,
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            logits_processor=LogitsProcessorList([note]),
        )
    model.set_attn_implementation(implementation)
    return [after - before for before, after in pairwise(times)]
