"""The engine's thread with many callers, and requests in the calling thread."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from ragcache.engine import (
    Context,
    EncodeJob,
    EngineConfig,
    LLMEngine,
    Request,
    RequestOutput,
    SamplingParams,
    Segment,
    assemble_context,
    complete,
    encode,
)
from ragcache.engine import engine as engine_module
from ragcache.engine.engine import MAX_TOKENS_PER_PASS
from ragcache.engine.handle import RequestHandle
from ragcache.engine.request import TokenDelta
from ragcache.engine.runner import RaggedModelRunner
from ragcache.errors import (
    ConstraintFailed,
    EngineClosed,
    EngineFailed,
    PromptTooLong,
    QueueFull,
    RequestCancelled,
    TextFailed,
)
from ragcache.models import CausalLM, wrap_causal
from ragcache.models.model import ForwardBatch
from tests.cluster.machines import wait_until
from tests.ragcache.engine.channels import LONG, CountingLoop
from tests.ragcache.engine.stepped_engine import assert_all_blocks_free, plain_context
from tests.tiny_models import random_tokens, tiny_model

PROMPTS = [random_tokens(5 + n, seed=n) for n in range(16)]


class Gate:
    """Stands in a model's forward pass: counts the passes, and holds or breaks them."""

    def __init__(self, causal: CausalLM) -> None:
        self.forward: Callable[[ForwardBatch], Tensor] = causal.forward
        self.inside = threading.Event()  # a pass has begun
        self.open = threading.Event()
        self.open.set()
        self.failure: BaseException | None = None  # of the next pass

    def __call__(self, step: ForwardBatch) -> Tensor:
        self.inside.set()
        assert self.open.wait(LONG)
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        return self.forward(step)

    def shut(self) -> None:
        self.inside.clear()
        self.open.clear()

    def wait(self) -> None:
        assert self.inside.wait(LONG), "no pass has begun"


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return wrap_causal(tiny_model("llama", initializer_range=0.2))


