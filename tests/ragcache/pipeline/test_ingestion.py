"""Documents in: what is stored, what is kept, what an interrupted ingestion leaves."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document

import ragcache.store.tiers.files
from ragcache import RagCache, SourceDocument
from ragcache.errors import ConfigurationError, DocumentError, StoreBudgetExceeded, StoreFull
from ragcache.models import LoadedModel
from ragcache.store import Database, Ledger

TIDES = "The tide turns twice a day and nobody has to wind it. "


@pytest.fixture
def rag(tmp_path: Path, model: LoadedModel) -> Iterator[RagCache]:
    with RagCache.open(tmp_path / "state", model, max_new_tokens=4, module_tokens=64) as opened:
        yield opened


def stored(tmp_path: Path) -> int:
    return len(list((tmp_path / "state" / "states").glob("??/*.safetensors")))


def test_a_long_document_becomes_numbered_modules_of_the_wanted_size(rag: RagCache) -> None:
    done = rag.ingest("c", [SourceDocument("tides", TIDES * 20), SourceDocument("short", "Ebb.")])
    listing = rag.list_modules("c")
    names = [row.name for row in listing]
    assert names == [*(f"tides#{n}" for n in range(1, len(names))), "short#1"]
    assert len(names) == done.modules > 4
    assert all(row.tokens <= 64 for row in listing)
    assert sum(row.tokens for row in listing) == done.tokens


def test_progress_counts_modules_up_to_all_of_them(rag: RagCache) -> None:
    seen: list[tuple[int, int]] = []
    done = rag.ingest("c", [SourceDocument("t", TIDES * 60)], progress=lambda *at: seen.append(at))
    assert [total for _, total in seen] == [done.modules] * len(seen)
    counts = [count for count, _ in seen]
    assert counts == sorted(set(counts))
    assert (len(counts) > 1, counts[-1]) == (True, done.modules)


def test_another_module_size_splits_unchanged_documents_again(
    rag: RagCache, tmp_path: Path, model: LoadedModel
) -> None:
    before = rag.ingest("c", [SourceDocument("tides", TIDES * 10)])
    rag.close()
    with RagCache.open(tmp_path / "state", model, max_new_tokens=4, module_tokens=200) as other:
        after = other.ingest("c", [SourceDocument("tides", TIDES * 10)])
    assert (after.added, after.updated, after.unchanged) == (0, 1, 0)
    assert after.modules < before.modules
    assert stored(tmp_path) == after.modules + 1, "the states of the smaller modules are gone"


def test_states_that_two_documents_share_stay_until_the_last_is_gone(
    rag: RagCache, tmp_path: Path
) -> None:
    twins = [SourceDocument("a", "The tide is out."), SourceDocument("b", "The tide is out.")]
    assert rag.ingest("c", twins).encoded == 2, "one module and the preamble"
    assert rag.ingest("d", twins[:1]).encoded == 0
    assert rag.delete("c", ["a", "b"]) == 2
    assert stored(tmp_path) == 2
    assert rag.ask("Is the tide out?", collection="d").reuse.cached_tokens > 0
    assert rag.delete("d", ["a", "a"]) == 1
    assert stored(tmp_path) == 1, "the preamble belongs to no document"


def test_metadata_that_json_does_not_know_is_kept_as_text(rag: RagCache) -> None:
    page = Document("The tide is out.", metadata={"source": Path("a.txt"), "on": date(2026, 3, 1)})
    assert rag.ingest("c", [page]).added == 1
    [source] = rag.ask("Is the tide out?", collection="c").sources
    assert (source.document, source.uri) == ("a.txt", "a.txt")


def test_documents_of_one_name_are_refused_together(rag: RagCache, tmp_path: Path) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tide.md").write_text("The tide is out.")
    with pytest.raises(DocumentError, match=r"both called 'tide\.md'; ingest the folder above"):
        rag.ingest("c", [tmp_path / "x", tmp_path / "y"])
    assert rag.stats().collections == {}
    assert rag.ingest("c", [tmp_path]).added == 2


def test_a_module_longer_than_the_window_is_refused_before_it_is_encoded(
    tmp_path: Path, model: LoadedModel
) -> None:
    with RagCache.open(tmp_path / "state", model, module_tokens=600) as rag:
        with pytest.raises(ConfigurationError, match=r"window of 512 .*; give a smaller"):
            rag.ingest("c", [SourceDocument("tides", TIDES * 60)])
        assert rag.stats().encoded == 0


def test_a_host_tier_too_small_for_a_batch_says_so_and_keeps_what_was_stored(
    tmp_path: Path, model: LoadedModel
) -> None:
    with RagCache.open(
        tmp_path / "state", model, module_tokens=64, host_bytes="64KiB", max_new_tokens=4
    ) as rag:
        rag.ingest("c", [SourceDocument("ebb", "The ebb is slow.")])
        with pytest.raises(StoreBudgetExceeded, match="Raise host_bytes"):
            rag.ingest("c", [SourceDocument("tides", " ".join(f"Tide {n}." for n in range(99)))])
        assert rag.stats().collections == {"c": 1}
        assert rag.ask("Is the ebb slow?", collection="c").sources[0].document == "ebb"


def test_a_full_disk_stops_an_ingestion_and_nothing_else(
    rag: RagCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rag.ingest("c", [SourceDocument("ebb", "The ebb is slow.")])
    expected = rag.ask("Is the ebb slow?", collection="c")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def full_ledger(*_: Any) -> None:
        raise StoreFull("no space left for the ledger")

    with monkeypatch.context() as patched:
        patched.setattr(ragcache.store.tiers.files, "write_through", full)
        patched.setattr(Ledger, "record", full_ledger)
        with pytest.raises(StoreFull, match=r"no space left for states under .*; free some space"):
            rag.ingest("c", [SourceDocument("ebb", "New."), SourceDocument("flow", "Flood.")])
        answer = rag.ask("Is the ebb slow?", collection="c")
        assert (answer.text, answer.reuse) == (expected.text, expected.reuse)
    assert rag.stats().collections == {"c": 1}
    assert rag.ingest("c", [SourceDocument("flow", "Flood.")]).added == 1


def test_an_interrupted_ingestion_stores_no_row_and_its_states_are_found_again(
    rag: RagCache, tmp_path: Path
) -> None:
    documents = [SourceDocument(f"d{n}", f"{TIDES} Number {n}.") for n in range(6)]

    def stop(done: int, _: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rag.ingest("c", documents, progress=stop)
    assert rag.stats().collections == {}
    done = rag.ingest("c", documents)
    assert (done.added, done.encoded) == (6, 3)


def test_what_one_process_stores_another_that_is_open_already_finds(
    rag: RagCache, tmp_path: Path, model: LoadedModel
) -> None:
    rag.ingest("c", [SourceDocument("ebb", "The ebb is slow.")])
    rag.ask("Is the ebb slow?", collection="c")
    with RagCache.open(tmp_path / "state", model, max_new_tokens=4, module_tokens=64) as other:
        other.ingest("c", [SourceDocument("flood", "The flood is quick.")])
        other.delete("c", ["ebb"])
    answer = rag.ask("Is the ebb slow, or the flood quick?", collection="c")
    assert [source.document for source in answer.sources] == ["flood"]
    assert {source.tier for source in answer.sources} == {"disk"}


def test_the_ledger_of_another_kind_of_file_is_refused(tmp_path: Path, model: LoadedModel) -> None:
    from ragcache.errors import NoState

    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "ledger.sqlite").write_bytes(b"something else entirely" * 100)
    with pytest.raises(NoState, match="is not a ragcache ledger"):
        RagCache.open(tmp_path / "state", model)
    with pytest.raises(NoState, match="is not a ragcache ledger"):
        Database.open_existing(tmp_path / "state" / "ledger.sqlite")
