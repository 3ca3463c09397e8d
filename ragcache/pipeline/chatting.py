"""Conversations: render, recognise, lease, place, submit."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ragcache.engine import Context, Request
from ragcache.errors import InvalidRequest
from ragcache.pipeline.answer import Marks, Ready
from ragcache.pipeline.asked import Asked, give_up
from ragcache.pipeline.chat_text import ChatText, Message
from ragcache.pipeline.generation import Generation
from ragcache.pipeline.submitting import Submitter
from ragcache.pipeline.template_text import TemplateText

Conversation = Sequence[Message] | str
"""Messages, or a text that is continued as it stands, without a template."""


@dataclass(frozen=True, slots=True)
class _Spelled:
    question: str
    token_ids: list[int]
    draft: Request


@dataclass(frozen=True, slots=True)
class ChatRunner:
    """Submits conversations."""

    text: ChatText
    template: TemplateText
    submitter: Submitter

    def start(
        self, conversations: Sequence[Conversation], mode: str, recognise: bool,
        tools: Sequence[Mapping[str, Any]] | None, generation: Generation,
    ) -> list[Asked]:  # fmt: skip
        """Renders and submits each conversation, in order. Raises `InvalidRequest`,
        `UnsupportedModel` or `PromptTooLong` before anything is computed."""
        called = time.perf_counter()
        spelled = [self._spell(each, mode, tools, generation) for each in conversations]
        asked: list[Asked] = []
        try:
            for each in spelled:
                asked.append(self._submit(each, called))
        except BaseException:
            give_up(asked)
            raise
        return asked

    def _spell(
        self, conversation: Conversation, mode: str,
        tools: Sequence[Mapping[str, Any]] | None, generation: Generation,
    ) -> _Spelled:  # fmt: skip
        if isinstance(conversation, str):
            if tools:
                raise InvalidRequest("a plain text has no place for tools; give messages")
            text = self.text.plain(conversation)
        else:
            text = self.text.render(conversation, tools)
        ids = self.template.encode(text)
        draft = self.submitter.draft(len(ids), 0, generation, reuse=mode != "exact")
        return _Spelled(_question(conversation), ids, draft)

    def _submit(self, spelled: _Spelled, called: float) -> Asked:
        size = len(spelled.token_ids)
        context = Context((), tuple(spelled.token_ids), tuple(range(size)), size)
        now = time.perf_counter()
        ready = Ready(spelled.question, (), "exact", size, 0, {}, Marks(called, now, now))
        return self.submitter.submit(spelled.draft, context, ready, None)


def _question(conversation: Conversation) -> str:
    """What the user said last."""
    if isinstance(conversation, str):
        return conversation
    asked = (str(m["content"]) for m in reversed(conversation) if m["role"] == "user")
    return next(asked, "")