@pytest.fixture
def gate(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate(model)
    monkeypatch.setattr(model, "forward", gate)
    return gate


@pytest.fixture
def engine(model: CausalLM, gate: Gate) -> Iterator[LLMEngine]:
    settings = EngineConfig(pool_bytes=64 * 64 * model.bytes_per_token, queue=20)
    with LLMEngine(model, settings) as engine:
        yield engine
        gate.open.set()


def request(number: int = 0, limit: int = 8) -> Request:
    sampling = SamplingParams(temperature=1, seed=number) if number % 2 else SamplingParams()
    return Request(
        plain_context(PROMPTS[number]), limit, sampling=sampling, tenant=number % 3 or None
    )


def settled(engine: LLMEngine) -> None:
    """Returns when the engine has nothing left to do: a later request has gone through it."""
    engine.submit_request(request(limit=1)).result(LONG)
    engine.close(drain=True)


def test_threads_get_their_own_answers(
    engine: LLMEngine, model: CausalLM, threads: ThreadPoolExecutor
) -> None:
    expected = complete(model, [request(number) for number in range(16)])
    start = threading.Barrier(16)

    def ask(number: int) -> tuple[tuple[int, ...], list[int]]:
        start.wait(LONG)
        handle = engine.submit_request(request(number))
        pieces = [piece.chosen.token for piece in handle if piece.chosen is not None]
        return handle.result(LONG).token_ids, pieces

    for answer, alone in zip(threads.map(ask, range(16)), expected, strict=True):
        assert answer == (alone.token_ids, list(alone.token_ids))
    settled(engine)
    assert_all_blocks_free(engine.core)


def test_tasks_get_their_own_answers(engine: LLMEngine, model: CausalLM) -> None:
    expected = complete(model, [request(number) for number in range(8)])

    async def awaited(number: int) -> tuple[int, ...]:
        return (await engine.submit_request(request(number))).token_ids

    async def iterated(number: int) -> tuple[int, ...]:
        handle = engine.submit_request(request(number))
        return tuple([piece.chosen.token async for piece in handle if piece.chosen is not None])

    async def ask() -> list[tuple[int, ...]]:
        return await asyncio.gather(*map(awaited, range(4)), *map(iterated, range(4, 8)))

    assert asyncio.run(ask()) == [completion.token_ids for completion in expected]


def test_token_deltas_come_while_the_request_runs(engine: LLMEngine, gate: Gate) -> None:
    handle = engine.submit_request(request(limit=50))
    pieces = iter(handle)
    next(pieces)
    gate.shut()
    gate.wait()
    assert not handle.done
    gate.open.set()
    assert sum(1 for _ in pieces) == 49


@pytest.mark.parametrize("way", ["cancel", "drop"])
def test_a_running_request_is_cancelled(engine: LLMEngine, gate: Gate, way: str) -> None:
    gate.shut()
    running, other = engine.submit_request(request(0, limit=300)), engine.submit_request(request(1))
    gate.wait()
    if way == "cancel":
        running.cancel()
        with pytest.raises(RequestCancelled):
            running.result(LONG)
    del running
    gc.collect()
    gate.open.set()
    assert len(other.result(LONG).token_ids) == 8
    settled(engine)
    assert engine.stats.decoded_tokens < 10
    assert_all_blocks_free(engine.core)


def test_a_queued_request_is_cancelled_and_never_runs(model: CausalLM, gate: Gate) -> None:
    with LLMEngine(model, EngineConfig(pool_bytes=2**20, running=1)) as engine:
        gate.shut()
        running = engine.submit_request(request(0))
        gate.wait()
        queued = engine.submit_request(request(1))
        queued.cancel()
        gate.open.set()
        with pytest.raises(RequestCancelled):
            queued.result(LONG)
        assert len(running.result(LONG).token_ids) == 8
        settled(engine)
        assert engine.stats.admitted == 2, "the running one and the one that settled"


def test_a_full_queue_refuses_requests_but_what_completes_one(
    engine: LLMEngine, gate: Gate
) -> None:
    gate.shut()
    first = engine.submit_request(request())
    gate.wait()
    handles = [engine.submit_request(request(n % 16)) for n in range(20)]
    handles.append(engine.submit_request(request(), follow_up=True))
    with pytest.raises(QueueFull, match="20 requests wait already"):
        engine.submit_request(request())
    gate.open.set()
    assert {len(handle.result(LONG).token_ids) for handle in (first, *handles)} == {8}
    assert len(engine.submit_request(request()).result(LONG).token_ids) == 8, "there is room again"


def test_cancelled_requests_free_their_queue_places_at_once(engine: LLMEngine, gate: Gate) -> None:
    gate.shut()
    first = engine.submit_request(request())
    gate.wait()
    for handle in [engine.submit_request(request(n % 16)) for n in range(20)]:
        handle.cancel()
    later = [engine.submit_request(request(n % 16)) for n in range(20)]
    with pytest.raises(QueueFull, match="20 requests wait already"):
        engine.submit_request(request())
    gate.open.set()
    assert {len(handle.result(LONG).token_ids) for handle in (first, *later)} == {8}


def test_requests_cancelled_during_a_step_never_begin(engine: LLMEngine, gate: Gate) -> None:
    gate.shut()
    first = engine.submit_request(request(0, limit=4))
    gate.wait()
    begun = []

    def begin() -> NoReturn:
        begun.append("a constraint")
        raise AssertionError("nobody waits for its request")

    for _ in range(200):
        engine.submit_request(replace(request(1), constraint=begin)).cancel()
    gate.open.set()
    first.result(LONG)
    settled(engine)
    assert begun == []
    assert_all_blocks_free(engine.core)


def test_a_step_wakes_a_loop_once_for_all_its_requests(engine: LLMEngine) -> None:
    async def read(handle: RequestHandle[TokenDelta, RequestOutput]) -> int:
        return len([piece async for piece in handle])

    async def all_of_them() -> list[int]:
        return await asyncio.gather(
            *(read(engine.submit_request(request(n, limit=12))) for n in range(12))
        )

    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, CountingLoop)
        assert min(runner.run(all_of_them())) > 0
    engine.close(drain=True)  # the last step is counted once it has told what it brought
    assert 0 < loop.woken <= engine.stats.steps < 12 * 12


