"""Conversations in the words of the model's own chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from jinja2.exceptions import TemplateError

from ragcache.errors import InvalidRequest, UnsupportedModel
from ragcache.models import LoadedModel
from ragcache.pipeline.guarding import Guard
from ragcache.pipeline.template_text import UNKNOWN_TEMPLATE, TemplateText

Message = Mapping[str, Any]
"""`{"role": ..., "content": ...}` with `tool_calls`, `tool_call_id` or `name` where they apply: the
form that Hugging Face's chat templates take."""

ROLES = ("system", "user", "assistant", "tool")


class ChatText:
    """Renders conversations to text with marks for control tokens (see `TemplateText`)."""

    def __init__(self, model: LoadedModel, template: TemplateText) -> None:
        self._tokenizer = model.tokenizer
        self._template = template
        self._guard = Guard(template.control)

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> str:
        """The prompt, up to where the answer begins. A control token comes from the template alone,
        whatever a message says.

        Raises `InvalidRequest` for messages that cannot be spelled, or that the template refuses,
        and `UnsupportedModel` where it has no place for tools.
        """
        chat = [self._guard.hide(_checked(message, i)) for i, message in enumerate(messages, 1)]
        if not chat:
            raise InvalidRequest("there are no messages; give one of the user at least")
        offered = [self._guard.hide(tool) for tool in tools or ()]
        text = self._apply(chat, offered)
        if offered and text == self._apply(chat, []):
            raise UnsupportedModel(
                "this model's chat template has no place for tools; ask without `tools`, or use a "
                "model that was trained with them"
            )
        untold = [{k: v for k, v in message.items() if k != "tool_calls"} for message in chat]
        if untold != chat and text == self._apply(untold, offered):
            raise UnsupportedModel("this model's chat template has no place for tool calls")
        return self._guard.reveal(self._template.mark(text))

    def plain(self, text: str) -> str:
        """A text without a template. Raises `InvalidRequest` where it is empty."""
        if not text:
            raise InvalidRequest("the prompt is empty; give a text, or messages")
        self._guard.hide(text)
        return text

    @cached_property
    def lead(self) -> list[int]:
        """What the tokenizer puts before a text without a template: its first token, if any."""
        begin = self._tokenizer.bos_token_id
        return [begin] if begin in self._tokenizer.encode("")[:1] else []

    def _apply(self, chat: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        if getattr(self._tokenizer, "chat_template", None) is None:
            return "".join(UNKNOWN_TEMPLATE.format(**message) for message in chat)
        try:
            text: str = self._tokenizer.apply_chat_template(
                chat, tools=tools or None, tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise InvalidRequest(
                f"the model's chat template refuses the messages: {error}"
            ) from error
        return text


def _checked(message: Message, number: int) -> dict[str, Any]:
    """The message as a template takes it. Raises `InvalidRequest`."""
    if not isinstance(message, Mapping):
        raise InvalidRequest(
            f"message {number} is no mapping; write {{'role': ..., 'content': ...}}"
        )
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise InvalidRequest(
            f"message {number} has the unknown role {role!r}; roles: {', '.join(ROLES)}"
        )
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise InvalidRequest(
            f"the content of message {number} is {type(content).__name__}, not text; images and "
            "other media are not served"
        )
    return {**message, "content": content}
