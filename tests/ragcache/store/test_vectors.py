"""Vectors in the ledger."""

from __future__ import annotations

import numpy as np
import pytest

from ragcache.store import Catalogue, Database, NewDocument, NewModule, Vectors
from tests.ragcache.store.conftest import make_key


@pytest.fixture
def numbers(database: Database) -> list[int]:
    """The ids of three stored modules; the third is in another collection."""
    catalogue = Catalogue(database, "tokenizer", None)
    for n, collection in enumerate(("notes", "notes", "plans")):
        module = NewModule("m", f"text {n}", [n], make_key(n))
        catalogue.replace(collection, [NewDocument(f"d{n}", "", "", [module])])
    return [row.id for name in ("notes", "plans") for row in catalogue.modules(name)]


def test_nothing_stored_is_nothing(database: Database, numbers: list[int]) -> None:
    assert Vectors(database, "e").of("notes") == {}


def test_vectors_come_back_to_the_bit_in_the_order_of_ids(
    database: Database, numbers: list[int]
) -> None:
    rows = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    Vectors(database, "e").add(numbers[::-1], rows)
    stored = Vectors(database, "e").of("notes")
    assert list(stored) == numbers[:2]
    assert {vector.dtype for vector in stored.values()} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(np.stack(list(stored.values())), rows[[2, 1]])


def test_vectors_of_one_embedder_are_not_those_of_another(
    database: Database, numbers: list[int]
) -> None:
    one, other = Vectors(database, "one"), Vectors(database, "other")
    one.add(numbers[:1], np.ones((1, 2), dtype=np.float32))
    other.add(numbers[:1], np.zeros((1, 7), dtype=np.float32))
    assert one.of("notes")[numbers[0]].tolist() == [1.0, 1.0]
    assert other.of("notes")[numbers[0]].shape == (7,)


def test_a_vector_may_be_stored_again(database: Database, numbers: list[int]) -> None:
    vectors = Vectors(database, "e")
    for value in (1.0, 2.0):
        vectors.add(numbers[:1], np.full((1, 2), value))
    assert vectors.of("notes")[numbers[0]].tolist() == [2.0, 2.0]


def test_vectors_of_several_lengths_may_stand_side_by_side(
    database: Database, numbers: list[int]
) -> None:
    vectors = Vectors(database, "e")
    vectors.add(numbers[:1], np.ones((1, 2)))
    vectors.add(numbers[1:2], np.ones((1, 3)))
    assert [len(vector) for vector in vectors.of("notes").values()] == [2, 3]


def test_ids_and_vectors_must_be_as_many(database: Database, numbers: list[int]) -> None:
    vectors = Vectors(database, "e")
    with pytest.raises(ValueError, match="zip"):
        vectors.add(numbers, np.ones((2, 2)))
    assert vectors.of("notes") == {}, "nothing is stored of it"
