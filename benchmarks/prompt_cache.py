"""Prompt Cache's use cases, and the time to the first token against the length of the prompt.

python benchmarks/prompt_cache.py --json FILE [--shape 7b --device cuda]
"""

from __future__ import annotations

import random
import runpy
import statistics
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from harness import BenchDTypeOption, DeviceOption, JsonFile, Progress, run_benchmark
from papers import (
    ModelSetting,
    PaperComparison,
    ShapeOption,
    encode_one,
    engine_config,
    print_comparisons,
    result_of,
)

from ragcache import RagCache
from ragcache.engine import LLMEngine, Request, assemble_context
from ragcache.models import CausalLM, LoadedModel, load_model

EXAMPLES = Path(__file__).parents[1] / "examples" / "pml"
USE_CASES = {
    "code-generation": "4x sooner",
    "personalization": "sooner; the text gives no number (figure 7)",
    "trip-plan": "sooner; the text gives no number (figure 8)",
}
"""The schemas and prompts of the examples, and what the paper says of its own (§5.6)."""


@dataclass(frozen=True, slots=True)
class LengthSetting:
    """lengths: cached tokens of a prompt, ascending; question: its own."""

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096)
    question: int = 16
    runs: int = 3


def bench_lengths(
    causal: CausalLM, setting: LengthSetting, progress: Progress = lambda _: None
) -> tuple[list[dict[str, float]], PaperComparison]:
    """Median seconds to the first token, ordinary and over states in memory, by length (§5.4)."""
    rng = random.Random(5)
    rows = []
    for length in setting.lengths:
        progress(f"{length} tokens")
        tokens, question = (
            [rng.randrange(causal.vocabulary) for _ in range(count)]
            for count in (length, setting.question)
        )
        states = encode_one(causal, tokens)
        place = partial(assemble_context, window=causal.window, max_tokens=1)
        ways = {
            "ordinary": Request(place([], [*tokens, *question]), 1),
            "cached": Request(place([states], question), 1),
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        with LLMEngine(causal, engine_config(causal, ways.values())) as engine:
            for number in range(setting.runs + 1):
                for way, request in ways.items():
                    done = engine.submit_request(request).result()
                    if number:  # the first pair warms up
                        times[way].append(done.first_token_at - done.submitted_at)
        medians = {way: statistics.median(seconds) for way, seconds in times.items()}
        rows.append({"tokens": length, **medians, "ratio": medians["ordinary"] / medians["cached"]})
    first, last = rows[0], rows[-1]
    growth = [last[way] / first[way] for way in ("ordinary", "cached")]
    comparison = PaperComparison(
        "first token against length", "10x sooner at 3K tokens: 90 ms against 900 ms",
        "Llama2 7B, RTX 4090, modules in CPU memory (§5.4, figure 5)", last["ratio"],
        f"{last['ratio']:.1f}x sooner at {last['tokens']:,} tokens, {first['ratio']:.1f}x at "
        f"{first['tokens']:,}",
        f"over {last['tokens'] / first['tokens']:.0f} times the tokens the ordinary time grows "
        f"{growth[0]:.1f}x, the cached one {growth[1]:.1f}x",
    )  # fmt: skip
    return rows, comparison


def bench_use_cases(
    model: LoadedModel, runs: int, progress: Progress = lambda _: None
) -> list[PaperComparison]:
    """The first token of each use case's prompts, cached over ordinary, in modules of PML."""
    run_folder = runpy.run_path(str(EXAMPLES / "run.py"))["run_folder"]
    comparisons = []
    with (
        tempfile.TemporaryDirectory() as state,
        RagCache.open(state, model, embedding="none", max_tokens=4, force_modes=True) as rag,
    ):
        for name, paper in USE_CASES.items():
            progress(name)
            rows = run_folder(rag, EXAMPLES / name, runs)
            ratio = statistics.median(row.ratio for row in rows)
            best = max(rows, key=lambda row: row.ratio)
            sizes = ", ".join(f"{row.cached_tokens:,} of {row.tokens:,}" for row in rows)
            comparisons.append(
                PaperComparison(
                    name,
                    paper,
                    "Llama2 7B, modules in GPU memory (§5.6)",
                    ratio,
                    f"{ratio:.1f}x sooner at the median, {best.ratio:.1f}x for {best.prompt}",
                    f"tokens cached: {sizes}",
                )
            )
    return comparisons


def bench_prompt_cache(
    model: ModelSetting | None = None, setting: LengthSetting | None = None,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Both workloads."""
    model, setting = model or ModelSetting(), setting or LengthSetting()
    progress("building the model")
    causal = model.build()
    loaded = LoadedModel("shape", causal, load_model().tokenizer)
    cases = bench_use_cases(loaded, setting.runs, progress)
    rows, lengths = bench_lengths(causal, setting, progress)
    return result_of(
        [*cases, lengths], causal, model=asdict(model), setting=asdict(setting), by_length=rows
    )


def main(
    shape: ShapeOption = "small", device: DeviceOption = "cpu", dtype: BenchDTypeOption = "auto",
    lengths: Annotated[str, typer.Option(help="Cached tokens.")] = "512,1024,2048,4096",
    runs: Annotated[int, typer.Option(min=1)] = 3, json_file: JsonFile = None,
) -> None:  # fmt: skip
    """Use cases, and the first token against the length, beside Prompt Cache's figures."""
    setting = LengthSetting(tuple(int(each) for each in lengths.split(",")), runs=runs)
    model = ModelSetting(shape, device, dtype)
    result = run_benchmark(lambda progress: bench_prompt_cache(model, setting, progress))
    print_comparisons(result, json_file)


if __name__ == "__main__":
    typer.run(main)
