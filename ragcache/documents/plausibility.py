"""Whether a text is language, by classes of characters and frequencies of letters.

A font of a PDF without a map to characters gives texts such as `# +%%3*(-./5)`, letters of another
alphabet, or rare characters of Chinese and Korean. No dictionary is needed: languages that are
written with an alphabet have letters of known frequencies, and the standards of East Asia list the
characters that are in common use.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable

from ragcache.documents.charset import letter_likelihood

_FEW = 24  # characters of a text that is too short to judge
_UNMAPPED = 0.3  # most characters without a meaning
_MARKS = 0.55  # most characters that are neither letters nor digits
_COMMON = 0.7  # least share of the characters of East Asia that are in common use
_FEW_LETTERS = 120  # letters of a text whose frequencies are too uncertain
_UNLIKELY = -3.5  # mean logarithm of the likelihood of letters that no language has
_REPEATED = re.compile(r"([\W_])\1+")
_ALPHABETS = 0x530  # code points of Latin, Greek and Cyrillic letters end here
_VIETNAMESE = frozenset(map(chr, range(0x1EA0, 0x1EFA)))
_HANGUL = range(0xAC00, 0xD7A4)
_IDEOGRAPHS = range(0x4E00, 0x9FFF)
_COMMON_SETS = {"gb2312": (0xB0, 0xD7), "euc_jp": (0xB0, 0xCF), "big5": (0xA4, 0xC6)}
"""Encodings of Chinese and Japanese, and the first bytes of characters in common use."""


def find_garbage(text: str) -> str:
    """Return why a text cannot be language, or an empty text if it can.

    Short texts, code, and tables of numbers pass.

    Example:
        >>> find_garbage("# +%%3*(-./5) %*+ (-./5) #%+3 *(-./ 5)%%+ 3*(")
        'most of its characters are marks'
    """
    text = text.replace("|", " ")  # of tables
    characters = [each for each in _REPEATED.sub(r"\1", text) if not each.isspace()]
    if len(characters) < _FEW:
        return ""
    kinds = Counter(map(unicodedata.category, characters))
    unmapped = sum(kinds[kind] for kind in ("Co", "Cn", "Cc", "Cs")) + characters.count("\ufffd")
    if unmapped > _UNMAPPED * len(characters):
        return "its characters have no meaning"
    words = sum(count for kind, count in kinds.items() if kind[0] in "LNM")
    if words < (1 - _MARKS) * len(characters):
        return "most of its characters are marks"
    if not _is_common(characters):
        return "its characters are in no common use"
    letters = _letters(text)
    is_judged = len(letters) >= _FEW_LETTERS
    if is_judged and letter_likelihood(letters) < _UNLIKELY:
        return "its letters have the frequencies of no language"
    return ""


def _letters(text: str) -> list[str]:
    """Return the letters of alphabets in the different words of a text, without their accents."""
    words = {word.lower() for word in re.findall(r"[^\W\d_]+", text)}
    return [
        unicodedata.normalize("NFD", letter)[0]
        for word in words
        for letter in word
        if ord(letter) < _ALPHABETS or letter in _VIETNAMESE
    ]


def _is_common(characters: Iterable[str]) -> bool:
    """Whether characters of East Asia are in common use, or there are few of them."""
    found = [each for each in characters if ord(each) in _HANGUL or ord(each) in _IDEOGRAPHS]
    if len(found) < _FEW:
        return True
    return sum(map(_is_common_character, found)) >= _COMMON * len(found)


def _is_common_character(character: str) -> bool:
    if ord(character) in _HANGUL:
        return _encodes(character, "euc_kr") is not None
    for encoding, (first, last) in _COMMON_SETS.items():
        raw = _encodes(character, encoding)
        if raw is not None and first <= raw[0] <= last:
            return True
    return False


def _encodes(character: str, encoding: str) -> bytes | None:
    try:
        raw = character.encode(encoding)
    except UnicodeEncodeError:
        return None
    return raw if len(raw) == 2 else None  # euc_kr spells rare syllables by their letters
