"""Many threads on one state folder: nothing waits for ever, and nothing stays in use."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ragcache import Answer, Generation, RagCache, SourceDocument
from ragcache.errors import QueueFull
from ragcache.models import LoadedModel, wrap_causal
from tests.conftest import tiny_model

PATIENCE = 60.0  # seconds that nobody waits unless something is stuck
QUESTION = "Which bell rings at number 3?"


@pytest.fixture
def rag(tmp_path: Path, reader: LoadedModel) -> Iterator[RagCache]:
    causal = wrap_causal(tiny_model("llama", vocab_size=len(reader.tokenizer)))
    model = LoadedModel("tiny", causal, reader.tokenizer)
    with RagCache.open(
        tmp_path / "state", model, max_new_tokens=6, private_bytes="8MiB", queue=20
    ) as opened:
        opened.ingest("bells", bells(6))
        yield opened


def bells(count: int, tone: str = "loud") -> list[SourceDocument]:
    return [SourceDocument(f"d{i}", f"Bell number {i} rings {tone} at dawn.") for i in range(count)]


def nothing_stays_leased(rag: RagCache) -> None:
    """The store's own upkeep may hold states for a moment."""
    until = time.monotonic() + PATIENCE
    while any(entry.leased for entry in rag.internals.shared.store.memory.indexes[0].entries):
        assert time.monotonic() < until, "a lease was never released"
        time.sleep(0.01)


def test_threads_ask_in_every_mode_while_others_ingest_and_delete(rag: RagCache) -> None:
    expected = {m: rag.ask(QUESTION, collection="bells", mode=m).text for m in ("rooted", "exact")}

    def ask(number: int) -> Answer:
        mode = ("rooted", "isolated", "exact")[number % 3]
        return rag.ask(QUESTION, collection="bells", mode=mode)

    def change(number: int) -> int:
        rag.ingest(f"other{number}", bells(9, f"{number} times"))
        return rag.delete(f"other{number}", ["d0", "d1"])

    with ThreadPoolExecutor(12) as threads:
        changes = [threads.submit(change, number) for number in range(3)]
        answers = [threads.submit(ask, number) for number in range(24)]
        assert [each.result(PATIENCE) for each in changes] == [2, 2, 2]
        for each in answers:
            answer = each.result(PATIENCE)
            assert answer.text == expected.get(answer.mode, answer.text)
            reuse = answer.reuse
            parts = reuse.cached_tokens + reuse.shared_tokens + reuse.computed_tokens
            assert parts == reuse.prompt_tokens
    nothing_stays_leased(rag)
    assert rag.stats().collections == {"bells": 6, "other0": 7, "other1": 7, "other2": 7}


def test_a_full_queue_refuses_and_keeps_no_lease(rag: RagCache) -> None:
    long = Generation(max_new_tokens=200, ignore_eos=True)
    with pytest.raises(QueueFull):
        rag.ask_batch([QUESTION] * 200, collection="bells", generation=long)
    rag.stats()
    nothing_stays_leased(rag)
    assert rag.ask(QUESTION, collection="bells").sources


def test_what_one_question_computed_serves_the_next_over_the_same_documents(
    rag: RagCache,
) -> None:
    question = QUESTION + " Tell me all of it." * 20
    first = rag.ask(question, collection="bells", k=2)
    again = rag.ask(question, collection="bells", k=2)
    assert first.reuse.shared_tokens == 0
    assert again.reuse.shared_tokens >= 64
    assert again.text == first.text
    alone = rag.ask(question, collection="bells", k=2, generation=Generation(share=False))
    exact = rag.ask(question, collection="bells", k=2, mode="exact")
    rag.ask(question, collection="bells", k=2, mode="exact")
    assert alone.reuse.shared_tokens == exact.reuse.shared_tokens == 0
