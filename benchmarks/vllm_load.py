"""The requests of `ragcache bench load`, sent to vLLM with its prefix cache.

    pip install vllm
    PYTHONPATH=. python benchmarks/vllm_load.py --order random --json FILE
    PYTHONPATH=. python benchmarks/vllm_load.py --order sorted

A model of the 8B's shape has random weights, and all else is vLLM's default. The prefix cache is
filled by requests of the same distribution, which are not counted. Runs in vLLM's own environment,
without the dependencies of ragcache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ragcache.bench.load_workload import (
    Arriving,
    LoadResult,
    LoadSetting,
    draw_tokens,
    figures,
    is_saturated,
)

VOCABULARY = 128256

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32768,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""The shape `8b` of `ragcache.bench.harness`."""

Generate = Callable[[Sequence[int], int, str], AsyncIterator[int]]
"""Answers a prompt with so many tokens, and yields how many there are so far. Takes a name."""


def prompt(setting: LoadSetting, arriving: Arriving, vocabulary: int) -> list[int]:
    """The whole prompt of a request: preamble, documents, question."""
    tokens = draw_tokens("preamble", setting.preamble, vocabulary)
    for number in arriving.documents:
        tokens += setting.document(number, vocabulary)
    return tokens + arriving.question(setting.question, vocabulary)


async def run_load(
    generate: Generate, setting: LoadSetting, rate: float, vocabulary: int
) -> dict[str, Any]:
    """Send the requests of one rate, wait for their answers, and return the figures."""
    arrivals = setting.arrivals(rate)
    prompts = [prompt(setting, each, vocabulary) for each in arrivals]
    served = [LoadResult(each.at) for each in arrivals]
    begin = time.perf_counter()

    async def answer(number: int) -> None:
        result = served[number]
        try:
            async for count in generate(prompts[number], setting.new_tokens, f"{rate} {number}"):
                now = time.perf_counter() - begin
                result.tokens += [now] * (count - len(result.tokens))
        except Exception as error:  # the other requests go on; the figure shows it
            result.error = repr(error)

    tasks = []
    for number, arriving in enumerate(arrivals):
        await asyncio.sleep(max(0.0, begin + arriving.at - time.perf_counter()))
        tasks.append(asyncio.create_task(answer(number)))
    await asyncio.gather(*tasks)
    return figures(setting, rate, served)


async def bench(
    generate: Generate, setting: LoadSetting, rates: Sequence[float], vocabulary: int, fill: int
) -> list[dict[str, Any]]:
    """Fill the cache with `fill` requests, then run rising rates until saturation."""
    filling = replace(setting, seed=setting.seed + 1).arrivals(fill / setting.seconds)
    for number, arriving in enumerate(filling):
        async for _ in generate(prompt(setting, arriving, vocabulary), 1, f"fill {number}"):
            pass
    runs = []
    for rate in rates:
        runs.append(await run_load(generate, setting, rate, vocabulary))
        print(table(runs[-1:]), file=sys.stderr, flush=True)
        if is_saturated(runs[-1]):
            break
    return runs


def open_vllm(folder: Path) -> Generate:
    """vLLM's engine over random weights."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    arguments = AsyncEngineArgs(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
    )
    engine = AsyncLLM.from_engine_args(arguments)

    async def generate(tokens: Sequence[int], most: int, name: str) -> AsyncIterator[int]:
        params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True, detokenize=False)
        asked = {"prompt_token_ids": list(tokens)}
        async for output in engine.generate(asked, params, request_id=name):
            yield len(output.outputs[0].token_ids)

    return generate


def table(runs: Sequence[dict[str, Any]]) -> str:
    """The runs as lines of text."""
    lines = [
        f"{'a second':>8} {'answered':>8} {'refused':>7} {'TTFT p50':>9} {'p99':>8} "
        f"{'gap p50':>8} {'p99':>8} {'longest':>8}"
    ]
    for run in runs:
        first, gap = run["ttft_ms"], run["gap_ms"]
        nothing = float("nan")
        numbers = [first.get("p50", nothing), first.get("p99", nothing)]
        numbers += [gap.get(name, nothing) for name in ("p50", "p99", "longest")]
        lines.append(
            f"{run['rate']:8.1f} {run['answered']:8.1f} {run['refused']:7d} "
            + "{:9.1f} {:8.1f} {:8.1f} {:8.1f} {:8.1f}".format(*numbers)
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the load and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--order", default="random", choices=("random", "sorted"))
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--rates", default="2,4,5,6,8,10", help="requests a second, rising")
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals at each rate")
    parser.add_argument("--fill", type=int, default=100, help="requests that fill the cache")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything here")
    options = parser.parse_args(arguments)
    setting = LoadSetting(documents=options.documents, seconds=options.seconds, order=options.order)
    rates = [float(rate) for rate in options.rates.split(",")]
    with tempfile.TemporaryDirectory(prefix="vllm-load-") as folder:

        async def run() -> list[dict[str, Any]]:
            generate = open_vllm(Path(folder))
            return await bench(generate, setting, rates, VOCABULARY, options.fill)

        runs = asyncio.run(run())
    print(table(runs))
    if options.json is not None:
        document = {"setting": asdict(setting), "runs": runs}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
