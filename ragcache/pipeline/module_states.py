"""From module texts to leased states: tokens, keys, scaffolds, encoding.

Modules of a collection are encoded one by one, or together as a scaffold. Modules of a schema are
in `ragcache.pipeline.schema_states`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any, NamedTuple, TypeVar, get_args

from ragcache.db import (
    Catalog,
    CollectionTexts,
    CollectionVersion,
    Members,
    ModuleRow,
    ScaffoldRows,
)
from ragcache.engine import EncodeJob, Segment
from ragcache.errors import ConfigurationError
from ragcache.models import LoadedModel, PromptFrame, prompt_frame
from ragcache.modes import AFTER_OTHER_TEXT, AFTER_PREAMBLE, WITHOUT_CONTEXT, Encoding
from ragcache.pipeline.chat_template import resolve_instruction
from ragcache.states import KVKey, KVStates, pack_numbers, state_key, unpack_numbers
from ragcache.store import KVStore, Lease, LeaseRequest, Origin

T = TypeVar("T")

Encode = Callable[[Sequence[EncodeJob]], Iterable[KVStates]]
"""Encodes one job or more, and returns their states in order (`LLMEngine.encode`)."""

MOST_KEYS = 2048
"""Most modules whose keys an encoder remembers, because hashing their tokens takes longer."""

PORTION = 8
"""Modules that are leased at once while they are encoded. Limits the load on the host tier."""


PRIMING_TEXT = """# The reading room

The reading room is open from nine to six, and until eight on Wednesdays. Seats by the windows \
cannot be reserved. Bags stay in the lockers next to the entrance, which take a coin of one \
crown. Maps and newspapers are read in the room only; all other books may be borrowed for four \
weeks, and twice as long between June and August. Eleonora Vance answers questions at the desk.

# How a clay pot is made

The potter cuts the clay, beats the air out of it and sets a lump in the middle of the wheel. \
With wet hands she opens it, pulls up the wall and gives the rim its shape. The pot dries for \
six days on a shelf without draft. It is then fired at about 900 degrees, dipped in glaze and \
fired once more, hotter than before. One pot in twelve cracks, mostly because it was dried too \
fast.

# Report on the water meters

In the third quarter 412 of 438 meters were read, six more than a year ago. Nine households did \
not open, and two meters had stopped. The average use was 31 cubic meters, 4 percent less than \
in the same months before, although the summer was dry. The committee proposes to replace the \
oldest meters in March and to send readings by post no longer. Costs are estimated at 7,200 \
crowns.

"""
"""The built-in priming text: documents of no importance. Modules in later places of a prompt see it
when they are encoded. A change of it changes their keys (docs/internals/adr, 67).
"""


class Companion(NamedTuple):
    """The module of a collection that another one is encoded behind, in place of a priming text."""

    module: int
    """Id of the module."""
    token_ids: tuple[int, ...]
    """Its first tokens."""


def portions(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield the items in order, at most `PORTION` at a time."""
    for start in range(0, len(items), PORTION):
        yield items[start : start + PORTION]


@dataclass(eq=False)
class StateEncoder:
    """Makes the keys of one model's states, and encodes the states that a lease is missing."""

    model: LoadedModel
    store: KVStore
    encode: Encode
    salt: str = field(default="", kw_only=True)
    """Part of all keys (`state_key`)."""

    @cached_property
    def identity(self) -> str:
        """Digest of the model, its tokenizer and the namespace, on which all keys depend."""
        return self._state_key((), "", 0)

    def _state_key(
        self,
        token_ids: Sequence[int],
        mode: str,
        start: int,
        root: KVKey | None = None,
        offsets: Sequence[int] | None = None,
    ) -> KVKey:
        causal = self.model.causal
        return state_key(
            model=causal.fingerprint,
            tokenizer=self.model.tokenizer_fingerprint,
            scheme=causal.scheme.name,
            mode=mode,
            token_ids=token_ids,
            start=start,
            root=root,
            offsets=offsets,
            salt=self.salt,
        )

    def _request(
        self,
        origin: Origin,
        mode: str,
        lengths: Mapping[KVKey, int],
        root: KVKey | None = None,
        patience: float = math.inf,
    ) -> LeaseRequest:
        """Return the request of a lease. `lengths`: numbers of tokens of the states."""
        causal = self.model.causal

        def size_of(key: KVKey) -> int:
            return causal.module_bytes(lengths[key]) if key in lengths else 0

        return LeaseRequest(origin, mode, root, causal.fingerprint, patience, size_of)

    def _encode_missing(self, lease: Lease, jobs: Mapping[KVKey, EncodeJob]) -> None:
        """Encode the states of a lease that no tier holds and no other caller is encoding."""
        while missing := lease.claim():
            encoded = self.encode([jobs[key] for key in missing])
            for key, states in zip(missing, encoded, strict=True):
                lease.put(key, states)


