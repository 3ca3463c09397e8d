"""Greedy generation for several requests in one ragged batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ragcache.engine.batch import build_step
from ragcache.engine.context import Context
from ragcache.engine.layout import Work
from ragcache.engine.private import Room
from ragcache.models import CausalLM


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A context to continue, greedily, until a stop token or `max_new_tokens`."""

    context: Context
    max_new_tokens: int
    stop_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Completion:
    """token_ids: without the stop token. finish_reason: `stop` or `length`.

    first_token_at, finished_at: `time.perf_counter` readings, in seconds.
    """

    token_ids: tuple[int, ...]
    finish_reason: str
    first_token_at: float
    finished_at: float


@dataclass(slots=True, eq=False)
class _Active:
    """A request under way."""

    request: Request
    private: Room
    pending: Sequence[int]
    positions: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    generated: int = 0
    finish_reason: str = ""
    first_token_at: float = 0.0
    finished_at: float = 0.0

    def accept(self, token: int) -> bool:
        """Takes the next token; False when it only ended the answer."""
        now = time.perf_counter()
        self.first_token_at = self.first_token_at or now
        self.private.advance(self.positions)
        self.pending = (token,)
        self.positions = (self.request.context.next_position + self.generated,)
        self.generated += 1
        stopped = token in self.request.stop_ids
        if not stopped:
            self.tokens.append(token)
        if stopped or len(self.tokens) == self.request.max_new_tokens:
            self.finish_reason = "stop" if stopped else "length"
            self.finished_at = now
        return not stopped


def generate(
    model: CausalLM,
    requests: Sequence[Request],
    on_token: Callable[[int, int], None] | None = None,
) -> list[Completion]:
    """Runs the requests together; each leaves the batch when it is done.

    on_token(index of the request, token id) is called for every token as it is chosen.
    """
    active = [_start(model, request) for request in requests]
    running = list(enumerate(active))
    while running:
        works = [
            Work(a.request.context.segments, a.private, a.pending, a.positions) for _, a in running
        ]
        logits = model.forward(build_step(model, works))  # [R, vocabulary]
        for (index, each), token in zip(running, logits.argmax(dim=-1).tolist(), strict=True):
            if each.accept(token) and on_token is not None:
                on_token(index, token)
        running = [(index, each) for index, each in running if not each.finish_reason]
    return [
        Completion(tuple(a.tokens), a.finish_reason, a.first_token_at, a.finished_at)
        for a in active
    ]


def _start(model: CausalLM, request: Request) -> _Active:
    context = request.context
    capacity = len(context.token_ids) + request.max_new_tokens
    private = Room.allocate(model, capacity)
    return _Active(request, private, context.token_ids, context.position_ids)
