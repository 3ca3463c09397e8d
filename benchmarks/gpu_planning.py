"""The host's part of a GPU's steps under arrivals, without a GPU.

    python benchmarks/gpu_planning.py --running 8,64,256

The engine core schedules, plans and lays out steps as on a GPU, of the 8B's heads, and a runner
takes the place of the device: its tokens are there at once. Requests read 8 of 560 documents in
random order. Answers end and others join at the rate that keeps so many running. Times are
processor time of the thread, without the launches of kernels and graphs, while older objects are
not collected, as in an engine of a GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ragcache.bench.harness import LlamaShape, shaped_causal
from ragcache.engine import EngineConfig, Request, assemble_context
from ragcache.engine.core import EngineCore
from ragcache.engine.device_runner import DeviceModelRunner
from ragcache.engine.queues import AnswerChannel
from ragcache.engine.sampler import Sampler, SamplerState, _PendingTokens
from ragcache.machine import YOUNG_OBJECTS, describe_machine, frozen_heap
from ragcache.models import CausalLM
from ragcache.states import KVStates

HEADS = LlamaShape(1, 256, 32, 8, 64, 64, 32768, tied=False)
"""The heads of the 8B, each of 8 elements, in one layer: plans depend on nothing else."""


@dataclass(frozen=True, slots=True)
class PlanningSetting:
    """A load of the engine core."""

    documents: int = 560
    document_tokens: int = 1024
    each: int = 8
    question: int = 64
    new_tokens: int = 128
    steps: int = 200


class GivenTokens(Sampler):
    """Takes the same token for every row, where a GPU would launch a kernel."""

    def launch(
        self,
        logits: Tensor,  # noqa: ARG002
        states: Sequence[SamplerState],
        *_: Any,
        **__: Any,
    ) -> _PendingTokens:
        """Return the tokens, which are there."""
        tokens = torch.ones(len(states), dtype=torch.int64)
        return _PendingTokens(states, [tokens], None, tokens)


class PlanningRunner(DeviceModelRunner):
    """Plans and uploads steps, and computes nothing."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__(model, graphs=False)
        self._logits = torch.zeros(1024, model.vocabulary)
        self._logits[:, 1] = 1.0

    def create_sampler(self) -> Sampler:
        """Return a sampler that computes nothing."""
        return GivenTokens(self.device)

    def _prepare(self) -> None:
        """Leave the model as it is."""

    def _run(self, launch: Any, previous: Tensor | None) -> Tensor:  # noqa: ARG002
        launch.tables.upload()
        return self._logits[: launch.batch.logits]


class PlanningLoad:
    """A core under a steady load."""

    def __init__(self, setting: PlanningSetting, running: int) -> None:
        self.setting, self.running = setting, running
        self.rng = random.Random(1)
        causal = shaped_causal(HEADS)
        size = (1, HEADS.num_kv_heads, setting.document_tokens, HEADS.head_dim)
        self.documents = [  # nothing reads or writes them, so they take no memory
            KVStates(
                torch.empty(size, dtype=causal.dtype), torch.empty(size, dtype=causal.dtype), 0
            )
            for _ in range(setting.documents)
        ]
        pool_bytes = running * 4 * 64 * causal.computed_bytes_per_token
        config = EngineConfig(
            pool_bytes=pool_bytes, step_tokens=512, prefill_tokens=8192, running=256
        )
        self.core = EngineCore(PlanningRunner(causal), config)
        self._joined = 0.0

    def join(self, new_tokens: int) -> None:
        """Submits a request of so many answer tokens."""
        setting = self.setting
        states = self.rng.sample(self.documents, setting.each)
        question = HEADS.draw_tokens(self.rng, setting.question)
        context = assemble_context(states, question, window=HEADS.window, max_tokens=new_tokens)
        channel = AnswerChannel(lambda: None)
        self.core.add_request(Request(context, new_tokens), channel, time.perf_counter())

    def step(self) -> float:
        """Runs a step after the requests that arrive before it. Returns its milliseconds of
        processor time."""
        self._joined += self.running / self.setting.new_tokens
        while self._joined >= 1:
            self.join(self.setting.new_tokens)
            self._joined -= 1
        begin = time.thread_time()
        self.core.step()
        return 1e3 * (time.thread_time() - begin)

    def measure(self) -> dict[str, float]:
        """Milliseconds of the host's part of a step."""
        for number in range(self.running):  # answers that end one after another
            self.join(1 + (number + 1) * self.setting.new_tokens // self.running)
        warm = 20
        with frozen_heap(YOUNG_OBJECTS):
            times = [self.step() for _ in range(warm + self.setting.steps)][warm:]
        ordered = sorted(times)
        return {
            "running": self.core.running,
            "median_ms": statistics.median(times),
            "mean_ms": statistics.mean(times),
            "p99_ms": ordered[int(0.99 * len(ordered))],
        }


def bench_planning(setting: PlanningSetting, running: Sequence[int]) -> dict[str, Any]:
    """Figures by number of running requests."""
    found = {str(count): PlanningLoad(setting, count).measure() for count in running}
    return {"machine": describe_machine(), "running": found}


def main() -> None:
    """Prints the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", default="8,64,256")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)  # waiting for others would count as processor time
    setting = PlanningSetting(steps=options.steps)
    document = bench_planning(setting, [int(count) for count in options.running.split(",")])
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
