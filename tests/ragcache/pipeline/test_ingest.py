"""Ingestion: what is stored, what an interruption leaves, and jobs in the background."""

from __future__ import annotations

import errno
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from langchain_core.embeddings import Embeddings
from sqlalchemy import event

import ragcache.store.tiers.base
from ragcache import RagCache, SourceDocument
from ragcache.db import JobRow, Jobs, Ledger
from ragcache.engine import EncodeJob, LLMEngine
from ragcache.errors import (
    ConfigurationError,
    EngineClosed,
    IdempotencyConflict,
    InvalidRequest,
    JobCanceled,
    NoDocuments,
    QueueFull,
    StoreBudgetExceeded,
    StoreFull,
    UnknownCollection,
    UnknownJob,
    UnreadableDocument,
)
from ragcache.models import LoadedModel
from ragcache.pipeline.ingest import EncodingTurns
from ragcache.pipeline.ingestion_jobs import IngestionWorkers
from ragcache.pipeline.module_states import ModuleEncoder
from ragcache.retrieval import BM25Index

TIDES = "The tide turns twice a day and nobody has to wind it. "
DOCUMENTS = [SourceDocument(name, f"The {name} is in the yard.") for name in ("kiln", "lamp")]


@pytest.fixture
def rag(tmp_path: Path, model: LoadedModel) -> Iterator[RagCache]:
    with RagCache.open(tmp_path / "state", model, max_tokens=4, module_tokens=64) as opened:
        yield opened


def stored(tmp_path: Path) -> int:
    return len(list((tmp_path / "state" / "states").glob("??/*.safetensors")))


def test_a_long_document_becomes_numbered_modules(rag: RagCache) -> None:
    done = rag.ingest("c", [SourceDocument("tides", TIDES * 20), SourceDocument("short", "Ebb.")])
    listing = rag.modules.all("c")
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


@pytest.mark.parametrize(
    "options", [{"batch_documents": 1}, {"batch_seconds": 0}], ids=["count", "time"]
)
def test_documents_are_found_before_their_ingestion_ends(
    tmp_path: Path, model: LoadedModel, options: dict[str, Any]
) -> None:
    found: list[list[str]] = []
    with RagCache.open(tmp_path / "state", model, max_tokens=4, **options) as rag:

        def look(done: int, total: int) -> None:
            there = bool(rag.collections.page().items)
            found.append([row.document for row in rag.modules.all("c")] if there else [])
            assert rag.jobs.list().items[0].status == "running"

        done = rag.ingest("c", [*DOCUMENTS, SourceDocument("oar", "An oar.")], progress=look)
        assert found == [[], ["kiln"], ["kiln", "lamp"]]
        assert [row.document for row in rag.modules.all("c")] == ["kiln", "lamp", "oar"]
        assert (done.added, done.modules) == (3, 3)
        assert rag.jobs.list().items[0].status == "done"


def test_a_canceled_ingestion_keeps_the_batches_that_it_stored(
    tmp_path: Path, model: LoadedModel
) -> None:
    with RagCache.open(tmp_path / "state", model, max_tokens=4, batch_documents=1) as rag:
        rag.ingest("c", [SourceDocument("old", "An old text.")])

        def cancel(done: int, total: int) -> None:
            if done == 2:
                rag.jobs.cancel(rag.jobs.list().items[0].id)

        documents = [*DOCUMENTS, SourceDocument("oar", "An oar.")]
        with pytest.raises(JobCanceled):
            rag.sync("c", documents, progress=cancel)
        assert [row.document for row in rag.modules.all("c")] == ["old", "kiln"]
        done = rag.sync("c", documents)
        assert (done.added, done.unchanged, done.removed) == (2, 1, ("old",))


def test_another_module_size_splits_unchanged_documents_again(
    rag: RagCache, tmp_path: Path, model: LoadedModel
) -> None:
    before = rag.ingest("c", [SourceDocument("tides", TIDES * 10)])
    rag.close()
    with RagCache.open(tmp_path / "state", model, max_tokens=4, module_tokens=200) as other:
        after = other.ingest("c", [SourceDocument("tides", TIDES * 10)])
    assert (after.added, after.updated, after.unchanged) == (0, 1, 0)
    assert after.modules < before.modules
    assert stored(tmp_path) == after.modules + 1, "the states of the smaller modules are gone"


