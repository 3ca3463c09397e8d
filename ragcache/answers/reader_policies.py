"""Policies of the embedded reader, which only quotes: refusals in words, and JSON of one string."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ragcache.answers.policy import AnsweredPrompt, AnswerOutput, AnswerPolicy, refused
from ragcache.answers.quotations import QuotationPolicy, Quotations
from ragcache.engine import RequestOutput, TokenDelta
from ragcache.errors import InvalidRequest
from ragcache.params import GenerationParams

_NOTES = frozenset({"type", "title", "description", "default"})
_PLAIN = _NOTES | {"properties", "required", "additionalProperties", "$schema", "$defs"}


@dataclass(frozen=True, slots=True)
class WordedPolicy(AnswerPolicy):
    """Refuses in words where the embedded reader says nothing in a chat."""

    refusal: str
    """The text of a refused answer."""

    def finish(
        self,
        answer: AnswerOutput,
        passes: Sequence[RequestOutput],  # noqa: ARG002
    ) -> AnswerOutput:
        """Return the answer with refusals in place of blank choices."""
        choices = tuple(
            each if each.text.strip() else refused(each, self.refusal)
            for each in answer.output.choices
        )
        return replace(answer, output=replace(answer.output, choices=choices))


def reader_form_policy(
    prompt: AnsweredPrompt, params: GenerationParams, quotations: Quotations | None
) -> AnswerPolicy | None:
    """Return the policy of the embedded reader's JSON from documents; other answers have none.

    The reader was trained to quote a few words. A schema with one string gets its quotation.

    Raises:
        InvalidRequest: Any JSON object is asked for.
    """
    if params.json_object:
        raise InvalidRequest(
            "the embedded reader quotes a few words, and cannot invent a JSON object; give a "
            "json_schema with one string to fill, or a model: --model Qwen/Qwen2.5-1.5B-Instruct"
        )
    if params.json_schema is None or not prompt.selection:
        return None
    name = _only_string(params.json_schema)
    if name is None or params.extractive is False or quotations is None or not prompt.modules:
        return ReaderFormPolicy()
    return QuotedFormPolicy(quotations.of(prompt.modules), name)


def _only_string(schema: str | Mapping[str, Any]) -> str | None:
    """Return the name of a schema's property, if it has one only, which may be any string."""
    value = json.loads(schema) if isinstance(schema, str) else schema
    properties = value.get("properties") if isinstance(value, Mapping) else None
    if not isinstance(properties, Mapping) or len(properties) != 1 or not value.keys() <= _PLAIN:
        return None
    [(name, kind)] = properties.items()
    plain = isinstance(kind, Mapping) and kind.get("type") == "string" and kind.keys() <= _NOTES
    return str(name) if plain else None


@dataclass(frozen=True, slots=True)
class ReaderFormPolicy(AnswerPolicy):
    """Refuses JSON that the embedded reader has no words for."""

    def finish(
        self,
        answer: AnswerOutput,
        passes: Sequence[RequestOutput],  # noqa: ARG002
    ) -> AnswerOutput:
        """Return the answer.

        Raises:
            InvalidRequest: A string of a complete answer has no word.
        """
        for choice in answer.output.choices:
            if choice.finish_reason == "stop" and not isinstance(choice.stopped_by, str):
                _check_words(json.loads(choice.text))
        return answer


@dataclass(frozen=True, slots=True)
class QuotedFormPolicy(QuotationPolicy):
    """Quotes the modules, and writes the quotation as the only string of a JSON object."""

    name: str
    """Name of the string."""

    @property
    def holds(self) -> bool:
        """Whether a stream shows nothing before the answer is finished: always."""
        return True

    def finish(self, answer: AnswerOutput, passes: Sequence[RequestOutput]) -> AnswerOutput:
        """Return the answer in its form, with the document positions of the quotation.

        Raises:
            InvalidRequest: The quotation has no word.
        """
        quoted = QuotationPolicy.finish(self, answer, passes)
        choices = []
        for choice in answer.output.choices:
            value = {self.name: choice.text.strip()}
            _check_words(value)
            choices.append(replace(choice, text=json.dumps(value, ensure_ascii=False)))
        return replace(quoted, output=replace(answer.output, choices=tuple(choices)))

    def release(
        self,
        deltas: Sequence[TokenDelta],  # noqa: ARG002
        answer: AnswerOutput,
    ) -> list[TokenDelta]:
        """Return the whole text of each choice."""
        return [TokenDelta(n, None, each.text) for n, each in enumerate(answer.output.choices)]


def _check_words(value: Any) -> None:
    """Raise `InvalidRequest` if a string of a JSON value has no letter or digit."""
    if (blank := _string_without_words(value, "the answer")) is not None:
        raise InvalidRequest(
            f"the embedded reader found no words for {blank} of the JSON schema; it quotes a few "
            "words, and fills one string at most. Give a model: --model Qwen/Qwen2.5-1.5B-Instruct"
        )


def _string_without_words(value: Any, name: str) -> str | None:
    """Return the name of a string without a letter or digit in a JSON value, if there is one."""
    if isinstance(value, str):
        return None if any(map(str.isalnum, value)) else name
    parts = dict(enumerate(value)) if isinstance(value, list) else value
    items = parts.items() if isinstance(parts, dict) else ()
    found = (_string_without_words(each, repr(key)) for key, each in items)
    return next((each for each in found if each is not None), None)
