"""Mixtures of experts and latents on a GPU: a step of many answers and first tokens, beside the
time in which the GPU can read the bytes that they need.

python benchmarks/mixtures.py --json FILE
python benchmarks/mixtures.py --shapes tiny-deepseek --device cpu     # tries the script

Which experts a step reads is counted, in steps of the same requests without graphs: the floor reads
these experts, all other weights, and the documents once. Weights are random. Greedy answers of such
models repeat themselves, so that steps of sampled answers are the figure.

Needs torch, transformers and triton only.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from gpu_device import measure_ceilings
from gpu_parts import profile_kernels
from torch import nn

from ragcache.engine import (
    EncodeJob,
    EngineConfig,
    LLMEngine,
    Request,
    SamplingParams,
    Segment,
    assemble_context,
)
from ragcache.machine import describe_machine
from ragcache.models import CausalLM, wrap_causal
from ragcache.models.compiled import CompiledForward, decoder_layers
from ragcache.states import KVStates

_PATIENCE = 120.0
_MARGIN = 6  # steps at both ends of an answer that are not counted


@dataclass(frozen=True)
class MixtureWorkload:
    """Prompts over documents of one length, in another order each."""

    documents: int = 4
    document_tokens: int = 1024
    preamble_tokens: int = 64
    question_tokens: int = 64
    requests: int = 32
    new_tokens: int = 72
    counted_tokens: int = 12
    """Length of the answers in whose steps experts are counted."""
    runs: int = 15
    """First tokens."""
    answers: tuple[str, ...] = ("sampled", "greedy")
    """How the tokens of answers are chosen, each measured for itself."""


def config_of(name: str) -> Any:
    """Return the configuration of a shape: of published models, or a tiny one for tests."""
    from transformers import DeepseekV2Config, GptOssConfig, Qwen3MoeConfig

    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if name == "qwen3-30b-a3b":
        return Qwen3MoeConfig(
            hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32,
            num_key_value_heads=4, head_dim=128, moe_intermediate_size=768, num_experts=128,
            num_experts_per_tok=8, norm_topk_prob=True, vocab_size=151936,
            max_position_embeddings=32768, tie_word_embeddings=False, **ids,
        )  # fmt: skip
    if name == "gpt-oss-20b":
        return GptOssConfig(
            hidden_size=2880, intermediate_size=2880, num_hidden_layers=24, num_attention_heads=64,
            num_key_value_heads=8, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
            sliding_window=128, vocab_size=201088, max_position_embeddings=32768,
            rope_parameters={"rope_type": "default", "rope_theta": 150000.0}, **ids,
        )  # fmt: skip
    latents = {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1}
    if name == "deepseek-v2-lite":
        return DeepseekV2Config(
            hidden_size=2048, intermediate_size=10944, num_hidden_layers=27,
            num_attention_heads=16, num_key_value_heads=16, kv_lora_rank=512,
            qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, moe_intermediate_size=1408,
            n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6,
            first_k_dense_replace=1, routed_scaling_factor=1.0, vocab_size=102400,
            max_position_embeddings=32768, **latents, **ids,
        )  # fmt: skip
    assert name == "tiny-deepseek", name
    return DeepseekV2Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16,
        v_head_dim=16, moe_intermediate_size=32, n_routed_experts=8, n_shared_experts=1,
        num_experts_per_tok=2, first_k_dense_replace=1, vocab_size=320,
        max_position_embeddings=8192, **latents, **ids,
    )  # fmt: skip


@torch.no_grad()
def draw(name: str, device: str) -> Any:
    """Return a model of the shape whose weights are drawn on the device."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config_of(name), dtype=torch.bfloat16)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(0, weight.shape[-1] ** -0.5)
    # large, so that the tokens of different answers choose experts of their own
    model.get_input_embeddings().weight.normal_(0, 16.0)
    return model.eval()


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that hold the weights of experts [E, ...], layer by layer."""
    return [m for m in model.modules() if type(m).__name__.endswith("Experts")]


class MixtureSession:
    """A model, its engine, and the states of a preamble and of documents."""

    def __init__(self, name: str, load: MixtureWorkload, device: str) -> None:
        self.load, self.device, self.rng = load, device, random.Random(1)
        model = draw(name, device)
        self.causal: CausalLM = wrap_causal(model)
        self.causal.fingerprint = "random weights"  # their digest would take minutes
        self.vocabulary = model.config.vocab_size
        self.states: list[KVStates] = []

    @contextmanager
    def serve(self) -> Iterator[LLMEngine]:
        """An engine for the requests of a step. The first one encodes the documents."""
        load, each = self.load, self.load.question_tokens + self.load.new_tokens + 128
        config = EngineConfig.for_device(
            torch.device(self.device),
            running=load.requests,
            pool_bytes=(load.requests + 1) * each * self.causal.computed_bytes_per_token,
        )
        with LLMEngine(self.causal, config) as engine:
            if not self.states:
                [root] = engine.encode([EncodeJob(self.tokens(load.preamble_tokens))])
                before = Segment(root, 0)
                jobs = [
                    EncodeJob(self.tokens(load.document_tokens), root.length, before)
                    for _ in range(load.documents)
                ]
                self.states = [root, *engine.encode(jobs)]
            yield engine

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(3, self.vocabulary) for _ in range(count)]

    def requests(self, count: int, new_tokens: int, *, sampled: bool, seed: int) -> list[Request]:
        """Return requests over all documents, the same for the same seed."""
        self.rng.seed(seed)
        found, (root, *documents) = [], self.states
        for number in range(count):
            placed = self.rng.sample(documents, len(documents))
            question = self.tokens(self.load.question_tokens)
            context = assemble_context(
                [root, *placed], question, window=self.causal.window, max_tokens=new_tokens
            )
            sampling = SamplingParams(temperature=1.0, seed=number) if sampled else SamplingParams()
            found.append(Request(context, new_tokens, sampling=sampling))
        return found


def step_ms(engine: LLMEngine, requests: Sequence[Request]) -> tuple[float, float]:
    """Milliseconds between the tokens of the last request while all decode: median and 90th
    percentile."""
    handles = [engine.submit_request(each) for each in requests]
    times = [time.perf_counter() for _ in handles[-1]]
    for handle in handles:
        handle.result(_PATIENCE)
    counted = times[_MARGIN:-_MARGIN] if len(times) > 3 * _MARGIN else times
    gaps = sorted(1e3 * (after - before) for before, after in pairwise(counted))
    return statistics.median(gaps), gaps[int(0.9 * len(gaps))]


def first_token_ms(session: MixtureSession, engine: LLMEngine) -> list[float]:
    """Milliseconds from a request to its only token, after some warm ones."""
    times = []
    for number in range(4 + session.load.runs):
        [request] = session.requests(1, 1, sampled=False, seed=1000 + number)
        begin = time.perf_counter()
        engine.submit_request(request).result(_PATIENCE)
        times.append(1e3 * (time.perf_counter() - begin))
    return times[4:]


def count_experts(session: MixtureSession, *, sampled: bool) -> float:
    """Return the share of all experts that a step of all requests reads, in the mean."""
    causal, rows = session.causal, session.load.requests
    shares: list[torch.Tensor] = []

    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        chosen = next(each for each in given if not each.is_floating_point())
        if len(chosen.reshape(-1, chosen.shape[-1])) == rows:
            used = torch.zeros(module.num_experts, device=chosen.device)
            shares.append(used.index_fill_(0, chosen.reshape(-1), 1.0).mean())

    hooks = [
        each.register_forward_pre_hook(note, with_kwargs=True)
        for each in expert_modules(causal.model)
    ]
    kernels, causal.kernels = causal.kernels, False  # without graphs, which call no hooks
    try:
        with session.serve() as engine:
            asked = session.requests(rows, session.load.counted_tokens, sampled=sampled, seed=7)
            for handle in [engine.submit_request(each) for each in asked]:
                handle.result(_PATIENCE)
    finally:
        causal.kernels = kernels
        for hook in hooks:
            hook.remove()
    return float(torch.stack(shares).mean())


def step_bytes(session: MixtureSession, share: float) -> float:
    """Bytes that a step reads: weights, of experts a share, and the states of all documents and of
    the requests' own tokens."""
    causal, load = session.causal, session.load
    every = sum(each.nbytes for each in causal.model.parameters())
    experts = sum(
        each.nbytes for module in expert_modules(causal.model) for each in module.parameters()
    )
    embedding = causal.model.get_input_embeddings().weight.nbytes
    tied = causal.model.config.tie_word_embeddings
    cached = sum(each.length for each in session.states)
    own = load.requests * (load.question_tokens + load.new_tokens // 2)
    states = (cached + own) * causal.bytes_per_token
    return float(every - experts - (0 if tied else embedding) + share * experts + states)


def measure(
    name: str, load: MixtureWorkload, device: str, log: Callable[[str], None], *, profiled: bool
) -> dict[str, Any]:
    """Return all figures of a shape."""
    begin = time.perf_counter()
    session = MixtureSession(name, load, device)
    causal = session.causal
    weights = sum(each.nbytes for each in causal.model.parameters())
    found: dict[str, Any] = {"weights_gb": weights / 1e9, "kernels": causal.kernels}
    found["made_s"] = time.perf_counter() - begin
    log(f"made in {found['made_s']:.1f} s")
    with session.serve() as engine:
        log("documents encoded")
        for kind in load.answers:
            for run in range(3):  # graphs are captured on the way
                asked = session.requests(
                    load.requests, load.new_tokens, sampled=kind == "sampled", seed=7
                )
                middle, high = step_ms(engine, asked)
                log(f"{kind} step {run}: {middle:.2f} ms, p90 {high:.2f}")
            found[f"{kind}_step_ms"], found[f"{kind}_step_p90_ms"] = middle, high
        times = first_token_ms(session, engine)
        found["first_token_ms"] = statistics.median(times)
        found["first_tokens_ms"] = [round(each, 2) for each in times]
        log(f"first token {found['first_token_ms']:.2f} ms")
        runner: Any = engine.core.runner
        found["runner"] = type(runner).__name__
        found["compiled"] = isinstance(decoder_layers(causal)[0].forward, CompiledForward)
        if buckets := getattr(runner, "_buckets", None):
            every = [each for kind in buckets.values() for each in kind]
            found["captured"] = [(each.kind, each.rows) for each in every if each.whole]
        if profiled and device != "cpu":
            asked = session.requests(load.requests, 14, sampled=True, seed=7)
            found["profile"] = profile_kernels(lambda: step_ms(engine, asked))
            [request] = session.requests(1, 1, sampled=False, seed=7)
            found["first_token_profile"] = profile_kernels(
                lambda: engine.submit_request(request).result(_PATIENCE)
            )
            log("profiled")
    for kind in load.answers:
        found[f"{kind}_experts"] = count_experts(session, sampled=kind == "sampled")
        found[f"{kind}_gb"] = step_bytes(session, found[f"{kind}_experts"]) / 1e9
        log(f"{kind}: {found[f'{kind}_experts']:.1%} of the experts, {found[f'{kind}_gb']:.2f} GB")
    return found


def add_floors(found: dict[str, Any], read_gb_s: float) -> None:
    """Add the time of reading a step's bytes, and the step as a multiple."""
    for kind in (each for each in MixtureWorkload().answers if f"{each}_gb" in found):
        floor = 1e3 * found[f"{kind}_gb"] / read_gb_s
        found[f"{kind}_floor_ms"] = floor
        found[f"{kind}_ratio"] = found[f"{kind}_step_ms"] / floor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    shapes = ["deepseek-v2-lite", "gpt-oss-20b", "qwen3-30b-a3b"]
    parser.add_argument("--shapes", nargs="+", default=shapes)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--document-tokens", type=int, default=1024)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=72)
    kinds = MixtureWorkload().answers
    parser.add_argument("--answers", nargs="+", choices=kinds, default=list(kinds))
    parser.add_argument("--profile", action="store_true", help="also list the kernels of steps")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    load = MixtureWorkload(
        document_tokens=arguments.document_tokens,
        requests=arguments.requests,
        new_tokens=arguments.new_tokens,
        answers=tuple(arguments.answers),
    )
    ceilings = measure_ceilings(arguments.device)
    document: dict[str, Any] = {
        "machine": describe_machine(), "read_gb_s": ceilings.read_gb_s, "shapes": {},
    }  # fmt: skip
    begin = time.perf_counter()
    for name in arguments.shapes:

        def log(text: str, name: str = name) -> None:
            print(f"{time.perf_counter() - begin:7.1f} s  {name}: {text}", flush=True)

        try:
            found = measure(name, load, arguments.device, log, profiled=arguments.profile)
            add_floors(found, ceilings.read_gb_s)
        except Exception as error:  # the other shapes go on
            found = {"error": f"{error!r}\n{traceback.format_exc()}"}
        document["shapes"][name] = found
        shown = {name: value for name, value in found.items() if "profile" not in name}
        print(json.dumps(shown, indent=1), flush=True)
        torch._dynamo.reset()  # compiled layers refer to the model
        gc.collect()
        if arguments.device != "cpu":
            torch.cuda.empty_cache()
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
