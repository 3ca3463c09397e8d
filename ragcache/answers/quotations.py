"""Modules as quotable texts, and the positions of quotations in the documents."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ragcache.answers.quotation_index import (
    Occurrence,
    QuotableText,
    QuotationIndex,
    TokenSpellings,
    quote,
    token_spellings,
)
from ragcache.db import ModuleRow
from ragcache.engine import Choice
from ragcache.models import LoadedModel

CONTEXT = 240  # maximum characters of a span's prefix and suffix
_KEPT = 512  # graphs of modules in the cache, which evicts the least recently used


@dataclass(frozen=True, slots=True)
class AnswerSpan:
    """A place that an extractive answer quotes."""

    document: str
    """Id of the document."""
    module: str
    """Name of the module."""
    start: int | None
    """First character of the answer in the document's text (`rag.documents.texts`), or None: some
    parts of modules, such as repeated headings, are not at this place of the document."""
    end: int | None
    """End of the answer in the document's text, exclusive, or None like `start`."""
    page: int | None = None
    """Page or slide, in documents that have pages."""
    headings: tuple[str, ...] = ()
    """Titles above the module, outermost first."""
    prefix: str = ""
    """Text before the answer in the same line, at most `CONTEXT` characters."""
    suffix: str = ""
    """Text after the answer in the same line, at most `CONTEXT` characters."""
    choice: int = 0
    """Index of the answer, from 0, among the `n` answers to a question."""


@dataclass(frozen=True, slots=True)
class QuotableModule:
    """A module's text with its graph and its places in the document."""

    text: str
    """The module's text."""
    graph: QuotableText
    """Graph of the text."""
    places: Sequence[tuple[int, int]]
    """For each run of the text, its first character in the module and in the document."""

    def span(self, module: ModuleRow, found: Occurrence, choice: int) -> AnswerSpan:
        """Return the span of an occurrence in the module's text."""
        text = self.text
        moved = next((at - a for a, at in reversed(self.places) if a <= found.begin), None)
        line = max(text.rfind("\n", 0, found.begin) + 1, found.begin - CONTEXT)
        end = text.find("\n", found.end)
        end = min(len(text) if end < 0 else end, found.end + CONTEXT)
        return AnswerSpan(
            module.document,
            module.name,
            start=None if moved is None else found.begin + moved,
            end=None if moved is None else found.end + moved,
            page=module.page,
            headings=module.headings,
            prefix=text[line : found.begin],
            suffix=text[found.end : end],
            choice=choice,
        )


@dataclass(frozen=True)
class QuotationSources:
    """The modules that one answer may quote, best first."""

    modules: tuple[ModuleRow, ...]
    quotable: tuple[QuotableModule, ...]
    spellings: TokenSpellings

    @cached_property
    def index(self) -> QuotationIndex:
        return QuotationIndex([each.graph for each in self.quotable], self.spellings)

    def spans(self, choices: Sequence[Choice]) -> tuple[AnswerSpan, ...]:
        """Return the places of all choices, in the order of the choices, each place once."""
        return tuple(self._spans(choices))

    def _spans(self, choices: Sequence[Choice]) -> Iterator[AnswerSpan]:
        for number, choice in enumerate(choices):
            if choice.finish_reason == "no_answer":  # its text is a refusal
                continue
            known = set()
            for found in quote(self.index, choice.token_ids, choice.text):
                span = self.quotable[found.text].span(self.modules[found.text], found, number)
                place = (span.document, span.start, span.module if span.start is None else "")
                if place not in known:  # modules may repeat a heading
                    known.add(place)
                    yield span


class Quotations:
    """A cache of the quotable modules of a namespace. Thread-safe."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._known: OrderedDict[int, QuotableModule] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, modules: Sequence[ModuleRow]) -> QuotationSources:
        """Return the sources of an answer that may quote these modules."""
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
        made = {}
        for module in modules:
            cuts = [begin for begin, _ in module.places]
            graph = QuotableText.of(module.text, spellings, cuts)
            made[module.id] = QuotableModule(module.text, graph, module.places)
        with self._lock:
            self._known.update(made)
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return made
