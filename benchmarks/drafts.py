"""Drafts of answers: tokens a second with them, as a multiple of the same engine without them.

    python benchmarks/drafts.py --shape 0.5b --device cpu --rounds 3
    python benchmarks/drafts.py --shape 8b --device cuda --json FILE --check

The answers of the model are known: its embeddings drown what its layers add, and its head makes of
each token the next number. One document therefore can hold the answer, except that it differs
after each run of so many tokens. A run of 0 tokens stands for answers that quote nothing; a run of
4 tokens misleads, since a guess takes 3.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from ragcache.bench.harness import SHAPES, LlamaShape, draw_model
from ragcache.engine import (
    EngineConfig,
    LLMEngine,
    Request,
    Segment,
    assemble_context,
)
from ragcache.machine import describe_machine
from ragcache.models import CausalLM, wrap_causal
from ragcache.states import KVStates

DRAFT_SHAPES = dict(SHAPES) | {
    "0.5b": LlamaShape(24, 896, 14, 2, 4864, 151936, 32768, 1e6, tied=False),
    "tiny": LlamaShape(2, 64, 4, 2, 96, 4096, 8192, tied=False),
}
LOUD = 500.0
"""Factor of the embeddings, so that no layer changes what the head reads."""

LEAST_QUOTING, LEAST_OTHER = 1.8, 0.97
"""Limits of the ratio: of answers in runs of 64 tokens, and of all others."""


@dataclass(frozen=True, slots=True)
class DraftSetting:
    """Prompts and answers."""

    documents: int = 4
    document_tokens: int = 1024
    question: int = 16
    new_tokens: int = 128
    draft_tokens: int = 8
    rounds: int = 5


class CountingModel:
    """A model that answers each token with the next number, and its documents."""

    def __init__(self, shape: LlamaShape, setting: DraftSetting, device: str) -> None:
        self.shape, self.setting, self.device = shape, setting, device
        model = draw_model(shape, device)
        with torch.no_grad():
            embeddings = model.get_input_embeddings().weight.mul_(LOUD)
            model.lm_head.weight.copy_(embeddings.roll(1, 0) / LOUD)
        self.causal: CausalLM = wrap_causal(model)
        self.causal.fingerprint = "random weights"
        size = (2, shape.num_layers, shape.num_kv_heads, setting.document_tokens, shape.head_dim)
        self._states = []
        for _ in range(setting.documents):
            keys, values = torch.empty(size, dtype=torch.bfloat16, device=device).normal_()
            self._states.append(KVStates(keys, values, 0))
        if device != "cpu":
            torch.cuda.synchronize()

    def request(self, number: int, run: int) -> Request:
        """A request whose answer stands in a document, in runs of so many tokens."""
        setting, half = self.setting, self.shape.vocabulary // 2
        first = 1 + number * (setting.new_tokens + setting.question)
        question = [first + at for at in range(setting.question)]
        answer = [question[-1] + 1 + at for at in range(setting.new_tokens)]
        noise = cycle(range(half, self.shape.vocabulary))
        told = [
            next(noise) if not run or at % run == run - 1 else token
            for at, token in enumerate(answer)
        ]
        texts = [
            [next(noise) for _ in range(setting.document_tokens)] for _ in range(setting.documents)
        ]
        texts[0][: len(told) + 3] = [*(question[-3:] if run else told[:3]), *told]
        context = assemble_context(
            self._states, question, window=self.causal.window, max_tokens=setting.new_tokens
        )
        segments = tuple(
            Segment(each.states, each.start, token_ids=text)
            for each, text in zip(context.segments, texts, strict=True)
        )
        return Request(replace(context, segments=segments), setting.new_tokens)

    def engine(self, draft_tokens: int, requests: int) -> LLMEngine:
        """An engine with room for so many requests."""
        setting = self.setting
        blocks = requests * (3 + (setting.question + setting.new_tokens) // 64)
        config = EngineConfig.for_device(
            torch.device(self.device),
            draft_tokens=draft_tokens,
            draft_requests=requests,
            pool_bytes=blocks * 64 * self.causal.computed_bytes_per_token,
        )
        return LLMEngine(self.causal, config)


def time_answers(engine: LLMEngine, requests: Sequence[Request]) -> float:
    """Seconds until all requests are answered. Their answers must be known."""
    begin = time.perf_counter()
    handles = [engine.submit_request(request) for request in requests]
    outputs = [handle.result() for handle in handles]
    seconds = time.perf_counter() - begin
    for request, output in zip(requests, outputs, strict=True):
        first = request.context.token_ids[-1] + 1
        if list(output.token_ids) != list(range(first, first + request.max_tokens)):
            raise RuntimeError(f"an answer is wrong: {output.token_ids}")
    return seconds


def bench_drafts(
    model: CountingModel, counts: Sequence[int], runs: Sequence[int]
) -> list[dict[str, Any]]:
    """Time each number of requests and length of runs, with and without drafts in turn."""
    rows = []
    engines = [model.engine(each, max(counts)) for each in (0, model.setting.draft_tokens)]
    try:
        for count in counts:
            for run in runs:
                requests = [model.request(number, run) for number in range(count)]
                for engine in engines * (1 if model.device == "cpu" else 3):  # captures graphs
                    time_answers(engine, requests)
                plain, drafting = list[float](), list[float]()
                stats = engines[1].stats
                before = stats.drafted_tokens, stats.accepted_tokens
                for number in range(model.setting.rounds):
                    pairs = [(engines[0], plain), (engines[1], drafting)]
                    for engine, times in pairs if number % 2 else reversed(pairs):
                        times.append(time_answers(engine, requests))
                tokens, rounds = count * model.setting.new_tokens, model.setting.rounds
                rows.append(
                    {
                        "requests": count,
                        "run": run,
                        "tokens_s": tokens / statistics.median(drafting),
                        "plain_tokens_s": tokens / statistics.median(plain),
                        "ratio": statistics.median(plain) / statistics.median(drafting),
                        "drafted": (stats.drafted_tokens - before[0]) / rounds / tokens,
                        "accepted": (stats.accepted_tokens - before[1]) / rounds / tokens,
                        "seconds": {"plain": plain, "drafting": drafting},
                    }
                )
    finally:
        for engine in engines:
            engine.close()
    return rows


def missed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The limits that rows miss, in words."""
    found = []
    for row in rows:
        least = LEAST_QUOTING if row["run"] >= 64 else LEAST_OTHER
        if row["ratio"] < least:
            where = f"{row['requests']} requests in runs of {row['run']}"
            found.append(f"{where}: {row['ratio']:.2f}, must be at least {least}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a row for each number of requests and length of runs. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="8b", choices=DRAFT_SHAPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--requests", default="1,4,8")
    parser.add_argument("--runs", default="0,4,8,16,64")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything here")
    parser.add_argument("--check", action="store_true", help="exit 1 where a limit is missed")
    options = parser.parse_args(arguments)
    setting = DraftSetting(new_tokens=options.new_tokens, rounds=options.rounds)
    counts, runs = ([int(n) for n in text.split(",")] for text in (options.requests, options.runs))
    model = CountingModel(DRAFT_SHAPES[options.shape], setting, options.device)
    rows = bench_drafts(model, counts, runs)
    print("requests  run  tokens/s  without  ratio  drafted  accepted")
    for row in rows:
        print(
            f"{row['requests']:8} {row['run']:4} {row['tokens_s']:9.1f}"
            f" {row['plain_tokens_s']:8.1f} {row['ratio']:6.2f} {row['drafted']:8.2f}"
            f" {row['accepted']:9.2f}"
        )
    for each in missed(rows):
        print(f"missed: {each}")
    if options.json is not None:
        document = {
            "command": " ".join(["python", "benchmarks/drafts.py", *sys.argv[1:]]),
            "machine": describe_machine(),
            "shape": asdict(model.shape),
            "setting": asdict(setting),
            "rows": rows,
            "missed": missed(rows),
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(options.check and bool(missed(rows)))


if __name__ == "__main__":
    sys.exit(main())
