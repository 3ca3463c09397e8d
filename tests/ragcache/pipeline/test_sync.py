"""Folders that change: what vanished, moved and failed, and what becomes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_text_splitters import RecursiveCharacterTextSplitter

from ragcache import RagCache, SourceDocument
from ragcache.db import MovedDocument
from ragcache.documents import DocumentPart, LoadedSources, SkippedFile
from ragcache.errors import ConfigurationError, DocumentError, DocumentsChanged, UnreadableDocument
from ragcache.models import LoadedModel
from ragcache.retrieval import BM25Index
from ragcache.store.verify import verify


@pytest.fixture
def rag(tmp_path: Path, model: LoadedModel) -> Iterator[RagCache]:
    with RagCache.open(tmp_path / "state", model, max_tokens=4, module_tokens=64) as opened:
        yield opened


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "docs"
    (made / "deep").mkdir(parents=True)
    for name in ("a.md", "b.md", "deep/c.md"):
        (made / name).write_text(f"# {name}\n\nThe {name[-4]} is in the yard.")
    return made


def ids(rag: RagCache, collection: str = "c") -> list[str]:
    return sorted(row.source_id for row in rag.documents.get(collection))


def test_ingest_says_what_has_vanished_and_keeps_it(rag: RagCache, folder: Path) -> None:
    rag.ingest("c", [folder, SourceDocument("other", "From elsewhere.")])
    (folder / "b.md").unlink()
    done = rag.ingest("c", folder)
    assert (done.vanished, done.removed, done.unchanged) == (("b.md",), (), 2)
    assert ids(rag) == ["a.md", "b.md", "deep/c.md", "other"]


def test_sync_encodes_removes_and_renames(rag: RagCache, folder: Path) -> None:
    rag.ingest("c", [folder, SourceDocument("other", "From elsewhere.")])
    (folder / "b.md").unlink()
    (folder / "a.md").rename(folder / "deep" / "moved.md")
    (folder / "deep/c.md").write_text("# Other\n\nAnother text.")
    (folder / "new.md").write_text("A new text.")
    done = rag.sync("c", folder)
    assert (done.added, done.updated, done.unchanged, done.encoded) == (1, 1, 0, 2)
    assert (done.removed, done.renamed) == (("b.md",), {"a.md": "deep/moved.md"})
    assert ids(rag) == ["deep/c.md", "deep/moved.md", "new.md", "other"]
    [moved] = rag.documents.get("c", ["deep/moved.md"])
    assert moved.uri == (folder / "deep" / "moved.md").as_uri()
    assert rag.modules.named("c", ["deep/moved.md#1"])[0].text.startswith("# a.md")
    again = rag.sync("c", folder)
    assert (again.unchanged, again.removed, dict(again.renamed)) == (3, (), {})


def test_sources_are_compared_again_after_concurrent_deletions(
    rag: RagCache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rag.ingest("c", folder)
    (folder / "a.md").rename(folder / "z.md")
    catalog = rag._internals.catalog
    replace = catalog.replace_documents

    def late(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(catalog, "replace_documents", replace)
        rag.delete("c", ["a.md"])
        return replace(*arguments, **options)

    monkeypatch.setattr(catalog, "replace_documents", late)
    done = rag.sync("c", folder)
    assert ids(rag) == ["b.md", "deep/c.md", "z.md"]
    assert rag.documents.texts("c", ["z.md"])["z.md"].startswith("# a.md")
    assert (done.added, done.removed, dict(done.renamed)) == (1, (), {})
    assert [row.status for row in rag.jobs.list().items] == ["done"] * 2
    assert verify(rag.internals.shared.store).clean


def test_a_rename_that_others_hinder_is_an_error_in_words(
    rag: RagCache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rag.ingest("c", folder)
    catalog = rag._internals.catalog
    catalog.rename_document("c", "a.md", "other")
    moved = [MovedDocument("gone", "new", ""), MovedDocument("b.md", "other", "")]
    for each, text in zip(moved, ("'gone' was removed", "'other' was stored"), strict=True):
        with pytest.raises(DocumentsChanged, match=f"{text} meanwhile; try again"):
            catalog.replace_documents("c", [], moved=[each])
    assert ids(rag) == ["b.md", "deep/c.md", "other"]

    def hindered(*_: Any, **__: Any) -> Any:
        raise DocumentsChanged("a document was stored meanwhile; try again")

    monkeypatch.setattr(catalog, "replace_documents", hindered)
    with pytest.raises(DocumentsChanged):
        rag.sync("c", folder)
    assert [row.status for row in rag.jobs.list().items] == ["failed", "done"], "one job"


def test_ingest_applies_its_changes_to_the_index(
    rag: RagCache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the first question after it would."""
    applied: list[str] = []
    update = BM25Index.update
    monkeypatch.setattr(
        BM25Index, "update", lambda self, *a: (applied.append("at"), update(self, *a))[1]
    )
    rag.ingest("c", folder)
    assert rag.retrieve("yard", collection="c", k=9).hits
    rag.ingest("c", SourceDocument("other", "A sloop in the yard."))
    assert applied == ["at"]
    [hit] = rag.retrieve("sloop", collection="c").hits
    assert (hit.module.document, applied) == ("other", ["at"])


