"""Splitting of documents along their structure into texts of limited length."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeAlias

from ragcache.documents.formats.text import CODE
from ragcache.documents.markdown import (
    Heading,
    find_headings,
    find_tables,
    headings_above,
    hide_comments,
    is_heading,
    path_after,
)
from ragcache.documents.source import DocumentPart, SourceDocument
from ragcache.errors import ConfigurationError

SPLIT_VERSION = 3
"""Raise when the same text would split differently, so that documents are ingested again."""

_SEPARATORS = [
    r"\n(?=# )",
    r"\n(?=## )",
    r"\n(?=#{3,6} )",
    r"\n\n+",
    r"\n",
    r"(?<=[.!?])\s+",
    r"(?<=[。！？])",
    r"\s",
    r"",
]
_END = "\n\n"  # ends every text, so that modules can be concatenated
_SPARE = 2  # a first word may take more tokens without the space before it
MIN_TOKENS = 32


Count = Callable[[str], int]
Places: TypeAlias = tuple[tuple[int, int], ...]
"""Runs of a text that are copied from another: the start of each in both texts, in order."""


@dataclass(frozen=True, slots=True)
class SplitModule:
    """A module of a document."""

    text: str
    """Text, which may repeat the headings and the table header above it."""
    token_ids: list[int]
    """Tokens of the text."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Metadata of its part, with the path of `headings` above it."""
    places: Places = ()
    """Runs of the text in the document's text."""

    @property
    def start(self) -> int | None:
        """Position in the document of the module's own text, after the headings that it repeats."""
        return self.places[-1][1] if self.places else None


@dataclass(frozen=True, slots=True)
class _Cut:
    """A part of a portion, with the places of its runs in the portion."""

    text: str
    places: Places

    @classmethod
    def whole(cls, text: str, start: int) -> _Cut:
        return cls(text, ((0, start),))

    @property
    def start(self) -> int:
        return self.places[0][1]

    def stripped(self) -> _Cut:
        begin = len(self.text) - len(self.text.lstrip())
        return _Cut(self.text.strip(), _within(self.places, begin, len(self.text)))


@dataclass(frozen=True, slots=True)
class _Piece:
    """The text of a module, the titles above its first word, and the places of its runs."""

    text: str
    headings: tuple[str, ...] = ()
    places: Places = ()


def split_document(
    document: SourceDocument,
    limit: int,
    tokenize: Callable[[str], list[int]],
    progress: Callable[[int], None] = lambda _: None,
) -> list[SplitModule]:
    """Split a document into modules. Each of its parts is split separately.

    Args:
        document: The document.
        limit: Maximum number of tokens of a module.
        tokenize: Function from a text to its token ids.
        progress: Called with the number of characters of each portion that was split.
    """

    def count(text: str) -> int:
        return len(tokenize(text))

    modules: list[SplitModule] = []
    above: list[Heading] = []
    done = 0
    for part in document.sections:
        begin = document.text.find(part.text, done)
        done = done if begin < 0 else begin + len(part.text)
        places = () if begin < 0 else ((0, begin),)
        headings = [] if part.language else _placed(find_headings(part.text), places)
        above = above if part.continues else []
        for portion, before in _portions(part, above, headings):
            known = _through(portion.places, len(portion.text), places)
            for piece in _split(portion.text, limit, count, before, part.language, known):
                path = {"headings": list(piece.headings)} if piece.headings else {}
                metadata = {**path, **part.metadata}
                runs = _merged(piece, document.text)
                modules.append(SplitModule(piece.text, tokenize(piece.text), metadata, runs))
            progress(len(portion.text))
        above = path_after(above, headings)
    return modules


def _within(places: Places, begin: int, end: int) -> Places:
    """Return the places of `text[begin:end]`, given the places of the text."""
    first = [each for each in places if each[0] <= begin][-1:]
    later = [each for each in places if begin < each[0] < end]
    return tuple((max(a - begin, 0), at + max(begin - a, 0)) for a, at in [*first, *later])


def _through(places: Places, length: int, outer: Places) -> Places:
    """Return the places of a text in the outer text, given its places in the text between."""
    ends = [*(begin for begin, _ in places[1:]), length]
    return tuple(
        (begin + inner, at)
        for (begin, start), end in zip(places, ends, strict=True)
        for inner, at in _within(outer, start, start + end - begin)
    )


def _placed(headings: Sequence[Heading], places: Places) -> list[Heading]:
    """Add the positions in the document to the headings of a text."""
    found = (_within(places, each.start, each.start + 1) for each in headings)
    return [
        replace(each, at=at[0][1]) if at else each for each, at in zip(headings, found, strict=True)
    ]


def _merged(piece: _Piece, document: str) -> Places:
    """Return the places of a piece. Joins runs that follow each other in both texts."""
    kept: list[tuple[int, int]] = []
    for begin, at in piece.places:
        if kept:
            before, place = kept[-1]
            if begin - before == at - place and document.startswith(
                piece.text[before:begin], place
            ):
                continue
        kept.append((begin, at))
    return tuple(kept)


