"""The trace of `ragcache bench recurring` on a shape with random weights, and on vLLM.

    python benchmarks/recurring.py shape --shape 8b --device cuda --concurrent 16 --json FILE
    python benchmarks/recurring.py shape --shape 1.5b --device cpu --concurrent 1 \
        --conversations 40 --chunks 400 --json FILE
    python benchmarks/recurring.py vllm --model MODEL --json FILE
    python benchmarks/recurring.py vllm --model MODEL --blend --json FILE

`vllm` needs vLLM, and `--blend` LMCache: neither is a dependency of the project. It answers the
same prompts in the same order, with vLLM's prefix cache and without it, or with LMCache's blending,
and prints the same ratios. Answers have random weights' text with `shape`, so that their share of
equal ones says nothing there.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from harness import (
    DeviceOption,
    JsonFile,
    describe_machine,
    named_shapes,
    plain_table,
    print_figures,
    run_benchmark,
    shaped_model,
)

from ragcache.bench.recurring import bench_recurring
from ragcache.bench.recurring_turns import RecurringSetting, Turn, draw_turns

app = typer.Typer(add_completion=False, help=__doc__)

Conversations = Annotated[int, typer.Option(min=1, help="conversations.")]
Chunks = Annotated[int, typer.Option(min=5, help="chunks that are pasted by Zipf's law.")]
Sentences = Annotated[int, typer.Option(min=1, help="sentences of a chunk, of 14 tokens.")]


@app.command()
def shape(
    shape: Annotated[str, typer.Option(help="tiny, 0.5b, 1.5b, 7b or 8b.")] = "8b",
    device: DeviceOption = "cuda",
    conversations: Conversations = 100,
    chunks: Chunks = 1000,
    sentences: Sentences = 18,
    concurrent: Annotated[int, typer.Option(min=1, help="prompts at once.")] = 16,
    json_file: JsonFile = None,
) -> None:
    """Recurring texts against prefix caching, in one process on a model of a shape."""
    [found] = named_shapes(shape).values()
    setting = RecurringSetting(
        chunks=chunks, conversations=conversations, sentences=sentences, concurrent=concurrent
    )
    place = None if device == "cpu" else device
    result = run_benchmark(
        lambda progress: bench_recurring(setting, shaped_model(found, place), progress)
    )
    result |= {"shape": shape, "device": device}
    names = ("read_share", "recurring_share", "ttft_speedup", "rate_ratio", "detect_ms_32k_100000")
    rows = [(name, f"{result[name]:.3f}") for name in names]
    for new, each in result["by_new_chunks"].items():
        rows.append((f"first token, {new} of 5 chunks new", f"{each['ttft_speedup']:.3f}"))
    print_figures(
        [plain_table(f"{result['turns']} turns of {shape}", "", rows=rows)], result, json_file
    )


@app.command()
def vllm(
    model: Annotated[str, typer.Option(help="Folder or name of a model.")],
    blend: Annotated[
        bool, typer.Option(help="LMCache's blending beside the prefix cache.")
    ] = False,
    conversations: Conversations = 100,
    chunks: Chunks = 1000,
    sentences: Sentences = 18,
    json_file: JsonFile = None,
) -> None:
    """vLLM over the same prompts: its prefix cache, or LMCache's blending, against neither."""
    setting = RecurringSetting(chunks=chunks, conversations=conversations, sentences=sentences)
    turns = list(draw_turns(setting))
    plain = _first_tokens(model, turns, enable_prefix_caching=False)
    reusing = _first_tokens(model, turns, **(_blending() if blend else {}))
    half = len(turns) // 2
    ratios = [a / b for a, b in zip(plain[half:], reusing[half:], strict=True)]
    result = {
        "peer": "lmcache" if blend else "vllm",
        "ttft_speedup": statistics.median(ratios),
        "rate_ratio": sum(plain[half:]) / sum(reusing[half:]),
        "seconds": {"plain": plain, "reusing": reusing},
        "model": model,
        "setting": asdict(setting),
        "machine": describe_machine(),
    }
    rows = [(name, f"{result[name]:.2f}x") for name in ("ttft_speedup", "rate_ratio")]
    print_figures(
        [plain_table(f"{result['peer']}, {half} turns", "", rows=rows)], result, json_file
    )


def _first_tokens(model: str, turns: Sequence[Turn], **options: Any) -> list[float]:
    """Return the seconds of each prompt's answer of one token."""
    from vllm import LLM, SamplingParams

    engine = LLM(model, **({"enable_prefix_caching": True} | options))
    one = SamplingParams(temperature=0.0, max_tokens=1)
    seconds = []
    for turn in turns:
        begin = time.perf_counter()
        engine.chat(turn.messages, one, use_tqdm=False)
        seconds.append(time.perf_counter() - begin)
    del engine
    return seconds


def _blending() -> dict[str, Any]:
    """Return vLLM's options for LMCache with blending, as its documentation sets them.

    LMCache finds chunks by a separator in the prompt, which a client would have to write. Its
    configuration takes the end of the templates' chunks.
    """
    from vllm.config import KVTransferConfig

    os.environ |= {
        "LMCACHE_CHUNK_SIZE": "256",
        "LMCACHE_ENABLE_BLENDING": "True",
        "LMCACHE_BLEND_SPECIAL_STR": "\n\n",
        "LMCACHE_USE_LAYERWISE": "True",
        "LMCACHE_LOCAL_CPU": "True",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "40",
    }
    connector = KVTransferConfig(kv_connector="LMCacheConnectorV1", kv_role="kv_both")
    return {"kv_transfer_config": connector, "enable_prefix_caching": False}


if __name__ == "__main__":
    app()
