"""Recurring texts outlive the process where the folder says so, and nowhere else."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from ragcache import RagCache
from ragcache.db import Database
from ragcache.db.tables import ObservedModuleTable, ObservedStateTable
from ragcache.errors import LedgerUnavailable
from ragcache.models import LoadedModel
from ragcache.pipeline import observed as module
from ragcache.store.verify import verify
from tests.ragcache.conftest import make_key
from tests.ragcache.pipeline.test_observed import ask, chat
from tests.ragcache.test_recurrence import passage

pytestmark = pytest.mark.slow


def opened(folder: Path, model: LoadedModel, storage: str = "disk", **options: Any) -> RagCache:
    return RagCache.open(
        folder,
        model,
        module_tokens=512,
        force_modes=True,
        observed_storage=storage,
        conversation_storage="none",
        **options,
    )


def observe(rag: RagCache, seed: int = 1) -> None:
    """Repeats a text in prompts until its states have been read twice, and are on the disk."""
    for number in range(4):
        ask(rag, [10 * seed + number, seed], f"Question {number}?")
    rag.internals.shared.store.sweep()
    assert passage(seed, 5) in [each.row.text for each in rag.modules.observed.all()]


def observed_in(rag: RagCache) -> list[module.ObservedModule]:
    """The modules, after the stored ones have been loaded in the background."""
    rag.internals.shared.observing.submit(lambda: None).result()
    return rag.modules.observed.all()


def rows(rag: RagCache) -> tuple[int, int]:
    """Numbers of stored texts and of their states."""
    with rag.internals.shared.database.reading() as session:
        return tuple(  # type: ignore[return-value]
            session.scalar(select(func.count()).select_from(table)) or 0
            for table in (ObservedModuleTable, ObservedStateTable)
        )


def blobs(folder: Path) -> set[str]:
    return {path.stem for path in (folder / "state" / "states").glob("??/*.safetensors")}


def test_a_text_is_read_from_the_disk_after_a_restart(tmp_path: Path, model: LoadedModel) -> None:
    with opened(tmp_path / "state", model) as rag:
        observe(rag)
        [before] = rag.modules.observed.all()
        assert rows(rag) == (1, 1)
        assert set(before.keys) <= blobs(tmp_path)
    with opened(tmp_path / "state", model) as rag:
        [loaded] = observed_in(rag)
        assert (loaded.id, loaded.keys, loaded.nbytes) == (before.id, before.keys, before.nbytes)
        answer = ask(rag, [99, 1], "And now?")
        assert answer.mode == "recognized:rooted"
        assert answer.reuse.cached_tokens == len(before.token_ids)
        assert answer.reuse.created_tokens == rag.stats().encoded == 0
        assert answer.reuse.bytes_moved["disk"] > 0
        other = ask(rag.within("other"), [99, 1], "And now?")
        assert other.mode == "exact", "another namespace has not seen it"
        assert verify(rag.internals.shared.store).clean


def test_nothing_is_stored_by_default(tmp_path: Path, model: LoadedModel) -> None:
    with opened(tmp_path / "state", model, "memory") as rag:
        observe(rag)
        [observed] = rag.modules.observed.all()
        assert rows(rag) == (0, 0)
        assert not set(observed.keys) & blobs(tmp_path)
    ledger = (tmp_path / "state" / "ledger.sqlite").read_bytes()
    assert passage(1, 5).encode()[:200] not in ledger
    with opened(tmp_path / "state", model) as rag:
        assert observed_in(rag) == []


def test_forgotten_texts_leave_ledger_and_disk(tmp_path: Path, model: LoadedModel) -> None:
    with opened(tmp_path / "state", model) as rag:
        observe(rag, 1)
        observe(rag, 2)
        one, other = rag.modules.observed.all()
        assert rag.modules.observed.forget([one.id]) == 1
        assert rows(rag) == (1, 1)
        assert not set(one.keys) & blobs(tmp_path)
        assert set(other.keys) <= blobs(tmp_path)
        assert rag.modules.observed.forget() == 1
        assert rows(rag) == (0, 0)
        assert not set(other.keys) & blobs(tmp_path)
        assert verify(rag.internals.shared.store).clean


def test_stored_texts_end_after_their_last_use(
    tmp_path: Path, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "state", model) as rag:
        store, observed = rag.internals.shared.store, rag.modules.observed
        observe(rag)
        [before] = observed.all()
        now, day = time.time(), module.SECONDS_TO_LIVE["disk"]
        store.on_heartbeat.clear()  # the test says when it beats
        monkeypatch.setattr(time, "time", lambda: now + 0.9 * day)
        ask(rag, [98, 1], "Still?")
        monkeypatch.setattr(time, "time", lambda: now + 0.95 * day)
        observed.end_unused()
        monkeypatch.setattr(time, "time", lambda: now + 1.5 * day)
        observed.end_unused()
        store.sweep()
        assert rows(rag) == (1, 1), "it was used since"
        assert len(observed.all()) == 1
        monkeypatch.setattr(time, "time", lambda: now + 2 * day)
        observed.end_unused()
        store.sweep()
        assert observed.all() == []
        assert rows(rag) == (0, 0)
        assert not set(before.keys) & blobs(tmp_path)


def test_a_text_beyond_the_budget_leaves_the_disk(tmp_path: Path, model: LoadedModel) -> None:
    tokens = len(model.encode_untrusted(passage(1, 5)))
    room = int(1.5 * tokens * model.causal.bytes_per_token)
    with opened(tmp_path / "state", model, observed_bytes=room) as rag:
        observe(rag, 1)
        [first] = rag.modules.observed.all()
        observe(rag, 2)
        [second] = rag.modules.observed.all()
        assert first.id != second.id
        rag.internals.shared.observing.submit(lambda: None).result()
        assert rows(rag) == (1, 1)
        assert not set(first.keys) & blobs(tmp_path)
        assert verify(rag.internals.shared.store).clean


def test_states_of_another_model_are_left_alone(
    tmp_path: Path, model: LoadedModel, quick_reader: LoadedModel
) -> None:
    with opened(tmp_path / "state", model) as rag:
        observe(rag)
    with opened(tmp_path / "state", quick_reader) as rag:
        assert observed_in(rag) == []
        assert rows(rag) == (1, 1)
    with opened(tmp_path / "state", model) as rag:
        assert len(observed_in(rag)) == 1


def test_a_text_has_states_of_several_models(
    tmp_path: Path, model: LoadedModel, quick_reader: LoadedModel
) -> None:
    keys = {}
    for each in (model, quick_reader):
        with opened(tmp_path / "state", each) as rag:
            observe(rag)
            [observed] = observed_in(rag)
            keys[each] = observed.keys
    for each in (model, quick_reader):
        with opened(tmp_path / "state", each) as rag:
            assert rows(rag) == (1, 2)
            [observed] = observed_in(rag)
            assert observed.keys == keys[each]
            assert ask(rag, [99, 1], "And now?").reuse.created_tokens == 0


def test_without_the_ledger_texts_are_observed_in_memory(
    tmp_path: Path, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "state", model) as rag:
        with monkeypatch.context() as away:

            def fail(*_: object) -> None:
                raise LedgerUnavailable("away")

            for name in ("keep", "refresh", "stored"):
                away.setattr(module.ObservedTexts, name, fail)
            ask(rag, [2, 1], "Who?")
            ask(rag, [3, 1], "Why?")
            rag.modules.observed.end_unused()
            rag.modules.observed.load()
            rag.internals.shared.observing.submit(lambda: None).result()
        assert ask(rag, [4, 1], "When?").mode == "recognized:rooted"
        assert rows(rag) == (0, 0)


def test_tables_are_empty_where_nothing_was_stored(tmp_path: Path) -> None:
    database = Database.open(tmp_path / "ledger.sqlite")
    assert module.ObservedTexts(database).stored() == []
    assert module.ObservedTexts(database).delete() == []
    database.close()


def test_stored_texts_are_loaded_in_the_background(
    tmp_path: Path, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request to a namespace builds it, and waits for no tokenizer."""
    threads = []
    stored = module.ObservedTexts.stored

    def read(texts: module.ObservedTexts) -> list[module.ObservedText]:
        threads.append(threading.current_thread().name)
        return stored(texts)

    monkeypatch.setattr(module.ObservedTexts, "stored", read)
    with opened(tmp_path / "state", model) as rag:
        assert observed_in(rag) == []
    assert [name.split("_")[0] for name in threads] == ["ragcache-observed"]


