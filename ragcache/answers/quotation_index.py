"""Quotations: answers that are contiguous runs of given texts, from word boundary to word boundary.

Each text becomes a graph once: its nodes are the places between its bytes, its edges the tokens
that spell what follows a place. An answer begins at the start of a word, also with a token that
spells a space before it. It is the set of places that it may have reached; the edges that leave
them are the tokens that may come next. So the texts of one request are joined without building
anything, and a step costs what is left of the occurrences.

Word boundaries are those of Unicode (UAX #29, 4.1), where each Chinese character is a word.
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

_BOUNDARY = regex.compile(r"\b", regex.WORD | regex.V1)


class TokenSpellings:
    """The tokens of a model by what they spell, in UTF-8, but control tokens and those that end an
    answer. width: one more than the largest id."""

    def __init__(self, model: LoadedModel) -> None:
        tokenizer = model.tokenizer
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self.stop_ids = np.array(sorted(model.stop_ids), dtype=np.int32)
        self.width = max([*vocabulary.values(), *self.stop_ids.tolist()]) + 1
        self._ids: dict[bytes, int | None] = {}  # None: only the beginning of tokens
        hidden = model.stop_ids.union(model.prompt_tokenizer.control.values())
        spell = token_to_bytes(tokenizer)
        for token, number in vocabulary.items():
            spelled = b"" if number in hidden else spell(token)
            # of a byte token such as <0x41> and a token that is spelled so, the latter
            if spelled and (self._ids.get(spelled) is None or not token.startswith("<0x")):
                self._ids[spelled] = number
            for end in range(1, len(spelled)):
                self._ids.setdefault(spelled[:end])

    def spelled_from(self, raw: bytes, begin: int, limit: int, lead: bytes = b"") -> list[Edge]:
        """The tokens that spell `lead` and what follows, up to `limit`, each with the byte after
        it."""
        found = []
        for end in range(begin + 1, limit + 1):
            token = self._ids.get(lead + raw[begin:end], -1)
            if token == -1:  # no longer one begins so
                break
            if token is not None:
                found.append((token, end))
        return found

    @property
    def space(self) -> int | None:
        """The token of a single space."""
        return self._ids.get(b" ")


token_spellings = once_per_model(TokenSpellings)
"""The spellings of a model's tokens."""

Edge = tuple[int, int]
"""A token, and the byte after it."""


@dataclass(frozen=True, slots=True, eq=False)
class QuotableText:
    """The graph of one text of N bytes.

    Attributes:
        raw: The text, in UTF-8.
        first: Of each place its first edge, and at the end the number of edges: [N + 2].
        tokens, ends: Of each edge its token, and the place behind it.
        start_tokens, start_ends: The same of the edges that an answer may begin with.
        starts: Of each of these, the place of the first byte of the answer.
        last_boundary: Of each place, the last word boundary up to it: [N + 1].
    """

    raw: bytes
    first: Ints
    tokens: Ints
    ends: Ints
    start_tokens: Ints
    start_ends: Ints
    starts: Ints
    last_boundary: Ints

    @classmethod
    def of(cls, text: str, spellings: TokenSpellings, cuts: Sequence[int] = ()) -> QuotableText:
        """The graph of a text. cuts: places in it, in characters, that no quotation crosses."""
        raw = text.encode()
        at = np.cumsum([0, *(len(each.encode()) for each in text)])  # of each character, its byte
        bounds = sorted({0, len(text), *(each.start() for each in _BOUNDARY.finditer(text))})
        words = [int(at[each]) for each in bounds if not text[each : each + 1].isspace()]
        edges, starts = _edges(raw, spellings, words, {*at[bounds].tolist()}, {*at[list(cuts)]})
        places = np.arange(len(raw) + 1)
        last_boundary = at[bounds][np.searchsorted(at[bounds], places, side="right") - 1]
        begins = [begin for begin, leaving in enumerate(edges) for _ in leaving]
        return cls(
            raw,
            first=np.searchsorted(begins, np.arange(len(raw) + 2)).astype(np.int32),
            tokens=_ints(token for leaving in edges for token, _ in leaving),
            ends=_ints(end for leaving in edges for _, end in leaving),
            start_tokens=_ints(token for _, token, _ in starts),
            start_ends=_ints(end for _, _, end in starts),
            starts=_ints(begin for begin, _, _ in starts),
            last_boundary=last_boundary.astype(np.int32),
        )


def _edges(
    raw: bytes, spellings: TokenSpellings, words: Sequence[int], bounds: set[int], cuts: set[int]
) -> tuple[list[list[Edge]], list[tuple[int, int, int]]]:
    """The edges that leave each place, and those that an answer may begin with, after the places
    where it begins. None crosses a cut, or ends inside of a word that no token completes."""
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