def test_an_iteration_goes_on_in_another_loop(engine: LLMEngine, gate: Gate) -> None:
    handle = engine.submit_request(request(0, limit=5))
    pieces = handle.__aiter__()

    async def take() -> TokenDelta:
        return await anext(pieces)

    async def rest() -> int:
        return len([piece async for piece in pieces])

    first = asyncio.Runner()
    first.run(take())
    with asyncio.Runner() as second:
        assert second.run(rest()) > 0
    first.close()
    assert len(handle.result(LONG).token_ids) == 5


def test_submit_refuses_requests_that_could_never_run(engine: LLMEngine) -> None:
    with pytest.raises(PromptTooLong):
        engine.submit_request(request(limit=600))


def test_submitting_and_canceling_wait_for_no_forward_pass(
    engine: LLMEngine, gate: Gate, threads: ThreadPoolExecutor
) -> None:
    gate.shut()
    running = engine.submit_request(request(0, limit=300))
    gate.wait()

    def come_and_go() -> bool:
        handle = engine.submit_request(request(1))
        handle.cancel()
        running.cancel()
        return handle.done and running.done

    assert threads.submit(come_and_go).result(LONG)
    assert not gate.open.is_set(), "the pass still goes on"
    gate.open.set()


def test_a_failed_step_ends_its_requests_and_serves_later_ones(
    engine: LLMEngine, gate: Gate, model: CausalLM
) -> None:
    [expected] = complete(model, [request(1)])
    gate.shut()
    first = engine.submit_request(request(0, limit=100))
    gate.wait()
    others = [engine.submit_request(request(2)), engine.encode([EncodeJob([1, 2])])]
    failure = gate.failure = RuntimeError("out of memory")
    gate.open.set()
    with pytest.raises(EngineFailed, match="out of memory") as caught:
        first.result(LONG)
    assert caught.value.__cause__ is failure
    for other in others:  # they came while that step ran, and were not in it
        other.result(LONG)
    assert engine.submit_request(request(1)).result(LONG).token_ids == expected.token_ids
    settled(engine)
    assert_all_blocks_free(engine.core)


class Panic(BaseException):
    """An error like the panics of Rust's extensions, which are no `Exception`."""


ENDINGS = [SystemExit(3), KeyboardInterrupt(), Panic("index out of bounds")]


@pytest.mark.parametrize("failure", ENDINGS, ids=repr)
def test_an_ended_thread_fails_all_requests_and_later_ones(
    engine: LLMEngine, gate: Gate, failure: BaseException
) -> None:
    gate.shut()
    running = engine.submit_request(request(0, limit=100))
    gate.wait()
    queued = [engine.submit_request(request(n)) for n in range(1, 4)]
    encoding = engine.encode([EncodeJob([1, 2])])
    gate.failure = failure
    gate.open.set()

    async def await_request() -> RequestOutput:
        return await asyncio.wait_for(queued[0], LONG)

    async def iterate() -> list[TokenDelta]:
        return [event async for event in queued[1]]

    for wait in (
        lambda: running.result(LONG),
        lambda: asyncio.run(await_request()),
        lambda: asyncio.run(asyncio.wait_for(iterate(), LONG)),
        lambda: list(queued[2]),
        lambda: list(encoding),
        lambda: engine.submit_request(request()),
        lambda: engine.encode([EncodeJob([1])]),
    ):
        with pytest.raises(EngineFailed, match=r"thread has ended after .*open it again") as caught:
            wait()
        assert caught.value.__cause__ is failure
    assert not engine.is_open
    engine.close()


class Part:
    """A constraint, and a text, that raise an error in one of their methods."""

    def __init__(self, where: str, error: BaseException) -> None:
        self.where, self.error = where, error
        self.finished = False
        self._raise("begin")

    def _raise(self, where: str) -> None:
        if where == self.where:
            raise self.error

    def mask(self) -> Tensor:
        self._raise("mask")
        return torch.full((10,), -1, dtype=torch.int32)

    def accept(self, token: int) -> None:
        self._raise("accept")

    def push(self, tokens: object, **options: object) -> NoReturn:
        raise self.error


