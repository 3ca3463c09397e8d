"""Hybrid models on a GPU: first token over composed modules and a step of many requests, beside the
time in which the GPU can read and write the bytes that they need.

python benchmarks/hybrid_gpu.py --json FILE

Needs torch, transformers and triton only.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from ragcache.bench.harness import prefill
from ragcache.engine import (
    Context,
    EncodeJob,
    EngineConfig,
    LLMEngine,
    Request,
    Segment,
)
from ragcache.machine import describe_machine
from ragcache.models import CausalLM, wrap_causal
from ragcache.models.composition import compose_layers
from ragcache.models.recurrent import recurrent_mixers
from ragcache.modes import Compose
from ragcache.states import KVStates
from ragcache.states.recurrent import LayerState, RecurrentStates

WAYS: tuple[Compose, ...] = ("order", "both")
_SLOW_DECAY = -9.0  # see benchmarks/hybrid.py


@dataclass(frozen=True)
class Workload:
    """Prompts over modules of one length."""

    modules: int = 4
    """Modules of a prompt."""
    module_tokens: int = 1024
    preamble_tokens: int = 32
    question_tokens: int = 24
    kept: int = 8
    """Modules that prompts draw from."""
    requests: int = 32
    """Requests of a step."""
    runs: int = 15
    tokens: tuple[int, int] = (8, 72)
    """Lengths of short and long answers, whose difference in time is of the steps between."""


def config_of(name: str) -> Any:
    """Return the configuration of a shape: of published models, or a tiny one for tests."""
    from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig

    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if name == "0.8b":
        return Qwen3_5TextConfig(
            hidden_size=1024, intermediate_size=3584, num_hidden_layers=24, num_attention_heads=8,
            num_key_value_heads=2, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=16,
            linear_key_head_dim=128, linear_value_head_dim=128, max_position_embeddings=32768,
            tie_word_embeddings=True, **ids,
        )  # fmt: skip
    if name == "35b-a3b":
        return Qwen3_5MoeTextConfig(
            hidden_size=2048, num_hidden_layers=40, num_attention_heads=16, num_key_value_heads=2,
            head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32,
            linear_key_head_dim=128, linear_value_head_dim=128, moe_intermediate_size=512,
            shared_expert_intermediate_size=512, num_experts=256, num_experts_per_tok=8,
            max_position_embeddings=32768, tie_word_embeddings=False, **ids,
        )  # fmt: skip
    return Qwen3_5TextConfig(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
        max_position_embeddings=32768, tie_word_embeddings=True, **ids,
    )  # fmt: skip


def draw_model(config: Any, device: str, dtype: torch.dtype) -> Any:
    """Return a Hugging Face model with random weights, drawn on the device."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), torch.no_grad(), _without_initialization():
            model = AutoModelForCausalLM.from_config(config).eval()
            for name, weight in model.named_parameters():
                if name.endswith("dt_bias"):
                    weight.fill_(_SLOW_DECAY)
                elif name.endswith("A_log") or (weight.dim() == 1 and "norm" in name):
                    weight.fill_(0.5)
                else:
                    weight.normal_(0, 0.02)
    finally:
        torch.set_default_dtype(default)
    return model.to(dtype)


def _without_initialization() -> Any:
    from transformers.initialization import no_init_weights

    return no_init_weights()


