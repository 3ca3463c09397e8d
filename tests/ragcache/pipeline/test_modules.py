"""Operations of an operator on modules."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from ragcache import RagCache, SourceDocument
from ragcache.errors import ConfigurationError, UnknownModule
from ragcache.models import LoadedModel, wrap_causal
from ragcache.pipeline import Modules
from ragcache.store.verify import verify
from tests.tiny_models import tiny_model

DOCUMENTS = [SourceDocument(name, f"The {name} is in the yard.") for name in ("kiln", "lamp")]


@pytest.fixture
def rag(tmp_path: Path, model: LoadedModel) -> Iterator[RagCache]:
    with RagCache.open(tmp_path / "state", model, max_tokens=4) as opened:
        opened.ingest("notes", DOCUMENTS)
        yield opened


def tiers(rag: RagCache) -> dict[str, tuple[str, ...]]:
    return {row.document: row.tiers for row in rag.modules.all("notes")}


def test_states_are_evicted_and_warmed(rag: RagCache) -> None:
    modules = rag.modules
    gone = modules.evict("notes", ["kiln"])
    assert [(each.action, each.tier) for each in gone] == [("evict", "host"), ("evict", "disk")]
    assert tiers(rag) == {"kiln": (), "lamp": ("disk", "host")}
    made = modules.warm("notes")
    assert [(change.action, change.tier) for change in made] == [("encode", "host")]
    assert tiers(rag) == {"kiln": ("disk", "host"), "lamp": ("disk", "host")}
    assert modules.warm("notes") == []


@pytest.mark.parametrize("similar", [False, True])
def test_states_that_cannot_move_belong_to_modules(
    tmp_path: Path, reader: LoadedModel, similar: bool
) -> None:
    causal = wrap_causal(tiny_model("gpt2", vocab_size=len(reader.tokenizer)))
    model = LoadedModel("tiny", causal, reader.tokenizer)
    text = "\n\n".join(f"# Shelf {n}\n\nLamp {n} is on shelf {n}. " * 4 for n in range(3))
    document = SourceDocument("lamps", text)
    with RagCache.open(tmp_path / "state", model, module_tokens=64, force_modes=True) as rag:
        made = rag.ingest("notes", [document])
        assert made.modules > 2
        rag.collections.set_priming("notes", similar=similar)
        assert rag.modules.warm("notes", mode="rooted") == [], "ingestion encoded them"
        assert len(rag.modules.warm("notes", mode="primed")) == made.modules
        assert rag.modules.warm("notes", mode="primed") == []
        assert verify(rag.internals.shared.store).clean
        assert rag.ingest("notes", [document]).encoded == 0


def test_states_move_down_and_up(rag: RagCache) -> None:
    [down] = rag.modules.move("notes", "disk", ["kiln"])
    assert (down.tier, down.to) == ("host", "disk")
    assert tiers(rag)["kiln"] == ("disk",)
    [up] = rag.modules.move("notes", "host", ["kiln"])
    assert (up.tier, up.to) == ("disk", "host")
    assert tiers(rag)["kiln"] == ("disk", "host")
    with pytest.raises(ConfigurationError, match="no tier 'tape' here; tiers: host, disk"):
        rag.modules.move("notes", "tape")


def limits(rag: RagCache) -> dict[str, float | None]:
    return {row.document: row.expires_at for row in rag.modules.all("notes")}


def ids(rag: RagCache, *documents: str) -> list[int]:
    return [row.id for row in rag.modules.all("notes") if row.document in documents]


def test_states_expire_and_are_encoded_again_without_a_limit(rag: RagCache) -> None:
    limited = rag.modules.expire(ids(rag, "kiln"), 0)
    assert [(each.action, each.tier) for each in limited] == [
        ("expire", "host"),
        ("expire", "disk"),
    ]
    rag.internals.shared.store.sweep()
    assert tiers(rag) == {"kiln": (), "lamp": ("disk", "host")}
    rag.modules.warm("notes")
    rag.internals.shared.store.sweep()
    assert tiers(rag) == {"kiln": ("disk", "host"), "lamp": ("disk", "host")}
    assert limits(rag) == {"kiln": None, "lamp": None}


def test_pins_and_limits_are_listed_and_taken_back(rag: RagCache) -> None:
    assert len(rag.modules.pin("notes", ["kiln"])) == 2
    pinned = {row.document: row.pinned for row in rag.modules.all()}
    assert pinned == {"kiln": True, "lamp": False}
    rag.modules.unpin("notes")
    assert not any(row.pinned for row in rag.modules.all())
    before = time.time()
    rag.modules.expire(ids(rag, "kiln"), 60.0)
    at = limits(rag)["kiln"]
    assert at is not None
    assert before + 60 <= at <= time.time() + 60
    assert limits(rag)["lamp"] is None
    lifted = rag.modules.expire(ids(rag, "kiln", "lamp"), None)
    assert [change.action for change in lifted] == ["keep"] * 4
    for seconds in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigurationError, match="expire after 0 seconds or more, not"):
            rag.modules.expire(ids(rag, "kiln"), seconds)
    with pytest.raises(UnknownModule, match="no module 999"):
        rag.modules.expire([*ids(rag, "kiln"), 999], 1)
    for wrong in ("c", ["c"], [1.5], [True]):
        with pytest.raises(ConfigurationError, match="it takes a list of whole numbers"):
            rag.modules.expire(wrong, 1)  # type: ignore[arg-type]
    with pytest.raises(UnknownModule):
        rag.within("other").modules.expire(ids(rag, "kiln"), 1)
    assert limits(rag) == {"kiln": None, "lamp": None}


@pytest.mark.parametrize(
    ("changes", "call"),
    [
        (1, lambda modules, _: modules.warm("notes", dry_run=True)),
        (3, lambda modules, _: modules.pin("notes", dry_run=True)),
        (3, lambda modules, _: modules.unpin("notes", dry_run=True)),
        (3, lambda modules, _: modules.evict("notes", dry_run=True)),
        (1, lambda modules, _: modules.move("notes", "disk", dry_run=True)),
        (3, lambda modules, every: modules.expire(every, 0, dry_run=True)),
    ],
)
def test_a_dry_run_changes_nothing(
    rag: RagCache, changes: int, call: Callable[[Modules, list[int]], Sequence[object]]
) -> None:
    """The kiln is in both tiers, and the lamp on the disk alone or, to be warmed, in none."""
    rag.modules.evict("notes", ["lamp"], tier="host")
    if changes == 1:
        rag.modules.evict("notes", ["lamp"])
    before = rag.modules.all("notes")
    assert len(call(rag.modules, ids(rag, "kiln", "lamp"))) == changes
    assert rag.modules.all("notes") == before


def test_modules_tell_their_tokens_and_where_their_states_stand(rag: RagCache) -> None:
    rows = rag.modules.named("notes", [row.name for row in rag.modules.all("notes")])
    tokens = {row.name: row.tokens for row in rag.modules.all("notes")}
    placed = rag.modules.locate(rows)
    assert [place.tokens for place in placed] == [tokens[row.name] for row in rows]
    assert {place.tier for place in placed} == {"host"}
    rag.modules.evict("notes", tier="host")
    assert {place.tier for place in rag.modules.locate(rows)} == {"disk"}
    rag.modules.evict("notes")
    assert {place.tier for place in rag.modules.locate(rows)} == {None}
