"""What extractive answers quote: modules as quotable texts, and the places of quotations in the
documents."""

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

CONTEXT = 240  # characters of a span's prefix and suffix, at most
_KEPT = 512  # modules whose graphs are kept, those used last


@dataclass(frozen=True, slots=True)
class AnswerSpan:
    """A place that an extractive answer quotes.

    Attributes:
        document: Id of the document.
        module: Name of the module.
        start, end: Characters start:end of the document's text (`rag.documents.texts`) are the
            answer. None where a part of the document that the module is from does not stand there.
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
class QuotableModule:
    """A module's graph, and where the runs of its text stand in its document."""

    text: str
    graph: QuotableText
    places: Sequence[tuple[int, int]]

    def span(self, module: ModuleRow, found: Occurrence, choice: int) -> AnswerSpan:
        """The span of an occurrence in the module's text."""
        text = self.text
        moved = next((at - a for a, at in reversed(self.places) if a <= found.begin), None)
        line = max(text.rfind("\n", 0, found.begin) + 1, found.begin - CONTEXT)
        end = text.find("\n", found.end)
        end = min(len(text) if end < 0 else end, found.end + CONTEXT)
        return AnswerSpan(
            module.document, module.name,
            start=None if moved is None else found.begin + moved,
            end=None if moved is None else found.end + moved,
            page=module.page, headings=module.headings,
            prefix=text[line : found.begin], suffix=text[found.end : end], choice=choice,
        )  # fmt: skip


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
            for found in quote(self.index, choice.token_ids, choice.text):
                span = self.quotable[found.text].span(self.modules[found.text], found, number)
                place = (span.document, span.start, span.module if span.start is None else "")
                if place not in known:  # modules may repeat a heading
                    known.add(place)
                    yield span


class Quotations:
    """Makes modules of a namespace quotable, and keeps those used last. Thread-safe."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
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
