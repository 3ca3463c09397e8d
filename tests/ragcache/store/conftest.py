"""Shared by the tests of the store: small states, their keys, and an empty database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ragcache.states import KVKey, KVStates
from ragcache.store import Database

TOKEN_BYTES = 64  # of one token in `make_states`: 2 sides, 2 layers, 1 head, 4 floats


def make_key(number: int) -> KVKey:
    return KVKey(f"{number:02x}" * 32)


def make_states(number: int, tokens: int = 1) -> KVStates:
    """States whose every element tells their number."""
    filled = torch.full((2, 1, tokens, 4), float(number))
    return KVStates(filled, -filled, number)


def same(found: KVStates | None, expected: KVStates) -> bool:
    return (
        found is not None
        and torch.equal(found.keys, expected.keys)
        and torch.equal(found.values, expected.values)
        and found.start == expected.start
    )


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = Database.open(tmp_path / "ledger.sqlite3")
    yield opened
    opened.close()
