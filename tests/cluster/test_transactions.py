"""Transactions and rows that questions cost a ledger of several processes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from sqlalchemy import event

from ragcache import GenerationParams, RagCache
from tests.cluster.conftest import Measured
from tests.cluster.machines import wait_until
from tests.cluster.services import COLLECTION, Services

SHEDS = {f"shed {n}": f"The anchor of ship {n} is kept in shed {n}. " * 20 for n in range(4)}
BAYS = {f"bay {n}": f"The halyard of ship {n} is kept in bay {n}. " * 20 for n in range(4)}
_UPKEEP = "ragcache-sweep", "ragcache-heart"


@dataclass
class Cost:
    """Transactions and changed rows: of questions, and of the upkeep, where it changes anything."""

    question: Counter[str] = field(default_factory=Counter)
    upkeep: Counter[str] = field(default_factory=Counter)


@contextmanager
def counted(rag: RagCache) -> Iterator[Cost]:
    """Counts what this process does in its ledger."""
    engine, cost = rag._internals.shared.database.engine, Cost()

    def of_this_thread() -> Counter[str]:
        upkeep = threading.current_thread().name in _UPKEEP
        return cost.upkeep if upkeep else cost.question

    def begin(_: Any) -> None:
        of_this_thread()["transactions"] += 1

    def execute(_: Any, cursor: Any, statement: str, *__: Any) -> None:
        if statement.startswith(("INSERT", "UPDATE", "DELETE", "WITH")):
            of_this_thread()["changed rows"] += cursor.rowcount

    event.listen(engine, "begin", begin)
    event.listen(engine, "after_cursor_execute", execute)
    yield cost
    event.remove(engine, "begin", begin)
    event.remove(engine, "after_cursor_execute", execute)


@pytest.fixture
def rag(services: Services) -> Iterator[RagCache]:
    """A process with a disk of its own beside services."""
    remote = f"file://{services.folder / 'remote'}"
    folder = services.folder / "here"
    with RagCache.open(folder, ledger=services.url, remote=remote, max_tokens=1) as opened:
        yield opened


def test_the_first_use_of_others_states_costs_three_transactions(
    services: Services, rag: RagCache, measured: Measured
) -> None:
    other = services.start("a")
    other.ingest(SHEDS)

    def ask(word: str, tier: str) -> Cost:
        """Return the cost of a question to the reader, whose answers also read quoted documents."""
        options = GenerationParams(max_tokens=1)
        with counted(rag) as cost:
            answer = rag.ask(
                f"Where is the {word} kept?", collection=COLLECTION, k=4, generation=options
            )
        assert {source.tier for source in answer.sources} == {tier}
        return cost

    measured("the first question of a process", dict(ask("anchor", "remote").question))
    other.ingest(BAYS)
    first = ask("halyard", "remote")
    measured("the first question over what others have just encoded", dict(first.question))
    assert first.question["transactions"] <= 3
    assert first.question["changed rows"] == 0
    with counted(rag) as kept:
        warm = ask("halyard", "host")
        blobs = services.folder / "here" / "states"
        wait_until(20, lambda: len(list(blobs.glob("??/*.safetensors"))) >= 4)
    measured("a warm question", dict(warm.question))
    assert warm.question["transactions"] <= 2
    assert warm.question["changed rows"] == 0
    measured("the upkeep until its states are on this disk", dict(kept.upkeep))


def test_scaffolds_of_another_process_are_known_at_once(
    services: Services, rag: RagCache, measured: Measured
) -> None:
    other = services.start("a")
    other.ingest(SHEDS)
    question = "Where is the anchor kept?"

    def scaffolds() -> set[str]:
        asked = other.ask(question, 2)
        return {source["scaffold"] for source in asked.json()["sources"]}

    assert scaffolds() == {""}
    named = [s.document for s in rag.ask(question, collection=COLLECTION, k=2).sources]
    together = " ".join(rag.collections.add_scaffold(COLLECTION, named))
    found = scaffolds()
    measured("scaffolds that the next question of another process reads", found)
    assert found == {together}
