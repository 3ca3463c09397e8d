"""Which requests run in the next step, and with how many tokens. Pure: values in, values out.

Tokens that decode come first, so that no answer stalls; what is left of the step's budget goes to
long new text, in portions (Sarathi-Serve's chunked prefill). A request enters when the pool has
room for all of its text. Where the pool runs out, the youngest request gives its blocks back and
waits again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

AGEING = 10.0  # seconds of waiting that one level of priority is worth
MAX_BYPASS_SECONDS = 2.0  # how long a request that does not fit is passed by younger ones


@dataclass(frozen=True, slots=True)
class SchedulableRequest:
    """A request as the scheduler sees it.

    number: identifies it. seniority: its time of submission less `AGEING` for each level of
    priority; the smaller comes first, so that nobody starves. pending: tokens to compute before the
    next one is known. room: tokens that still fit the blocks that it holds. held: blocks that
    preempting it frees.
    """

    number: int
    seniority: float
    pending: int
    room: int = 0
    held: int = 0

    def blocks_for(self, tokens: int, block_size: int) -> int:
        """Blocks to allocate before so many of its tokens can be computed."""
        return max(0, -(-(tokens - self.room) // block_size))


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """block_size: in tokens. step_tokens: the most rows of a step while something decodes;
    prefill_tokens: the most of one in which nothing does. running: the most requests at once."""

    block_size: int
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
    config: SchedulerConfig,
    *,
    free_blocks: int,
    now: float,
) -> SchedulerOutput:
    """Decides which requests compute how many tokens in the next step.

    running and waiting are in the order of seniority. free_blocks: free or evictable.
    """
    kept, preempted, free = _keep(running, config.block_size, free_blocks)
    decodes = any(each.pending == 1 for each in kept)
    budget = config.step_tokens if decodes else config.prefill_tokens
    tokens = {each.number: 1 for each in kept if each.pending == 1}
    budget -= len(tokens)
    for each in kept:
        if each.pending > 1 and budget > 0:
            count = min(each.pending, budget, each.room + free * config.block_size)
            if count:
                tokens[each.number] = count
                free -= each.blocks_for(count, config.block_size)
                budget -= count
    admitted = []
    if not preempted:
        for each in _entering(waiting, config, len(kept), free, now):
            if budget <= 0:
                break
            admitted.append(each.number)
            tokens[each.number] = count = min(each.pending, budget)
            budget -= count
    return SchedulerOutput(tokens, tuple(admitted), tuple(preempted))


def _keep(
    running: Sequence[SchedulableRequest], block_size: int, free: int
) -> tuple[list[SchedulableRequest], list[int], int]:
    """Those that go on. The youngest are preempted until the others have room for a token each."""
    kept, preempted = list(running), []

    def needed() -> int:
        return sum(each.blocks_for(1, block_size) for each in kept)

    while len(kept) > 1 and needed() > free:
        youngest = kept.pop()
        preempted.append(youngest.number)
        free += youngest.held
    decoding = sum(each.blocks_for(1, block_size) for each in kept if each.pending == 1)
    return kept, preempted, free - decoding


def _entering(
    waiting: Iterable[SchedulableRequest], config: SchedulerConfig, running: int, free: int,
    now: float,
) -> Iterable[SchedulableRequest]:  # fmt: skip
    """The waiting requests that fit, in order. One that does not is passed by younger ones, but
    not for longer than `MAX_BYPASS_SECONDS`."""
    spare = free - running  # every running request may need another block soon
    for each in waiting:
        if running >= config.running:
            return
        needed = each.blocks_for(each.pending + 1, config.block_size)
        # with nothing else running it may take everything: its needs were checked at submission
        if needed <= spare or (not running and needed <= free):
            yield each
            spare -= needed + 1
            running += 1
        elif now - each.seniority > MAX_BYPASS_SECONDS:
            return