def test_files_that_take_each_others_names(rag: RagCache, folder: Path) -> None:
    rag.ingest("c", folder)
    (folder / "a.md").rename(folder / "z.md")
    (folder / "b.md").rename(folder / "y.md")
    assert rag.sync("c", folder).renamed == {"a.md": "z.md", "b.md": "y.md"}
    (folder / "z.md").rename(folder / "swap")
    (folder / "y.md").rename(folder / "z.md")
    (folder / "swap").rename(folder / "y.md")
    done = rag.sync("c", folder)
    assert (done.updated, done.encoded) == (2, 0), "their states are there"


def test_a_file_of_another_folder_replaces_no_existing_file(
    rag: RagCache, folder: Path, tmp_path: Path
) -> None:
    rag.ingest("c", folder)
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.md").write_text("The other a is at sea.")
    (other / "d.md").write_text("The d is in the yard.")
    refused = r"other/a\.md and .*docs/a\.md are both called 'a\.md', and the second is stored"
    for store in (rag.ingest, rag.sync):
        with pytest.raises(DocumentError, match=refused):
            store("c", other)
    assert ids(rag) == ["a.md", "b.md", "deep/c.md"]
    job = rag.jobs.submit("c", [other])
    assert "are both called 'a.md'" in str(rag.jobs.wait(job.id).error)
    assert rag.ingest("c", tmp_path).added == 2, "by the folder above they are apart"
    assert rag.ingest("c", other).unchanged == 2, "and keep their ids"
    assert rag.ingest("e", [other]).added == 2


def test_an_equal_or_moved_file_does_not_collide(
    rag: RagCache, folder: Path, tmp_path: Path
) -> None:
    rag.ingest("c", folder)
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.md").write_bytes((folder / "a.md").read_bytes())
    assert rag.ingest("c", other).updated == 1
    (other / "a.md").write_text("The other a is at sea.")
    assert rag.ingest("c", other).updated == 1, "the same file has changed"
    with pytest.raises(DocumentError, match="are both called"):
        rag.ingest("c", folder)
    (other / "a.md").unlink()
    assert rag.ingest("c", folder).updated == 1
    folder.rename(tmp_path / "moved")
    done = rag.ingest("c", tmp_path / "moved")
    assert (done.added, done.updated) == (0, 3)


def test_files_that_cannot_be_read_or_are_excluded_now_stay(rag: RagCache, folder: Path) -> None:
    rag.ingest("c", folder)
    (folder / "b.md").write_bytes(b"\0\1")
    done = rag.sync("c", folder)
    assert [Path(file.name).name for file in done.failed] == ["b.md"]
    assert done.removed == ()
    assert "b.md" in ids(rag)
    with pytest.raises(UnreadableDocument, match=r"b\.md: a binary"):
        rag.sync("c", folder, strict=True)
    assert rag.sync("c", folder, exclude=["deep/"]).removed == (), "nor what is excluded now"
    assert rag.ingest("d", folder, include=["deep/"]).added == 1


def test_a_file_given_by_its_path_keeps_its_id_of_the_folder(rag: RagCache, folder: Path) -> None:
    rag.ingest("c", folder)
    assert rag.ingest("c", folder / "deep/c.md").unchanged == 1
    assert ids(rag) == ["a.md", "b.md", "deep/c.md"]
    rag.ingest("d", folder / "deep/c.md")
    assert ids(rag, "d") != ["deep/c.md"]
    whole = (folder / "deep/c.md").relative_to(folder.anchor).as_posix()
    assert rag.sync("d", folder).renamed == {whole: "deep/c.md"}


