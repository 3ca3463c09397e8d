"""Placing a resolved prompt: segments where states are kept, tokens where they are computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ragcache.engine import Context, Segment
from ragcache.pipeline.module_states import ScopeTokens
from ragcache.pipeline.template_text import TemplateText
from ragcache.states import KVKey, KVStates
from ragcache_schemas import Path, Piece


@dataclass(frozen=True, slots=True, eq=False)
class Owner:
    """The states that a module's texts are read from. source: the tier that they came from; key:
    their name."""

    tokens: ScopeTokens
    states: KVStates
    source: str
    key: KVKey


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A context, and how many of its tokens came from which tier, or were `encoded`."""

    context: Context
    tokens: Mapping[str, int]

    @property
    def cached_tokens(self) -> int:
        """Those whose states were in the store before."""
        return sum(n for source, n in self.tokens.items() if source != "encoded")

    @property
    def created_tokens(self) -> int:
        """Those that were encoded for it and kept."""
        return self.tokens.get("encoded", 0)


def place(
    pieces: Sequence[Piece], owners: Mapping[Path, Owner], template: TemplateText, length: int
) -> Placed:
    """Puts every piece at its positions; the answer continues at `length`.

    A piece that is cached becomes a segment: a run of its module's states. All others are computed
    together, in the order of their positions; each token sees what stands before it.
    """
    segments: list[Segment] = []
    sources: list[str] = []
    own: list[tuple[int, int]] = []  # (position, token)
    for piece in pieces:
        if not piece.cached:
            ids = template.encode(piece.text)
            own += zip(range(piece.start, piece.start + len(ids)), ids, strict=True)
        elif piece.length:
            owner = owners[piece.path[:-1]]
            segments.append(_segment(piece, owner))
            sources.append(owner.source)
    if not own:
        own = [_last_token(pieces, segments, template)]
    own.sort(key=lambda item: item[0])
    positions, tokens = zip(*own, strict=True)
    context = Context(tuple(segments), tokens, positions, max(length, positions[-1] + 1))
    by_source: Counter[str] = Counter()
    for segment, source in zip(segments, sources, strict=True):
        by_source[source] += segment.states.length
    return Placed(context, by_source)


def _segment(piece: Piece, owner: Owner) -> Segment:
    begin, end = owner.tokens.runs[piece.path]
    if (begin, end) == (0, owner.states.length):
        return Segment(owner.states, piece.start, str(owner.key))
    start = owner.tokens.position_ids[begin]
    name = f"{owner.key}[{begin}:{end}]"
    return Segment(owner.states.part(begin, end, start), piece.start, name)


def _last_token(
    pieces: Sequence[Piece], segments: list[Segment], template: TemplateText
) -> tuple[int, int]:
    """A prompt of imports alone: its last token is computed, so that there is something to
    continue from, and leaves its segment."""
    last = max((s for s in segments), key=lambda s: s.end)
    text = next(p.text for p in pieces if p.start == last.start and p.length == last.states.length)
    shorter = last.states.part(0, last.states.length - 1, last.states.start)
    segments[segments.index(last)] = Segment(shorter, last.start, f"{last.name}[:-1]")
    return last.end - 1, template.encode(text)[-1]
