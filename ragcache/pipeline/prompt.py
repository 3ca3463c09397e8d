"""Prompts in tokens: spans that are read from kept states, and tokens that are computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from ragcache.db import Catalog, ModuleRow
from ragcache.engine import Context, Segment
from ragcache.modes import AFTER_PREAMBLE, EXACT, ROOTED, Compose, Encoding, ReuseMode
from ragcache.pipeline.answer import Citation, Timestamps
from ragcache.pipeline.keeper import Keeper
from ragcache.pipeline.module_states import Companion, ModuleEncoder, Scaffolds
from ragcache.retrieval import Selection
from ragcache.states import KVKey
from ragcache.states.quantization import StoredStates
from ragcache.store import Lease


@dataclass(frozen=True, slots=True)
class ModuleGroup:
    """Modules whose states are kept under one key: a single module, or a scaffold."""

    modules: tuple[int, ...]
    """Ids of the modules. Empty for the preamble."""
    token_ids: tuple[int, ...]
    """Tokens of all modules, one after the other."""
    start: int
    """Position of the first token in the prompt."""
    encoding: Encoding = AFTER_PREAMBLE
    """How the states are encoded."""
    behind: Companion | None = None
    """The module that stands in for the priming text in front of it."""


class PlacedStates(NamedTuple):
    """States that a prompt reads."""

    name: str
    """Name of the segment."""
    start: int
    """Position in the prompt at which the segment begins."""


@dataclass(frozen=True, slots=True)
class CachedSpan:
    """Tokens begin:end of leased states, read from position `start` on."""

    group: int
    """Index of the states' key in the lease."""
    begin: int
    end: int
    start: int
    """Position in the prompt at which token `begin` is read."""
    offset: int
    """Distance in positions between the states' first token and token `begin`, as encoded. Equal to
    `begin` in states without gaps."""

    @property
    def length(self) -> int:
        return self.end - self.begin

    def name(self, key: KVKey, length: int) -> str:
        """Return the name of the span's segment.

        Args:
            key: Key of the states.
            length: Number of tokens of the whole states.
        """
        whole = (self.begin, self.end) == (0, length)
        return key if whole else f"{key}[{self.begin}:{self.end}]"

    def segment(
        self, key: KVKey, states: StoredStates, token_ids: tuple[int, ...] | None = None
    ) -> Segment:
        """Return a view of the span's states at its place in the prompt.

        Args:
            key: Key of the states.
            states: The states.
            token_ids: Tokens of the whole states, if known.
        """
        own = None if token_ids is None else token_ids[self.begin : self.end]
        name, part = self.name(key, states.length), states
        if (self.begin, self.end) != (0, states.length):
            part = _part_of(states, self.begin, self.end, states.start + self.offset)
        return Segment(part, self.start, name, own)

    def shortened(self) -> CachedSpan:
        """Return the span without its last token."""
        return replace(self, end=self.end - 1)


_MOST_PARTS = 4
_parts = WeakKeyDictionary[StoredStates, dict[tuple[int, int, int], StoredStates]]()
"""Parts of states that prompts read last, at most `_MOST_PARTS` each, by `begin`, `end` and `start`
(`KVStates.part`). The plans of a GPU's steps remember states by object."""


def _part_of(states: StoredStates, begin: int, end: int, start: int) -> StoredStates:
    """Return `states.part(begin, end, start)`, the same object as for the prompts before."""
    known = _parts.setdefault(states, {})
    part = known.get((begin, end, start))
    if part is None:
        if len(known) >= _MOST_PARTS:
            known.clear()
        part = known[begin, end, start] = states.part(begin, end, start)
    return part


class PromptStates(Protocol):
    """The kept states that a prompt reads, and their owners."""

    @property
    def token_ids(self) -> Sequence[tuple[int, ...]]:
        """Tokens of each group of states, in the order that `CachedSpan.group` counts."""

    @property
    def keys(self) -> Sequence[KVKey]:
        """Key of each group of states, in the same order."""

    def prefetch(self) -> None:
        """Start to bring the states to memory. Returns at once."""

    def lease(self, patience: float = math.inf) -> Lease:
        """Lease the states in the order that `CachedSpan.group` counts. Encodes missing ones.

        Args:
            patience: Seconds to wait for room while other requests fill the first tier.
        """

    def record_owners(self, lease: Lease) -> None:
        """Record the owners of the states that were encoded for this prompt."""