@dataclass(eq=False)
class Surroundings:
    """The tokens that modules see when they are encoded."""

    model: LoadedModel
    preamble: tuple[int, ...]
    """Tokens of prompts up to the first module."""
    text: str = PRIMING_TEXT
    """Priming text."""

    @cached_property
    def priming(self) -> tuple[int, ...]:
        """Tokens of the priming text."""
        return tuple(self.model.encode_untrusted(self.text))

    def place(
        self,
        length: int,
        encoding: Encoding,
        start: int | None = None,
        priming: tuple[int, ...] | None = None,
    ) -> tuple[tuple[int, ...], int]:
        """Return the tokens that a module sees, from position 0 on, and the module's own position.

        A priming text is cut where the module begins, or to the model's window.

        Args:
            length: Number of tokens of the module.
            encoding: How the module is encoded.
            start: Position of a module that cannot move. Others follow the tokens that they see.
            priming: Tokens in place of the priming text.
        """
        before = () if encoding == WITHOUT_CONTEXT else self.preamble
        if encoding == AFTER_OTHER_TEXT:
            end = self.model.causal.window - length if start is None else start
            seen = self.priming if priming is None else priming
            before += seen[: max(0, end - len(before))]
        return before, max(len(before), len(self.preamble)) if start is None else start


class _WantedModule(NamedTuple):
    """A module whose states are wanted."""

    key: KVKey
    token_ids: Sequence[int]
    encoding: Encoding
    start: int
    """Position of the first token."""
    before: tuple[int, ...]
    """Tokens that the module sees."""
    root: KVKey | None
    """Key of the states of these tokens."""
    shares_root: bool
    """Whether other modules are encoded behind the same tokens, so that their states are kept."""


