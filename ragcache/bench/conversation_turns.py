"""Drawn conversations of chats and agents. Needs nothing beside the standard library."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class SessionKind:
    """Conversations of one kind. Ranges are the least and the most, drawn evenly."""

    sessions: int
    turns: int
    first_tokens: int
    """Tokens before the first message, equal in all sessions: instructions and tools."""
    new_tokens: tuple[int, int]
    """Tokens that each turn adds: a message, or the result of a tool."""
    answer_tokens: int
    pause: tuple[float, float]
    """Seconds from an answer to the next turn. They decide on the order of turns alone."""
    collections: int = 0
    """Collections of documents. A session's prompts begin with documents of one of them."""
    documents: int = 4
    """Documents of a session, and half of the documents of a collection."""
    document_tokens: int = 256

    @property
    def tokens(self) -> float:
        """Mean tokens of a session at its end, apart from documents."""
        return self.first_tokens + self.turns * (sum(self.new_tokens) / 2 + self.answer_tokens)

    @property
    def most_tokens(self) -> int:
        """Most tokens of a session at its end, with its documents."""
        read = self.documents * self.document_tokens if self.collections else 0
        return read + self.first_tokens + self.turns * (self.new_tokens[1] + self.answer_tokens)

    def within(self, window: int) -> SessionKind:
        """Return sessions with as many turns as a window of tokens holds, and at least two."""
        per_turn = self.new_tokens[1] + self.answer_tokens
        before = self.most_tokens - self.turns * per_turn
        return replace(self, turns=max(2, min(self.turns, (window - before) // per_turn)))


CHATS = SessionKind(200, 10, 64, (50, 500), 200, (5.0, 120.0), collections=20)
AGENTS = SessionKind(50, 30, 8192, (200, 4000), 32, (1.0, 60.0))
FEW_CHATS = SessionKind(24, 5, 64, (50, 250), 16, (5.0, 120.0), collections=4)
FEW_AGENTS = SessionKind(20, 8, 1024, (64, 512), 4, (1.0, 60.0))


@dataclass(slots=True)
class Session:
    """One conversation, which grows."""

    number: int
    tokens: list[int]
    """Everything that was said so far."""
    documents: tuple[int, ...] = ()
    """Numbers of the documents before it."""
    turns: int = 0
    """Number of answered turns."""
    history: int = 0
    """Tokens of the last prompt with its documents, and of the answer. 0 before the first turn."""


@dataclass(slots=True)
class Trace:
    """The turns of all sessions, in the order in which their pauses end.

    Equal seeds draw equal sessions, as long as the answers are equal.
    """

    kind: SessionKind
    """The sessions."""
    words: Sequence[int]
    """Token ids to draw from."""
    seed: int = 7
    """Seed of the random numbers."""
    _due: list[tuple[float, int, Session]] = field(default_factory=list, init=False)
    _rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        rng, kind = random.Random(self.seed), self.kind
        self._rng = rng
        first = rng.choices(self.words, k=kind.first_tokens)
        for number in range(kind.sessions):
            documents: tuple[int, ...] = ()
            if kind.collections:
                every = 2 * kind.documents
                begin = number % kind.collections * every
                documents = tuple(rng.sample(range(begin, begin + every), kind.documents))
            due = rng.uniform(*kind.pause)
            self._due.append((due, number, Session(number, [*first], documents)))
        heapq.heapify(self._due)

    def document(self, number: int) -> list[int]:
        """Return the tokens of a document."""
        rng = random.Random(f"{self.seed} {number}")
        return rng.choices(self.words, k=self.kind.document_tokens)

    def waves(self, size: int) -> Iterator[list[Session]]:
        """Yield up to `size` sessions at a time, each with a new message at its end.

        The caller adds the answer to each of them and counts the turn before the next wave.
        """
        rng, kind = self._rng, self.kind
        while self._due:
            wave = [heapq.heappop(self._due) for _ in range(min(size, len(self._due)))]
            sessions = [session for _, _, session in wave]
            for session in sessions:
                session.tokens += rng.choices(self.words, k=rng.randint(*kind.new_tokens))
            yield sessions
            for due, number, session in wave:
                if session.turns < kind.turns:
                    pause = rng.uniform(*kind.pause)
                    heapq.heappush(self._due, (due + pause, number, session))
