"""Recurring texts: chats whose client pastes chunks into prompts, with and without their states."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ragcache.bench.harness import Progress
from ragcache.db import ModuleRow
from ragcache.machine import describe_machine
from ragcache.models import LoadedModel
from ragcache.params import GenerationParams
from ragcache.pipeline.answer import Answer
from ragcache.pipeline.chat_template import Message
from ragcache.rag import RagCache
from ragcache.recognition import Fingerprints, FingerprintTable, find
from ragcache.recurrence import RecurrenceTable

TEMPLATES = {
    "open-webui": (
        "### Task:\nRespond to the user query using the provided context.\n\n<context>\n",
        '<source id="{number}" name="{name}.md">{text}</source>\n',
        "</context>\n\nQuery: {question}",
    ),
    "langchain": (
        "Use the following pieces of context to answer the question.\n\n",
        "{text}\n\n",
        "Question: {question}\nHelpful Answer:",
    ),
    "agent": (
        "Continue with the task. These files were read:\n",
        "Contents of {name}.md:\n```\n{text}\n```\n",
        "Task: {question}",
    ),
}
"""Beginning, chunk and end of the last message that three kinds of clients write."""

WORDS = (
    "access annual approval archive budget calendar contract daily department deposit employee "
    "equipment expense form harbor holiday invoice leave letter manager meeting monthly notice "
    "office order parking payment period policy project purchase record remote report request "
    "review room safety salary schedule security service storage supplier team training travel "
    "vehicle visitor workshop"
).split()


@dataclass(frozen=True, slots=True)
class RecurringSetting:
    """The conversations. Each turn pastes other chunks, in random order, behind its history."""

    chunks: int = 24
    each: int = 3
    """Chunks of a turn, drawn by Zipf's law."""
    sentences: int = 18
    """Sentences of a chunk, about 12 tokens each."""
    exponent: float = 0.9
    conversations: int = 8
    turns: int = 4
    new_tokens: int = 8
    known_spans: int = 100_000
    """Chunks that were seen before detection is timed."""
    seed: int = 7


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt of a conversation."""

    messages: list[Message]
    chunk_characters: int
    """Characters of the pasted chunks."""


def bench_recurring(
    setting: RecurringSetting, model: LoadedModel, progress: Progress = lambda _: None
) -> dict[str, Any]:
    """Answer the same conversations twice, turn by turn: with and without recurring texts.

    Both sides share equal beginnings of prompts. Figures are of the second half of the turns. The
    states of new recurring texts are encoded between two turns, as they are while users read.

    Returns:
        `read_share`: share of the chunks' tokens that are read from states. `ttft_speedup`: median
        ratio of the times to the first token. `rate_ratio`: ratio of the times of all turns.
        `equal_answers_share`: share of equal answers. `detect_ms_32k_100000`: milliseconds of
        detection in a prompt of 32,000 characters, with 100,000 chunks known.
    """
    generation = GenerationParams(max_tokens=setting.new_tokens, ignore_eos=True, extractive=False)
    runs: list[_Run] = []
    with ExitStack() as stack:
        sides = {}
        for name in ("reading", "computing"):
            folder = Path(stack.enter_context(TemporaryDirectory()))
            sides[name] = stack.enter_context(
                RagCache.open(
                    folder,
                    model,
                    embedding="none",
                    force_modes=True,
                    recognize_recurring=name == "reading",
                )
            )
        turns = list(draw_turns(setting))
        for number, turn in enumerate(turns):
            progress(f"turn {number + 1} of {len(turns)}")
            answers: dict[str, Answer] = {}
            for name in sorted(sides, reverse=number % 2 == 1):
                answers[name] = sides[name].chat(turn.messages, generation=generation)
            sides["reading"].internals.shared.observing.submit(lambda: None).result()
            runs.append(_Run(turn, answers["reading"], answers["computing"]))
    progress("timing detection")
    context = {"model": model.name, "setting": asdict(setting), "machine": describe_machine()}
    return {**_figures(runs[len(runs) // 2 :]), **_detection(setting), **context}


@dataclass(frozen=True, slots=True)
class _Run:
    turn: Turn
    reading: Answer
    computing: Answer

    @property
    def chunk_tokens(self) -> float:
        """Tokens of the pasted chunks, estimated by their share of the prompt's characters."""
        characters = sum(len(str(message["content"])) for message in self.turn.messages)
        return self.turn.chunk_characters / characters * self.computing.reuse.prompt_tokens

    @property
    def speedup(self) -> float:
        return self.computing.timings.first_token / self.reading.timings.first_token

    @property
    def equal(self) -> bool:
        return self.reading.choices[0].token_ids == self.computing.choices[0].token_ids


def _figures(runs: Sequence[_Run]) -> dict[str, Any]:
    computed, read = (
        sum(answer.timings.total for answer in side)
        for side in zip(*((each.computing, each.reading) for each in runs), strict=True)
    )
    cached = sum(each.reading.reuse.cached_tokens for each in runs)
    return {
        "read_share": cached / sum(each.chunk_tokens for each in runs),
        "ttft_speedup": statistics.median(each.speedup for each in runs),
        "rate_ratio": computed / read,
        "equal_answers_share": statistics.mean(each.equal for each in runs),
        "turns": len(runs),
    }


def draw_turns(setting: RecurringSetting) -> Iterator[Turn]:
    """Yield the first turn of every conversation, then the second one of each, and so on."""
    rng = random.Random(setting.seed)
    chunks = [draw_chunk(rng, setting.sentences) for _ in range(setting.chunks)]
    weights = [1 / (rank + 1) ** setting.exponent for rank in range(setting.chunks)]
    histories: list[list[Message]] = [[] for _ in range(setting.conversations)]
    styles = list(TEMPLATES.values())
    for turn in range(setting.turns):
        for number, history in enumerate(histories):
            picked: list[int] = []
            while len(picked) < setting.each:
                [one] = rng.choices(range(setting.chunks), weights)
                picked += [one] if one not in picked else []
            begin, part, end = styles[number % len(styles)]
            pasted = "".join(
                part.format(number=place + 1, name=f"file{one}", text=chunks[one])
                for place, one in enumerate(picked)
            )
            question = f"What does the text say about the {rng.choice(WORDS)}, number {turn}?"
            content = begin + pasted + end.format(question=question)
            message: Message = {"role": "user", "content": content}
            size = sum(len(chunks[one]) for one in picked)
            yield Turn([*history, message], size)
            history += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": f"It says something about {rng.choice(WORDS)}."},
            ]


def draw_chunk(rng: random.Random, sentences: int) -> str:
    """Draw a text of paragraphs of six sentences."""
    every = [
        f"The {' '.join(rng.choices(WORDS, k=9))} {rng.randrange(100)}." for _ in range(sentences)
    ]
    return "\n\n".join(" ".join(every[at : at + 6]) for at in range(0, sentences, 6))


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