@dataclass(eq=False)
class ModuleEncoder(StateEncoder):
    """Leases the states of the preamble and of a collection's modules."""

    frame: PromptFrame
    """Texts before and after the modules of a prompt."""
    priming: str = PRIMING_TEXT
    """Text that modules in later places see when they are encoded."""
    _variants: dict[CollectionTexts, ModuleEncoder] = field(default_factory=dict, init=False)
    """Encoders for the texts of collections."""

    def __post_init__(self) -> None:
        self._keys = lru_cache(MOST_KEYS)(self._make_keys)

    def with_template(self, kwargs: Mapping[str, Any]) -> ModuleEncoder:
        """Return the encoder for a chat template with other variables.

        If the variables change the preamble, rooted states have other keys.
        """
        frame = prompt_frame(self.model.tokenizer, self.frame.instruction, kwargs)
        return self if frame == self.frame else replace(self, frame=frame)

    def with_texts(self, texts: CollectionTexts) -> ModuleEncoder:
        """Return the encoder for a collection with these texts.

        Raises:
            ConfigurationError: The instruction holds a control token of this model.
        """
        own = CollectionTexts(self.frame.instruction, self.priming)
        wanted = CollectionTexts(*(one or other for one, other in zip(texts, own, strict=True)))
        if wanted == own:
            return self
        if wanted not in self._variants:
            frame = self.frame
            if wanted.instruction != frame.instruction:
                instruction = resolve_instruction(self.model, wanted.instruction)
                preamble = frame.preamble.removesuffix(f"{frame.instruction}\n\n")
                preamble = f"{preamble}{instruction}\n\n"
                frame = replace(frame, preamble=preamble, instruction=instruction)
            priming = wanted.priming or PRIMING_TEXT
            self._variants[wanted] = replace(self, frame=frame, priming=priming)
        return self._variants[wanted]

    @cached_property
    def preamble_ids(self) -> list[int]:
        return self.model.encode(self.frame.preamble)

    @cached_property
    def preamble_key(self) -> KVKey:
        return self._state_key(self.preamble_ids, "root", 0)

    @cached_property
    def surroundings(self) -> Surroundings:
        """Tokens that modules see when they are encoded."""
        return Surroundings(self.model, tuple(self.preamble_ids), self.priming)

    def key(
        self,
        token_ids: Sequence[int],
        encoding: Encoding = AFTER_PREAMBLE,
        start: int | None = None,
        behind: Companion | None = None,
    ) -> KVKey:
        """Return the key of a module's states.

        Args:
            token_ids: Tokens of the module.
            encoding: How the states are encoded.
            start: Position of the first token. Defaults to the position after the tokens that the
                module sees.
            behind: The module that it sees in place of the priming text.
        """
        return self._want(token_ids, encoding, start, behind).key

    def keys(
        self,
        modules: Sequence[Sequence[int]],
        encodings: Encoding | Sequence[Encoding] = AFTER_PREAMBLE,
        starts: Sequence[int] | None = None,
        behind: Sequence[Companion | None] | None = None,
    ) -> list[KVKey]:
        """Return the keys that `lease` leases: of the preamble, and of each module."""
        wanted = self._all_wanted(modules, encodings, starts, behind)
        return [self.preamble_key, *(each.key for each in wanted)]

    def request_of(self, length: int, encoding: Encoding) -> LeaseRequest:
        """Return the properties of states of a module of `length` tokens that are stored."""
        before, _ = self.surroundings.place(length, encoding)
        root = self._root_key(before) if before else self.preamble_key
        return self._request("ingest", encoding, {}, root)

    def lease(
        self,
        modules: Sequence[Sequence[int]],
        encodings: Encoding | Sequence[Encoding] = AFTER_PREAMBLE,
        origin: Origin = "question",
        starts: Sequence[int] | None = None,
        patience: float = math.inf,
        behind: Sequence[Companion | None] | None = None,
    ) -> Lease:
        """Lease the states of the preamble and of each module. Encodes missing ones.

        Args:
            modules: Tokens of each module.
            encodings: How the states are encoded: all of them, or each.
            origin: Purpose of the lease.
            starts: Positions of the modules in the prompt, which matter for models whose states
                cannot move. By default each follows the tokens that it sees, as in `key`.
            patience: Seconds to wait for room while other leases fill the first tier.
            behind: The module that each one sees in place of the priming text, if any.

        Raises:
            DeadlineExceeded: The patience has ended.
            StoreError: The states cannot be stored. Never raised for questions, which are answered
                from states in memory.
        """
        wanted = self._all_wanted(modules, encodings, starts, behind)
        keys = [self.preamble_key, *(each.key for each in wanted)]
        if origin == "question":
            if known := self._lease_known(keys, wanted, patience):
                return known
            self.store.look_up(keys)
        with ExitStack() as undo:
            lease = self._lease_root(self.preamble_ids, origin, patience)
            undo.push(lease)
            for _, run in groupby(wanted, lambda each: (each.encoding, each.root)):
                self._extend(lease, list(run), origin)
            undo.pop_all()
        return lease

    def _lease_known(
        self, keys: Sequence[KVKey], wanted: Sequence[_WantedModule], patience: float
    ) -> Lease | None:
        """Lease states together, the usual case, if the tiers have all of them."""
        if self.store.memory.unknown(keys):
            return None
        lengths = {each.key: len(each.token_ids) for each in wanted}
        lease = self.store.lease(keys, self._request("question", "", lengths, patience=patience))
        if not lease.missing:
            return lease
        lease.release()  # some could not be read
        return None

    def prefetch(
        self,
        modules: Sequence[Sequence[int]],
        encodings: Encoding | Sequence[Encoding],
        starts: Sequence[int] | None = None,
        behind: Sequence[Companion | None] | None = None,
    ) -> None:
        """Start to bring the states of a coming lease to memory. Returns at once."""
        wanted = self._all_wanted(modules, encodings, starts, behind)
        self.store.prefetch([self.preamble_key, *(each.key for each in wanted)])

    def _lease_root(self, token_ids: Sequence[int], origin: Origin, patience: float) -> Lease:
        """Lease the states of the tokens before modules. Encodes missing ones."""
        key = self._root_key(token_ids)
        request = self._request(origin, "root", {key: len(token_ids)}, patience=patience)
        with ExitStack() as undo:
            lease = self.store.lease([key], request)
            undo.push(lease)
            self._encode_missing(lease, {key: EncodeJob(token_ids)})
            undo.pop_all()
        return lease

    def _extend(
        self,
        lease: Lease,
        wanted: Sequence[_WantedModule],
        origin: Origin,
    ) -> None:
        """Add modules to a lease that are encoded behind the same tokens. Encodes missing ones.

        A prompt does not read these tokens, unless they are its preamble. They are leased only
        while modules are encoded. If they are another module's, their states are kept nowhere: no
        other module needs them.
        """
        first = wanted[0]
        encoding, before, root = first.encoding, first.before, first.root or self.preamble_key
        lengths = {each.key: len(each.token_ids) for each in wanted}
        request = self._request(origin, encoding, lengths, root)
        lease.extend([each.key for each in wanted], request)
        if not lease.missing:
            return
        with ExitStack() as roots:
            segment = None
            if before and first.shares_root:
                other = root not in lease.found
                # does not wait: other leases may wait for this one
                held = (
                    roots.enter_context(self._lease_root(before, origin, 0.0)) if other else lease
                )
                segment = Segment(held.found[root], 0)
            elif before:
                [states] = self.encode([EncodeJob(before)])
                segment = Segment(states, 0)
            jobs = {each.key: EncodeJob(each.token_ids, each.start, segment) for each in wanted}
            self._encode_missing(lease, jobs)

    def root_keys(self) -> set[KVKey]:
        """Return the keys of the tokens that this encoder's modules are encoded behind.

        The encoders for the texts of collections are included.
        """
        found = {self.preamble_key}
        for each in (self, *list(self._variants.values())):
            before = [each.surroundings.place(0, encoding)[0] for encoding in get_args(Encoding)]
            found.update(each._root_key(tokens) for tokens in before if tokens)
        return found

    def _root_key(self, token_ids: Sequence[int]) -> KVKey:
        """Return the key of the tokens before modules, which is known for the preamble."""
        preamble = token_ids is self.surroundings.preamble or token_ids is self.preamble_ids
        return self.preamble_key if preamble else self._state_key(token_ids, "root", 0)

    def _make_keys(
        self, packed: bytes, encoding: Encoding, start: int | None, priming: bytes | None
    ) -> tuple[KVKey, KVKey | None]:
        """Return the keys of a module and of the tokens that it sees. Token ids are packed, which
        `_keys` keeps in a ninth of the memory of a tuple."""
        token_ids = unpack_numbers(packed)
        seen = None if priming is None else unpack_numbers(priming)
        before, at = self.surroundings.place(len(token_ids), encoding, start, seen)
        root = self._root_key(before) if before else None
        return self._state_key(token_ids, encoding, at, root), root

    def _want(
        self,
        token_ids: Sequence[int],
        encoding: Encoding,
        start: int | None,
        behind: Companion | None,
    ) -> _WantedModule:
        priming = None if behind is None else behind.token_ids
        packed = None if priming is None else pack_numbers(priming)
        key, root = self._keys(pack_numbers(token_ids), encoding, start, packed)
        before, at = self.surroundings.place(len(token_ids), encoding, start, priming)
        shared = priming is None or encoding != AFTER_OTHER_TEXT
        return _WantedModule(key, tuple(token_ids), encoding, at, before, root, shared)

    def _all_wanted(
        self,
        modules: Sequence[Sequence[int]],
        encodings: Encoding | Sequence[Encoding],
        starts: Sequence[int] | None,
        behind: Sequence[Companion | None] | None = None,
    ) -> list[_WantedModule]:
        number = len(modules)
        each = [encodings] * number if isinstance(encodings, str) else encodings
        placed = self._starts(modules, starts)
        every = zip(modules, each, placed, behind or [None] * number, strict=True)
        return [
            self._want(token_ids, encoding, start, other)
            for token_ids, encoding, start, other in every
        ]

    def fits_at(self, start: int, length: int, encoding: Encoding | None) -> bool:
        """Tell whether the states of a module of `length` tokens can be read at a position."""
        if self.model.causal.scheme.movable:
            return True
        first = 0 if encoding == WITHOUT_CONTEXT else len(self.preamble_ids)
        return first <= start and start + length <= self.model.causal.window

    def _starts(
        self, modules: Sequence[Sequence[int]], wanted: Sequence[int] | None
    ) -> Sequence[int | None]:
        """Return the positions at which the modules are encoded. None follows what they see.

        Movable states have no position of their own. Others are encoded at their place in the
        prompt.
        """
        if wanted is None or self.model.causal.scheme.movable:
            return [None] * len(modules)
        return wanted


