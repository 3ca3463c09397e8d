"""The trace of `ragcache bench recurring` on a shape with random weights, and on vLLM.

    python benchmarks/recurring.py shape --shape 8b --device cuda --concurrent 16 --json FILE
    python benchmarks/recurring.py shape --shape 8b --device cuda --earlier 100 --json FILE
    python benchmarks/recurring.py shape --shape 1.5b --device cpu --concurrent 1 \
        --chunks 30 --earlier 3 --conversations 2 --json FILE
    python benchmarks/recurring.py vllm --model MODEL --json FILE
    python benchmarks/recurring.py vllm --model MODEL --blend --json FILE

`vllm` needs vLLM, and `--blend` LMCache: neither is a dependency of the project. It answers the
same prompts in the same order, and prints the same ratios: of LMCache's blending against vLLM's
prefix cache, as `shape` compares, or of the prefix cache against none. Answers have random weights'
text with `shape`, so that their share of equal ones says nothing there.
"""

from __future__ import annotations

import json
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

SEPARATOR = " # # "
"""The string between chunks that LMCache is set to."""
_MARK = "\ue000"

Conversations = Annotated[int, typer.Option(min=1, help="conversations.")]
Chunks = Annotated[int, typer.Option(min=5, help="chunks that are pasted by Zipf's law.")]
Earlier = Annotated[int, typer.Option(min=0, help="conversations that were answered before.")]
Sentences = Annotated[int, typer.Option(min=1, help="sentences of a chunk, 13 to 14 tokens each.")]


@app.command()
def shape(
    shape: Annotated[str, typer.Option(help="tiny, 0.5b, 1.5b, 7b or 8b.")] = "8b",
    device: DeviceOption = "cuda",
    conversations: Conversations = 100,
    chunks: Chunks = 1000,
    sentences: Sentences = 18,
    earlier: Earlier = 0,
    concurrent: Annotated[int, typer.Option(min=1, help="callers at once.")] = 16,
    mode: Annotated[
        str | None, typer.Option(help="Mode in which recurring texts are read.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Recurring texts against prefix caching, in one process on a model of a shape."""
    [found] = named_shapes(shape).values()
    setting = RecurringSetting(
        chunks=chunks,
        conversations=conversations,
        sentences=sentences,
        earlier=earlier,
        concurrent=concurrent,
        mode=mode,
    )
    place = None if device == "cpu" else device
    kind = {"shape": shape, "device": device}

    def keep(figures: dict[str, Any]) -> None:
        """Write the figures so far: what comes later may be cut off."""
        if json_file is not None:
            json_file.write_text(json.dumps(figures | kind, indent=2), encoding="utf-8")

    result = run_benchmark(
        lambda progress: bench_recurring(setting, shaped_model(found, place), progress, report=keep)
    )
    result |= kind
    names = ("read_share", "recurring_share", "ttft_speedup", "rate_ratio", "detect_ms_32k_100000")
    rows = [(name, f"{result[name]:.3f}") for name in names]
    low, high = result["ttft_speedup_interval"]
    rows.append(("ttft_speedup, 95 % interval", f"{low:.2f} to {high:.2f}"))
    for side, stages in result["stages"].items():
        parts = ", ".join(f"{name} {1000 * each:.2f}" for name, each in stages.items())
        rows.append((f"{side}, ms", parts))
    for side, rate in result["requests_per_second"].items():
        rows.append((f"{side}, requests a second", f"{rate:.1f}"))
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
    earlier: Earlier = 0,
    json_file: JsonFile = None,
) -> None:
    """vLLM over the same prompts: its prefix cache against none, or blending against the cache."""
    setting = RecurringSetting(
        chunks=chunks, conversations=conversations, sentences=sentences, earlier=earlier
    )
    prompts = _tokenize(model, list(draw_turns(setting)), SEPARATOR if blend else None)
    plain = _first_tokens(model, prompts, {"enable_prefix_caching": blend})
    options = _blending() if blend else {"enable_prefix_caching": True}
    reusing = _first_tokens(model, prompts, options)
    first = earlier * setting.turns or len(prompts) // 2  # of the turns in steady state
    ratios = [a / b for a, b in zip(plain[first:], reusing[first:], strict=True)]
    result = {
        "peer": "lmcache" if blend else "vllm",
        "ttft_speedup": statistics.median(ratios),
        "rate_ratio": sum(plain[first:]) / sum(reusing[first:]),
        "seconds": {"plain": plain, "reusing": reusing},
        "model": model,
        "setting": asdict(setting),
        "machine": describe_machine(),
    }
    rows = [(name, f"{result[name]:.2f}x") for name in ("ttft_speedup", "rate_ratio")]
    print_figures(
        [plain_table(f"{result['peer']}, {len(ratios)} turns", "", rows=rows)], result, json_file
    )


def _tokenize(model: str, turns: Sequence[Turn], separator: str | None) -> list[list[int]]:
    """Return the tokens of each prompt, with LMCache's separator around each chunk.

    Clients write no separators. LMCache finds chunks by them alone, so it gets them here.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    between = tokenizer.encode(separator)[1:] if separator else []  # LMCache drops the first one
    prompts = []
    for turn in turns:
        *history, last = turn.messages
        content = str(last["content"])
        for chunk in turn.chunks if separator else ():
            content = content.replace(chunk, f"{_MARK}{chunk}{_MARK}")
        chat = [*history, {**last, "content": content}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        first, *others = text.split(_MARK)
        prompt = tokenizer.encode(first, add_special_tokens=False)
        for each in others:
            prompt += between + tokenizer.encode(each, add_special_tokens=False)
        prompts.append(prompt)
    return prompts


def _first_tokens(model: str, prompts: Sequence[list[int]], options: dict[str, Any]) -> list[float]:
    """Return the seconds of each prompt's answer of one token."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    engine = LLM(model, **options)
    one = SamplingParams(temperature=0.0, max_tokens=1)
    seconds = []
    for prompt in prompts:
        begin = time.perf_counter()
        engine.generate([TokensPrompt(prompt_token_ids=prompt)], one, use_tqdm=False)
        seconds.append(time.perf_counter() - begin)
    del engine
    return seconds


def _blending() -> dict[str, Any]:
    """Return vLLM's options for LMCache with blending, as LMCache's own example sets them."""
    from vllm.config import KVTransferConfig

    os.environ |= {
        "LMCACHE_CHUNK_SIZE": "256",
        "LMCACHE_ENABLE_BLENDING": "True",
        "LMCACHE_BLEND_SPECIAL_STR": SEPARATOR,
        "LMCACHE_USE_LAYERWISE": "True",
        "LMCACHE_BLEND_CHECK_LAYERS": "1",
        "LMCACHE_BLEND_RECOMPUTE_RATIOS": "0.15",
        "LMCACHE_LOCAL_CPU": "True",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "40",
    }
    connector = KVTransferConfig(kv_connector="LMCacheConnectorV1", kv_role="kv_both")
    return {
        "kv_transfer_config": connector,
        "enable_prefix_caching": False,
        "enforce_eager": True,
    }


if __name__ == "__main__":
    app()
