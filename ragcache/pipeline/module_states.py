"""From module texts to leased states: keys, tokens, scaffolds, and the encoding of what is missing.

The modules of a collection are encoded one by one, or together as a scaffold. Those of a schema are
encoded as a whole, at their positions in it, and read piece by piece (Prompt Cache §3.3).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import itemgetter
from typing import Any, TypeVar

from ragcache.db import Catalog, CollectionVersion, Members, ModuleRow, ScaffoldRows
from ragcache.engine import EncodeJob, Segment
from ragcache.errors import ConfigurationError
from ragcache.models import LoadedModel, PromptFrame, prompt_frame
from ragcache.modes import AFTER_PREAMBLE, WITHOUT_CONTEXT, Encoding
from ragcache.pipeline.chat_template import ChatTemplate, resolve_instruction
from ragcache.states import KVKey, KVStates, state_key
from ragcache.store import KVStore, Lease, LeaseRequest, Origin
from ragcache_schemas import Path, Piece, Scope

T = TypeVar("T")

Encode = Callable[[Sequence[EncodeJob]], Iterable[KVStates]]
"""Encodes jobs, at least one; gives their states in order (`LLMEngine.encode`)."""

PORTION = 8  # modules leased at once while they are encoded: bounds what the host tier must hold


def portions(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """The items in order, at most `PORTION` at a time."""
    for start in range(0, len(items), PORTION):
        yield items[start : start + PORTION]


class StateEncoder:
    """Names the states that one model encodes, and encodes what leases of them miss."""

    def __init__(self, model: LoadedModel, store: KVStore, encode: Encode, salt: str = "") -> None:
        """salt: of all keys; see `state_key`."""
        self.model, self.store, self.encode, self.salt = model, store, encode, salt

    def _state_key(
        self, token_ids: Sequence[int], mode: str, start: int, root: KVKey | None = None,
        offsets: Sequence[int] | None = None,
    ) -> KVKey:  # fmt: skip
        causal = self.model.causal
        return state_key(
            model=causal.fingerprint, tokenizer=self.model.tokenizer_fingerprint,
            scheme=causal.scheme.name, mode=mode, token_ids=token_ids, start=start,
            root=root, offsets=offsets, salt=self.salt,
        )  # fmt: skip

    def _request(self, origin: Origin, mode: str, root: KVKey | None = None) -> LeaseRequest:
        return LeaseRequest(origin, mode, root, self.model.causal.fingerprint)

    def _encode_missing(self, lease: Lease, jobs: Mapping[KVKey, EncodeJob]) -> None:
        """Encodes the states that no tier has, and that nobody else is encoding."""
        while missing := lease.claim():
            encoded = self.encode([jobs[key] for key in missing])
            for key, states in zip(missing, encoded, strict=True):
                lease.put(key, states)


class ModuleEncoder(StateEncoder):
    """Leases the states of a collection's modules, after those of the preamble."""

    def __init__(
        self, model: LoadedModel, frame: PromptFrame, store: KVStore, encode: Encode, salt: str = ""
    ) -> None:
        super().__init__(model, store, encode, salt)
        self.frame = frame
        self._variants: dict[str, ModuleEncoder] = {}  # by the instructions of collections

    def with_template(self, kwargs: Mapping[str, Any]) -> ModuleEncoder:
        """The encoder for prompts that the chat template spells with other variables. Where those
        change the preamble, all keys of rooted states are others."""
        frame = prompt_frame(self.model.tokenizer, self.frame.instruction, kwargs)
        if frame == self.frame:
            return self
        return ModuleEncoder(self.model, frame, self.store, self.encode, self.salt)

    def with_instruction(self, instruction: str | None) -> ModuleEncoder:
        """The encoder for a collection with this instruction; None is that of the folder. Raises
        `ConfigurationError` where this model cannot read it."""
        if instruction in (None, self.frame.instruction):
            return self
        assert instruction is not None
        if instruction not in self._variants:
            before = resolve_instruction(self.model.tokenizer, instruction)
            preamble = self.frame.preamble.removesuffix(f"{self.frame.instruction}\n\n")
            frame = replace(self.frame, preamble=f"{preamble}{before}\n\n", instruction=before)
            self._variants[instruction] = ModuleEncoder(
                self.model, frame, self.store, self.encode, self.salt
            )
        return self._variants[instruction]

    @cached_property
    def preamble_ids(self) -> list[int]:
        return self.model.encode(self.frame.preamble)

    @cached_property
    def preamble_key(self) -> KVKey:
        return self._state_key(self.preamble_ids, "root", 0)

    def key(
        self,
        token_ids: Sequence[int],
        encoding: Encoding = AFTER_PREAMBLE,
        start: int | None = None,
    ) -> KVKey:
        """The key of a module's states. start: position of the first token; defaults to the place
        right after the preamble."""
        root = self.preamble_key if encoding == AFTER_PREAMBLE else None
        return self._state_key(token_ids, encoding, self._first if start is None else start, root)

    def lease(
        self, modules: Sequence[Sequence[int]], encoding: Encoding = AFTER_PREAMBLE,
        origin: Origin = "question", starts: Sequence[int] | None = None,
    ) -> Lease:  # fmt: skip
        """The states of the preamble and then of each module (its token ids), encoded if need be.
        Raises `StoreError` where they cannot be kept, and are not for a question.

        starts: where each begins in the prompt, for positions that cannot move; None is one after
        the other, after the preamble.
        """
        starts = self._starts(modules, starts)
        keys = [self.key(ids, encoding, at) for ids, at in zip(modules, starts, strict=True)]
        if origin == "question":
            self.store.look_up([self.preamble_key, *keys])
        with ExitStack() as undo:
            lease = self.store.lease([self.preamble_key], self._request(origin, "root"))
            undo.push(lease)
            self._encode_missing(lease, {self.preamble_key: EncodeJob(self.preamble_ids)})
            root = Segment(lease.states[0], 0) if encoding == AFTER_PREAMBLE else None
            lease.extend(keys, self._request(origin, encoding, self.preamble_key))
            placed = zip(keys, modules, starts, strict=True)
            self._encode_missing(lease, {key: EncodeJob(ids, at, root) for key, ids, at in placed})
            undo.pop_all()
        return lease

    def prefetch(
        self,
        modules: Sequence[Sequence[int]],
        encoding: Encoding,
        starts: Sequence[int] | None = None,
    ) -> None:
        """Begins to bring states to memory that a lease will ask for soon; returns at once."""
        placed = zip(modules, self._starts(modules, starts), strict=True)
        keys = (self.key(ids, encoding, at) for ids, at in placed)
        self.store.prefetch([self.preamble_key, *keys])

    def fits_at(self, start: int, length: int, encoding: Encoding | None) -> bool:
        """Whether a module of `length` tokens can be read at a position."""
        if self.model.causal.scheme.movable:
            return True
        first = 0 if encoding == WITHOUT_CONTEXT else self._first
        return first <= start and start + length <= self.model.causal.window

    @property
    def _first(self) -> int:
        """Position of the first slot, right after the preamble."""
        return len(self.preamble_ids)

    def _starts(
        self, modules: Sequence[Sequence[int]], wanted: Sequence[int] | None
    ) -> Sequence[int]:
        """Positions at which the modules are encoded: the first slot, or, for positions that cannot
        move, the places in this prompt."""
        if self.model.causal.scheme.movable:
            return [self._first] * len(modules)
        return wanted or list(accumulate([self._first, *map(len, modules)]))[:-1]


