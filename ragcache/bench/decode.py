"""Decoding: many requests over the same documents in different orders, beside copies of them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ragcache.attention import AttentionMetadata
from ragcache.bench.copies import generate_copies
from ragcache.bench.machine import describe_machine
from ragcache.bench.relay import RelaySetting, bench_relay
from ragcache.bench.shapes import LlamaShape
from ragcache.engine import Context, EngineConfig, EngineStats, Request, RequestHandle, assemble
from ragcache.engine.core import Answers, EngineCore
from ragcache.engine.runner import RaggedModelRunner
from ragcache.models import CausalLM, wrap_causal
from ragcache.states import KVStates

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DecodeSetting:
    """The batch. copies_tokens: how many tokens the side with copies generates, whose steps are
    long; unshared_tokens: the prompt of each request of the comparison without any sharing."""

    shape: LlamaShape = LlamaShape()
    requests: int = 16
    preamble_tokens: int = 32
    modules: int = 4
    module_tokens: int = 1024
    question_tokens: int = 48
    new_tokens: int = 64
    copies_tokens: int = 8
    unshared_tokens: int = 256
    with_mha: bool = True
    device: str = "cpu"
    relay: RelaySetting = RelaySetting()


class _NoAttention:
    """Hydragen's bound (§4.1): everything but the attention."""

    def attend(
        self,
        plan: AttentionMetadata,  # noqa: ARG002
        layer: int,  # noqa: ARG002
        query: Tensor,
        key: Tensor,  # noqa: ARG002
        value: Tensor,  # noqa: ARG002
        *,
        scale: float,  # noqa: ARG002
    ) -> Tensor:
        return query.transpose(0, 1)


@dataclass(frozen=True, slots=True)
class _Decoded:
    """Seconds of each step that only decoded; what the engine did; bytes of chunks at the most."""

    steps: list[float]
    tally: EngineStats
    pool_bytes: int

    @property
    def step(self) -> float:
        return statistics.median(self.steps)


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
    mha = None
    if setting.with_mha:
        whole = replace(setting.shape, num_kv_heads=setting.shape.num_heads)
        mha = _shared(setting, whole, progress)
    progress("attention alone")
    return {
        **{key: result[key] for key in ("ratio_to_copies", "share_of_ceiling", "kv_bytes_ratio")},
        "ratio_to_copies_mha": None if mha is None else mha["ratio_to_copies"],
        "ratio_unshared": unshared["ratio_unshared"],
        "scheduler_share": result["scheduler_share"],
        "shared": result,
        "shared_mha": mha,
        "unshared": unshared,
        "relay": bench_relay(setting.relay, setting.device),
        "setting": asdict(setting),
        "machine": describe_machine(),
    }


def _shared(setting: DecodeSetting, shape: LlamaShape, progress: Progress) -> dict[str, Any]:
    heads = f"{shape.num_heads} query heads over {shape.num_kv_heads}"
    progress(f"building the model ({heads} key heads)")
    model = shape.build(torch.bfloat16).to(setting.device)
    causal = wrap_causal(model)
    states = _states(setting, causal)
    contexts = _contexts(setting, causal, states)
    requests = [_request(context, setting) for context in contexts]
    progress("segments")
    ours = _decode(causal, requests)
    progress("attention left out")
    backend, causal.backend = causal.backend, _NoAttention()
    ceiling = _decode(causal, requests)
    causal.backend = backend
    progress("copies")
    prompts = [[segment.states for segment in context.segments] for context in contexts]
    questions = [context.token_ids for context in contexts]
    copies = generate_copies(model, prompts, questions, setting.copies_tokens)
    again = _decode(causal, requests)
    step = statistics.median([*ours.steps, *again.steps])
    one_copy = sum(each.nbytes for each in states)
    own = setting.question_tokens + setting.new_tokens
    private = setting.requests * own * causal.bytes_per_token
    copied = setting.requests * (one_copy + own * causal.bytes_per_token)
    total = ours.tally.planning + ours.tally.forward + ours.tally.sampling
    return {
        "ratio_to_copies": statistics.median(copies) / step,
        "share_of_ceiling": ceiling.step / step,
        "kv_bytes_ratio": (one_copy + ours.pool_bytes) / (one_copy + private),
        "kv_bytes_ratio_to_copies": (one_copy + ours.pool_bytes) / copied,
        "scheduler_share": ours.tally.planning / total,
        "sampling_share": ours.tally.sampling / total,
        "tokens_per_second": setting.requests / step,
        "step_s": {"segments": step, "ceiling": ceiling.step, "copies": statistics.median(copies)},
        "runs": {
            "segments": [*ours.steps, *again.steps],
            "ceiling": ceiling.steps,
            "copies": copies,
        },
    }


def _unshared(setting: DecodeSetting, progress: Progress) -> dict[str, Any]:
    progress("no sharing")
    model = setting.shape.build(torch.bfloat16).to(setting.device)
    causal = wrap_causal(model)
    rng = random.Random(3)
    questions = [
        _tokens(rng, setting.unshared_tokens, setting.shape) for _ in range(setting.requests)
    ]
    contexts = [
        assemble((), question, window=causal.window, max_new_tokens=setting.new_tokens)
        for question in questions
    ]
    new = setting.copies_tokens
    requests = [Request(context, new) for context in contexts]
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
    """Random states: how long a step takes does not depend on what they say."""
    torch.manual_seed(1)
    found = []
    start = 0
    for length in (setting.preamble_tokens, *[setting.module_tokens] * setting.modules):
        keys, values = causal.new_states(length)
        found.append(KVStates(keys.normal_(), values.normal_(), start))
        start = setting.preamble_tokens
    return found


def _contexts(
    setting: DecodeSetting, causal: CausalLM, states: Sequence[KVStates]
) -> list[Context]:
    """The same modules in another order for every request."""
    rng = random.Random(2)
    contexts = []
    for _ in range(setting.requests):
        order = list(states[1:])
        rng.shuffle(order)
        question = _tokens(rng, setting.question_tokens, setting.shape)
        contexts.append(
            assemble(
                [states[0], *order],
                question,
                window=causal.window,
                max_new_tokens=setting.new_tokens,
            )
        )
    return contexts


def _request(context: Context, setting: DecodeSetting) -> Request:
    return Request(context, setting.new_tokens)


def _tokens(rng: random.Random, count: int, shape: LlamaShape) -> list[int]:
    return [rng.randrange(shape.vocabulary) for _ in range(count)]


def _decode(causal: CausalLM, requests: Sequence[Request]) -> _Decoded:
    """Runs the requests on the engine, and times the steps in which all of them decode."""
    own = sum(len(r.context.token_ids) + r.max_new_tokens for r in requests)
    room = (own + 3 * 64 * len(requests)) * causal.bytes_per_token
    core = EngineCore(RaggedModelRunner(causal), EngineConfig(room, prefill_tokens=10**6))
    handles = []
    for request in requests:
        channel = Answers(lambda: None)
        core.add(request, channel, time.perf_counter())
        handles.append(RequestHandle(channel))
    core.step()  # the questions
    core.tally = EngineStats()
    steps: list[float] = []
    used = 0
    while core.busy:
        used = max(used, core.pool.used_count)
        begin = time.perf_counter()
        core.step()
        steps.append(time.perf_counter() - begin)
    for handle in handles:
        handle.result()
    return _Decoded(steps, core.tally, used * core.pool.bytes_per_chunk)
