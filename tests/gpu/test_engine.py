"""The engine on a GPU beside the same model on the CPU: answers, probabilities and joins."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from ragcache.engine import (
    Context,
    EncodeJob,
    EngineConfig,
    LLMEngine,
    Request,
    RequestOutput,
    SamplingParams,
    Segment,
    complete,
    encode,
)
from ragcache.engine.device_runner import DeviceModelRunner
from ragcache.models import CausalLM, wrap
from ragcache.models.checkpoint import text_class
from ragcache.models.families import family_of
from ragcache.models.trial import tiny_config
from ragcache.models.trial import tiny_model as random_model
from ragcache.states import KVStates
from ragcache.states.quantization import StoredStates, quantize
from tests.ragcache.models.reference import tiny_gemma
from tests.tiny_models import FAMILIES, LATENT, VOCABULARY, random_tokens, tiny_model

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu

LIMIT = 12
LENGTHS = (70, 130, 33, 200)
WINDOWED = ("mistral-64", "gemma2", "gemma3", "gpt_oss")
"""Read from one buffer on the CPU; windows end within a document. gpt-oss has sinks, too."""
MIXTURES = ("qwen3_moe", LATENT)
MOVABLE = [name for name in (*FAMILIES, *WINDOWED, *MIXTURES) if name not in ("gpt2", "opt")]


def config(**changes: Any) -> EngineConfig:
    return EngineConfig(**{"pool_bytes": 2**24, "running": 64, **changes})


def encoded(causal: CausalLM) -> list[KVStates]:
    """A preamble, and modules after it."""
    [root] = encode(causal, [EncodeJob(random_tokens(9, seed=1))])
    segment = Segment(root, 0)
    jobs = [EncodeJob(random_tokens(n, seed=n), 9, segment) for n in LENGTHS]
    return [root, *encode(causal, jobs)]


def moved_request(
    states: Sequence[StoredStates], order: Sequence[int], seed: int, *, movable: bool = True,
    limit: int = LIMIT, **options: Any,
) -> Request:  # fmt: skip
    """A question after the preamble and some modules, which stand in the order given."""
    segments, start = [Segment(states[0], 0)], states[0].length
    for number in order if movable else ():
        segments.append(Segment(states[1 + number], start))
        start += states[1 + number].length
    tokens = random_tokens(3 + seed % 11, seed=seed)
    end = start + len(tokens)
    context = Context(tuple(segments), tuple(tokens), tuple(range(start, end)), end)
    return Request(context, limit, sampling=SamplingParams(logprobs=2), **options)


def requests_over(states: Sequence[StoredStates], *, movable: bool = True) -> list[Request]:
    rng = random.Random(3)
    orders = [rng.sample(range(len(LENGTHS)), rng.randint(0, len(LENGTHS))) for _ in range(9)]
    return [moved_request(states, each, n, movable=movable) for n, each in enumerate(orders)]


def assert_same_answers(
    found: Sequence[RequestOutput], expected: Sequence[RequestOutput], tolerance: float
) -> None:
    """Equal tokens up to the first that is nearly a tie, and close log-probabilities."""
    for ours, theirs in zip(found, expected, strict=True):
        pairs = zip(ours.choices[0].chosen, theirs.choices[0].chosen, strict=False)
        for a, b in pairs:
            assert a.logprob == pytest.approx(b.logprob, abs=tolerance)
            if a.token != b.token:
                assert abs(b.alternatives[0][1] - b.alternatives[1][1]) < tolerance
                break


def model_of(family: str) -> Any:
    if family == "gpt_oss":
        whole = AutoConfig.for_model(family)
        return random_model(text_class(whole), tiny_config(whole, family_of(whole)), 7)
    if family.startswith("gemma"):
        return tiny_gemma(family, sliding_window=100)
    name, _, window = family.partition("-")
    return tiny_model(name, sliding_window=64) if window == "64" else tiny_model(family)


def on_cpu(family: str) -> CausalLM:
    return wrap(model_of(family).to("cpu", torch.float32))


def on_gpu(family: str, dtype: torch.dtype = torch.float32) -> CausalLM:
    causal = wrap(model_of(family).to("cuda", dtype))
    assert isinstance(causal, CausalLM)
    return causal


@pytest.mark.parametrize("family", [*FAMILIES, *WINDOWED, *MIXTURES])
def test_answers_of_every_family_are_those_of_the_cpu(family: str) -> None:
    movable = family in MOVABLE
    cpu, gpu = on_cpu(family), on_gpu(family)
    expected = complete(cpu, requests_over(encoded(cpu), movable=movable), config())
    found = complete(gpu, requests_over(encoded(gpu), movable=movable), config())
    assert_same_answers(found, expected, 1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_types_stay_close(dtype: torch.dtype) -> None:
    cpu, gpu = on_cpu("llama"), on_gpu("llama", dtype)
    expected = complete(cpu, requests_over(encoded(cpu)), config())
    found = complete(gpu, requests_over(encoded(gpu)), config())
    assert_same_answers(found, expected, 3e-2)


@pytest.mark.parametrize("family", ["llama", LATENT])
def test_graphs_compute_what_eager_steps_do(family: str, caplog: pytest.LogCaptureFixture) -> None:
    gpu = on_gpu(family, torch.bfloat16 if family == LATENT else torch.float32)
    near = 3e-2 if family == LATENT else 1e-4
    states = encoded(gpu)
    eager = complete(gpu, requests_over(states), config())
    for _ in range(3):  # buckets are captured on the way
        again = complete(gpu, requests_over(states), config())
        assert_same_answers(again, eager, near)
    with LLMEngine(gpu, config(warm_up=True)) as engine:
        handles = [engine.submit_request(request) for request in requests_over(states)]
        assert_same_answers([handle.result() for handle in handles], eager, near)
    assert "without CUDA graphs" not in caplog.text


def test_graphs_are_captured_again_for_states_in_eight_bits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gpu = on_gpu("llama")
    plain = encoded(gpu)
    eight = [plain[0], *(quantize(states, "int8") for states in plain[1:])]
    expected = complete(gpu, requests_over(eight), config())
    with LLMEngine(gpu, config(warm_up=True)) as engine:
        for states in (plain, eight, eight, eight):
            handles = [engine.submit_request(request) for request in requests_over(states)]
            found = [handle.result() for handle in handles]
    assert_same_answers(found, expected, 1e-3)
    assert "without CUDA graphs" not in caplog.text


def test_random_draws_go_on_after_a_failed_capture(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A model that looks at its numbers cannot be captured, as some mixtures of experts."""
    forward = CausalLM.forward

    def looking(self: CausalLM, batch: Any) -> torch.Tensor:
        out = forward(self, batch)
        assert out.isfinite().all().item()
        return out

    monkeypatch.setattr(CausalLM, "forward", looking)
    gpu = on_gpu("llama")
    states = encoded(gpu)
    expected = complete(gpu, requests_over(states), config())
    with LLMEngine(gpu, config(warm_up=True)) as engine:
        handles = [engine.submit_request(request) for request in requests_over(states)]
        assert_same_answers([handle.result() for handle in handles], expected, 1e-4)
    assert "without CUDA graphs" in caplog.text
    drawn = torch.rand(1000, device="cuda")
    assert 0.4 < float(drawn.mean()) < 0.6
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn.uniform_()
    graph.replay()
    assert 0.4 < float(drawn.mean()) < 0.6


