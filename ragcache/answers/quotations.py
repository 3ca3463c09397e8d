"""Modules as quotable texts, and the positions of quotations in the documents."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ragcache.answers.quotation_index import (
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
_KEPT_BYTES = 2**24  # of graphs in the cache, which evicts the least recently used


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
    mark: int | None = None
    """Number of the mark in the answer's text that cites this place. Quotations have no marks."""

    @classmethod
    def of(
        cls, module: ModuleRow, begin: int, end: int, choice: int = 0, mark: int | None = None
    ) -> AnswerSpan:
        """Return the span of characters begin:end of a module's text."""
        text = module.text
        moved = next((at - a for a, at in reversed(module.places) if a <= begin), None)
        line = max(text.rfind("\n", 0, begin) + 1, begin - CONTEXT)
        line_end = text.find("\n", end)
        line_end = min(len(text) if line_end < 0 else line_end, end + CONTEXT)
        return cls(
            module.document,
            module.name,
            start=None if moved is None else begin + moved,
            end=None if moved is None else end + moved,
            page=module.page,
            headings=module.headings,
            prefix=text[line:begin],
            suffix=text[end:line_end],
            choice=choice,
            mark=mark,
        )


@dataclass(frozen=True)
class QuotationSources:
    """The modules that one answer may quote, best first."""

    modules: tuple[ModuleRow, ...]
    graphs: tuple[QuotableText, ...]
    """Graphs of the modules' texts."""
    spellings: TokenSpellings

    @cached_property
    def index(self) -> QuotationIndex:
        return QuotationIndex(self.graphs, self.spellings)

    def spans(self, choices: Sequence[Choice]) -> tuple[AnswerSpan, ...]:
        """Return the places of all choices, in the order of the choices, each place once."""
        return tuple(self._spans(choices))

    def _spans(self, choices: Sequence[Choice]) -> Iterator[AnswerSpan]:
        for number, choice in enumerate(choices):
            if choice.finish_reason == "no_answer":  # its text is a refusal
                continue
            known = set()
            for found in quote(self.index, choice.token_ids, choice.text):
                span = AnswerSpan.of(self.modules[found.text], found.begin, found.end, number)
                place = (span.document, span.start, span.module if span.start is None else "")
                if place not in known:  # modules may repeat a heading
                    known.add(place)
                    yield span


class Quotations:
    """A cache of the quotable modules of a namespace. Thread-safe."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._known: OrderedDict[int, QuotableText] = OrderedDict()
        self._bytes = 0
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
    ) -> dict[int, QuotableText]:
        made = {
            module.id: QuotableText.of(module.text, spellings, [at for at, _ in module.places])
            for module in modules
        }
        with self._lock:
            for number, text in made.items():
                if number not in self._known:  # another thread may have made it as well
                    self._known[number] = text
                    self._bytes += text.nbytes
            while self._bytes > _KEPT_BYTES:
                self._bytes -= self._known.popitem(last=False)[1].nbytes
        return made
