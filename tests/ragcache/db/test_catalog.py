"""The catalog: documents, modules, vectors, and records of indexings."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import func, select

from ragcache.db import (
    Catalog,
    Database,
    Deletion,
    Ledger,
    NewDocument,
    NewModule,
    Records,
    SchemaText,
    SchemaTexts,
    Vectors,
    list_modules,
)
from ragcache.db.catalog import Contents
from ragcache.db.references import owned_among
from ragcache.db.sql import CHUNK
from ragcache.db.state_rows import StateMetadata, StateRow
from ragcache.db.tables import Base, DocumentTable, StateTable
from ragcache.errors import (
    ConfigurationError,
    DocumentError,
    LedgerUnavailable,
    UnknownCollection,
    UnknownSchema,
)
from tests.ragcache.conftest import make_key, record_row


@pytest.fixture
def catalog(database: Database) -> Catalog:
    return Catalog(database, "tokenizer", "embedder")


def document(name: str, *numbers: int, digest: str = "digest") -> NewDocument:
    """A document whose modules are told by numbers: text, tokens, key and vector."""
    modules = [
        NewModule(f"m{n}", f"text {n}", [n, n + 1], make_key(n), np.array([n, 0.5]))
        for n in numbers
    ]
    return NewDocument(name, f"file:///{name}", digest, modules)


def texts(catalog: Catalog, collection: str = "notes") -> list[str]:
    return [row.text for row in catalog.modules(collection)]


def rows(database: Database) -> dict[str, int]:
    with database.transaction() as session:
        tables = Base.metadata.sorted_tables
        return {t.name: session.scalar(select(func.count()).select_from(t)) or 0 for t in tables}


def test_a_document_replaces_the_one_of_its_name(catalog: Catalog) -> None:
    catalog.replace_documents("notes", [document("a", 1, 2), document("b", 3)])
    replaced = catalog.replace_documents("notes", [document("a", 4, digest="new")])
    assert set(replaced) == {make_key(1), make_key(2)}
    assert texts(catalog) == ["text 3", "text 4"]
    assert catalog.documents("notes")["a"].digest == "new"
    assert catalog.collections() == {"notes": 2}


def test_the_same_name_in_another_collection_is_another_document(catalog: Catalog) -> None:
    catalog.replace_documents("notes", [document("a", 1)])
    assert catalog.replace_documents("plans", [document("a", 2)]) == []
    assert catalog.delete_documents("plans", ["a"]) == [make_key(2)]
    assert texts(catalog) == ["text 1"]
    assert catalog.collections() == {"notes": 1, "plans": 0}


def test_a_replacement_that_fails_changes_nothing(catalog: Catalog) -> None:
    catalog.replace_documents("notes", [document("a", 1)])
    broken = NewDocument("b", "", "", [NewModule("m", "t", ["no number"], make_key(2))])
    with pytest.raises(ValueError, match="no number"):
        catalog.replace_documents("notes", [document("a", 3), broken])
    assert texts(catalog) == ["text 1"]


def test_deleting_cascades_to_everything_of_a_document(
    catalog: Catalog, database: Database
) -> None:
    catalog.replace_documents("notes", [document("a", 1, 2), document("b", 3)])
    catalog.add_key(catalog.modules("notes")[0].id, make_key(9))
    keys = catalog.delete_documents("notes", ["a", "never there"])
    assert set(keys) == {make_key(1), make_key(2), make_key(9)}
    left = rows(database)
    for table in ("documents", "modules", "module_tokens", "vectors", "encodings"):
        assert left[table] == 1, table
    assert catalog.delete_documents("notes", ["a"]) == []


def test_a_preview_of_a_deletion_counts_states_to_be_freed(
    catalog: Catalog, database: Database
) -> None:
    catalog.replace_documents("notes", [document("a", 1, 2), document("b", 2, 3)])
    catalog.replace_documents("more", [document("c", 3)])
    with database.transaction() as session:
        for number, tier in ((1, "disk"), (1, "host"), (2, "disk"), (3, "disk")):
            session.add(StateTable(key=make_key(number), tier=tier, nbytes=10 * number, tokens=1))
    one = catalog.preview_deletion("notes", ["a", "never there"])
    assert one == Deletion(1, 2, 1, {"disk": 10, "host": 10})
    assert one.nbytes == 20
    whole = catalog.preview_deletion("notes", None)
    assert whole == Deletion(2, 4, 2, {"disk": 30, "host": 10})
    gone = set(catalog.delete_collection("notes")[1])
    with database.reading() as session:
        left = set(session.scalars(select(StateTable.key).where(StateTable.tier == "disk")))
    assert left == {make_key(3)}
    assert {make_key(1), make_key(2)} <= gone


def test_the_version_changes_with_every_change_of_its_collection(catalog: Catalog) -> None:
    catalog.replace_documents("notes", [document("a", 1), document("b", 2)])
    versions = [catalog.version("notes")]
    changes: list[Callable[[], object]] = [
        lambda: catalog.delete_documents("notes", ["b"]),
        lambda: catalog.replace_documents("notes", [document("b", 2)]),
        lambda: catalog.replace_documents("notes", [document("b", 5)]),
        lambda: catalog.delete_documents("notes", ["a", "b"]),
        lambda: catalog.replace_documents("notes", [document("a", 1)]),
    ]
    for change in changes:
        change()
        versions.append(catalog.version("notes"))
        catalog.replace_documents("plans", [document("a", 2)])
        assert catalog.version("notes") == versions[-1], "nothing of it has changed"
    assert len(set(versions)) == len(versions)


def test_an_unknown_collection_names_the_known(catalog: Catalog, database: Database) -> None:
    with pytest.raises(UnknownCollection, match="'plan'; known: none yet"):
        catalog.version("plan")
    for name in ("plans", "notes"):
        catalog.replace_documents(name, [document("a", 1)])
    for call in (
        lambda: catalog.modules("plan"),
        lambda: catalog.version("plan"),
        lambda: catalog.delete_documents("plan", ["a"]),
        lambda: list_modules(database, "plan"),
    ):
        with pytest.raises(UnknownCollection) as caught:
            call()
        assert "no collection 'plan'; known: 'notes', 'plans'." in str(caught.value)
        assert "`ragcache ingest plan PATH`" in str(caught.value)
    assert set(catalog.collections()) == {"notes", "plans"}, "asking makes no collection"


def test_tokens_belong_to_a_tokenizer(catalog: Catalog, database: Database) -> None:
    catalog.replace_documents("notes", [document("a", 1, 70_000)])
    first, second = (row.id for row in catalog.modules("notes"))
    assert catalog.token_ids([first, second, 999]) == {first: (1, 2), second: (70_000, 70_001)}
    other = Catalog(database, "another tokenizer", None)
    assert other.token_ids([first]) == {}
    for tokens in ([8], [9, 10]):
        other.add_tokens(first, tokens)
    assert other.token_ids([first, second]) == {first: (9, 10)}
    assert catalog.token_ids([first]) == {first: (1, 2)}
    for key in (make_key(1), make_key(5), make_key(5)):
        catalog.add_key(first, key)
    assert rows(database)["encodings"] == 3, "a key is added once"


def test_writes_for_a_deleted_module_are_ignored(catalog: Catalog, database: Database) -> None:
    """Another process may delete a document while this one answers from it."""
    catalog.replace_documents("notes", [document("a", 1)])
    [module] = catalog.modules("notes")
    catalog.delete_documents("notes", ["a"])
    catalog.add_key(module.id, make_key(9))
    catalog.add_tokens(module.id, [1, 2])
    Vectors(database, "e").add_vectors([module.id], np.ones((1, 2), dtype=np.float32))
    assert catalog.token_ids([module.id]) == {}
    with database.reading() as session:
        assert owned_among(session, [make_key(9)]) == set()


def test_metadata_may_hold_dates_and_paths(catalog: Catalog, database: Database) -> None:
    metadata = {"page": 3, "when": datetime.date(2024, 5, 1), "where": Path("a/b")}
    catalog.replace_documents("notes", [NewDocument("a", "", "", [], metadata)])
    with database.transaction() as session:
        stored = session.scalars(select(DocumentTable.attributes)).one()
    assert json.dumps(stored) == '{"page": 3, "when": "2024-05-01", "where": "a/b"}'


def test_the_listing_joins_modules_and_tiers(catalog: Catalog, database: Database) -> None:
    catalog.replace_documents("notes", [document("a", 1, 2)])
    catalog.replace_documents("plans", [document("b", 3)])
    ledger = Ledger(database)
    row = StateRow(make_key(1), "disk", 300, 0, 0, True, math.inf, "model", StateMetadata(4))
    record_row(ledger, row)
    ledger.usage.add_entry(row._replace(tier="host", nbytes=256))
    ledger.usage.touch([make_key(1)], 1)
    ledger.flush()
    first, second = list_modules(database, "notes")
    assert (first.tokens, first.nbytes, first.tiers, first.hits) == (4, 300, ("disk", "host"), 1)
    assert (first.pinned, second.pinned) == (True, False)
    assert (second.tokens, second.nbytes, second.tiers, second.hits) == (0, 0, (), 0)
    assert [row.collection for row in list_modules(database)] == ["notes", "notes", "plans"]


def test_a_renamed_document_keeps_its_modules_and_states(catalog: Catalog) -> None:
    catalog.replace_documents("notes", [document("a", 1, 2), document("b", 3)])
    before, version = catalog.modules("notes"), catalog.version("notes")
    catalog.rename_document("notes", "a", "c")
    after = catalog.modules("notes")
    known = {row.id: row for row in before}
    assert catalog.reread_modules("notes", known) == Contents(catalog.version("notes"), after)
    [first, *_] = after
    assert catalog.reread_modules("notes", {first.id: first}).modules == after
    assert [row.id for row in after] == [row.id for row in before]
    assert [row.name for row in after] == ["c#1", "c#2", "m3"]
    assert set(catalog.documents("notes")) == {"b", "c"}
    later = catalog.version("notes")
    assert later != version
    assert later.covers(version)
    assert not version.covers(later)
    with pytest.raises(DocumentError, match="holds a 'b' already"):
        catalog.rename_document("notes", "c", "b")
    with pytest.raises(DocumentError, match="holds no 'a'"):
        catalog.rename_document("notes", "a", "d")


def test_namespaces_see_nothing_of_each_other(catalog: Catalog, database: Database) -> None:
    other = Catalog(database, "tokenizer", "embedder", "another tenant")
    catalog.replace_documents("notes", [document("a", 1)])
    with pytest.raises(UnknownCollection, match="known: none yet"):
        other.modules("notes")
    other.replace_documents("notes", [document("a", 2)])
    assert (texts(catalog), texts(other)) == (["text 1"], ["text 2"])
    assert other.delete_documents("notes", ["a"]) == [make_key(2)]
    assert catalog.collections() == {"notes": 1}


def test_states_of_a_schema_are_owned_by_it_until_it_is_replaced(database: Database) -> None:
    schemas, key = SchemaTexts(database), make_key
    assert schemas.put_schema("trip", SchemaText("one", "schema"), [key(1), key(2)]) == []
    schemas.add_keys("trip", [key(3), key(3)])
    schemas.add_keys("unknown", [key(4)])
    with database.reading() as session:
        assert owned_among(session, map(key, range(9))) == {key(1), key(2), key(3)}
    schemas.put_schema("plan", SchemaText("plan", "schema"))
    freed = schemas.put_schema("trip", SchemaText("two", "compact"), [key(2)])
    assert set(freed) == {key(1), key(3)}
    assert schemas.names() == ["plan", "trip"]
    assert schemas.get_schema("trip") == SchemaText("two", "compact")
    assert schemas.get_schema("unknown") is None
    assert schemas.delete_schema("trip") == [key(2)]
    with pytest.raises(UnknownSchema, match="no schema 'trip'"):
        schemas.delete_schema("trip")


def test_documents_come_with_metadata_and_their_modules_in_order(catalog: Catalog) -> None:
    first, second = document("b", 2, 1), document("a", 3)
    whole = NewDocument("c", "", "d", document("c").modules, {"year": 2024}, "")
    assert catalog.replace_documents("notes", [first, second, whole]) == []
    assert catalog.collections() == {"notes": 3}
    assert texts(catalog) == ["text 2", "text 1", "text 3"]
    found = catalog.documents("notes")
    assert {name: row.modules for name, row in found.items()} == {"b": 2, "a": 1, "c": 0}
    assert (found["b"].digest, found["c"].attributes) == ("digest", {"year": 2024})
    assert list(catalog.documents("notes", ["c", "a", "nowhere"])) == ["a", "c"]
    assert catalog.documents("notes", []) == catalog.documents("plans", ["a"]) == {}
    assert len({*found.values()}) == 3, "rows can be hashed"
    many = [NewDocument(f"d{n}", "", "", []) for n in range(CHUNK + 1)]
    catalog.replace_documents("notes", many)
    catalog.delete_documents("notes", [d.source_id for d in many])
    assert catalog.collections() == {"notes": 3}


def test_modules_carry_metadata_and_are_found_by_name(catalog: Catalog) -> None:
    plain = document("a", 1, 2)
    catalog.replace_documents("notes", [NewDocument("a", "", "d", plain.modules, {"tags": ["x"]})])
    rows = catalog.modules("notes", ["m2", "m9", "m1", "m2"])
    assert [row.name for row in rows] == ["m2", "m1", "m2"]
    first = rows[0]
    assert (first.document, first.uri, first.attributes) == ("a", "", {"tags": ["x"]})
    assert catalog.modules("notes", []) == []
    with pytest.raises(UnknownCollection):
        catalog.modules("plans", [])


def test_the_whole_text_comes_back(catalog: Catalog, database: Database) -> None:
    plain = document("a", 1)
    catalog.replace_documents(
        "notes", [NewDocument("a", "", "d", plain.modules, {}, " as it came ")]
    )
    assert catalog.texts("notes", ["a", "nowhere"]) == {"a": " as it came "}
    catalog.replace_documents("notes", [NewDocument("a", "", "e", plain.modules, {}, "changed")])
    assert catalog.texts("notes", ["a"]) == {"a": "changed"}
    catalog.delete_documents("notes", ["a"])
    assert catalog.texts("notes", ["a"]) == {}
    assert rows(database)["document_texts"] == 0
    with pytest.raises(UnknownCollection):
        catalog.texts("plans", ["a"])


@pytest.fixture
def numbers(database: Database) -> list[int]:
    """The ids of three stored modules; the third is in another collection."""
    catalog = Catalog(database, "tokenizer", None)
    for n, collection in enumerate(("notes", "notes", "plans")):
        module = NewModule("m", f"text {n}", [n], make_key(n))
        catalog.replace_documents(collection, [NewDocument(f"d{n}", "", "", [module])])
    return [row.id for name in ("notes", "plans") for row in catalog.modules(name)]


def test_vectors_come_back_to_the_bit_in_the_order_of_ids(
    database: Database, numbers: list[int]
) -> None:
    vectors = Vectors(database, "e")
    assert vectors.read_vectors("notes") == {}
    with pytest.raises(ValueError, match="zip"):
        vectors.add_vectors(numbers, np.ones((2, 2)))
    assert vectors.read_vectors("notes") == {}, "nothing is stored of it"
    rows = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    for written in (rows + 1, rows):
        vectors.add_vectors(numbers[::-1], written)
    stored = vectors.read_vectors("notes")
    assert list(stored) == numbers[:2]
    assert {vector.dtype for vector in stored.values()} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(np.stack(list(stored.values())), rows[[2, 1]])
    assert list(vectors.read_vectors("notes", numbers[1:])) == numbers[1:2]


def test_vectors_belong_to_an_embedder(
    catalog: Catalog, database: Database, numbers: list[int]
) -> None:
    assert rows(database)["vectors"] == 0, "of documents that were stored without one"
    other = Vectors(database, "other")
    other.add_vectors(numbers[:1], np.zeros((1, 7)))
    other.add_vectors(numbers[1:2], np.zeros((1, 3)))
    assert [len(vector) for vector in other.read_vectors("notes").values()] == [7, 3]
    catalog.replace_documents("notes", [document("a", 7)])
    [(number, vector)] = Vectors(database, "embedder").read_vectors("notes").items()
    assert (number, vector.tolist()) == (catalog.modules("notes")[-1].id, [7.0, 0.5])


class Clocked(Records):
    """A clock that the test sets."""

    at = 0.0

    def now(self) -> float:
        return self.at


@pytest.fixture
def records(database: Database) -> Clocked:
    return Clocked(database, "docs")


def write(records: Clocked, at: float, keys: list[str], groups: list[str | None]) -> None:
    records.at = at
    records.update(keys, groups)


def test_keys_by_time_and_group_the_oldest_first(records: Clocked) -> None:
    write(records, 2.0, ["a", "b"], ["g", "h"])
    write(records, 1.0, ["c"], ["g"])
    write(records, 3.0, ["d"], [None])
    assert records.exists(["b", "nothing", "a", "b"]) == [True, False, True, True]
    assert records.exists([]) == []
    assert records.keys() == ["c", "a", "b", "d"]
    assert records.keys(before=2.0) == ["c"]
    assert records.keys(after=2.0) == ["d"]
    assert records.keys(after=1.0, before=3.0) == ["a", "b"]
    assert records.keys(group_ids=["g"]) == ["c", "a"]
    assert records.keys(group_ids=["h", "g"], limit=2) == ["c", "a"]
    assert records.keys(limit=1) == ["c"]
    assert records.keys(group_ids=[]) == [], "no group is not every group"


def test_writing_again_renews_time_and_group(records: Clocked) -> None:
    write(records, 1.0, ["a", "a"], ["g", "h"])
    assert records.keys(group_ids=["h"]) == ["a"]
    write(records, 5.0, ["a"], ["i"])
    assert records.keys(before=5.0) == []
    assert records.keys(group_ids=["i"]) == ["a"]


def test_many_keys_at_once(records: Clocked) -> None:
    keys = [f"k{n:05}" for n in range(1200)]
    write(records, 1.0, keys, list(keys))
    assert records.keys() == keys
    assert len(records.keys(group_ids=keys, limit=900)) == 900
    records.delete([*keys[1:], "unknown"])
    assert records.keys() == keys[:1]


def test_spaces_and_namespaces_do_not_see_each_other(records: Clocked, database: Database) -> None:
    write(records, 1.0, ["a"], [None])
    for other in (Records(database, "plans"), Records(database, "docs", "tenant")):
        assert other.keys() == []
        other.delete(["a"])
        other.update(["b"])
        assert other.keys() == ["b"]
    assert records.keys() == ["a"]


def test_the_clock_of_the_ledger_runs(database: Database) -> None:
    records = Records(database, "docs")
    before = records.now()
    records.update(["a"], time_at_least=before)
    assert records.keys(after=before - 1e-6) == ["a"]
    assert records.now() >= before > 1.7e9
    with pytest.raises(LedgerUnavailable, match="set back"):
        records.update(["b"], time_at_least=before + 1e6)
    with pytest.raises(ConfigurationError, match="2 keys have 1 group_ids"):
        records.update(["b", "c"], ["g"])
    assert records.keys() == ["a"], "nothing of it is written"
