"""The facade's ways to chat give one answer, however they are called."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ragcache import Generation, RagCache, SourceDocument
from ragcache.models import LoadedModel
from tests.ragcache.pipeline.conftest import model  # noqa: F401

KEYS = "The spare key of the boathouse hangs in the red cupboard. Ask Tom Hartley."
BOATS = "The survey boat Pipit is moored at the north quay, beside the crane."
LONG = Generation(max_new_tokens=200, ignore_eos=True)


def chat(question: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"{KEYS}\n\n{BOATS}\n\n{question}"}]


CHATS = [chat("Where is the key?"), "The key", chat("Who serviced the boat?"), chat("<|end|>?")]


@pytest.fixture
def rag(tmp_path: Path, model: LoadedModel) -> Iterator[RagCache]:  # noqa: F811
    with RagCache.open(tmp_path / "state", model, max_new_tokens=8) as opened:
        opened.ingest("notes", [SourceDocument("k", KEYS), SourceDocument("b", BOATS)])
        yield opened


def test_every_twin_gives_the_same_answer(rag: RagCache) -> None:
    expected = [rag.chat(each) for each in CHATS]
    texts = [answer.text for answer in expected]
    assert [answer.text for answer in rag.chat_batch(CHATS)] == texts

    async def twins() -> tuple[list[str], list[str], str]:
        alone = [(await rag.achat(each)).text for each in CHATS]
        together = [answer.text for answer in await rag.achat_batch(CHATS)]
        pieces = [piece async for piece in await rag.astream_chat(CHATS[0])]
        return alone, together, "".join(pieces)

    alone, together, streamed = asyncio.run(twins())
    assert alone == together == texts
    assert streamed.strip() == texts[0]


def test_a_stream_tells_its_sources_first_and_then_its_pieces(rag: RagCache) -> None:
    expected = rag.chat(CHATS[0])
    stream = rag.stream_chat(CHATS[0])
    assert stream.sources == expected.sources
    assert [source.document for source in stream.sources] == ["k", "b"]
    assert stream.mode == "recognized:rooted"
    pieces = list(stream)
    assert len(pieces) > 1
    assert "".join(pieces) == stream.answer.choices[0].text


def test_streams_of_a_batch_are_all_queued_before_one_is_read(rag: RagCache) -> None:
    texts = [answer.text for answer in rag.chat_batch(CHATS)]
    streams = rag.stream_chat_batch(CHATS)
    assert [stream.result().text for stream in reversed(streams)] == texts[::-1]

    async def twin() -> list[str]:
        return [(await stream).text for stream in await rag.astream_chat_batch(CHATS)]

    assert asyncio.run(twin()) == texts


def test_a_stream_that_is_closed_holds_nothing(rag: RagCache) -> None:
    stream = rag.stream_chat(CHATS[0], generation=LONG)
    stream.close()
    rag.stats()
    assert not any(entry.leased for entry in rag.parts.store.memory.indexes[0].entries)


def test_threads_chat_while_documents_change(rag: RagCache) -> None:
    expected = [rag.chat(each, mode="exact").text for each in CHATS]

    def ask(number: int) -> bool:
        if number % 7 == 3:
            rag.ingest("more", [SourceDocument(f"d{number}", f"{BOATS} It is number {number}.")])
            return True
        place = number % len(CHATS)
        return rag.chat(CHATS[place], mode="linked:400").text == expected[place]

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(ask, range(36)))
    assert not any(entry.leased for entry in rag.parts.store.memory.indexes[0].entries)
