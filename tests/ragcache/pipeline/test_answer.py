"""Answers as they come, in threads and in asyncio, and what giving one up leaves behind."""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ragcache import AsyncRagCache, GenerationParams, RagCache
from ragcache.errors import EngineClosed, InvalidRequest, RequestCancelled, UnknownCollection
from ragcache.models import LoadedModel
from ragcache.params import REFUSAL
from tests.ragcache.pipeline.test_ask import DOCUMENTS, QUESTION

LONG = GenerationParams(max_tokens=300, ignore_eos=True)


@pytest.fixture
def rag(tmp_path: Path, model: LoadedModel) -> Iterator[RagCache]:
    with RagCache.open(tmp_path / "state", model, max_tokens=8, private_bytes="8MiB") as opened:
        opened.ingest("notes", DOCUMENTS)
        yield opened


def leased_now(rag: RagCache) -> int:
    """How many states are in use."""
    return len(rag.internals.shared.store.memory.leases)


def leased(rag: RagCache) -> int:
    """How many states the next call would find in use."""
    rag.stats()
    return leased_now(rag)


def test_the_pieces_are_the_text_and_the_sources_come_first(rag: RagCache) -> None:
    expected = rag.ask(QUESTION, collection="notes")
    stream = rag.stream(QUESTION, collection="notes")
    assert stream.sources == expected.sources
    assert (stream.question, stream.mode) == (QUESTION, "rooted")
    pieces = list(stream)
    assert all(pieces)
    assert "".join(pieces) == stream.answer.choices[0].text
    assert "".join(pieces).strip() == stream.answer.text == expected.text
    assert list(stream) == pieces, "what was said can be read again"
    assert leased(rag) == 0


def test_an_answer_under_way_has_no_end(rag: RagCache) -> None:
    stream = rag.stream(QUESTION, collection="notes", generation=LONG)
    with pytest.raises(InvalidRequest, match="still under way"):
        _ = stream.answer
    assert leased(rag) > 0
    stream.close()
    with pytest.raises(RequestCancelled):
        _ = stream.answer
    assert leased(rag) == 0


def test_leaving_early_gives_the_request_up(rag: RagCache) -> None:
    stream = rag.stream(QUESTION, collection="notes", generation=LONG)
    for _ in stream:
        break
    with pytest.raises(RequestCancelled):
        stream.result()
    with rag.stream(QUESTION, collection="notes", generation=LONG) as left:
        next(iter(left.pieces()))
    assert leased(rag) == 0
    assert rag.ask(QUESTION, collection="notes").choices[0].token_ids


def test_a_stream_that_nobody_holds_is_given_up(rag: RagCache) -> None:
    stream = rag.stream(QUESTION, collection="notes", generation=LONG)
    channel = stream._pending.handle.channel
    assert not channel.cancelled
    del stream
    gc.collect()
    assert channel.cancelled
    assert leased(rag) == 0


def test_an_iteration_ended_by_garbage_collection_takes_no_lock(rag: RagCache) -> None:
    """It may collect inside of the store, under a lock that the release of a lease needs."""
    stream = rag.stream(QUESTION, collection="notes", generation=LONG)
    pieces = iter(stream.pieces())
    next(pieces)
    cycle: list[object] = [pieces]
    cycle.append(cycle)
    del pieces, cycle
    gc.collect()
    assert stream._pending.handle.channel.cancelled
    assert leased_now(rag) > 0, "the next call ends the lease"
    assert leased(rag) == 0
    with pytest.raises(RequestCancelled):
        stream.result()


def test_a_stream_where_nothing_was_found_is_a_refusal(rag: RagCache) -> None:
    stream = rag.stream("Zyxwv?", collection="notes")
    assert list(stream) == [REFUSAL]
    assert (stream.answer.finish_reason, stream.answer.text) == ("no_documents", REFUSAL)
    own = GenerationParams(refusal="Ask Tom.")
    assert rag.ask("Zyxwv?", collection="notes", generation=own).text == "Ask Tom."
    formed = GenerationParams(json_object=True)
    assert rag.ask("Zyxwv?", collection="notes", generation=formed).text == ""


def test_several_choices_come_with_their_tokens(rag: RagCache) -> None:
    generation = GenerationParams(temperature=2.0, seed=3, n=3, logprobs=2, max_tokens=5)
    stream = rag.stream(QUESTION, collection="notes", generation=generation)
    pieces = list(stream.pieces())
    answer = stream.answer
    assert {piece.choice for piece in pieces} == {0, 1, 2}
    for number, choice in enumerate(answer.choices):
        mine = [piece for piece in pieces if piece.choice == number]
        assert "".join(piece.text for piece in mine) == choice.text
        assert len(choice.chosen) == len(choice.token_ids)
        assert all(len(chosen.alternatives) == 2 for chosen in choice.chosen)
    assert rag.ask(QUESTION, collection="notes", generation=generation).choices == answer.choices


