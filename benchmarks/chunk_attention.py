"""ChunkAttention's chatbot: a plugin prompt of 1,766 tokens that nobody declares as shared.

python benchmarks/chunk_attention.py --json FILE [--shape 7b --device cuda]
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import Annotated, Any

import typer
from harness import BenchDTypeOption, DeviceOption, JsonFile, Progress, run_benchmark
from papers import (
    ModelSetting,
    PaperComparison,
    ShapeOption,
    engine_config,
    print_comparisons,
    result_of,
)

from ragcache.engine import LLMEngine, Request, assemble_context
from ragcache.models import CausalLM, LoadedModel, load_model

PLUGINS = {
    "timetable": ("station_from", "station_to", "departure", "passengers", "bicycles"),
    "library": ("title", "author", "year", "language", "branch", "reserve_for"),
    "weather": ("place", "day", "hours_ahead", "units"),
    "kitchen": ("ingredients", "servings", "minutes", "allergies", "diet"),
    "ledger": ("account", "from_date", "to_date", "currency", "category"),
    "concerts": ("town", "composer", "ensemble", "weekday", "price_limit"),
}
"""The functions of six plugins and their parameters (the paper's prompt is in its appendix A)."""


@dataclass(frozen=True, slots=True)
class PluginSetting:
    """prompt: tokens of the shared prompt. requests: as a Poisson process, `rate` of them in the
    time that a lone request takes, all at once where it is infinite."""

    prompt: int = 1766
    requests: int = 16
    question: int = 48
    new_tokens: int = 32
    rate: float = 4.0
    runs: int = 2


@dataclass(frozen=True, slots=True)
class Served:
    """The mean latency of a token in seconds, and the most blocks of the pool that were used."""

    normalized: float
    blocks: int


def plugin_prompt(model: LoadedModel, tokens: int) -> list[int]:
    """Descriptions of the plugins' functions, over and over with other words, cut to so many
    tokens."""
    lines = ["You may call the functions below. Answer in the user's language."]
    ids: list[int] = []
    for number, (name, parameters) in enumerate(cycle(PLUGINS.items())):
        lines.append(f"\n## {name}\nfunction {name}_{number}: looks up what the user asks for.")
        lines += [
            f"  {each}: string or null; leave it out where the user did not say the {each}."
            for each in parameters
        ]
        ids = model.encode_untrusted("\n".join(lines))
        if len(ids) >= tokens:
            break
    return ids[:tokens]


def bench_chunk_attention(
    model: ModelSetting | None = None, setting: PluginSetting | None = None,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """The latency of a token, and the memory of private states, where the engine finds that all
    prompts begin alike (requests of one tenant) and where it may not."""
    model, setting = model or ModelSetting(), setting or PluginSetting()
    progress("building the model")
    causal = model.build()
    shared = plugin_prompt(load_model(), setting.prompt)
    rng = random.Random(3)
    prompts = [
        [*shared, *(rng.randrange(causal.vocabulary) for _ in range(setting.question))]
        for _ in range(setting.requests)
    ]
    ways: dict[str, list[Served]] = {"found": [], "alone": []}
    for number in range(setting.runs):
        for way, served in ways.items():
            progress(f"{way}, run {number + 1} of {setting.runs}")
            tenant = "chatbot" if way == "found" else None
            served.append(_serve(causal, prompts, setting, tenant))
    found, alone = (
        Served(statistics.median(s.normalized for s in each), each[0].blocks)
        for each in ways.values()
    )
    ratio, saved = alone.normalized / found.normalized, 1 - found.blocks / alone.blocks
    here = (
        f"{len(shared):,} shared tokens, {setting.question} of a question, {setting.new_tokens} of "
        f"an answer, {setting.requests} requests, {setting.rate:.0f} in the time of a lone one"
    )
    comparisons = [
        PaperComparison(
            "latency of a token", "1.42x sooner than vLLM: 15.20 against 21.61 ms (2,048 shared)",
            "Open Llama2 7B, A100-80GB, Poisson arrivals, at most 32 at once (§4.2, table 4)",
            ratio,
            f"{ratio:.2f}x sooner: {1000 * found.normalized:.1f} against "
            f"{1000 * alone.normalized:.1f} ms", here,
        ),
        PaperComparison(
            "memory of states", "84 % less: 3.40 against 21.09 GB (2,048 shared)",
            "as above", saved,
            f"{saved:.0%} less: {found.blocks} against {alone.blocks} blocks of 64 tokens", here,
        ),
    ]  # fmt: skip
    return result_of(comparisons, causal, model=asdict(model), plugins=asdict(setting))


def _serve(
    causal: CausalLM, prompts: Sequence[Sequence[int]], setting: PluginSetting, tenant: str | None
) -> Served:
    """All requests as a Poisson process, through an engine that has served the first before: its
    time is that of a lone request, and where the tenant's prompts may be shared, it is known."""
    new, window = setting.new_tokens, causal.window
    requests = [
        Request(assemble_context([], each, window=window, max_tokens=new), new, tenant=tenant)
        for each in prompts
    ]
    rng = random.Random(4)
    with LLMEngine(causal, engine_config(causal, requests)) as engine:
        begin = time.perf_counter()
        engine.submit_request(requests[0]).result()
        gap = (time.perf_counter() - begin) / setting.rate
        handles, due = [], time.perf_counter()
        for request in requests:
            due += gap * rng.expovariate(1.0)
            time.sleep(max(0.0, due - time.perf_counter()))
            handles.append(engine.submit_request(request))
        done = [handle.result() for handle in handles]
        used = engine.core.pool.peak_count
    latencies = [(each.finished_at - each.submitted_at) / len(each.token_ids) for each in done]
    return Served(statistics.mean(latencies), used)


def main(
    shape: ShapeOption = "small", device: DeviceOption = "cpu", dtype: BenchDTypeOption = "auto",
    requests: Annotated[int, typer.Option(min=2)] = 16,
    runs: Annotated[int, typer.Option(min=1)] = 2, json_file: JsonFile = None,
) -> None:  # fmt: skip
    """A plugin prompt that all requests begin with, beside ChunkAttention's figures."""
    setting = PluginSetting(requests=requests, runs=runs)
    model = ModelSetting(shape, device, dtype)
    result = run_benchmark(lambda progress: bench_chunk_attention(model, setting, progress))
    print_comparisons(result, json_file)


if __name__ == "__main__":
    typer.run(main)
