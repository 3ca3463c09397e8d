"""One model over several GPUs beside one: parity, times of the engine, and times of sums.

    python benchmarks/tensor_parallel.py parity --ranks 2 --json parity.json
    python benchmarks/tensor_parallel.py tiers --ranks 2 --json tiers.json
    python benchmarks/tensor_parallel.py shape --ranks 1 --shape 8b --json one.json
    python benchmarks/tensor_parallel.py shape --ranks 2 --shape 8b --json two.json
    python benchmarks/tensor_parallel.py shape --ranks 2 --shape 70b --fp8 --json large.json

`parity` compares answers in float32 with one GPU's. `shape` measures a model of random weights, and
reports medians. On a CPU (`--device cpu`, under Triton's interpreter) the same code runs over gloo.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ragcache.bench.harness import SHAPES, LlamaShape
from ragcache.engine import (
    Context,
    EncodeJob,
    EngineConfig,
    LLMEngine,
    Request,
    SamplingParams,
    Segment,
    assemble_context,
    encode,
)
from ragcache.engine.encoding import Encoding
from ragcache.engine.engine import _computing_on
from ragcache.engine.runner import runner_for
from ragcache.models import CausalLM, wrap_causal
from ragcache.models.parallel import ranks as ranks_module
from ragcache.models.parallel.device_leader import split_over_devices
from ragcache.models.parallel.device_model import DeviceParallelLM
from ragcache.states import KVKey, KVStates
from ragcache.states.quantization import StoredStates, wait_for_arrival
from ragcache.states.serialization import to_blob
from ragcache.store.tiers.device import DeviceTier
from ragcache.store.tiers.host import HostTier

ALL_SHAPES = {
    **SHAPES,
    "70b": LlamaShape(80, 8192, 64, 8, 28672, 128256, 32768, 500_000.0, tied=False),
    "405b": LlamaShape(126, 16384, 128, 8, 53248, 128256, 32768, 500_000.0, tied=False),
    "tiny": LlamaShape(2, 64, 4, 2, 128, 256, 4096, 10_000.0, tied=False),
}
PREAMBLE, QUESTION, BLOCKS = 64, 64, 3  # BLOCKS: of the pool, of a request
_begin = time.perf_counter()
_followers: list[int] = []


def say(text: str) -> None:
    print(f"[{time.perf_counter() - _begin:6.1f} s] {text}", flush=True)


def drawn_model(shape: LlamaShape, dtype: torch.dtype, device: str, *, fp8: bool = False) -> Any:
    """A model whose weights repeat a short run of random numbers: no figure depends on them.

    fp8: whether the layers have weights in fp8, which are drawn as such.
    """
    from transformers import LlamaForCausalLM

    config = shape.config(dtype)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype).eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    run = (torch.randn(2**22, generator=torch.Generator().manual_seed(1)) * 0.02).to(dtype)
    run = run.to(device)
    shared = None
    if device == "cpu":  # all weights are views of the largest, which ranks copy to their devices
        shared = torch.empty(max(each.numel() for each in model.parameters()), dtype=dtype)
        for part in torch.split(shared, len(run)):
            part.copy_(run[: len(part)])
    if fp8:
        draw_fp8(model, run)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() == 1:
                weight = torch.ones(parameter.shape, dtype=dtype, device=device)
            elif shared is not None:
                weight = shared[: parameter.numel()].view(parameter.shape)
            else:
                weight = torch.empty(parameter.shape, dtype=dtype, device=device)
                for part in torch.split(weight.view(-1), len(run)):
                    part.copy_(run[: len(part)])
            setattr(module, name, torch.nn.Parameter(weight, requires_grad=False))
    return model


def draw_fp8(model: Any, run: torch.Tensor) -> None:
    """Give the layers of a model without weights weights in fp8. On a CPU they share memory."""
    from ragcache.models.fp8 import NUMBERS, Fp8Linear, packs

    largest = max(each.weight.numel() for each in model.model.modules() if packs(each))
    numbers = run.to(NUMBERS).view(torch.uint8)
    shared = torch.empty(largest if run.device.type == "cpu" else 0, dtype=torch.uint8)
    for part in torch.split(shared, len(numbers)):
        part.copy_(numbers[: len(part)])
    for owner in [*model.model.modules()]:
        for name, layer in [*owner.named_children()]:
            if not packs(layer):
                continue
            shape, count = layer.weight.shape, layer.weight.numel()
            weight = shared[:count] if len(shared) else numbers.repeat(-(-count // len(numbers)))
            scales = torch.ones(1, shape[0], device=run.device)
            setattr(owner, name, Fp8Linear(weight[:count].view(NUMBERS).view(shape), scales, None))


def model_over(whole: Callable[[str], Any], ranks: int, device: str, mark: str = "") -> CausalLM:
    """The model over some ranks. whole: makes the Hugging Face model on a device."""
    causal = wrap_causal(whole(device if ranks == 1 else "cpu"))
    if mark:
        causal.fingerprint = mark
    if ranks == 1:
        return causal
    split = split_over_devices(causal, ranks, torch.device(device))
    _followers.extend(each.process.pid for each in split._followers._followers)
    return split


def whole_states(causal: CausalLM, states: Sequence[KVStates]) -> list[torch.Tensor]:
    """Keys and values of all heads, in main memory."""
    if not isinstance(causal, DeviceParallelLM):
        return [torch.stack([each.keys, each.values]).cpu() for each in states]
    found = []
    for each in states:
        layers, _, tokens, dim = each.keys.shape
        arena = causal.channel._writer.arena
        shape = (2, layers, causal.sizes.num_kv_heads, tokens, dim)
        whole = arena.empty(shape, each.keys.dtype).zero_()
        for into, part in zip(whole, (each.keys, each.values), strict=True):
            causal.copy_states(into, part)
        found.append(whole)
    list(encode(causal, [EncodeJob([1, 2, 3])]))  # all ranks have copied before
    if causal.device.type == "cuda":
        torch.cuda.synchronize(causal.device)
    time.sleep(0.5)
    return found


def parity_answers(causal: CausalLM, config: EngineConfig) -> tuple[list[torch.Tensor], list[Any]]:
    """Encoded states, and answers with log-probabilities, by an engine."""
    rng = random.Random(3)

    def draw(count: int) -> list[int]:
        return [rng.randrange(causal.vocabulary) for _ in range(count)]

    found = []
    with LLMEngine(causal, config) as engine:
        [root] = engine.encode([EncodeJob(draw(16))])
        under = Segment(root, 0)
        jobs = [EncodeJob(draw(length), 16, under) for length in (70, 128, 33, 200)]
        states = list(engine.encode(jobs))
        say("encoded")
        handles = []
        for number, order in enumerate([(0, 1, 2, 3), (3, 1, 0), (2, 0), (1, 3, 2, 0), ()]):
            at, segments = 16, [Segment(root, 0)]
            for index in order:
                segments.append(Segment(states[index], at))
                at = segments[-1].end
            own = draw(5 + 9 * number)
            positions = tuple(range(at, at + len(own)))
            context = Context(tuple(segments), tuple(own), positions, at + len(own))
            for sampling in (
                SamplingParams(logprobs=5),
                SamplingParams(temperature=0.8, seed=number, logprobs=5),
            ):
                request = Request(context, 24, sampling=sampling, n=1 + number % 2)
                handles.append(engine.submit_request(request))
        for handle in handles:
            for choice in handle.result(300).choices:
                found.append([(each.token, each.logprob) for each in choice.chosen])
        say("answered")
    return whole_states(causal, [root, *states]), found


def small_model(options: argparse.Namespace) -> Callable[[str], Any]:
    """A function that makes a small model with random weights in float32 on a device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 514,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": options.layers or 4,
        "num_attention_heads": 8,
        "num_key_value_heads": options.kv_heads,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }

    def whole(device: str) -> Any:
        torch.manual_seed(7)
        return LlamaForCausalLM(LlamaConfig(**sizes)).eval().to(device)

    return whole


