"""Quotations: answers that are contiguous runs of given texts, from word boundary to word boundary.

Each text becomes a graph once: its nodes are the places between its bytes, and its edges the tokens
that spell the text after a place. An answer begins at the start of a word, also with a token that
spells a space before it. Its state is the set of places that it may have reached. The edges that
leave them are the tokens that may come next. So the texts of one request need no common graph, and
the cost of a step is proportional to the remaining occurrences.

Word boundaries follow Unicode (UAX #29, 4.1): each Chinese character is a word.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import regex
import torch
from torch import Tensor

from ragcache.engine.detokenizer import StopChecker, token_to_bytes
from ragcache.models import LoadedModel
from ragcache.structured.grammar import once_per_model

Ints = npt.NDArray[np.int32]
Kept = npt.NDArray[np.int32 | np.uint16]
"""Numbers of a text's graph, in 16 bits if all of them fit."""

_BOUNDARY = regex.compile(r"\b", regex.WORD | regex.V1)


class TokenSpellings:
    """The tokens of a model by their bytes in UTF-8, without control and stop tokens."""

    def __init__(self, model: LoadedModel) -> None:
        tokenizer = model.tokenizer
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self.stop_ids = np.array(sorted(model.stop_ids), dtype=np.int32)
        self.width = max([*vocabulary.values(), *self.stop_ids.tolist()]) + 1
        """One more than the largest id."""
        self._ids: dict[bytes, int | None] = {}  # None: only the beginning of tokens
        hidden = model.stop_ids.union(model.prompt_tokenizer.control.values())
        spell = token_to_bytes(tokenizer)
        for token, number in vocabulary.items():
            spelled = b"" if number in hidden else spell(token)
            # a token that spells a byte is preferred to its byte token, such as <0x41>
            if spelled and (self._ids.get(spelled) is None or not token.startswith("<0x")):
                self._ids[spelled] = number
            for end in range(1, len(spelled)):
                self._ids.setdefault(spelled[:end])

    def spelled_from(self, raw: bytes, begin: int, limit: int, lead: bytes = b"") -> list[Edge]:
        """Return the tokens that spell `lead` and the bytes from `begin`, at most up to `limit`.

        Each comes with the place after it.
        """
        found = []
        for end in range(begin + 1, limit + 1):
            token = self._ids.get(lead + raw[begin:end], -1)
            if token == -1:  # no token begins with these bytes
                break
            if token is not None:
                found.append((token, end))
        return found

    @property
    def space(self) -> int | None:
        """The token of a single space."""
        return self._ids.get(b" ")


token_spellings = once_per_model(TokenSpellings)
"""Returns the spellings of a model's tokens."""

Edge = tuple[int, int]
"""A token, and the place after it."""


@dataclass(frozen=True, slots=True, eq=False)
class QuotableText:
    """The graph of one text of N bytes, with E edges and S edges that an answer may begin with."""

    raw: bytes
    """The text, in UTF-8."""
    first: Kept
    """[N + 2]: the first edge of each place, and the number of edges."""
    tokens: Kept
    """[E]: the token of each edge."""
    ends: Kept
    """[E]: the place after each edge."""
    start_tokens: Kept
    """[S]: the token of each first edge."""
    start_ends: Kept
    """[S]: the place after each first edge."""
    starts: Kept
    """[S]: the place of the answer's first byte, for each first edge."""
    last_boundary: Kept
    """[N + 1]: the last word boundary up to each place."""

    @property
    def nbytes(self) -> int:
        """Bytes of the graph, 20 to 40 for each byte of the text."""
        edges = (self.first, self.tokens, self.ends, self.last_boundary)
        starts = (self.start_tokens, self.start_ends, self.starts)
        return len(self.raw) + sum(each.nbytes for each in edges + starts)

    @classmethod
    def of(cls, text: str, spellings: TokenSpellings, cuts: Sequence[int] = ()) -> QuotableText:
        """Build the graph of a text.

        Args:
            text: The text.
            spellings: The tokens of the model.
            cuts: Places in the text, in characters, that no quotation crosses.
        """
        raw = text.encode()
        at = np.cumsum([0, *(len(each.encode()) for each in text)])  # byte offset of each character
        bounds = sorted({0, len(text), *(each.start() for each in _BOUNDARY.finditer(text))})
        words = [int(at[each]) for each in bounds if not text[each : each + 1].isspace()]
        edges, starts = _edges(raw, spellings, words, {*at[bounds].tolist()}, {*at[list(cuts)]})
        places = np.arange(len(raw) + 1)
        last_boundary = at[bounds][np.searchsorted(at[bounds], places, side="right") - 1]
        begins = [begin for begin, leaving in enumerate(edges) for _ in leaving]
        return cls(
            raw,
            first=_kept(np.searchsorted(begins, np.arange(len(raw) + 2))),
            tokens=_kept(_ints(token for leaving in edges for token, _ in leaving)),
            ends=_kept(_ints(end for leaving in edges for _, end in leaving)),
            start_tokens=_kept(_ints(token for _, token, _ in starts)),
            start_ends=_kept(_ints(end for _, _, end in starts)),
            starts=_kept(_ints(begin for begin, _, _ in starts)),
            last_boundary=_kept(last_boundary),
        )


