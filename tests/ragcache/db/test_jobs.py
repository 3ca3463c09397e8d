"""Jobs in the ledger: queued once a request, listed in pages, interrupted with their session."""

from __future__ import annotations

import pytest

from ragcache.db import Database, Jobs
from ragcache.db.jobs import (
    JobDocument,
    WaitingDocuments,
    complete,
    forget_documents,
    hand_on,
    hand_over,
    supersede,
)
from ragcache.db.sessions import end_sessions
from ragcache.errors import IdempotencyConflict, InvalidRequest, JobTaken, UnknownJob
from tests.ragcache.conftest import make_key


@pytest.fixture
def jobs(database: Database) -> Jobs:
    return Jobs(database, "here")


def test_a_request_is_queued_once_in_a_namespace(jobs: Jobs) -> None:
    job, new = jobs.queue("collection notes", "key", "digest")
    assert new
    assert jobs.queue("collection notes", "key", "digest") == (job, False)
    with pytest.raises(IdempotencyConflict, match="'key'"):
        jobs.queue("collection notes", "key", "another digest")
    assert jobs.within("tenant").queue("collection notes", "key", "another digest")[1]
    plain = [jobs.queue("collection notes", None, "digest")[0] for _ in range(2)]
    assert len({job, *plain}) == 3


def test_a_request_that_ended_early_is_queued_once_more(jobs: Jobs, database: Database) -> None:
    assert jobs.known("key", "digest") is None
    job, _ = jobs.queue("collection notes", "key", "digest")
    jobs.start(job)
    jobs.expect(job, [make_key(1)])
    jobs.fail(job, ValueError("no"))
    known = jobs.known("key", "digest")
    assert known is not None
    assert (known.id, known.can_be_retried) == (job, True)
    with pytest.raises(IdempotencyConflict):
        jobs.known("key", "another digest")
    later = Jobs(database, "there")
    assert later.queue("collection notes", "key", "digest") == (job, True)
    assert jobs.queue("collection notes", "key", "digest") == (job, False), "one caller runs it"
    row = jobs.get(job)
    assert (row.status, row.error, row.started_at, row.finished_at) == ("queued", "", None, None)
    assert (row.states, row.can_be_retried) == (1, False)
    with database.transaction() as session:
        end_sessions(session, ["there"])
    assert jobs.get(job).status == "interrupted", "it is the session's that queued it last"


def test_pages_join_to_the_whole_list(jobs: Jobs) -> None:
    ids = [jobs.begin(f"collection {n}", n) for n in range(7)]
    jobs.within("tenant").begin("collection x", 1)
    found: list[int] = []
    page = jobs.page(limit=3)
    found += [row.id for row in page.items]
    while page.next is not None:
        jobs.begin("collection later", 0)
        page = jobs.page(page.next, 3)
        found += [row.id for row in page.items]
    assert found == ids[::-1]
    assert len(jobs.listed()) == 10, "of all namespaces"
    with pytest.raises(InvalidRequest, match="begin without"):
        jobs.page("!")


def test_a_session_that_ends_interrupts_its_jobs(jobs: Jobs, database: Database) -> None:
    queued, _ = jobs.queue("collection notes", None, "")
    with jobs.running("collection plans", 2) as running:
        jobs.expect(running, [make_key(1)])
        with database.transaction() as session:
            end_sessions(session, ["here"])
    for job, states in ((queued, 0), (running, 1)):
        row = jobs.get(job)
        assert (row.status, row.states, row.ended) == ("interrupted", states, True)
        assert "the same documents again" in row.error


def test_a_job_ends_those_of_its_target_in_its_namespace(jobs: Jobs, database: Database) -> None:
    other = jobs.within("tenant")
    for each in (jobs, other):
        each.fail(each.begin("collection notes", 1), ValueError("no"))
        each.expect(each.page().items[0].id, [make_key(1)])
    job = jobs.begin("collection notes", 1)
    with database.transaction() as session:
        assert complete(session, job) == [make_key(1)]
    assert [row.states for row in jobs.page().items] == [0, 0]
    assert [row.states for row in other.page().items] == [1]
    assert (jobs.get(job).done, jobs.get(job).status) == (1, "done")


