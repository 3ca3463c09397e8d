"""Shared parts of the papers' workloads.

Models of random weights, batches of requests through the engine, and figures next to a paper's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from harness import (
    SHAPES,
    LlamaShape,
    describe_machine,
    dtypes_of,
    plain_table,
    print_figures,
    shaped_causal,
    shaped_model,
)

from ragcache.engine import (
    EncodeJob,
    EngineConfig,
    LLMEngine,
    Request,
    RequestOutput,
    encode,
)
from ragcache.models import CausalLM
from ragcache.states import KVStates

MODELS: Mapping[str, LlamaShape] = {
    "tiny": LlamaShape(2, 64, 4, 2, 128, 16_384, 8192),
    "small": LlamaShape(4, 512, 8, 2, 1408, 16_384, 8192),
    **SHAPES,
}
"""By name; those of the papers are near `7b`, with as many key heads as query heads."""

ShapeOption = Annotated[str, typer.Option(help=f"Of the random model: {', '.join(MODELS)}.")]


@dataclass(frozen=True, slots=True)
class ModelSetting:
    """The model that a workload runs on: random weights of a shape, since times do not depend on
    what is answered."""

    shape: str = "small"
    device: str = "cpu"
    dtype: str = "auto"

    def build(self) -> CausalLM:
        if self.shape not in MODELS:
            raise typer.BadParameter(f"no shape {self.shape!r}; give {', '.join(MODELS)}")
        if self.device == "cpu":
            return shaped_causal(MODELS[self.shape], self.dtype)
        causal = shaped_model(MODELS[self.shape], self.device).causal
        assert isinstance(causal, CausalLM)
        return causal


@dataclass(frozen=True, slots=True)
class PaperComparison:
    """A figure of a paper with its setting, and the same measured here. ratio: ours as a number."""

    workload: str
    paper: str
    paper_setting: str
    ratio: float
    ours: str
    our_setting: str


def encode_one(causal: CausalLM, token_ids: Sequence[int]) -> KVStates:
    """The states of tokens from position 0 on."""
    [states] = encode(causal, [EncodeJob(token_ids)])
    return states


def copy_of(states: KVStates) -> KVStates:
    """The same states in memory of their own, as a request has them that shares nothing."""
    return KVStates(states.keys.clone(), states.values.clone(), states.start)


def run_batch(causal: CausalLM, requests: Sequence[Request]) -> tuple[float, list[RequestOutput]]:
    """Submits requests at once to an engine of their own. Returns the seconds until all have ended,
    and the outputs."""
    with LLMEngine(causal, engine_config(causal, requests)) as engine:
        begin = time.perf_counter()
        handles = [engine.submit_request(request) for request in requests]
        outputs = [handle.result() for handle in handles]
        return time.perf_counter() - begin, outputs


def engine_config(causal: CausalLM, requests: Iterable[Request]) -> EngineConfig:
    """Limits under which all requests run together."""
    tokens = sum(
        len(each.context.token_ids) + each.n * (each.max_tokens + 64) + 64 for each in requests
    )
    return EngineConfig.for_device(
        causal.device, pool_bytes=2 * tokens * causal.computed_bytes_per_token, running=512,
        queue=4096,
    )  # fmt: skip


def result_of(
    comparisons: Sequence[PaperComparison], causal: CausalLM | None, **settings: Any
) -> dict[str, Any]:
    """The JSON of a workload."""
    return {
        "comparisons": [asdict(each) for each in comparisons],
        "dtypes": None if causal is None else dtypes_of(causal),
        **settings,
        "machine": describe_machine() | {"load": os.getloadavg()[0]},
    }


def print_comparisons(result: dict[str, Any], json_file: Path | None) -> None:
    """A table of two lines a figure: the paper's and ours, each with its setting."""
    table = plain_table("workload", "", "figure", "setting", left=4)
    for each in result["comparisons"]:
        table.add_row(each["workload"], "paper", each["paper"], each["paper_setting"])
        table.add_row("", "here", each["ours"], each["our_setting"])
    load = result["machine"]["load"]
    busy = f"load of this machine when it ended: {load:.1f} on {result['machine']['cores']} cores"
    print_figures([table, busy], result, json_file)
