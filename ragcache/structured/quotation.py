"""Quotations: answers that are contiguous runs of given texts, from word boundary to word boundary.

Each text becomes a graph once: nodes are places in it, edges the tokens that spell what follows.
After a place at which a token of the text ends, the text's own next token may follow, or the part
of that token up to a word boundary. At a word's start, and inside of a token, any token may follow
that the text continues with: an answer's first word may lack the space that stands before it in the
text, or have one more. An answer is the set of places that it may have reached; the edges that
leave them are the tokens that may come next. So the texts of one request are joined without
building anything, and a step costs what is left of the occurrences.

Word boundaries are those of Unicode (UAX #29, 4.1), where each Chinese character is a word.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import regex
import torch
from torch import Tensor

from ragcache.engine.detokenizer import StopChecker, token_to_bytes
from ragcache.models import LoadedModel

Ints = npt.NDArray[np.int32]

_BOUNDARY = regex.compile(r"\b", regex.WORD | regex.V1)
_REMEMBERED = 2**15  # words whose spellings are kept
_AHEAD = 64  # bytes in which a text's next token is looked for, after one that is not found


class TokenSpellings:
    """What the tokens of a model spell, in UTF-8. Control tokens and those that end an answer spell
    nothing. width: one more than the largest id."""

    def __init__(self, model: LoadedModel) -> None:
        tokenizer = model.tokenizer
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self.stop_ids = np.array(sorted(model.stop_ids), dtype=np.int32)
        self.width = max([*vocabulary.values(), *self.stop_ids.tolist()]) + 1
        self.of = [b""] * self.width
        self._ids: dict[bytes, int] = {}
        hidden = model.stop_ids.union(model.prompt_tokenizer.control.values())
        spell = token_to_bytes(tokenizer)
        for token, number in vocabulary.items():
            if number not in hidden and (spelled := spell(token)):
                self.of[number] = spelled
                # of a byte token such as <0x41> and a token that is spelled so, the latter
                if spelled not in self._ids or not token.startswith("<0x"):
                    self._ids[spelled] = number
        self._longest = max(map(len, self._ids), default=0)
        self.prefixes = lru_cache(_REMEMBERED)(self._prefixes)

    def id_of(self, spelled: bytes) -> int | None:
        """The token that spells exactly this."""
        return self._ids.get(spelled)

    def _prefixes(self, text: bytes, lead: bytes = b"") -> tuple[tuple[int, int], ...]:
        """The tokens that spell `lead` and then a part of the text, each with its part's length."""
        lengths = range(1, min(len(text), self._longest) + 1)
        found = ((self._ids.get(lead + text[:length]), length) for length in lengths)
        return tuple((token, length) for token, length in found if token is not None)


_spellings: WeakKeyDictionary[LoadedModel, TokenSpellings] = WeakKeyDictionary()
_lock = threading.Lock()


def token_spellings(model: LoadedModel) -> TokenSpellings:
    """Those of the model, made at first use and dropped with it."""
    with _lock:
        found = _spellings.get(model)
        if found is None:
            found = _spellings[model] = TokenSpellings(model)
        return found


Edge = tuple[int, int]
"""A token, and the byte after it."""


@dataclass(frozen=True, slots=True, eq=False)
class QuotableText:
    """The graph of one text.

    Attributes:
        text: The text.
        places: Of each node, the characters before it; a part of a character does not count.
        first: Of each node its first edge, and at the end the number of edges: [N + 1].
        tokens, ends: Of each edge its token, and the node behind it.
        start_tokens, start_ends: The same of the edges that an answer may begin with.
        starts: Of each of these, the place of the first character of the answer.
        last_boundary: Of each place from 0 to the text's length, the last word boundary up to it.
    """

    text: str
    places: Ints
    first: Ints
    tokens: Ints
    ends: Ints
    start_tokens: Ints
    start_ends: Ints
    starts: Ints
    last_boundary: Ints

    @classmethod
    def of(
        cls, text: str, token_ids: Sequence[int], spellings: TokenSpellings,
        cuts: Sequence[int] = (),
    ) -> QuotableText:  # fmt: skip
        """The graph of a text.

        Args:
            text: The text.
            token_ids: Its tokens. Those that do not spell it, such as unknown ones, are not quoted.
            spellings: Of the model's tokens.
            cuts: Places in the text, in characters, that no quotation crosses.
        """
        return _GraphBuilder(text, token_ids, spellings, cuts).build()


