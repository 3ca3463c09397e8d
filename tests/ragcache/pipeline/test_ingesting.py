"""Ingestion in the background: queued, run, known again, interrupted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from ragcache import RagCache, SourceDocument
from ragcache.errors import (
    ConfigurationError,
    EngineClosed,
    IdempotencyConflict,
    InvalidRequest,
    NoDocuments,
    QueueFull,
    UnknownJob,
    UnreadableDocument,
)
from ragcache.models import LoadedModel, wrap_causal
from ragcache.pipeline import worker
from ragcache.pipeline.module_states import ModuleEncoder
from tests.conftest import tiny_model

DOCUMENTS = [SourceDocument(name, f"The {name} is in the yard.") for name in ("kiln", "lamp")]


@pytest.fixture
def model(reader: LoadedModel) -> LoadedModel:
    causal = wrap_causal(tiny_model("llama", vocab_size=len(reader.tokenizer)))
    return LoadedModel("tiny", causal, reader.tokenizer)


@pytest.fixture
def rag(tmp_path: Path, model: LoadedModel) -> Iterator[RagCache]:
    with RagCache.open(tmp_path / "state", model, max_new_tokens=4) as opened:
        yield opened


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


def test_what_is_unchanged_ends_too(rag: RagCache) -> None:
    rag.ingest("notes", DOCUMENTS)
    done = rag.jobs.wait(rag.jobs.submit("notes", DOCUMENTS).id, 20)
    assert (done.status, done.total) == ("done", 0)


def test_jobs_run_one_after_another_and_are_listed_the_newest_first(rag: RagCache) -> None:
    rag.ingest("before", DOCUMENTS)
    ids = [rag.jobs.submit(f"notes {n}", DOCUMENTS).id for n in range(3)]
    ended = [rag.jobs.wait(job, 20) for job in ids]
    assert all(a.finished_at <= b.started_at for a, b in pairwise(ended))
    first = rag.jobs.list(limit=3)
    assert [row.id for row in first.items] == ids[::-1]
    rest = rag.jobs.list(first.next, limit=3)
    assert [row.target for row in rest.items] == ["collection before"]
    assert rest.next is None


def test_progress_can_be_seen(rag: RagCache, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragcache.store.jobs.PROGRESS_SECONDS", 0.0)
    seen: list[int] = []
    ingest = type(rag.parts.ingestor).ingest

    def watched(self, collection, sources, progress=None, job=None):  # type: ignore[no-untyped-def]
        look = lambda *_: seen.append(rag.jobs.get(job).done)  # noqa: E731
        return ingest(self, collection, sources, look, job)

    monkeypatch.setattr(type(rag.parts.ingestor), "ingest", watched)
    job = rag.jobs.submit("notes", DOCUMENTS).id
    assert gate.reached.wait(20)
    running = rag.jobs.get(job)
    assert (running.status, running.done, running.total) == ("running", 0, 2)
    with pytest.raises(TimeoutError, match="it goes on"):
        rag.jobs.wait(job, 0.01)
    gate.opened.set()
    assert rag.jobs.wait(job, 20).done == 2
    assert seen == [1, 2]


def test_a_request_that_comes_again_is_the_same_job(rag: RagCache) -> None:
    one = rag.jobs.submit("notes", DOCUMENTS, idempotency_key="a")
    assert rag.jobs.submit("notes", DOCUMENTS, idempotency_key="a").id == one.id
    rag.jobs.wait(one.id, 20)
    assert rag.jobs.submit("notes", DOCUMENTS, idempotency_key="a").status == "done"
    assert rag.jobs.submit("notes", DOCUMENTS, idempotency_key="b").id != one.id
    for collection, documents in (("plans", DOCUMENTS), ("notes", DOCUMENTS[:1])):
        with pytest.raises(IdempotencyConflict, match="'a' was sent with another request"):
            rag.jobs.submit(collection, documents, idempotency_key="a")
    other = rag.within("tenant-2").jobs
    assert other.submit("plans", DOCUMENTS, idempotency_key="a").id != one.id


def test_jobs_of_another_namespace_are_unknown(rag: RagCache) -> None:
    job = rag.jobs.submit("notes", DOCUMENTS).id
    other = rag.within("tenant-2")
    with pytest.raises(UnknownJob, match=f"no job {job}"):
        other.jobs.get(job)
    with pytest.raises(UnknownJob):
        other.jobs.wait(job, 1)
    assert other.jobs.list().items == ()
    assert other.jobs.wait(other.jobs.submit("notes", DOCUMENTS).id, 20).status == "done"
    assert len(other.list_modules()) == 2


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


def test_a_full_queue_takes_no_more_but_knows_what_it_has(
    rag: RagCache, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "WAITING", 2)
    jobs = [rag.jobs.submit(f"notes {n}", DOCUMENTS, idempotency_key=str(n)).id for n in range(2)]
    with pytest.raises(QueueFull, match="2 ingestions wait"):
        rag.jobs.submit("notes", DOCUMENTS)
    assert rag.jobs.submit("notes 1", DOCUMENTS, idempotency_key="1").id == jobs[1]
    with pytest.raises(IdempotencyConflict):
        rag.jobs.submit("notes 0", DOCUMENTS, idempotency_key="1")
    assert len(rag.jobs.list().items) == 2
    gate.opened.set()
    for job in jobs:
        assert rag.jobs.wait(job, 20).status == "done"
    assert rag.jobs.wait(rag.jobs.submit("notes", DOCUMENTS).id, 20).status == "done"


def test_documents_that_wait_have_a_budget_of_bytes(
    tmp_path: Path, model: LoadedModel, gate: Gate
) -> None:
    large = [SourceDocument("a", "The kiln is warm. " * 40)]
    with RagCache.open(tmp_path / "state", model, ingestion_bytes="1KiB") as rag:
        first = rag.jobs.submit("notes", large)  # alone it may be larger: 1.1 KB
        with pytest.raises(QueueFull, match="1,024"):
            rag.jobs.submit("notes", DOCUMENTS)
        gate.opened.set()
        rag.jobs.wait(first.id, 20)
        assert rag.jobs.wait(rag.jobs.submit("notes", DOCUMENTS).id, 20).status == "done"


def test_a_request_that_failed_is_queued_again_under_its_number(
    rag: RagCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(ModuleEncoder, "lease", lambda *_, **__: 1 / 0)
        job = rag.jobs.submit("notes", DOCUMENTS, idempotency_key="a").id
        assert rag.jobs.wait(job, 20).status == "failed"
        again = rag.jobs.submit("notes", DOCUMENTS, idempotency_key="a")
        assert rag.jobs.wait(again.id, 20).status == "failed"
    again = rag.jobs.submit("notes", DOCUMENTS, idempotency_key="a")
    assert again.id == job
    done = rag.jobs.wait(job, 20)
    assert (done.status, done.error, done.done, done.states) == ("done", "", 2, 0)
    assert rag.ask("Where is the kiln?", collection="notes").sources


def test_a_job_that_fails_says_why_and_the_next_one_runs(
    rag: RagCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(ModuleEncoder, "lease", lambda *_, **__: 1 / 0)
        failed = rag.jobs.wait(rag.jobs.submit("notes", DOCUMENTS).id, 20)
    assert (failed.status, failed.error) == ("failed", "ZeroDivisionError: division by zero")
    assert rag.jobs.wait(rag.jobs.submit("notes", DOCUMENTS).id, 20).status == "done"


def test_closing_interrupts_what_runs_and_what_waits(
    tmp_path: Path, model: LoadedModel, gate: Gate
) -> None:
    rag = RagCache.open(tmp_path / "state", model)
    running = rag.jobs.submit("notes", DOCUMENTS).id
    waiting = rag.jobs.submit("plans", DOCUMENTS, idempotency_key="a").id
    assert gate.reached.wait(20)
    closing = threading.Thread(target=rag.close)
    closing.start()
    gate.opened.set()
    closing.join(20)
    assert not closing.is_alive()
    with pytest.raises(EngineClosed):
        rag.jobs.submit("notes", DOCUMENTS)
    with RagCache.open(tmp_path / "state", model) as again:
        rows = {row.id: row for row in again.jobs.list().items}
        assert {row.status for row in rows.values()} == {"interrupted"}
        assert "EngineClosed" in rows[running].error
        assert "the same documents again" in rows[waiting].error
        assert again.jobs.wait(again.jobs.submit("notes", DOCUMENTS).id, 20).status == "done"
        assert again.jobs.get(running).states == 0, "the next one of its target took them over"
        resent = again.jobs.submit("plans", DOCUMENTS, idempotency_key="a")
        assert resent.id == waiting
        assert again.jobs.wait(waiting, 20).status == "done"
