"""One model, one engine and one set of documents, which all parts of a shape share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from gpu_table import GpuWorkload

from ragcache.bench.harness import LlamaShape, Progress
from ragcache.bench.shape_session import PATIENCE, ShapeSession, counters_between
from ragcache.engine import (
    Context,
    EncodeJob,
    EngineConfig,
    EngineStats,
    LLMEngine,
    Request,
    Segment,
    assemble_context,
)
from ragcache.states import KVStates
from ragcache.states.quantization import StoredStates

_BLOCKS = 3  # of the pool, for each request that runs: question, answer, and one to spare
_BLOCK = 64


class GpuSession(ShapeSession):
    """A session with documents that were encoded, or random states in their place: no figure
    depends on the values."""

    def __init__(
        self, shape: LlamaShape, load: GpuWorkload, device: str,
        progress: Progress = lambda _: None, quantization: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(shape, load.preamble, device, progress, quantization=quantization)
        self.load = load
        self._documents: list[KVStates] = []
        self._at_defaults = False

    @cached_property
    def engine(self) -> LLMEngine:
        """The engine; the first use ends when its first answer has, whatever it prepares before."""
        most = max(self.load.requests, *(rows for _, rows, _ in self.load.decode))
        config = EngineConfig.for_device(
            torch.device(self.device), running=most, step_tokens=4096, warm_up=True,
            pool_bytes=most * _BLOCKS * _BLOCK * self.causal.computed_bytes_per_token,
        )  # fmt: skip
        engine = LLMEngine(self.causal, config)
        context = assemble_context(
            [], self.tokens(self.load.question), window=self.causal.window, max_tokens=2
        )
        engine.submit_request(Request(context, 2)).result()
        return engine

    def serve_at_defaults(self) -> LLMEngine:
        """Replace the engine by one at the defaults of the device, once, and return it."""
        if not self._at_defaults:
            if "engine" in self.__dict__:
                self.engine.close()
                del self.engine
                self.free_memory()
            config = EngineConfig.for_device(torch.device(self.device), warm_up=True)
            self.engine = LLMEngine(self.causal, config)
            self._at_defaults = True
        return self.engine

    @cached_property
    def texts(self) -> list[list[int]]:
        """The token ids of the documents."""
        return [self.tokens(self.load.document_tokens) for _ in range(self.load.documents)]

    @property
    def documents(self) -> list[KVStates]:
        """States of the documents behind the preamble."""
        if not self._documents:
            load = self.load
            self._documents = [
                self.random_states(load.document_tokens, load.preamble)
                for _ in range(load.documents)
            ]
        return self._documents

    def encode(self, texts: Sequence[Sequence[int]]) -> list[KVStates]:
        """Encodes documents behind the preamble, and waits for the device."""
        root = Segment(self.root, 0)
        jobs = [EncodeJob(text, self.load.preamble, root) for text in texts]
        states = list(self.engine.encode(jobs))
        self.synchronize()
        return states

    def keep_documents(self, states: Sequence[KVStates]) -> None:
        """Takes encoded documents for the parts that follow."""
        self._documents = list(states)

    def context(
        self, states: Sequence[StoredStates], new_tokens: int, question: Sequence[int] | None = None
    ) -> Context:
        """A prompt of these states behind the preamble, with a question, by default of its own."""
        return super().context(states, new_tokens, question or self.tokens(self.load.question))

    def first_token(self, states: Sequence[KVStates], question: Sequence[int]) -> None:
        """Asks over the states, and waits for an answer of one token."""
        context = self.context(states, 1, question)
        self.engine.submit_request(self.request(context, 1)).result(PATIENCE)


@dataclass(frozen=True, slots=True)
class Steps:
    """Decoding steps: seconds between the tokens of one answer, and the engine's counters over
    them."""

    seconds: list[float]
    stats: dict[str, float]

    @property
    def median_ms(self) -> float:
        return 1e3 * statistics.median(self.seconds)

    def figures(self) -> dict[str, Any]:
        """For the JSON file. host_ms: of a step, what the engine's thread does beside waiting for
        the model; idle_share: of the time, where the engine counts it."""
        steps = max(1.0, self.stats.get("steps", 0.0))
        host = self.stats["planning"] + self.stats["sampling"]
        idle = self.stats.get("idle")
        return {
            "step_ms": self.median_ms,
            "host_ms": 1e3 * self.stats.get("host", host) / steps,
            "idle_share": None if idle is None else idle / sum(self.seconds),
            "steps_ms": [round(1e3 * each, 3) for each in self.seconds],
            "stats": self.stats,
        }


def time_steps(session: GpuSession, contexts: Sequence[Context], new_tokens: int) -> Steps:
    """Decodes all contexts together. Counts the steps in which every one of them decodes: those
    between the tokens of the request that came last, without the first and the last few."""
    engine, margin = session.engine, min(4, new_tokens // 4)
    requests = [session.request(context, new_tokens) for context in contexts]
    handles = [engine.submit_request(request) for request in requests]
    times, seen = list[float](), list[EngineStats]()
    for _ in handles[-1]:
        times.append(time.perf_counter())
        if len(times) in (margin, new_tokens - margin):
            seen.append(replace(engine.stats))
    for handle in handles:
        handle.result(PATIENCE)
    counted = times[margin - 1 : new_tokens - margin]
    seconds = [after - before for before, after in pairwise(counted)]
    return Steps(seconds, counters_between(*seen[:2]))


def median_ms(
    run: Callable[[], object], runs: int, warm: int = 3,
    before: Callable[[], object] = lambda: None,
) -> tuple[float, list[float]]:  # fmt: skip
    """The median of a call's wall-clock time in milliseconds, after warm calls, and all times.
    before: called each time before the clock starts."""
    times = []
    for number in range(-warm, runs):
        before()
        begin = time.perf_counter()
        run()
        if number >= 0:
            times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times), [round(each, 3) for each in times]
