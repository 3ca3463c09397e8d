"""Step scheduling: which requests run in the next step, and how many tokens each one computes.

`schedule` is a pure function. It takes plain values and returns a plan; it never touches the model,
the block pool or the clock. The policy, in order of precedence:

1. Decoding requests go first, one token each, so that no answer in progress stalls.
2. The rest of the token budget goes to prompts, in chunks (chunked prefill, Sarathi-Serve, Agrawal
   et al., 2024, §4).
3. A waiting request is admitted once the block pool can hold its whole prompt.
4. When the pool runs out of blocks, the youngest running request is preempted: it releases its
   blocks and returns to the waiting queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

AGING_SECONDS = 10.0
"""Seconds of waiting that are worth one priority level."""

MAX_BYPASS_SECONDS = 2.0
"""How long younger requests may overtake a waiting request that does not fit."""


@dataclass(slots=True)  # not frozen: every sequence has a new one in every step
class SchedulableRequest:
    """The part of a request that scheduling depends on."""

    number: int
    """Unique number of the request."""

    seniority: float
    """Submission time minus `AGING_SECONDS` per priority level. Smaller values go first, so a
    request of low priority ages to the front and never starves."""

    pending: int
    """Tokens to compute before the next token can be sampled. 1 while decoding."""

    free_slots: int = 0
    """Tokens that still fit into the blocks the request already holds."""

    held_blocks: int = 0
    """Blocks that preempting the request would free."""

    def blocks_for(self, tokens: int, block_size: int) -> int:
        """Number of blocks to allocate before `tokens` more tokens can be computed."""
        return max(0, -(-(tokens - self.free_slots) // block_size))


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step."""

    block_size: int
    """Tokens per block."""

    step_tokens: int
    """Token budget of a step in which at least one request decodes."""

    prefill_tokens: int
    """Token budget of a step in which no request decodes."""

    max_running: int
    """Maximum number of running requests."""


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The plan for one step."""

    tokens: dict[int, int]
    """Tokens to compute by request number, in row order. Preempted requests are absent."""

    admitted: tuple[int, ...]
    """Numbers of the requests that leave the waiting queue."""

    preempted: tuple[int, ...]
    """Numbers of the requests that return to the waiting queue."""


def schedule(
    running: Sequence[SchedulableRequest],
    waiting: Iterable[SchedulableRequest],
    config: SchedulerConfig,
    *,
    free_blocks: int,
    now: float,
    decoding: int = 0,
) -> SchedulerOutput:
    """Plan the next step.

    Args:
        running: Running requests, in order of seniority.
        waiting: Waiting requests, in order of seniority.
        config: Limits of the step.
        free_blocks: Blocks that are free or can be evicted.
        now: Current time, on the clock of `SchedulableRequest.seniority`.
        decoding: Number of further running requests, which decode and have the blocks that their
            tokens need.

    Returns:
        The tokens of each request, and which requests enter and leave.

    Example:
        >>> config = SchedulerConfig(64, step_tokens=256, prefill_tokens=2048, max_running=8)
        >>> decoding = SchedulableRequest(1, seniority=0.0, pending=1, free_slots=10, held_blocks=2)
        >>> prompt = SchedulableRequest(2, seniority=1.0, pending=600)
        >>> schedule([decoding], [prompt], config, free_blocks=20, now=2.0).tokens
        {1: 1, 2: 255}
    """
    kept, preempted, free = _preempt_youngest(running, config.block_size, free_blocks)
    tokens = {request.number: 1 for request in kept if request.pending == 1}
    rows = decoding + len(tokens)
    budget = (config.step_tokens if rows else config.prefill_tokens) - rows
    for request in kept:
        if request.pending == 1 or budget <= 0:
            continue
        count = min(request.pending, budget, request.free_slots + free * config.block_size)
        if count:
            tokens[request.number] = count
            free -= request.blocks_for(count, config.block_size)
            budget -= count
    admitted = []
    if not preempted:
        for request in _admissible(waiting, config, len(kept) + decoding, free, now):
            if budget <= 0:
                break
            admitted.append(request.number)
            tokens[request.number] = count = min(request.pending, budget)
            budget -= count
    return SchedulerOutput(tokens, tuple(admitted), tuple(preempted))


def _preempt_youngest(
    running: Sequence[SchedulableRequest], block_size: int, free: int
) -> tuple[list[SchedulableRequest], list[int], int]:
    """Preempt the youngest requests until each of the others has room for one more token.

    Returns the requests that keep running, the numbers of the preempted ones, and the blocks left
    after every decoding request has taken its own.
    """
    kept, preempted = list(running), []

    def needed() -> int:
        return sum(request.blocks_for(1, block_size) for request in kept)

    while len(kept) > max(1, free) and needed() > free:  # each needs one block at most
        youngest = kept.pop()
        preempted.append(youngest.number)
        free += youngest.held_blocks
    decoding = sum(request.blocks_for(1, block_size) for request in kept if request.pending == 1)
    return kept, preempted, free - decoding


def _admissible(
    waiting: Iterable[SchedulableRequest],
    config: SchedulerConfig,
    running: int,
    free: int,
    now: float,
) -> Iterator[SchedulableRequest]:
    """Yield the waiting requests that fit, oldest first.

    A request that does not fit is skipped. Once it has been skipped for `MAX_BYPASS_SECONDS`, no
    younger request overtakes it any more.
    """
    spare = free - running  # every running request may need one more block soon
    for request in waiting:
        if running >= config.max_running:
            return
        needed = request.blocks_for(request.pending + 1, config.block_size)
        # A request that runs alone may take every block: submission has checked that it fits.
        if needed <= spare or (not running and needed <= free):
            yield request
            spare -= needed + 1
            running += 1
        elif now - request.seniority > MAX_BYPASS_SECONDS:
            return
