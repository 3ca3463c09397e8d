"""A model over two GPUs beside the same model on one: histories, deaths, and what they leave."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ragcache.engine import EngineConfig, LLMEngine, Request, TokenDelta, assemble_context
from ragcache.engine.engine import _computing_on
from ragcache.engine.runner import runner_for
from ragcache.errors import EngineFailed
from ragcache.models import CausalLM, wrap_causal
from ragcache.models.parallel.device_leader import split_over_devices
from ragcache.models.parallel.device_model import DeviceParallelLM
from ragcache.models.parallel.ranks import FollowerProcesses
from tests.ragcache.models.parallel.histories import History, run_history
from tests.tiny_models import tiny_model

RANKS = int(os.environ.get("RAGCACHE_TEST_RANKS", min(2, torch.cuda.device_count())))
if RANKS < 2:
    pytest.skip("needs two CUDA devices", allow_module_level=True)

pytestmark = pytest.mark.gpu

SOON = 5.0  # seconds in which a failure must be known, and all processes gone
LEFT_BYTES = 2**25  # that a driver may keep of a process
LIMIT = 280.0  # seconds of a test, in which all ranks may have to compile the model
SIZES: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
HISTORIES = int(os.environ.get("RAGCACHE_TEST_HISTORIES", 10))


def whole() -> CausalLM:
    return wrap_causal(tiny_model("llama", **SIZES))


def split() -> DeviceParallelLM:
    return split_over_devices(whole(), RANKS, torch.device("cuda:0"))


def history(causal: CausalLM, seed: int) -> History:
    runner = runner_for(causal, prefill_tokens=64)
    with torch.inference_mode(), _computing_on(runner.stream):
        found = run_history(causal, 100, seed, runner)
        torch.cuda.synchronize()
    return found


def test_histories_are_the_same_over_several_devices() -> None:
    """A thousand requests that join, end, are canceled or late, preempted, forked, constrained."""
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    alone = wrap_causal(tiny_model("llama", **SIZES).to("cuda:0"))
    together = split()
    preempted = evicted = 0
    for seed in range(HISTORIES):
        begin = time.monotonic()
        expected = history(alone, seed)
        middle = time.monotonic()
        found = history(together, seed)
        print(
            f"history {seed}: {middle - begin:.1f} s alone, {time.monotonic() - middle:.1f} s over "
            f"{RANKS}; {expected.evicted} evicted, {expected.refused} refused; {expected.stats}",
            flush=True,
        )  # fmt: skip
        differ = [
            (number, ours, theirs)
            for number, (ours, theirs) in enumerate(
                zip(found.outcomes, expected.outcomes, strict=True)
            )
            if ours != theirs
        ]
        assert not differ, differ[:3]
        for name in ("steps", "prompt_tokens", "decoded_tokens", "encoded_tokens", "preempted"):
            assert getattr(found.stats, name) == getattr(expected.stats, name), name
        assert (found.evicted, found.refused) == (expected.evicted, expected.refused)
        preempted += expected.stats.preempted
        evicted += expected.evicted
        for ours, theirs in zip(found.encoded, expected.encoded, strict=True):
            here = together.key_heads
            torch.testing.assert_close(ours.keys, theirs.keys[:, here], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(ours.values, theirs.values[:, here], rtol=1e-4, atol=1e-5)
    assert preempted > 2 * HISTORIES
    assert evicted > 10 * HISTORIES
    together.close()
    faulthandler.cancel_dump_traceback_later()


def free_bytes() -> list[int]:
    """Free memory of the followers' GPUs."""
    return [torch.cuda.mem_get_info(rank)[0] for rank in range(1, RANKS)]


@pytest.fixture
def model() -> Iterator[DeviceParallelLM]:
    """A model that leaves no memory of its own on the followers' GPUs."""
    before = free_bytes()
    made = split()
    yield made
    made.close()
    end = time.monotonic() + SOON  # NCCL is ended in a thread
    while left := max(then - now for then, now in zip(before, free_bytes(), strict=True)):
        if left < LEFT_BYTES or time.monotonic() > end:
            break
        time.sleep(0.1)
    print(f"{left:,} bytes are left", flush=True)
    assert left < LEFT_BYTES


class Runs:
    """A message that runs code in the follower while it is read."""

    def __init__(self, code: str) -> None:
        self.code = code

    def __reduce__(self) -> Any:
        return exec, (self.code,)


def processes(model: DeviceParallelLM) -> list[int]:
    return [each.process.pid for each in model._followers._followers]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def send(model: DeviceParallelLM, code: str) -> None:
    model.channel._ring.write(pickle.dumps(Runs(code)))


DEATHS: dict[str, tuple[Callable[[DeviceParallelLM], None], str]] = {
    "killed": (
        lambda model: os.kill(processes(model)[0], signal.SIGKILL),
        "ended with SIGKILL",
    ),
    "stopped": (
        lambda model: os.kill(processes(model)[0], signal.SIGSTOP),
        "gives no sign of life",
    ),
    "hanging": (lambda model: send(model, "import time; time.sleep(60)"), "hangs in a pass"),
    "failing": (
        lambda model: send(model, "raise ValueError('a bad step')"),
        "failed: ValueError: a bad step",
    ),
}


