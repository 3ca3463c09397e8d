"""Text from outside on its way through a chat template that works on plain strings.

A template has to see contents as they are: it trims them, splits them, asks how they begin. What it
makes of them is one string, in which its control tokens must still be told from those that a
content spells. So a character of each control token in a content is replaced by a guard, one
character from a private plane, until the template's own control tokens are marked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ragcache.errors import InvalidRequest
from ragcache.pipeline.template_text import MARK

_FIRST = 0x10F000  # above the marks of control tokens
_GUARD = re.compile("[\U0010f000-\U0010fffd]")


class Guard:
    """Hides control tokens that stand in contents, and reveals them again."""

    def __init__(self, control: Sequence[str]) -> None:
        """control: the tokenizer's control tokens."""
        letters = sorted({letter for token in control for letter in token})
        self._hidden = {letter: chr(_FIRST + i) for i, letter in enumerate(letters)}
        self._revealed = {guard: letter for letter, guard in self._hidden.items()}
        firsts = re.escape("".join({token[0] for token in control}))
        self._firsts = re.compile(f"[{firsts}]" if control else "(?!)")
        self._any = re.compile("|".join(map(re.escape, control)))
        self._begins = {token[:i] for token in control for i in range(1, len(token))}
        self._ends = {token[i:] for token in control for i in range(1, len(token))}
        self._longest = max(map(len, control), default=0)

    def hide(self, value: Any) -> Any:
        """Every text in a message or a tool, guarded. Raises `InvalidRequest` for a character that
        marks are made of."""
        if isinstance(value, str):
            return self._hide(value)
        if isinstance(value, Mapping):
            return {
                self._hide(key, ends=False) if isinstance(key, str) else key: self.hide(each)
                for key, each in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.hide(each) for each in value]
        return value

    def reveal(self, text: str) -> str:
        """The text as people wrote it."""
        return _GUARD.sub(lambda match: self._revealed[match[0]], text)

    def _hide(self, text: str, *, ends: bool = True) -> str:
        """ends: whether the template's text may stand right beside this one."""
        if found := MARK.search(text):
            raise InvalidRequest(
                f"a message holds the private character U+{ord(found[0]):X}, which is reserved "
                "for control tokens; remove it"
            )
        begins = (match.start() for match in self._firsts.finditer(text))
        places = {at for at in begins if self._any.match(text, at)}
        if ends:
            places |= self._edges(text)
        if not places:
            return text
        return "".join(self._hidden[c] if i in places else c for i, c in enumerate(text))

    def _edges(self, text: str) -> set[int]:
        """Where a piece of a control token begins that the template's text could complete."""
        first, end = len(text) - len(text.lstrip()), len(text.rstrip())
        most = min(self._longest, end - first)
        places = {end - n for n in range(1, most + 1) if text[end - n : end] in self._begins}
        if any(text[first : first + n] in self._ends for n in range(1, most + 1)):
            places.add(first)
        return places
