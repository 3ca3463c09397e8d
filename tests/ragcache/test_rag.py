"""`RagCache`: its methods and their variants, options, wrong input, many threads at once."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding

from ragcache import Answer, AsyncRagCache, GenerationParams, RagCache, SourceDocument
from ragcache.db import Catalog
from ragcache.errors import (
    ConfigurationError,
    InvalidRequest,
    QueueFull,
    StoreFull,
    StoreUnwritable,
    UnknownCollection,
    UnreadableDocument,
)
from ragcache.models import LoadedModel
from ragcache.params import SearchParams

QUESTION = "Where does the spare key of the boathouse hang?"
CHAT_KEYS = "The spare key of the boathouse hangs in the red cupboard. Ask Tom Hartley."
CHAT_BOATS = "The survey boat Pipit is moored at the north quay, beside the crane."
LONG = GenerationParams(max_tokens=200, ignore_eos=True)


def chat(question: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"{CHAT_KEYS}\n\n{CHAT_BOATS}\n\n{question}"}]


CHATS = [chat("Where is the key?"), "The key", chat("Who serviced the boat?"), chat("<|end|>?")]
KEYS = "The spare key of the boathouse hangs in the red cupboard."
LOCKS = "The lock of the boathouse takes the spare key. " * 40


@pytest.fixture
def rag(tmp_path: Path, quick_reader: LoadedModel, notes: Path) -> Iterator[RagCache]:
    with RagCache.open(tmp_path / "state", quick_reader, max_tokens=8) as opened:
        opened.ingest("notes", [notes])
        yield opened


def blobs(rag: RagCache, tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "state" / "states").glob("??/*.safetensors"))


def test_an_answer_accounts_for_every_token(rag: RagCache) -> None:
    answer = rag.ask(QUESTION, collection="notes", k=2)
    reuse = answer.reuse
    assert reuse.cached_tokens + reuse.computed_tokens == reuse.prompt_tokens
    assert 0 < reuse.computed_tokens < 40
    assert answer.sources[0].document == "keys.md"
    assert {source.tier for source in answer.sources} == {"host"}
    timings = answer.timings
    assert 0 < timings.retrieve < timings.first_token <= timings.total
    assert answer.mode == "rooted"
    json.dumps(answer.to_dict())


def test_a_corrupted_blob_is_encoded_again_and_never_served(
    rag: RagCache, tmp_path: Path, quick_reader: LoadedModel
) -> None:
    expected = rag.ask(QUESTION, collection="notes")
    rag.close()
    for path in blobs(rag, tmp_path):
        content = bytearray(path.read_bytes())
        content[-7] ^= 1
        path.write_bytes(content)
    with RagCache.open(tmp_path / "state", quick_reader, max_tokens=8) as reopened:
        answer = reopened.ask(QUESTION, collection="notes")
        assert answer.text == expected.text
        assert {source.tier for source in answer.sources} == {"encoded"}
        assert reopened.stats().corrupt == len(answer.sources) + 1


def test_langchain_and_source_documents_are_taken(
    tmp_path: Path, quick_reader: LoadedModel
) -> None:
    documents = [
        SourceDocument("a", "The kettle is green."),
        Document("The kiln is in the yard.", id="b", metadata={"source": "kiln.txt", "page": 3}),
    ]
    with RagCache.open(tmp_path / "state", quick_reader, max_tokens=4) as rag:
        assert rag.ingest("mixed", documents).added == 2
        answer = rag.ask("Where is the kiln?", collection="mixed", k=1)
        assert (answer.sources[0].document, answer.sources[0].uri) == ("b", "kiln.txt")
        assert rag.ingest("mixed", SourceDocument("c", "The lamp is lit.")).added == 1
        tagged = SourceDocument("c", "The lamp is lit.", metadata={"page": 2})
        again = rag.ingest("mixed", tagged)
        assert (again.updated, again.encoded) == (1, 0), "new metadata encodes nothing"


def test_a_host_tier_beyond_the_memory_is_told(
    tmp_path: Path, tiny_reader: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    for size, count in (("1MiB", 0), ("1000TiB", 1)):
        with RagCache.open(tmp_path / size, tiny_reader, embedding="none", host_bytes=size):
            told = [each for each in caplog.messages if "host_bytes" in each]
        assert len(told) == count
    assert f"{1000 * 2**40:,} bytes of states" in told[0]


def test_folders_of_tests_share_one_reader(tmp_path: Path) -> None:
    """Opening it for each would be half the time of most tests."""
    with RagCache.open(tmp_path / "one") as one, RagCache.open(tmp_path / "other") as other:
        assert one.internals.shared.model is other.internals.shared.model


def test_module_listing_and_stats_tell_what_is_kept(rag: RagCache) -> None:
    rag.ask(QUESTION, collection="notes", k=1)
    listing = {row.document: row for row in rag.modules.all("notes")}
    assert set(listing) == {"boats.md", "keys.md", "leave.md"}
    assert listing["keys.md"].hits > listing["boats.md"].hits
    assert set(listing["keys.md"].tiers) == {"disk", "host"}
    stats = rag.stats()
    assert stats.collections == {"notes": 3}
    assert stats.tiers["disk"]["states"] == stats.encoded == 4


def test_the_generated_schema_has_k_slots_and_expands(rag: RagCache) -> None:
    from ragcache_schemas import write_schema

    short = write_schema(rag.schemas.generate("notes", k=3))
    assert short.count("<union slot=") == 3
    assert "boathouse" not in short
    expanded = write_schema(rag.schemas.generate("notes", k=2, expanded=True))
    assert expanded.count("red cupboard") == 2


@pytest.fixture
def chats(tmp_path: Path, tiny_reader: LoadedModel) -> Iterator[RagCache]:
    with RagCache.open(tmp_path / "state", tiny_reader, max_tokens=8) as opened:
        opened.ingest("notes", [SourceDocument("k", CHAT_KEYS), SourceDocument("b", CHAT_BOATS)])
        yield opened


@pytest.mark.slow
def test_every_twin_gives_the_same_answer(chats: RagCache) -> None:
    texts = [chats.chat(each).text for each in CHATS]
    assert [answer.text for answer in chats.chat_batch(CHATS)] == texts
    streams = chats.stream_chat_batch(CHATS)
    assert [stream.result().text for stream in reversed(streams)] == texts[::-1], "all are queued"

    async def check_twins() -> None:
        calls = AsyncRagCache(chats)
        assert [(await calls.chat(each)).text for each in CHATS] == texts
        assert [answer.text for answer in await calls.chat_batch(CHATS)] == texts
        assert [(await each).text for each in await calls.stream_chat_batch(CHATS)] == texts
        pieces = [piece async for piece in await calls.stream_chat(CHATS[0])]
        assert "".join(pieces).strip() == texts[0]

    asyncio.run(check_twins())


def test_a_stream_tells_its_sources_first_and_then_its_pieces(chats: RagCache) -> None:
    expected = chats.chat(CHATS[0])
    stream = chats.stream_chat(CHATS[0])
    assert stream.sources == expected.sources
    assert [source.document for source in stream.sources] == ["k", "b"]
    assert stream.mode == "recognized:rooted"
    pieces = list(stream)
    assert len(pieces) > 1
    assert "".join(pieces) == stream.answer.choices[0].text


@pytest.mark.slow
def test_threads_chat_while_documents_change(chats: RagCache) -> None:
    expected = [chats.chat(each, mode="exact").text for each in CHATS]

    def ask(number: int) -> bool:
        if number % 7 == 3:
            chats.ingest(
                "more", [SourceDocument(f"d{number}", f"{CHAT_BOATS} It is number {number}.")]
            )
            return True
        place = number % len(CHATS)
        return chats.chat(CHATS[place], mode="primed:400").text == expected[place]

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(ask, range(36)))
    assert not chats.internals.shared.store.memory.leases


@pytest.fixture(scope="module")
def library(
    quick_reader: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RagCache]:
    """Tests only read what is ingested."""
    folder = tmp_path_factory.mktemp("library")
    with RagCache.open(folder, quick_reader, max_tokens=2, module_tokens=96) as opened:
        opened.ingest(
            "notes",
            [
                SourceDocument("keys", KEYS, "file:///keys", {"year": 2020, "team": "quay"}),
                SourceDocument("locks", LOCKS, metadata={"year": 2024}),
            ],
        )
        yield opened


def documents(answer: Answer) -> set[str]:
    return {source.document for source in answer.sources}


def test_an_answer_from_a_selection_searches_no_more(library: RagCache) -> None:
    """The question reads the modules that were retrieved for another one, in another order."""
    found = library.retrieve("spare key", collection="notes", k=2, relative_threshold=0.0)
    turned = replace(found, hits=found.hits[::-1])
    answer = library.ask("What is there?", collection="notes", selection=turned, k=1)
    assert [source.module for source in answer.sources] == [hit.module.name for hit in turned.hits]
    assert answer.question == "What is there?"
    with pytest.raises(InvalidRequest, match="one question, not for 2"):
        library.ask_batch(["a", "b"], collection="notes", selection=found)


@pytest.mark.slow
def test_every_way_to_ask_takes_filters_and_a_threshold(library: RagCache) -> None:
    asked: dict[str, Any] = {"collection": "notes", "filters": {"year": 2020}}

    async def twins() -> list[Answer]:
        calls = AsyncRagCache(library)
        together = await calls.ask_batch(["spare key?"], **asked)
        stream = await calls.stream("spare key?", **asked)
        return [*together, await stream, await calls.ask("spare key?", **asked)]

    answers = [
        library.ask("spare key?", **asked),
        *library.ask_batch(["spare key?"], **asked),
        library.stream("spare key?", **asked).result(),
        *asyncio.run(twins()),
    ]
    assert [documents(answer) for answer in answers] == [{"keys"}] * 6
    for share, ids in ((0.0, {"keys", "locks"}), (1.0, {"keys"})):
        near = library.ask(
            "spare key in the red cupboard?", collection="notes", relative_threshold=share
        )
        assert documents(near) == ids
    refused = library.ask("spare key?", collection="notes", threshold=0.03)
    assert (refused.finish_reason, refused.sources) == ("no_documents", ())
    with pytest.raises(InvalidRequest, match="unknown operator"):
        library.ask("spare key?", collection="notes", filters={"year": {"$near": 1}})


def test_modules_are_got_by_name_in_the_order_of_the_names(library: RagCache) -> None:
    rows = library.modules.named("notes", ["locks#2", "nowhere#1", "keys#1", "locks#2"])
    assert [row.name for row in rows] == ["locks#2", "keys#1", "locks#2"]
    assert rows[1].text.strip() == KEYS
    with pytest.raises(UnknownCollection):
        library.modules.named("recipes", ["keys#1"])


def test_documents_are_listed_with_metadata_and_modules(library: RagCache) -> None:
    keys, locks = library.documents.get("notes")
    assert (keys.source_id, keys.modules, keys.attributes["team"]) == ("keys", 1, "quay")
    assert (locks.source_id, locks.attributes) == ("locks", {"year": 2024})
    assert library.documents.get("notes", ["locks", "nowhere"]) == [locks]
    assert locks.modules == len(library.modules.all("notes")) - 1 > 1
    with pytest.raises(UnknownCollection):
        library.documents.get("recipes")


def test_another_embedder_has_vectors_of_its_own(library: RagCache) -> None:
    with pytest.raises(InvalidRequest, match="needs an embedder"):
        library.retrieve("key", collection="notes", search="dense")
    other = library.retriever(DeterministicFakeEmbedding(size=6))
    text = library.modules.named("notes", ["keys#1"])[0].text.strip()
    [hit] = other.retrieve(text, "notes", SearchParams(k=1, search="dense")).hits
    assert (hit.module.name, hit.score) == ("keys#1", pytest.approx(1.0))
    assert library.retriever() is library.retriever(library.retriever().embedder)


def test_retrieval_for_asyncio_finds_the_same(library: RagCache) -> None:
    calls = AsyncRagCache(library)
    found = asyncio.run(calls.retrieve("red cupboard", collection="notes", k=2))
    assert found == library.retrieve("red cupboard", collection="notes", k=2)
    with pytest.raises(UnknownCollection):
        asyncio.run(calls.retrieve("key", collection="recipes"))


class TestBadInput:
    def test_an_unknown_collection(self, rag: RagCache) -> None:
        with pytest.raises(UnknownCollection, match=r"'recipes'; known: 'notes'"):
            rag.ask(QUESTION, collection="recipes")

    def test_an_unknown_mode_or_k(self, rag: RagCache) -> None:
        with pytest.raises(ConfigurationError, match=r"modes: rooted\[:N\], primed"):
            rag.ask(QUESTION, collection="notes", mode="fast")
        with pytest.raises(InvalidRequest, match="k is 0"):
            rag.ask(QUESTION, collection="notes", k=0)

    def test_unreadable_files_store_nothing_where_they_are_errors(
        self, rag: RagCache, notes: Path
    ) -> None:
        (notes / "good.md").write_text("The gate is open.")
        (notes / "binary.md").write_bytes(b"\x00\x01\x02")
        (notes / "latin.md").write_bytes("Gr\xfc\xdfe".encode("latin-1"))
        with pytest.raises(UnreadableDocument) as caught:
            rag.ingest("notes", notes, strict=True)
        assert "binary.md: a binary" in str(caught.value)
        assert "latin.md" not in str(caught.value), "another encoding is no failure"
        with pytest.raises(UnreadableDocument, match=r"missing\.md: No such"):
            rag.ingest("notes", [notes, notes / "missing.md"])
        assert rag.stats().collections == {"notes": 3}
        assert rag.ask(QUESTION, collection="notes").sources

    def test_a_state_folder_that_cannot_be_made(
        self, tmp_path: Path, quick_reader: LoadedModel
    ) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(StoreUnwritable, match="cannot make the state folder"):
            RagCache.open(tmp_path / "file" / "state", quick_reader)

    def test_an_unknown_embedding(self, tmp_path: Path, quick_reader: LoadedModel) -> None:
        with pytest.raises(ConfigurationError, match="'minilm'"):
            RagCache.open(tmp_path / "state", quick_reader, embedding="word2vec")


class TestOptions:
    """Options are fields of option sets; a wrong name is an error that lists the right ones."""

    @pytest.fixture
    def rag(self, library: RagCache) -> RagCache:
        return library

    @pytest.mark.parametrize(("methods", "given", "message"), [
        ("ask ask_batch stream", {"colection": "notes"},
         "'colection', like 'collection'; options: k, search, filters, threshold, "
         "relative_threshold, rerank, mmr, candidates, collection, mode, generation, selection, "
         "chat_template_kwargs$"),
        ("chat chat_batch stream_chat stream_chat_batch", {"temperature": 1.0},
         "'temperature'; options: k, search, filters, threshold, relative_threshold, "
         "rerank, mmr, candidates, collection, selection, documents, keep, keeper, mode, "
         "recognize, recognize_recurring, tools, generation, chat_template_kwargs$"),
        ("prompt stream_prompt", {"k": 2},
         "'k'; options: mode, source, gener"),
        ("retrieve", {"collection": "notes", "mode": "exact"},
         "'mode'; options: k, search, filters, threshold, rel"),
        ("ask stream retrieve", {"k": 2},
         "'collection' is missing; options: k"),
    ])  # fmt: skip
    def test_options_that_are_unknown_or_missing(
        self, rag: RagCache, methods: str, given: dict[str, Any], message: str
    ) -> None:
        for method in methods.split():
            with pytest.raises(InvalidRequest, match=message):
                getattr(rag, method)(QUESTION, **given)
            with pytest.raises(InvalidRequest, match=message):
                asyncio.run(twin(AsyncRagCache(rag), method, given))

    def test_an_unknown_option_of_open(self, tmp_path: Path, quick_reader: LoadedModel) -> None:
        with pytest.raises(ConfigurationError, match=r"'gpu_bytes'; options: .*model, embedding"):
            RagCache.open(tmp_path / "state", quick_reader, gpu_bytes=1)  # type: ignore[call-arg]

    def test_the_defaults_are_those_that_are_documented(self, rag: RagCache) -> None:
        explicit = rag.ask(
            QUESTION, collection="notes", k=4, mode="rooted", generation=GenerationParams(),
            filters=None, threshold=None, relative_threshold=0.5,
        )  # fmt: skip
        assert rag.ask(QUESTION, collection="notes").text == explicit.text
        found = rag.retrieve(QUESTION, collection="notes")
        assert found == rag.retrieve(
            QUESTION, collection="notes", k=4, search="hybrid", filters=None, threshold=None,
            relative_threshold=0.5, mmr=None, candidates=50,
        )  # fmt: skip
        chat = rag.chat(QUESTION, mode="rooted", recognize=True, tools=None)
        assert rag.chat(QUESTION).text == chat.text


async def twin(rag: AsyncRagCache, method: str, options: dict[str, Any]) -> object:
    return await getattr(rag, method)(QUESTION, **options)


PATIENCE = 60.0  # seconds that nobody waits unless something is stuck
BELL_QUESTION = "Which bell rings at number 3?"


@pytest.fixture
def bells_rag(tmp_path: Path, tiny_reader: LoadedModel) -> Iterator[RagCache]:
    with RagCache.open(
        tmp_path / "state", tiny_reader, max_tokens=6, private_bytes="8MiB", queue=20
    ) as opened:
        opened.ingest("bells", bells(6))
        yield opened


def bells(count: int, tone: str = "loud") -> list[SourceDocument]:
    return [SourceDocument(f"d{i}", f"Bell number {i} rings {tone} at dawn.") for i in range(count)]


def nothing_stays_leased(bells_rag: RagCache) -> None:
    """The store's own upkeep may hold states for a moment."""
    until = time.monotonic() + PATIENCE
    while bells_rag.internals.shared.store.memory.leases:
        assert time.monotonic() < until, "a lease was never released"
        time.sleep(0.01)