def parity(options: argparse.Namespace) -> dict[str, Any]:
    whole = small_model(options)
    config = EngineConfig(
        pool_bytes=2**25, warm_up=options.warm_up, prefill_tokens=512, draft_tokens=options.drafts
    )
    expected, tokens = parity_answers(model_over(whole, 1, options.device), config)
    say("one rank has answered")
    split = model_over(whole, options.ranks, options.device)
    say(f"split; sums by {getattr(split.collectives, 'sums_by', 'gloo')}")  # type: ignore[attr-defined]
    states, found = parity_answers(split, config)
    pairs = [(a, b) for one, two in zip(tokens, found, strict=True)
             for a, b in zip(one, two, strict=False)]  # fmt: skip
    result = {
        "tokens": sum(len(each) for each in tokens),
        "equal": sum(a[0] == b[0] for a, b in pairs),
        "states": max((a - b).abs().max().item() for a, b in zip(expected, states, strict=True)),
        "logprobs": max(abs(a[1] - b[1]) for a, b in pairs if a[0] == b[0]),
    }
    say(str(result))
    begin = time.perf_counter()
    split.close()
    say(f"closed in {time.perf_counter() - begin:.2f} s")
    return result


def tier_answers(
    causal: CausalLM, config: EngineConfig, given: list[StoredStates]
) -> tuple[list[StoredStates], list[Any], bool]:
    """States in main memory, answers over states that come from there, and whether blobs of states
    that come back from the device are alike, byte for byte."""
    rng, ranks, device = random.Random(4), causal.copies, causal.device
    with LLMEngine(causal, config) as engine:
        jobs = [EncodeJob([rng.randrange(500) for _ in range(n)]) for n in (70, 33, 128, 190)]
        host = HostTier(2**28, ranks=ranks, slab_bytes=2**26)
        kept = [host.begin_copy(states) for states in engine.encode(jobs)]
        for states in kept:
            wait_for_arrival(states)
        say("copied to main memory")
        tier = DeviceTier(2**28, device, ranks=ranks)
        tier.bind(engine.stream, 0)
        names = [KVKey(str(number)) for number in range(4)]
        found = []
        for number in range(6):
            sources = [replace(each, arrival=None) for each in given or kept]
            tier.put_all(list(zip(names, sources, strict=True)))
            order = rng.sample(names, 3)
            context = assemble_context(
                [tier.get(name) for name in order], [1, 2, 3 + number], window=4096, max_tokens=12
            )
            output = engine.submit_request(
                Request(context, 12, sampling=SamplingParams(logprobs=2))
            ).result(200)
            found.append([(each.token, each.logprob) for each in output.choices[0].chosen])
            for name in names:
                tier.delete(name)
        say("answered over states of the device tier")
        tier.put_all(list(zip(names, sources, strict=True)))
        back = [host.begin_copy(tier.get(name)) for name in names]
        for states in back:
            wait_for_arrival(states)
        same = all(to_blob(name, a) == to_blob(name, b)
                   for name, a, b in zip(names, sources, back, strict=True))  # fmt: skip
        say(f"states come back alike: {same}")
    return kept, found, same


