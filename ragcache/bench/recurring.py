"""Recurring texts: chats whose client pastes chunks into prompts, with and without their states."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import cycle
from tempfile import TemporaryDirectory
from typing import Any

from ragcache.bench.harness import Progress
from ragcache.bench.recurring_turns import WORDS, RecurringSetting, Turn, draw_turns
from ragcache.db import ModuleRow
from ragcache.machine import describe_machine
from ragcache.models import LoadedModel
from ragcache.modes import ReuseMode
from ragcache.params import GenerationParams
from ragcache.pipeline.answer import Answer
from ragcache.rag import RagCache
from ragcache.recognition import Fingerprints, FingerprintTable, find
from ragcache.recurrence import RecurrenceTable

READING, COMPUTING = "reading", "computing"
"""Namespaces of both sides."""

NEW_TOKENS = 8
"""Tokens of an answer."""

_STEP = 200  # earlier turns between two reports of the progress
_RESAMPLES = 2000  # of the turns, for the interval of their median


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
    device: dict[str, float]
    """Seconds of the model up to the first token, by side. Empty beside other turns."""

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
class _Block:
    """Turns that were answered one after the other or by callers at once."""

    runs: list[_Run]
    alone: bool
    seconds: dict[str, float]
    """Seconds of each side, with the work behind the answers of callers at once."""


def bench_recurring(
    setting: RecurringSetting,
    model: LoadedModel,
    progress: Progress = lambda _: None,
    turns: Sequence[Turn] | None = None,
    report: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Answer the same conversations twice, turn by turn: with and without recurring texts.

    Both sides share equal beginnings of prompts. Figures are of the second half of the turns, and
    of all turns if there were earlier ones, which are answered with recurring texts alone. For
    first tokens, each turn is answered alone, and new recurring texts are encoded and conversations
    stored before the next one, as while users read. For rates, `setting.concurrent` callers send
    their next turn as soon as they have an answer, and this work is part of the time.

    Args:
        setting: The conversations.
        model: The model, on its device.
        progress: Called with the step.
        turns: Turns of another trace. Defaults to `draw_turns(setting)`.
        report: Called with the figures of the turns so far, after each block of them.

    Returns:
        `read_share`: share of the chunks' tokens that are read from states and not computed.
        `recurring_share`: share that two earlier prompts had, which is the most that can be read.
        `ttft_speedup`: median ratio of the times to the first token, and
        `ttft_speedup_interval`: its 95 % bootstrap interval. `stages`: median seconds of the parts
        of a first token. `by_new_chunks`: first tokens by
        the number of chunks that fewer than two earlier prompts had. `rate_ratio`: ratio of the
        times of all turns. `equal_answers_share`: share of equal answers. `detect_ms_32k_100000`:
        milliseconds of detection in a prompt of 32,000 characters, with 100,000 chunks known.
    """
    turns = list(draw_turns(setting)) if turns is None else turns
    count = cache(lambda text: len(model.encode_untrusted(text)))
    mode = ReuseMode.parse(setting.mode) if setting.mode else model.default_mode
    tokens = sum(map(count, {text for turn in turns for text in turn.chunks}))
    earlier = turns[: setting.earlier * setting.turns]
    turns = turns[len(earlier) :]
    first = 0 if earlier else len(turns) // 2
    context = {"model": model.name, "setting": asdict(setting), "machine": describe_machine()}
    measured: list[_Block] = []
    seen: Counter[str] = Counter()
    states = tokens * len(mode.encodings)
    with open_sides(model, states, [READING], COMPUTING) as sides:
        for start in range(0, len(earlier), _STEP):
            progress(f"earlier turn {start + 1} of {len(earlier)}")
            part = earlier[start : start + _STEP]
            _ask_all(sides[READING], setting, READING, part, new_tokens=1)
            seen.update(text for turn in part for text in turn.chunks)
        for number, (start, end, alone) in enumerate(
            _blocks(first, len(turns), setting.concurrent)
        ):
            progress(f"turn {start + 1} of {len(turns)}")
            block = _answer(turns[start:end], sides, setting, alone, number, count, seen)
            if start >= first:
                measured.append(block)
                report({**_figures(measured), **context})
    progress("timing detection")
    return {**_figures(measured), **_detection(setting), **context}


