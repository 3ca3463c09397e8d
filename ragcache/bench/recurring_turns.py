"""Conversations for the benchmark of recurring texts: prompts of clients that retrieve."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragcache.errors import ConfigurationError
from ragcache.pipeline.chat_template import Message

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

    chunks: int = 1000
    each: int = 5
    """Chunks of a turn, drawn by Zipf's law."""
    sentences: int = 18
    """Sentences of a chunk, 13 to 14 tokens each."""
    exponent: float = 1.0
    conversations: int = 100
    turns: int = 8
    earlier: int = 0
    """Conversations over the same chunks that the service has answered before."""
    concurrent: int = 1
    """Callers at once, for the rate of requests."""
    mode: str | None = None
    """Mode in which recurring texts are read. Defaults to the model's."""
    known_spans: int = 100_000
    """Chunks that were seen before detection is timed."""
    seed: int = 7

    @classmethod
    def reduced(cls, **sizes: Any) -> RecurringSetting:
        """Return a setting of a few minutes on a CPU."""
        small = {"chunks": 40, "each": 3, "conversations": 10, "turns": 6}
        return cls(**(small | sizes))


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt of a conversation."""

    messages: list[Message]
    chunks: tuple[str, ...]
    """Texts that the client pasted since the conversation's last prompt."""


def draw_turns(setting: RecurringSetting) -> Iterator[Turn]:
    """Yield the first turn of every conversation, then the second one of each, and so on.

    Histories keep questions and answers, and no chunks. All turns of the earlier conversations come
    first.
    """
    rng = random.Random(setting.seed)
    chunks = [draw_chunk(rng, setting.sentences) for _ in range(setting.chunks)]
    weights = [1 / (rank + 1) ** setting.exponent for rank in range(setting.chunks)]
    for conversations in (setting.earlier, setting.conversations):
        histories: list[list[Message]] = [[] for _ in range(conversations)]
        for turn in range(setting.turns):
            for number, history in enumerate(histories):
                picked = _draw_places(rng, weights, setting.each)
                style = list(TEMPLATES.values())[number % len(TEMPLATES)]
                question = f"What does the text say about the {rng.choice(WORDS)}, number {turn}?"
                content = paste(style, [(one, chunks[one]) for one in picked], question)
                yield Turn(
                    [*history, {"role": "user", "content": content}],
                    tuple(chunks[one] for one in picked),
                )
                answer = f"It says something about {rng.choice(WORDS)}."
                history += [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer},
                ]


def _draw_places(rng: random.Random, weights: Sequence[float], count: int) -> list[int]:
    """Draw different places by their weights."""
    picked: list[int] = []
    while len(picked) < count:
        [one] = rng.choices(range(len(weights)), weights)
        picked += [one] if one not in picked else []
    return picked


def paste(style: tuple[str, str, str], chunks: Sequence[tuple[int, str]], question: str) -> str:
    """Return a message with chunks, given with their numbers, in one of the `TEMPLATES`."""
    begin, part, end = style
    pasted = "".join(
        part.format(number=place, name=f"file{one}", text=text)
        for place, (one, text) in enumerate(chunks, start=1)
    )
    return begin + pasted + end.format(question=question)


def draw_agent_turns(setting: RecurringSetting) -> Iterator[Turn]:
    """Yield the turns of a coding agent's sessions: files read in changing orders, kept in history.

    A session begins with an instruction and a task. In each turn the agent has read up to
    `each` files of its project. One file in ten has been edited since it was last read.
    """
    rng = random.Random(setting.seed)
    files = [draw_chunk(rng, setting.sentences) for _ in range(setting.chunks)]
    for session in range(setting.earlier + setting.conversations):
        task = f"Session {session}: change how the {rng.choice(WORDS)} is handled."
        history: list[Message] = [
            {"role": "system", "content": "You are an agent that edits the files of a project."},
            {"role": "user", "content": task},
        ]
        for _ in range(setting.turns):
            names = rng.sample(range(len(files)), rng.randint(1, setting.each))
            for name in names:
                if rng.random() < 0.1:
                    files[name] = edited(rng, files[name])
            read = "".join(f"==> file{name}.py <==\n{files[name]}\n\n" for name in names)
            history += [
                {"role": "assistant", "content": f"I read {len(names)} files."},
                {"role": "user", "content": f"{read}What is next?"},
            ]
            yield Turn([*history], tuple(files[name] for name in names))


def read_turns(file: Path) -> Iterator[Turn]:
    """Yield the turns of a recorded trace.

    Args:
        file: JSON lines with the `messages` of each prompt, and the `chunks` in its last message.

    Raises:
        ConfigurationError: The file cannot be read, or a line has other contents.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        try:
            found = json.loads(line)
            yield Turn(found["messages"], tuple(found["chunks"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"{file}, line {number}: a line is an object with `messages` and `chunks`"
            ) from error


def draw_chunk(rng: random.Random, sentences: int) -> str:
    """Draw a text of paragraphs of six sentences."""
    every = [draw_sentence(rng) for _ in range(sentences)]
    return "\n\n".join(" ".join(every[at : at + 6]) for at in range(0, sentences, 6))


def draw_sentence(rng: random.Random) -> str:
    """Draw a sentence of eleven words."""
    return f"The {' '.join(rng.choices(WORDS, k=9))} {rng.randrange(100)}."


def edited(rng: random.Random, text: str) -> str:
    """Return a text with one other sentence."""
    sentences = text.split(". ")
    sentences[rng.randrange(len(sentences))] = draw_sentence(rng).removesuffix(".")
    return ". ".join(sentences)
