"""Policies of an answer: the features that change a request and finish its answer.

A question without such features has no policy. A policy is made before states are leased, so that
it refuses options before anything is computed. It then changes the engine's request, and finishes
its answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ragcache.answers.confidence import ConfidenceFeatures
from ragcache.db import ModuleRow
from ragcache.engine import Choice, Request, RequestHandle, RequestOutput, TokenDelta
from ragcache.retrieval import Selection

Pass = RequestHandle[TokenDelta, RequestOutput]
"""A request to the engine that an answer waits for."""

CONTEXT = 240  # maximum characters of a span's prefix and suffix


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


@dataclass(frozen=True, slots=True)
class AnswerOutput:
    """A finished request, with the findings of its policies."""

    output: RequestOutput
    """The output of the engine. Refused answers are replaced."""
    confidences: tuple[float, ...] = ()
    """Confidence in each choice, 0 to 1. Empty without a `ConfidencePolicy`."""
    features: tuple[ConfidenceFeatures, ...] = ()
    """The features that each confidence was computed from."""
    spans: tuple[AnswerSpan, ...] = ()
    """Document positions of the choices. Empty without a `QuotationPolicy`."""


class AnswerPolicy:
    """One feature of the answers to one request. The base changes nothing."""

    __slots__ = ()

    @property
    def holds(self) -> bool:
        """Whether a stream shows nothing before the answer is finished."""
        return False

    @property
    def follows_up(self) -> bool:
        """Whether finishing the answer takes more passes of the engine."""
        return False

    def change_request(self, request: Request) -> Request:
        """Return the request with the changes that the feature needs."""
        return request

    def follow_up(self, output: RequestOutput) -> Sequence[Pass]:  # noqa: ARG002
        """Submit the passes whose outputs `finish` needs."""
        return ()

    def finish(
        self,
        answer: AnswerOutput,
        passes: Sequence[RequestOutput],  # noqa: ARG002
    ) -> AnswerOutput:
        """Return the answer with the feature's findings. passes: outputs of `follow_up`."""
        return answer

    def release(
        self,
        deltas: Sequence[TokenDelta],
        answer: AnswerOutput,  # noqa: ARG002
    ) -> list[TokenDelta]:
        """Return the deltas to show of a stream that was held until its answer was finished."""
        return list(deltas)


class AnsweredPrompt(Protocol):
    """The properties of a prompt that policies depend on."""

    @property
    def kind(self) -> str:
        """`question`, `chat`, or `prompt` for PML."""

    @property
    def has_documents(self) -> bool:
        """False if retrieval found nothing."""

    @property
    def modules(self) -> tuple[ModuleRow, ...]:
        """The modules in the prompt, best first."""

    @property
    def selection(self) -> Selection | None:
        """The result of the search. PML prompts, and chats without a collection, have none."""

    @property
    def without_documents(self) -> Callable[[], Sequence[int]]:
        """Function that makes the prompt's tokens without its modules."""


def refused(choice: Choice, refusal: str) -> Choice:
    """Return a refused choice: the refusal's text, and no log-probabilities."""
    said = replace(choice, text=refusal, finish_reason="no_answer", stopped_by=None)
    return replace(said, chosen=(), ending=None)