def _blocks(first: int, turns: int, concurrent: int) -> Iterator[tuple[int, int, bool]]:
    """Yield begin and end of each block of turns, and whether its turns are answered alone.

    Turns from `first` on are measured: twice an eighth alone, and three eighths by callers at once,
    who wait for the work behind their answers only once.
    """
    size = 1 if concurrent == 1 else -(-(turns - first) // 8)
    lengths = cycle([size] if concurrent == 1 else [size, 3 * size])
    warming = 1 if concurrent == 1 else 2 * size
    for start in range(0, first, warming):
        yield start, min(start + warming, first), concurrent == 1
    while first < turns:
        length = next(lengths)
        yield first, min(first + length, turns), length == size
        first += length


@contextmanager
def open_sides(
    model: LoadedModel, tokens: int, reading: Sequence[str], computing: str
) -> Iterator[dict[str, RagCache]]:
    """Open a namespace for each side of a comparison, in one folder.

    Args:
        model: The model.
        tokens: Tokens of the states for which each reading namespace has room.
        reading: Names of the namespaces that read recurring texts.
        computing: Name of the namespace without recurring texts, which comes first.
    """
    room = int(1.2 * tokens * model.causal.bytes_per_token) + 2**28
    with (
        TemporaryDirectory() as folder,
        RagCache.open(
            folder,
            model,
            embedding="none",
            force_modes=True,
            observed_bytes=room,
            host_bytes=len(reading) * room + 2**30,
            warm_up=model.causal.device.type == "cuda",
        ) as rag,
    ):
        yield {name: rag.within(name) for name in (computing, *reading)}


def _answer(
    part: Sequence[Turn],
    sides: dict[str, RagCache],
    setting: RecurringSetting,
    alone: bool,
    number: int,
    count: Callable[[str], int],
    seen: Counter[str],
) -> _Block:
    """Answer the turns of block `number` on both sides."""
    answers: dict[str, list[Answer]] = {name: [] for name in sides}
    device: dict[str, list[float]] = {name: [] for name in sides}
    seconds: dict[str, float] = {}
    for name in sorted(sides, reverse=number % 2 == 0):
        begin = time.perf_counter()
        if not alone:
            answers[name] = _ask_all(sides[name], setting, name, part)
            seconds[name] = time.perf_counter() - begin
            continue
        for turn in part:
            answer, computed = _ask_alone(sides[name], setting, name, turn)
            answers[name].append(answer)
            device[name].append(computed)
            settle(sides[name])
        seconds[name] = sum(each.timings.total for each in answers[name])
    runs = []
    for number, turn in enumerate(part):
        both = answers[READING][number], answers[COMPUTING][number]
        taken = {name: device[name][number] for name in device if alone}
        repeated = [text for text in turn.chunks if seen[text] > 1]
        tokens, new = sum(map(count, turn.chunks)), len(turn.chunks) - len(repeated)
        runs.append(_Run(turn, tokens, sum(map(count, repeated)), new, *both, taken))
        seen.update(turn.chunks)
    return _Block(runs, alone, seconds)


def _ask_all(
    rag: RagCache,
    setting: RecurringSetting,
    side: str,
    part: Sequence[Turn],
    new_tokens: int = NEW_TOKENS,
) -> list[Answer]:
    """Answer turns by callers at once, and wait for the work behind their answers."""
    with ThreadPoolExecutor(setting.concurrent) as callers:
        answers = list(callers.map(partial(_ask, rag, setting, side, new_tokens), part))
    settle(rag)
    return answers


def _ask(
    rag: RagCache, setting: RecurringSetting, side: str, new_tokens: int, turn: Turn
) -> Answer:
    """Answer a turn, as one of the callers."""
    return rag.chat(turn.messages, **_options(setting, side, new_tokens))


def _ask_alone(
    rag: RagCache, setting: RecurringSetting, side: str, turn: Turn
) -> tuple[Answer, float]:
    """Answer a turn, and measure the seconds of the model up to the first token."""
    stats = rag.internals.shared.engine.stats
    before = stats.forward
    stream = rag.stream_chat(turn.messages, **_options(setting, side, NEW_TOKENS))
    pieces = iter(stream)
    next(pieces, None)
    device = stats.forward - before
    for _ in pieces:
        pass
    return stream.result(), device


def _options(setting: RecurringSetting, side: str, new_tokens: int) -> dict[str, Any]:
    """Return the options of the chats of one side."""
    generation = GenerationParams(max_tokens=new_tokens, ignore_eos=True, extractive=False)
    return {
        "generation": generation,
        "mode": setting.mode,
        "recognize_recurring": side == READING,
    }


def settle(rag: RagCache) -> None:
    """Wait until recurring texts are encoded, and conversations stored."""
    shared = rag.internals.shared
    shared.observing.submit(lambda: None).result()
    while rag.modules.observed.waiting:
        shared.observing.submit(lambda: None).result()
    shared.keeping.submit(lambda: None).result()


def _figures(blocks: Sequence[_Block]) -> dict[str, Any]:
    runs = [run for block in blocks for run in block.runs]
    alone = [run for block in blocks if block.alone for run in block.runs]
    timed = [block for block in blocks if not block.alone] or blocks
    tokens = sum(run.chunk_tokens for run in runs)
    rates = {
        name: sum(len(block.runs) for block in timed) / sum(block.seconds[name] for block in timed)
        for name in (READING, COMPUTING)
    }
    return {
        "read_share": sum(run.read_tokens for run in runs) / tokens,
        "recurring_share": sum(run.repeated_tokens for run in runs) / tokens,
        **_first_tokens(alone),
        "ttft_speedup_interval": _interval([run.speedup for run in alone]),
        "stages": {name: _stages(alone, name) for name in (READING, COMPUTING)},
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


def _stages(runs: Sequence[_Run], side: str) -> dict[str, float]:
    """Return median seconds: to find the texts, to lay the prompt out and lease its states, in the
    engine, and in it of the model."""
    timings = [getattr(run, side).timings for run in runs]
    engine = [each.first_token - each.retrieve - each.assemble for each in timings]
    return {
        "find": statistics.median(each.retrieve for each in timings),
        "lease": statistics.median(each.assemble for each in timings),
        "engine": statistics.median(engine),
        "model": statistics.median(run.device[side] for run in runs),
    }


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of a median."""
    rng = random.Random(len(values))
    medians = sorted(
        statistics.median(rng.choices(values, k=len(values))) for _ in range(_RESAMPLES)
    )
    return medians[_RESAMPLES // 40], medians[-_RESAMPLES // 40 - 1]


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
