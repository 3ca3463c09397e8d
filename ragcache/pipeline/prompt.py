"""A prompt in tokens: spans that are read from kept states, and tokens that are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from ragcache.db import Catalog, ModuleRow
from ragcache.engine import Context, Segment
from ragcache.modes import Encoding, ReuseMode
from ragcache.pipeline.answer import Citation, Timestamps
from ragcache.pipeline.module_states import ModuleEncoder, Scaffolds
from ragcache.retrieval import Selection
from ragcache.states import KVKey
from ragcache.states.quantization import StoredStates
from ragcache.store import Lease


@dataclass(frozen=True, slots=True)
class ModuleGroup:
    """Modules that are encoded together and kept under one key: one, or those of a scaffold.

    modules: their ids; none for the preamble. token_ids: of all of them. start: the position in
    the prompt of the first of these tokens.
    """

    modules: tuple[int, ...]
    token_ids: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class CachedSpan:
    """Tokens begin:end of leased states, read from position `start` on.

    group: the index of the states' key in the lease. offset: how many positions after the states'
    first token `begin` was encoded; equal to `begin` where positions have no gaps.
    """

    group: int
    begin: int
    end: int
    start: int
    offset: int

    @property
    def length(self) -> int:
        return self.end - self.begin

    def segment(
        self, key: KVKey, states: StoredStates, token_ids: tuple[int, ...] | None = None
    ) -> Segment:
        """The span of these states at its place. A view. token_ids: those of the states, where they
        are known."""
        own = None if token_ids is None else token_ids[self.begin : self.end]
        if (self.begin, self.end) == (0, states.length):
            return Segment(states, self.start, key, own)
        part = states.part(self.begin, self.end, states.start + self.offset)
        return Segment(part, self.start, f"{key}[{self.begin}:{self.end}]", own)

    def shortened(self) -> CachedSpan:
        """The span without its last token."""
        return replace(self, end=self.end - 1)


class PromptStates(Protocol):
    """The kept states that a prompt reads, and their owners."""

    @property
    def token_ids(self) -> Sequence[tuple[int, ...]]:
        """What they are the states of, in the order that `CachedSpan.group` counts."""

    def prefetch(self) -> None:
        """Begins to bring them to memory; returns at once."""

    def lease(self) -> Lease:
        """Leases them, encoded if need be, in the order that `CachedSpan.group` counts."""

    def record_owners(self, lease: Lease) -> None:
        """Records who owns the states that were encoded for this prompt."""


@dataclass(frozen=True, slots=True)
class ModuleStates:
    """States of a namespace's modules: `PromptStates` of questions and chats.

    groups: the preamble first, which is leased in any case.
    scaffolds, collection: where groups may have several modules.
    """

    encoder: ModuleEncoder
    catalog: Catalog
    groups: tuple[ModuleGroup, ...]
    encoding: Encoding
    scaffolds: Scaffolds | None = None
    collection: str = ""

    @property
    def token_ids(self) -> Sequence[tuple[int, ...]]:
        return [group.token_ids for group in self.groups]

    def prefetch(self) -> None:
        modules, starts = self._placed()
        self.encoder.prefetch(modules, self.encoding, starts)

    def lease(self) -> Lease:
        modules, starts = self._placed()
        return self.encoder.lease(modules, self.encoding, starts=starts)

    def record_owners(self, lease: Lease) -> None:
        for group, key in zip(self.groups, lease.keys, strict=True):
            if len(group.modules) > 1 and self.scaffolds is not None:
                self.scaffolds.keep(self.collection, group.modules, key)
            elif group.modules and lease.source[key] == "encoded":
                self.catalog.add_key(group.modules[0], key)

    def _placed(self) -> tuple[list[tuple[int, ...]], list[int]]:
        groups = self.groups[1:]
        return [group.token_ids for group in groups], [group.start for group in groups]


@dataclass(frozen=True, slots=True)
class BuiltPrompt:
    """A prompt before anything is leased or computed, and what its answer says about it.

    own: tokens to compute as (position, token), by position. end: where the answer continues.
    spans: what is read. recomputed: how many own tokens are those of documents. states: None where
    nothing is read.

    kind, collection, timestamps: as in `PreparedAnswer`; sources: each with the group that
    it is read from, None where it is computed. shares: whether the states of its own tokens may be
    shared. answerable: False where retrieval found nothing; such a prompt is answered at once.
    modules: those that an extractive answer may quote, the best first. selection: the result of the
    search, None for chats and PML prompts. bare: makes the prompt's tokens without
    its modules, for the answer to be scored behind them; None where that is not offered.
    """

    question: str
    mode: ReuseMode
    own: tuple[tuple[int, int], ...]
    end: int
    spans: tuple[CachedSpan, ...] = ()
    recomputed: int = 0
    states: PromptStates | None = None
    sources: tuple[tuple[Citation, int | None], ...] = ()
    kind: str = "question"
    collection: str = ""
    shares: bool = True
    answerable: bool = True
    modules: tuple[ModuleRow, ...] = ()
    selection: Selection | None = None
    bare: Callable[[], Sequence[int]] | None = None
    timestamps: Timestamps = field(default_factory=Timestamps)

    @property
    def answer_mode(self) -> str:
        """The mode as answers name it: `recognized:MODE` for a chat that reads states."""
        recognized = self.kind == "chat" and self.mode.reads_states
        return f"recognized:{self.mode}" if recognized else str(self.mode)

    @property
    def read_tokens(self) -> int:
        """Tokens whose states are read."""
        return sum(span.length for span in self.spans)


def build_context(
    prompt: BuiltPrompt, keys: Sequence[KVKey] = (), states: Sequence[StoredStates] = ()
) -> Context:
    """What the engine attends to. keys, states: those of the prompt's lease, in order."""
    known = None if prompt.states is None else prompt.states.token_ids
    segments = [
        span.segment(
            keys[span.group], states[span.group], None if known is None else known[span.group]
        )
        for span in prompt.spans
    ]
    positions, own = zip(*prompt.own, strict=True)
    return Context(tuple(segments), own, positions, prompt.end)


class PromptLayout:
    """Lays out a prompt without gaps, from front to back.

    groups: the preamble, then what `add` took. own: (position, token). length: in tokens.
    """

    def __init__(self, preamble: Iterable[int] = ()) -> None:
        self.groups = [ModuleGroup((), tuple(preamble), 0)]
        self.spans: list[CachedSpan] = []
        self.own: list[tuple[int, int]] = []
        self.length = 0

    def add(self, group: ModuleGroup) -> int:
        """Takes a group whose states are leased; returns its index."""
        self.groups.append(group)
        return len(self.groups) - 1

    def read(self, group: int, begin: int, end: int) -> None:
        """Continues with tokens begin:end of a group, from its states."""
        if begin < end:
            self.spans.append(CachedSpan(group, begin, end, self.length, begin))
            self.length += end - begin

    def compute(self, token_ids: Sequence[int]) -> None:
        """Continues with tokens that are computed."""
        self.own += enumerate(token_ids, self.length)
        self.length += len(token_ids)

    def close(self) -> None:
        """Makes the last token a computed one, for the answer to follow."""
        if self.spans and (not self.own or self.own[-1][0] < self.length - 1):
            last = self.spans.pop()
            self.spans.append(last.shortened())
            self.own.append((self.length - 1, self.groups[last.group].token_ids[last.end - 1]))
