"""The key of states: a digest of everything that they depend on."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache.states import FORMAT_VERSION, KVKey, state_key
from ragcache.states import kv as key_module

INPUTS: dict[str, Any] = {
    "model": "m" * 64,
    "tokenizer": "t" * 64,
    "scheme": "rotary",
    "mode": "rooted",
    "token_ids": (5, 6, 7),
    "start": 12,
    "root": KVKey("0" * 64),
}
CHANGES: list[dict[str, Any]] = [
    {"model": "n" * 64},
    {"tokenizer": "u" * 64},
    {"scheme": "alibi"},
    {"mode": "isolated"},
    {"token_ids": (5, 7, 6)},
    {"token_ids": (5, 6)},
    {"token_ids": (5, 6, 7, 0)},
    {"start": 13},
    {"root": None},
    {"root": KVKey("1" * 64)},
    {"offsets": (0, 1, 3)},
    {"offsets": (2, 1, 0)},
    {"salt": "a"},
    {"salt": "1:2,"},
]
ids = st.lists(st.integers(0, 200_000), max_size=6)


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_every_dependency_changes_the_key(change: dict[str, Any]) -> None:
    assert state_key(**{**INPUTS, **change}) != state_key(**INPUTS)


def test_all_changes_lead_to_different_keys() -> None:
    assert len({state_key(**{**INPUTS, **change}) for change in CHANGES}) == len(CHANGES)


def test_the_format_version_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = state_key(**INPUTS)
    monkeypatch.setattr(key_module, "FORMAT_VERSION", FORMAT_VERSION + 1)
    assert state_key(**INPUTS) != before


def test_equal_inputs_have_equal_keys_whatever_holds_the_tokens() -> None:
    assert state_key(**{**INPUTS, "token_ids": [5, 6, 7]}) == state_key(**INPUTS)


def test_offsets_one_after_another_are_the_same_as_none() -> None:
    assert state_key(**INPUTS, offsets=[0, 1, 2]) == state_key(**INPUTS, offsets=None)


def test_text_that_moves_from_one_name_to_the_next_changes_the_key() -> None:
    one = state_key(**{**INPUTS, "scheme": "a", "mode": "b,1:c"})
    other = state_key(**{**INPUTS, "scheme": "a,5:b", "mode": "c"})
    assert one != other


@given(first=ids, second=ids)
def test_two_runs_of_tokens_share_a_key_only_if_they_are_equal(
    first: list[int], second: list[int]
) -> None:
    keys = [state_key(**{**INPUTS, "token_ids": run}) for run in (first, second)]
    assert (keys[0] == keys[1]) == (first == second)


def test_digest_is_stable() -> None:
    """Fails on an accidental change; raise FORMAT_VERSION with an intended one."""
    pinned = "dfd8eb1f01a36aa71ea568ac28f1c10be9fc6b65a914f8c2637c1b8284219b8e"
    assert state_key(**INPUTS) == KVKey(pinned)
    assert str(KVKey(pinned)) == pinned
