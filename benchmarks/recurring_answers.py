"""Answers over recurring texts against `exact`'s, on the questions of the example handbook.

    python benchmarks/recurring_answers.py --model MODEL --modes primed,primed:16 --json FILE

Each question comes with up to four chunks of the handbook, found by their words, in random order in
one of the three templates of `ragcache bench recurring`, behind the model's instruction to answer
in few words. All chunks have been in two earlier prompts. An answer is equal if it has the tokens
of `exact`'s answer to the same prompt. `exact` also answers over the chunks in reverse order, which
shows how many answers the order of chunks decides.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from statistics import fmean
from typing import Annotated, Any

import typer
from harness import (
    DeviceOption,
    JsonFile,
    Progress,
    describe_machine,
    plain_table,
    print_figures,
    run_benchmark,
)

from ragcache import GenerationParams, RagCache
from ragcache.bench.recurring import open_sides, settle
from ragcache.bench.recurring_turns import TEMPLATES, paste
from ragcache.evaluation import Question, bootstrap_interval, f1, load_dataset, paired_bootstrap
from ragcache.models import LoadedModel, load_model
from ragcache.pipeline.answer import Answer
from ragcache_api.cli.console import example_handbook

CHUNKS = 4
"""Most chunks of a prompt."""
PACK = 6
"""Chunks of the prompts in which they recur."""
TOKENS = 24
"""Most tokens of an answer."""

NumberedChunk = tuple[int, str]
app = typer.Typer(add_completion=False, help=__doc__)


@app.command()
def main(
    model: Annotated[str | None, typer.Option(help="folder or name of a model.")] = None,
    device: DeviceOption = "cpu",
    modes: Annotated[str, typer.Option(help="modes, with commas.")] = "primed,primed:16",
    questions: Annotated[int, typer.Option(min=1, help="questions, drawn at random.")] = 144,
    module_tokens: Annotated[
        int, typer.Option(min=1, help="most tokens of a chunk, by the embedded reader.")
    ] = 384,
    json_file: JsonFile = None,
) -> None:
    """Equal answers and F1 of each mode."""
    result = run_benchmark(
        lambda progress: bench_answers(
            load_model(model, device=device), modes.split(","), questions, module_tokens, progress
        )
    )
    columns = ("mode", "equal, %", "95 %", "read, %", "F1", "F1 of exact", "difference, 95 %")
    rows = []
    for name, each in {**result["modes"], "exact, reverse order": result["reversed"]}.items():
        equal, difference = each["equal_interval"], each["f1_difference_interval"]
        rows.append(
            (
                name,
                f"{100 * each['equal']:.1f}",
                f"{100 * equal['low']:.0f} to {100 * equal['high']:.0f}",
                f"{100 * each['cached_share']:.0f}",
                f"{100 * each['f1']:.1f}",
                f"{100 * result['f1_exact']:.1f}",
                f"{100 * difference['low']:+.1f} to {100 * difference['high']:+.1f}",
            )
        )
    table = plain_table(f"{result['questions']} questions", *columns, rows=rows)
    print_figures([table], result, json_file)


def bench_answers(
    model: LoadedModel,
    modes: Sequence[str],
    count: int,
    module_tokens: int,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Answer the same prompts in `exact` and each mode, and in `exact` over reversed chunks.

    Args:
        model: The model, on its device.
        modes: Modes in which recurring texts are read.
        count: Number of questions.
        module_tokens: Most tokens of a chunk.
        progress: Called with the step.

    Returns:
        `modes`: by mode `equal`, the share of answers with the tokens of `exact`'s, `f1`, the
        intervals of `equal` and of F1 less `exact`'s, `cached_share`, the share of the prompts'
        tokens that were read from states, and `answer_modes`, the number of answers by the mode
        that they name. Beside them `reversed`, the same of `exact` over the chunks in reverse
        order, `f1_exact`, the mean number of `chunks` and their `chunk_tokens`, the setting, model
        and machine.
    """
    rng = random.Random(7)
    asked, found, chunks_found = _found_chunks(count, module_tokens)
    orders = [rng.sample(chunks, len(chunks)) for chunks in found]
    prompts = _chats(model.instruction, asked, orders)
    reversed_prompts = _chats(model.instruction, asked, [order[::-1] for order in orders])
    packs = [
        _chat(model.instruction, number, pack, "Which documents are these?")
        for number, pack in enumerate(_packs(rng, chunks_found))
    ]
    chunk_tokens = [len(model.encode_untrusted(text)) for _, text in chunks_found]
    answers: dict[str, list[Answer]] = {}
    states = 2 * sum(chunk_tokens)  # a module has one or two
    reading = [f"reading-{number}" for number in range(len(modes))]
    with open_sides(model, states, reading, "exact") as sides:  # none reads another one's states
        computing, *others = sides.values()
        exact = _ask_all(computing, prompts, "exact", progress)
        reversed_exact = _ask_all(
            computing, reversed_prompts, "exact", lambda step: progress(f"reverse order, {step}")
        )
        for mode, side in zip(modes, others, strict=True):
            progress(f"{mode}: chunks recur in {len(packs)} prompts")
            for messages in packs:
                _ask(side, messages, mode, max_tokens=1)
            settle(side)
            answers[mode] = _ask_all(side, prompts, mode, progress)
    exact_f1 = _f1_marks(asked, exact)
    return {
        "questions": len(asked),
        "f1_exact": fmean(exact_f1),
        "modes": {name: _figures(asked, own, exact, exact_f1) for name, own in answers.items()},
        "reversed": _figures(asked, reversed_exact, exact, exact_f1),
        "chunk_tokens": fmean(chunk_tokens),
        "chunks": fmean(map(len, found)),
        "setting": {
            "tokens": TOKENS,
            "module_tokens": module_tokens,
            "instruction": model.instruction,
        },
        "device": str(model.causal.device),
        "model": model.name,
        "machine": describe_machine(),
    }


