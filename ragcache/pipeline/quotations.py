"""What extractive answers quote: modules as quotable texts, and the places of quotations in the
documents."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ragcache.db import Catalog, ModuleRow
from ragcache.engine import Choice
from ragcache.errors import StoreError
from ragcache.models import LoadedModel
from ragcache.pipeline.module_states import ModuleTokens
from ragcache.structured.quotation import (
    Occurrence,
    QuotableText,
    QuotationIndex,
    TokenSpellings,
    quote,
    token_spellings,
)

logger = logging.getLogger(__name__)

CONTEXT = 240  # characters of a span's prefix and suffix, at most
_KEPT = 512  # modules whose graphs are kept, those used last
_SEAMS = 32  # of a module; what is before the last of them is not looked for in its document
_MISSED = 3  # lines of a module that do not stand in its document, after which others are not tried
_WINDOW = 1 << 20  # characters that one call searches, in about a millisecond


@dataclass(frozen=True, slots=True)
class AnswerSpan:
    """A place that an extractive answer quotes.

    Attributes:
        document: Id of the document.
        module: Name of the module.
        start, end: Characters start:end of the document's text (`RagCache.texts`) are the answer.
            None where the module's text does not stand there.
        page: The page or slide, where the document has such.
        headings: The titles above the module, outermost first.
        prefix, suffix: What stands before and after the answer in the same line.
        choice: Of which of the `n` answers.
    """

    document: str
    module: str
    start: int | None
    end: int | None
    page: int | None = None
    headings: tuple[str, ...] = ()
    prefix: str = ""
    suffix: str = ""
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a module's text that stands in the document as it is: it begins at character
    `begin` of the module and `at` of the document, None where it was not found."""

    begin: int
    at: int | None


def find_blocks(text: str, document: str) -> list[Block]:
    """The blocks of a module's text, in order. A module is one, but for the headings and the header
    of a table that it may repeat before its own text."""
    blocks: list[Block] = []
    end, before, missed = len(text.rstrip()), len(document), 0
    while end > 0 and len(blocks) < _SEAMS and missed < _MISSED:
        begin, at = _longest_suffix(text, end, document)
        if at < 0:
            missed += 1
        elif blocks and (nearer := _find_last(text[begin:end], document, before)) >= 0:
            at = nearer
        blocks.append(Block(begin, at if at >= 0 else None))
        end, before = len(text[:begin].rstrip()), at if at >= 0 else before
    if end > 0:
        blocks.append(Block(0, None))
    return blocks[::-1]


def _longest_suffix(text: str, end: int, document: str) -> tuple[int, int]:
    """Where the longest part of text[:end] begins that is whole lines and stands in the document,
    and its first place there; the last line and -1 where none does."""
    lines = [0, *(at + 1 for at in range(end) if text[at] == "\n" != text[at + 1])]
    place = _find_first(text[:end], document)
    if place >= 0 or len(lines) == 1:
        return 0, place
    low, high = 1, len(lines) - 1  # the suffix from `high` is taken, whose first place is `place`
    place = _find_first(text[lines[high] : end], document)
    while low < high and place >= 0:
        middle = (low + high) // 2
        start = max(0, place - (lines[high] - lines[middle]))  # no longer one stands before
        longer = _find_first(text[lines[middle] : end], document, start)
        if longer >= 0:
            high, place = middle, longer
        else:
            low = middle + 1
    return lines[high], place


def _find_first(part: str, document: str, start: int = 0) -> int:
    """`document.find`, by windows: other threads run between them, but not during a call."""
    for begin in range(start, len(document) - len(part) + 1, _WINDOW):
        at = document.find(part, begin, begin + _WINDOW + len(part) - 1)
        if at >= 0:
            return at
    return -1


def _find_last(part: str, document: str, before: int) -> int:
    """`document.rfind` of what ends at `before` or earlier, by windows."""
    for end in range(before, len(part) - 1, -_WINDOW):
        at = document.rfind(part, max(0, end - _WINDOW - len(part) + 1), end)
        if at >= 0:
            return at
    return -1


