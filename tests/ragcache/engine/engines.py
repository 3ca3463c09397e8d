"""Engines with small chunks, stepped by hand."""

from __future__ import annotations

from collections.abc import Sequence

from ragcache.engine import Context, EngineConfig, Request, RequestHandle, RequestOutput, TokenDelta
from ragcache.engine.core import Answers, EngineCore
from ragcache.engine.kv_cache import BlockPool
from ragcache.engine.runner import RaggedModelRunner
from ragcache.models import CausalLM

CHUNK = 4

Answer = RequestHandle[TokenDelta, RequestOutput]


class SmallChunks(RaggedModelRunner):
    """So that short prompts have several."""

    def pool(self, nbytes: int) -> BlockPool:
        return BlockPool.create(self.model, nbytes, CHUNK)


class Clock:
    """Stands still unless a test moves it."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def settings_of(
    causal: CausalLM,
    chunks: int = 128,
    step_tokens: int = 256,
    prefill_tokens: int = 2048,
    running: int = 64,
) -> EngineConfig:
    nbytes = chunks * CHUNK * causal.bytes_per_token
    return EngineConfig(nbytes, step_tokens, prefill_tokens, running)


def core_of(
    causal: CausalLM, settings: EngineConfig | None = None, clock: Clock | None = None
) -> EngineCore:
    return EngineCore(SmallChunks(causal), settings or settings_of(causal), clock or Clock())


def submit(core: EngineCore, request: Request) -> Answer:
    core.check(request)
    channel = Answers(lambda: None)
    core.add(request, channel, core.clock())
    return RequestHandle(channel)


def drain(core: EngineCore, steps: int = 10_000) -> None:
    """Steps until nothing is left to do."""
    while core.busy:
        assert steps, "the engine does not come to an end"
        core.step()
        steps -= 1


def run(core: EngineCore, *requests: Request) -> list[RequestOutput]:
    handles = [submit(core, request) for request in requests]
    drain(core)
    return [handle.result(0) for handle in handles]


def check_whole(core: EngineCore) -> None:
    """Nothing is in use besides what the tree retains; without that, the pool is whole."""
    memory = core.memory
    assert not core.busy
    assert memory.pool.used_count == memory.tree.retained
    memory.pool.free(memory.tree.evict(memory.tree.retained))
    assert (memory.pool.used_count, memory.tree.retained) == (0, 0)
    assert memory.pool.allocate(memory.pool.total) == list(range(memory.pool.total))
    memory.pool.free(range(memory.pool.total))


def plain(token_ids: Sequence[int]) -> Context:
    """A prompt of own tokens alone."""
    length = len(token_ids)
    return Context((), tuple(token_ids), tuple(range(length)), length)