def _found_chunks(
    count: int, module_tokens: int
) -> tuple[Sequence[Question], list[list[NumberedChunk]], list[NumberedChunk]]:
    """Return questions about the handbook, the chunks found for each, and all found chunks."""
    folder = example_handbook()
    asked = load_dataset(folder.parent / "questions.jsonl").sample(count).questions
    with (
        tempfile.TemporaryDirectory() as state,
        RagCache.open(state, embedding="none", module_tokens=module_tokens) as rag,
    ):
        rag.ingest("handbook", [folder])
        retrieve = partial(rag.retrieve, collection="handbook", k=CHUNKS, relative_threshold=0.0)
        found = [retrieve(each.question) for each in asked]
    texts = {hit.module.text: None for selection in found for hit in selection.hits}
    numbers = {text: number for number, text in enumerate(texts)}
    return (
        asked,
        [
            [(numbers[hit.module.text], hit.module.text) for hit in selection.hits]
            for selection in found
        ],
        [(number, text) for text, number in numbers.items()],
    )


def _packs(
    rng: random.Random, chunks: Sequence[NumberedChunk]
) -> Iterator[Sequence[NumberedChunk]]:
    """Yield each chunk in two prompts, beside other chunks."""
    for _ in range(2):
        order = rng.sample(chunks, len(chunks))
        for start in range(0, len(order), PACK):
            yield order[start : start + PACK]


def _chats(
    instruction: str, asked: Sequence[Question], orders: Sequence[Sequence[NumberedChunk]]
) -> list[list[dict[str, str]]]:
    return [
        _chat(instruction, number, chunks, question.question)
        for number, (question, chunks) in enumerate(zip(asked, orders, strict=True))
    ]


def _chat(
    instruction: str, number: int, chunks: Sequence[NumberedChunk], question: str
) -> list[dict[str, str]]:
    """Return an instruction and a message with chunks in one of the templates."""
    style = list(TEMPLATES.values())[number % len(TEMPLATES)]
    return [
        {"role": "system", "content": instruction},
        {"role": "user", "content": paste(style, chunks, question)},
    ]


def _ask_all(
    side: RagCache, prompts: Sequence[list[dict[str, str]]], mode: str, progress: Progress
) -> list[Answer]:
    """Answer chats one by one. Texts that wait are encoded before the next one."""
    answers = []
    for done, messages in enumerate(prompts, start=1):
        progress(f"{mode}: question {done} of {len(prompts)}")
        answers.append(_ask(side, messages, mode))
        settle(side)
    return answers


def _ask(
    rag: RagCache, messages: list[dict[str, str]], mode: str, max_tokens: int = TOKENS
) -> Answer:
    """Answer a chat, greedily. `exact` reads no recurring texts."""
    return rag.chat(
        messages,
        generation=GenerationParams(max_tokens=max_tokens, extractive=False),
        mode=mode,
        recognize_recurring=mode != "exact",
    )


def _figures(
    asked: Sequence[Question],
    answers: Sequence[Answer],
    exact: Sequence[Answer],
    exact_f1: Sequence[float],
) -> dict[str, Any]:
    """Return the figures of a mode beside the answers of `exact` and their F1."""
    equal = [
        float(one.choices[0].token_ids == other.choices[0].token_ids)
        for one, other in zip(answers, exact, strict=True)
    ]
    mode_f1 = _f1_marks(asked, answers)
    prompt = sum(each.reuse.prompt_tokens for each in answers)
    return {
        "equal": fmean(equal),
        "equal_interval": asdict(bootstrap_interval(equal)),
        "f1": fmean(mode_f1),
        "f1_difference_interval": asdict(paired_bootstrap(mode_f1, exact_f1)[0]),
        "cached_share": sum(each.reuse.cached_tokens for each in answers) / prompt,
        "answer_modes": dict(Counter(each.mode for each in answers)),
    }


def _f1_marks(asked: Sequence[Question], answers: Sequence[Answer]) -> list[float]:
    return [f1(each.text, one.answers) for one, each in zip(asked, answers, strict=True)]


if __name__ == "__main__":
    app()