def tiers(options: argparse.Namespace) -> dict[str, Any]:
    """States that cross between main memory and devices, over one rank and over several."""
    config = EngineConfig(pool_bytes=2**25, warm_up=False, prefill_tokens=512)
    whole = small_model(options)
    expected, tokens, alike = tier_answers(model_over(whole, 1, options.device), config, [])
    split = model_over(whole, options.ranks, options.device)
    states, found, ours = tier_answers(split, config, expected)
    pairs = [(a, b) for one, two in zip(tokens, found, strict=True)
             for a, b in zip(one, two, strict=False)]  # fmt: skip
    differences = [
        max((a.keys - b.keys).abs().max().item(), (a.values - b.values).abs().max().item())
        for a, b in zip(expected, states, strict=True)
    ]
    result = {
        "tokens": len(pairs), "equal": sum(a[0] == b[0] for a, b in pairs),
        "states": max(differences), "blobs": alike and ours,
        "logprobs": max(abs(a[1] - b[1]) for a, b in pairs),
    }  # fmt: skip
    say(str(result))
    split.close()
    return result


class ShapeBench:
    """The engine of a shape, and what is measured of it."""

    def __init__(self, options: argparse.Namespace) -> None:
        shape, self.options = ALL_SHAPES[options.shape], options
        self.shape = replace(shape, num_layers=options.layers or shape.num_layers)
        self.device, self.tiny = torch.device(options.device), options.shape == "tiny"
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.causal = model_over(
            lambda device: drawn_model(self.shape, dtype, device, fp8=options.fp8),
            options.ranks, options.device, "random weights",
        )  # fmt: skip
        gc.collect()
        way = getattr(getattr(self.causal, "collectives", None), "sums_by", None)
        say(f"model over {options.ranks}: {self.causal.num_kv_heads} key heads, sums by {way}")
        self.rng = random.Random(1)
        self.document, self.documents = (16, 3) if self.tiny else (1024, 24)
        self.placed = (1, 2) if self.tiny else (4, 16)
        every = ((32, 4096), (128, 4096), (256, 4096), (256, 16384))
        self.decoded = ((2, 32),) if self.tiny else every[: options.decodes]
        self.runs: int = 2 if self.tiny else options.runs
        self.steps = 12 if self.tiny else 48
        self.stall_steps = 20 if self.tiny else options.stall_steps
        most = max(rows for rows, _ in self.decoded)
        blocks = max(most * BLOCKS, self.decoded[0][0] * (self.stall_steps // 64 + 3))
        config = EngineConfig.for_device(
            self.device, running=most, step_tokens=4096,
            prefill_tokens=64 if self.tiny else 8192, warm_up=options.warm_up,
            pool_bytes=blocks * 64 * self.causal.computed_bytes_per_token,
        )  # fmt: skip
        self.figures: dict[str, Any] = {}
        self.sent: list[float] = []
        self.collections: list[tuple[int, float]] = []
        self._watch_messages()
        self._watch_collections()
        self.engine = LLMEngine(self.causal, config)
        [self.root] = self.engine.encode([EncodeJob(self.draw(PREAMBLE))])
        self.engine.submit_request(self.request([], 2)).result(400)
        say("first answer")

    def draw(self, count: int) -> list[int]:
        return [self.rng.randrange(self.causal.vocabulary) for _ in range(count)]

    def encoded(self, tokens: int, count: int = 1) -> list[KVStates]:
        root = Segment(self.root, 0)
        jobs = [EncodeJob(self.draw(tokens), PREAMBLE, root) for _ in range(count)]
        return list(self.engine.encode(jobs))

    def request(self, chosen: Sequence[StoredStates], new_tokens: int) -> Request:
        context = assemble_context(
            [self.root, *chosen], self.draw(QUESTION), window=self.causal.window,
            max_tokens=new_tokens,
        )  # fmt: skip
        return Request(context, new_tokens, ignore_eos=True)

    def _watch_messages(self) -> None:
        """Time the messages of steps, each from its layout to the ring."""
        if self.causal.ranks == 1:
            return
        from ragcache.engine.device_ranks import LeadingRunner

        send, sent = LeadingRunner._send_step, self.sent

        def timed(*args: Any) -> None:
            begin = time.perf_counter()
            send(*args)
            sent.append(time.perf_counter() - begin)

        setattr(LeadingRunner, "_send_step", timed)  # noqa: B010

    def _watch_collections(self) -> None:
        """Time the garbage collections of this process, which halt all answers."""
        begin = 0.0

        def watch(phase: str, info: dict[str, int]) -> None:
            nonlocal begin
            if phase == "start":
                begin = time.perf_counter()
            else:
                spent = 1e3 * (time.perf_counter() - begin)
                self.collections.append((info["generation"], spent))

        gc.callbacks.append(watch)

    def attempt(self, name: str, measure: Callable[[], Any]) -> None:
        self.sent.clear()
        self.collections.clear()
        stats = replace(self.engine.stats)
        try:
            self.figures[name] = measure()
        except Exception as error:
            self.figures[name] = {"error": repr(error)[:500]}
        if self.sent:
            self.figures[name]["send_ms"] = 1e3 * statistics.median(self.sent)
            self.figures[name]["send_mean_ms"] = 1e3 * statistics.mean(self.sent)
        for number in range(3):  # generations
            spent = [ms for generation, ms in self.collections if generation == number]
            if spent:
                longest = {"count": len(spent), "longest_ms": round(max(spent), 2)}
                self.figures[name][f"collections {number}"] = longest
        steps = self.engine.stats.steps - stats.steps
        if steps:
            for part in ("planning", "sampling", "forward", "idle"):
                grown = getattr(self.engine.stats, part) - getattr(stats, part)
                self.figures[name][f"{part}_ms"] = 1e3 * grown / steps
        say(f"{name}: " + json.dumps({k: v for k, v in self.figures[name].items() if k != "runs"}))
        save(self.options, self.result())  # whatever ends the process later

    def result(self) -> dict[str, Any]:
        options = self.options
        return {"figures": self.figures, "ranks": options.ranks, "shape": options.shape,
                "layers": self.shape.num_layers, "fp8": options.fp8}  # fmt: skip

    def first_tokens(self, count: int, documents: Sequence[KVStates]) -> dict[str, Any]:
        times = []
        for _ in range(self.runs + 3):
            request = self.request(self.rng.sample(list(documents), count), 1)
            begin = time.perf_counter()
            self.engine.submit_request(request).result(60)
            times.append(1e3 * (time.perf_counter() - begin))
        return {"ms": statistics.median(times[3:]), "runs": [round(t, 3) for t in times[3:]]}

    def pinned(self, documents: Sequence[KVStates]) -> dict[str, Any]:
        """First token over documents that are copied from pinned memory, beside their copy."""
        count, ranks = self.placed[0], self.causal.copies
        each = HostTier(2**20, ranks=ranks).size_of(documents[0])
        host = HostTier(8 * each, ranks=ranks, slab_bytes=8 * each)
        kept = [host.begin_copy(states) for states in documents[: 2 * count]]
        for states in kept:
            wait_for_arrival(states)
        kept = [replace(states, arrival=None) for states in kept]
        device = DeviceTier(4 * count * each, self.device, ranks=ranks)
        device.bind(self.engine.stream, 0)
        copies, times = list[float](), list[float]()
        for number in range(self.runs + 3):
            chosen = self.rng.sample(kept, count)
            names = [KVKey(f"{number} {place}") for place in range(count)]
            asked = number % 2
            begin = time.perf_counter()
            device.put_all(list(zip(names, chosen, strict=True)))
            there = [device.get(name) for name in names]
            if asked:
                self.engine.submit_request(self.request(there, 1)).result(60)
            else:
                wait_for_arrival(there[0])
            spent = 1e3 * (time.perf_counter() - begin)
            if number > 2:
                (times if asked else copies).append(spent)
            for each_there in there:
                wait_for_arrival(each_there)
            del there, each_there
            for name in names:
                device.delete(name)
        copy, first = statistics.median(copies), statistics.median(times)
        nbytes = count * each
        return {"ms": first, "copy": copy, "over": first - copy, "gb_s": nbytes / copy / 1e6}

    def decode(self, rows: int, states: KVStates, steps: int) -> dict[str, Any]:
        times: list[float] = []
        for count in (8, steps):
            handles = [self.engine.submit_request(self.request([states], count))
                       for _ in range(rows)]  # fmt: skip
            times = [time.perf_counter() for _ in handles[-1]]
            for handle in handles:
                handle.result(120)
        gaps = [1e3 * (b - a) for a, b in pairwise(times[4:-3])]
        middle = statistics.median(gaps)
        return {
            "ms": middle, "longest": max(gaps), "late": sum(each > 3 * middle for each in gaps),
            "longest_step": gaps.index(max(gaps)),
            "steps": len(gaps), "runs": [round(each, 3) for each in gaps[:64]],
        }  # fmt: skip

    def encoding(self) -> dict[str, Any]:
        """A step over the tokens of eight documents."""
        runner, seconds = runner_for(self.causal), []
        jobs = [EncodeJob(self.draw(self.document), PREAMBLE) for _ in range(8)]
        with torch.inference_mode(), _computing_on(runner.stream):
            for _ in range(5):
                running = [Encoding(self.causal, job) for job in jobs]
                begin = time.perf_counter()
                runner.prepare_batch([each.next_chunk(self.document) for each in running])()
                if runner.stream is not None:
                    runner.stream.synchronize()
                seconds.append(time.perf_counter() - begin)
        return {"ms": 1e3 * statistics.median(seconds[2:]), "rows": 8 * self.document}

    def run(self) -> None:
        documents: list[KVStates] = []

        def encode_documents() -> dict[str, Any]:
            begin = time.perf_counter()
            documents.extend(self.encoded(self.document, self.documents))
            return {"ms": 1e3 * (time.perf_counter() - begin)}

        self.attempt("documents", encode_documents)
        for count in self.placed:
            name = f"first token {count} x {self.document}"
            self.attempt(name, lambda: self.first_tokens(count, documents))  # noqa: B023
        self.attempt(f"pinned {self.placed[0]} x {self.document}", lambda: self.pinned(documents))
        documents.clear()
        known: dict[int, KVStates] = {}
        for rows, tokens in self.decoded:
            if tokens not in known:
                known[tokens] = self.encoded(tokens)[0]
            states = known[tokens]
            self.attempt(
                f"step {rows} x {tokens}",
                lambda: self.decode(rows, states, self.steps),  # noqa: B023
            )
        rows, tokens = self.decoded[0]
        if self.stall_steps:
            name = f"stalls {rows} x {tokens}"
            self.attempt(name, lambda: self.decode(rows, known[tokens], self.stall_steps))
        self.attempt("encoding", self.encoding)


def shape(options: argparse.Namespace) -> dict[str, Any]:
    bench = ShapeBench(options)
    bench.run()
    bench.engine.close()
    if options.ranks > 1:
        begin = time.perf_counter()
        bench.causal.close()
        say(f"closed in {time.perf_counter() - begin:.2f} s")
    return bench.result()


def end_after(seconds: float) -> None:
    """End this process after some time, with the stacks of all ranks."""
    time.sleep(seconds)
    say(f"{seconds} s are over")
    for follower in list(_followers):
        with suppress(OSError):
            os.kill(follower, signal.SIGUSR1)
    time.sleep(1.5)
    faulthandler.dump_traceback()
    os._exit(3)


def save(options: argparse.Namespace, result: dict[str, Any]) -> None:
    if options.json:
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        text = json.dumps({"gpu": gpu, "torch": torch.__version__, **result}, indent=1)
        Path(options.json).write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    runs = {"parity": parity, "tiers": tiers, "shape": shape}
    parser.add_argument("what", choices=runs)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--shape", default="8b", choices=ALL_SHAPES)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--fp8", action="store_true", help="weights of layers in fp8")
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--runs", type=int, default=25)
    parser.add_argument("--decodes", type=int, default=4)
    parser.add_argument("--stall-steps", type=int, default=1000)
    parser.add_argument("--warm-up", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--patience", type=float, default=120.0, help="of the watch, in seconds")
    parser.add_argument("--seconds", type=float, default=300.0, help="until traces, and the end")
    parser.add_argument("--json")
    options = parser.parse_args()
    threading.Thread(target=end_after, args=(options.seconds,), daemon=True).start()
    ranks_module.PATIENCE = options.patience
    save(options, runs[options.what](options))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
