"""A namespace is deleted with everything in it: in one transaction, in all processes, and alone."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from ragcache import GenerationParams, RagCache, SourceDocument
from ragcache.db import Database, Jobs, NamespaceRows, Records, StoredObjects, namespaces
from ragcache.db.tables import (
    Base,
    EvictionTable,
    FactTable,
    JobTable,
    RetirementTable,
    SessionTable,
    StateTable,
)
from ragcache.errors import (
    ConfigurationError,
    JobCanceled,
    NamespaceDeleted,
    StoreFull,
    UnknownCollection,
    UnknownNamespace,
)
from ragcache.models import LoadedModel
from ragcache.pipeline.module_states import StateEncoder
from ragcache.states import KVKey
from ragcache.store.verify import verify
from tests.forks import ForkedPython
from tests.ragcache.conftest import make_key
from tests.ragcache.pipeline.conftest import DOCUMENTS
from tests.ragcache.pipeline.test_observed import ask
from tests.ragcache.test_recurrence import passage

SCHEMA = '<schema name="boats"><module name="pipit">Pipit is moored at the quay.</module></schema>'
LATER = GenerationParams(max_tokens=4, ignore_eos=True)
LOGS = {EvictionTable, FactTable, RetirementTable, SessionTable}
"""Tables without anything of a namespace: keys of states that have gone, and processes."""


def opened(folder: Path, model: LoadedModel, where: Path | str | None = None) -> RagCache:
    return RagCache.open(
        folder,
        model,
        module_tokens=512,
        force_modes=True,
        observed_storage="disk",
        conversation_storage="disk",
        min_prefix_tokens=64,
        **({} if where is None else {"ledger": url_of(where)}),
    )


def url_of(where: Path | str) -> str:
    return where if isinstance(where, str) else f"sqlite:///{where}"


def talk(rag: RagCache, name: str = "mine") -> None:
    messages = [{"role": "user", "content": passage(7, 9)}]
    rag.chat(messages, generation=LATER.replace(prompt_cache_key=name))
    rag.internals.shared.keeping.submit(lambda: None).result()


def fill(rag: RagCache) -> None:
    """Store something of every kind."""
    rag.ingest("notes", DOCUMENTS)
    rag.collections.set_instruction("notes", "Answer in one word.")
    rag.ask("Where is the key?", collection="notes", generation=LATER)
    rag.ask("Where is the key?", collection="notes", mode="primed", generation=LATER)
    rag.collections.add_scaffold("notes", ["boats", "keys"])
    rag.schemas.add(SCHEMA)
    rag.pins.add("notes", ["boats"])
    for number in range(4):
        ask(rag, [10 + number, 1], f"Question {number}?")
    talk(rag)
    shared = rag.internals.shared
    objects = StoredObjects(shared.database, rag.namespace)
    objects.add("file", {"name": "a.txt"}, content=b"text")
    objects.add("response", {"text": "In the office."}, seconds=60)
    Records(shared.database, "index", rag.namespace).update(["a", "b"])
    shared.store.sweep()


def contents(rag: RagCache) -> dict[str, set[str]]:
    """Return the rows of all tables but the logs, without the times and counts of uses."""
    volatile = {"tick", "last_use", "used_at", "hits", "expires_at"}
    shared = rag.internals.shared
    shared.store.sweep()
    shared.store.ledger.flush()
    found: dict[str, set[str]] = {}
    with shared.database.reading() as session:
        for mapper in Base.registry.mappers:
            if mapper.class_ in LOGS:
                continue
            columns = [each for each in mapper.columns if each.key not in volatile]
            rows = session.execute(select(*columns))
            found[mapper.local_table.name] = {repr(tuple(row)) for row in rows}
    return found


def blobs(folder: Path) -> set[str]:
    return {path.stem for path in (folder / "states").glob("??/*.safetensors")}


@pytest.mark.slow
def test_a_deletion_leaves_nothing_and_touches_nothing_else(
    where: Path | str, tmp_path: Path, model: LoadedModel
) -> None:
    with opened(tmp_path / "state", model, where) as rag:
        fill(rag)
        before, files = contents(rag), blobs(tmp_path / "state")
        lab = rag.within("lab")
        rag.keys.create("operator", role="admin")
        rag.keys.create("lab", namespace="lab")
        kept = contents(rag)["api_keys"]
        fill(lab)
        full = contents(rag)
        foreseen = rag.namespaces.delete("lab", dry_run=True)
        assert contents(rag) == full
        assert blobs(tmp_path / "state") > files
        assert rag.namespaces.delete("lab") == foreseen
        assert rag.namespaces.names() == ["default"]
        after = contents(rag)
        assert len(after.pop("api_keys")) == len(kept) - 1
        before.pop("api_keys")
        assert after == before
        assert blobs(tmp_path / "state") == files
        memory = rag.internals.shared.store.memory
        owned = "".join(after["states"])
        assert all(key in owned for key in memory.top.entries), "the other's states are there"
        assert verify(rag.internals.shared.store).clean
        encoded = rag.stats().encoded
        rag.ask("Where is the key?", collection="notes", generation=LATER)
        assert rag.stats().encoded == encoded
    numbers = (foreseen.collections, foreseen.documents, foreseen.modules, foreseen.schemas)
    assert numbers == (1, 3, 3, 1)
    assert (foreseen.conversations >= 1, foreseen.observed) == (True, 1)
    assert foreseen.objects == {"file": 1, "pin": 1, "response": 1}
    assert (foreseen.records, foreseen.api_keys) == (2, 1)
    assert foreseen.jobs >= 2
    assert foreseen.states == len({row.split("'")[1] for row in full["states"] - before["states"]})
    assert foreseen.nbytes == sum(foreseen.tiers.values()) > 0


def test_a_name_can_be_used_again(tmp_path: Path, model: LoadedModel) -> None:
    with opened(tmp_path, model) as rag:
        lab = rag.within("lab")
        lab.ingest("notes", DOCUMENTS)
        objects = lab.documents
        assert rag.namespaces.delete("lab").documents == 3
        with pytest.raises(UnknownCollection):
            objects.get("notes")
        with pytest.raises(UnknownNamespace, match="known: 'default'"):
            rag.namespaces.delete("lab")
        assert lab.ingest("notes", DOCUMENTS[:1]).added == 1
        assert lab.namespaces.names() == ["default", "lab"]
        assert lab.ask("Where is the boat?", collection="notes", generation=LATER).sources


def test_texts_in_memory_alone_are_forgotten(tmp_path: Path, model: LoadedModel) -> None:
    with RagCache.open(tmp_path, model, module_tokens=512, force_modes=True) as rag:
        lab = rag.within("lab")
        for number in range(3):
            ask(lab, [10 + number, 1], f"Question {number}?")
        [text] = lab.modules.observed.all()
        store = rag.internals.shared.store
        assert set(text.keys) <= set(store.memory.top.entries)
        foreseen = rag.namespaces.delete("lab", dry_run=True)
        assert foreseen.observed == 1
        assert rag.namespaces.delete("lab") == foreseen
        assert not set(text.keys) & set(store.memory.top.entries)
        assert not lab.modules.observed.all()
        assert ask(lab, [20, 1], "And now?").mode == "exact", "nothing of it was seen before"


def test_default_keeps_its_keys(tmp_path: Path, model: LoadedModel) -> None:
    with opened(tmp_path, model) as rag:
        _, secret = rag.keys.create("operator", role="admin")
        rag.ingest("notes", DOCUMENTS)
        foreseen = rag.namespaces.delete("default", dry_run=True)
        assert (foreseen.documents, foreseen.api_keys) == (3, 0)
        assert rag.namespaces.delete("default") == foreseen
        assert rag.collections.names() == []
        found = rag.keys.check(secret).key
        assert found is not None
        assert (found.name, found.namespace) == ("operator", "default")


def test_the_only_keys_are_not_deleted(tmp_path: Path, model: LoadedModel) -> None:
    with opened(tmp_path, model) as rag:
        _, secret = rag.keys.create("lab", namespace="lab")
        for dry_run in (True, False):
            with pytest.raises(ConfigurationError, match="make an operator's key first"):
                rag.namespaces.delete("lab", dry_run=dry_run)
        rag.keys.create("operator", role="admin")
        assert rag.namespaces.delete("lab").api_keys == 1
        assert (rag.keys.check(secret).exist, rag.keys.check(secret).key) == (True, None)


@pytest.mark.parametrize("name", ["a/b", "", "x" * 65])
def test_a_name_that_no_namespace_can_have(tmp_path: Path, model: LoadedModel, name: str) -> None:
    with opened(tmp_path, model) as rag, pytest.raises(ConfigurationError):
        rag.namespaces.delete(name)


def test_blobs_make_room_on_a_full_disk(
    tmp_path: Path, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, model) as rag:
        rag.within("lab").ingest("notes", DOCUMENTS)
        others = blobs(tmp_path) if rag.ingest("notes", DOCUMENTS).added else set()
        retire = namespaces.retire

        def full(*arguments: Any) -> list[KVKey]:
            if len(blobs(tmp_path)) == len(others):
                raise StoreFull("no space left for the ledger")
            return retire(*arguments)

        monkeypatch.setattr(namespaces, "retire", full)
        assert rag.namespaces.delete("lab").documents == 3
        assert verify(rag.internals.shared.store).clean
        assert len(blobs(tmp_path)) == len(others) // 2


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Halt the next encoding: an event for its beginning, and one that lets it go on."""
    encode = StateEncoder._encode_missing
    began, goes_on = threading.Event(), threading.Event()

    def halted(self: StateEncoder, lease: Any, jobs: Any) -> None:
        began.set()
        assert goes_on.wait(60)
        encode(self, lease, jobs)

    monkeypatch.setattr(StateEncoder, "_encode_missing", halted)
    try:
        yield began, goes_on
    finally:
        goes_on.set()


