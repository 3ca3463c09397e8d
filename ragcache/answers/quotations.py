"""Modules as quotable texts, and the positions of quotations in the documents."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from ragcache.answers.policy import AnsweredPrompt, AnswerOutput, AnswerPolicy, AnswerSpan
from ragcache.answers.quotation_index import (
    QuotableText,
    Quotation,
    QuotationIndex,
    QuotationText,
    TokenSpellings,
    quote,
    token_spellings,
)
from ragcache.db import ModuleRow
from ragcache.engine import Choice, Request, RequestOutput
from ragcache.errors import InvalidRequest
from ragcache.models import LoadedModel
from ragcache.params import GenerationParams

_KEPT_BYTES = 2**24  # of graphs in the cache, which evicts the least recently used


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


@dataclass(frozen=True, slots=True)
class QuotationPolicy(AnswerPolicy):
    """Limits answers to contiguous runs of the modules' texts."""

    sources: QuotationSources
    """The modules that may be quoted."""

    @classmethod
    def for_prompt(
        cls, prompt: AnsweredPrompt, params: GenerationParams, quotations: Quotations | None
    ) -> QuotationPolicy | None:
        """Return the policy of a prompt whose answers are quotations; other prompts have none.

        Raises:
            InvalidRequest: `extractive` is set, and the prompt cannot be answered by quotations.
        """
        if params.extractive:
            _check_extractive(prompt, params)
        elif prompt.selection is None or params.forms or params.citations:
            return None
        if not prompt.modules or quotations is None:
            return None
        return cls(quotations.of(prompt.modules))

    def change_request(self, request: Request) -> Request:
        """Allow only the tokens of quotations, and end their text at word boundaries."""
        index = self.sources.index
        constraint, text = partial(Quotation, index), partial(QuotationText, index)
        return replace(request, constraint=constraint, text=text, suppress_tokens=frozenset())

    def finish(
        self,
        answer: AnswerOutput,
        passes: Sequence[RequestOutput],  # noqa: ARG002
    ) -> AnswerOutput:
        """Return the answer with its document positions."""
        return replace(answer, spans=self.sources.spans(answer.output.choices))


def _check_extractive(prompt: AnsweredPrompt, params: GenerationParams) -> None:
    """Raise `InvalidRequest` for a prompt or options that exclude quotations."""
    if params.forms:
        raise InvalidRequest(
            "an extractive answer is a quotation and keeps to no grammar; leave out either "
            "extractive, or response format and grammar"
        )
    if prompt.kind == "prompt":
        raise InvalidRequest(
            "an extractive answer quotes documents, and a PML prompt reads a schema; ask a "
            "collection instead, or leave out extractive"
        )
    if not prompt.modules and prompt.has_documents:
        raise InvalidRequest(
            "an extractive answer quotes documents, and no ingested text was recognized in the "
            "conversation; ask with a collection, or leave out extractive"
        )