@dataclass(frozen=True)
class Floors:
    """Bytes that a step has to read and write at least."""

    config: Any
    causal: CausalLM
    maps: int
    """Bytes of the maps of one module."""

    def weights(self, tokens: int) -> float:
        """Return the bytes of the layers and the head. Experts count with the share that random
        tokens choose."""
        config = self.config
        experts = getattr(config, "num_experts", 0)
        share = 1 - (1 - config.num_experts_per_tok / experts) ** tokens if experts else 1.0
        tied, total = config.tie_word_embeddings, 0.0
        for name, weight in self.causal.model.named_parameters():
            if "embed_tokens" in name and not tied:
                continue
            total += weight.nbytes * (share if ".experts." in name else 1.0)
        return total

    def first_token(self, load: Workload) -> float:
        """Return the bytes of weights, of maps, keys and values of the modules, and of the states
        behind them."""
        length = load.modules * load.module_tokens + load.preamble_tokens
        read = load.modules * self.maps + length * self.causal.bytes_per_token
        return self.weights(load.question_tokens) + read + 2 * self.causal.recurrent_bytes

    def step(self, load: Workload) -> float:
        """Return the bytes of weights, of keys and values of all modules once, and of the states of
        all requests, read and written."""
        length = load.kept * load.module_tokens + load.preamble_tokens
        own = load.requests * (load.question_tokens + sum(load.tokens) // 2)
        states = 2 * load.requests * self.causal.recurrent_bytes
        return self.weights(load.requests) + (length + own) * self.causal.bytes_per_token + states


def bandwidth(device: str) -> float:
    """Bytes a second that a copy reads and writes."""
    if device == "cpu":
        return 1e10
    memory = torch.empty(2**31, dtype=torch.uint8, device=device)
    other = torch.empty_like(memory)
    taken = []
    for _ in range(8):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        other.copy_(memory)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return 2 * memory.nbytes / min(taken)


class HybridSession:
    """A model, its engine and its encoded modules."""

    def __init__(self, name: str, load: Workload, device: str) -> None:
        self.load, self.device, self.rng = load, device, random.Random(1)
        self.config = config_of(name)
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self.model = draw_model(self.config, device, dtype)
        self.causal = wrap_causal(self.model)
        self.causal.fingerprint = "random weights"

    def draw(self, count: int) -> list[int]:
        return [self.rng.randrange(3, self.config.vocab_size) for _ in range(count)]

    def start(self, pool_bytes: int, *, warm_up: bool) -> LLMEngine:
        return LLMEngine(
            self.causal,
            EngineConfig.for_device(
                torch.device(self.device),
                pool_bytes=pool_bytes,
                running=self.load.requests,
                warm_up=warm_up,
            ),
        )

    def request(
        self, root: KVStates, modules: Sequence[KVStates], compose: Compose, new: int
    ) -> Request:
        segments, at = [Segment(root, 0, "root")], root.length
        for number in self.rng.sample(range(len(modules)), self.load.modules):
            segments.append(Segment(modules[number], at, str(number)))
            at += modules[number].length
        question = self.draw(self.load.question_tokens)
        end = at + len(question)
        placed = tuple(segments), tuple(question), tuple(range(at, end)), end, compose
        return Request(Context(*placed), new, frozenset())


def measure(
    name: str,
    load: Workload,
    device: str,
    pool_bytes: int,
    log: Callable[[str], None],
    *,
    profiled: bool = False,
) -> dict[str, Any]:
    """Return the figures of a shape: milliseconds, and ratios to the floors. If `profiled`, also
    its kernels (`find_kernels`)."""
    session = HybridSession(name, load, device)
    log("drawn")
    found: dict[str, Any] = {"bandwidth": bandwidth(device), "runner": ""}
    if name == "0.8b":
        prompt = session.draw(load.modules * load.module_tokens)
        prefill(session.model, prompt[:64])
        found["prefill_ms"] = 1e3 * _seconds(lambda: prefill(session.model, prompt))
        log("prefill by Hugging Face")
    with session.start(pool_bytes, warm_up=device != "cpu") as engine:
        found["runner"] = type(engine._core.runner).__name__
        log("engine")
        [root] = engine.encode([EncodeJob(session.draw(load.preamble_tokens))])
        before = Segment(root, 0, "root")
        modules: list[KVStates] = []
        taken: list[float] = []
        for _ in range(load.kept):
            job = EncodeJob(session.draw(load.module_tokens), root.length, before)
            begin = time.perf_counter()
            modules += engine.encode([job])
            taken.append(time.perf_counter() - begin)
        found["encode_ms"] = 1e3 * statistics.median(taken)
        log("encoded")
        maps = modules[0].recurrent
        assert maps is not None
        floors = Floors(session.config, session.causal, maps.nbytes)
        found["first_floor_ms"] = 1e3 * floors.first_token(load) / found["bandwidth"]
        found["step_floor_ms"] = 1e3 * floors.step(load) / found["bandwidth"]
        for compose in WAYS:
            times = [
                _seconds(
                    lambda request: engine.submit_request(request).result(),
                    session.request(root, modules, compose, 1),
                )
                for _ in range(load.runs + 3)
            ][3:]
            found[f"first_{compose}_ms"] = 1e3 * statistics.median(times)
        log("first tokens")
        placed = [root, *modules[: load.modules]]
        documents = [each.recurrent for each in placed if each.recurrent is not None]
        found |= bench_composition(session.causal, documents, load.runs)
        read = sum(each.nbytes for each in documents) + session.causal.recurrent_bytes
        found["compose_floor_ms"] = 1e3 * read / found["bandwidth"]
        log("composition")
        short, long = load.tokens
        taken_by: dict[int, list[float]] = {short: [], long: []}
        for run in range(4):
            for new, durations in taken_by.items():
                asked = [session.request(root, modules, "order", new) for _ in range(load.requests)]
                begin = time.perf_counter()
                handles = [engine.submit_request(each) for each in asked]
                for handle in handles:
                    handle.result()
                if run:
                    durations.append(time.perf_counter() - begin)
        steps = statistics.median(taken_by[long]) - statistics.median(taken_by[short])
        found["step_ms"] = 1e3 * steps / (long - short)
        log("steps")
        if profiled:
            found["kernels"] = find_kernels(session, engine, root, modules)
            log("kernels")
    found["first_over_floor"] = found["first_order_ms"] / found["first_floor_ms"]
    found["step_over_floor"] = found["step_ms"] / found["step_floor_ms"]
    return found


@torch.inference_mode()
def bench_composition(
    causal: CausalLM, documents: Sequence[RecurrentStates], runs: int
) -> dict[str, float]:
    """Return milliseconds of composing documents in all layers, in both ways."""
    mixers = list(recurrent_mixers(causal.model))
    states = [LayerState() for _ in mixers]
    found = {}
    for compose in WAYS:
        compose_all = partial(compose_layers, mixers, states, documents, both=compose == "both")
        times = [_seconds(compose_all) for _ in range(runs + 3)][3:]
        found[f"compose_{compose}_ms"] = 1e3 * statistics.median(times)
    return found


def _seconds(call: Callable[..., object], *args: Any) -> float:
    begin = time.perf_counter()
    call(*args)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def find_kernels(
    session: HybridSession, engine: LLMEngine, root: KVStates, modules: Sequence[KVStates]
) -> dict[str, Any]:
    """Return the kernels of an encoding, of a first token and of a step (`kernel_times`)."""
    load = session.load

    def encode() -> None:
        job = EncodeJob(session.draw(load.module_tokens), root.length, Segment(root, 0, "root"))
        engine.encode([job])

    def ask(new: int, count: int) -> None:
        asked = [session.request(root, modules, "order", new) for _ in range(count)]
        for handle in [engine.submit_request(each) for each in asked]:
            handle.result()

    for new, count in ((1, 1), (12, load.requests)):
        for _ in range(3):
            ask(new, count)
    _recorded(encode)  # the first recording of a process may be empty
    found = {"encoding": kernel_times(_recorded(encode))}
    found["first token"] = kernel_times(_recorded(lambda: ask(1, 1)))
    events = _recorded(lambda: ask(24, load.requests))
    layers = len(list(recurrent_mixers(session.causal.model)))
    cuts = [at for at, (_, _, kernel) in enumerate(events) if kernel == "recur_kernel"]
    steps = cuts[-8 * layers :: layers]  # the last ones, without prompts
    if steps:
        found["step"] = kernel_times(events[steps[0] : steps[-1]], len(steps) - 1)
    return found


Kernels = list[tuple[float, float, str]]
"""Begin and end of kernels in microseconds, and their names, in order."""


def _recorded(call: Callable[[], object]) -> Kernels:
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profiler:
        call()
    events = [each for each in profiler.events() or () if each.device_type.name == "CUDA"]
    return sorted((each.time_range.start, each.time_range.end, each.name) for each in events)


def kernel_times(events: Kernels, steps: int = 1, largest: float = 8.0) -> dict[str, Any]:
    """Return microseconds a step: of all kernels, of the pauses between them, and of each kernel.

    Args:
        events: Kernels of some steps.
        steps: Number of steps.
        largest: Longest pause that counts as between kernels. In others the device is idle.
    """
    if not events:
        return {}
    ends = list(accumulate((end for _, end, _ in events), max))
    pauses = [begin - end for (begin, _, _), end in zip(events[1:], ends, strict=False)]
    by_name = defaultdict[str, list[float]](list)
    for begin, end, kernel in events:
        by_name[kernel].append(end - begin)
    rows = [(kernel[:90], sum(each), len(each)) for kernel, each in by_name.items()]
    return {
        "span": (ends[-1] - events[0][0]) / steps,
        "kernels": len(events) / steps,
        "between": sum(each for each in pauses if 0 < each <= largest) / steps,
        "idle": sum(each for each in pauses if each > largest) / steps,
        "by kernel": [
            {"name": kernel, "us": total / steps, "count": count / steps}
            for kernel, total, count in sorted(rows, key=itemgetter(1), reverse=True)[:30]
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["0.8b", "35b-a3b"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--pool-gb", type=float, default=4.0)
    parser.add_argument("--module-tokens", type=int, default=1024)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--profile", action="store_true", help="write kernels, too")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    load = Workload(
        module_tokens=arguments.module_tokens, requests=arguments.requests, runs=arguments.runs
    )
    pool = int(arguments.pool_gb * 2**30)
    document: dict[str, Any] = {"machine": describe_machine(), "shapes": {}}
    begin = time.perf_counter()
    for name in arguments.shapes:

        def log(text: str, name: str = name) -> None:
            print(f"{time.perf_counter() - begin:7.1f} s  {name}: {text}", flush=True)

        try:
            document["shapes"][name] = measure(
                name, load, arguments.device, pool, log, profiled=arguments.profile
            )
        except Exception as error:  # the other shapes go on
            document["shapes"][name] = {"error": f"{error!r}\n{traceback.format_exc()}"}
        print(json.dumps(document["shapes"][name], indent=1), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
