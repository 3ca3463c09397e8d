"""Metrics of an answer, and statistics over questions: intervals and paired significance.

Exact match and F1 follow SQuAD (Rajpurkar et al., 2016, section 6.1). Chinese and Japanese
characters count as words, as in CMRC 2018 (Cui et al., 2019, section 4.1). ROUGE-L is Lin (2004),
section 3, of one sentence.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
"""Number of resamples in a bootstrap."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
# kana and Han are written without spaces
_UNSPACED = re.compile(r"([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff])")
_WORDS = re.compile(r"[^\W_]+")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_AT_ONCE = 2**22  # random numbers drawn at once


def normalize(text: str) -> str:
    """Return the text in lower case, without punctuation and articles, with single spaces.

    Every Chinese and Japanese character becomes a word.
    """
    kept = text.lower().translate(_PUNCTUATION)
    if _UNSPACED.search(kept):
        kept = "".join(each for each in kept if unicodedata.category(each)[0] != "P")
        kept = _UNSPACED.sub(r" \1 ", kept)
    return " ".join(_ARTICLES.sub(" ", kept).split())


def exact_match(given: str, answers: Sequence[str]) -> bool:
    """Whether an answer equals an accepted one after normalization.

    Without accepted answers, whether the answer is empty, as in SQuAD 2.0.
    """
    return normalize(given) in [normalize(answer) for answer in answers or ("",)]


def contains_answer(given: str, answers: Sequence[str]) -> bool:
    """Whether an answer contains an accepted one, word by word, after normalization."""
    words = f" {normalize(given)} "
    return any(f" {normalize(answer)} " in words for answer in answers)


def f1(given: str, answers: Sequence[str]) -> float:
    """Return the best F1 of words over the accepted answers.

    Without accepted answers, an empty answer is right.
    """
    words = normalize(given).split()
    return max(_f1(words, normalize(answer).split()) for answer in answers or ("",))


def _f1(given: list[str], answer: list[str]) -> float:
    if not given or not answer:
        return float(given == answer)
    common = sum((Counter(given) & Counter(answer)).values())
    return 2 * common / (len(given) + len(answer))


def rouge_l(given: str, answers: Sequence[str]) -> float:
    """Return the best ROUGE-L F-measure over the accepted answers.

    It is based on the longest common subsequence of lower-case words, without stemming.
    """
    words = _rouge_words(given)
    return max(_rouge_l(words, _rouge_words(answer)) for answer in answers or ("",))


def _rouge_words(text: str) -> list[str]:
    return _WORDS.findall(_UNSPACED.sub(r" \1 ", text.lower()))


def _rouge_l(given: list[str], answer: list[str]) -> float:
    if not given or not answer:
        return float(given == answer)
    return 2 * _common_subsequence(given, answer) / (len(given) + len(answer))


def _common_subsequence(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the length of the longest common subsequence, with one row of the table."""
    row = [0] * (len(other) + 1)
    for word in one:
        above_left = 0
        for place, each in enumerate(other, start=1):
            above = row[place]
            row[place] = above_left + 1 if word == each else max(above, row[place - 1])
            above_left = above
    return row[-1]


@dataclass(frozen=True, slots=True)
class Interval:
    """A 95 % interval."""

    low: float
    high: float


def bootstrap_interval(marks: Sequence[float], seed: int = 0) -> Interval:
    """Return the percentile bootstrap interval of a mean (Efron, 1979), 95 %.

    The interval of equal marks has no width, since no resample differs.

    Args:
        marks: One or more marks, one for each question.
        seed: Seed of the resamples.

    Example:
        >>> bootstrap_interval([0.0, 1.0] * 50)
        Interval(low=0.4, high=0.6)
    """
    means = np.concatenate(list(_resampled_means(np.asarray(marks, np.float64), seed)))
    low, high = np.percentile(means, (2.5, 97.5))
    return Interval(float(low), float(high))


def paired_bootstrap(
    one: Sequence[float], other: Sequence[float], seed: int = 0
) -> tuple[Interval, float]:
    """Return the interval and p-value of the mean difference over the same questions.

    The interval is of `one - other`. The p-value is two-sided (Koehn, 2004): twice the share of
    resamples on the far side of 0, at most 1.
    """
    differences = np.asarray(one, np.float64) - np.asarray(other, np.float64)
    means = np.concatenate(list(_resampled_means(differences, seed)))
    low, high = np.percentile(means, (2.5, 97.5))
    far = min(int((means <= 0).sum()), int((means >= 0).sum()))
    return Interval(float(low), float(high)), min(1.0, 2 * (far + 1) / (len(means) + 1))


def _resampled_means(marks: NDArray[np.float64], seed: int) -> Iterator[NDArray[np.float64]]:
    """Yield the means of `RESAMPLES` samples with replacement, in portions."""
    rng, count = np.random.default_rng(seed), len(marks)
    portion = max(1, _AT_ONCE // count)
    for begin in range(0, RESAMPLES, portion):
        size = min(portion, RESAMPLES - begin)
        yield marks[rng.integers(0, count, (size, count))].mean(axis=1)