def test_loaded_texts_do_not_replace_newer_modules(tmp_path: Path, model: LoadedModel) -> None:
    with opened(tmp_path / "state", model) as rag:
        observe(rag, 1)
        observe(rag, 2)
        before = rag.modules.observed.all()
        assert all(each.hits for each in before)
        rag.modules.observed.forget([before[1].id])
        rag.modules.observed.load()
        assert rag.modules.observed.all() == before[:1]


def test_uses_are_written_now_and_then(
    tmp_path: Path, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An end a day ahead needs no transaction at every heartbeat, and no failed one is lost."""
    refreshed: list[float] = []
    refresh = module.ObservedTexts.refresh

    def count(texts: module.ObservedTexts, ids: list[str], expires_at: float) -> None:
        refreshed.append(expires_at)
        if len(refreshed) == 1:
            raise LedgerUnavailable("away")
        refresh(texts, ids, expires_at)

    monkeypatch.setattr(module.ObservedTexts, "refresh", count)
    with opened(tmp_path / "state", model) as rag:
        observed = rag.modules.observed
        observe(rag)
        rag.internals.shared.store.on_heartbeat.clear()  # the test says when it beats
        now, day = time.time(), module.SECONDS_TO_LIVE["disk"]
        for number, (days, writes) in enumerate([(0.001, 0), (0.02, 1), (0.021, 2), (0.022, 2)]):
            monkeypatch.setattr(time, "time", lambda days=days: now + days * day)
            observed.end_unused()
            assert len(refreshed) == writes, number
        ask(rag, [98, 1], "Still?")
        observed.end_unused()
        assert len(refreshed) == 2
        monkeypatch.setattr(time, "time", lambda: now + 0.04 * day)
        observed.end_unused()
        assert len(refreshed) == 3


def test_a_kept_text_stays_on_the_disk_for_its_time(
    tmp_path: Path, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    day = module.SECONDS_TO_LIVE["disk"]
    with opened(tmp_path / "state", model) as rag:
        store, observed = rag.internals.shared.store, rag.modules.observed
        rag.chat(chat([1], "Who?"), keep={passage(1, 5): 3 * day})
        stored = (len(observed_in(rag)), sum(len(each.keys) for each in observed_in(rag)))
        store.sweep()
        assert rows(rag) == stored
        store.on_heartbeat.clear()  # the test says when it beats
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 2.9 * day)
        store.sweep()
        assert rows(rag) == stored, "it is kept for three days"
        observed.end_unused()
        monkeypatch.setattr(time, "time", lambda: now + 3.5 * day)
        store.sweep()
        assert rows(rag) == stored, "it was kept half a day ago"
        monkeypatch.setattr(time, "time", lambda: now + 4 * day)
        store.sweep()
        assert rows(rag) == (0, 0)


def test_many_texts_are_refreshed_and_deleted(tmp_path: Path) -> None:
    """There are more than one statement has room for."""
    database = Database.open(tmp_path / "ledger.sqlite")
    texts = module.ObservedTexts(database)
    ids = [f"{number:016x}" for number in range(40_000)]
    until = time.time() + 60
    texts.keep(module.ObservedText(ids[-1], "text", (make_key(1),), until))
    texts.refresh(ids, until - 30)
    with database.reading() as session:
        assert session.scalar(select(ObservedModuleTable.expires_at)) == until, "it ends later"
    texts.refresh(ids, until + 30)
    with database.reading() as session:
        assert session.scalar(select(ObservedModuleTable.expires_at)) == until + 30
    assert texts.delete(ids) == [make_key(1)]
    database.close()
