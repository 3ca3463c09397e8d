"""Collections whose modules are encoded behind similar modules: choice, keys, states, deletion."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import select

from ragcache import RagCache, SourceDocument
from ragcache.db import CollectionVersion, ModuleRow
from ragcache.db.references import ROOT_MODE
from ragcache.db.tables import StateTable
from ragcache.engine import EncodeJob, encode
from ragcache.errors import ConfigurationError
from ragcache.models import LoadedModel, wrap_causal
from ragcache.modes import AFTER_OTHER_TEXT, PRIMED
from ragcache.params import SearchParams
from ragcache.pipeline.companions import most_similar
from ragcache.pipeline.prompt import ModuleGroup, ModuleStates
from ragcache.retrieval.bm25 import BM25Index
from ragcache.retrieval.indexes import CollectionIndex
from ragcache.states import KVKey
from ragcache.store.verify import verify
from tests.tiny_models import tiny_model

DOCUMENTS = [
    SourceDocument("pipit", "The survey boat Pipit is moored at the north quay."),
    SourceDocument("heron", "The rescue boat Heron is moored at the south quay."),
    SourceDocument("swift", "The old boat Swift lies in the yard, behind the red shed."),
    SourceDocument("keys", "The spare key hangs in the red shed of the harbor."),
]
QUESTION = "Where is the boat, and the key of the red shed?"
ASKED: dict[str, Any] = {"k": 4, "relative_threshold": 0.0, "mode": "primed"}
NEAREST = {"pipit": "heron", "heron": "pipit", "swift": "keys", "keys": "swift"}


def open_folder(path: Path, model: LoadedModel) -> RagCache:
    return RagCache.open(path, model, max_tokens=4, force_modes=True)


@pytest.fixture
def rag(tmp_path: Path, tiny_reader: LoadedModel) -> Iterator[RagCache]:
    with open_folder(tmp_path / "state", tiny_reader) as rag:
        rag.ingest("notes", DOCUMENTS)
        rag.collections.set_priming("notes", similar=True)
        yield rag


def ask(rag: RagCache) -> Any:
    return rag.ask(QUESTION, collection="notes", **ASKED)


def prompt_states(rag: RagCache) -> ModuleStates:
    params = SearchParams(k=4, relative_threshold=0.0)
    [prompt] = rag.internals.ask.prepare_prompts([QUESTION], "notes", params, PRIMED)
    assert isinstance(prompt.states, ModuleStates)
    return prompt.states


def later_groups(rag: RagCache) -> list[tuple[ModuleGroup, KVKey]]:
    """Return the groups of a question's modules in later places, with their keys."""
    states = prompt_states(rag)
    return list(zip(states.groups, states.keys, strict=True))[2:]


def chosen(rag: RagCache) -> dict[str, str]:
    """Return the document that each module's second states were encoded behind."""
    catalog = rag.internals.catalog
    rows = {row.id: row.document for row in catalog.modules("notes")}
    return {rows[n]: rows[other] for n, other in catalog.companions(list(rows)).items()}


def test_the_nearest_module_of_another_document_is_found() -> None:
    texts = [
        ("a", "the red boat at the quay"),
        ("a", "the red boat"),
        ("a", "the red boat at the quay"),
        ("b", "a boat"),
        ("c", "mushrooms"),
    ]
    rows = {n: ModuleRow(n, str(n), document, "", text) for n, (document, text) in enumerate(texts)}
    version = CollectionVersion(1, 1, similar=True)

    def nearest(module: int, numbers: set[int]) -> int | None:
        kept = {n: rows[n] for n in numbers}
        index = CollectionIndex(version, kept, BM25Index({n: r.text for n, r in kept.items()}))
        found = most_similar(index, module)
        return None if found is None else found.id

    assert nearest(0, {0, 1, 2, 3, 4}) == 3
    assert nearest(0, {0, 1, 2, 4}) == 1, "of its own document, if no other shares a word"
    assert nearest(0, {0, 2, 4}) is None, "an equal text is no other text"
    assert nearest(4, {0, 1, 2, 3, 4}) is None
    assert nearest(9, {0, 1}) is None, "of another collection"


def test_modules_are_read_behind_similar_ones(rag: RagCache) -> None:
    first, again = ask(rag), ask(rag)
    assert [source.tier for source in first.sources] == ["host"] + ["encoded"] * 3
    assert {source.tier for source in again.sources} == {"host"}
    assert again.choices[0].token_ids == first.choices[0].token_ids
    found = chosen(rag)
    assert len(found) == 3
    assert found.items() <= NEAREST.items()
    rag.modules.warm("notes", mode=PRIMED)
    assert chosen(rag) == NEAREST
    states = [each for row in rag.modules.all("notes") for each in rag.modules.get(row.id).states]
    assert sum(each.mode == AFTER_OTHER_TEXT for each in states) > 0
    with rag.internals.shared.database.reading() as session:
        roots = select(StateTable.key).where(StateTable.mode == ROOT_MODE).distinct()
        assert len(session.scalars(roots).all()) == 1, "the preamble alone"


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_states_equal_a_pass_over_the_similar_module(
    tmp_path: Path, reader: LoadedModel, family: str
) -> None:
    causal = wrap_causal(tiny_model(family, vocab_size=len(reader.tokenizer)))
    model = LoadedModel("tiny", causal, reader.tokenizer)
    with open_folder(tmp_path / "state", model) as rag:
        rag.ingest("notes", DOCUMENTS)
        rag.collections.set_priming("notes", similar=True)
        ask(rag)
        preamble = rag.internals.ask.encoder.preamble_ids
        rows = rag.internals.catalog.modules("notes")
        names = {row.id: row.document for row in rows}
        texts = dict(zip(names.values(), rag.internals.ask.tokens.of(rows), strict=True))
        wanted = prompt_states(rag)
        with wanted.lease() as lease:
            for group, kept in list(zip(wanted.groups, lease.states, strict=True))[2:]:
                behind = texts[NEAREST[names[group.modules[0]]]]
                assert group.behind is not None
                assert group.behind.token_ids == behind
                room = len(behind) if causal.scheme.movable else group.start - len(preamble)
                before = [*preamble, *behind[:room]]
                start = len(before) if causal.scheme.movable else group.start
                positions = [*range(len(before)), *range(start, start + len(group.token_ids))]
                job = EncodeJob([*before, *group.token_ids], position_ids=positions)
                [whole] = encode(causal, [job])
                assert kept.start == start
                torch.testing.assert_close(kept.keys, whole.keys[:, :, len(before) :])
                torch.testing.assert_close(kept.values, whole.values[:, :, len(before) :])


