"""An engine over several ranks, as threads: their failure is the end of the engine."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import pytest
import torch

from ragcache.engine import EncodeJob, EngineConfig, LLMEngine, Request, assemble_context
from ragcache.errors import EngineFailed
from ragcache.models import ForwardBatch, wrap_causal
from ragcache.models.parallel.leader import ParallelLM
from ragcache.store.tiers.host import HostTier
from tests.ragcache.models.parallel.thread_ranks import ThreadFollowers, split_in_threads
from tests.tiny_models import tiny_model

SECONDS = 20
pytestmark = pytest.mark.slow  # collecting all garbage takes a third of a second


@pytest.fixture
def split() -> Iterator[ParallelLM]:
    made = split_in_threads(wrap_causal(tiny_model("llama")), 2)
    yield made
    made.close()


def request() -> Request:
    return Request(assemble_context([], [1, 2, 3], window=512, max_tokens=4), 4)


def fail(split: ParallelLM) -> None:
    followers = cast("ThreadFollowers", split._followers)
    followers.failure = EngineFailed("rank 1 of 2 ended with SIGKILL")
    for call in followers.on_failure:
        call(followers.failure)


def test_a_failure_ends_an_idle_engine(split: ParallelLM) -> None:
    with LLMEngine(split, EngineConfig(2**20)) as engine:
        engine.submit_request(request()).result(SECONDS)
        assert gc.get_freeze_count() > 0
        fail(split)
        engine._thread.join(SECONDS)
        assert not engine.is_open
        with pytest.raises(EngineFailed, match="rank 1 of 2 ended with SIGKILL"):
            engine.submit_request(request())


def test_a_model_keeps_no_closed_engine(split: ParallelLM) -> None:
    engine = LLMEngine(split, EngineConfig(2**20))
    engine.submit_request(request()).result(SECONDS)
    engine.close()
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    fail(split)


def test_an_error_after_a_failure_ends_the_engine(
    split: ParallelLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step sees the failure before the engine's message does."""
    followers = cast("ThreadFollowers", split._followers)

    @contextmanager
    def computing() -> Iterator[None]:
        followers.failure = EngineFailed("rank 1 of 2 hangs in a pass")
        raise followers.failure
        yield

    with LLMEngine(split, EngineConfig(2**20)) as engine:
        monkeypatch.setattr(followers, "computing", computing)
        monkeypatch.setattr(followers, "send_all", lambda _: None)
        with pytest.raises(EngineFailed, match="the engine's thread has ended") as caught:
            engine.submit_request(request()).result(SECONDS)
        assert caught.value.__cause__ is followers.failure
        engine._thread.join(SECONDS)
        assert not engine.is_open


def test_tokens_of_a_step_beside_a_failure_are_not_delivered(
    split: ParallelLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums on a device end with any result when a rank has failed."""
    followers, forward = cast("ThreadFollowers", split._followers), split.forward

    def failing(batch: ForwardBatch) -> torch.Tensor:
        logits = forward(batch)
        followers.failure = EngineFailed("rank 1 of 2 ended with SIGKILL")
        return logits

    with LLMEngine(split, EngineConfig(2**20)) as engine:
        monkeypatch.setattr(split, "forward", failing)
        handle = engine.submit_request(request())
        with pytest.raises(EngineFailed, match="rank 1 of 2 ended with SIGKILL"):
            next(iter(handle))
        engine._thread.join(SECONDS)
        assert not engine.is_open


def test_a_failure_of_one_step_does_not_end_the_engine(
    split: ParallelLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has been sent, so that the ranks are in step."""

    def full(_: object) -> bytes:
        raise torch.OutOfMemoryError("the ranks' memory is full")

    with LLMEngine(split, EngineConfig(2**20)) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(split._writer, "dumps", full)
            with pytest.raises(EngineFailed, match="no memory left for a single token"):
                engine.submit_request(request()).result(SECONDS)
        engine.submit_request(request()).result(SECONDS)


def test_states_of_the_host_tier_are_read_in_place(split: ParallelLM) -> None:
    host = HostTier(2**20, pinned=False, reserve=split.host_memory)
    with LLMEngine(split, EngineConfig(2**20)) as engine:
        [states] = engine.encode([EncodeJob(list(range(30)))])
        assert split._arena.place_of(states.keys) is not None
        host.put("key", states)  # type: ignore[arg-type]
        kept = host.get("key")  # type: ignore[arg-type]
    assert split._arena.place_of(kept.keys) is not None
    assert torch.equal(kept.keys, states.keys)


def test_passes_of_several_threads_follow_each_other(split: ParallelLM) -> None:
    answers = list[tuple[int, ...]]()

    def ask() -> None:
        with LLMEngine(split, EngineConfig(2**20)) as engine:
            answers.append(tuple(engine.submit_request(request()).result(SECONDS).token_ids))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 3
    assert len(set(answers)) == 1