@dataclass(frozen=True, slots=True)
class Occurrence:
    """Where a quotation stands: characters begin:end of the text with this number."""

    text: int
    begin: int
    end: int


class QuotationIndex:
    """The texts that an answer may quote, as one graph. The attributes are those of
    `QuotableText`; places count through all texts, in order."""

    def __init__(self, texts: Sequence[QuotableText], spellings: TokenSpellings) -> None:
        self.spellings = spellings
        self._raw = b"".join(each.raw + b"\0" for each in texts)  # an end is no other one's start
        lengths = [len(each.raw) + 1 for each in texts]
        places = self._offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))).tolist()
        edges = np.concatenate(([0], np.cumsum([len(each.tokens) for each in texts]))).tolist()
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
        """The tokens that an answer may begin with; see `Constraint.mask`."""
        return self.mask(self.start_tokens, may_end=not len(self.start_tokens))

    def mask(self, tokens: Ints, *, may_end: bool) -> Tensor:
        """These tokens, packed; with those that end an answer if it `may_end`."""
        allowed = np.zeros(-(-self.spellings.width // 32) * 32, dtype=np.bool_)
        allowed[tokens] = True
        if may_end:
            allowed[self.spellings.stop_ids] = True
        return torch.from_numpy(np.packbits(allowed, bitorder="little").view(np.int32))

    def text(self, begin: int, end: int) -> str:
        """The text between two places."""
        return self._raw[begin:end].decode()

    def occurrence(self, begin: int, end: int) -> Occurrence:
        """Positions of the characters between two places."""
        number = bisect_right(self._offsets, begin) - 1
        first = len(self.text(self._offsets[number], begin))
        return Occurrence(number, first, first + len(self.text(begin, end)))


def _joined(arrays: Sequence[Ints], offsets: Sequence[int]) -> Ints:
    shifted = [each + np.int32(by) for each, by in zip(arrays, offsets, strict=False)]
    return np.concatenate(shifted) if shifted else np.zeros(0, np.int32)


class Quotation:
    """One answer as it grows: where it stands in the texts of its index. It is the `Constraint` of
    an answer that quotes.

    Attributes:
        length: Bytes from its start to the last word boundary that it has reached.
        starts: Where the quotations of this length begin, counted through all texts.
    """

    def __init__(self, index: QuotationIndex) -> None:
        self._index = index
        self.length = 0
        self.starts = np.zeros(0, np.int32)
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
        """See `Constraint.accept`. Raises `ValueError` for a token that no text has here."""
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
        """What it says up to the last word boundary, of its first `most` characters; without white
        space at its end."""
        if not self.length:
            return ""
        begin = int(self.starts[0])
        said = self._index.text(begin, begin + self.length)
        if most is not None and most < len(said):
            cut = begin + len(said[:most].encode())
            said = self._index.text(begin, max(begin, int(self._index.last_boundary[cut])))
        return said.rstrip()

    def occurrences(self, said: str) -> list[Occurrence]:
        """Places of the beginning `said`, in the order of the texts."""
        found, length = np.unique(self.starts).tolist() if said else [], len(said.encode())
        return [self._index.occurrence(begin, begin + length) for begin in found]


class QuotationText:
    """The text of an answer as it grows, in pieces that end at word boundaries: a `TextStream` that
    never says more than the quotation."""

    def __init__(self, index: QuotationIndex, stop: Sequence[str] = ()) -> None:
        self._quotation, self._stops = Quotation(index), StopChecker(stop)
        self._fed = self._free = self._shown = 0

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, None before."""
        return self._stops.stopped

    def push(self, token_id: int) -> str:
        """Takes the next token. Returns the text that is now safe to show."""
        if self.stopped is not None:
            return ""
        self._quotation.accept(token_id)
        text = self._quotation.text()
        self._free += len(self._stops.push(text[self._fed :]))
        self._fed = len(text)
        return self._show()

    def finish(self) -> str:
        """Ends the text. Returns what a stop string held back."""
        if self.stopped is None:
            self._free += len(self._stops.finish(""))
        return self._show()

    def _show(self) -> str:
        text = self._quotation.text(self._free)
        piece, self._shown = text[self._shown :], max(self._shown, len(text))
        return piece


def quote(index: QuotationIndex, token_ids: Iterable[int], said: str) -> list[Occurrence]:
    """Places of `said`, which is the text of an answer of these tokens or its beginning."""
    quotation = Quotation(index)
    for token in token_ids:
        quotation.accept(token)
    return quotation.occurrences(said)
