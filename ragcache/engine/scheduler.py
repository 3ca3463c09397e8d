"""Which requests run in the next step, and with how many tokens. Pure: values in, values out.

Tokens that decode come first, so that no answer stalls; what is left of the step's budget goes to
long new text, in portions (Sarathi-Serve's chunked prefill). A request enters when the pool has
room for all of its text. Where the pool runs out, the youngest request gives its chunks back and
waits again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

AGEING = 10.0  # seconds of waiting that one level of priority is worth
PATIENCE = 2.0  # seconds after which a request that does not fit is no longer passed by others


@dataclass(frozen=True, slots=True)
class SchedulableRequest:
    """A request as the scheduler sees it.

    number: its name. seniority: its time of submission less `AGEING` for each level of priority;
    the smaller comes first, so that nobody starves. pending: tokens to compute before the next one
    is known. room: tokens that fit the chunks that it holds, beyond those filled. held: chunks that
    come free when it gives them back.
    """

    number: int
    seniority: float
    pending: int
    room: int = 0
    held: int = 0

    def chunks_for(self, tokens: int, chunk: int) -> int:
        """Chunks to allocate before so many of its tokens can be computed."""
        return max(0, -(-(tokens - self.room) // chunk))


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """chunk: tokens of a chunk. step_tokens: the most rows of a step while something decodes;
    prefill_tokens: the most of one in which nothing does. running: the most requests at once."""

    chunk: int
    step_tokens: int
    prefill_tokens: int
    running: int


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """tokens: how many each request computes, by number, in the order of the rows. admitted and
    preempted: numbers. A preempted request computes nothing."""

    tokens: dict[int, int]
    admitted: tuple[int, ...]
    preempted: tuple[int, ...]


def schedule(
    running: Sequence[SchedulableRequest],
    waiting: Iterable[SchedulableRequest],
    limits: SchedulerConfig,
    *,
    free_chunks: int,
    now: float,
) -> SchedulerOutput:
    """running and waiting are in the order of seniority. free_chunks: free or evictable."""
    kept, preempted, free = _keep(running, limits.chunk, free_chunks)
    decodes = any(each.pending == 1 for each in kept)
    budget = limits.step_tokens if decodes else limits.prefill_tokens
    tokens = {each.number: 1 for each in kept if each.pending == 1}
    budget -= len(tokens)
    for each in kept:
        if each.pending > 1 and budget > 0:
            count = min(each.pending, budget, each.room + free * limits.chunk)
            if count:
                tokens[each.number] = count
                free -= each.chunks_for(count, limits.chunk)
                budget -= count
    admitted = []
    if not preempted:
        room = limits.running - len(kept)
        # every running request may need another chunk soon
        spare = free - len(kept)
        for each in _entering(
            waiting, limits.chunk, room, spare, idle=not kept, free=free, now=now
        ):
            if budget <= 0:
                break
            admitted.append(each.number)
            tokens[each.number] = count = min(each.pending, budget)
            budget -= count
    return SchedulerOutput(tokens, tuple(admitted), tuple(preempted))


def _keep(
    running: Sequence[SchedulableRequest], chunk: int, free: int
) -> tuple[list[SchedulableRequest], list[int], int]:
    """Those that go on, the youngest given up until the others have room for a token each."""
    kept, preempted = list(running), []

    def needed() -> int:
        return sum(each.chunks_for(1, chunk) for each in kept)

    while len(kept) > 1 and needed() > free:
        youngest = kept.pop()
        preempted.append(youngest.number)
        free += youngest.held
    decoding = sum(each.chunks_for(1, chunk) for each in kept if each.pending == 1)
    return kept, preempted, free - decoding


def _entering(
    waiting: Iterable[SchedulableRequest],
    chunk: int,
    room: int,
    spare: int,
    *,
    idle: bool,
    free: int,
    now: float,
) -> Iterable[SchedulableRequest]:
    """The waiting requests that fit, in order. One that does not is passed by younger ones, but
    not for longer than `PATIENCE`."""
    for each in waiting:
        if room <= 0:
            return
        needed = each.chunks_for(each.pending + 1, chunk)
        # alone, a request may take everything: what it needs in all was checked when it came
        if needed <= spare or (idle and needed <= free):
            yield each
            spare -= needed + 1
            free -= needed
            room -= 1
            idle = False
        elif now - each.seniority > PATIENCE:
            return
