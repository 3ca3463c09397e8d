"""Splitting documents along their structure into texts of limited length."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from ragcache.documents.source import SourceDocument
from ragcache.errors import ConfigurationError

SPLIT_VERSION = 2
"""Raised when the same text would split differently, so that documents are ingested again."""

_SEPARATORS = [
    r"\n(?=# )", r"\n(?=## )", r"\n(?=#{3,6} )", r"\n\n+", r"\n",
    r"(?<=[.!?])\s+", r"(?<=[。！？])", r"\s", r"",
]  # fmt: skip
_HEADING = re.compile(r"^(#{1,6}) +(.+?)\s*$", re.MULTILINE)
_END = "\n\n"  # ends every text, so that modules can follow one another
_SPARE = 2  # a first word may take more tokens without the space before it
MIN_TOKENS = 32


def split_text(text: str, limit: int, count_tokens: Callable[[str], int]) -> list[str]:
    """Splits a text at headings, paragraphs, sentences, then words.

    Every part after the first begins with the headings above it, so that it can be understood,
    retrieved and encoded independently. limit: the most tokens of a part. Raises
    `ConfigurationError` where it is below `MIN_TOKENS`.
    """
    if limit < MIN_TOKENS:
        raise ConfigurationError(f"module_tokens is {limit}; it must be {MIN_TOKENS} or more")
    text = text.strip() + _END
    if count_tokens(text) <= limit:
        return [text]
    from langchain_text_splitters import RecursiveCharacterTextSplitter  # slow to import

    headings = [(m.start(), len(m[1]), m[0].strip()) for m in _HEADING.finditer(text)]
    room = limit - count_tokens(_END) - _SPARE
    splitter = RecursiveCharacterTextSplitter(
        separators=_SEPARATORS,
        is_separator_regex=True,
        keep_separator="start",
        chunk_size=room - _room_for_headings(headings, limit, count_tokens),
        chunk_overlap=0,
        length_function=count_tokens,
        strip_whitespace=False,
    )
    pieces: list[str] = []
    position = 0
    fits = lambda piece: count_tokens(piece.strip() + _END) <= limit  # noqa: E731
    cut = (part for piece in splitter.split_text(text) for part in _fitting(piece, fits))
    for piece in cut:
        start = text.index(piece, position)
        position = start + len(piece)
        if piece.strip():
            above = _above(headings, start + len(piece) - len(piece.lstrip()))
            whole = _with_headings(above, piece.strip(), limit, count_tokens)
            if pieces and _only_headings(pieces[-1]) and whole.startswith(pieces[-1]):
                pieces.pop()
            pieces.append(whole)
    return pieces


def split_document(
    document: SourceDocument, limit: int, tokenize: Callable[[str], list[int]]
) -> list[tuple[str, list[int]]]:
    """Texts and token ids of a document's modules; each of its parts is split separately."""
    parts = document.parts or (document.text,)
    count = lambda text: len(tokenize(text))  # noqa: E731
    texts = [text for part in parts for text in split_text(part, limit, count)]
    return [(text, tokenize(text)) for text in texts]


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
    return all(_HEADING.fullmatch(line) for line in piece.splitlines() if line)


def _above(headings: list[tuple[int, int, str]], position: int) -> list[str]:
    """The headings above a position, outermost first."""
    path: list[tuple[int, str]] = []
    for start, level, line in headings:
        if start >= position:
            break
        path = [(depth, text) for depth, text in path if depth < level]
        path.append((level, line))
    opened = next((level for start, level, _ in headings if start == position), None)
    return [text for depth, text in path if opened is None or depth < opened]


def _room_for_headings(
    headings: list[tuple[int, int, str]], limit: int, count_tokens: Callable[[str], int]
) -> int:
    """Tokens of the longest path of headings, at most a third of the limit."""
    paths = {tuple(_above(headings, start + 1)) for start, _, _ in headings}
    return min(limit // 3, max((count_tokens(_join(path)) for path in paths), default=0))


def _join(headings: tuple[str, ...] | list[str]) -> str:
    return "".join(f"{line}\n\n" for line in headings)


def _with_headings(
    above: list[str], piece: str, limit: int, count_tokens: Callable[[str], int]
) -> str:
    """The part with as many headings before it as fit; outer headings are dropped first."""
    for first in range(len(above) + 1):
        whole = _join(above[first:]) + piece + _END
        if count_tokens(whole) <= limit:
            return whole
    return piece + _END
