"""What a request attends to: segments in order, then its own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragcache.errors import PromptTooLong
from ragcache.states import KVStates


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """States standing at position `start` of a prompt. Nothing is copied to place them.

    name: names what the states are, for all time; None where they have no name. Requests over
    segments of equal names at equal places can share what they compute after them.
    """

    states: KVStates
    start: int
    name: str | None = None

    @property
    def delta(self) -> int:
        """How far the segment was moved from where it was encoded, in positions."""
        return self.start - self.states.start

    @property
    def end(self) -> int:
        """The first position after the segment."""
        return self.start + self.states.length


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """segments, and the request's own tokens in the order of their positions.

    A token sees the segments that start before it, and the own tokens before it. The answer
    continues at `next_position`.
    """

    segments: tuple[Segment, ...]
    token_ids: tuple[int, ...]
    position_ids: tuple[int, ...]
    next_position: int

    @property
    def cached_tokens(self) -> int:
        """Tokens whose states are read, not computed."""
        return sum(segment.states.length for segment in self.segments)

    @property
    def prompt_tokens(self) -> int:
        return self.cached_tokens + len(self.token_ids)


def assemble(
    states: Sequence[KVStates],
    token_ids: Sequence[int],
    *,
    window: int,
    max_new_tokens: int,
    names: Sequence[str | None] | None = None,
) -> Context:
    """Places states one after another without gaps, then the private tokens.

    names: those of the segments, where they have any.

    Raises `PromptTooLong` where prompt and answer together exceed `window` positions.
    """
    position, segments = 0, []
    for each, name in zip(states, names or [None] * len(states), strict=True):
        segments.append(Segment(each, position, name))
        position += each.length
    check_window(position, len(token_ids), window=window, max_new_tokens=max_new_tokens)
    if not token_ids:
        raise ValueError("a prompt needs at least one token of its own")
    end = position + len(token_ids)
    return Context(tuple(segments), tuple(token_ids), tuple(range(position, end)), end)


def check_window(
    document_tokens: int, own_tokens: int, *, window: int, max_new_tokens: int
) -> None:
    """Raises `PromptTooLong` where prompt and answer would not fit the model's window."""
    if document_tokens + own_tokens + max_new_tokens > window:
        raise PromptTooLong(
            f"the prompt needs {document_tokens + own_tokens} tokens ({document_tokens} of "
            f"documents, {own_tokens} of question and template) and the answer up to "
            f"{max_new_tokens}, but the model's window holds {window}; ask with a smaller k or a "
            "shorter question"
        )