def _edges(
    raw: bytes, spellings: TokenSpellings, words: Sequence[int], bounds: set[int], cuts: set[int]
) -> tuple[list[list[Edge]], list[tuple[int, int, int]]]:
    """Return the edges that leave each place, and the first edges of answers.

    A first edge is (start of the answer, token, place after it). No edge crosses a cut, or ends
    inside a word that no token completes.
    """
    limits = sorted(cuts | {len(raw)})
    useful = bounds.copy()

    def leaving(begin: int, lead: bytes = b"") -> list[Edge]:
        limit = limits[bisect_right(limits, begin)]
        found = spellings.spelled_from(raw, begin, limit, lead)
        return [edge for edge in found if edge[1] in useful]

    edges: list[list[Edge]] = [[] for _ in range(len(raw) + 1)]
    for begin in range(len(raw) - 1, -1, -1):
        if begin not in cuts and (found := leaving(begin)):
            edges[begin] = found
            useful.add(begin)
    starts = []
    for begin in words[: bisect_right(words, len(raw) - 1)]:
        plain, spaced = leaving(begin), leaving(begin, b" ")
        if plain and not spaced and spellings.space is not None and begin not in cuts:
            spaced = [(spellings.space, begin)]
        starts += [(begin, *edge) for edge in plain + spaced]
    return edges, starts


def _ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, np.int32)


def _kept(values: npt.NDArray[np.integer]) -> Kept:
    return values.astype(np.uint16 if values.max(initial=0) < 2**16 else np.int32)


@dataclass(frozen=True, slots=True)
class Occurrence:
    """A place of a quotation in one of the texts."""

    text: int
    """Index of the text."""
    begin: int
    """First character."""
    end: int
    """End of the characters, exclusive."""