PARTS = [("constraint", "begin"), ("constraint", "mask"), ("constraint", "accept")]
PARTS += [("text", "begin"), ("text", "push")]


@pytest.mark.parametrize(("part", "where"), PARTS)
@pytest.mark.parametrize("failure", ENDINGS, ids=repr)
def test_errors_of_foreign_code_reach_their_request(
    engine: LLMEngine, part: str, where: str, failure: BaseException
) -> None:
    """A panic ends its own request alone. Errors that end a process end the engine's thread."""
    make: Any = lambda *_: Part(where, failure)  # noqa: E731
    handle = engine.submit_request(replace(request(), **{part: make}))
    panics = isinstance(failure, Panic)
    with pytest.raises((ConstraintFailed, TextFailed) if panics else EngineFailed):
        handle.result(LONG)
    if panics:
        assert engine.submit_request(request()).result(LONG).token_ids
    else:
        with pytest.raises(EngineFailed):
            engine.submit_request(request())
    assert engine.is_open == panics


def test_a_message_that_fails_ends_its_request_alone(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine.core._requests, "_enqueue", lambda _: 1 / 0)
        with pytest.raises(EngineFailed, match="ZeroDivisionError"):
            engine.submit_request(request()).result(LONG)
    assert engine.submit_request(request()).result(LONG).token_ids


def wait_ended(handle: RequestHandle[TokenDelta, RequestOutput]) -> None:
    """Waits for the end of a request without raising its error, which would hold its frames."""
    wait_until(LONG, lambda: handle.done)


def test_failed_step_keeps_no_states(
    engine: LLMEngine, gate: Gate, model: CausalLM, caplog: pytest.LogCaptureFixture
) -> None:
    """Not by the engine's thread either, whose error would hold the states of the step."""
    caplog.set_level(logging.CRITICAL, "ragcache.engine.engine")  # a record holds its error
    [states] = encode(model, [EncodeJob([1, 2, 3])])
    keys = weakref.ref(states.keys)
    gate.failure = RuntimeError("broken")
    handle = engine.submit_request(Request(Context((Segment(states, 0),), (1, 2), (3, 4), 5), 4))
    wait_ended(handle)
    engine.submit_request(request(limit=1)).result(LONG)
    del states, handle
    gc.collect()
    assert keys() is None


def test_raised_errors_are_not_kept(engine: LLMEngine) -> None:
    handle = engine.submit_request(request(limit=300))
    handle.cancel()
    with pytest.raises(RequestCancelled):
        handle.result(LONG)
    settled(engine)
    gone = weakref.ref(handle)
    del handle
    gc.collect()
    assert gone() is None


def test_close_fails_running_requests(engine: LLMEngine, gate: Gate) -> None:
    gate.shut()
    running = engine.submit_request(request(0, limit=300))
    gate.wait()
    queued, encoding = engine.submit_request(request(1)), engine.encode([EncodeJob([1, 2])])
    closing = threading.Thread(target=engine.close)
    closing.start()
    gate.open.set()
    closing.join(LONG)
    for handle in (running, queued, encoding):
        with pytest.raises(EngineClosed):
            handle.result(LONG)
    assert_all_blocks_free(engine.core)


def test_close_with_drain_waits_for_running_requests(engine: LLMEngine, gate: Gate) -> None:
    gate.shut()
    handles = [engine.submit_request(request(number)) for number in range(4)]
    gate.wait()
    closing = threading.Thread(target=engine.close, kwargs={"drain": True})
    closing.start()
    gate.open.set()
    assert [len(handle.result(LONG).token_ids) for handle in handles] == [8] * 4
    closing.join(LONG)
    assert not closing.is_alive()
    assert_all_blocks_free(engine.core)


@pytest.mark.parametrize("drain", [False, True])
def test_closed_engine_refuses_requests(engine: LLMEngine, drain: bool) -> None:
    engine.close(drain=drain)
    engine.close()
    with pytest.raises(EngineClosed):
        engine.submit_request(request())
    with pytest.raises(EngineClosed):
        engine.encode([EncodeJob([1])])
    assert not engine._thread.is_alive()


