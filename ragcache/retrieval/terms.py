"""Words of a text, as BM25 counts them."""

from __future__ import annotations

import re
import threading

import Stemmer

_WORD = re.compile(r"[^\W_]+", re.UNICODE)
_IDEOGRAPHS = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")
STOP_WORDS = frozenset(
    "a an and are as at be been by can could did do does for from had has have he her him his how "
    "i if in into is it its long many may me much must my no not of on one or our shall she should "
    "so than that the their them there they this those to up us was we were what when where which "
    "who whom whose why will with would you your".split()
)


class _Local(threading.local):
    """A stemmer for each thread: PyStemmer's are not thread-safe."""

    def __init__(self) -> None:
        self.stemmer = Stemmer.Stemmer("english")


_local = _Local()


def terms(text: str) -> list[str]:
    """Stemmed words without stop words; Chinese, Japanese and Korean as pairs of characters."""
    found: list[str] = []
    for word in _WORD.findall(text.lower()):
        if _IDEOGRAPHS.search(word):
            found.extend(_pairs(word))
        elif word not in STOP_WORDS:
            found.append(word)
    stemmed: list[str] = _local.stemmer.stemWords(found)
    return stemmed


def characters(text: str) -> list[str]:
    """The Chinese, Japanese and Korean characters of a text, one by one."""
    return [character for run in _IDEOGRAPHS.findall(text) for character in run]


def lone_characters(text: str) -> list[str]:
    """Those that stand alone: a question of one character has no pair to be found by."""
    return [w for w in _WORD.findall(text) if len(w) == 1 and _IDEOGRAPHS.match(w)]


def _pairs(word: str) -> list[str]:
    return [word[i : i + 2] for i in range(max(1, len(word) - 1))]
