"""Ranks as processes over gloo: answers, deaths, and what is left of them."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from ragcache.engine import EncodeJob, LLMEngine, Request, assemble_context, encode
from ragcache.engine.engine import complete
from ragcache.errors import ConfigurationError, EngineFailed
from ragcache.models import wrap_causal
from ragcache.models.parallel import ranks as ranks_module
from ragcache.models.parallel.leader import ParallelLM, split_model
from ragcache.models.parallel.memory import SharedArena
from tests.ragcache.models.parallel.test_passes import CLOSE, answers
from tests.tiny_models import tiny_model

SOON = 5.0  # seconds in which a failure must be known, and all processes gone


@pytest.fixture
def split(forked_ranks: None) -> Iterator[ParallelLM]:
    made = split_model(wrap_causal(tiny_model("llama")), 2)
    yield made
    made.close()


def processes(split: ParallelLM) -> list[int]:
    return [each.process.pid for each in split._followers._followers]  # type: ignore[attr-defined]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for(done: Callable[[], bool], seconds: float = SOON) -> float:
    """Wait until something is true. Returns the seconds."""
    begin = time.monotonic()
    while not done():
        assert time.monotonic() - begin < seconds, "it takes too long"
        time.sleep(0.02)
    return time.monotonic() - begin


def long_request() -> Request:
    context = assemble_context([], list(range(1, 9)), window=512, max_tokens=400)
    return Request(context, 400, ignore_eos=True)


class Runs:
    """A message that runs code in the follower while it is read."""

    def __init__(self, code: str) -> None:
        self.code = code

    def __reduce__(self) -> Any:
        return exec, (self.code,)


def send(split: ParallelLM, code: str) -> None:
    split._followers.send_all(pickle.dumps(Runs(code)))


EIGHT_HEADS: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
CASES: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (4, {}),  # with key heads that two ranks have
    (4, EIGHT_HEADS),
    (8, {**EIGHT_HEADS, "num_key_value_heads": 1}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "sizes"), CASES)
def test_processes_answer_as_one_does(
    forked_ranks: None, ranks: int, sizes: dict[str, Any]
) -> None:
    expected, tokens = answers(wrap_causal(tiny_model("llama", **sizes)))
    split = split_model(wrap_causal(tiny_model("llama", **sizes)), ranks)
    try:
        states, found = answers(split)
        assert found == tokens
        for ours, theirs in zip(states, expected, strict=True):
            torch.testing.assert_close(ours.keys, theirs.keys, **CLOSE)
            torch.testing.assert_close(ours.values, theirs.values, **CLOSE)
        followers = processes(split)
        assert len(followers) == ranks - 1
    finally:
        split.close()
    assert not any(map(alive, followers))
    with pytest.raises(EngineFailed, match="the model was closed"):
        complete(split, [long_request()])


@pytest.mark.slow
def test_bfloat16_is_summed_in_float32(forked_ranks: None) -> None:
    whole = wrap_causal(tiny_model("llama", torch.bfloat16))
    split = split_model(whole, 2)
    try:
        [expected], [found] = (
            encode(each, [EncodeJob(list(range(50)))]) for each in (whole, split)
        )
        assert found.keys.dtype == torch.bfloat16
        torch.testing.assert_close(found.keys, expected.keys, rtol=0.05, atol=0.05)
    finally:
        split.close()


DEATHS: dict[str, tuple[Callable[[ParallelLM], None], str]] = {
    "killed": (
        lambda split: os.kill(processes(split)[0], signal.SIGKILL),
        "rank 1 of 2 ended with SIGKILL",
    ),
    "stopped": (
        lambda split: os.kill(processes(split)[0], signal.SIGSTOP),
        "rank 1 of 2 gives no sign of life",
    ),
    "hanging": (
        lambda split: send(split, "import time; time.sleep(60)"),
        "rank 1 of 2 hangs in a pass",
    ),
    "failing": (
        lambda split: send(split, "raise ValueError('a bad step')"),
        "rank 1 of 2 failed: ValueError: a bad step",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("death", DEATHS)
def test_a_follower_that_dies_ends_the_engine(death: str, split: ParallelLM) -> None:
    kill, reason = DEATHS[death]
    [follower] = processes(split)
    with LLMEngine(split) as engine:
        handle = engine.submit_request(long_request())
        stream = iter(handle)
        next(stream)
        begin = time.monotonic()
        kill(split)
        with pytest.raises(EngineFailed) as caught:
            list(stream)
        wait_for(lambda: not engine.is_open)
        assert time.monotonic() - begin < SOON
        assert reason in str(caught.value) + str(caught.value.__cause__)
        with pytest.raises(EngineFailed, match="computes no more requests"):
            engine.submit_request(long_request())
        assert not alive(follower)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.nightly)])
def test_the_death_of_any_of_several_followers_ends_all(forked_ranks: None, ranks: int) -> None:
    split = split_model(wrap_causal(tiny_model("llama", **EIGHT_HEADS)), ranks)
    followers = processes(split)
    try:
        with LLMEngine(split) as engine:
            stream = iter(engine.submit_request(long_request()))
            next(stream)
            os.kill(followers[-1], signal.SIGKILL)
            with pytest.raises(EngineFailed, match=f"rank {ranks - 1} of {ranks} ended"):
                list(stream)
            wait_for(lambda: not any(map(alive, followers)))
    finally:
        split.close()


LOSE_ANOTHER = """
from ragcache.models.parallel import follower
follower.SETTLING = 60.0
raise follower.RankLost("closed")
"""


@pytest.mark.slow
def test_the_rank_that_ended_is_named_not_those_that_lost_it(forked_ranks: None) -> None:
    split = split_model(wrap_causal(tiny_model("llama", **EIGHT_HEADS)), 4)
    try:
        split._followers.send(1, pickle.dumps(Runs(LOSE_ANOTHER)))  # type: ignore[attr-defined]
        time.sleep(0.5)  # it would have been reported
        assert split.failure is None
        os.kill(processes(split)[-1], signal.SIGKILL)
        wait_for(lambda: split.failure is not None)
        assert "rank 3 of 4 ended with SIGKILL" in str(split.failure)
    finally:
        split.close()


@pytest.mark.slow
@pytest.mark.parametrize("death", ["killed", "stopped", "failing"])
def test_a_follower_that_dies_ends_an_idle_engine(death: str, split: ParallelLM) -> None:
    kill, reason = DEATHS[death]
    with LLMEngine(split) as engine:
        kill(split)
        wait_for(lambda: not engine.is_open)
        with pytest.raises(EngineFailed) as caught:
            engine.submit_request(long_request())
        assert reason in str(caught.value)


@pytest.mark.slow
def test_a_rank_that_dies_in_a_meeting_ends_the_wait(split: ParallelLM) -> None:
    never, followers = threading.Event(), split._followers
    assert isinstance(followers, ranks_module.FollowerProcesses)
    killer = threading.Timer(0.2, DEATHS["killed"][0], [split])
    killer.start()
    with pytest.raises(EngineFailed, match="rank 1 of 2 ended with SIGKILL"):
        followers.wait_for(never.wait)
    never.set()


@pytest.mark.slow
def test_a_rank_that_dies_before_it_connects_is_named(
    forked_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = ranks_module.FollowerProcesses.wait_until_ready

    def kill_the_ready(followers: ranks_module.FollowerProcesses) -> None:
        ready(followers)
        followers._followers[0].process.kill()
        followers._followers[0].process.wait()

    monkeypatch.setattr(ranks_module.FollowerProcesses, "wait_until_ready", kill_the_ready)
    with pytest.raises(EngineFailed, match="rank 1 of 2 ended with SIGKILL"):
        split_model(wrap_causal(tiny_model("llama")), 2)


@pytest.mark.slow
def test_a_meeting_that_fails_ends_all_ranks(split: ParallelLM) -> None:
    def fail() -> NoReturn:
        raise ValueError("no way")

    followers = split._followers
    assert isinstance(followers, ranks_module.FollowerProcesses)
    followers.wait_for(lambda: None)
    with pytest.raises(EngineFailed, match="the ranks could not meet: ValueError"):
        followers.wait_for(fail)
    assert not any(map(alive, processes(split)))


@pytest.mark.slow
def test_an_error_in_the_leaders_pass_ends_the_engine(
    split: ParallelLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise MemoryError("no room")

    with LLMEngine(split) as engine:
        monkeypatch.setattr(split._leader.collectives, "sum_parts", fail)
        with pytest.raises(EngineFailed, match="a pass of the leader failed"):
            engine.submit_request(long_request()).result(SOON)
        wait_for(lambda: not engine.is_open)
    assert not any(map(alive, processes(split)))


@pytest.mark.slow
def test_collection_of_garbage_is_frozen_in_every_rank(tmp_path: Path) -> None:
    report, split = tmp_path / "frozen", split_model(wrap_causal(tiny_model("llama")), 2)
    with closing(split), LLMEngine(split) as engine:
        wait_for(lambda: gc.get_freeze_count() > 0)
        send(split, f"import gc; open({str(report)!r}, 'w').write(str(gc.get_freeze_count()))")
        wait_for(report.exists)
        wait_for(lambda: not engine.is_open)  # the message was no batch
    assert int(report.read_text()) > 10_000


@pytest.mark.slow
def test_followers_end_with_a_killed_leader(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import os, signal, sys
        from ragcache.models import wrap_causal
        from ragcache.models.parallel.leader import split_model
        from tests.tiny_models import tiny_model

        split = split_model(wrap_causal(tiny_model("llama")), 2)
        if os.fork() == 0:  # another process has the leader's end of the connection, too
            import time
            time.sleep(60)
        print([each.process.pid for each in split._followers._followers][0], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["", *sys.path])}
    leader = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    assert leader.stdout is not None
    follower = int(leader.stdout.readline())
    try:
        assert leader.wait() == -signal.SIGKILL
        wait_for(lambda: not alive(follower))
    finally:
        leader.stdout.close()
        os.killpg(leader.pid, signal.SIGKILL)


def test_a_follower_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "_SCRIPT", "import sys; sys.exit(3)")
    with pytest.raises(EngineFailed, match="rank 1 of 2 ended with status 3"):
        split_model(wrap_causal(tiny_model("llama")), 2)


def test_a_split_model_is_not_split_again(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = wrap_causal(tiny_model("llama"))
    monkeypatch.setattr(whole, "ranks", 2)
    with pytest.raises(ConfigurationError, match="split already"):
        split_model(whole, 2)


def test_systems_without_shared_memory_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(ConfigurationError, match="run it on Linux"):
        SharedArena.create()
