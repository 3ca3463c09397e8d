"""The limits of an engine, and its counters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Memory and limits of an engine.

    Args:
        pool_bytes: Memory for the states of requests' own tokens.
        step_tokens: The most rows of a step in which something decodes, so that long new text
            stalls no answer.
        prefill_tokens: The most rows of a step in which nothing decodes.
        running: The most requests at once.
        queue: The most requests that wait; one more is refused.
        retained: The share of the pool that may hold states of requests that have ended.
    """

    pool_bytes: int = 2**29
    step_tokens: int = 256
    prefill_tokens: int = 2048
    running: int = 64
    queue: int = 1024
    retained: float = 0.5


@dataclass(slots=True)
class EngineStats:
    """Counters of an engine. Tokens are rows of steps; seconds are of its thread.

    planning: scheduling and building batches; forward: the model; sampling: choosing tokens and
    handing them to callers. queued: the sum of the seconds that admitted requests waited.
    """

    steps: int = 0
    prompt_tokens: int = 0
    decoded_tokens: int = 0
    encoded_tokens: int = 0
    shared_tokens: int = 0
    admitted: int = 0
    preempted: int = 0
    queued: float = 0.0
    planning: float = 0.0
    forward: float = 0.0
    sampling: float = 0.0