NEVER: frozenset[int] = frozenset()


def prompt(causal: CausalLM, seed: int, modules: int = 1) -> Context:
    jobs = [EncodeJob(random_tokens(9 + n, seed=seed + n), 4) for n in range(modules)]
    states = list(encode(causal, jobs)) if jobs else []
    return assemble_context(states, random_tokens(6, seed=seed), window=512, max_tokens=20)


def run_requests(
    causal: CausalLM, context: Context, limit: int, stops: frozenset[int] = NEVER
) -> RequestOutput:
    [completion] = complete(causal, [Request(context, limit, stops)])
    return completion


def fresh_at(tokens: tuple[int, ...]) -> int:
    """An index above zero whose token did not come before."""
    return next(i for i, token in enumerate(tokens) if i and token not in tokens[:i])


@dataclass
class PlayedStream:
    """A GPU's stream, as far as the calling thread uses one. log: what was done to it."""

    log: list[str] = field(default_factory=list)
    device: torch.device = torch.device("cpu")

    def wait_stream(self, stream: str) -> None:
        self.log.append(f"waits for {stream}")

    def synchronize(self) -> None:
        self.log.append("has computed")

    @contextmanager
    def current(self) -> Iterator[None]:
        self.log.append("begin")
        yield
        self.log.append("end")


@pytest.fixture
def played_stream(causal: CausalLM, monkeypatch: pytest.MonkeyPatch) -> PlayedStream:
    stream, runner = PlayedStream(), RaggedModelRunner(causal)
    monkeypatch.setattr(runner, "stream", stream)
    monkeypatch.setattr(engine_module, "runner_for", lambda *_, **__: runner)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "the caller's")
    monkeypatch.setattr(torch.cuda, "stream", PlayedStream.current)
    return stream


def test_completions_leave_the_stream_of_the_caller(
    causal: CausalLM, played_stream: PlayedStream
) -> None:
    complete(causal, [Request(plain_context(PROMPTS[0]), 2)])
    assert played_stream.log == ["waits for the caller's", "begin", "end"]


def test_encoding_leaves_the_stream_of_the_caller_between_states(
    causal: CausalLM, played_stream: PlayedStream
) -> None:
    once = ["waits for the caller's", "begin", "has computed", "end"]
    jobs = [EncodeJob([1] * causal.window)] * (MAX_TOKENS_PER_PASS // causal.window)
    found = islice(encode(causal, [*jobs, EncodeJob([2])]), len(jobs) - 1, None)
    for number, _ in enumerate(found, 1):
        assert played_stream.log == number * once


def test_completions_come_in_the_order_of_the_requests(causal: CausalLM) -> None:
    limits = (6, 1, 3)
    completions = complete(causal, [Request(prompt(causal, seed=n), n) for n in limits])
    assert tuple(len(completion.token_ids) for completion in completions) == limits


def test_a_stop_token_right_after_the_limit_changes_nothing(causal: CausalLM) -> None:
    context = prompt(causal, seed=2)
    tokens = run_requests(causal, context, 12).token_ids
    at = fresh_at(tokens)
    completion = run_requests(causal, context, at, frozenset({tokens[at]}))
    assert (completion.token_ids, completion.finish_reason) == (tokens[:at], "length")


def test_answer_positions_follow_the_context(causal: CausalLM) -> None:
    """Positions count on after the prompt even where the prompt has gaps."""
    plain = prompt(causal, seed=6)
    moved = Context(plain.segments, plain.token_ids, plain.position_ids, plain.next_position + 40)
    first, other = run_requests(causal, plain, 1), run_requests(causal, moved, 1)
    assert first.token_ids == other.token_ids, "the first token depends on the prompt alone"
    tokens = []
    for context in (plain, moved):
        start = context.next_position
        own = (*context.token_ids, first.token_ids[0])
        positions = (*context.position_ids, start)
        again = Context(context.segments, own, positions, start + 1)
        tokens.append(run_requests(causal, again, 4).token_ids)
        assert run_requests(causal, context, 5).token_ids[1:] == tokens[-1]