@dataclass(frozen=True, slots=True)
class ModuleStates:
    """States of a namespace's modules: `PromptStates` of questions and chats."""

    encoder: ModuleEncoder
    catalog: Catalog
    groups: tuple[ModuleGroup, ...]
    """The preamble, which is always leased, then the groups of modules."""
    scaffolds: Scaffolds | None = None
    """Scaffolds of the namespace. Needed for groups of several modules."""
    collection: str = ""
    """Collection of the scaffolds."""

    @property
    def token_ids(self) -> Sequence[tuple[int, ...]]:
        return [group.token_ids for group in self.groups]

    @property
    def keys(self) -> Sequence[KVKey]:
        return self.encoder.keys(*self._placed())

    def prefetch(self) -> None:
        self.encoder.prefetch(*self._placed())

    def lease(self, patience: float = math.inf) -> Lease:
        modules, encodings, starts, behind = self._placed()
        return self.encoder.lease(
            modules, encodings, starts=starts, patience=patience, behind=behind
        )

    def record_owners(self, lease: Lease) -> None:
        for group, key in zip(self.groups, lease.keys, strict=True):
            if len(group.modules) > 1 and self.scaffolds is not None:
                self.scaffolds.keep(self.collection, group.modules, key)
            elif group.modules and lease.source[key] == "encoded":
                self.catalog.add_key(group.modules[0], key, group.behind and group.behind.module)
                if group.behind is not None:  # that module may be deleted by now
                    self.encoder.store.retire([key])

    def _placed(
        self,
    ) -> tuple[list[tuple[int, ...]], list[Encoding], list[int], list[Companion | None]]:
        """Return the tokens, encoding, position and companion of each group of modules."""
        groups = self.groups[1:]
        return (
            [group.token_ids for group in groups],
            [group.encoding for group in groups],
            [group.start for group in groups],
            [group.behind for group in groups],
        )


PromptKind = Literal["question", "chat", "prompt"]
"""Origin of a prompt: a question to a collection, a conversation, or a PML prompt."""


@dataclass(frozen=True, slots=True)
class AskedQuestion:
    """A question with the options that its prompt depends on."""

    text: str = ""
    """The question, the user's last message, or the new text of a PML prompt."""
    mode: ReuseMode = ROOTED
    """The mode that the prompt is built in."""
    kind: PromptKind = "question"
    collection: str = ""
    """The collection that is searched. Empty for chats and PML prompts."""
    times: Timestamps = field(default_factory=Timestamps)
    replaced_mode: ReuseMode | None = None
    """Mode that the caller asked for, if `mode` replaces it: while the gate measures it, or because
    the model cannot read states."""
    keeper: Keeper = Keeper()
    """The caller, on whose account a conversation is retained."""


