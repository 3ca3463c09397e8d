"""Splitting documents along their structure into texts of limited length."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ragcache.documents.formats import CODE
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
"""Raised when the same text would split differently, so that documents are ingested again."""

_SEPARATORS = [
    r"\n(?=# )", r"\n(?=## )", r"\n(?=#{3,6} )", r"\n\n+", r"\n",
    r"(?<=[.!?])\s+", r"(?<=[。！？])", r"\s", r"",
]  # fmt: skip
_END = "\n\n"  # ends every text, so that modules can follow one another
_SPARE = 2  # a first word may take more tokens without the space before it
MIN_TOKENS = 32


Count = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class SplitModule:
    """A module of a document. metadata: of its part, with the path of `headings` above it."""

    text: str
    token_ids: list[int]
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A module's text, and the headings above its first word."""

    text: str
    headings: tuple[str, ...] = ()


def split_document(
    document: SourceDocument, limit: int, tokenize: Callable[[str], list[int]],
    progress: Callable[[int], None] = lambda _: None,
) -> list[SplitModule]:  # fmt: skip
    """The modules of a document; each of its parts is split separately.

    progress: called with the number of characters that were split.
    """
    count = lambda text: len(tokenize(text))  # noqa: E731
    modules: list[SplitModule] = []
    above: list[Heading] = []
    for part in document.sections:
        above = above if part.continues else []
        for portion, headings in _portions(part, above):
            pieces = _split(portion, limit, count, headings, part.language)
            for piece in pieces:
                path = {"headings": list(piece.headings)} if piece.headings else {}
                metadata = {**path, **part.metadata}
                modules.append(SplitModule(piece.text, tokenize(piece.text), metadata))
            progress(len(portion))
        if not part.language:
            above = path_after(above, find_headings(part.text))
    return modules


def split_text(text: str, limit: int, count_tokens: Count) -> list[str]:
    """Splits a text at headings, paragraphs, sentences, then words; tables stay whole.

    Every part after the first begins with the headings above it, so that it can be understood,
    retrieved and encoded independently. A table that is longer than a part is cut between rows, and
    its header is repeated. limit: the most tokens of a part. Raises `ConfigurationError` where it
    is below `MIN_TOKENS`.
    """
    return [piece.text for piece in _split(text, limit, count_tokens)]


def _split(
    text: str, limit: int, count: Count, above: Sequence[Heading] = (), language: str = ""
) -> list[_Piece]:
    """above: headings of what comes before the text. language: of source code."""
    if limit < MIN_TOKENS:
        raise ConfigurationError(f"module_tokens is {limit}; it must be {MIN_TOKENS} or more")
    text = text.strip() + _END
    before = [Heading(-1, each.level, each.line) for each in above]
    headings = before if language else [*before, *find_headings(text)]
    if count(text) <= limit:
        path = headings_above(headings, 0) if before else []
        whole = _with_headings(path, text.strip(), limit, count)
        return [_Piece(whole, _titles(headings, text, 0))]
    room = limit - count(_END) - _SPARE
    size = room - _room_for_headings(headings, limit, count)
    cuts = _cut_around_tables(text, size, limit, count, language)
    pieces: list[_Piece] = []
    for start, cut in cuts:
        start += len(cut) - len(cut.lstrip())
        whole = _with_headings(headings_above(headings, start), cut.strip(), limit, count)
        if pieces and _only_headings(pieces[-1].text) and whole.startswith(pieces[-1].text):
            pieces.pop()
        pieces.append(_Piece(whole, _titles(headings, cut.strip(), start)))
    return pieces


def _cut_around_tables(
    text: str, size: int, limit: int, count: Count, language: str
) -> Iterator[tuple[int, str]]:
    """Cuts of a text with their places, none of which is blank. A table stays with the text before
    it where both fit."""
    tables = [] if language else list(find_tables(text))
    position = 0
    held: tuple[int, str] | None = None  # the last cut before a table
    for begin, end in [*tables, (len(text), len(text))]:
        for cut in _cut_prose(text[position:begin], position, size, limit, count, language):
            if held is not None:
                yield held
            held = cut
        position = end
        table = text[begin:end]
        if table and held is not None:
            joined = text[held[0] : end]
            if joined.startswith(held[1]) and count(joined.strip() + _END) <= size:
                held = held[0], joined
                continue
            yield held
        if table:
            *rows, held = _cut_table(table, begin, size, limit, count)
            yield from rows
    if held is not None:
        yield held