def long_request() -> Request:
    context = assemble_context([], list(range(1, 9)), window=512, max_tokens=400)
    return Request(context, 400, ignore_eos=True)


def ask_until_failure(engine: LLMEngine, stream: Iterator[TokenDelta]) -> None:
    for _ in range(1000):
        list(stream)
        stream = iter(engine.submit_request(long_request()))


@pytest.mark.parametrize("death", DEATHS)
def test_a_follower_that_dies_ends_the_engine(death: str, model: DeviceParallelLM) -> None:
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    kill, reason = DEATHS[death]
    followers = processes(model)
    used = [torch.cuda.mem_get_info(rank)[0] for rank in range(RANKS)]
    with LLMEngine(model, EngineConfig(2**24, warm_up=True)) as engine:
        engine.submit_request(long_request()).result(LIMIT)
        stream = iter(engine.submit_request(long_request()))
        next(stream)
        begin = time.monotonic()
        kill(model)
        with pytest.raises(EngineFailed) as caught:
            ask_until_failure(engine, stream)
        spent = time.monotonic() - begin
        print(f"{death}: {spent:.2f} s", flush=True)
        assert spent < SOON
        assert reason in f"{caught.value} {caught.value.__cause__}"
        while engine.is_open:
            assert time.monotonic() - begin < SOON
            time.sleep(0.02)
        assert not any(map(alive, followers))
    for rank in range(1, RANKS):
        free = torch.cuda.mem_get_info(rank)[0]
        print(f"free on {rank}: {used[rank]:,} while it served, {free:,} afterwards", flush=True)
        assert free > used[rank]
    torch.cuda.synchronize(0)  # no sum waits for ever
    faulthandler.cancel_dump_traceback_later()


def test_a_follower_that_dies_while_ranks_connect_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    ready, before = FollowerProcesses.wait_until_ready, torch.cuda.memory_allocated(0)

    def kill_the_ready(followers: FollowerProcesses) -> None:
        ready(followers)
        followers._followers[-1].process.kill()

    with monkeypatch.context() as patch:
        patch.setattr(FollowerProcesses, "wait_until_ready", kill_the_ready)
        begin = time.monotonic()
        with pytest.raises(EngineFailed, match=f"rank {RANKS - 1} of {RANKS} ended with SIGKILL"):
            split()
        print(f"connecting: {time.monotonic() - begin:.2f} s", flush=True)
    again = split()
    assert again.collectives.sums_by == "one-shot"
    weights = sum(each.nbytes for each in again.model.parameters())
    allocated = torch.cuda.memory_allocated(0)
    again.close()
    freed = allocated - torch.cuda.memory_allocated(0)
    print(f"{before:,} bytes before, {weights:,} of weights, {freed:,} freed", flush=True)
    assert freed >= weights
    faulthandler.cancel_dump_traceback_later()


def test_a_folder_is_written_and_read_by_any_number_of_devices(tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy")
    pytest.importorskip("tantivy")
    from transformers import AutoTokenizer

    from ragcache import RagCache, SourceDocument
    from ragcache.models.loader import READER

    faulthandler.dump_traceback_later(LIMIT, exit=True)
    tokenizer = AutoTokenizer.from_pretrained(str(READER))
    sizes = {**SIZES, "vocab_size": len(tokenizer), "max_position_embeddings": 2048}
    tiny_model("llama", **sizes).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    documents = [
        SourceDocument("leave.md", "There are 28 days of leave a year. " * 6),
        SourceDocument("travel.md", "Trips are booked by the office in Bern. " * 8),
        SourceDocument("boats.md", "The survey boat Pipit is moored at the north quay. " * 5),
    ]
    questions = ("How many days of leave are there?", "Who books trips?", "Where is the boat?")

    def opened(state: str, ranks: int) -> RagCache:
        return RagCache.open(
            tmp_path / state, tmp_path / "model", max_tokens=12, tensor_parallel=ranks,
            device="cuda:0", dtype="float32", device_bytes=2**26, host_bytes=2**26,
            private_bytes=2**24,
        )  # fmt: skip

    def answers(rag: RagCache) -> list[str]:
        return [rag.ask(each, collection="handbook").text for each in questions]

    def blobs(state: str) -> dict[str, bytes]:
        found = (tmp_path / state).glob("states/??/*.safetensors")
        return {each.name: each.read_bytes() for each in found}

    for writers, readers in ((1, RANKS), (RANKS, 1)):
        state = f"state{writers}"
        with opened(state, writers) as rag:
            rag.ingest("handbook", documents)
            expected = answers(rag)
        written = blobs(state)
        assert len(written) >= len(documents)
        with opened(state, readers) as rag:
            assert answers(rag) == expected
            assert rag.internals.shared.engine.stats.encoded_tokens == 0, "every state was found"
            assert rag.internals.shared.model.causal.ranks == readers
        assert blobs(state) == written, "the same files, byte for byte"
    faulthandler.cancel_dump_traceback_later()