def test_another_process_finds_the_same_states(
    rag: RagCache, tmp_path: Path, tiny_reader: LoadedModel
) -> None:
    rag.modules.warm("notes", mode=PRIMED)
    keys, before = {group.modules: key for group, key in later_groups(rag)}, chosen(rag)
    rag.close()
    with open_folder(tmp_path / "state", tiny_reader) as other:
        nearer = "The survey boat Pipit is moored at the north quay, as is the survey boat Tern."
        assert {group.modules: key for group, key in later_groups(other)} == keys
        ask(other)
        assert other.stats().encoded == 0
        other.ingest("notes", [SourceDocument("tern", nearer)])
        again = {group.modules: key for group, key in later_groups(other)}
        assert len(again.keys() & keys.keys()) == 2, "one is the first now, or is not found"
        assert again.items() >= {(m, keys[m]) for m in again.keys() & keys}
        assert chosen(other) == before, "a choice is made once"


def test_states_go_with_the_module_that_they_followed(rag: RagCache) -> None:
    rag.modules.warm("notes", mode=PRIMED)
    catalog, store = rag.internals.catalog, rag.internals.shared.store
    rows = {row.document: row.id for row in catalog.modules("notes")}
    keys = {name: set(catalog.keys("notes", [name])) for name in rows}
    assert {name: len(each) for name, each in keys.items()} == dict.fromkeys(rows, 2)
    told = rag.collections.preview_deletion("notes", ["heron"])
    assert (told.modules, told.states) == (1, 3), "two of its own, and one behind it"
    rag.delete("notes", ["heron"])
    [gone] = keys["pipit"] - set(catalog.keys("notes", ["pipit"]))
    assert gone not in store.disk
    assert not store.memory.is_known(gone)
    assert chosen(rag) == {"swift": "keys", "keys": "swift"}
    catalog.add_key(rows["pipit"], gone, rows["heron"])
    assert gone not in catalog.keys("notes"), "states that were encoded meanwhile have no owner"
    rag.modules.warm("notes", mode=PRIMED)
    assert chosen(rag)["pipit"] in ("swift", "keys")
    assert verify(store).clean
    rag.ingest("notes", [SourceDocument("keys", "Nobody knows who has the spare key.")])
    assert "swift" not in chosen(rag), "a document that is replaced is another one"


def test_a_module_alone_follows_the_built_in_text(rag: RagCache) -> None:
    rag.delete("notes", ["heron", "swift", "keys"])
    rag.modules.warm("notes", mode=PRIMED)
    assert chosen(rag) == {}
    [row] = rag.internals.catalog.modules("notes")
    tokens = rag.internals.ask.tokens.of([row])[0]
    built_in = rag.internals.ask.encoder.key(tokens, AFTER_OTHER_TEXT)
    assert built_in in rag.internals.catalog.keys("notes")


def test_the_setting_is_told_and_taken_back(rag: RagCache) -> None:
    rag.modules.warm("notes", mode=PRIMED)
    keys = set(rag.internals.catalog.keys("notes"))
    assert rag.collections.similar_priming("notes")
    assert [row.similar_priming for row in rag.collections.page().items] == [True]
    with pytest.raises(ConfigurationError, match="not both"):
        rag.collections.set_priming("notes", "Minutes.", similar=True)
    rag.collections.set_priming("notes", None)
    assert not rag.collections.similar_priming("notes")
    left = set(rag.internals.catalog.keys("notes"))
    assert (len(keys), len(left)) == (8, 4)
    assert all(group.behind is None for group, _ in later_groups(rag))
    store = rag.internals.shared.store
    assert not any(store.memory.is_known(key) for key in keys - left)


def test_an_archive_brings_the_setting_without_states(
    rag: RagCache, tmp_path: Path, tiny_reader: LoadedModel
) -> None:
    rag.modules.warm("notes", mode=PRIMED)
    done = rag.collections.export_archive("notes", tmp_path / "notes.tar")
    assert (done.states, done.missing) == (4, 0), "those behind similar modules stay here"
    with open_folder(tmp_path / "other", tiny_reader) as other:
        other.collections.import_archive(tmp_path / "notes.tar")
        assert other.collections.similar_priming("notes")
        assert ask(other).choices[0].token_ids == ask(rag).choices[0].token_ids
        assert chosen(other).items() <= NEAREST.items()


def test_a_chat_over_documents_reads_the_same_states(rag: RagCache) -> None:
    ask(rag)
    before = rag.stats().encoded
    chat = rag.chat([{"role": "user", "content": QUESTION}], collection="notes", **ASKED)
    assert chat.mode == "recognized:primed"
    assert rag.stats().encoded - before <= 1
    assert chosen(rag).items() <= NEAREST.items()
