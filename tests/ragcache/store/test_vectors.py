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


def test_nothing_stored_is_an_empty_matrix(database: Database, numbers: list[int]) -> None:
    ids, vectors = Vectors(database, "e").of("notes")
    assert (ids.shape, ids.dtype) == ((0,), np.int64)
    assert (vectors.shape, vectors.dtype) == ((0, 0), np.float32)


def test_vectors_come_back_to_the_bit_in_the_order_of_ids(
    database: Database, numbers: list[int]
) -> None:
    rows = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    Vectors(database, "e").add(numbers[::-1], rows)
    ids, vectors = Vectors(database, "e").of("notes")
    assert ids.tolist() == numbers[:2]
    assert vectors.dtype == np.float32
    np.testing.assert_array_equal(vectors, rows[[2, 1]])


def test_vectors_of_one_embedder_are_not_those_of_another(
    database: Database, numbers: list[int]
) -> None:
    one, other = Vectors(database, "one"), Vectors(database, "other")
    one.add(numbers[:1], np.ones((1, 2), dtype=np.float32))
    other.add(numbers[:1], np.zeros((1, 7), dtype=np.float32))
    assert one.of("notes")[1].tolist() == [[1.0, 1.0]]
    assert other.of("notes")[1].shape == (1, 7)


def test_a_vector_may_be_stored_again(database: Database, numbers: list[int]) -> None:
    vectors = Vectors(database, "e")
    for value in (1.0, 2.0):
        vectors.add(numbers[:1], np.full((1, 2), value))
    assert vectors.of("notes")[1].tolist() == [[2.0, 2.0]]


def test_ids_and_vectors_must_be_as_many(database: Database, numbers: list[int]) -> None:
    vectors = Vectors(database, "e")
    with pytest.raises(ValueError, match="zip"):
        vectors.add(numbers, np.ones((2, 2)))
    assert vectors.of("notes")[0].size == 0, "nothing is stored of it"
