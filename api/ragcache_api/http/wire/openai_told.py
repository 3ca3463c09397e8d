"""Answers of OpenAI's interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import time
from typing import Any, Literal

from ragcache import Answer, Source
from ragcache.engine import Choice
from ragcache.engine.sampler import Chosen
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
class Spelling:
    """Turns token ids into what OpenAI's log-probabilities tell of them."""

    tokenizer: Any

    def token(self, token_id: int) -> str:
        text: str = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self.token(token_id)
        # a part of a character has bytes that its text does not tell
        known = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": _finite(logprob), "bytes": known}

    def chat(self, chosen: Sequence[Chosen]) -> dict[str, Any]:
        """`logprobs` of a chat's choice."""
        content = [
            {
                **self.entry(each.token, each.logprob or 0.0),
                "top_logprobs": [self.entry(*pair) for pair in each.alternatives],
            }
            for each in chosen
        ]
        return {"content": content, "refusal": None}

    def text(self, chosen: Sequence[Chosen], offset: int = 0) -> dict[str, Any]:
        """`logprobs` of a text's choice. offset: of its first token, in characters."""
        tokens = [self.token(each.token) for each in chosen]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        top = [
            {self.token(token): _finite(value) for token, value in each.alternatives}
            for each in chosen
        ]
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(each.logprob or 0.0) for each in chosen],
            "top_logprobs": top,
            "text_offset": offsets,
        }


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


def told_sources(answers: Sequence[Answer]) -> list[Source]:
    return [source for answer in answers for source in answer.sources]


def reason(choice: Choice) -> str:
    """OpenAI knows no answer that found nothing to read: it has an end, and no sources."""
    return "length" if choice.finish_reason == "length" else "stop"


def _finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # as OpenAI tells what cannot be
