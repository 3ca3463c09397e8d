"""Measures through the engine what composition costs the hybrid toy.

    python3 training/hybrid_evaluate.py --contexts training/build/hybrid --model training/build/hybrid-exact

Every question is a request to the engine, which scores its answer: behind a context that was read in a
row (`exact`), and behind modules that were each read alone and compose in `order` or in `both` orders,
as in mode `rooted`. An answer is right if each of its tokens is the first choice, so that greedy
decoding would write it. KL is the mean over its tokens of the divergence from `exact`, in nats, as the
gate takes it: over the 20 likeliest tokens of both, and all others as one.

Prints a row for each set, number of modules, way and place: over all questions, and over those about
the first and the last module. A mark of a context is the mean over its questions; intervals are 95 %,
from resampled contexts, and those of `cost` are of paired differences from `exact`.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from hybrid_model import Mode
from hybrid_train import DEVICE, evaluation_arrays
from ragcache.engine import (
    Context,
    EncodeJob,
    EngineConfig,
    LLMEngine,
    Request,
    SampledToken,
    SamplingParams,
    Segment,
)
from ragcache.evaluation import bootstrap_interval, paired_bootstrap
from ragcache.models import wrap_causal
from ragcache.pipeline.gate_sizes import LIKELIEST, divergence_of
from ragcache.states import KVStates
from samples import PREAMBLE

WAYS: tuple[Mode, ...] = ("exact", "order", "both")
Arrays = dict[str, np.ndarray]
Scores = tuple[SampledToken, ...]


class Asked(NamedTuple):
    """A question about a module, and its answer."""

    module: int
    question: list[int]
    answer: list[int]


def questions_of(contexts: Arrays, number: int) -> list[Asked]:
    """The questions of one context."""
    rows = (contexts[name][number] for name in ("questions", "kinds", "asked"))
    return [
        Asked(int(module), row[kind == 2].tolist(), row[kind == 3].tolist())
        for row, kind, module in zip(*rows, strict=True)
        if module >= 0
    ]


def segments_of(engine: LLMEngine, root: KVStates, modules: Sequence[np.ndarray]) -> list[Segment]:
    """The states of modules, each read behind the preamble, in a row."""
    before = Segment(root, 0, "root")
    jobs = [EncodeJob(module.tolist(), root.length, before) for module in modules]
    segments, at = [before], root.length
    for states in engine.encode(jobs):
        segments.append(Segment(states, at))
        at += states.length
    return segments


def scores(engine: LLMEngine, segments: list[Segment], asked: list[Asked], way: Mode) -> list[Scores]:
    """The likeliest tokens at each place of each answer."""
    handles, begin = [], segments[-1].end
    for each in asked:
        tokens = (*each.question, *each.answer)
        end = begin + len(tokens)
        compose = "both" if way == "both" else "order"
        context = Context(tuple(segments), tokens, tuple(range(begin, end)), end, compose)
        sampling = SamplingParams(logprobs=LIKELIEST)
        request = Request(context, 1, sampling=sampling, prompt_logprobs=len(each.answer))
        handles.append(engine.submit_request(request))
    return [handle.result().prompt_logprobs for handle in handles]


def marks_of(engine: LLMEngine, root: KVStates, contexts: Arrays, number: int) -> Iterator[dict[str, Any]]:
    """Whether each answer of a context is right, and its divergence from `exact`, by way."""
    asked = questions_of(contexts, number)
    modules = contexts["modules"][number]
    whole, apart = (segments_of(engine, root, each) for each in ([modules.flatten()], modules))
    found: dict[Mode, list[Scores]] = {}
    for way in WAYS if len(modules) > 1 else WAYS[:2]:
        found[way] = scores(engine, whole if way == "exact" else apart, asked, way)
        for each, exact, own in zip(asked, found["exact"], found[way], strict=True):
            right = all(token.alternatives[0][0] == token.token for token in own)
            yield {"context": number, "module": each.module, "way": way,
                   "right": float(right), "kl": divergence_of(exact, own)}  # fmt: skip


def summary(marks: list[dict[str, Any]], places: dict[str, set[int]]) -> Iterator[dict[str, Any]]:
    """A row for each way and place."""
    for place, modules in places.items():
        exact: list[float] = []
        for way in dict.fromkeys(each["way"] for each in marks):
            chosen = [each for each in marks if each["way"] == way and each["module"] in modules]
            right, kl = (_by_context(chosen, name) for name in ("right", "kl"))
            exact = exact or right
            row: dict[str, Any] = {"way": way, "about": place, "questions": len(chosen),
                                   "contexts": len(right), "match": fmean(right)}  # fmt: skip
            if way != "exact":
                row["cost"] = fmean(exact) - fmean(right)
                row["cost_interval"] = asdict(paired_bootstrap(exact, right)[0])
                row["kl"], row["kl_interval"] = fmean(kl), asdict(bootstrap_interval(kl))
            yield row


def _by_context(marks: list[dict[str, Any]], name: str) -> list[float]:
    found = defaultdict[int, list[float]](list)
    for each in marks:
        found[each["context"]].append(each[name])
    return [fmean(found[number]) for number in sorted(found)]


def rows_of(engine: LLMEngine, root: KVStates, sets: dict[str, Arrays], count: int) -> Iterator[dict[str, Any]]:
    """The rows of all sets, over at most so many contexts of each."""
    for name, contexts in sets.items():
        source, _, modules = name.rpartition("-")
        number = int(modules)
        places = {"all": set(range(number))}
        if number > 1:
            places |= {"first": {0}, "last": {number - 1}}
        marks = [
            mark
            for context in range(min(count, len(contexts["modules"])))
            for mark in marks_of(engine, root, contexts, context)
        ]
        for row in summary(marks, places):
            yield {"set": source, "modules": number, **row}


def evaluated(folder: Path, preamble: list[int], sets: dict[str, Arrays], count: int) -> Iterator[dict[str, Any]]:
    """The document of a model, again after each of its rows."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE).eval()
    document: dict[str, Any] = {
        "model": folder.name, "parameters": sum(each.numel() for each in model.parameters()),
        "layers": model.config.layer_types, "device": str(DEVICE), "machine": platform.machine(),
        "threads": torch.get_num_threads(), "date": time.strftime("%Y-%m-%d"), "rows": [],
    }  # fmt: skip
    config = EngineConfig.for_device(DEVICE, pool_bytes=2**30, running=48)
    with LLMEngine(wrap_causal(model), config) as engine:
        [root] = engine.encode([EncodeJob(preamble)])
        for row in rows_of(engine, root, sets, count):
            document["rows"].append(_rounded(row))
            yield document


def main() -> None:
    arguments = arguments_of()
    preamble = Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json")).encode(PREAMBLE).ids
    sets = evaluation_arrays(arguments.contexts / "evaluation.npz")
    wanted = arguments.sets or [name.rpartition("-")[0] for name in sets]
    chosen = {name: each for name, each in sets.items() if name.rpartition("-")[0] in wanted}
    documents: dict[str, Any] = {}
    for folder in arguments.model:
        for document in evaluated(folder, preamble, chosen, arguments.count):
            documents[folder.name] = document
            print(folder.name, json.dumps(document["rows"][-1]), flush=True)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps([*documents.values()], indent=1) + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return round(value, 5) if isinstance(value, float) else value


def arguments_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=Path, required=True, help="folder of hybrid_samples.py")
    parser.add_argument("--model", type=Path, nargs="+", required=True, help="folders of hybrid_train.py")
    parser.add_argument("--tokenizer", type=Path, default=Path(__file__).parent.parent / "ragcache" / "reader")
    parser.add_argument("--sets", nargs="+", help="some of the sets, such as held_out")
    parser.add_argument("--count", type=int, default=24, help="contexts of each set, at most")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
