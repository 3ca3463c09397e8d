"""A prompt in tokens: modules that are read from their states, and what is computed around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ragcache.engine import Context, Segment
from ragcache.pipeline.inside import Agreement, InsideText
from ragcache.recognition import Found
from ragcache.states import KVKey, KVStates
from ragcache.store import ModuleRow

LEAST = 8  # tokens of a module that are worth a segment

MayStand = Callable[[int, int], bool]
"""Whether so many tokens may be encoded to stand from a position on."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A module in a prompt. Its tokens begin:end are read and stand from position `start`; where
    there are none, all of it is computed."""

    module: ModuleRow
    token_ids: tuple[int, ...]
    begin: int
    end: int
    start: int

    @property
    def length(self) -> int:
        """Tokens that are read."""
        return self.end - self.begin

    @property
    def first(self) -> int:
        """Where the module's first token would stand."""
        return self.start - self.begin

    def segment(self, key: KVKey, states: KVStates) -> Segment:
        """The part of the module's states that is read. Nothing is copied."""
        if (self.begin, self.end) == (0, states.length):
            return Segment(states, self.start, str(key))
        part = states.part(self.begin, self.end, states.start + self.begin)
        return Segment(part, self.start, f"{key}[{self.begin}:{self.end}]")


@dataclass(slots=True)
class Script:
    """own: what is computed, (position, token). length: of the prompt, in tokens."""

    readings: list[Reading] = field(default_factory=list)
    own: list[tuple[int, int]] = field(default_factory=list)
    length: int = 0

    @property
    def read(self) -> list[Reading]:
        """The modules whose states are read."""
        return [reading for reading in self.readings if reading.length]

    def compute(self, token_ids: Sequence[int]) -> None:
        """Goes on with tokens that are computed."""
        self.own += enumerate(token_ids, self.length)
        self.length += len(token_ids)

    def place(
        self, module: ModuleRow, token_ids: tuple[int, ...], agreed: Agreement, *,
        linked: int, may_stand: MayStand,
    ) -> None:  # fmt: skip
        """Goes on with a module. linked: its first tokens that are computed in context. may_stand:
        of a module whose states cannot stand there, everything is computed."""
        self.compute(agreed.before)
        first = self.length - agreed.begin
        begin = min(agreed.begin + linked, agreed.end)
        if agreed.end - begin < LEAST or not may_stand(first, len(token_ids)):
            begin = agreed.end
        self.compute(token_ids[agreed.begin : begin])
        self.readings.append(Reading(module, token_ids, begin, agreed.end, self.length))
        self.length += agreed.end - begin
        self.compute(agreed.after)

    def close(self) -> None:
        """Sees to it that the last token is computed, for the answer to follow."""
        if self.readings and (not self.own or self.own[-1][0] < self.length - 1):
            last = self.readings.pop()
            shorter = Reading(last.module, last.token_ids, last.begin, last.end - 1, last.start)
            self.readings.append(shorter)
            self.own.append((self.length - 1, last.token_ids[last.end - 1]))

    def context(self, keys: Sequence[KVKey], states: Sequence[KVStates]) -> Context:
        """keys, states: of the modules that are read, in order."""
        placed = zip(self.read, keys, states, strict=True)
        segments = tuple(reading.segment(key, kept) for reading, key, kept in placed)
        positions, token_ids = zip(*self.own, strict=True)
        return Context(segments, token_ids, positions, self.length)


def write_script(
    text: str, found: Sequence[Found], tokens: Sequence[tuple[int, ...]], inside: InsideText, *,
    lead: Sequence[int] = (), linked: int = 0, may_stand: MayStand,
) -> Script:  # fmt: skip
    """Lays a prompt out, from its text with marks and the modules that were found in it.

    tokens: of each module. lead: what the tokenizer puts before any text. What stands between
    modules is tokenised on its own.
    """
    script, done = Script(), 0
    script.compute(lead)
    for each, ids in zip(found, tokens, strict=True):
        script.compute(inside.encode(text[done : each.begin], first=done == 0))
        here = text[each.begin : each.end]
        agreed = inside.agreement(here, ids, whole=each.whole, first=each.begin == 0)
        script.place(each.module, ids, agreed, linked=linked, may_stand=may_stand)
        done = each.end
    script.compute(inside.encode(text[done:], first=done == 0))
    script.close()
    return script