def split_text(text: str, limit: int, count_tokens: Count) -> list[str]:
    """Split a text at headings, paragraphs, sentences, then words.

    Every part after the first begins with the headings above it, so that it can be understood,
    retrieved and encoded independently. Tables stay whole if they fit. A longer table is cut
    between rows, with its header repeated.

    Args:
        text: The text.
        limit: Maximum number of tokens of a part.
        count_tokens: Function from a text to its number of tokens.

    Raises:
        ConfigurationError: The limit is below `MIN_TOKENS`.
    """
    return [piece.text for piece in _split(text, limit, count_tokens)]


def _split(
    text: str,
    limit: int,
    count: Count,
    above: Sequence[Heading] = (),
    language: str = "",
    places: Places = (),
) -> list[_Piece]:
    """Split a text into the pieces of `split_text`.

    Args:
        text: The text.
        limit: Maximum number of tokens of a piece.
        count: Function from a text to its number of tokens.
        above: Headings before the text.
        language: Language of source code.
        places: Places of the text in the document.
    """
    if limit < MIN_TOKENS:
        raise ConfigurationError(f"module_tokens is {limit}; it must be {MIN_TOKENS} or more")
    places = _within(places, len(text) - len(text.lstrip()), len(text))
    text = text.strip() + _END
    before = [replace(each, start=-1) for each in above]
    headings = before if language else [*before, *_placed(find_headings(text), places)]

    def piece_of(cut: _Cut, path: Sequence[Heading]) -> _Piece:
        kept = _that_fit(path, cut.text, limit, count)
        runs, done = [], 0
        for each in kept:
            runs += [] if each.at is None else [(done, each.at)]
            done += len(_join([each]))
        own = _through(cut.places, len(cut.text), places)
        whole = _join(kept) + cut.text + _END
        titles = _titles(headings, cut.text, cut.start)
        return _Piece(whole, titles, (*runs, *((done + begin, at) for begin, at in own)))

    if count(text) <= limit:
        whole = _Cut.whole(text.strip(), 0)
        return [piece_of(whole, headings_above(headings, 0) if before else [])]
    room = limit - count(_END) - _SPARE
    size = room - _room_for_headings(headings, limit, count)
    pieces: list[_Piece] = []
    for each in _cut_around_tables(text, size, limit, count, language):
        cut = each.stripped()
        piece = piece_of(cut, headings_above(headings, cut.start))
        if pieces and _only_headings(pieces[-1].text) and piece.text.startswith(pieces[-1].text):
            pieces.pop()
        pieces.append(piece)
    return pieces


def _cut_around_tables(
    text: str, size: int, limit: int, count: Count, language: str
) -> Iterator[_Cut]:
    """Yield the cuts of a text that are not blank.

    A table stays with the text before it if both fit.
    """
    tables = [] if language else list(find_tables(text))
    position = 0
    held: _Cut | None = None  # the last cut before a table
    for begin, end in [*tables, (len(text), len(text))]:
        for cut in _cut_prose(text[position:begin], position, size, limit, count, language):
            if held is not None:
                yield held
            held = cut
        position = end
        table = text[begin:end]
        if table and held is not None:
            joined = text[held.start : end]
            if joined.startswith(held.text) and count(joined.strip() + _END) <= size:
                held = _Cut.whole(joined, held.start)
                continue
            yield held
        if table:
            *rows, held = _cut_table(table, begin, size, limit, count)
            yield from rows
    if held is not None:
        yield held


def _cut_prose(
    text: str, offset: int, size: int, limit: int, count: Count, language: str
) -> Iterator[_Cut]:
    from langchain_text_splitters import RecursiveCharacterTextSplitter  # slow to import

    splitter = RecursiveCharacterTextSplitter(
        separators=_separators(language),
        is_separator_regex=True,
        keep_separator="start",
        chunk_size=size,
        chunk_overlap=0,
        length_function=count,
        strip_whitespace=False,
    )

    def fits(piece: str) -> bool:
        return count(piece.strip() + _END) <= limit

    position = 0
    hidden = text if language else hide_comments(text)
    for piece in (part for each in splitter.split_text(hidden) for part in _fitting(each, fits)):
        start = hidden.index(piece, position)
        position = start + len(piece)
        if piece.strip():
            yield _Cut.whole(text[start:position], offset + start)


@cache
def _separators(language: str) -> list[str]:
    if not language:
        return _SEPARATORS
    if language == CODE:
        return [r"\n\n+", r"\n", r"\s", ""]
    from langchain_text_splitters import Language, RecursiveCharacterTextSplitter

    return RecursiveCharacterTextSplitter.get_separators_for_language(Language(language))