def test_a_running_ingestion_stores_nothing(
    where: Path | str, tmp_path: Path, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, model, where) as rag, ThreadPoolExecutor(1) as pool:
        lab = rag.within("lab")
        with held(monkeypatch) as (began, goes_on):
            ingesting = pool.submit(lab.ingest, "notes", DOCUMENTS)
            assert began.wait(60)
            queued = lab.jobs.submit("notes", [SourceDocument("late", "Late.")])
            assert rag.namespaces.delete("lab").jobs == 2
            goes_on.set()
            with pytest.raises(JobCanceled, match="stored nothing"):
                ingesting.result()
        rag.internals.shared.store.sweep()
        assert rag.namespaces.names() == ["default"]
        assert blobs(tmp_path) == set()
        with rag.internals.shared.database.reading() as session:
            assert not session.scalars(select(JobTable.id)).all()
        assert queued.id not in [each.id for each in lab.jobs.list().items]


@pytest.mark.parametrize("closes", [False, True], ids=["goes on", "closes"])
def test_an_ingestion_of_another_process_leaves_no_preamble(
    closes: bool, tmp_path: Path, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deletion knows no row that names the preamble: none of its states is stored yet."""
    with opened(tmp_path, model) as rag, ThreadPoolExecutor(1) as pool:
        with opened(tmp_path, model) as other, held(monkeypatch) as (began, goes_on):
            ingesting = pool.submit(other.within("lab").ingest, "notes", DOCUMENTS)
            assert began.wait(60)
            rag.namespaces.delete("lab")
            goes_on.set()
            with pytest.raises(JobCanceled, match="stored nothing"):
                ingesting.result()
            if not closes:
                other.internals.shared.keep_up()
                other.internals.shared.store.sweep()
                assert blobs(tmp_path) == set()
        with rag.internals.shared.database.reading() as session:
            assert not session.scalars(select(StateTable.key)).all()
        assert blobs(tmp_path) == set()


def test_of_an_answer_that_runs_nothing_is_kept(tmp_path: Path, model: LoadedModel) -> None:
    with opened(tmp_path, model) as rag:
        lab = rag.within("lab")
        messages = [{"role": "user", "content": passage(7, 9)}]
        stream = lab.stream_chat(messages, generation=LATER.replace(max_tokens=400))
        pieces = iter(stream)
        next(pieces)
        rag.namespaces.delete("lab")
        assert stream.result().finish_reason == "length"
        rag.internals.shared.keeping.submit(lambda: None).result()
        rag.internals.shared.store.sweep()
        assert rag.namespaces.names() == ["default"]
        assert not blobs(tmp_path)


DELETION = "from ragcache_api.cli.main import main; main()"


def delete_elsewhere(folder: Path, where: Path | str) -> None:
    """Delete the namespace `lab` in another process."""
    place = ["--state", str(folder), "--ledger", url_of(where)]
    command = [sys.executable, "-c", DELETION, "namespaces", "rm", "lab", *place]
    assert ForkedPython(command).wait(120) == 0


@pytest.mark.slow
def test_another_process_follows_and_stores_nothing_until_then(
    where: Path | str, tmp_path: Path, model: LoadedModel
) -> None:
    with opened(tmp_path, model, where) as rag:
        shared = rag.internals.shared
        shared.store.on_heartbeat.clear()  # the test says when it beats
        _, secret = rag.keys.create("lab", namespace="lab")
        rag.keys.create("operator", role="admin")
        assert rag.keys.check(secret).key is not None
        lab = rag.within("lab")
        fill(lab)
        delete_elsewhere(tmp_path, where)
        with pytest.raises(NamespaceDeleted):
            lab.ingest("notes", DOCUMENTS)
        with pytest.raises(NamespaceDeleted):
            StoredObjects(shared.database, "lab").add("file", {})
        talk(lab, "late")
        assert rag.namespaces.names() == ["default"]
        shared.keep_up()
        shared.store.sweep()
        assert rag.keys.check(secret).key is None
        assert not shared.store.memory.top.entries
        assert not blobs(tmp_path)
        assert lab.modules.observed.all() == []
        assert lab.ingest("notes", DOCUMENTS[:1]).added == 1
        assert lab.collections.names() == ["notes"]


INGESTION = """
import sys
from ragcache import RagCache, SourceDocument
from ragcache.errors import JobCanceled, NamespaceDeleted

with RagCache.open(sys.argv[1], ledger=sys.argv[2], embedding="none", force_modes=True) as rag:
    documents = [SourceDocument(f"{n}.md", f"The boat {n} is at quay {n}. " * 20) for n in range(400)]
    try:
        rag.within("lab").ingest("notes", documents, progress=lambda done, total: print(done, flush=True))
    except (JobCanceled, NamespaceDeleted) as error:
        print(type(error).__name__)
"""  # noqa: E501


@pytest.mark.slow
def test_an_ingestion_of_another_process_ends(
    where: Path | str, tmp_path: Path, model: LoadedModel
) -> None:
    with opened(tmp_path / "state", model, where) as rag:
        arguments = [str(tmp_path / "state"), url_of(where)]
        command = [sys.executable, "-c", INGESTION, *arguments]
        other = ForkedPython(command, stdout=subprocess.PIPE)
        assert other.stdout is not None
        assert other.stdout.readline().strip().isdecimal()
        assert rag.namespaces.delete("lab").jobs == 1
        last = other.communicate()[0].split()[-1]
        assert last in ("JobCanceled", "NamespaceDeleted")
        assert rag.namespaces.names() == ["default"]
        with rag.internals.shared.database.reading() as session:
            assert not session.scalars(select(StateTable.key)).all()
        assert not blobs(tmp_path / "state")


def test_a_writer_comes_before_a_deletion_or_is_refused(where: Path | str) -> None:
    one, other = Database.open(url_of(where)), Database.open(url_of(where))
    rows, objects = NamespaceRows(one), StoredObjects(other, "lab")
    with closing(one), closing(other), ThreadPoolExecutor(2) as pool:
        for number in range(20):
            objects.add("file", {"number": number})
            writing = pool.submit(objects.add, "file", {"late": number})
            deletion, freed = rows.delete("lab")
            assert isinstance(writing.exception(), NamespaceDeleted | None)
            assert deletion.objects == {"file": 1 if writing.exception() else 2}
            assert freed == []
            assert rows.names() == ["default"]
            assert other.namespaces.pop("lab")
        objects.add("file", {})
        assert [each.value for each in objects.list("file")] == [{}]


def test_states_that_a_job_expects_meanwhile_are_freed(
    where: Path | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job expects them after the deletion has read what the namespace owns."""
    one, other = Database.open(url_of(where)), Database.open(url_of(where))
    read = namespaces._Contents.of
    with closing(one), closing(other), ThreadPoolExecutor(1) as pool:
        NamespaceRows(one).use("lab")
        jobs = Jobs(other, "there", "lab")
        job = jobs.begin("collection notes", 1)
        expecting: list[Future[None]] = []

        def read_and_expect(*arguments: Any) -> Any:
            found = read(*arguments)
            expecting.append(pool.submit(jobs.expect, job, [make_key(1)]))
            wait(expecting, timeout=0.5)
            return found

        monkeypatch.setattr(namespaces._Contents, "of", read_and_expect)
        _, freed = NamespaceRows(one).delete("lab")
        refused = isinstance(expecting[0].exception(), JobCanceled)
        assert refused or make_key(1) in freed
