"""Callers keep states of documents from eviction, within a budget and until a time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragcache import RagCache, SourceDocument
from ragcache.errors import ConfigurationError, PinBudgetExceeded, UnknownCollection
from ragcache.models import LoadedModel
from ragcache.pipeline import Keeper, pins


@pytest.fixture
def rag(tmp_path: Path, tiny_reader: LoadedModel) -> Iterator[RagCache]:
    with RagCache.open(tmp_path / "state", tiny_reader, embedding="none") as opened:
        documents = [SourceDocument(name, f"The boat {name} is red.") for name in ("pipit", "wren")]
        opened.ingest("boats", documents)
        yield opened


def pinned(rag: RagCache) -> set[str]:
    return {each.document for each in rag.modules.all("boats") if each.pinned}


def test_a_pin_keeps_documents_until_it_ends(rag: RagCache) -> None:
    pin = rag.pins.add("boats", ["pipit"], keeper=Keeper("key 1"))
    assert (pin.owner, pin.documents, pin.expires_at) == ("key 1", ("pipit",), None)
    assert pin.nbytes > 0
    assert pinned(rag) == {"pipit"}
    assert rag.pins.list("key 1") == [pin]
    assert rag.pins.list("key 2") == []
    assert not rag.pins.end(pin.id, "key 2")
    assert rag.pins.end(pin.id, "key 1")
    assert not rag.pins.end(pin.id)
    assert pinned(rag) == set()


def test_states_stay_pinned_for_others(rag: RagCache) -> None:
    rag.modules.pin("boats", ["wren"])
    first = rag.pins.add("boats", keeper=Keeper("key 1"))
    second = rag.pins.add("boats", ["pipit"], keeper=Keeper("key 2"))
    rag.pins.end(first.id)
    assert pinned(rag) == {"pipit", "wren"}, "another key and an operator keep them"
    rag.pins.end(second.id)
    assert pinned(rag) == {"wren"}


def test_a_pin_ends_after_its_seconds(rag: RagCache, monkeypatch: pytest.MonkeyPatch) -> None:
    rag.pins.add("boats", ["wren"])
    pin = rag.pins.add("boats", ["pipit"], seconds=60)
    assert pin.expires_at == pytest.approx(time.time() + 60, abs=30)
    later = time.time() + 61
    monkeypatch.setattr(pins.time, "time", lambda: later)
    [left] = rag.pins.list()
    assert left.documents == ("wren",)
    assert pinned(rag) == {"wren"}


def test_pins_keep_to_a_budget(rag: RagCache) -> None:
    one = rag.pins.add("boats", ["pipit"], keeper=Keeper("key 1"))
    keeper = Keeper("key 1", one.nbytes + 1)
    with pytest.raises(PinBudgetExceeded, match="end other pins"):
        rag.pins.add("boats", ["wren"], keeper=keeper)
    assert pinned(rag) == {"pipit"}
    rag.pins.end(one.id)
    rag.pins.add("boats", ["wren"], keeper=keeper)
    assert pinned(rag) == {"wren"}


def test_pins_that_cannot_be(rag: RagCache) -> None:
    with pytest.raises(UnknownCollection):
        rag.pins.add("none")
    with pytest.raises(ConfigurationError, match="more than 0 seconds"):
        rag.pins.add("boats", seconds=0)
    assert rag.within("tenant").pins.list() == []
