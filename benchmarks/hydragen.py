"""Hydragen's end-to-end workloads: needles in a long book, and self-consistency.

python benchmarks/hydragen.py --json FILE [--book FILE] [--shape 7b --device cuda]
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from harness import BenchDTypeOption, DeviceOption, JsonFile, Progress, run_benchmark
from papers import (
    MODELS,
    ModelSetting,
    PaperComparison,
    ShapeOption,
    copy_of,
    encode_one,
    print_comparisons,
    result_of,
    run_batch,
)

from ragcache.documents import load_sources
from ragcache.engine import Request, SamplingParams, assemble_context
from ragcache.models import CausalLM, LoadedModel, load_model
from ragcache.states import KVStates
from ragcache_api.cli.console import example_handbook

COLORS = ("amber", "black", "brown", "cream", "golden", "gray", "red", "spotted", "white")


@dataclass(frozen=True, slots=True)
class NeedleSetting:
    """document: its tokens, with the facts in it (the paper: 19,947). questions: asked in one batch
    over shared states; copies: in one batch, each over a copy of the states."""

    document: int = 4096
    questions: int = 256
    copies: int = 64
    new_tokens: int = 8
    runs: int = 3


@dataclass(frozen=True, slots=True)
class ConsistencySetting:
    """few_shot: tokens of the examples that all prompts begin with; samples: of each problem."""

    few_shot: int = 512
    problems: int = 4
    problem_tokens: int = 64
    samples: int = 40
    new_tokens: int = 16
    runs: int = 3


def needle_document(
    model: LoadedModel, count: int, tokens: int, book: str, seed: int = 1
) -> tuple[list[int], list[list[int]]]:
    """A book with facts planted between its sentences, and the question about each fact, in tokens
    (Hydragen §E.3)."""
    rng = random.Random(seed)
    syllables = [a + b for a in "bdfgklmnprstv" for b in "aeiou"]
    pairs = itertools.product(syllables, syllables)
    names = rng.sample(["".join(pair).capitalize() for pair in pairs], count)
    facts = [f"The dog named {name} has fur that is {rng.choice(COLORS)}." for name in names]
    sentences = book.replace("\n", " ").split(". ")
    room = max(0, tokens - sum(len(model.encode_untrusted(f" {fact}")) for fact in facts))
    lines, used = [*facts], 0
    for sentence in itertools.cycle(sentences):
        used += len(model.encode_untrusted(f" {sentence}."))
        if used > room:
            break
        lines.insert(rng.randrange(len(lines) + 1), f"{sentence}.")
    ids = model.encode_untrusted(" ".join(lines))[:tokens]
    questions = [f"\nWhat color is the fur of the dog named {name}?\n" for name in names]
    return ids, [model.encode_untrusted(question) for question in questions]


def bench_needles(
    causal: CausalLM, tokenizer: LoadedModel, setting: NeedleSetting, book: str,
    progress: Progress = lambda _: None,
) -> PaperComparison:  # fmt: skip
    """Questions a second, over states that all share against a copy for each (§4.3). Reading the
    document is not counted, as in the paper."""
    document, questions = needle_document(tokenizer, setting.questions, setting.document, book)
    progress("reading the book")
    states = encode_one(causal, document)

    def requests(count: int, states_of: Callable[[], KVStates]) -> list[Request]:
        return [
            _request(causal, states_of(), question, setting.new_tokens)
            for question in questions[:count]
        ]

    shared = requests(setting.questions, lambda: states)
    copied = requests(setting.copies, lambda: copy_of(states))
    rates: dict[str, list[float]] = {"shared": [], "copies": []}
    for number in range(setting.runs):
        for way, asked in (("shared", shared), ("copies", copied)):
            progress(f"{len(asked)} questions, {way}, run {number + 1} of {setting.runs}")
            rates[way].append(len(asked) / run_batch(causal, asked)[0])
    fast, slow = (statistics.median(each) for each in rates.values())
    return PaperComparison(
        "needles in a book",
        "256 questions in less time than 64 with FlashAttention: over 4x the questions a second",
        "19,947 tokens, Yi-6B-200k, four A100-40GB (§4.3)",
        fast / slow,
        f"{fast / slow:.1f}x the questions a second ({fast:.1f} against {slow:.1f})",
        f"{len(document):,} tokens, {setting.questions} questions over shared states, "
        f"{setting.copies} over copies, {setting.new_tokens} tokens an answer",
    )


def bench_consistency(
    causal: CausalLM, setting: ConsistencySetting, progress: Progress = lambda _: None
) -> list[PaperComparison]:
    """Answers a second where a prompt is shared by all and each problem by its samples (§4.4):
    over copies, with the first level shared, and with both."""
    rng = random.Random(2)

    def draw(count: int) -> list[int]:
        return [rng.randrange(causal.vocabulary) for _ in range(count)]

    states = encode_one(causal, draw(setting.few_shot))
    problems = [draw(setting.problem_tokens) for _ in range(setting.problems)]
    sampling = SamplingParams(temperature=0.7, seed=7)
    each = [problem for problem in problems for _ in range(setting.samples)]
    new = setting.new_tokens
    ways = {
        "copies": [_request(causal, copy_of(states), p, new, sampling) for p in each],
        "one": [_request(causal, states, p, new, sampling) for p in each],
        "two": [_request(causal, states, p, new, sampling, n=setting.samples) for p in problems],
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(setting.runs):
        for way, asked in ways.items():
            progress(f"self-consistency, {way}, run {number + 1} of {setting.runs}")
            seconds[way].append(run_batch(causal, asked)[0])
    median = {way: statistics.median(times) for way, times in seconds.items()}
    here = (
        f"{setting.few_shot} tokens before {setting.problems} problems of "
        f"{setting.problem_tokens}, {setting.samples} samples of {new} tokens each"
    )
    to_copies, to_one = median["copies"] / median["two"], median["one"] / median["two"]
    return [
        PaperComparison(
            "self-consistency", "over 2x faster than FlashAttention",
            "GSM8k, eight-shot, 40 samples, Llama 2 7B and 13B (§4.4, Table 1)",
            to_copies, f"{to_copies:.1f}x faster than with copies", here,
        ),
        PaperComparison(
            "two levels against one", "55 % less time",
            "APPS, two-shot, 128 samples, CodeLlama-7b, eight A100-40GB (§4.4)",
            to_one, f"{1 - 1 / to_one:.0%} less time", here,
        ),
    ]  # fmt: skip


def _request(
    causal: CausalLM, states: KVStates, own: Sequence[int], new: int,
    sampling: SamplingParams | None = None, n: int = 1,
) -> Request:  # fmt: skip
    context = assemble_context([states], own, window=causal.window, max_tokens=new)
    return Request(context, new, sampling=sampling or SamplingParams(), n=n)


def bench_hydragen(
    setting: ModelSetting | None = None, needles: NeedleSetting | None = None,
    consistency: ConsistencySetting | None = None, book: Path | None = None,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Both workloads. book: its text; None is that of the example handbook, over and over."""
    setting, needles = setting or ModelSetting(), needles or NeedleSetting()
    consistency = consistency or ConsistencySetting()
    if book is None:
        text = " ".join(each.text for each in load_sources([example_handbook()]).documents)
    else:
        text = book.read_text(encoding="utf-8")
    progress("building the model")
    causal = setting.build()
    comparisons = [
        bench_needles(causal, load_model(), needles, text, progress),
        *bench_consistency(causal, consistency, progress),
    ]
    return result_of(
        comparisons, causal, model=asdict(setting), needles=asdict(needles),
        consistency=asdict(consistency),
    )  # fmt: skip


def main(
    shape: ShapeOption = "small", device: DeviceOption = "cpu", dtype: BenchDTypeOption = "auto",
    document: Annotated[int, typer.Option(help="Tokens of the book.")] = 4096,
    copies: Annotated[int, typer.Option(help="Questions over copies; memory for each.")] = 64,
    book: Annotated[Path | None, typer.Option(help="A text file to plant the facts in.")] = None,
    runs: Annotated[int, typer.Option(min=1)] = 3, json_file: JsonFile = None,
) -> None:  # fmt: skip
    """Needles in a long book, and self-consistency, beside Hydragen's figures."""
    if document + 64 > MODELS[shape].window:
        raise typer.BadParameter(f"the window of {shape} is {MODELS[shape].window}")
    needles = NeedleSetting(document=document, copies=copies, runs=runs)
    consistency = ConsistencySetting(runs=runs)
    setting = ModelSetting(shape, device, dtype)
    result = run_benchmark(
        lambda progress: bench_hydragen(setting, needles, consistency, book, progress)
    )
    print_comparisons(result, json_file)


if __name__ == "__main__":
    typer.run(main)