class _GraphBuilder:
    """Finds nodes, which are bytes of the text here, and edges."""

    def __init__(
        self, text: str, token_ids: Sequence[int], spellings: TokenSpellings, cuts: Sequence[int]
    ) -> None:
        self.text, self._spellings = text, spellings
        self._raw = text.encode()
        sizes = [len(character.encode()) for character in text]
        at = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))  # of each character, its byte
        self._place = np.searchsorted(at, np.arange(len(self._raw) + 1), side="right") - 1
        bounds = sorted({0, len(text), *(each.start() for each in _BOUNDARY.finditer(text))})
        self._last_boundary = np.array(bounds, np.int32)[
            np.searchsorted(bounds, np.arange(len(text) + 1), side="right") - 1
        ]
        self._bounds: list[int] = at[bounds].tolist()
        self._cuts = frozenset((*at[list(cuts)].tolist(), len(self._raw)))
        self._tokens = dict(self._aligned(token_ids, sorted(self._cuts)))

    def _aligned(self, token_ids: Sequence[int], cuts: list[int]) -> Iterator[tuple[int, Edge]]:
        """The tokens that spell the text at their place, by the byte where they begin. Sets where
        the token around each byte begins, and how far another one there may reach: to the end of
        the word or of that token."""
        size = len(self._raw)
        after = np.searchsorted(self._bounds, np.arange(size), side="right")
        reach = np.array([*self._bounds, size])[after]
        limit = np.array(cuts)[np.searchsorted(cuts, np.arange(size), side="right")]
        self._around = np.arange(size)
        done = 0
        for token in token_ids:
            spelled = self._spellings.of[token] if token < self._spellings.width else b""
            begin = self._raw.find(spelled, done, done + len(spelled) + _AHEAD) if spelled else -1
            if begin >= 0:
                done = begin + len(spelled)
                if done <= limit[begin]:
                    self._around[begin:done] = begin
                    reach[begin:done] = np.maximum(reach[begin:done], done)
                    yield begin, (token, done)
        self._reach: list[int] = np.minimum(reach, limit).tolist()

    def _spelled_from(self, byte: int, lead: bytes = b"") -> Iterator[Edge]:
        """Any tokens that the text continues with, behind `lead`."""
        if byte < len(self._raw):
            text = self._raw[byte : self._reach[byte]]
            for token, length in self._spellings.prefixes(text, lead):
                yield token, byte + length

    def _start_edges(self) -> Iterator[tuple[int, int, int]]:
        """Tokens that an answer may begin with: the token, the byte after it, the answer's first
        byte."""
        alone = self._spellings.id_of(b" ")
        for byte in self._bounds:
            if byte >= len(self._raw) or self.text[self._place[byte]].isspace():
                continue
            edges = {*self._spelled_from(byte)}
            spaced = {*self._spelled_from(byte, b" ")}
            begin = int(self._around[byte])
            if begin in self._tokens and not self._raw[begin:byte].strip():
                edges.add(self._tokens[begin])
            if not spaced and edges and alone is not None and byte not in self._cuts:
                spaced = {(alone, byte)}
            yield from ((token, after, byte) for token, after in sorted(edges | spaced))

    def _edges(self, byte: int) -> list[Edge]:
        """The tokens that may follow a place within an answer."""
        own = self._tokens.get(byte)
        if byte in self._cuts:
            return []
        if own is None:
            return list(self._spelled_from(byte))
        heads = []
        for number in range(bisect_right(self._bounds, byte), len(self._bounds)):
            bound = self._bounds[number]
            if bound >= own[1]:
                break
            token = self._spellings.id_of(self._raw[byte:bound])
            if token is not None and self._raw[byte:bound].strip():
                heads.append((token, bound))
        return [own, *heads]

    def build(self) -> QuotableText:
        starts, bounds = list(self._start_edges()), frozenset(self._bounds)
        edges: dict[int, list[Edge]] = {}
        found = {after for _, after, _ in starts}
        while found:
            byte = found.pop()
            edges[byte] = self._edges(byte)
            found.update(after for _, after in edges[byte] if after not in edges)
        for byte in sorted(edges, reverse=True):  # without ways that end inside a word
            edges[byte] = [edge for edge in edges[byte] if edge[1] in edges]
            if not edges[byte] and byte not in bounds:
                del edges[byte]
        starts = [edge for edge in starts if edge[1] in edges]
        nodes = sorted(edges)
        number = {byte: node for node, byte in enumerate(nodes)}
        sizes = [len(edges[byte]) for byte in nodes]
        return QuotableText(
            self.text,
            places=self._place[nodes].astype(np.int32),
            first=np.concatenate(([0], np.cumsum(sizes, dtype=np.int64))).astype(np.int32),
            tokens=_ints(token for byte in nodes for token, _ in edges[byte]),
            ends=_ints(number[after] for byte in nodes for _, after in edges[byte]),
            start_tokens=_ints(token for token, _, _ in starts),
            start_ends=_ints(number[after] for _, after, _ in starts),
            starts=self._place[[byte for _, _, byte in starts]].astype(np.int32),
            last_boundary=self._last_boundary,
        )


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
        lengths = [len(each.text) + 1 for each in texts]  # a text's end is not the next one's start
        self._offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))).tolist()
        nodes = np.concatenate(([0], np.cumsum([len(each.places) for each in texts]))).tolist()
        edges = np.concatenate(([0], np.cumsum([len(each.tokens) for each in texts]))).tolist()
        self._text = "".join(f"{each.text}\0" for each in texts)
        self.places = _joined([each.places for each in texts], self._offsets)
        self.first = _joined([each.first[:-1] for each in texts], edges, last=edges[-1])
        self.tokens = _joined([each.tokens for each in texts], [0] * len(texts))
        self.ends = _joined([each.ends for each in texts], nodes)
        self.start_tokens = _joined([each.start_tokens for each in texts], [0] * len(texts))
        self.start_ends = _joined([each.start_ends for each in texts], nodes)
        self.starts = _joined([each.starts for each in texts], self._offsets)
        self.last_boundary = _joined([each.last_boundary for each in texts], self._offsets)

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
        """The characters begin:end, counted through all texts."""
        return self._text[begin:end]

    def occurrence(self, begin: int, end: int) -> Occurrence:
        """The place of characters begin:end, counted through all texts."""
        number = bisect_right(self._offsets, begin) - 1
        return Occurrence(number, begin - self._offsets[number], end - self._offsets[number])


