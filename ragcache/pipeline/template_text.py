"""Text in which a chat template's control tokens stand apart from what people wrote.

A template puts tokens such as `<|im_end|>` into text. While schemas and prompts are spelled, each
such token is one character from a private plane of Unicode, which text from outside may not hold.
So a control token can only come from the template, whatever a document or an argument says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from ragcache.errors import ConfigurationError
from ragcache.models import LoadedModel

_FIRST = 0x100000  # plane 16, for private use
MARK = re.compile("([\U00100000-\U0010fffd])")
UNKNOWN_TEMPLATE = "{content}\n"  # for models that have no chat template

Tokenise = Callable[[str, int], list[int]]


class TemplateText:
    """Renders chats and tokenises what `ragcache_schemas.spell_schema` makes of them."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self.control = special = sorted(_control_tokens(model.tokenizer), key=len, reverse=True)
        self._ids = [model.tokenizer.convert_tokens_to_ids(token) for token in special]
        self._marks = {token: chr(_FIRST + i) for i, token in enumerate(special)}
        self._special = re.compile("|".join(map(re.escape, special))) if special else None

    def render(self, messages: Sequence[tuple[str, str]], *, generate: bool) -> str:
        """The template's text, with marks for its control tokens (`ragcache_schemas.Render`)."""
        tokenizer = self._model.tokenizer
        if getattr(tokenizer, "chat_template", None) is None:
            return "".join(UNKNOWN_TEMPLATE.format(content=content) for _, content in messages)
        chat = [{"role": role, "content": content} for role, content in messages]
        text: str = tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=generate
        )
        return self.mark(text)

    def mark(self, rendered: str) -> str:
        """A template's text with marks for its control tokens."""
        if self._special is None:
            return rendered
        return self._special.sub(lambda m: self._marks[m[0]], rendered)

    def encode(self, text: str, tokenise: Tokenise | None = None) -> list[int]:
        """Token ids: marks are control tokens, everything else is ordinary text.

        tokenise: how, of a piece without marks that begins at a place in the text; None is as a
        text of its own.
        """
        ids: list[int] = []
        place = 0
        for piece in MARK.split(text):
            if MARK.fullmatch(piece):
                ids.append(self._ids[ord(piece) - _FIRST])
            elif piece and tokenise is not None:
                ids += tokenise(piece, place)
            elif piece:
                ids += self._model.encode_untrusted(piece)
            place += len(piece)
        return ids

    def count(self, text: str) -> int:
        return len(self.encode(text))

    @staticmethod
    def check(text: str) -> None:
        """Raises `ConfigurationError` where text from outside holds a mark."""
        if found := MARK.search(text):
            line = text.count("\n", 0, found.start()) + 1
            raise ConfigurationError(
                f"line {line} holds the private character U+{ord(found[0]):X}, which is reserved "
                "for control tokens; remove it"
            )


def _control_tokens(tokenizer: Any) -> set[str]:
    """All of them: those with a role (end of text, padding) and those that are only marked."""
    marked = (t.content for t in tokenizer.added_tokens_decoder.values() if t.special)
    return {*tokenizer.all_special_tokens, *marked}
