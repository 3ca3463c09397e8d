"""Recurring texts: chats whose client pastes chunks into prompts, with and without their states."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

from ragcache.bench.harness import Progress
from ragcache.bench.recurring_turns import WORDS, RecurringSetting, Turn, draw_turns
from ragcache.db import ModuleRow
from ragcache.machine import describe_machine
from ragcache.models import LoadedModel
from ragcache.params import GenerationParams
from ragcache.pipeline.answer import Answer
from ragcache.rag import RagCache
from ragcache.recognition import Fingerprints, FingerprintTable, find
from ragcache.recurrence import RecurrenceTable

READING, COMPUTING = "reading", "computing"
"""Namespaces of both sides."""

NEW_TOKENS = 8
"""Tokens of an answer."""


@dataclass(frozen=True, slots=True)
class _Run:
    """A turn, and its answers on both sides."""

    turn: Turn
    chunk_tokens: int
    repeated_tokens: int
    """Tokens of the chunks that two earlier prompts had."""
    new_chunks: int
    """Number of the other chunks."""
    reading: Answer
    computing: Answer

    @property
    def read_tokens(self) -> int:
        """Tokens that are computed without states of recurring texts alone."""
        return self.computing.reuse.computed_tokens - self.reading.reuse.computed_tokens

    @property
    def speedup(self) -> float:
        return self.computing.timings.first_token / self.reading.timings.first_token

    @property
    def equal(self) -> bool:
        return self.reading.choices[0].token_ids == self.computing.choices[0].token_ids


@dataclass(frozen=True, slots=True)
class _Wave:
    """Turns that were answered one by one or at once, and the seconds of each side."""

    runs: list[_Run]
    at_once: bool
    seconds: dict[str, float]


def bench_recurring(
    setting: RecurringSetting,
    model: LoadedModel,
    progress: Progress = lambda _: None,
    turns: Sequence[Turn] | None = None,
) -> dict[str, Any]:
    """Answer the same conversations twice, turn by turn: with and without recurring texts.

    Both sides share equal beginnings of prompts. Figures are of the second half of the turns. The
    states of new recurring texts are encoded between two waves, as they are while users read.

    Args:
        setting: The conversations.
        model: The model, on its device.
        progress: Called with the step.
        turns: Turns of another trace. Defaults to `draw_turns(setting)`.

    Returns:
        `read_share`: share of the chunks' tokens that are read from states and not computed.
        `recurring_share`: share that two earlier prompts had, which is the most that can be read.
        `ttft_speedup`: median ratio of the times to the first token. `by_new_chunks`: first tokens
        by the number of chunks that fewer than two earlier prompts had. `rate_ratio`: ratio of the
        times of all turns. `equal_answers_share`: share of equal answers. `detect_ms_32k_100000`:
        milliseconds of detection in a prompt of 32,000 characters, with 100,000 chunks known.
    """
    turns = list(draw_turns(setting)) if turns is None else turns
    count = cache(lambda text: len(model.encode_untrusted(text)))
    waves: list[_Wave] = []
    seen: Counter[str] = Counter()
    with _sides(model, sum(map(count, {each for turn in turns for each in turn.chunks}))) as sides:
        for number, start in enumerate(range(0, len(turns), setting.concurrent)):
            part = turns[start : start + setting.concurrent]
            progress(f"turn {start + len(part)} of {len(turns)}")
            alone = setting.concurrent == 1 or (2 * start >= len(turns) and number % 2 == 0)
            waves.append(_answer(part, sides, alone, number, count, seen))
            sides[READING].internals.shared.observing.submit(lambda: None).result()
    progress("timing detection")
    context = {"model": model.name, "setting": asdict(setting), "machine": describe_machine()}
    return {**_figures(waves[len(waves) // 2 :]), **_detection(setting), **context}


@contextmanager
def _sides(model: LoadedModel, tokens: int) -> Iterator[dict[str, RagCache]]:
    """Open two namespaces of one folder, with room for the states of so many tokens."""
    room = int(1.2 * tokens * model.causal.bytes_per_token) + 2**28
    with (
        TemporaryDirectory() as folder,
        RagCache.open(
            folder,
            model,
            embedding="none",
            force_modes=True,
            observed_bytes=room,
            host_bytes=2 * room,
            warm_up=model.causal.device.type == "cuda",
        ) as rag,
    ):
        yield {name: rag.within(name) for name in (READING, COMPUTING)}


def _answer(
    part: Sequence[Turn],
    sides: dict[str, RagCache],
    alone: bool,
    number: int,
    count: Callable[[str], int],
    seen: Counter[str],
) -> _Wave:
    """Answer the turns of wave `number` on both sides, each turn alone or all at once."""
    generation = GenerationParams(max_tokens=NEW_TOKENS, ignore_eos=True, extractive=False)
    answers: dict[str, list[Answer]] = {name: [] for name in sides}
    seconds: dict[str, float] = {}
    for name in sorted(sides, reverse=number % 4 < 2):
        begin = time.perf_counter()
        for together in [[turn] for turn in part] if alone else [part]:
            answers[name] += sides[name].chat_batch(
                [turn.messages for turn in together],
                generation=generation,
                recognize_recurring=name == READING,
            )
        seconds[name] = time.perf_counter() - begin
    runs = []
    for turn, *both in zip(part, answers[READING], answers[COMPUTING], strict=True):
        repeated = [text for text in turn.chunks if seen[text] > 1]
        tokens, new = sum(map(count, turn.chunks)), len(turn.chunks) - len(repeated)
        runs.append(_Run(turn, tokens, sum(map(count, repeated)), new, *both))
        seen.update(turn.chunks)
    return _Wave(runs, not alone, seconds)


def _figures(waves: Sequence[_Wave]) -> dict[str, Any]:
    runs = [run for wave in waves for run in wave.runs]
    alone = [run for wave in waves if not wave.at_once for run in wave.runs]
    timed = [wave for wave in waves if wave.at_once] or waves
    tokens = sum(run.chunk_tokens for run in runs)
    rates = {
        name: sum(len(wave.runs) for wave in timed) / sum(wave.seconds[name] for wave in timed)
        for name in (READING, COMPUTING)
    }
    return {
        "read_share": sum(run.read_tokens for run in runs) / tokens,
        "recurring_share": sum(run.repeated_tokens for run in runs) / tokens,
        **_first_tokens(alone),
        "by_new_chunks": {
            new: _first_tokens([run for run in alone if run.new_chunks == new])
            for new in sorted({run.new_chunks for run in alone})
        },
        "rate_ratio": rates[READING] / rates[COMPUTING],
        "requests_per_second": rates,
        "equal_answers_share": statistics.mean(run.equal for run in runs),
        "turns": len(runs),
        "prompt_tokens": statistics.mean(run.computing.reuse.prompt_tokens for run in runs),
    }


def _first_tokens(runs: Sequence[_Run]) -> dict[str, Any]:
    """Return the medians of first tokens, and the mean number of tokens that were computed."""
    both = {name: [getattr(run, name) for run in runs] for name in (READING, COMPUTING)}
    return {
        "ttft_speedup": statistics.median(run.speedup for run in runs),
        "ttft_seconds": {
            name: statistics.median(each.timings.first_token for each in answers)
            for name, answers in both.items()
        },
        "computed_tokens": {
            name: statistics.mean(each.reuse.computed_tokens for each in answers)
            for name, answers in both.items()
        },
        "first_tokens": len(runs),
    }


def _detection(setting: RecurringSetting) -> dict[str, float]:
    """Return the processor time of a prompt of 32,000 characters, the median of nine prompts."""
    rng, recurrences = random.Random(setting.seed), RecurrenceTable()
    words = [f"{word}{number}" for word in WORDS for number in range(20)]

    def text(size: int) -> str:
        return " ".join(rng.choices(words, k=size // 4))[:size]

    rows = [ModuleRow(n, str(n), "", "", text(300)) for n in range(setting.known_spans)]
    for start in range(0, len(rows), 100):
        recurrences.observe("\n".join(row.text for row in rows[start : start + 100]))
    known = FingerprintTable(Fingerprints.of(rows))
    times = []
    for _ in range(9):
        prompt, begin = text(32_000), time.thread_time()
        find(prompt, known)
        recurrences.observe(prompt)
        times.append(time.thread_time() - begin)
    return {"detect_ms_32k_100000": 1000 * statistics.median(times)}
