"""Hashes of parts of a text are those of the parts alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ragcache.recognition.rolling import Rolling

TEXTS = st.text(st.sampled_from("ab\n \u00e9\U0001f600\ud800"), max_size=60)


@given(TEXTS, st.data())
def test_a_part_hashes_as_the_same_text_elsewhere(text: str, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(begin, len(text)))
    alone = Rolling(text[begin:end]).parts(np.array([0]), np.array([end - begin]))
    within = Rolling(text).parts(np.array([begin]), np.array([end - begin]))
    assert alone == within


@given(TEXTS, st.integers(1, 8))
def test_windows_are_the_parts_of_one_size(text: str, size: int) -> None:
    rolling, places = Rolling(text), np.arange(max(0, len(text) - size + 1))
    assert rolling.windows(size).tolist() == rolling.parts(places, size).tolist()


@given(TEXTS, TEXTS)
def test_texts_of_one_length_that_differ_hash_differently(one: str, other: str) -> None:
    size = min(len(one), len(other))
    if one[:size] != other[:size]:
        ends = np.array([0]), np.array([size])
        assert Rolling(one).parts(*ends) != Rolling(other).parts(*ends)