def documents(*names: str) -> list[JobDocument]:
    return [JobDocument(name, f"text of {name}") for name in names]


def test_a_job_with_documents_goes_on_where_its_session_ended(
    jobs: Jobs, database: Database
) -> None:
    job, _ = jobs.queue("collection notes", None, "", documents("a", "b"))
    other = Jobs(database, "there")
    assert other.adopt() is None, "its session lives"
    jobs.start(job)
    with database.transaction() as session:
        hand_over(session, ["here"])
        end_sessions(session, ["here"])
    assert jobs.get(job).status == "queued"
    adopted = other.adopt()
    assert adopted is not None
    assert (adopted.id, adopted.target) == (job, "collection notes")
    assert adopted.contents == ("text of a", "text of b")
    assert other.adopt() is None
    with pytest.raises(JobTaken, match="another process goes on"):
        jobs.start(job)
    jobs.fail(job, ValueError("late"))
    jobs.finish(job)
    assert jobs.get(job).status == "queued", "only the one that runs it may end it"
    with pytest.raises(JobTaken), database.transaction() as session:
        complete(session, job, "here")
    with database.transaction() as session:
        complete(session, job, "there")
    assert jobs.get(job).status == "done"
    assert other.adopt() is None


def test_later_requests_replace_documents_that_wait(jobs: Jobs, database: Database) -> None:
    first, _ = jobs.queue("collection notes", None, "", documents("a", "b"))
    jobs.queue("collection plans", None, "", documents("b"))
    jobs.queue("collection notes", None, "", documents("b"))
    with database.transaction() as session:
        hand_over(session, ["here"])
    contents = [(job.id, job.contents) for _ in range(3) if (job := jobs.adopt())]
    assert contents == [(first, ("text of a",)), (first + 1, ("text of b",)),
                        (first + 2, ("text of b",))]  # fmt: skip


def test_a_request_supersedes_earlier_jobs_only(jobs: Jobs, database: Database) -> None:
    sync = {"sync": True, "present": ["a"]}
    first, _ = jobs.queue("collection notes", None, "", documents("a", "b"), sync)
    own = jobs.begin("collection notes", 1)
    last, _ = jobs.queue("collection notes", None, "", documents("c"), sync)
    with database.transaction() as session:
        supersede(session, jobs.namespace, "collection notes", ["b", "d"], before=own)
    assert jobs.waiting(first) == WaitingDocuments(frozenset("a"), frozenset("abcd"))
    assert jobs.waiting(last) == WaitingDocuments(frozenset("c"), frozenset("ac"))


def test_the_job_that_took_a_document_over_gets_its_states(jobs: Jobs, database: Database) -> None:
    first, second, third = (
        jobs.queue("collection notes", None, "", documents(*names))[0]
        for names in ("abcd", "abc", "b")
    )
    jobs.queue("collection plans", None, "", documents("a"))
    keys = {name: [make_key(number)] for number, name in enumerate("abcd")}
    with database.transaction() as session:
        forget_documents(session, jobs.namespace, "collection notes", ["c"])
        hand_on(session, first, keys)
        hand_on(session, third, keys)
    assert [jobs.get(job).states for job in (first, second, third)] == [0, 1, 1]
    assert [jobs.get(row.id).states for row in jobs.page().items] == [0, 1, 1, 0]
    with database.transaction() as session:
        assert [complete(session, job) for job in (second, third)] == [keys["a"], keys["b"]]


def test_an_unknown_job_is_named(jobs: Jobs) -> None:
    with pytest.raises(UnknownJob, match="no job 7"):
        jobs.get(7)
