"""Cost of mode `blend:R` in first tokens and steps, compared with `rooted` and `exact`.

A model of a shape with random weights, whose first layer says nothing of the others: which tokens
are chosen does not change what it takes. Documents, their order and the question are new each time.

python benchmarks/blend.py --shape 8b --json FILE
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
from ragcache.pipeline.blend import blend_prompt
from ragcache.pipeline.prompt import ModuleGroup, PromptLayout, TokenPrompt, build_context
from ragcache.states import KVKey, KVStates

MODES = ("rooted", "blend:5", "blend:15", "blend:30", "exact")


@dataclass(frozen=True, slots=True)
class BlendSetting:
    """modes: asked in; warm: questions in each that do not count; runs: those that do; new_tokens:
    of the answers whose steps are timed."""

    modes: tuple[str, ...] = MODES
    warm: int = 2
    runs: int = 7
    new_tokens: int = 65


@dataclass(frozen=True, slots=True)
class Asked:
    """One question: seconds until its answer ended, and of the comparison before; tokens computed,
    and segments read."""

    seconds: float
    choosing: float
    computed: int
    segments: int


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
        laid_out = time.perf_counter()
        if percent := mode.blend_percent:
            token_ids = [group.token_ids for group in layout.groups]
            prompt = blend_prompt(prompt, percent, read, token_ids, session.causal, session.engine)
        chosen = time.perf_counter()
        self._answer(prompt, read, new_tokens)
        end = time.perf_counter()
        return Asked(end - begin, chosen - laid_out, len(prompt.computed_tokens), len(prompt.spans))

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


def bench_blend(
    shapes: dict[str, LlamaShape], device: str, load: GpuWorkload, setting: BlendSetting,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Medians by shape, number of documents and mode: first_token_ms, of it choosing_ms, step_ms,
    computed tokens, and segments that are read."""
    rows: list[dict[str, Any]] = []
    for name, shape in shapes.items():
        session = GpuSession(shape, load, device, progress)
        try:
            asker = Asker(session)
            for count in load.placed:
                for mode in setting.modes:
                    progress(f"{name}: {count} documents, {mode}")
                    rows.append(
                        {"shape": name, "documents": count, "mode": mode}
                        | _measured(asker, ReuseMode.parse(mode), count, setting)
                    )
        finally:
            session.close()
    return {"rows": rows, "machine": describe_machine()}


def _measured(asker: Asker, mode: ReuseMode, count: int, setting: BlendSetting) -> dict[str, float]:
    for _ in range(setting.warm):
        asker.ask(mode, count, 2)
    first = [asker.ask(mode, count, 1) for _ in range(setting.runs)]
    long = [asker.ask(mode, count, setting.new_tokens) for _ in range(setting.runs)]
    seconds = statistics.median(each.seconds for each in first)
    steps = statistics.median(each.seconds for each in long) - seconds
    return {
        "first_token_ms": 1e3 * seconds,
        "choosing_ms": 1e3 * statistics.median(each.choosing for each in first),
        "step_ms": 1e3 * steps / (setting.new_tokens - 1),
        "computed": statistics.median(each.computed for each in first),
        "segments": statistics.median(each.segments for each in first),
    }


def main(
    shape: Annotated[str, typer.Option(help="Shapes, with commas.")] = "7b,8b",
    device: Annotated[str, typer.Option(help="Where.")] = "cuda",
    modes: Annotated[str, typer.Option(help="Modes, with commas.")] = ",".join(MODES),
    document_tokens: Annotated[int, typer.Option(help="Tokens of each document.")] = 1024,
    json_file: JsonFile = None,
) -> None:
    """First tokens and steps in mode `blend:R`, or in others, beside `rooted` and `exact`."""
    shapes = named_shapes(shape)
    result = run_benchmark(
        lambda progress: bench_blend(
            shapes,
            device,
            GpuWorkload(documents=16, document_tokens=document_tokens),
            BlendSetting(tuple(modes.split(","))),
            progress,
        )
    )
    heads = "first token", "choosing", "step", "computed", "segments"
    table = plain_table("shape", "documents", "mode", *heads, left=3)
    for row in result["rows"]:
        times = (f"{row[key]:.1f} ms" for key in ("first_token_ms", "choosing_ms", "step_ms"))
        counts = (f"{row[key]:,.0f}" for key in ("computed", "segments"))
        table.add_row(row["shape"], str(row["documents"]), row["mode"], *times, *counts)
    print_figures([table], result, json_file)


if __name__ == "__main__":
    typer.run(main)