def _cut_table(table: str, offset: int, size: int, limit: int, count: Count) -> Iterator[_Cut]:
    """Yield a table whole, or else portions of its rows with the header above each."""
    if count(table.strip() + _END) <= limit:
        yield _Cut.whole(table, offset)
        return
    lines = table.splitlines(keepends=True)
    header = "".join(lines[:2])
    room = size - count(header) - count(_END) - _SPARE
    if room < size // 2:  # a header too wide to repeat
        yield from _cut_prose(table, offset, size, limit, count, "")
        return

    def fits(rows: str) -> bool:
        return count((header + rows).strip() + _END) <= size

    group: list[str] = []
    used, begin = 0, offset + len(header)
    for row in [*lines[2:], ""]:
        needed = count(row)
        if group and (not row or used + needed > room):
            for place, rows in _fitting_rows(group, begin, fits):
                yield _Cut(header + rows, ((0, offset), (len(header), place)))
            begin += len("".join(group))
            group, used = [], 0
        group.append(row)
        used += needed


def _fitting_rows(
    rows: Sequence[str], begin: int, fits: Callable[[str], bool]
) -> Iterator[tuple[int, str]]:
    """Yield rows of a table with their places, halved until they fit.

    A single row that is too long is cut.
    """
    whole, middle = "".join(rows), len(rows) // 2
    if middle and not fits(whole):
        yield from _fitting_rows(rows[:middle], begin, fits)
        yield from _fitting_rows(rows[middle:], begin + len("".join(rows[:middle])), fits)
        return
    for part in _fitting(whole, fits):
        if part.strip():
            yield begin + len(part) - len(part.lstrip()), part.strip() + "\n"
        begin += len(part)


def _fitting(piece: str, fits: Callable[[str], bool]) -> Iterator[str]:
    """Yield a text, halved until each part fits.

    The counts of parts may add up to less than the count of the whole.
    """
    if len(piece) == 1 or fits(piece):
        yield piece
        return
    middle = len(piece) // 2
    space = piece.rfind(" ", 1, middle)
    middle = space if space > 0 else middle
    yield from _fitting(piece[:middle], fits)
    yield from _fitting(piece[middle:], fits)


def _only_headings(piece: str) -> bool:
    return all(is_heading(line) for line in piece.splitlines() if line)


def _titles(headings: Sequence[Heading], piece: str, start: int) -> tuple[str, ...]:
    """Return the titles above the first words of a piece, including titles at its start."""
    ahead = 0
    for line in piece.splitlines(keepends=True):
        if line.strip() and not is_heading(line.rstrip()):
            break
        ahead += len(line)
    path = path_after([], [each for each in headings if each.start < start + max(ahead, 1)])
    return tuple(each.title for each in path)


def _room_for_headings(headings: Sequence[Heading], limit: int, count_tokens: Count) -> int:
    """Return the tokens of the longest path of headings, at most a third of the limit."""
    path: list[Heading] = []
    paths: dict[tuple[str, ...], list[Heading]] = {}
    for heading in headings:
        path = path_after(path, [heading])
        paths[tuple(each.line for each in path)] = path
    return min(limit // 3, max((count_tokens(_join(path)) for path in paths.values()), default=0))


def _join(headings: Sequence[Heading]) -> str:
    return "".join(f"{each.line}\n\n" for each in headings)


def _that_fit(
    above: Sequence[Heading], text: str, limit: int, count_tokens: Count
) -> Sequence[Heading]:
    """Return the headings that fit before the text. Drops outer ones first."""
    for first in range(len(above)):
        if count_tokens(_join(above[first:]) + text + _END) <= limit:
            return above[first:]
    return ()


_PORTION = 2**18  # characters split at once: longer texts would be tokenized many times


def _portions(
    part: DocumentPart, above: Sequence[Heading], headings: Sequence[Heading]
) -> Iterator[tuple[_Cut, Sequence[Heading]]]:
    """Yield a long part in portions, each with the headings above it.

    A portion ends before a heading or else at a blank line.
    """
    text = part.text
    if len(text) <= 2 * _PORTION:
        yield _Cut.whole(text, 0), above
        return
    tables = [] if part.language else list(find_tables(text))
    starts = [each.start for each in headings]
    begin = 0
    while begin < len(text):
        end = _portion_end(text, starts, begin)
        until = [each for each in headings if each.start < begin]
        inside = next((a for a, b in tables if a < begin < b), None)
        if inside is None:
            portion = _Cut.whole(text[begin:end], begin)
        else:
            header = "".join(text[inside:begin].splitlines(True)[:2])
            portion = _Cut(header + text[begin:end], ((0, inside), (len(header), begin)))
        yield portion, path_after(above, until)
        begin = end


def _portion_end(text: str, headings: Sequence[int], begin: int) -> int:
    """Return the end of the portion that begins at `begin`."""
    latest = begin + _PORTION
    if latest >= len(text):
        return len(text)
    last = bisect_right(headings, latest) - 1
    if last >= 0 and headings[last] > begin + _PORTION // 2:
        return headings[last]
    for mark in ("\n\n", "\n", " "):
        found = text.rfind(mark, begin + _PORTION // 2, latest)
        if found > 0:
            return found + len(mark)
    return latest