def _cut_prose(
    text: str, offset: int, size: int, limit: int, count: Count, language: str
) -> Iterator[tuple[int, str]]:
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
    fits = lambda piece: count(piece.strip() + _END) <= limit  # noqa: E731
    position = 0
    hidden = text if language else hide_comments(text)
    for piece in (part for each in splitter.split_text(hidden) for part in _fitting(each, fits)):
        start = hidden.index(piece, position)
        position = start + len(piece)
        if piece.strip():
            yield offset + start, text[start:position]


@cache
def _separators(language: str) -> list[str]:
    if not language:
        return _SEPARATORS
    if language == CODE:
        return [r"\n\n+", r"\n", r"\s", ""]
    from langchain_text_splitters import Language, RecursiveCharacterTextSplitter

    return RecursiveCharacterTextSplitter.get_separators_for_language(Language(language))


def _cut_table(
    table: str, offset: int, size: int, limit: int, count: Count
) -> Iterator[tuple[int, str]]:
    """A table whole, or else in portions of rows with the header above each."""
    if count(table.strip() + _END) <= limit:
        yield offset, table
        return
    lines = table.splitlines(keepends=True)
    header = "".join(lines[:2])
    room = size - count(header) - count(_END) - _SPARE
    if room < size // 2:  # a header too wide to repeat
        yield from _cut_prose(table, offset, size, limit, count, "")
        return
    fits = lambda rows: count((header + rows).strip() + _END) <= size  # noqa: E731
    group: list[str] = []
    used = 0
    for row in [*lines[2:], ""]:
        needed = count(row)
        if group and (not row or used + needed > room):
            for rows in _fitting_rows(group, fits):
                yield offset, header + rows
            group, used = [], 0
        group.append(row)
        used += needed


def _fitting_rows(rows: Sequence[str], fits: Callable[[str], bool]) -> Iterator[str]:
    """Rows of a table, halved until they fit; a row that is too long by itself is cut."""
    if len(rows) > 1 and not fits("".join(rows)):
        middle = len(rows) // 2
        yield from _fitting_rows(rows[:middle], fits)
        yield from _fitting_rows(rows[middle:], fits)
    else:
        yield from (part.strip() + "\n" for part in _fitting("".join(rows), fits) if part.strip())


def _fitting(piece: str, fits: Callable[[str], bool]) -> Iterator[str]:
    """A part, halved until it fits: token counts of pieces may add up to less than the whole."""
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
    """The titles above the first words of a piece, with those that it begins with."""
    ahead = 0
    for line in piece.splitlines(keepends=True):
        if line.strip() and not is_heading(line.rstrip()):
            break
        ahead += len(line)
    path = path_after([], [each for each in headings if each.start < start + max(ahead, 1)])
    return tuple(each.title for each in path)


def _room_for_headings(headings: Sequence[Heading], limit: int, count_tokens: Count) -> int:
    """Tokens of the longest path of headings, at most a third of the limit."""
    path: list[Heading] = []
    paths = set()
    for heading in headings:
        path = path_after(path, [heading])
        paths.add(tuple(each.line for each in path))
    return min(limit // 3, max((count_tokens(_join(path)) for path in paths), default=0))


def _join(headings: Sequence[str]) -> str:
    return "".join(f"{line}\n\n" for line in headings)


def _with_headings(above: list[str], piece: str, limit: int, count_tokens: Count) -> str:
    """The part with as many headings before it as fit; outer headings are dropped first."""
    for first in range(len(above) + 1):
        whole = _join(above[first:]) + piece + _END
        if count_tokens(whole) <= limit:
            return whole
    return piece + _END


_PORTION = 2**18  # characters that are split at once: longer texts would be tokenized many times


def _portions(
    part: DocumentPart, above: Sequence[Heading]
) -> Iterator[tuple[str, Sequence[Heading]]]:
    """A long part in portions that end before a heading or else at a blank line, each with the
    headings above it."""
    text = part.text
    if len(text) <= 2 * _PORTION:
        yield text, above
        return
    headings = [] if part.language else find_headings(text)
    tables = [] if part.language else list(find_tables(text))
    starts = [each.start for each in headings]
    begin = 0
    while begin < len(text):
        end = _portion_end(text, starts, begin)
        until = [each for each in headings if each.start < begin]
        inside = next((a for a, b in tables if a < begin < b), None)
        header = "" if inside is None else "".join(text[inside:begin].splitlines(True)[:2])
        yield header + text[begin:end], path_after(above, until)
        begin = end


def _portion_end(text: str, headings: Sequence[int], begin: int) -> int:
    """Where the portion ends that begins there."""
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
