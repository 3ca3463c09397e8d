"""The facade: documents in, answers out, and what happens when something is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from langchain_core.documents import Document

from ragcache import RagCache, SourceDocument
from ragcache.errors import (
    ConfigurationError,
    EmptyQuestion,
    NoDocuments,
    PromptTooLong,
    StoreUnwritable,
    UnknownCollection,
    UnreadableDocument,
)
from ragcache.models import LoadedModel

QUESTION = "Where does the spare key of the boathouse hang?"


@pytest.fixture
def rag(tmp_path: Path, reader: LoadedModel, notes: Path) -> Iterator[RagCache]:
    with RagCache.open(tmp_path / "state", reader, max_new_tokens=8) as opened:
        opened.ingest("notes", [notes])
        yield opened


def blobs(rag: RagCache, tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "state" / "states").glob("??/*.safetensors"))


def test_ingestion_reports_what_it_did(tmp_path: Path, reader: LoadedModel, notes: Path) -> None:
    (notes / "plan.pdf").write_bytes(b"%PDF\0")
    with RagCache.open(tmp_path / "state", reader) as rag:
        seen: list[tuple[int, int]] = []
        done = rag.ingest("notes", notes, progress=lambda *at: seen.append(at))
        assert (done.added, done.updated, done.unchanged, done.modules) == (3, 0, 0, 3)
        assert done.encoded == 4, "three modules and the preamble"
        assert [Path(path).name for path in done.ignored] == ["plan.pdf"]
        assert seen[-1] == (3, 3)
        again = rag.ingest("notes", notes)
        assert (again.added, again.unchanged, again.encoded) == (0, 3, 0)


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


def test_every_mode_reads_the_same_prompt(rag: RagCache) -> None:
    answers = {m: rag.ask(QUESTION, collection="notes", mode=m) for m in ("rooted", "exact")}
    assert answers["exact"].reuse.prompt_tokens == answers["rooted"].reuse.prompt_tokens
    assert answers["exact"].reuse.cached_tokens == 0
    assert {source.tier for source in answers["exact"].sources} == {"computed"}


def test_isolated_states_are_encoded_at_first_use_and_kept(rag: RagCache) -> None:
    first = rag.ask(QUESTION, collection="notes", mode="isolated")
    second = rag.ask(QUESTION, collection="notes", mode="isolated")
    assert {source.tier for source in first.sources} == {"encoded"}
    assert {source.tier for source in second.sources} == {"host"}
    assert second.text == first.text
    assert second.reuse.cached_tokens > first.reuse.cached_tokens


def test_a_batch_answers_as_one_by_one(rag: RagCache) -> None:
    questions = [QUESTION, "How many days of leave are there?", "Who serviced the engine?"]
    together = rag.ask_batch(questions, collection="notes")
    alone = [rag.ask(question, collection="notes") for question in questions]
    assert [a.text for a in together] == [a.text for a in alone]
    assert [a.question for a in together] == questions


def test_a_second_process_encodes_nothing_and_answers_the_same(
    rag: RagCache, tmp_path: Path
) -> None:
    here = rag.ask(QUESTION, collection="notes")
    rag.close()
    program = (
        "import json, sys\n"
        "from ragcache import RagCache\n"
        "with RagCache.open(sys.argv[1], max_new_tokens=8) as rag:\n"
        "    answer = rag.ask(sys.argv[2], collection='notes')\n"
        "    print(json.dumps([answer.text, rag.stats().encoded, answer.reuse.cached_tokens]))\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "state"), QUESTION]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert json.loads(out) == [here.text, 0, here.reuse.cached_tokens]


def test_a_changed_document_replaces_the_old_one(
    rag: RagCache, tmp_path: Path, notes: Path
) -> None:
    before = blobs(rag, tmp_path)
    (notes / "keys.md").write_text("# Keys\n\nThe spare key hangs in the blue tin.")
    done = rag.ingest("notes", [notes])
    assert (done.added, done.updated, done.unchanged) == (0, 1, 2)
    texts = [m.text for m in rag.parts.catalogue.modules("notes")]
    assert any("blue tin" in text for text in texts)
    assert not any("red cupboard" in text for text in texts)
    after = blobs(rag, tmp_path)
    assert len(after) == len(before)
    assert len(set(after) - set(before)) == 1, "the old states left the disk"


def test_a_deleted_document_takes_its_states_with_it(rag: RagCache, tmp_path: Path) -> None:
    before = len(blobs(rag, tmp_path))
    assert rag.delete("notes", ["keys.md", "unknown.md"]) == 1
    assert len(blobs(rag, tmp_path)) == before - 1
    answer = rag.ask(QUESTION, collection="notes")
    assert "keys.md" not in {source.document for source in answer.sources}


def test_a_corrupted_blob_is_encoded_again_and_never_served(
    rag: RagCache, tmp_path: Path, reader: LoadedModel
) -> None:
    expected = rag.ask(QUESTION, collection="notes")
    rag.close()
    for path in blobs(rag, tmp_path):
        content = bytearray(path.read_bytes())
        content[-7] ^= 1
        path.write_bytes(content)
    with RagCache.open(tmp_path / "state", reader, max_new_tokens=8) as reopened:
        answer = reopened.ask(QUESTION, collection="notes")
        assert answer.text == expected.text
        assert {source.tier for source in answer.sources} == {"encoded"}
        assert reopened.stats().corrupt == len(answer.sources) + 1


def test_langchain_and_source_documents_are_taken(tmp_path: Path, reader: LoadedModel) -> None:
    documents = [
        SourceDocument("a", "The kettle is green."),
        Document("The kiln is in the yard.", id="b", metadata={"source": "kiln.txt", "page": 3}),
    ]
    with RagCache.open(tmp_path / "state", reader, max_new_tokens=4) as rag:
        assert rag.ingest("mixed", documents).added == 2
        answer = rag.ask("Where is the kiln?", collection="mixed", k=1)
        assert (answer.sources[0].document, answer.sources[0].uri) == ("b", "kiln.txt")
        assert rag.ingest("mixed", SourceDocument("c", "The lamp is lit.")).added == 1
        tagged = SourceDocument("c", "The lamp is lit.", metadata={"page": 2})
        again = rag.ingest("mixed", tagged)
        assert (again.updated, again.encoded) == (1, 0), "new metadata encodes nothing"


def test_nothing_is_made_up_where_nothing_is_found(rag: RagCache) -> None:
    answer = rag.ask("Zyxwv?", collection="notes")
    assert (answer.text, answer.sources, answer.finish_reason) == ("", (), "no_documents")


def test_module_listing_and_stats_tell_what_is_kept(rag: RagCache) -> None:
    rag.ask(QUESTION, collection="notes", k=1)
    listing = {row.document: row for row in rag.list_modules("notes")}
    assert set(listing) == {"boats.md", "keys.md", "leave.md"}
    assert listing["keys.md"].hits > listing["boats.md"].hits
    assert set(listing["keys.md"].tiers) == {"disk", "host"}
    stats = rag.stats()
    assert stats.collections == {"notes": 3}
    assert stats.tiers["disk"]["states"] == stats.encoded == 4


def test_the_generated_schema_has_k_slots_and_expands(rag: RagCache) -> None:
    from ragcache_schemas import write_schema

    short = write_schema(rag.schema("notes", k=3))
    assert short.count("<union slot=") == 3
    assert "boathouse" not in short
    assert write_schema(rag.schema("notes", k=2, expanded=True)).count("red cupboard") == 2


class TestBadInput:
    def test_an_empty_question(self, rag: RagCache) -> None:
        with pytest.raises(EmptyQuestion, match="empty"):
            rag.ask("  \n", collection="notes")

    def test_an_unknown_collection(self, rag: RagCache) -> None:
        with pytest.raises(UnknownCollection, match=r"'recipes'; known: 'notes'"):
            rag.ask(QUESTION, collection="recipes")

    def test_an_unknown_mode_or_k(self, rag: RagCache) -> None:
        with pytest.raises(ConfigurationError, match="modes: rooted, linked:N, isolated"):
            rag.ask(QUESTION, collection="notes", mode="fast")
        with pytest.raises(ConfigurationError, match="k is 0"):
            rag.ask(QUESTION, collection="notes", k=0)

    def test_an_empty_folder(self, rag: RagCache, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        with pytest.raises(NoDocuments, match="holds no text files"):
            rag.ingest("notes", [tmp_path / "empty"])

    def test_unreadable_files_store_nothing(self, rag: RagCache, notes: Path) -> None:
        (notes / "good.md").write_text("The gate is open.")
        (notes / "binary.md").write_bytes(b"\x00\x01\x02")
        (notes / "latin.md").write_bytes("Gr\xfc\xdfe".encode("latin-1"))
        with pytest.raises(UnreadableDocument) as caught:
            rag.ingest("notes", [notes, notes / "missing.md"])
        for fact in ("binary.md: a binary", "latin.md: not UTF-8 at byte 2", "missing.md: No such"):
            assert fact in str(caught.value)
        assert rag.stats().collections == {"notes": 3}
        assert rag.ask(QUESTION, collection="notes").sources

    def test_more_modules_than_the_window_holds(self, tmp_path: Path, reader: LoadedModel) -> None:
        long = [SourceDocument(f"d{i}", f"the bell number {i} rings " * 70) for i in range(16)]
        with RagCache.open(tmp_path / "state", reader) as rag:
            rag.ingest("bells", long)
            encoded = rag.stats().encoded
            for mode in ("rooted", "isolated", "exact"):
                with pytest.raises(PromptTooLong, match="window holds 4096; ask with a smaller k"):
                    rag.ask("Which bell rings?", collection="bells", k=16, mode=mode)
            assert rag.stats().encoded == encoded
            assert rag.ask("Which bell rings?", collection="bells", k=2).sources

    def test_a_state_folder_that_cannot_be_made(self, tmp_path: Path, reader: LoadedModel) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(StoreUnwritable, match="cannot make the state folder"):
            RagCache.open(tmp_path / "file" / "state", reader)

    def test_an_unknown_embedding(self, tmp_path: Path, reader: LoadedModel) -> None:
        with pytest.raises(ConfigurationError, match="'minilm'"):
            RagCache.open(tmp_path / "state", reader, embedding="word2vec")
