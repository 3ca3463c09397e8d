"""An engine whose thread has ended, a forked process, and a program that ends without `close`:
nobody waits forever."""

from __future__ import annotations

import asyncio
import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ragcache import AsyncRagCache, RagCache, SourceDocument
from ragcache.errors import EngineClosed, EngineFailed
from ragcache.models import LoadedModel, wrap_causal
from tests.ragcache.engine.channels import LONG
from tests.tiny_models import tiny_model

LEAVE = SourceDocument("leave.md", "There are 28 days of leave a year.")
TRAVEL = SourceDocument("travel.md", "Trips are booked by the office in Bern.")
QUESTION = "How many days of leave are there?"
CHAT = [{"role": "user", "content": QUESTION}]
OPTIONS: dict[str, Any] = {"collection": "handbook"}


def awaited(method: str, *arguments: Any, **options: Any) -> Callable[[RagCache], object]:
    """A call of a method of `AsyncRagCache`."""

    def call(rag: RagCache) -> object:
        return asyncio.run(getattr(AsyncRagCache(rag), method)(*arguments, **options))

    return call


async def iterate(rag: RagCache) -> list[str]:
    return [piece async for piece in await AsyncRagCache(rag).stream(QUESTION, **OPTIONS)]


ENTRIES: dict[str, Callable[[RagCache], object]] = {
    "ask": lambda rag: rag.ask(QUESTION, **OPTIONS),
    "ask_batch": lambda rag: rag.ask_batch([QUESTION] * 2, **OPTIONS),
    "stream": lambda rag: list(rag.stream(QUESTION, **OPTIONS)),
    "chat": lambda rag: rag.chat(CHAT),
    "chat_batch": lambda rag: rag.chat_batch([CHAT] * 2),
    "stream_chat": lambda rag: list(rag.stream_chat(CHAT)),
    "ingest": lambda rag: rag.ingest("handbook", [TRAVEL]),
    "sync": lambda rag: rag.sync("handbook", [TRAVEL]),
    "async ask": awaited("ask", QUESTION, **OPTIONS),
    "async chat": awaited("chat", CHAT),
    "async ingest": awaited("ingest", "handbook", [TRAVEL]),
    "async stream": lambda rag: asyncio.run(iterate(rag)),
}


@pytest.fixture
def rag(tmp_path: Path, quick_reader: LoadedModel) -> Iterator[RagCache]:
    size = {"vocab_size": quick_reader.causal.vocabulary}
    own = replace(quick_reader, causal=wrap_causal(tiny_model("llama", **size)))
    with RagCache.open(tmp_path / "state", own, max_tokens=8) as opened:
        opened.ingest("handbook", [LEAVE])
        yield opened


class Panic(BaseException):
    """An error like the panics of Rust's extensions, which are no `Exception`."""


QUICK = ("ask", "stream", "ingest", "async ask")


@pytest.mark.parametrize(
    "entry",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ENTRIES],
)
def test_an_ended_engine_fails_every_call(
    rag: RagCache, entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panics(*_: object) -> NoReturn:
        raise Panic("index out of bounds")

    monkeypatch.setattr(rag.internals.shared.model.causal, "forward", panics)
    with ThreadPoolExecutor(1) as threads:
        for _ in range(2):  # while the thread ends, and after
            with pytest.raises(EngineFailed, match=r"Panic.*open it again"):
                threads.submit(ENTRIES[entry], rag).result(LONG)
    assert not rag.internals.shared.engine.is_open


def ask_in_child(rag: RagCache) -> None:
    """Exits with 0 if every entry says what to do, and closing changes nothing."""
    for entry in ENTRIES.values():
        with pytest.raises(EngineClosed, match="open the folder or the engine in the child"):
            entry(rag)
    rag.close()


def test_a_forked_process_is_told_to_open_after_forking(rag: RagCache) -> None:
    engine = rag.internals.shared.engine
    child = multiprocessing.get_context("fork").Process(target=ask_in_child, args=(rag,))
    child.start()
    child.join(LONG)
    code = child.exitcode
    child.kill()
    assert code == 0
    assert engine.is_open
    assert rag.ask(QUESTION, **OPTIONS).sources


PROGRAM = """
import sys
from pathlib import Path

from ragcache import GenerationParams, RagCache, SourceDocument

params = GenerationParams(max_tokens=500, ignore_eos=True, extractive=False, min_confidence=0)
opened = []
for name in ("one", "two"):
    rag = RagCache.open(Path(sys.argv[1]) / name, force_modes=True)
    rag.ingest("handbook", [SourceDocument("leave.md", "There are 28 days of leave a year.")])
    question = "How many days of leave are there?"
    stream = rag.stream(question, collection="handbook", generation=params)
    print(stream._pending.handle.wait_launched(60), flush=True)
    opened.append((rag, stream))  # the engine goes on
if sys.argv[2] == "error":
    raise ValueError("the program fails")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "code"), [("end", 0), ("error", 1)])
def test_a_program_may_end_without_close(tmp_path: Path, ending: str, code: int) -> None:
    """Two folders are open, and their engines compute."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), ending]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done.stderr
    assert done.stdout.split() == ["True", "True"]
    assert "terminate" not in done.stderr
