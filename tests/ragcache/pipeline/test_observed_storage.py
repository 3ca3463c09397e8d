"""Recurring texts outlive the process where the folder says so, and nowhere else."""

from __future__ import annotations

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
from tests.ragcache.pipeline.test_observed import ask
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
        [loaded] = rag.modules.observed.all()
        assert (loaded.id, loaded.encodings, loaded.nbytes) == (
            before.id, before.encodings, before.nbytes,
        )  # fmt: skip
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
        assert rag.modules.observed.all() == []


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
        assert rag.modules.observed.all() == []
        assert rows(rag) == (1, 1)
    with opened(tmp_path / "state", model) as rag:
        assert len(rag.modules.observed.all()) == 1


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
