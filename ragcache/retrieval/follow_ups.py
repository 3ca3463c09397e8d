"""The search for a message that continues a conversation, such as "And if she does not answer?"."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ragcache.retrieval.bm25 import terms

_FEW = 1
"""Most words of a message that says too little by itself."""
_ENOUGH = 3
"""Fewest words of earlier messages that name the subject of a conversation."""
_BACK = 3
"""Most earlier messages that are joined."""
_LONGEST = 500
"""Most characters of an earlier message."""
_NOTE = re.compile(r"\s*<([A-Za-z][\w-]*)>.*?</\1>\s*", re.DOTALL)
"""A text that a program puts before a user's words, such as `<system-reminder>…`."""
_WEIGHT = 2
"""Times that a message with more words is repeated, so that it outweighs earlier ones."""


def search_query(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the query that finds documents for the user's last message.

    The message is joined with the user's earlier messages, which may name its subject. A
    message with words of its own is weighted by repeating it, so that a new subject replaces the
    old one.

    Args:
        messages: A conversation with a message of the user.

    Example:
        >>> search_query(
        ...     [
        ...         {"role": "user", "content": "Who do I ring if the alarm goes off?"},
        ...         {"role": "assistant", "content": "Yuki Tanabe"},
        ...         {"role": "user", "content": "And if she is away?"},
        ...     ]
        ... )
        'Who do I ring if the alarm goes off?\\nAnd if she is away?'
    """
    texts = [str(each["content"]) for each in messages if each["role"] == "user"]
    earlier = [spoken for text in texts[:-1] if (spoken := without_notes(text))]
    last = without_notes(texts[-1]) or texts[-1]
    context: list[str] = []
    for text in reversed(earlier[-_BACK:]):
        context.insert(0, text[:_LONGEST])
        if len(_words(*context)) >= _ENOUGH:
            break
    if not _words(*context):
        return last
    own = _words(last) - _words(*context)
    return "\n".join([*context, *[last] * (1 if len(own) <= _FEW else _WEIGHT)])


def without_notes(text: str) -> str:
    """Return a message without the notes that a program has put before the user's words.

    A note is an element such as `<environment_context>`. A message of notes alone becomes empty.

    Example:
        >>> without_notes("<system-reminder>Be brief.</system-reminder>\\n\\nWhere is the key?")
        'Where is the key?'
    """
    while found := _NOTE.match(text):
        text = text[found.end() :]
    return text


def _words(*texts: str) -> set[str]:
    """Return the stems of texts without stop words."""
    return {word for text in texts for word in terms(text)}
