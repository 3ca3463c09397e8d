"""Answers of OpenAI's interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import time
from typing import Any, Literal

from ragcache import Answer, Citation
from ragcache.engine import Choice
from ragcache_api.http.compact import compact
from ragcache_api.http.wire.common import Told


class PromptDetails(Told):
    cached_tokens: int


class Usage(Told):
    """cached_tokens: those of the prompt that were not computed for this request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class OpenAICompletion(Told):
    """A chat completion or a text completion. sources: where a collection was asked."""

    id: str
    object: Literal["chat.completion", "text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[dict[str, Any]]
    usage: Usage
    sources: list[dict[str, Any]] | None = None
    ragcache: dict[str, Any]


class Model(Told):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "ragcache"


class Models(Told):
    object: Literal["list"] = "list"
    data: list[Model]


@dataclass(frozen=True, slots=True)
class Head:
    """What every part of one answer repeats."""

    id: str
    model: str
    fingerprint: str
    chat: bool
    created: int

    @classmethod
    def of(cls, number: str, model: str, fingerprint: str, *, chat: bool) -> Head:
        return cls(number, model, fingerprint, chat, int(time()))

    def completion(
        self, choices: list[dict[str, Any]], answers: Sequence[Answer], *, sources: bool
    ) -> dict[str, Any]:
        """The whole answer."""
        told = {
            "id": self.id,
            "object": "chat.completion" if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            "usage": usage(answers),
            "ragcache": extras(answers),
        }
        return told | ({"sources": told_sources(answers)} if sources else {})

    def prefix(self) -> bytes:
        """The beginning of every chunk, up to the comma before its choices."""
        told = {
            "id": self.id,
            "object": "chat.completion.chunk" if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }
        return compact(told)[:-1] + b","


def usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """Tokens of all prompts and all choices."""
    prompt = sum(answer.reuse.prompt_tokens for answer in answers)
    kept = sum(answer.reuse.cached_tokens + answer.reuse.shared_tokens for answer in answers)
    said = sum(len(choice.token_ids) for answer in answers for choice in answer.choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": said,
        "total_tokens": prompt + said,
        "prompt_tokens_details": {"cached_tokens": kept},
    }


def extras(answers: Sequence[Answer]) -> dict[str, Any]:
    """What OpenAI has no field for, of the first prompt."""
    first = answers[0]
    return {"mode": first.mode, "reuse": first.reuse, "timings": first.timings}


def told_sources(answers: Sequence[Answer]) -> list[Citation]:
    return [source for answer in answers for source in answer.sources]


def reason(choice: Choice) -> str:
    """OpenAI knows no answer that found nothing to read: it has an end, and no sources."""
    return "length" if choice.finish_reason == "length" else "stop"