def test_other_threads_draw_random_numbers_during_captures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compute, drawn = DeviceModelRunner._compute, list[torch.Tensor]()

    def draw() -> torch.Tensor:
        return torch.rand(1000, device="cuda")

    def beside(self: DeviceModelRunner, *step: Any) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            drawn.append(pool.submit(draw).result())
        return compute(self, *step)

    monkeypatch.setattr(DeviceModelRunner, "_compute", beside)
    gpu = on_gpu("llama")
    with ThreadPoolExecutor(1) as pool, LLMEngine(gpu, config(warm_up=True)) as engine:
        engine.submit_request(requests_over(encoded(gpu))[0]).result()
    assert len(drawn) > 10
    assert all(0.4 < float(each.mean()) < 0.6 for each in drawn)


@pytest.mark.parametrize(
    ("family", "int8_states"),
    [("llama", False), ("llama", True), ("gemma2", False), (LATENT, False), (LATENT, True)],
)
def test_nothing_is_compiled_after_a_warm_up(
    family: str, monkeypatch: pytest.MonkeyPatch, *, int8_states: bool
) -> None:
    import triton

    compiled: list[str] = []

    def note(**known: Any) -> bool:
        compiled.append(known["repr"])
        return False

    gpu = on_gpu(family, torch.bfloat16)
    window = gpu.window
    limits = config(pool_bytes=2**26, warm_up=True, int8_states=int8_states)
    with LLMEngine(gpu, limits) as engine:
        engine.submit_request(plain_request(2)).result()  # once it is warm
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
        [root] = engine.encode([EncodeJob(random_tokens(9, seed=1))])
        jobs = [EncodeJob(random_tokens(n, seed=n), 9, Segment(root, 0)) for n in (33, 200)]
        states: list[StoredStates] = [root, *engine.encode(jobs)]
        if int8_states:
            states[1:] = [quantize(each, "int8") for each in engine.encode(jobs)]
        requests = [moved_request(states, order, 1) for order in ([], [0], [1, 0])]
        requests += [plain_request(n) for n in (3, 70, 300, window // 2)]
        sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=1)
        requests += [replace(each, sampling=sampling) for each in requests]
        handles = [engine.submit_request(request) for request in requests]
        assert all(handle.result().choices for handle in handles)
    assert compiled == []
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_few_rows_of_long_steps_leave_the_last_layer(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt and an encoding, in eager steps with squares and in steps of graphs. Nothing is
    compiled for them after a warm-up."""
    import triton

    from ragcache.models.last_layer import LastLayer
    from ragcache.models.model import layer_list

    def long_model(device: str, dtype: torch.dtype) -> CausalLM:
        return wrap(tiny_model("llama", max_position_embeddings=8192).to(device, dtype))

    compiled: list[str] = []

    def note(**known: Any) -> bool:
        compiled.append(known["repr"])
        return False

    cpu, gpu = long_model("cpu", torch.float32), long_model("cuda", dtype)
    jobs = [EncodeJob(random_tokens(n, seed=n), 0) for n in (1100, 3000)]
    requests = [plain_request(tokens) for tokens in (1200, 3100)]
    expected, answers = [*encode(cpu, jobs)], complete(cpu, requests)
    with LLMEngine(gpu, config(pool_bytes=2**26, warm_up=True)) as engine:
        engine.submit_request(plain_request(2)).result()  # once it is warm
        monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
        found = [*engine.encode(jobs)]
        outputs = [engine.submit_request(each).result() for each in requests]
        layers = layer_list(gpu.model, gpu.depth)
        assert layers is not None
        assert isinstance(layers[-1].forward, LastLayer)
        close = 1e-3 if dtype == torch.float32 else 0.2  # of keys without the change, too: 0.14
        for ours, theirs in zip(found, expected, strict=True):
            for states, others in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
                apart = (states.cpu().float() - others).norm() / others.norm()
                assert float(apart) < close
    assert_same_answers(outputs, answers, close)
    assert compiled == []


def plain_request(tokens: int) -> Request:
    """A question of so many tokens, without documents."""
    positions = tuple(range(tokens))
    return Request(Context((), tuple(random_tokens(tokens, seed=tokens)), positions, tokens), LIMIT)


def test_an_open_engine_keeps_old_objects_from_collections() -> None:
    gpu = on_gpu("llama")
    request = requests_over(encoded(gpu))[0]
    with LLMEngine(gpu, config()) as engine:
        engine.submit_request(request).result()
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0


class EveryThird:
    """Allows the tokens with the same remainder as the place."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def mask(self) -> torch.Tensor:
        allowed = torch.arange(VOCABULARY) % 3 == len(self.taken) % 3
        return torch.from_numpy(np.packbits(allowed.numpy(), bitorder="little").view(np.int32))

    def accept(self, token: int) -> None:
        self.taken.append(token)

    @property
    def finished(self) -> bool:
        return len(self.taken) == LIMIT - 1


def test_confidence_and_quotations_agree_with_the_cpu() -> None:
    """All log-probabilities of the first place, those of the prompt's last tokens, and masks, of
    requests that run beside others."""
    outputs = []
    for causal in (on_cpu("llama"), on_gpu("llama")):
        states, sampling = encoded(causal), SamplingParams(logprobs=2, first_logprobs=True)
        plain = requests_over(states)
        asked = [
            *(replace(each, sampling=sampling) for each in plain),
            *(replace(each, prompt_logprobs=2) for each in plain),
            *(replace(each, constraint=EveryThird) for each in plain),
        ]
        outputs.append(complete(causal, asked, config()))
    expected, found = outputs
    assert_same_answers(found, expected, 1e-3)
    for ours, theirs in zip(found[:9], expected[:9], strict=True):
        first = ours.choices[0].first_logprobs
        assert first is not None
        torch.testing.assert_close(first, theirs.choices[0].first_logprobs, rtol=1e-3, atol=1e-3)
    for ours, theirs in zip(found[9:18], expected[9:18], strict=True):
        assert len(theirs.prompt_logprobs) == 2
        found, wanted = ([each.logprob for each in o.prompt_logprobs] for o in (ours, theirs))
        assert found == pytest.approx(wanted, abs=1e-3)
    for each in found[18:]:
        tokens = each.choices[0].token_ids
        assert len(tokens) == LIMIT - 1
        assert [token % 3 for token in tokens] == [place % 3 for place in range(LIMIT - 1)]


def test_random_joins_and_leaves() -> None:
    """Requests come while others run, some are cancelled; each answers as it does alone."""
    cpu, gpu = on_cpu("qwen2"), on_gpu("qwen2")
    rng = random.Random(5)
    limits = [rng.randint(1, 80) for _ in range(120)]
    orders = [rng.sample(range(len(LENGTHS)), rng.randint(0, 3)) for _ in limits]
    on_each = []
    for causal in (cpu, gpu):
        states = encoded(causal)
        on_each.append([
            moved_request(states, order, seed, limit=limit)
            for seed, (order, limit) in enumerate(zip(orders, limits, strict=True))
        ])  # fmt: skip
    expected = complete(cpu, on_each[0], config())
    with LLMEngine(gpu, config(running=24)) as engine:
        handles = []
        for request in on_each[1]:
            handles.append(engine.submit_request(request))
            if rng.random() < 0.3:
                engine.submit_request(request).cancel()
        found = [handle.result(120) for handle in handles]
    assert_same_answers(found, expected, 1e-3)


@pytest.mark.parametrize("draft_tokens", [0, 8])
def test_preempted_answers_are_those_of_the_cpu(draft_tokens: int) -> None:
    """In a pool of eight blocks, for sequences that need three each in the end."""
    cpu, gpu = on_cpu("llama"), on_gpu("llama")
    rng = random.Random(7)
    limits = [rng.randint(130, 150) for _ in range(48)]
    orders = [rng.sample(range(len(LENGTHS)), rng.randint(0, 2)) for _ in limits]
    on_each = []
    for causal in (cpu, gpu):
        states = encoded(causal)
        on_each.append([
            moved_request(states, order, seed, limit=limit)
            for seed, (order, limit) in enumerate(zip(orders, limits, strict=True))
        ])  # fmt: skip
    expected = complete(cpu, on_each[0], config())
    pool = 8 * 64 * gpu.computed_bytes_per_token
    with LLMEngine(gpu, config(pool_bytes=pool, draft_tokens=draft_tokens)) as engine:
        handles = [engine.submit_request(request) for request in on_each[1]]
        found = [handle.result(120) for handle in handles]
        assert engine.stats.preempted > 4
    assert_same_answers(found, expected, 1e-3)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_change_no_answer(temperature: float) -> None:
    """The prompts hold their answers, as far as the drafter knows; steps with a draft and steps
    ahead of the device alternate."""
    gpu = on_gpu("llama")
    states = encoded(gpu)
    sampling = SamplingParams(temperature=temperature, seed=3, logprobs=2)
    requests = [
        replace(moved_request(states, (n, 3), n, limit=100), sampling=sampling) for n in range(3)
    ]
    expected = [complete(gpu, [request], config())[0] for request in requests]
    told = []
    for request, output in zip(requests, expected, strict=True):
        text = [*request.context.token_ids[-3:], *output.token_ids]
        text = [7 if n % 20 == 19 else token for n, token in enumerate(text)]
        *others, last = request.context.segments
        text += [9] * (last.states.length - len(text))
        segments = (*others, replace(last, token_ids=text))
        told.append(replace(request, context=replace(request.context, segments=segments)))
    with LLMEngine(gpu, config(draft_tokens=8)) as engine:
        for together in ([told[0]], told, told):
            handles = [engine.submit_request(request) for request in together]
            found = [handle.result(60) for handle in handles]
            assert_same_answers(found, expected[: len(found)], 1e-3)
        assert engine.stats.accepted_tokens > 300
        assert engine.stats.steps < 240, "far fewer than tokens"


def test_freed_states_are_not_read_afterwards() -> None:
    """Segments that a request has let go of are overwritten while others go on."""
    gpu = on_gpu("llama")
    states = encoded(gpu)
    lasting = moved_request(states, (0, 1), 1, limit=60)
    alone = complete(gpu, [lasting], config())
    with LLMEngine(gpu, config(running=8)) as engine:
        handle = engine.submit_request(lasting)
        for seed in range(10):
            own = [KVStates(s.keys.clone(), s.values.clone(), s.start) for s in states]
            torch.cuda.current_stream().synchronize()
            engine.submit_request(moved_request(own, (2, 3), seed, limit=3)).result(60)
            for each in own:
                each.keys.fill_(float("nan"))
                each.values.fill_(float("nan"))
        assert_same_answers([handle.result(60)], alone, 1e-4)


def test_encodings_run_beside_answers() -> None:
    cpu, gpu = on_cpu("llama"), on_gpu("llama")
    jobs = [EncodeJob(random_tokens(n, seed=n)) for n in (500, 64, 1, 333)]
    expected = list(encode(cpu, jobs))
    with LLMEngine(gpu, config(step_tokens=96)) as engine:
        handle = engine.submit_request(moved_request(encoded(gpu), (1, 0), 4, limit=100))
        found = list(engine.encode(jobs))
        assert handle.result(60).choices[0].finish_reason == "length"
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.keys.cpu(), theirs.keys, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(ours.values.cpu(), theirs.values, rtol=1e-3, atol=1e-3)


def test_the_stream_and_device_of_the_caller_stay() -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    causal = wrap(tiny_model("llama").to(device))
    before = torch.cuda.current_device(), torch.cuda.current_stream(device)
    jobs = [EncodeJob(random_tokens(9, seed=n)) for n in range(2)]
    for states in encode(causal, jobs):
        assert (torch.cuda.current_device(), torch.cuda.current_stream(device)) == before
        complete(causal, [moved_request([states], (), 0, limit=3)], config())
        assert (torch.cuda.current_device(), torch.cuda.current_stream(device)) == before


def test_steps_follow_states_that_arrive_layer_by_layer() -> None:
    """The same question over states on the device, and over states on their way there; the second
    time as graphs cut by layer."""
    from ragcache.states.kv import Arrival

    gpu = on_gpu("llama")
    states = encoded(gpu)
    request = moved_request(states, (1, 0), 5, limit=4)
    expected = complete(gpu, [request], config())
    copies = torch.cuda.Stream()
    with LLMEngine(gpu, config(warm_up=True)) as engine:
        for _ in range(4):
            moved, events = [], []
            with torch.cuda.stream(copies):
                for each in states:
                    pair = [torch.full_like(t, float("nan")) for t in (each.keys, each.values)]
                    moved.append((pair, each))
                torch.cuda._sleep(20_000_000)
                for layer in range(gpu.num_layers):
                    for (keys, values), each in moved:
                        keys[layer].copy_(each.keys[layer])
                        values[layer].copy_(each.values[layer])
                    torch.cuda._sleep(20_000_000)
                    event = torch.cuda.Event()
                    event.record(copies)
                    events.append(event)
            arrival = Arrival(events, range(1, gpu.num_layers + 1), sources=states)
            arriving = [
                KVStates(keys, values, each.start, arrival=arrival)
                for (keys, values), each in moved
            ]
            handle = engine.submit_request(moved_request(arriving, (1, 0), 5, limit=4))
            assert_same_answers([handle.result(60)], expected, 1e-4)