def test_states_stay_until_the_last_document_that_needs_them(rag: RagCache, tmp_path: Path) -> None:
    twins = [SourceDocument("a", "The tide is out."), SourceDocument("b", "The tide is out.")]
    assert rag.ingest("c", twins).encoded == 2, "one module and the preamble"
    assert rag.ingest("d", twins[:1]).encoded == 0
    assert rag.delete("c", ["a", "b"]) == 2
    assert stored(tmp_path) == 2
    assert rag.ask("Is the tide out?", collection="d").reuse.cached_tokens > 0
    assert rag.delete("d", ["a", "a", "unknown"]) == 1
    assert stored(tmp_path) == 1, "the preamble belongs to no document"


class Lengths(Embeddings):
    """A vector of each text's length. Counts the texts."""

    def __init__(self) -> None:
        self.count = 0

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.count += len(texts)
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return [1.0, float(len(text))]


def test_documents_that_are_ingested_again_get_missing_vectors(
    tmp_path: Path, model: LoadedModel
) -> None:
    """A collection from before an embedder was installed, as a short command finds it."""
    lamps = [SourceDocument(f"lamp-{n}", f"The lamp {n} is lit.") for n in range(12)]
    with RagCache.open(tmp_path / "state", model, embedding="none", max_tokens=4) as rag:
        rag.ingest("c", lamps)
    embedder = Lengths()
    with RagCache.open(tmp_path / "state", model, embedding=embedder, max_tokens=4) as rag:
        again = rag.ingest("c", lamps)
        assert (again.unchanged, again.encoded) == (len(lamps), 0)
        assert embedder.count == len(lamps)
        rag.ingest("c", lamps)
        hits = rag.retrieve("lamp", collection="c", search="hybrid", k=12).hits
        assert embedder.count == len(lamps), "each once"
        assert [hit.cosine is not None for hit in hits] == [True] * len(lamps)


def test_a_module_longer_than_the_window_is_refused_unencoded(
    tmp_path: Path, model: LoadedModel
) -> None:
    with RagCache.open(tmp_path / "state", model, module_tokens=600) as rag:
        with pytest.raises(ConfigurationError, match=r"window of 512 .*; give a smaller"):
            rag.ingest("c", [SourceDocument("tides", TIDES * 60)])
        assert rag.stats().encoded == 0


