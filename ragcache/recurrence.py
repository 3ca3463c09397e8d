"""Detection of texts that recur in prompts, from fingerprints alone.

Prompts leave hashes of runs of their characters, and no text. Winnowing chooses the same runs of a
text wherever the text stands (Schleimer, Wilkerson and Aiken, 2003), so that a later prompt finds
what it shares with earlier ones. Runs at the edges of lines and tags are always chosen, so that a
recurring text is found from its first character to its last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ragcache.recognition import Hashes, Numbers, window_hashes

GRAM = 64
"""Characters of a fingerprint, and most characters from one fingerprint of a text to the next."""

GAP = 2 * GRAM
"""Most characters between two fingerprints of a recurring text, of which one may be forgotten."""

MIN_CHARACTERS = 2 * GRAM
"""Fewest characters of a recurring text. Winnowing finds every text of this length."""

MOST_SPANS = 64
"""Most spans that a prompt yields. Longer ones go first."""

_MIX = np.uint64(0x9E3779B97F4A7C15)
_REPETITIVE = 8  # characters a fingerprint below which a text has many equal runs
_WAYS = 8  # fingerprints of a bucket
_BITS, _MOST_BITS = 11, 19  # buckets of a table: 2,048 (256 KiB) to half a million (64 MiB)
_LOAD = 0.2  # share of filled places from which a table grows

# Tags in which prompts wrap texts, and private characters, which stand for control tokens.
_SEAM = re.compile(
    r"</?(?:source|document|doc|context|chunk|passage|file|content|result|excerpt|item|page"
    r"|tool_response)s?(?:[ _/][^<>\n]{0,500})?>|[\ue000-\uf8ff]+"
)
_LONGEST_SEAM = 512
_EDGES = (r"\n\s*\n", r"\n", r"(?<=[.!?])\s+|(?<=[。！？])", r"\s")
_BEFORE, _AFTER = re.compile("[>\ue000-\uf8ff]"), re.compile("[<\ue000-\uf8ff]")
_ENDS = re.compile(r"\n+|(?<=[.!?:\])])[ \t]+|(?<=[。！？])")
_LINE, _SPACE, _STOP, _OPEN, _CLOSE = 1, 2, 4, 8, 16
_KINDS = np.zeros(256, dtype=np.uint8)  # of characters; all from 255 on are ordinary
for _kind, _letters in (
    (_LINE, b"\n"),
    (_SPACE, b" "),
    (_STOP, b".!?:])"),
    (_OPEN, b"<"),
    (_CLOSE, b">"),
):
    _KINDS[list(_letters)] = _kind
_PRIVATE = 0xE000, 0xF8FF

_Counts = npt.NDArray[np.int32]


class Span(NamedTuple):
    """Characters begin:end of a prompt."""

    begin: int
    end: int


class RecurrenceTable:
    """Fingerprints of the prompts of one namespace, in a table of limited size.

    A fingerprint keeps the first place where it was seen. A full bucket forgets its oldest
    fingerprint for a new one. Not thread-safe.

    Example:
        >>> table, text = RecurrenceTable(), "A sentence that occurs in two prompts. " * 4
        >>> table.observe(f"First question.\\n{text}")
        []
        >>> [span] = table.observe(f"Another question, which is longer.\\n{text}")
    """

    def __init__(self) -> None:
        self._allocate(_BITS)
        self._prompts = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self._hashes.nbytes + self._prompt.nbytes + self._place.nbytes

    def observe(self, text: str) -> list[Span]:
        """Return what recurs in a prompt, and remember the prompt's fingerprints.

        A run of characters recurs if an earlier prompt had it in another place or behind another
        text. What both prompts begin with is left out: its states are shared anyway.

        Args:
            text: The prompt.

        Returns:
            Spans of at least `MIN_CHARACTERS`, by position. Two may overlap by less than `GRAM`
            characters, which their texts have in common with others.
        """
        if len(text) < MIN_CHARACTERS:
            return []
        hashes = window_hashes(text, GRAM)
        places = chosen_places(text, hashes)
        chosen = hashes[places]
        slots, seen = self._find(chosen)
        spans = self._spans(places, slots, seen) if seen.any() else []
        self._remember(places[~seen], chosen[~seen])
        return spans

    def _find(self, hashes: Hashes) -> tuple[Numbers, npt.NDArray[np.bool_]]:
        """Return the slots of fingerprints, and which of them are known."""
        buckets = self._buckets(hashes)
        equal = self._hashes.reshape(-1, _WAYS)[buckets] == hashes[:, None]
        return buckets * _WAYS + equal.argmax(axis=1), equal.any(axis=1)

    def _buckets(self, hashes: Hashes) -> Numbers:
        """Return the buckets of fingerprints. Winnowing prefers small hashes: they are mixed."""
        return (hashes * _MIX >> self._shift).astype(np.int64)

    def _spans(self, places: Numbers, slots: Numbers, seen: npt.NDArray[np.bool_]) -> list[Span]:
        """Return maximal runs of places that earlier prompts have at the same distances.

        Places up to `GRAM` apart leave no character between their runs. Of a longer gap, one
        unknown place may have been forgotten. Two are another text.
        """
        unknown = np.cumsum(~seen)[seen]
        places, slots = places[seen], slots[seen]
        prompts, moved = self._prompt[slots], self._place[slots] - places
        order = np.lexsort((places, moved, prompts))
        places, prompts, moved = places[order], prompts[order], moved[order]
        apart = np.diff(places)
        breaks = np.flatnonzero(
            (np.diff(prompts) != 0)
            | (np.diff(moved) != 0)
            | (apart > GAP)
            | ((apart > GRAM) & (np.diff(unknown[order]) > 1))
        )
        firsts, lasts = np.append(0, breaks + 1), np.append(breaks, len(places) - 1)
        begins, ends, moved = places[firsts], places[lasts] + GRAM, moved[firsts]
        shared = _shared_beginning(begins[moved == 0], ends[moved == 0])
        begins = np.maximum(begins, shared)
        longest = np.argsort(begins - ends, kind="stable")[:MOST_SPANS]
        return _apart(zip(begins[longest].tolist(), ends[longest].tolist(), strict=True))

    def _remember(self, places: Numbers, hashes: Hashes) -> None:
        """Keep the fingerprints of a new prompt."""
        if self._filled > _LOAD * len(self._hashes) and len(self._hashes) < _WAYS << _MOST_BITS:
            self._grow()
        self._prompts += 1
        self._put(hashes, np.full(len(hashes), self._prompts, dtype=np.int32), places)

    def _put(self, hashes: Hashes, prompts: _Counts, places: Numbers | _Counts) -> None:
        """Give each fingerprint the oldest place of its bucket.

        Fingerprints that others of the same prompt overwrite are put again.
        """
        for _ in range(_WAYS):
            self._put_once(hashes, prompts, places)
            again = ~self._find(hashes)[1]
            if not again.any():
                return
            hashes, prompts, places = hashes[again], prompts[again], places[again]

    def _put_once(self, hashes: Hashes, prompts: _Counts, places: Numbers | _Counts) -> None:
        buckets = self._buckets(hashes)
        ages = self._prompt.reshape(-1, _WAYS)[buckets].astype(np.int64)
        first = (hashes & np.uint64(_WAYS - 1)).astype(np.int64)  # two of one prompt seldom collide
        turn = (np.arange(_WAYS) - first[:, None]) % _WAYS
        slots = buckets * _WAYS + (ages * _WAYS + turn).argmin(axis=1)
        self._filled += len(np.unique(slots[self._hashes[slots] == 0]))
        self._hashes[slots], self._prompt[slots], self._place[slots] = hashes, prompts, places

    def _grow(self) -> None:
        kept = np.flatnonzero(self._hashes)
        old = self._hashes[kept], self._prompt[kept], self._place[kept]
        self._allocate((len(self._hashes) // _WAYS).bit_length())
        for way in range(_WAYS):  # fingerprints of one bucket move one after the other
            hashes, prompts, places = (each[kept % _WAYS == way] for each in old)
            self._put(hashes, prompts, places)

    def _allocate(self, bits: int) -> None:
        self._shift, self._filled = np.uint64(64 - bits), 0
        self._hashes: Hashes = np.zeros(_WAYS << bits, dtype=np.uint64)
        self._prompt = np.zeros(_WAYS << bits, dtype=np.int32)
        self._place = np.zeros(_WAYS << bits, dtype=np.int32)


def chosen_places(text: str, hashes: Hashes) -> Numbers:
    """Return the places of the fingerprints of a text, in order.

    A place is chosen if its hash is the least of `GRAM` neighbors, or if its run of characters
    begins or ends at the edge of a line, a sentence, a tag, a control token or the text. Of equal
    runs in a repetitive text, the first is chosen.

    Args:
        text: The text, of at least `MIN_CHARACTERS`.
        hashes: Hashes of all its runs of `GRAM` characters.
    """
    edge = np.zeros(GRAM - 1, dtype=np.uint64)
    least = np.concatenate([edge, _sliding(np.minimum, hashes), edge])
    chosen = _sliding(np.maximum, least) == hashes
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    kinds = _KINDS[np.minimum(codes, 255)]
    ends = kinds == _LINE
    ends[1:] |= (kinds[1:] == _SPACE) & (kinds[:-1] == _STOP)
    if not text.isascii():
        ends |= (codes >= _PRIVATE[0]) & (codes <= _PRIVATE[1])
    opens = np.flatnonzero(ends | (kinds == _OPEN))
    closes = np.flatnonzero(ends | (kinds == _CLOSE)) + 1
    chosen[closes[closes < len(chosen)]] = True
    chosen[opens[opens >= GRAM] - GRAM] = True
    chosen[[0, -1]] = True
    places = np.flatnonzero(chosen)
    if len(places) * _REPETITIVE < len(text):
        return places
    return np.sort(places[np.unique(hashes[places], return_index=True)[1]])


def _sliding(choose: np.ufunc, values: Any) -> Any:
    """Return the minimum or maximum of every run of `GRAM` values."""
    size = 1
    while size < GRAM:
        values = choose(values[:-size], values[size:])
        size *= 2
    return values


def _shared_beginning(begins: Numbers, ends: Numbers) -> int:
    """Return the end of the text that earlier prompts begin with, from the first character on."""
    reach = 0
    for at in np.argsort(begins, kind="stable"):
        if begins[at] > reach:
            break
        reach = max(reach, int(ends[at]))
    return reach


def _apart(longest: Iterator[tuple[int, int]]) -> list[Span]:
    """Return spans without their long overlaps with longer ones, by position."""
    taken: list[Span] = []
    for begin, end in longest:
        for other in taken:
            if begin <= other.end - GRAM and other.begin + GRAM <= end:
                begin, end = (
                    (begin, other.begin) if begin < other.begin else (max(begin, other.end), end)
                )
        if end - begin >= MIN_CHARACTERS:
            taken.append(Span(begin, end))
    return sorted(taken)


def natural_spans(text: str, span: Span) -> Iterator[Span]:
    """Yield the texts in a span: between wrapping tags, from the first edge to the last.

    A span ends where two prompts begin to differ, which may be in the middle of a word. Edges are
    ends of lines and sentences.
    """
    begin = span.begin
    if span.end - begin < MIN_CHARACTERS:
        return
    around = max(span.begin - _LONGEST_SEAM, 0), min(span.end + _LONGEST_SEAM, len(text))
    seams = [match.span() for match in _SEAM.finditer(text, *around)]
    for end, after in [*seams, (span.end, span.end)]:
        if after <= begin:
            continue
        found = _within_edges(text, begin, min(end, span.end))
        if found.end - found.begin >= MIN_CHARACTERS:
            yield found
        begin = max(begin, after)


def _within_edges(text: str, begin: int, end: int) -> Span:
    """Return the part between the first and the last edge, without outer whitespace."""
    around = max(begin - 1, 0), min(end + 1, len(text))
    edges = [match.span() for match in _ENDS.finditer(text, *around)]
    if begin and not _BEFORE.match(text[begin - 1]):
        begin = next((after for _, after in edges if after >= begin), end)
    if end < len(text) and not _AFTER.match(text[end]):
        end = next((at for at, _ in reversed(edges) if at <= end), begin)
    whole = text[begin:end]
    begin += len(whole) - len(whole.lstrip())
    return Span(begin, begin + len(whole.strip()))


def pieces(text: str, limit: int, count_tokens: Callable[[str], int]) -> Iterator[str]:
    """Yield a text in pieces of at most `limit` tokens, cut at its strongest edges.

    Equal texts are cut equally. The pieces join to the text.
    """
    if count_tokens(text) <= limit or len(text) < 2:
        yield text
        return
    cut = _middle_edge(text)
    yield from pieces(text[:cut], limit, count_tokens)
    yield from pieces(text[cut:], limit, count_tokens)


def _middle_edge(text: str) -> int:
    """Return the end of the strongest edge in the middle half of a text, nearest to its center."""
    middle, quarter = len(text) // 2, len(text) // 4
    for edge in _EDGES:
        ends = (match.end() for match in re.finditer(edge, text))
        if inner := [at for at in ends if quarter <= at <= len(text) - quarter]:
            return min(inner, key=lambda at: abs(at - middle))
    return middle


def gaps(length: int, covered: Sequence[tuple[int, int]]) -> Iterator[Span]:
    """Yield the parts of a text of `length` characters between covered parts, in order."""
    done = 0
    for begin, end in covered:
        if begin > done:
            yield Span(done, begin)
        done = max(done, end)
    if done < length:
        yield Span(done, length)