@pytest.mark.slow
def test_threads_ask_in_all_modes_while_others_ingest_and_delete(bells_rag: RagCache) -> None:
    expected = {
        m: bells_rag.ask(BELL_QUESTION, collection="bells", mode=m).text
        for m in ("rooted", "exact")
    }

    def ask(number: int) -> Answer:
        mode = ("rooted", "isolated", "exact")[number % 3]
        return bells_rag.ask(BELL_QUESTION, collection="bells", mode=mode)

    def change(number: int) -> int:
        bells_rag.ingest(f"other{number}", bells(9, f"{number} times"))
        return bells_rag.delete(f"other{number}", ["d0", "d1"])

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
    nothing_stays_leased(bells_rag)
    assert bells_rag.stats().collections == {"bells": 6, "other0": 7, "other1": 7, "other2": 7}


def test_a_question_is_answered_where_the_ledger_takes_no_rows(
    bells_rag: RagCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk: the owners of what a question encodes cannot be recorded."""

    def refuse(*_: object) -> None:
        raise StoreFull("no space left for the ledger")

    monkeypatch.setattr(Catalog, "add_key", refuse)
    answer = bells_rag.ask(BELL_QUESTION, collection="bells", k=1, mode="isolated")
    assert {source.tier for source in answer.sources} == {"encoded"}
    nothing_stays_leased(bells_rag)


@pytest.mark.slow
def test_a_full_queue_refuses_and_keeps_no_lease(bells_rag: RagCache) -> None:
    long = GenerationParams(max_tokens=200, ignore_eos=True)
    with pytest.raises(QueueFull):
        bells_rag.ask_batch([BELL_QUESTION] * 200, collection="bells", generation=long)
    bells_rag.stats()
    nothing_stays_leased(bells_rag)
    assert bells_rag.ask(BELL_QUESTION, collection="bells").sources


def test_questions_over_the_same_documents_share_computed_states(bells_rag: RagCache) -> None:
    question = BELL_QUESTION + " Tell me all of it." * 20
    first = bells_rag.ask(question, collection="bells", k=2)
    again = bells_rag.ask(question, collection="bells", k=2)
    assert first.reuse.shared_tokens == 0
    assert again.reuse.shared_tokens >= 64
    assert again.text == first.text
    alone = bells_rag.ask(
        question, collection="bells", k=2, generation=GenerationParams(share=False)
    )
    exact = bells_rag.ask(question, collection="bells", k=2, mode="exact")
    bells_rag.ask(question, collection="bells", k=2, mode="exact")
    assert alone.reuse.shared_tokens == exact.reuse.shared_tokens == 0