def _joined(arrays: Sequence[Ints], offsets: Sequence[int], last: int | None = None) -> Ints:
    shifted = [each + np.int32(by) for each, by in zip(arrays, offsets, strict=False)]
    shifted += [] if last is None else [np.array([last], np.int32)]
    return np.concatenate(shifted) if shifted else np.zeros(0, np.int32)


class Quotation:
    """One answer as it grows: where it stands in the texts of its index.

    Attributes:
        length: Characters from its start to the last word boundary that it has reached.
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
        """Whether nothing may follow."""
        return not len(self._tokens)

    def mask(self) -> Tensor:
        """The tokens that may come next; see `Constraint.mask`."""
        if not self._begun:
            return self._index.start_mask
        return self._index.mask(self._tokens, may_end=self._at_boundary or self.finished)

    def accept(self, token: int) -> None:
        """Takes the next token. Raises `ValueError` for one that no text has here."""
        index, chosen = self._index, self._tokens == token
        if not chosen.any():
            raise ValueError(f"no document goes on with token {token}")
        nodes, begun_at = self._ends[chosen], self._from[chosen]
        self._begun = True
        ends = index.places[nodes]
        lengths = index.last_boundary[ends] - begun_at
        longest = int(lengths.max())
        if longest > self.length:
            self.length, self.starts = longest, begun_at[lengths == longest]
        self._at_boundary = bool(((lengths == ends - begun_at) & (lengths > 0)).any())
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
        end = begin + self.length
        if most is not None and most < self.length:
            end = max(begin, int(self._index.last_boundary[begin + most]))
        return self._index.text(begin, end).rstrip()

    def occurrences(self, length: int) -> list[Occurrence]:
        """Where its first `length` characters stand, in the order of the texts."""
        found = np.unique(self.starts).tolist() if length else []
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


class QuotationConstraint:
    """The constraint of an answer that quotes; see `Constraint`."""

    def __init__(self, index: QuotationIndex) -> None:
        self._quotation = Quotation(index)

    def mask(self) -> Tensor | None:
        """See `Constraint.mask`."""
        return self._quotation.mask()

    def accept(self, token: int) -> None:
        """See `Constraint.accept`. Raises `ValueError` for a token that no text has here."""
        self._quotation.accept(token)

    @property
    def finished(self) -> bool:
        """See `Constraint.finished`."""
        return self._quotation.finished


def quote(index: QuotationIndex, token_ids: Iterable[int], length: int) -> list[Occurrence]:
    """Where the first `length` characters of an answer of these tokens stand."""
    quotation = Quotation(index)
    for token in token_ids:
        quotation.accept(token)
    return quotation.occurrences(length)