def test_asyncio_gives_the_same_answers(rag: RagCache) -> None:
    questions = [QUESTION, "Who keeps the figures?", "Zyxwv?"]
    expected = [answer.text for answer in rag.ask_batch(questions, collection="notes")]

    calls = AsyncRagCache(rag)

    async def main() -> None:
        alone = await asyncio.gather(*(calls.ask(q, collection="notes") for q in questions))
        together = await calls.ask_batch(questions, collection="notes")
        assert [a.text for a in alone] == [a.text for a in together] == expected
        stream = await calls.stream(QUESTION, collection="notes")
        assert stream.sources
        pieces = [piece async for piece in stream]
        assert "".join(pieces).strip() == stream.answer.text == expected[0]
        assert (await stream).text == expected[0]
        with pytest.raises(UnknownCollection):
            await calls.ask(QUESTION, collection="absent")

    asyncio.run(main())
    assert leased(rag) == 0


def test_folders_and_answers_have_a_short_repr(rag: RagCache) -> None:
    answer = rag.ask(QUESTION, collection="notes")
    assert repr(answer).startswith(f"Answer({answer.text!r}, finish_reason='length', mode='rooted'")
    assert answer.sources[0].document in repr(answer)
    long = replace(answer, text="<b>" * 1000, question="<i>?")
    assert len(repr(long)) < 400
    page = long._repr_html_()
    assert "&lt;i&gt;?" in page
    assert "<b><b>" not in page
    assert page.endswith(f"{answer.reuse._repr_svg_()}")
    assert re.fullmatch(r"RagCache\('.*', model='.*', namespace='default'\)", repr(rag))
    rag.ingest("<u>", DOCUMENTS[:1])
    assert "<td>&lt;u&gt;</td><td>1</td><td>1</td>" in rag._repr_html_()
    rag.close()
    assert repr(rag).endswith(", closed)")
    assert "<table>" not in rag._repr_html_()


def test_canceling_a_task_cancels_its_request(rag: RagCache) -> None:
    calls = AsyncRagCache(rag)

    async def main() -> None:
        task = asyncio.create_task(calls.ask(QUESTION, collection="notes", generation=LONG))
        while rag.internals.shared.engine.core.running == 0:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with calls.stream(QUESTION, collection="notes", generation=LONG) as stream:
            async for _ in stream:
                break
        with pytest.raises(RequestCancelled):
            await stream
        batch = asyncio.create_task(
            calls.ask_batch([QUESTION] * 3, collection="notes", generation=LONG)
        )
        await asyncio.sleep(0)  # its documents are leased in a thread meanwhile
        batch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await batch

    asyncio.run(main())
    gc.collect()
    rag.ask(QUESTION, collection="notes")
    assert leased(rag) == 0


def test_closing_fails_what_runs_and_draining_waits_for_it(
    tmp_path: Path, model: LoadedModel
) -> None:
    for drain, limit in ((False, 300), (True, 60)):
        rag = RagCache.open(tmp_path / str(drain), model, private_bytes="8MiB")
        rag.ingest("notes", DOCUMENTS)
        generation = LONG.replace(max_tokens=limit)
        stream = rag.stream(QUESTION, collection="notes", generation=generation)
        rag.close(drain=drain)
        if drain:
            assert stream.answer.finish_reason == "length"
        else:
            with pytest.raises(EngineClosed):
                stream.result()
        with pytest.raises(EngineClosed):
            rag.ask(QUESTION, collection="notes")


def test_answers_that_repeat_themselves_are_drafted(tmp_path: Path, model: LoadedModel) -> None:
    answers = []
    for name, options in (("drafted", {}), ("plain", {"draft_tokens": 0})):
        options |= {"private_bytes": "8MiB"}
        with RagCache.open(tmp_path / name, model, **options) as rag:
            rag.ingest("notes", DOCUMENTS)
            answers.append(rag.ask(QUESTION, collection="notes", generation=LONG).text)
            assert (rag.internals.shared.engine.stats.drafted_tokens > 0) == (name == "drafted")
    assert answers[0] == answers[1]


def test_a_prompt_streams_too(rag: RagCache) -> None:
    rag.schemas.add('<schema name="trip"><module name="oslo">Oslo has a fjord.</module></schema>')
    text = '<prompt schema="trip"><oslo/>What is there?</prompt>'
    expected = rag.prompt(text)
    stream = rag.stream_prompt(text)
    assert "".join(stream).strip() == stream.answer.text == expected.text

    async def main() -> None:
        calls = AsyncRagCache(rag)
        assert (await calls.prompt(text)).text == expected.text
        pieces = [piece async for piece in await calls.stream_prompt(text)]
        assert "".join(pieces).strip() == expected.text

    asyncio.run(main())
    assert leased(rag) == 0