def test_a_too_small_host_tier_keeps_stored_documents(tmp_path: Path, model: LoadedModel) -> None:
    with RagCache.open(
        tmp_path / "state", model, module_tokens=64, host_bytes="64KiB", max_tokens=4
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
        patched.setattr(ragcache.store.tiers.base, "write_through", full)
        patched.setattr(Ledger, "record", full_ledger)
        with pytest.raises(StoreFull, match=r"no space left at .*; free some space"):
            rag.ingest("c", [SourceDocument("ebb", "New."), SourceDocument("flow", "Flood.")])
        answer = rag.ask("Is the ebb slow?", collection="c")
        assert (answer.text, answer.reuse) == (expected.text, expected.reuse)
    assert rag.stats().collections == {"c": 1}
    assert rag.ingest("c", [SourceDocument("flow", "Flood.")]).added == 1


@pytest.mark.parametrize("whole", [True, False])
def test_documents_are_deleted_from_a_full_disk(rag: RagCache, whole: bool) -> None:
    rag.ingest("c", DOCUMENTS)
    disk, engine = rag.internals.shared.store.disk, rag.internals.shared.database.engine
    before = set(disk.keys())

    def refuse(_: Any, __: Any, statement: str, *___: Any) -> None:
        if statement.startswith("DELETE") and set(disk.keys()) == before:
            raise sqlite3.OperationalError("database or disk is full")

    event.listen(engine, "before_cursor_execute", refuse)
    try:
        delete = rag.collections.delete if whole else partial(rag.delete, document_ids=["kiln"])
        assert delete("c") == (2 if whole else 1)
    finally:
        event.remove(engine, "before_cursor_execute", refuse)
    assert list(rag.stats().collections.values()) == ([] if whole else [1])
    assert len(before - set(disk.keys())) == (2 if whole else 1)


def test_a_state_folder_is_for_its_owner_alone(rag: RagCache, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    modes = {each.name: each.stat().st_mode & 0o777 for each in (folder, *folder.iterdir())}
    assert modes.pop("state") == 0o700
    files = {name: mode for name, mode in modes.items() if name.startswith("ledger.sqlite")}
    assert set(files.values()) == {0o600}
    assert "ledger.sqlite" in files


def test_an_interrupted_ingestion_keeps_states_and_stores_no_row(
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


def test_another_open_process_finds_newly_stored_documents(
    rag: RagCache, tmp_path: Path, model: LoadedModel
) -> None:
    rag.ingest("c", [SourceDocument("ebb", "The ebb is slow.")])
    rag.ask("Is the ebb slow?", collection="c")
    with RagCache.open(tmp_path / "state", model, max_tokens=4, module_tokens=64) as other:
        other.ingest("c", [SourceDocument("flood", "The flood is quick.")])
        other.delete("c", ["ebb"])
    answer = rag.ask("Is the ebb slow, or the flood quick?", collection="c")
    assert [source.document for source in answer.sources] == ["flood"]
    assert {source.tier for source in answer.sources} == {"disk"}


class Gate:
    """Holds encoding up until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        lease = ModuleEncoder.lease

        def held(*args: object, **named: object) -> object:
            self.reached.set()
            assert self.opened.wait(20)
            return lease(*args, **named)  # type: ignore[arg-type]

        patch.setattr(ModuleEncoder, "lease", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.opened.set()


def test_a_job_ends_with_its_documents_stored(rag: RagCache) -> None:
    queued = rag.jobs.submit("notes", DOCUMENTS)
    assert (queued.target, queued.status, queued.started_at) == ("collection notes", "queued", None)
    done = rag.jobs.wait(queued.id, 20)
    assert (done.status, done.done, done.total, done.states) == ("done", 2, 2, 0)
    assert done.created_at <= (done.started_at or 0) <= (done.finished_at or 0)
    assert rag.ask("Where is the kiln?", collection="notes").sources
    assert done.ended


def test_indexes_are_built_after_a_job_and_when_prepared(
    rag: RagCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    builders: list[str] = []
    build = BM25Index.__init__

    def watched(index: BM25Index, texts: Any) -> None:
        builders.append(threading.current_thread().name)
        build(index, texts)

    monkeypatch.setattr(BM25Index, "__init__", watched)
    rag.jobs.wait(rag.jobs.submit("notes", DOCUMENTS).id, 20)
    rag.ingest("plans", DOCUMENTS)
    rag.collections.prepare_indexes()
    for thread in threading.enumerate():
        if thread.name == "ragcache-index":
            thread.join(20)
    for name in ("notes", "plans"):
        assert len(rag.retrieve("kiln", collection=name).hits) == 1
    assert builders == ["ragcache-index"] * 2


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The token ids of all texts that were encoded."""
    seen: list[tuple[int, ...]] = []
    encode = LLMEngine.encode

    def counted(engine: LLMEngine, jobs: Sequence[EncodeJob]) -> Any:
        seen.extend(tuple(job.token_ids) for job in jobs)
        return encode(engine, jobs)

    monkeypatch.setattr(LLMEngine, "encode", counted)
    return seen


@pytest.mark.parametrize("metadata", [{}, {"year": 2026}])
def test_concurrent_jobs_of_the_same_texts_encode_them_once(
    encoded: list[tuple[int, ...]], rag: RagCache, gate: Gate, metadata: dict[str, int]
) -> None:
    running = rag.jobs.submit("notes", DOCUMENTS)
    assert gate.reached.wait(20)
    later = rag.jobs.submit("notes", [replace(each, metadata=metadata) for each in DOCUMENTS])
    gate.opened.set()
    assert [rag.jobs.wait(each.id, 20).status for each in (running, later)] == ["done", "done"]
    assert len(encoded) == len(set(encoded)) == 3, "the preamble and two modules, each once"
    assert [row.attributes for row in rag.documents.get("notes")] == [metadata] * 2
    assert rag.jobs.get(later.id).states == 0


def test_a_job_of_another_process_encodes_nothing_again(
    tmp_path: Path, model: LoadedModel, gate: Gate, encoded: list[tuple[int, ...]]
) -> None:
    with (
        RagCache.open(tmp_path / "state", model) as one,
        RagCache.open(tmp_path / "state", model) as other,
    ):
        first = one.jobs.submit("notes", DOCUMENTS).id
        assert gate.reached.wait(20)
        later = other.jobs.submit("notes", DOCUMENTS).id
        gate.opened.set()
        assert one.jobs.wait(first, 60).status == other.jobs.wait(later, 60).status == "done"
    assert sorted(encoded) == sorted(set(encoded))


def test_a_job_that_an_exit_interrupts_is_continued(
    tmp_path: Path, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python ends the pools of threads before the folder is closed."""
    refused = threading.Event()

    def submit_late(*_: object, **__: object) -> None:
        pool = ThreadPoolExecutor(1)
        pool.shutdown()
        refused.set()
        pool.submit(print)

    with RagCache.open(tmp_path / "state", model) as exiting:
        with monkeypatch.context() as patched:
            patched.setattr(type(exiting.internals.ingestor), "store_sources", submit_late)
            job = exiting.jobs.submit("notes", DOCUMENTS).id
            assert refused.wait(20)
            exiting.internals.shared.workers.join()
        assert not exiting.jobs.get(job).ended
    with RagCache.open(tmp_path / "state", model) as later:
        assert later.jobs.wait(job, 60).status == "done"
        assert len(later.documents.get("notes")) == len(DOCUMENTS)


def test_what_is_unchanged_ends_too(rag: RagCache) -> None:
    rag.ingest("notes", DOCUMENTS)
    done = rag.jobs.wait(rag.jobs.submit("notes", DOCUMENTS).id, 20)
    assert (done.status, done.total) == ("done", 0)


def test_jobs_of_one_collection_run_in_order_others_in_parallel(
    rag: RagCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    rag.ingest("before", DOCUMENTS)  # encodes the preamble
    together = threading.Barrier(2)
    lease = ModuleEncoder.lease

    def meet(*args: Any, **named: Any) -> Any:
        together.wait(60)
        return lease(*args, **named)

    monkeypatch.setattr(ModuleEncoder, "lease", meet)
    plans = rag.jobs.submit("plans", DOCUMENTS).id
    notes = [rag.jobs.submit("notes", DOCUMENTS).id for _ in range(2)]
    first, *ended = [rag.jobs.wait(job, 60) for job in (plans, *notes)]
    assert {row.status for row in (first, *ended)} == {"done"}
    assert ended[0].finished_at <= ended[1].started_at


def test_progress_can_be_seen(rag: RagCache, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragcache.db.jobs.PROGRESS_SECONDS", 0.0)
    seen: list[int] = []
    run = type(rag.internals.ingestor).store_sources

    def watched(self, job, collection, loaded, progress, *, sync):  # type: ignore[no-untyped-def]
        look = lambda *_: seen.append(rag.jobs.get(job).done)  # noqa: E731
        return run(self, job, collection, loaded, look, sync=sync)

    monkeypatch.setattr(type(rag.internals.ingestor), "store_sources", watched)
    job = rag.jobs.submit("notes", DOCUMENTS).id
    assert gate.reached.wait(20)
    running = rag.jobs.get(job)
    assert (running.status, running.done, running.total) == ("running", 0, 2)
    with pytest.raises(TimeoutError, match="it goes on"):
        rag.jobs.wait(job, 0.01)
    gate.opened.set()
    assert rag.jobs.wait(job, 20).done == 2
    assert seen == [1, 2]


def test_a_repeated_request_is_the_same_job_of_its_namespace(rag: RagCache) -> None:
    one = rag.jobs.submit("notes", DOCUMENTS, idempotency_key="a")
    rag.jobs.wait(one.id, 20)
    again = rag.jobs.submit("notes", DOCUMENTS, idempotency_key="a")
    assert (again.id, again.status) == (one.id, "done")
    for collection, documents in (("plans", DOCUMENTS), ("notes", DOCUMENTS[:1])):
        with pytest.raises(IdempotencyConflict, match="'a' was sent with another request"):
            rag.jobs.submit(collection, documents, idempotency_key="a")
    other = rag.within("tenant-2")
    with pytest.raises(UnknownJob, match=f"no job {one.id}"):
        other.jobs.wait(one.id, 1)
    assert other.jobs.list().items == ()
    theirs = other.jobs.submit("notes", DOCUMENTS, idempotency_key="a")
    assert (theirs.id != one.id, other.jobs.wait(theirs.id, 20).status) == (True, "done")
    assert len(other.modules.all()) == 2


def test_what_cannot_be_ingested_is_refused_at_once(
    rag: RagCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnreadableDocument):
        rag.jobs.submit("notes", tmp_path / "missing.md")
    with pytest.raises(NoDocuments):
        rag.jobs.submit("notes", [])
    with pytest.raises(ConfigurationError, match="needs a name"):
        rag.jobs.submit(" ", DOCUMENTS)
    with pytest.raises(InvalidRequest, match="1 to 255"):
        rag.jobs.submit("notes", DOCUMENTS, idempotency_key="")
    assert rag.jobs.list().items == ()


def test_documents_that_wait_have_a_budget_of_bytes(
    tmp_path: Path, model: LoadedModel, gate: Gate
) -> None:
    large = [SourceDocument("a", "The kiln is warm. " * 80)]
    with RagCache.open(tmp_path / "state", model, ingestion_bytes="1KiB") as rag:
        first = rag.jobs.submit("notes", large)  # alone it may be larger
        with pytest.raises(QueueFull, match="1,024"):
            rag.jobs.submit("notes", DOCUMENTS)
        gate.opened.set()
        rag.jobs.wait(first.id, 20)
        assert rag.jobs.wait(rag.jobs.submit("notes", DOCUMENTS).id, 20).status == "done"


def test_a_failed_job_has_a_reason_and_runs_again_under_its_id(
    rag: RagCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> JobRow:
        job = rag.jobs.submit("notes", DOCUMENTS, idempotency_key="a")
        return rag.jobs.wait(job.id, 20)

    with monkeypatch.context() as patched:
        patched.setattr(ModuleEncoder, "lease", lambda *_, **__: 1 / 0)
        failed = run()
    assert (failed.status, failed.error) == ("failed", "ZeroDivisionError: division by zero")
    done = run()
    assert (done.id, done.status, done.error, done.states) == (failed.id, "done", "", 0)


def test_jobs_go_on_when_the_folder_is_opened_again(
    tmp_path: Path, model: LoadedModel, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragcache.store.store.HEARTBEAT_SECONDS", 0.05)
    rag = RagCache.open(tmp_path / "state", model)
    jobs = [rag.jobs.submit("notes", DOCUMENTS[:n]).id for n in (2, 1)]
    assert gate.reached.wait(20)
    closing = threading.Thread(target=rag.close)
    closing.start()
    gate.opened.set()
    closing.join(20)
    assert not closing.is_alive()
    with pytest.raises(EngineClosed):
        rag.jobs.submit("notes", DOCUMENTS)
    with RagCache.open(tmp_path / "state", model) as again:
        assert {row.status for row in again.jobs.list().items} == {"queued"}
        assert [again.jobs.wait(job, 60).status for job in jobs] == ["done"] * 2
        assert {row.source_id for row in again.documents.get("notes")} == {"kiln", "lamp"}


def texts(rag: RagCache, collection: str = "notes") -> dict[str, str]:
    names = [row.source_id for row in rag.documents.get(collection)]
    return dict(rag.internals.catalog.texts(collection, names))


def test_a_direct_call_waits_for_jobs_that_another_process_left(
    tmp_path: Path, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, newer = SourceDocument("kiln", "Version 1."), SourceDocument("kiln", "Version 2.")
    with monkeypatch.context() as patched:
        patched.setattr(IngestionWorkers, "wake", lambda *_: None)
        with RagCache.open(tmp_path / "state", model) as rag:
            job = rag.jobs.submit("notes", [older, DOCUMENTS[1]]).id
    monkeypatch.setattr("ragcache.store.store.HEARTBEAT_SECONDS", 0.05)
    with RagCache.open(tmp_path / "state", model) as again:
        assert again.ingest("notes", newer).updated == 1
        assert again.jobs.get(job).status == "done"
        assert texts(again) == {"kiln": newer.text, "lamp": DOCUMENTS[1].text}


def test_a_job_that_is_canceled_stores_nothing(rag: RagCache, gate: Gate) -> None:
    job = rag.jobs.submit("notes", DOCUMENTS).id
    assert gate.reached.wait(20)
    assert rag.jobs.cancel(job).status == "canceled"
    gate.opened.set()
    rag.jobs.workers.join()
    done = rag.ingest("notes", DOCUMENTS)
    assert (done.added, done.encoded) == (2, 1), "the states that it had encoded are found"
    assert (rag.jobs.get(job).status, rag.jobs.get(job).done) == ("canceled", 0)

    def late(*_: object) -> None:
        rag.jobs.cancel(rag.jobs.list().items[0].id)

    with pytest.raises(JobCanceled, match="was canceled"):
        rag.ingest("plans", DOCUMENTS, progress=late)
    assert "plans" not in rag.stats().collections


def test_deleting_the_collection_ends_its_first_job(rag: RagCache, gate: Gate) -> None:
    job = rag.jobs.submit("notes", DOCUMENTS).id
    assert gate.reached.wait(20)
    assert rag.collections.delete("notes") == 0
    gate.opened.set()
    assert rag.jobs.wait(job, 20).status == "canceled"
    rag.jobs.workers.join()
    assert rag.stats().collections == {}
    with pytest.raises(UnknownCollection):
        rag.collections.delete("notes")


def test_a_job_that_is_split_can_be_canceled(
    rag: RagCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragcache.db.jobs.PROGRESS_SECONDS", 0.0)
    stages: list[str] = []

    def cancel(stage: str, *_: int) -> None:
        if stage == "splitting":
            stages.append(stage)
            rag.jobs.cancel(rag.jobs.list().items[0].id)

    with pytest.raises(JobCanceled):
        rag.ingest("notes", DOCUMENTS, preparing=cancel)
    assert len(stages) == 1


def test_jobs_of_one_namespace_let_another_one_through(
    rag: RagCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect, held, opened = Jobs.expect, threading.Semaphore(0), threading.Event()

    def stall(self: Jobs, *args: Any) -> None:
        if self.namespace == "default":
            held.release()
            assert opened.wait(60)
        expect(self, *args)

    monkeypatch.setattr(Jobs, "expect", stall)
    stalled = [rag.jobs.submit(name, DOCUMENTS).id for name in ("a", "b", "c")]
    assert all(held.acquire(timeout=20) for _ in range(2))
    other = rag.within("tenant")
    assert other.jobs.wait(other.jobs.submit("notes", DOCUMENTS).id, 20).status == "done"
    assert [rag.jobs.get(job).status for job in stalled] == ["running", "running", "queued"]
    opened.set()
    assert {rag.jobs.wait(job, 20).status for job in stalled} == {"done"}


def test_turns_go_to_the_namespace_that_waited_longest() -> None:
    turns, order = EncodingTurns(1), list[str]()

    def take(namespace: str) -> None:
        with turns.turn(namespace):
            order.append(namespace)

    with turns.turn("red"):
        names = ["red", "red", "blue", "green", "blue"]
        threads = []
        for number, name in enumerate(names, start=1):
            threads.append(threading.Thread(target=take, args=(name,)))
            threads[-1].start()
            while len(turns._waiting) < number:
                pass
        assert turns.contended
    for thread in threads:
        thread.join(20)
    assert order == ["blue", "green", "red", "blue", "red"]
    assert not turns.contended


def test_a_job_leaves_out_what_was_deleted_while_it_ran(
    rag: RagCache, gate: Gate, tmp_path: Path
) -> None:
    job = rag.jobs.submit("notes", DOCUMENTS).id
    assert gate.reached.wait(20)
    rag.internals.catalog.add_collection("notes")
    rag.delete("notes", ["kiln"])
    gate.opened.set()
    assert rag.jobs.wait(job, 20).status == "done"
    rag.jobs.workers.join()
    assert list(texts(rag)) == ["lamp"]
    assert stored(tmp_path) == 2, "the preamble and the lamp"


def test_a_collection_deleted_while_its_job_runs_stays_deleted(rag: RagCache, gate: Gate) -> None:
    job = rag.jobs.submit("notes", DOCUMENTS).id
    assert gate.reached.wait(20)
    rag.internals.catalog.add_collection("notes")
    rag.collections.delete("notes")
    gate.opened.set()
    assert rag.jobs.wait(job, 20).status == "canceled"
    assert rag.ingest("plans", DOCUMENTS).added == 2
    assert list(rag.stats().collections) == ["plans"]
