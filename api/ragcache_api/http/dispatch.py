"""Requests for an answer by their path, in all interfaces, for the gateway of a cluster."""

from __future__ import annotations

import re

from pydantic import BaseModel, ValidationError

from ragcache_api.http.anthropic import MessagesRequest, chat_of
from ragcache_api.http.bodies import (
    AnswerRequest,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    PromptRequest,
)
from ragcache_api.http.errors import HTTPProblem
from ragcache_api.http.responses import ResponsesRequest, responses_chat

AnsweredRequest = AnswerRequest | PromptRequest | ChatRequest | CompletionRequest
_ROUTES: dict[str, type[BaseModel]] = {
    "answers": AnswerRequest,
    "prompts": PromptRequest,
    "chat/completions": ChatRequest,
    "completions": CompletionRequest,
    "messages": MessagesRequest,
    "responses": ResponsesRequest,
}
_BASE = re.compile(r"collections/([^/]+)/(?:v1/)?((?:chat/)?completions|messages|responses)$")


def answered_by(path: str) -> tuple[type[BaseModel] | None, str | None]:
    """Return the class of the bodies that are posted to a path, and its base URL's collection.

    A path without answers has no class.
    """
    route = path.partition("/v1/")[2]
    base, route = found.groups() if (found := _BASE.match(route)) else (None, route)
    return _ROUTES.get(route), base


def parse_body(path: str, body: bytes, served: str) -> AnsweredRequest | None:
    """Parse a request for an answer, with the collection that it names anywhere.

    A request of another interface becomes a chat. Another path or an invalid body gives None.

    Args:
        path: Path of the request.
        body: Body of the request.
        served: Id of the served model.
    """
    model, base = answered_by(path)
    if model is None:
        return None
    try:
        parsed = model.model_validate_json(body)
        asked = _translated(parsed)
        return asked.addressed(served, base) if isinstance(asked, GenerationRequest) else asked
    except (ValidationError, HTTPProblem):
        return None


def _translated(body: BaseModel) -> AnsweredRequest:
    if isinstance(body, MessagesRequest):
        return chat_of(body).chat
    if isinstance(body, ResponsesRequest):
        return responses_chat(body)
    assert isinstance(body, AnsweredRequest)
    return body
