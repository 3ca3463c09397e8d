"""An engine core with small blocks and a manual clock, stepped by the test."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from ragcache.engine import Context, EngineConfig, Request, RequestHandle, RequestOutput, TokenDelta
from ragcache.engine.core import EngineCore
from ragcache.engine.engine import RequestChecker
from ragcache.engine.kv_cache import BlockPool
from ragcache.engine.queues import AnswerChannel
from ragcache.engine.runner import ModelRunner, RaggedModelRunner
from ragcache.engine.sampler import SampledToken, Sampler, SamplerState
from ragcache.errors import UnusableLogits
from ragcache.models import CausalLM

BLOCK_SIZE = 4

Answer = RequestHandle[TokenDelta, RequestOutput]


class SmallBlockRunner(RaggedModelRunner):
    """So that short prompts have several."""

    def create_pool(self, nbytes: int) -> BlockPool:
        return BlockPool.create(self.model, nbytes, BLOCK_SIZE)


class ManualClock:
    """Stands still unless a test moves it."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def config_of(
    causal: CausalLM,
    blocks: int = 128,
    step_tokens: int = 256,
    prefill_tokens: int = 2048,
    running: int = 64,
) -> EngineConfig:
    nbytes = blocks * BLOCK_SIZE * causal.bytes_per_token
    return EngineConfig(nbytes, step_tokens, prefill_tokens, running)


class SteppedCore(EngineCore):
    """An engine core that a test submits requests to and steps."""

    def __init__(
        self,
        runner: ModelRunner,
        settings: EngineConfig | None = None,
        clock: ManualClock | None = None,
    ) -> None:
        super().__init__(runner, settings or config_of(runner.model), clock or ManualClock())
        self.checker = RequestChecker(runner, self.kv_manager)

    def submit(self, request: Request) -> Answer:
        self.checker.check_request(request)
        channel = AnswerChannel(lambda: None)
        self.add_request(request, channel, self.clock())
        return RequestHandle(channel)

    def drain(self, steps: int = 10_000) -> None:
        """Steps until nothing is left to do."""
        while self.busy:
            assert steps, "the engine does not come to an end"
            self.step()
            steps -= 1

    def run(self, *requests: Request) -> list[RequestOutput]:
        """Submits the requests at once, and returns their outputs in order."""
        handles = [self.submit(request) for request in requests]
        self.drain()
        return [handle.result(0) for handle in handles]


def core_of(
    causal: CausalLM, settings: EngineConfig | None = None, clock: ManualClock | None = None
) -> SteppedCore:
    return SteppedCore(SmallBlockRunner(causal), settings, clock)


def assert_all_blocks_free(core: EngineCore) -> None:
    """Nothing is in use besides what the tree retains; without that, the pool is whole."""
    memory = core.kv_manager
    assert not core.busy
    assert memory.pool.used_count == memory.radix_cache.retained
    memory.pool.free_blocks(memory.radix_cache.evict_blocks(memory.radix_cache.retained))
    assert (memory.pool.used_count, memory.radix_cache.retained) == (0, 0)
    assert memory.pool.allocate_blocks(memory.pool.num_blocks) == list(
        range(memory.pool.num_blocks)
    )
    memory.pool.free_blocks(range(memory.pool.num_blocks))


def plain_context(token_ids: Sequence[int]) -> Context:
    """A prompt of own tokens alone."""
    length = len(token_ids)
    return Context((), tuple(token_ids), tuple(range(length)), length)


def sample_tokens(
    logits: Tensor, states: Sequence[SamplerState],
    forbidden: Sequence[Collection[int]] | None = None,
    masks: Sequence[Tensor | None] | None = None,
) -> list[SampledToken | UnusableLogits]:  # fmt: skip
    """The next tokens of all rows, by PyTorch's operations on the logits' device."""
    return Sampler(logits.device).launch(logits, states, forbidden, masks).wait()
