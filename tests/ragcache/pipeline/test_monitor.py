"""Requests as they run and end, and the engine's batch as an operator sees it."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from ragcache import Generation, RagCache, SourceDocument
from ragcache.db import Catalog, Database, NewDocument, NewModule
from ragcache.engine.step import BatchSnapshot, SegmentUse
from ragcache.models import LoadedModel, wrap_causal
from ragcache.pipeline.monitor import RequestRecord, batch_of
from tests.ragcache.conftest import make_key
from tests.tiny_models import tiny_model

DOCUMENTS = [SourceDocument(name, f"The {name} is in the yard.") for name in ("kiln", "lamp")]
QUESTION = "Where is the kiln in the yard?"
LONG = Generation(max_new_tokens=400, ignore_eos=True)
SCHEMA = '<schema name="trip"><module name="sea">The tide is out.</module></schema>'
PROMPT = '<prompt schema="trip"><sea/>When is it in?</prompt>'


@pytest.fixture(scope="module")
def wide(reader: LoadedModel) -> LoadedModel:
    """A tiny random model of a wide window."""
    config = {"vocab_size": len(reader.tokenizer), "max_position_embeddings": 4096}
    return LoadedModel("tiny", wrap_causal(tiny_model("llama", **config)), reader.tokenizer)


@pytest.fixture
def rag(tmp_path: Path, wide: LoadedModel) -> Iterator[RagCache]:
    with RagCache.open(tmp_path / "state", wide, max_new_tokens=4) as opened:
        opened.ingest("notes", DOCUMENTS)
        yield opened


@pytest.fixture
def records(rag: RagCache) -> SimpleQueue[RequestRecord]:
    seen: SimpleQueue[RequestRecord] = SimpleQueue()
    rag.observe(seen.put)
    return seen


def test_an_answer_is_told_with_all_its_tokens(
    rag: RagCache, records: SimpleQueue[RequestRecord]
) -> None:
    before = time.time()
    answer = rag.ask(QUESTION, collection="notes")
    record = records.get(timeout=20)
    reuse = answer.reuse
    assert (record.namespace, record.kind, record.collection) == ("default", "question", "notes")
    assert (record.outcome, record.error, record.generated) == ("done", "", 4)
    assert record.prompt_tokens == reuse.prompt_tokens == sum(record.tokens.values())
    assert record.cached_tokens == reuse.cached_tokens == record.tokens["host"]
    assert record.computed_tokens == reuse.computed_tokens == record.tokens["computed"]
    assert record.modules == tuple((s.module, s.tier) for s in answer.sources)
    assert record.ttft == answer.timings.first_token
    assert before <= record.started <= time.time()
    assert record.total >= record.ttft
    assert rag.running() == []


def test_what_is_encoded_for_a_question_is_told(
    rag: RagCache, records: SimpleQueue[RequestRecord]
) -> None:
    rag.ask(QUESTION, collection="notes", mode="isolated")
    record = records.get(timeout=20)
    assert record.tokens["encoded"] > 0
    assert record.computed_tokens == record.tokens["encoded"] + record.tokens["computed"]
    rag.ask(QUESTION, collection="notes", mode="exact")
    exact = records.get(timeout=20)
    assert exact.tokens == {"computed": exact.prompt_tokens, "shared": 0}


def test_prompts_and_questions_that_find_nothing_are_told(
    rag: RagCache, records: SimpleQueue[RequestRecord]
) -> None:
    rag.add_schema(SCHEMA)
    rag.prompt(PROMPT)
    prompt = records.get(timeout=20)
    assert (prompt.kind, prompt.collection, prompt.outcome) == ("prompt", "trip", "done")
    rag.ask("Zyxwv?", collection="notes")
    nothing = records.get(timeout=20)
    assert (nothing.outcome, nothing.prompt_tokens, nothing.modules) == ("done", 0, ())


def test_a_request_under_way_is_seen_by_its_namespace(
    rag: RagCache, records: SimpleQueue[RequestRecord]
) -> None:
    other = rag.within("tenant-2")
    with rag.stream(QUESTION, collection="notes", generation=LONG):
        [seen] = rag.running()
        assert (seen.kind, seen.collection, seen.prompt_tokens > 0) == ("question", "notes", True)
        assert other.running() == []
    assert records.get(timeout=20).outcome == "cancelled"


def test_its_state_follows_the_request(rag: RagCache) -> None:
    stream = rag.stream(QUESTION, collection="notes", generation=LONG)
    states = set()
    while not states & {"generating"}:
        [seen] = rag.running()
        states.add(seen.state)
    assert states <= {"waiting", "computing", "generating"}
    assert rag.running()[0].generated > 0
    assert rag.running()[0].age > 0
    stream.close()
    assert rag.running() == []


def test_a_request_that_nobody_waits_for_ends(
    rag: RagCache, records: SimpleQueue[RequestRecord]
) -> None:
    rag.stream(QUESTION, collection="notes", generation=LONG)
    gc.collect()
    record = records.get(timeout=20)
    assert (record.outcome, record.ttft, record.computed_tokens) == ("cancelled", None, 0)


def test_what_fails_is_told_with_its_error(
    rag: RagCache, records: SimpleQueue[RequestRecord]
) -> None:
    late = Generation(max_new_tokens=400, ignore_eos=True, timeout=1e-6)
    with pytest.raises(TimeoutError):
        rag.ask(QUESTION, collection="notes", generation=late)
    record = records.get(timeout=20)
    assert (record.outcome, record.error) == ("failed", "DeadlineExceeded")


def test_an_observer_that_fails_disturbs_nobody(
    rag: RagCache, records: SimpleQueue[RequestRecord]
) -> None:
    def fail(_: RequestRecord) -> None:
        raise RuntimeError

    stop = rag.observe(fail)
    later: SimpleQueue[RequestRecord] = SimpleQueue()
    rag.within("tenant-2").observe(later.put)
    rag.ask(QUESTION, collection="notes")
    assert later.get(timeout=20) == records.get(timeout=20)
    stop()
    rag.ask(QUESTION, collection="notes")
    assert records.get(timeout=20).outcome == "done"


def test_closing_tells_what_it_ends(rag: RagCache, records: SimpleQueue[RequestRecord]) -> None:
    held = rag.stream(QUESTION, collection="notes", generation=LONG)
    rag.close()
    assert records.get_nowait().error == "EngineClosed"
    names = [thread.name for thread in threading.enumerate()]
    assert "ragcache-monitor" not in names
    assert held.question == QUESTION


def test_segments_have_the_names_of_the_namespaces_modules(tmp_path: Path) -> None:
    database = Database.open(tmp_path / "ledger.sqlite")
    for number, namespace in enumerate(("default", "tenant")):
        modules = [NewModule(f"{namespace}#1", "text", [1], make_key(number))]
        document = NewDocument(namespace, "", "", modules)
        Catalog(database, "t", None, namespace).replace_documents("notes", [document])
    uses = tuple(
        SegmentUse(f"{make_key(n)}{part}", 3, 2, 4) for n, part in enumerate(("", "[1:3]"))
    )
    view = BatchSnapshot(5, 2, 0, (*uses, SegmentUse("f" * 64, 1, 2, 4)))
    mine, theirs = (batch_of(view, database, name) for name in ("default", "tenant"))
    assert [segment.module for segment in mine.segments] == ["default#1", None, None]
    assert [(s.module, s.tokens, s.rows) for s in theirs.segments] == [("tenant#1", 3, 4)]
    assert (mine.rows, mine.requests) == (theirs.rows, theirs.requests) == (5, 2)
    assert batch_of(BatchSnapshot(), database, "default").segments == ()
    database.close()