@dataclass(frozen=True, slots=True)
class ModuleTokens:
    """Token ids of stored modules for one model's tokenizer."""

    catalog: Catalog
    model: LoadedModel

    def of(self, modules: Sequence[ModuleRow]) -> list[tuple[int, ...]]:
        """Return the tokens of each module. Tokenizes modules that another tokenizer split."""
        known = self.catalog.token_ids([module.id for module in modules])
        for module in modules:
            if module.id not in known:
                known[module.id] = tuple(self.model.encode_untrusted(module.text))
                self.catalog.add_tokens(module.id, known[module.id])
        return [known[module.id] for module in modules]


class Scaffolds:
    """The scaffolds of a namespace's collections, by the ids of their modules. Thread-safe.

    A scaffold is a run of modules that are encoded together (Prompt Cache §3.3). If a selection
    holds all its modules next to each other in that order, the joint states are read in place of
    the single ones. The ledger keeps a scaffold until one of its documents changes.
    """

    def __init__(self, rows: ScaffoldRows) -> None:
        self._rows = rows
        self._known: dict[str, tuple[CollectionVersion, set[Members]]] = {}
        self._kept: set[tuple[Members, KVKey]] = set()
        self._lock = threading.Lock()

    def follow(self, collection: str, version: CollectionVersion) -> None:
        """Read the scaffolds of a collection if its version has changed.

        Any process may have declared scaffolds since the last call.
        """
        known = self._known.get(collection)
        if known is not None and known[0] == version:
            return
        kept = self._rows.read_scaffolds(collection) if version.scaffold else set()
        with self._lock:
            self._kept |= kept
            self._known[collection] = version, {members for members, _ in kept}

    def runs(self, collection: str, modules: Sequence[int]) -> list[tuple[int, int]]:
        """Split a selection into runs begin:end that are encoded together, from the front.

        Each run is the longest scaffold that fits, or a single module. Requires `follow` before.
        """
        with self._lock:
            longest = sorted(self._known[collection][1], key=len, reverse=True)
        runs, begin = [], 0
        while begin < len(modules):
            lengths = (len(s) for s in longest if tuple(modules[begin : begin + len(s)]) == s)
            end = begin + next(lengths, 1)
            runs.append((begin, end))
            begin = end
        return runs

    def keep(self, collection: str, modules: Sequence[int], key: KVKey) -> None:
        """Declare a scaffold of modules in this order. `key` names its joint states."""
        kept = (tuple(modules), key)  # equal texts of two collections have one key
        if kept not in self._kept:
            self._rows.add_scaffold(collection, *kept)
            with self._lock:
                self._kept.add(kept)


def scaffold_modules(modules: Sequence[ModuleRow], ids: Sequence[str]) -> list[ModuleRow]:
    """Return the modules of a scaffold, in order.

    Args:
        modules: All modules of the collection.
        ids: Ids of documents, for all of their modules, or names of modules.

    Raises:
        ConfigurationError: An id is unknown, a module is named twice, or there are fewer than two.
    """
    found: list[ModuleRow] = []
    for wanted in ids:
        named = [module for module in modules if wanted in (module.name, module.document)]
        if not named:
            raise ConfigurationError(
                f"the collection has no document or module {wanted!r}; `ragcache modules ls` "
                "lists them"
            )
        found += named
    if len({module.id for module in found}) != len(found) or len(found) < 2:
        raise ConfigurationError("a scaffold needs two modules or more, and each of them once")
    return found
