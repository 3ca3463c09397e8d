"""Marks, intervals and paired tests, by hand."""

from __future__ import annotations

import math

import pytest

from ragcache.evaluation import (
    bootstrap_interval,
    exact_match,
    f1,
    normalize,
    paired_bootstrap,
    rouge_l,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Red  Cupboard.", "red cupboard"),
        ("a boat, an oar", "boat oar"),
        ("Marta Quill's", "marta quills"),
        ("theatre and another", "theatre and another"),
        ("26 days\n", "26 days"),
        ("The", ""),
        ("2005–2006", "2005–2006"),
        ("《红楼梦》，共120回。", "红 楼 梦 共 120 回"),
    ],
)
def test_normalization_drops_case_punctuation_and_articles(text: str, expected: str) -> None:
    assert normalize(text) == expected


def test_an_exact_match_equals_one_normalized_answer() -> None:
    assert exact_match("the Red cupboard!", ["blue tin", "Red Cupboard"])
    assert not exact_match("red", ["blue tin", "Red Cupboard"])
    assert exact_match("4分钟。", ["4 分钟"])


def test_where_there_is_no_answer_nothing_is_right() -> None:
    for mark in (exact_match, f1, rouge_l):
        assert mark("", []) == 1
        assert mark("red", []) == 0


def test_f1_counts_shared_words_of_the_best_answer() -> None:
    assert f1("the red cupboard", ["red cupboard"]) == 1.0
    assert f1("in the red cupboard", ["red cupboard"]) == pytest.approx(2 * 2 / (3 + 2))
    assert f1("red", ["blue tin", "red cupboard"]) == pytest.approx(2 / 3)
    assert f1("tin tin tin", ["tin roof"]) == pytest.approx(2 * 1 / (3 + 2)), "a word counts once"
    assert f1("boat", ["red cupboard"]) == 0.0
    assert f1("红色的船", ["红船"]) == pytest.approx(2 * 2 / (4 + 2)), "characters count"


def test_f1_of_nothing_is_one_only_beside_nothing() -> None:
    assert f1("the", ["a"]) == 1.0
    assert f1("", ["red"]) == 0.0
    assert f1("red", ["the"]) == 0.0


def test_rouge_l_is_of_the_longest_common_subsequence() -> None:
    """The example of Lin (2004): police killed the gunman."""
    reference = ["police killed the gunman"]
    assert rouge_l("police kill the gunman", reference) == pytest.approx(3 / 4)
    assert rouge_l("the gunman kill police", reference) == pytest.approx(2 / 4)
    assert rouge_l("the gunman police killed", reference) == pytest.approx(2 / 4)
    assert rouge_l("Police, killed the: gunman!", ["nobody", *reference]) == 1.0
    assert rouge_l("gunman", reference) == pytest.approx(2 / 5)
    assert rouge_l("...", reference) == 0.0


def test_a_bootstrap_interval_is_that_of_the_mean() -> None:
    marks = [1.0] * 60 + [0.0] * 40
    found = bootstrap_interval(marks)
    half = 1.96 * math.sqrt(0.6 * 0.4 / 100)  # by the normal approximation
    assert (found.low, found.high) == pytest.approx((0.6 - half, 0.6 + half), abs=0.011)
    assert found == bootstrap_interval(marks), "seeded"
    assert bootstrap_interval([1.0, 1.0]).low == 1.0


def test_a_paired_bootstrap_sees_what_two_intervals_hide() -> None:
    """A small gain on every question is sure, though the questions differ much."""
    one = [0.9, 0.1] * 20
    better = [mark + 0.05 for mark in one]
    interval, p_value = paired_bootstrap(better, one)
    assert interval.low == pytest.approx(0.05)
    assert p_value < 0.001
    assert bootstrap_interval(better).low < bootstrap_interval(one).high
    mixed, even = paired_bootstrap([1.0, 0.0] * 20, [0.0, 1.0] * 20)
    assert mixed.low < 0 < mixed.high
    assert even > 0.8
    assert paired_bootstrap(one, one)[1] == 1.0