@dataclass(frozen=True, slots=True)
class QuotableModule:
    """A module's graph, and where its blocks stand in its document."""

    graph: QuotableText
    blocks: tuple[Block, ...]

    def span(self, module: ModuleRow, found: Occurrence, choice: int) -> AnswerSpan:
        """The span of an occurrence in the module's text."""
        text = self.graph.text
        block = next(each for each in reversed(self.blocks) if each.begin <= found.begin)
        moved = None if block.at is None else block.at - block.begin
        line = max(text.rfind("\n", 0, found.begin) + 1, found.begin - CONTEXT)
        end = text.find("\n", found.end)
        end = min(len(text) if end < 0 else end, found.end + CONTEXT)
        return AnswerSpan(
            module.document, module.name,
            start=None if moved is None else found.begin + moved,
            end=None if moved is None else found.end + moved,
            page=page_of(module), headings=headings_of(module),
            prefix=text[line : found.begin], suffix=text[found.end : end], choice=choice,
        )  # fmt: skip


def page_of(module: ModuleRow) -> int | None:
    """The page or slide that a module is from."""
    page = module.metadata.get("page")
    return page if isinstance(page, int) else None


def headings_of(module: ModuleRow) -> tuple[str, ...]:
    """The titles above a module; a loader may have metadata of this name too."""
    headings: Any = module.details.get("headings", ())
    return tuple(map(str, headings)) if isinstance(headings, list) else ()


@dataclass(frozen=True)
class QuotationSources:
    """The modules that one answer may quote, the best first."""

    modules: tuple[ModuleRow, ...]
    quotable: tuple[QuotableModule, ...]
    spellings: TokenSpellings

    @cached_property
    def index(self) -> QuotationIndex:
        return QuotationIndex([each.graph for each in self.quotable], self.spellings)

    def spans(self, choices: Sequence[Choice]) -> tuple[AnswerSpan, ...]:
        """Where the choices stand, those of the first one first; each place once."""
        return tuple(self._spans(choices))

    def _spans(self, choices: Sequence[Choice]) -> Iterator[AnswerSpan]:
        for number, choice in enumerate(choices):
            if choice.finish_reason == "no_answer":  # its text is a refusal
                continue
            known = set()
            for found in quote(self.index, choice.token_ids, len(choice.text)):
                span = self.quotable[found.text].span(self.modules[found.text], found, number)
                place = (span.document, span.start, span.module if span.start is None else "")
                if place not in known:  # modules may repeat a heading
                    known.add(place)
                    yield span


class Quotations:
    """Makes modules of a namespace quotable, and keeps those used last. Thread-safe."""

    def __init__(self, catalog: Catalog, model: LoadedModel, tokens: ModuleTokens) -> None:
        self._catalog, self._model, self._tokens = catalog, model, tokens
        self._known: OrderedDict[int, QuotableModule] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, modules: Sequence[ModuleRow]) -> QuotationSources:
        """The sources of an answer that may quote these modules."""
        modules = tuple({module.id: module for module in modules}.values())
        spellings = token_spellings(self._model)
        with self._lock:
            known = {m.id: self._known[m.id] for m in modules if m.id in self._known}
            for number in known:
                self._known.move_to_end(number)
        missing = [module for module in modules if module.id not in known]
        known |= self._made(missing, spellings) if missing else {}
        return QuotationSources(modules, tuple(known[m.id] for m in modules), spellings)

    def _made(
        self, modules: Sequence[ModuleRow], spellings: TokenSpellings
    ) -> dict[int, QuotableModule]:
        documents = self._documents(modules)
        made = {}
        for module, ids in zip(modules, self._tokens.of(modules), strict=True):
            blocks: tuple[Block, ...] = (Block(0, None),)
            if module.id in documents:
                blocks = tuple(find_blocks(module.text, documents[module.id])) or blocks
            cuts = [block.begin for block in blocks]
            graph = QuotableText.of(module.text, ids, spellings, cuts)
            made[module.id] = QuotableModule(graph, blocks)
        with self._lock:
            self._known.update((number, made[number]) for number in made if number in documents)
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return made

    def _documents(self, modules: Sequence[ModuleRow]) -> dict[int, str]:
        """The texts of the modules' documents, by the modules' ids. From memory the question is
        answered without them, so that it does not wait for a ledger that is known to be away."""
        if not self._catalog.answers:
            return {}
        try:
            return self._catalog.document_texts([module.id for module in modules])
        except StoreError as error:
            logger.warning("%s; the spans of this answer have no offsets", error)
            return {}