@dataclass(frozen=True, slots=True)
class ModuleTokens:
    """Token ids of stored modules, made anew where another tokenizer was used before."""

    catalog: Catalog
    model: LoadedModel

    def of(self, modules: Sequence[ModuleRow]) -> list[tuple[int, ...]]:
        known = self.catalog.token_ids([module.id for module in modules])
        for module in modules:
            if module.id not in known:
                known[module.id] = tuple(self.model.encode_untrusted(module.text))
                self.catalog.add_tokens(module.id, known[module.id])
        return [known[module.id] for module in modules]


@dataclass(frozen=True, slots=True)
class ScopeTokens:
    """Tokens that are encoded together, with ascending positions and the run of each text."""

    token_ids: tuple[int, ...]
    position_ids: tuple[int, ...]
    runs: dict[Path, tuple[int, int]]

    @property
    def start(self) -> int:
        return self.position_ids[0] if self.position_ids else 0


class ScopeEncoder(StateEncoder):
    """Leases the states of a schema's modules. A module's own texts and placeholders are encoded
    together; modules nested in it are encoded on their own. A prompt then reads the runs of its
    texts; placeholders and stand-ins never take part."""

    def __init__(
        self, model: LoadedModel, text: ChatTemplate, store: KVStore, encode: Encode, salt: str = ""
    ) -> None:
        super().__init__(model, store, encode, salt)
        self.text = text

    def tokens(self, scopes: Sequence[Scope]) -> ScopeTokens:
        """The tokens of one module, or of several that a scaffold encodes together."""
        entries: list[tuple[tuple[int, ...], Piece]] = []
        for scope in scopes:
            entries += [*scope.texts, *scope.parameters.values(), *scope.stand_ins]
        own = {piece.path for scope in scopes for _, piece in scope.texts}
        ids: list[int] = []
        positions: list[int] = []
        runs: dict[Path, tuple[int, int]] = {}
        for _, piece in sorted(entries, key=itemgetter(0)):
            run = self._ids(piece)
            if piece.path in own:
                runs[piece.path] = (len(ids), len(ids) + len(run))
            ids += run
            positions += range(piece.start, piece.start + len(run))
        return ScopeTokens(tuple(ids), tuple(positions), runs)

    def key(self, tokens: ScopeTokens) -> KVKey:
        offsets = [p - tokens.start for p in tokens.position_ids]
        return self._state_key(tokens.token_ids, "schema", tokens.start, offsets=offsets)

    def lease(self, groups: Sequence[ScopeTokens], origin: Origin = "question") -> Lease:
        """The states of each group, encoded if need be. Raises `StoreError` where they cannot be
        kept, and are not for a question."""
        keys = [self.key(group) for group in groups]
        jobs = {
            key: EncodeJob(group.token_ids, group.start, None, group.position_ids)
            for key, group in zip(keys, groups, strict=True)
        }
        if origin == "question":
            self.store.look_up(keys)
        with ExitStack() as undo:
            lease = self.store.lease(keys, self._request(origin, "schema"))
            undo.push(lease)
            self._encode_missing(lease, jobs)
            undo.pop_all()
        return lease

    def _ids(self, piece: Piece) -> list[int]:
        """A text's tokens, or what stands in for an argument: its scaffold, then placeholders."""
        ids = self.text.encode(piece.text)
        if piece.kind == "module":
            return ids
        placeholder = _placeholder(self.model.tokenizer)
        return (ids + [placeholder] * piece.reserved)[: piece.reserved]