def test_without_folders_the_collection_becomes_what_is_given(rag: RagCache) -> None:
    documents = [SourceDocument(name, f"The {name} is in the yard.") for name in ("kiln", "lamp")]
    rag.ingest("c", documents)
    done = rag.sync("c", [SourceDocument("kiln 2", documents[0].text)])
    assert (done.removed, done.renamed) == (("lamp",), {"kiln": "kiln 2"})
    assert ids(rag) == ["kiln 2"]


def test_another_process_goes_on_with_a_sync(
    rag: RagCache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: LoadedModel
) -> None:
    rag.ingest("c", [SourceDocument(name, f"The {name}.") for name in ("kiln", "oar", "lamp")])
    pages = (DocumentPart("# Boat\n\nBlue.", {"page": 1}), DocumentPart("Old.", {"page": 2}, True))
    boat = SourceDocument("boat.pdf", "# Boat\n\nBlue.\n\nOld.", parts=pages)
    loaded = LoadedSources(
        (SourceDocument("lamp", "The lamp is new."), boat),
        (SkippedFile("oar", "a binary file", failed=True),), present=frozenset({"oar"}),
    )  # fmt: skip
    monkeypatch.setattr(type(rag.jobs.workers), "wake", lambda *_: None)
    job = rag.jobs.submit("c", loaded, sync=True).id
    rag.close()
    monkeypatch.undo()
    monkeypatch.setattr("ragcache.store.store.HEARTBEAT_SECONDS", 0.05)
    with RagCache.open(tmp_path / "state", model, max_tokens=4, module_tokens=64) as other:
        ended = other.jobs.wait(job, 20)
        assert (ended.status, ended.report["removed"]) == ("done", ["kiln"])
        skipped = [{"name": "oar", "reason": "a binary file", "failed": True}]
        assert ended.report["skipped"] == skipped
        assert ids(other) == ["boat.pdf", "lamp", "oar"]
        [last] = other.modules.named("c", ["boat.pdf#2"])
        assert last.details == {"headings": ["Boat"], "page": 2}


def test_a_sync_keeps_what_was_queued_after_it(rag: RagCache) -> None:
    documents = {name: SourceDocument(name, f"The {name}.") for name in ("kiln", "oar", "lamp")}
    rag.ingest("c", [documents["kiln"], documents["oar"]])
    job = rag.jobs.submit("c", SourceDocument("boat", "The boat."), sync=True).id
    rag.ingest("c", [documents["oar"], documents["lamp"]])
    assert rag.jobs.get(job).report["removed"] == ["kiln", "oar"]
    assert ids(rag, "c") == ["boat", "lamp", "oar"]


def test_documents_that_langchain_split_are_ingested_as_they_are(rag: RagCache) -> None:
    pages = [
        Document(f"Page {n}. " + "The heron stands in the reeds. " * 6,
                 metadata={"source": "birds.pdf", "page": n})
        for n in (1, 2)
    ]  # fmt: skip
    splitter = RecursiveCharacterTextSplitter(chunk_size=120, chunk_overlap=20)
    done = rag.ingest("c", splitter.split_documents(pages))
    assert (done.added, done.modules) == (1, 4)
    assert ids(rag) == ["birds.pdf"]
    found = rag.retrieve("heron", collection="c", k=8, filters={"page": 2})
    assert {hit.module.details["page"] for hit in found.hits} == {2}
    [source, *_] = rag.ask("Where is the heron?", collection="c", filters={"page": 2}).sources
    assert (source.document, source.page) == ("birds.pdf", 2)


def test_stages_are_reported_in_turn(rag: RagCache, folder: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    rag.ingest("c", folder, preparing=lambda *at: seen.append(at))
    assert list(dict.fromkeys(stage for stage, _, _ in seen)) == ["reading", "splitting"]
    for stage in ("reading", "splitting"):
        last = [at for at in seen if at[0] == stage][-1]
        assert last[1] == last[2] > 0


def test_an_unknown_option_is_named(rag: RagCache, folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="includes"):
        rag.ingest("c", folder, includes=["*.md"])  # type: ignore[call-arg]


def test_states_that_a_repair_took_away_come_back(rag: RagCache, folder: Path) -> None:
    rag.ingest("c", folder)
    store = rag.internals.shared.store
    for blob in (folder.parent / "state" / "states").glob("??/*.safetensors"):
        blob.write_bytes(b"damaged")
    rag.modules.evict(collection="c", tier="host")
    verify(store, repair=True)
    done = rag.ingest("c", folder)
    assert (done.unchanged, done.encoded) == (3, 3)
    assert all("disk" in row.tiers for row in rag.modules.all("c"))
    assert rag.ingest("c", folder).encoded == 0
