"""Documents that compose in a hybrid model, beside their own arithmetic and an ordinary prefill.

Times are processor time of one thread, so that other work on the machine counts little.

python benchmarks/hybrid.py --json FILE
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
import typer
from harness import (
    JsonFile,
    Progress,
    describe_machine,
    plain_table,
    print_figures,
    run_benchmark,
)

from ragcache.bench.harness import prefill
from ragcache.engine import Context, EncodeJob, EngineConfig, LLMEngine, Request, Segment, encode
from ragcache.machine import keep_freed_memory
from ragcache.models import CausalLM, wrap_causal
from ragcache.models.composition import compose_layers
from ragcache.models.recurrent import recurrent_mixers
from ragcache.modes import Compose
from ragcache.states.recurrent import LayerState, RecurrentStates

SIZES: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 32768,
}
"""Shape of Qwen3.5-0.8B: 18 layers of Gated DeltaNet and 6 of attention; a smaller vocabulary."""
_SLOW_DECAY = -9.0
"""Time step before its softplus. With transformers' own, 1, every head forgets 1,000 tokens, and
nothing would be left to multiply."""


@dataclass(frozen=True, slots=True)
class HybridSetting:
    """A hybrid model, and prompts over modules."""

    sizes: Mapping[str, Any] = field(default_factory=lambda: dict(SIZES))
    composed: int = 8
    """Modules whose composition is measured alone."""
    forgetting: float = 0.75
    """Share of heads that forget the state before a module, in a further composition."""
    modules: int = 4
    """Modules of the prompt whose first token is measured."""
    module_tokens: int = 1024
    preamble_tokens: int = 32
    question_tokens: int = 24
    runs: int = 5


def build_model(setting: HybridSetting) -> Any:
    """Return a Hugging Face model with random weights in float32."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    keep_freed_memory()
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(**setting.sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = Qwen3_5ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            torch.nn.init.constant_(parameter, _SLOW_DECAY)
    return model


@torch.inference_mode()
def bench_composition(causal: CausalLM, setting: HybridSetting) -> dict[str, float]:
    """Return median seconds of composing random maps in all layers, and of the products alone of
    one order. No head forgets, but for the share of them in `forgetful`."""
    torch.manual_seed(1)
    shape = causal.map_shape
    assert shape is not None
    documents = [_random_maps(shape) for _ in range(setting.composed)]
    forgetful = [_forgetting(each, setting.forgetting) for each in documents]
    mixers = list(recurrent_mixers(causal.model))
    states = [
        LayerState({0: torch.zeros(last.shape)}, {0: torch.zeros(increment.shape)[None]})
        for last, increment in zip(shape.last, shape.increment, strict=True)
    ]

    def products() -> None:
        for number, state in enumerate(states):
            found = state.recurrent[0][0]
            for each in documents:
                found = torch.baddbmm(each.increment[number], each.transition[number], found)

    ways: dict[str, Callable[[], object]] = {
        "products": products,
        "order": lambda: compose_layers(mixers, states, documents, both=False),
        "both": lambda: compose_layers(mixers, states, documents, both=True),
        "forgetful": lambda: compose_layers(mixers, states, forgetful, both=False),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for run in range(setting.runs + 1):
        for name, way in ways.items():
            taken = _seconds(way)
            if run:  # the first one warms up
                times[name].append(taken)
    return {name: statistics.median(each) for name, each in times.items()}


def _random_maps(shape: RecurrentStates) -> RecurrentStates:
    """Maps of a size at which states stay finite."""
    drawn = {name: torch.randn(each.shape) for name, each in shape.tensors().items()}
    drawn["transition"] /= shape.transition.shape[-1]
    drawn["decays"] = -drawn["decays"].abs()
    drawn["steps"] = drawn["steps"].sigmoid()
    return RecurrentStates(**drawn)


def _forgetting(maps: RecurrentStates, share: float) -> RecurrentStates:
    """The same maps, where the first heads of each layer forget the state before."""
    transition = maps.transition.clone()
    transition[:, : int(share * transition.shape[1])] = 0
    return replace(maps, transition=transition)


def bench_first_token(
    causal: CausalLM, setting: HybridSetting, progress: Progress
) -> dict[str, float]:
    """Return seconds to the first token over modules: composed, and by Hugging Face's prefill.

    The prompt over other modules comes first, so that both are warm.
    """
    rng = random.Random(1)
    count = setting.modules

    def draw(length: int) -> list[int]:
        return [rng.randrange(3, setting.sizes["vocab_size"]) for _ in range(length)]

    preamble, question = draw(setting.preamble_tokens), draw(setting.question_tokens)
    modules = [draw(setting.module_tokens) for _ in range(count)]
    progress(f"encoding {count} modules of {setting.module_tokens} tokens")
    [root] = encode(causal, [EncodeJob(preamble)])
    before = Segment(root, 0)
    found = [next(iter(encode(causal, [EncodeJob(m, root.length, before)]))) for m in modules]
    times: dict[Compose, list[float]] = {"order": [], "both": []}
    with LLMEngine(causal, EngineConfig(2**28)) as engine:
        for run in range(setting.runs + 1):
            for compose, taken in times.items():
                at, segments = root.length, [before]
                for number in rng.sample(range(count), count):
                    segments.append(Segment(found[number], at))
                    at += found[number].length
                end = at + len(question)
                placed = tuple(segments), tuple(question), tuple(range(at, end)), end, compose
                request = Request(Context(*placed), 1)
                spent = _seconds(partial(_answer, engine, request))
                if run:
                    taken.append(spent)
    progress("prefill by Hugging Face, once")
    prompt = [*preamble, *(token for each in modules for token in each), *question]
    prefill(causal.model, prompt[:64])
    medians = {str(name): statistics.median(each) for name, each in times.items()}
    return {"prefill": _seconds(lambda: prefill(causal.model, prompt)), **medians}


def _answer(engine: LLMEngine, request: Request) -> None:
    engine.submit_request(request).result()


def _seconds(call: Callable[[], object]) -> float:
    """Processor time of a call, in all threads of the process."""
    begin = time.process_time()
    call()
    return time.process_time() - begin


def bench_hybrid(setting: HybridSetting, progress: Progress) -> dict[str, Any]:
    """Return the figures, in seconds and as ratios of figures of this run."""
    progress("drawing the model")
    causal = wrap_causal(build_model(setting))
    progress(f"composing {setting.composed} modules")
    composition = bench_composition(causal, setting)
    first = bench_first_token(causal, setting, progress)
    return {
        "composition": composition,
        "composition_over_products": {
            way: composition[way] / composition["products"]
            for way in ("order", "both", "forgetful")
        },
        "first_token": first,
        "speedup": {way: first["prefill"] / first[way] for way in ("order", "both")},
        "map_bytes": causal.map_bytes,
        "bytes_per_token": causal.bytes_per_token,
        "threads": torch.get_num_threads(),
    }


def main(json_file: JsonFile = None, module_tokens: int = 1024, runs: int = 5) -> None:
    """Compose modules of the shape of Qwen3.5-0.8B, beside products alone and a prefill."""
    torch.set_num_threads(1)
    setting = HybridSetting(module_tokens=module_tokens, runs=runs)
    found = run_benchmark(lambda progress: bench_hybrid(setting, progress))
    result = {**found, "setting": asdict(setting), "machine": describe_machine()}
    composed, first = found["composition"], found["first_token"]
    table = plain_table("", "order", "both", "beside")
    table.add_row(
        f"{setting.composed} modules composed",
        f"{1000 * composed['order']:.0f} ms",
        f"{1000 * composed['both']:.0f} ms",
        f"products of one order alone {1000 * composed['products']:.0f} ms",
    )
    table.add_row(
        f"with {setting.forgetting:.0%} of the heads forgetting",
        f"{1000 * composed['forgetful']:.0f} ms",
        "",
        "",
    )
    table.add_row(
        f"first token over {setting.modules} x {setting.module_tokens}",
        f"{first['order']:.2f} s",
        f"{first['both']:.2f} s",
        f"prefill {first['prefill']:.1f} s",
    )
    print_figures([table], result, json_file)


if __name__ == "__main__":
    typer.run(main)