class QuotationIndex:
    """The texts that an answer may quote, as one graph.

    It has the arrays of `QuotableText`. Places are counted through all texts, in order.
    """

    def __init__(self, texts: Sequence[QuotableText], spellings: TokenSpellings) -> None:
        self.spellings = spellings
        self._raw = b"".join(each.raw + b"\0" for each in texts)  # an end is no other one's start
        lengths = [len(each.raw) + 1 for each in texts]
        places = self._offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))).tolist()
        counts = [len(each.tokens) for each in texts]
        edges = np.concatenate(([0], np.cumsum(counts, dtype=np.int64))).tolist()
        same = [0] * len(texts)
        self.first = _joined([*(each.first[:-1] for each in texts), _ints([0])], edges)
        self.tokens = _joined([each.tokens for each in texts], same)
        self.ends = _joined([each.ends for each in texts], places)
        self.start_tokens = _joined([each.start_tokens for each in texts], same)
        self.start_ends = _joined([each.start_ends for each in texts], places)
        self.starts = _joined([each.starts for each in texts], places)
        self.last_boundary = _joined([each.last_boundary for each in texts], places)

    @cached_property
    def start_mask(self) -> Tensor:
        """Mask of the tokens that an answer may begin with (`Constraint.mask`)."""
        return self.mask(self.start_tokens, may_end=not len(self.start_tokens))

    def mask(self, tokens: Ints, *, may_end: bool) -> Tensor:
        """Return the packed mask of tokens, with the stop tokens if the answer may end."""
        allowed = np.zeros(-(-self.spellings.width // 32) * 32, dtype=np.bool_)
        allowed[tokens] = True
        if may_end:
            allowed[self.spellings.stop_ids] = True
        return torch.from_numpy(np.packbits(allowed, bitorder="little").view(np.int32))

    def text(self, begin: int, end: int) -> str:
        """Return the text between two places."""
        return self._raw[begin:end].decode()

    def occurrence(self, begin: int, end: int) -> Occurrence:
        """Return the positions of the characters between two places."""
        number = bisect_right(self._offsets, begin) - 1
        first = len(self.text(self._offsets[number], begin))
        return Occurrence(number, first, first + len(self.text(begin, end)))


def _joined(arrays: Sequence[Kept], offsets: Sequence[int]) -> Ints:
    shifted = [
        np.add(each, by, dtype=np.int32)  # `+` of numpy 1 would keep 16 bits
        for each, by in zip(arrays, offsets, strict=False)
    ]
    return np.concatenate(shifted) if shifted else np.zeros(0, np.int32)


class Quotation:
    """The `Constraint` of an answer that quotes: its occurrences in the texts as it grows."""

    def __init__(self, index: QuotationIndex) -> None:
        self._index = index
        self.length = 0
        """Bytes from the start of the answer to the last word boundary that it has reached."""
        self.starts = np.zeros(0, np.int32)
        """Places where quotations of this length begin, counted through all texts."""
        self._at_boundary = False
        self._tokens, self._ends, self._from = index.start_tokens, index.start_ends, index.starts
        self._begun = False

    @property
    def finished(self) -> bool:
        """See `Constraint.finished`."""
        return not len(self._tokens)

    def mask(self) -> Tensor:
        """See `Constraint.mask`."""
        if not self._begun:
            return self._index.start_mask
        return self._index.mask(self._tokens, may_end=self._at_boundary or self.finished)

    def accept(self, token: int) -> None:
        """See `Constraint.accept`. Raises `ValueError` if no text continues with the token."""
        index, chosen = self._index, self._tokens == token
        if not chosen.any():
            raise ValueError(f"no document goes on with token {token}")
        nodes, begun_at = self._ends[chosen], self._from[chosen]
        self._begun = True
        lengths = index.last_boundary[nodes] - begun_at
        longest = int(lengths.max())
        if longest > self.length:
            self.length, self.starts = longest, begun_at[lengths == longest]
        self._at_boundary = bool(((lengths == nodes - begun_at) & (lengths > 0)).any())
        first, counts = index.first[nodes], index.first[nodes + 1] - index.first[nodes]
        edges = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        self._tokens, self._ends = index.tokens[edges], index.ends[edges]
        self._from = np.repeat(begun_at, counts)

    def text(self, most: int | None = None) -> str:
        """Return the answer's text up to the last word boundary, without trailing white space.

        Args:
            most: Maximum number of characters.
        """
        if not self.length:
            return ""
        begin = int(self.starts[0])
        said = self._index.text(begin, begin + self.length)
        if most is not None and most < len(said):
            cut = begin + len(said[:most].encode())
            said = self._index.text(begin, max(begin, int(self._index.last_boundary[cut])))
        return said.rstrip()

    def occurrences(self, said: str) -> list[Occurrence]:
        """Return the places of `said`, a prefix of the answer, in the order of the texts."""
        found, length = np.unique(self.starts).tolist() if said else [], len(said.encode())
        return [self._index.occurrence(begin, begin + length) for begin in found]


class QuotationText:
    """The `TextStream` of an answer that quotes, in pieces that end at word boundaries."""

    def __init__(self, index: QuotationIndex, stop: Sequence[str] = ()) -> None:
        self._quotation, self._stops = Quotation(index), StopChecker(stop)
        self._fed = self._free = self._shown = 0

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, or None before the end."""
        return self._stops.stopped

    def push(self, token_id: int) -> str:
        """Take the next token. Returns the text that can be shown now."""
        if self.stopped is not None:
            return ""
        self._quotation.accept(token_id)
        text = self._quotation.text()
        self._free += len(self._stops.push(text[self._fed :]))
        self._fed = len(text)
        return self._show()

    def finish(self) -> str:
        """End the text. Returns the text that was held back for a possible stop string."""
        if self.stopped is None:
            self._free += len(self._stops.finish(""))
        return self._show()

    def _show(self) -> str:
        text = self._quotation.text(self._free)
        piece, self._shown = text[self._shown :], max(self._shown, len(text))
        return piece


def quote(index: QuotationIndex, token_ids: Iterable[int], said: str) -> list[Occurrence]:
    """Return the places of `said`, the text of an answer of these tokens or a prefix of it."""
    quotation = Quotation(index)
    for token in token_ids:
        quotation.accept(token)
    return quotation.occurrences(said)
