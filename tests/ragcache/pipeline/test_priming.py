"""The priming text of a collection: in the keys of states, in archives, and in its processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ragcache import RagCache
from ragcache.errors import ConfigurationError, UnknownCollection
from ragcache.models import LoadedModel
from ragcache.modes import PRIMED
from ragcache.pipeline.module_states import PRIMING_TEXT
from ragcache.store.verify import verify
from tests.ragcache.pipeline.conftest import DOCUMENTS

OWN = "# Minutes\n\nPresent: Ida and Jon. The boats are painted in May.\n\n"
ASKED: dict[str, Any] = {"k": 3, "relative_threshold": 0.0, "mode": "primed"}


def open_folder(path: Path, model: LoadedModel) -> RagCache:
    return RagCache.open(path, model, max_tokens=4, force_modes=True)


@pytest.fixture
def rag(tmp_path: Path, tiny_reader: LoadedModel) -> Iterator[RagCache]:
    """Two collections of the same documents, both asked in `primed`."""
    with open_folder(tmp_path / "state", tiny_reader) as rag:
        for name in ("notes", "others"):
            rag.ingest(name, DOCUMENTS)
        yield rag


def ask(rag: RagCache, collection: str = "notes") -> Any:
    return rag.ask("Where is the boat, and the key?", collection=collection, **ASKED)


def tiers(answer: Any) -> list[str]:
    return [source.tier for source in answer.sources]


def test_a_collection_has_a_priming_text_of_its_own(
    rag: RagCache, tiny_reader: LoadedModel
) -> None:
    built_in = ask(rag)
    assert rag.collections.priming("notes") == PRIMING_TEXT
    rag.collections.set_priming("notes", OWN)
    assert (rag.collections.priming("notes"), rag.collections.priming("others")) == (
        OWN,
        PRIMING_TEXT,
    )
    first, again = ask(rag), ask(rag)
    assert tiers(first) == ["host", "encoded", "encoded"], "the first module sees no priming text"
    assert tiers(again) == ["host"] * 3
    encoder = rag.internals.encoder_of("notes")
    assert list(encoder.surroundings.priming) == tiny_reader.encode_untrusted(OWN)
    other = rag.internals.encoder_of("others").surroundings.priming
    assert list(other) == tiny_reader.encode_untrusted(PRIMING_TEXT), "of that collection alone"
    rag.collections.set_priming("notes", None)
    assert ask(rag).choices[0].token_ids == built_in.choices[0].token_ids


def test_states_behind_the_earlier_text_are_removed(rag: RagCache, tmp_path: Path) -> None:
    rag.collections.delete("others")
    rooted = rag.modules.all("notes")
    rag.modules.warm("notes", mode=PRIMED)
    assert rag.modules.evict("notes", dry_run=True)
    before = {key for row in rag.modules.all("notes") for key in keys_of(rag, row.name)}
    rag.collections.set_priming("notes", OWN)
    after = {key for row in rag.modules.all("notes") for key in keys_of(rag, row.name)}
    assert (len(before), len(after)) == (6, 3), "the rooted ones stay"
    assert after < before
    store = rag.internals.shared.store
    assert not set(store.disk.keys()) & (before - after)
    assert not any(store.memory.is_known(key) for key in before - after)
    assert [row.nbytes for row in rag.modules.all("notes")] == [row.nbytes for row in rooted]
    assert verify(store).clean
    rag.collections.set_priming("notes", OWN)
    assert len(rag.modules.warm("notes", mode=PRIMED)) >= 3


def keys_of(rag: RagCache, name: str) -> list[str]:
    return list(rag.internals.catalog.keys("notes", None, [name]))


def test_an_archive_brings_its_priming_text(
    rag: RagCache, tmp_path: Path, tiny_reader: LoadedModel
) -> None:
    rag.collections.set_priming("notes", OWN)
    rag.modules.warm("notes", mode=PRIMED)
    expected = ask(rag)
    done = rag.collections.export_archive("notes", tmp_path / "notes.tar")
    assert (done.states, done.missing) == (6, 0)
    rag.collections.export_archive("others", tmp_path / "others.tar")
    with open_folder(tmp_path / "other", tiny_reader) as other:
        other.collections.import_archive(tmp_path / "notes.tar")
        other.collections.import_archive(tmp_path / "others.tar")
        assert other.collections.priming("notes") == OWN
        version = other.internals.catalog.version("others")
        assert version.priming is None, "a built-in text stays the built-in one"
        answer = ask(other)
        assert other.stats().encoded == 1, "the preamble"
        assert answer.choices[0].token_ids == expected.choices[0].token_ids


def test_a_collection_keeps_its_priming_text(
    rag: RagCache, tmp_path: Path, tiny_reader: LoadedModel
) -> None:
    rag.collections.set_priming("notes", OWN)
    rag.close()
    with open_folder(tmp_path / "state", tiny_reader) as again:
        assert again.collections.priming("notes") == OWN


@pytest.mark.parametrize("text", ["", " \n", "x" * 20_001, "\ud800", "a\0"])
def test_what_cannot_be_a_priming_text_is_refused(rag: RagCache, text: str) -> None:
    with pytest.raises(ConfigurationError, match="priming text"):
        rag.collections.set_priming("notes", text)
    with pytest.raises(UnknownCollection):
        rag.collections.set_priming("nowhere", OWN)