@dataclass(frozen=True, slots=True)
class Retrieved:
    """The modules that an answer is read from, and the search that found them."""

    modules: tuple[ModuleRow, ...] = ()
    """Modules that an extractive answer may quote, the best one first. Empty for PML prompts."""
    citations: tuple[tuple[Citation, int | None], ...] = ()
    """Sources of the answer, each with the index of its group in the lease. A source whose tokens
    are all computed has no group."""
    selection: Selection | None = None
    """The result of the search. PML prompts, and chats without a collection, have none."""


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt before any states are leased or any tokens computed."""

    computed_tokens: tuple[tuple[int, int], ...]
    """Tokens to compute, as (position, token), by position."""
    spans: tuple[CachedSpan, ...]
    """Spans that are read from kept states."""
    end: int
    """Position at which the answer continues."""
    states: PromptStates | None = None
    """The states that the spans read. A prompt without spans has no states."""
    recomputed: int = 0
    """Number of computed tokens that are the documents'."""
    question: AskedQuestion = field(default_factory=AskedQuestion)
    retrieved: Retrieved = field(default_factory=Retrieved)
    without_documents: Callable[[], Sequence[int]] = tuple
    """Make the prompt's tokens without its modules. Answers are scored after them."""

    @property
    def kind(self) -> PromptKind:
        """Origin of the prompt."""
        return self.question.kind

    @property
    def modules(self) -> tuple[ModuleRow, ...]:
        """Modules that the answer may quote, the best one first."""
        return self.retrieved.modules

    @property
    def selection(self) -> Selection | None:
        """The result of the search. PML prompts, and chats without a collection, have none."""
        return self.retrieved.selection

    @property
    def cacheable(self) -> bool:
        """Whether other requests may share the states of the computed tokens."""
        return (self.question.replaced_mode or self.question.mode).reads_states

    @property
    def has_documents(self) -> bool:
        """Whether there is something to read. False if a search found no module."""
        return self.selection is None or bool(self.selection.hits)

    @property
    def answer_mode(self) -> str:
        """The mode as answers name it: `recognized:MODE` for a chat that reads states."""
        mode = self.question.mode
        if self.kind != "chat":
            return str(mode)
        return str(EXACT) if self.states is None else f"recognized:{mode}"

    @property
    def read_tokens(self) -> int:
        """Number of tokens whose states are read."""
        return sum([span.length for span in self.spans])

    def placed_states(self) -> list[PlacedStates]:
        """Return the states that the prompt reads, as the segments of its context name them."""
        if self.states is None:
            return []
        keys, token_ids = self.states.keys, self.states.token_ids
        return [
            PlacedStates(each.name(keys[each.group], len(token_ids[each.group])), each.start)
            for each in self.spans
        ]


def build_context(
    prompt: TokenPrompt,
    keys: Sequence[KVKey] = (),
    states: Sequence[StoredStates] = (),
    compose: Compose = "order",
) -> Context:
    """Return the context that the engine attends to.

    Args:
        prompt: The prompt.
        keys: Keys of the prompt's lease, in order.
        states: States of these keys.
        compose: How documents compose in recurrent layers.
    """
    known = None if prompt.states is None else prompt.states.token_ids
    segments = [
        span.segment(
            keys[span.group], states[span.group], None if known is None else known[span.group]
        )
        for span in prompt.spans
    ]
    positions, own = zip(*prompt.computed_tokens, strict=True)
    return Context(tuple(segments), own, positions, prompt.end, compose)


class PromptLayout:
    """Lays out a prompt without gaps, from front to back."""

    def __init__(self, preamble: Iterable[int] = (), *, divides: bool = True) -> None:
        """Create an empty layout. `divides`: whether parts of modules can be read."""
        self.divides = divides
        self.groups = [ModuleGroup((), tuple(preamble), 0)]
        """The preamble, then the groups that were added."""
        self.spans: list[CachedSpan] = []
        self.own: list[tuple[int, int]] = []
        """Tokens to compute, as (position, token)."""
        self.length = 0
        """Length of the prompt so far, in tokens."""
        self.recomputed = 0
        """Number of computed tokens that are the documents'."""

    def add(self, group: ModuleGroup) -> int:
        """Add a group whose states are leased, and return its index."""
        self.groups.append(group)
        return len(self.groups) - 1

    def read(self, group: int, begin: int, end: int) -> None:
        """Continue with tokens begin:end of a group, read from its states."""
        if begin < end:
            self.spans.append(CachedSpan(group, begin, end, self.length, begin))
            self.length += end - begin

    def compute(self, token_ids: Sequence[int]) -> None:
        """Continue with tokens that are computed."""
        self.own += enumerate(token_ids, self.length)
        self.length += len(token_ids)

    def close(self) -> None:
        """Compute the last token, so that the answer has a token to follow.

        All tokens of a module at the end are computed if modules cannot be divided.
        """
        if self.spans and (not self.own or self.own[-1][0] < self.length - 1):
            last = self.spans.pop()
            begin = last.end - 1 if self.divides else last.begin
            if begin > last.begin:
                self.spans.append(last.shortened())
            token_ids = self.groups[last.group].token_ids[begin : last.end]
            self.own += enumerate(token_ids, self.length - len(token_ids))

    def prompt(self) -> TokenPrompt:
        """Return the prompt. The caller adds its question, its states and its sources."""
        own, spans = tuple(self.own), tuple(self.spans)
        return TokenPrompt(own, spans, self.length, recomputed=self.recomputed)