def _placeholder(tokenizer: object) -> int:
    """The paper's `<unk>`, or the nearest thing that the tokenizer has."""
    for name in ("unk_token_id", "pad_token_id", "eos_token_id"):
        token = getattr(tokenizer, name, None)
        if isinstance(token, int):
            return token
    return 0


class Scaffolds:
    """The scaffolds of all collections of a namespace, by the ids of their modules. Thread-safe.

    A scaffold is a run of modules that are encoded together (Prompt Cache §3.3). Its states
    override the single ones wherever all its modules are selected in that order, next to each
    other. The ledger keeps scaffolds until a document of theirs changes.
    """

    def __init__(self, rows: ScaffoldRows) -> None:
        self._rows = rows
        self._known: dict[str, tuple[CollectionVersion, set[Members]]] = {}
        self._kept: set[tuple[Members, KVKey]] = set()
        self._lock = threading.Lock()

    def follow(self, collection: str, version: CollectionVersion) -> None:
        """Reads the scaffolds of a collection where they may have changed: any process may have
        declared some. version: that of the collection now."""
        known = self._known.get(collection)
        if known is not None and known[0] == version:
            return
        kept = self._rows.read_scaffolds(collection) if version.scaffold else set()
        with self._lock:
            self._kept |= kept
            self._known[collection] = version, {members for members, _ in kept}

    def runs(self, collection: str, modules: Sequence[int]) -> list[tuple[int, int]]:
        """Splits a selection into runs begin:end that are encoded together, the longest scaffold
        that fits first, from the front, after `follow`."""
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
        """Declares a scaffold of these modules, in this order, with the states of this key, which
        end with its documents."""
        kept = (tuple(modules), key)  # equal texts of two collections have one key
        if kept not in self._kept:
            self._rows.add_scaffold(collection, *kept)
            with self._lock:
                self._kept.add(kept)


def scaffold_modules(modules: Sequence[ModuleRow], ids: Sequence[str]) -> list[ModuleRow]:
    """The modules that ids of documents (all modules of one) or of modules name, in order.

    Raises `ConfigurationError` for an unknown id, a module that comes twice, or fewer than two.
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
