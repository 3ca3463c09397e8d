"""A PML text, screened and parsed by lxml: its elements, and its tags with their places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from lxml import etree

from .errors import PMLError, PMLSyntaxError, PMLWarning
from .scanner import CDATA_ADVICE, Limits, Tag, decode, scan
from .tree import Location
from .turns import apply, balance

__all__ = ["Document", "Element", "Report", "Warn", "load"]

Element: TypeAlias = etree._Element
Report: TypeAlias = Callable[[PMLError], None]
"""Takes a problem: raises it when parsing, keeps it when linting."""
Warn: TypeAlias = Callable[[PMLWarning], None]


@dataclass(frozen=True, slots=True)
class Document:
    """The root element, and every tag in the order of the text."""

    root: Element
    tags: list[Tag]


def load(text: str | bytes, source: str, limits: Limits, warn: Warn) -> Document:
    """Parses `text` as XML with entities, DTD and network off.

    Raises PMLSyntaxError, ForbiddenMarkup or LimitExceeded.
    """
    text = decode(text, source, limits)
    tags = scan(text, source, limits)
    edits, warnings = balance(tags)
    for warning in warnings:
        warn(warning)
    if edits:
        edited = apply(text, edits)
        tags = scan(text, source, limits, edited=edited, edits=edits)
        text = edited
    return Document(_parse(text, source, tags), tags)


def _parse(text: str, source: str, tags: list[Tag]) -> Element:
    # huge_tree lifts libxml2's own limits: `scan` has already applied stricter ones.
    parser = etree.XMLParser(
        encoding="utf-8",
        resolve_entities=False,
        no_network=True,
        load_dtd=False,
        dtd_validation=False,
        huge_tree=True,
        remove_comments=True,
        recover=False,
    )
    try:
        return etree.fromstring(text.encode(), parser)
    except etree.XMLSyntaxError as error:
        line, column = error.position
        where = Location(max(line or 1, 1), max(column or 1, 1), source)
        before = [tag for tag in tags if (tag.location.line, tag.location.column) <= error.position]
        element = before[-1].name if before else None
        problem = f"not well-formed XML: {(error.msg or 'unknown error').strip()}"
        raise PMLSyntaxError(problem, where, element, CDATA_ADVICE) from None
