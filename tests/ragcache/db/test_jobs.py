"""Jobs in the ledger: queued once, run in order, listed in pages, left by their session."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from sqlalchemy import event

from ragcache.db import Database, JobRequest, Jobs, RunningJob
from ragcache.db.jobs import cancel_jobs, complete, deleted_meanwhile, hand_over, note_deleted
from ragcache.db.sessions import end_sessions
from ragcache.db.tables import JobTable
from ragcache.errors import (
    IdempotencyConflict,
    InvalidRequest,
    JobCanceled,
    JobTaken,
    LedgerUnavailable,
    QueueFull,
    UnknownJob,
)
from tests.ragcache.conftest import make_key

NOTES, PLANS = "collection notes", "collection plans"


@pytest.fixture
def jobs(database: Database) -> Jobs:
    return Jobs(database, "here")


def put(jobs: Jobs, target: str = NOTES, *documents: str, **fields: Any) -> tuple[int, bool]:
    given = {"digest": "digest", "idempotency_key": None} | fields
    return jobs.queue(JobRequest(target, documents=documents, **given), 1000)


def taken(jobs: Jobs) -> int | None:
    job = jobs.take()
    return None if job is None else job.id


def store(jobs: Jobs, job: int) -> None:
    with jobs.database.transaction() as session:
        complete(session, RunningJob(job, jobs.session))


def test_a_request_is_queued_once_in_a_namespace(jobs: Jobs) -> None:
    job, new = put(jobs, idempotency_key="key")
    assert new
    assert put(jobs, idempotency_key="key") == (job, False)
    with pytest.raises(IdempotencyConflict, match="'key'"):
        put(jobs, idempotency_key="key", digest="another")
    assert put(jobs.within("tenant"), idempotency_key="key", digest="another")[1]
    plain = [put(jobs)[0] for _ in range(2)]
    assert len({job, *plain}) == 3


def test_a_request_that_ended_early_is_queued_once_more(jobs: Jobs, database: Database) -> None:
    job, _ = put(jobs, idempotency_key="key")
    assert taken(jobs) == job
    jobs.expect(job, [make_key(1)])
    jobs.fail(job, ValueError("no"))
    with pytest.raises(IdempotencyConflict):
        put(jobs, idempotency_key="key", digest="another")
    later = Jobs(database, "there")
    assert put(later, idempotency_key="key") == (job, True)
    assert put(jobs, idempotency_key="key") == (job, False), "one caller runs it"
    row = jobs.get(job)
    assert (row.status, row.error, row.started_at, row.finished_at) == ("queued", "", None, None)
    assert row.states == 1
    assert (taken(jobs), taken(later)) == (None, job), "it is the session's that queued it last"


def test_documents_that_wait_have_a_budget_of_bytes(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, _ = put(jobs, NOTES, "x" * 5000, idempotency_key="key")  # alone
    with pytest.raises(QueueFull, match="5,000 bytes"):
        put(jobs.within("tenant"), PLANS, "x")
    assert put(jobs, NOTES, "x" * 5000, idempotency_key="key") == (large, False)
    taken(jobs)
    with pytest.raises(QueueFull, match="of 5,000 bytes"):
        put(jobs, PLANS, "x")
    store(jobs, large)
    for _ in range(2):
        put(jobs, NOTES, "x" * 500)
    monkeypatch.setattr("ragcache.db.jobs.MAX_JOBS", 2)
    with pytest.raises(QueueFull, match="2 ingestions wait"):
        put(jobs)
    assert len(jobs.page().items) == 3, "a refused request leaves no row"


def test_jobs_run_in_order_and_namespaces_take_turns(jobs: Jobs, database: Database) -> None:
    red, blue, green = jobs, jobs.within("blue"), jobs.within("green")
    first, second = put(red)[0], put(red)[0]
    others = [put(red, f"collection {n}")[0] for n in range(2)]
    tenants = [put(blue)[0], put(blue, PLANS)[0], put(green)[0]]
    elsewhere = put(Jobs(database, "there"), PLANS)[0]
    order = [taken(jobs) for _ in range(6)]
    assert order == [first, tenants[0], tenants[2], others[0], tenants[1], None]
    assert jobs.any_waits(), "two jobs of a namespace run at a time"
    store(jobs, others[0])
    assert taken(jobs) == others[1]
    store(jobs, others[1])
    assert (taken(jobs), jobs.any_waits()) == (None, True), "the second waits for the first"
    store(jobs, first)
    assert (taken(jobs), jobs.any_waits()) == (second, False)
    assert taken(Jobs(database, "there")) == elsewhere, "its own session runs it"


def test_a_direct_call_takes_its_turn(jobs: Jobs) -> None:
    waiting, _ = put(jobs)
    ran: list[int] = []

    def call() -> None:
        with jobs.turn(NOTES) as job:
            ran.append(job)
            jobs.finish(job)

    with jobs.turn(PLANS) as other:
        jobs.finish(other)
    thread = threading.Thread(target=call)
    thread.start()
    while len(jobs.page().items) < 3:
        pass
    later, _ = put(jobs)
    assert taken(jobs) == waiting
    assert ran == []
    store(jobs, waiting)
    thread.join(20)
    assert ran == [other + 1]
    assert taken(jobs) == later
    with pytest.raises(ValueError, match="no"), jobs.turn(PLANS) as failed:
        raise ValueError("no")
    assert jobs.get(failed).status == "failed"


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


def test_a_job_ends_those_of_its_target_in_its_namespace(jobs: Jobs) -> None:
    other = jobs.within("tenant")
    for each in (jobs, other):
        failed = each.begin(NOTES, 1)
        each.expect(failed, [make_key(1)])
        each.fail(failed, ValueError("no"))
    job = jobs.begin(NOTES, 1)
    store(jobs, job)
    assert [row.states for row in (*jobs.page().items, *other.page().items)] == [0, 0, 1]
    assert (jobs.get(job).done, jobs.get(job).status) == (1, "done")


def refuse(*_: object) -> None:
    raise LedgerUnavailable("the server does not answer")


def test_a_request_that_the_ledger_cut_off_runs_again(
    jobs: Jobs, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    for job in (put(jobs, NOTES, "text")[0], put(jobs, PLANS, "text")[0]):
        assert taken(jobs) == job
        with monkeypatch.context() as patched:
            if job % 2:  # the ledger is still away when the job ends
                patched.setattr(Database, "transaction", refuse)
            jobs.fail(job, LedgerUnavailable("the server does not answer"))
        jobs.within("tenant").end_late()
        assert jobs.get(job).status == "queued"
        again = Jobs(database, "there").take()
        assert again is not None
        assert (again.id, again.documents) == (job, ("text",)), "any process runs it"
        jobs.end_late()
        assert jobs.get(job).status == "running", "it is another one's now"


def test_a_direct_call_that_the_ledger_cut_off_ends_late(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(patched: pytest.MonkeyPatch) -> None:
        with jobs.turn(NOTES):
            patched.setattr(Database, "transaction", refuse)
            refuse()

    with monkeypatch.context() as patched, pytest.raises(LedgerUnavailable):
        cut_off(patched)
    later, _ = put(jobs)
    assert taken(jobs) is None, "it waits for the call"
    jobs.end_late()
    [row] = [row for row in jobs.listed() if row.id != later]
    assert (row.status, row.error) == ("failed", "LedgerUnavailable: the server does not answer")
    assert taken(jobs) == later


def test_the_ledger_lists_the_last_jobs(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragcache.db.jobs.JOBS_KEPT", 3)
    failed = jobs.begin(PLANS, 1)
    jobs.expect(failed, [make_key(1)])
    jobs.fail(failed, ValueError("no"))
    waits, _ = put(jobs.within("tenant"))
    stored = [jobs.begin(NOTES, 1) for _ in range(6)]
    for job in stored:
        store(jobs, job)
    listed = [row.id for row in jobs.listed()]
    assert listed == [failed, waits, *stored[-3:]], "open jobs stay, and jobs that own states"
    assert put(jobs)[0] > stored[-1], "no id is given twice"


def test_the_end_of_a_job_binds_no_more_values_after_many(jobs: Jobs, database: Database) -> None:
    """PostgreSQL takes 65,535 values in a statement, SQLite 32,766."""
    bound = list[int]()

    def note(_: Any, __: Any, ___: str, values: Any, *____: Any) -> None:
        bound.append(len(values))

    def most() -> int:
        bound.clear()
        store(jobs, jobs.begin(NOTES, 1))
        return max(bound)

    event.listen(database.engine, "before_cursor_execute", note)
    first = most()
    for _ in range(20):
        store(jobs, jobs.begin(NOTES, 1))
    assert most() == first > 0


def test_an_ended_session_leaves_requests_and_stops_direct_calls(
    jobs: Jobs, database: Database
) -> None:
    job, _ = put(jobs, NOTES, "a", "b", options={"sync": True})
    other = Jobs(database, "there")
    assert taken(other) is None, "its session lives"
    assert taken(jobs) == job
    with jobs.running(PLANS, 2) as direct:
        jobs.expect(direct, [make_key(1)])
        with database.transaction() as session:
            hand_over(session, ["here"])
            end_sessions(session, ["here"])
    row = jobs.get(direct)
    assert (row.status, row.states, row.ended) == ("interrupted", 1, True)
    assert "the same documents again" in row.error
    assert jobs.get(job).status == "queued"
    adopted = other.take()
    assert adopted is not None
    assert (adopted.id, adopted.target, adopted.documents) == (job, NOTES, ("a", "b"))
    assert (adopted.options, other.take()) == ({"sync": True}, None)
    for late in (lambda: jobs.expect(job, []), lambda: jobs.describe(job, 1, {}),
                 lambda: store(jobs, job)):  # fmt: skip
        with pytest.raises(JobTaken, match="another process goes on"):
            late()
    jobs.fail(job, ValueError("late"))
    jobs.finish(job)
    assert jobs.get(job).status == "running", "only the one that runs it may end it"
    store(other, job)
    assert jobs.get(job).status == "done"


def test_a_job_that_waits_or_runs_can_be_canceled(jobs: Jobs, database: Database) -> None:
    running, waiting = (put(jobs, NOTES, "a", idempotency_key=key)[0] for key in "ab")
    assert taken(jobs) == running
    jobs.expect(running, [make_key(1)])
    assert jobs.cancel(waiting).status == "canceled"
    assert jobs.cancel(jobs.get(running).public_id).states == 1, "for the next of the collection"
    for late in (lambda: jobs.expect(running, []), lambda: store(jobs, running)):
        with pytest.raises(JobCanceled, match="it stored nothing"):
            late()
    jobs.fail(running, ValueError("late"))
    assert [row.status for row in jobs.page().items] == ["canceled"] * 2
    assert taken(jobs) is None
    for call in (jobs.within("tenant").cancel, jobs.within("tenant").get):
        with pytest.raises(UnknownJob, match=f"no job {running}"):
            call(running)
    assert put(jobs, NOTES, "a", idempotency_key="b") == (waiting, True)
    assert taken(jobs) == waiting
    store(jobs, waiting)
    assert jobs.cancel(waiting).status == "done"
    direct = jobs.begin(PLANS, 1)
    with database.transaction() as session:
        cancel_jobs(session, JobTable.target == PLANS)
    assert jobs.get(direct).status == "canceled"


def test_open_jobs_are_told_of_deleted_documents(jobs: Jobs, database: Database) -> None:
    ended, _ = put(jobs)
    taken(jobs)
    store(jobs, ended)
    first, plans, last = put(jobs)[0], put(jobs, PLANS)[0], put(jobs)[0]
    with database.transaction() as session:
        for deleted in ("b", "ac"):
            note_deleted(session, jobs.namespace, NOTES, list(deleted))
        told = [deleted_meanwhile(session, job) for job in (ended, first, plans, last)]
    assert told == [frozenset(), frozenset("abc"), frozenset(), frozenset("abc")]
