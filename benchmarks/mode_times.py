"""First tokens and steps of the modes of reuse.

A model of a shape with random weights. Documents, their order and the question are new each time.

python benchmarks/mode_times.py --shape 8b --json FILE
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from gpu_session import GpuSession
from gpu_table import GpuWorkload
from harness import (
    JsonFile,
    LlamaShape,
    Progress,
    describe_machine,
    named_shapes,
    plain_table,
    print_figures,
    run_benchmark,
)

from ragcache.modes import ReuseMode
from ragcache.pipeline.ask import lay_out
from ragcache.pipeline.prompt import ModuleGroup, PromptLayout, TokenPrompt, build_context
from ragcache.states import KVKey, KVStates

MODES = ("rooted", "primed", "primed:8", "primed:16", "primed:32", "exact")


@dataclass(frozen=True, slots=True)
class TimesSetting:
    """How modes are timed."""

    modes: tuple[str, ...] = MODES
    warm: int = 2
    """Questions in each mode that do not count."""
    runs: int = 7
    """Questions in each mode that count."""
    new_tokens: int = 65
    """Tokens of the answers whose steps are timed."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One question."""

    seconds: float
    """Seconds until its answer ended."""
    computed: int
    """Number of computed tokens."""
    segments: int
    """Number of segments that were read."""


class Asker:
    """Asks over the documents of a session."""

    def __init__(self, session: GpuSession) -> None:
        self.session = session
        self.states = session.encode(session.texts)

    def ask(self, mode: ReuseMode, count: int, new_tokens: int) -> Asked:
        """A question over so many documents."""
        session = self.session
        order = session.rng.sample(range(len(self.states)), count)
        question = session.tokens(session.load.question)
        begin = time.perf_counter()
        layout = self._lay_out(order, question, mode)
        read = [] if not mode.reads_states else [session.root, *(self.states[n] for n in order)]
        prompt = layout.prompt()
        self._answer(prompt, read, new_tokens)
        seconds = time.perf_counter() - begin
        return Asked(seconds, len(prompt.computed_tokens), len(prompt.spans))

    def _lay_out(
        self, order: Sequence[int], question: Sequence[int], mode: ReuseMode
    ) -> PromptLayout:
        session = self.session
        layout, groups = PromptLayout([0] * session.load.preamble), []
        start = session.load.preamble
        for number in order:
            text = tuple(session.texts[number])
            groups.append(ModuleGroup((number,), text, start))
            start += len(text)
        lay_out(layout, groups, question, mode)
        return layout

    def _answer(self, prompt: TokenPrompt, read: Sequence[KVStates], new_tokens: int) -> None:
        keys = [KVKey(f"{number:064x}") for number in range(len(read))]
        context = build_context(prompt, keys, read)
        self.session.engine.submit_request(self.session.request(context, new_tokens)).result()


def bench_modes(
    shapes: dict[str, LlamaShape], device: str, load: GpuWorkload, setting: TimesSetting,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Return medians by shape, number of documents and mode."""
    rows: list[dict[str, Any]] = []
    for name, shape in shapes.items():
        session = GpuSession(shape, load, device, progress)
        try:
            asker = Asker(session)
            for count in load.placed:
                progress(f"{name}: {count} documents")
                for mode, figures in _measured(asker, count, setting).items():
                    rows.append({"shape": name, "documents": count, "mode": mode} | figures)
        finally:
            session.close()
    return {"rows": rows, "machine": describe_machine()}


def _measured(asker: Asker, count: int, setting: TimesSetting) -> dict[str, dict[str, float]]:
    """Ask in all modes in turns, so that a slower minute is one of all modes."""
    modes = {mode: ReuseMode.parse(mode) for mode in setting.modes}

    def asked(runs: int, new_tokens: int) -> dict[str, list[Asked]]:
        turns = [
            {name: asker.ask(mode, count, new_tokens) for name, mode in modes.items()}
            for _ in range(runs)
        ]
        return {name: [turn[name] for turn in turns] for name in modes}

    asked(setting.warm, 2)
    first, long = asked(setting.runs, 1), asked(setting.runs, setting.new_tokens)
    return {mode: _medians(first[mode], long[mode], setting.new_tokens) for mode in modes}


def _medians(first: list[Asked], long: list[Asked], new_tokens: int) -> dict[str, float]:
    seconds = statistics.median(each.seconds for each in first)
    steps = statistics.median(each.seconds for each in long) - seconds
    return {
        "first_token_ms": 1e3 * seconds,
        "step_ms": 1e3 * steps / (new_tokens - 1),
        "computed": statistics.median(each.computed for each in first),
        "segments": statistics.median(each.segments for each in first),
    }


def main(
    shape: Annotated[str, typer.Option(help="Shapes, with commas.")] = "7b,8b",
    device: Annotated[str, typer.Option(help="Where.")] = "cuda",
    modes: Annotated[str, typer.Option(help="Modes, with commas.")] = ",".join(MODES),
    document_tokens: Annotated[int, typer.Option(help="Tokens of each document.")] = 1024,
    question_tokens: Annotated[int, typer.Option(help="Tokens of each question.")] = 64,
    runs: Annotated[int, typer.Option(help="Questions in each mode that count.")] = 7,
    json_file: JsonFile = None,
) -> None:
    """Measure first tokens and steps of modes of reuse."""
    shapes = named_shapes(shape)
    result = run_benchmark(
        lambda progress: bench_modes(
            shapes,
            device,
            GpuWorkload(documents=16, document_tokens=document_tokens, question=question_tokens),
            TimesSetting(tuple(modes.split(",")), runs=runs),
            progress,
        )
    )
    heads = "first token", "step", "computed", "segments"
    table = plain_table("shape", "documents", "mode", *heads, left=3)
    for row in result["rows"]:
        times = (f"{row[key]:.1f} ms" for key in ("first_token_ms", "step_ms"))
        counts = (f"{row[key]:,.0f}" for key in ("computed", "segments"))
        table.add_row(row["shape"], str(row["documents"]), row["mode"], *times, *counts)
    print_figures([table], result, json_file)


if __name__ == "__main__":
    typer.run(main)
