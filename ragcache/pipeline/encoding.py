"""From module texts to leased states: keys, the root, and encoding of what is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from ragcache.engine import EncodeJob, Segment
from ragcache.models import LoadedModel, PromptFrame
from ragcache.states import KVKey, KVStates, state_key
from ragcache.store import Catalogue, KVStore, Lease, ModuleRow, Origin, Wish

Encode = Callable[[Sequence[EncodeJob]], Iterable[KVStates]]
"""Encodes jobs, at least one; gives their states in order (`Engine.encode`)."""


class ModuleEncoder:
    """Knows under which key a module's states are kept, and makes those that are not."""

    def __init__(
        self, model: LoadedModel, frame: PromptFrame, store: KVStore, encode: Encode, salt: str = ""
    ) -> None:
        """salt: of all keys; see `state_key`."""
        self.model, self.frame, self.store, self.encode = model, frame, store, encode
        self.salt = salt

    @cached_property
    def preamble_ids(self) -> list[int]:
        return self.model.encode(self.frame.preamble)

    @cached_property
    def preamble_key(self) -> KVKey:
        return self._key(self.preamble_ids, "root", 0, None)

    def key(self, token_ids: Sequence[int], mode: str, start: int | None = None) -> KVKey:
        """The key of a module's states: encoded where the first slot starts, after the preamble, or
        at `start`; `rooted` sees the preamble, `isolated` does not. Both are said of any run of
        tokens."""
        root = self.preamble_key if mode == "rooted" else None
        return self._key(token_ids, mode, self._first if start is None else start, root)

    def lease(
        self,
        modules: Sequence[Sequence[int]],
        mode: str,
        origin: Origin = "question",
        starts: Sequence[int] | None = None,
    ) -> Lease:
        """The states of the preamble and then of each module, encoded if need be. starts: where
        each stands in the prompt, for positions that cannot move; None is one after the other,
        after the preamble."""
        starts = self._starts(modules, starts)
        keys = [self.key(ids, mode, at) for ids, at in zip(modules, starts, strict=True)]
        placed = dict(zip(keys, zip(modules, starts, strict=True), strict=True))

        def produce(missing: Sequence[KVKey]) -> Iterator[KVStates]:
            if missing[0] == self.preamble_key:
                yield from self._encode_preamble(missing[:1])
                missing = missing[1:]
            if missing:
                yield from self._encode([placed[key] for key in missing], mode)

        return self.store.lease([self.preamble_key, *keys], produce, self._wish(mode, origin))

    def prefetch(
        self, modules: Sequence[Sequence[int]], mode: str, starts: Sequence[int] | None = None
    ) -> None:
        """Begins to bring states to memory that a lease will ask for soon; returns at once."""
        placed = zip(modules, self._starts(modules, starts), strict=True)
        self.store.prefetch([self.preamble_key, *(self.key(ids, mode, at) for ids, at in placed)])

    def may_stand(self, start: int, length: int, mode: str) -> bool:
        """Whether a module of so many tokens can be encoded to stand from a position on."""
        if self.model.causal.scheme.movable:
            return True
        first = 0 if mode == "isolated" else self._first
        return first <= start and start + length <= self.model.causal.window

    def _wish(self, mode: str, origin: Origin) -> Wish:
        return Wish(origin, mode, self.preamble_key, self.model.causal.fingerprint)

    @property
    def _first(self) -> int:
        """Where the first slot starts."""
        return len(self.preamble_ids)

    def _starts(
        self, modules: Sequence[Sequence[int]], wanted: Sequence[int] | None
    ) -> Sequence[int]:
        """Where each module is encoded: in the first slot, or, with positions that cannot move,
        where this prompt wants it."""
        if self.model.causal.scheme.movable:
            return [self._first] * len(modules)
        if wanted is not None:
            return wanted
        lengths = [self._first, *map(len, modules)]
        return list(accumulate(lengths))[:-1]

    def _encode(self, placed: Sequence[tuple[Sequence[int], int]], mode: str) -> Iterator[KVStates]:
        if mode == "isolated":
            yield from self.encode([EncodeJob(ids, at) for ids, at in placed])
            return
        wish = self._wish(mode, "question")
        with self.store.lease([self.preamble_key], self._encode_preamble, wish) as lease:
            root = Segment(lease.states[0], 0)
            yield from self.encode([EncodeJob(ids, at, root) for ids, at in placed])

    def _encode_preamble(self, _: Sequence[KVKey]) -> Iterable[KVStates]:
        return self.encode([EncodeJob(self.preamble_ids)])

    def _key(self, token_ids: Sequence[int], mode: str, start: int, root: KVKey | None) -> KVKey:
        return state_key(
            model=self.model.causal.fingerprint,
            tokenizer=self.model.tokenizer_fingerprint,
            scheme=self.model.causal.scheme.name,
            mode=mode,
            token_ids=token_ids,
            start=start,
            root=root,
            salt=self.salt,
        )


@dataclass(frozen=True, slots=True)
class ModuleTokens:
    """Token ids of stored modules, made anew where another tokenizer was used before."""

    catalogue: Catalogue
    model: LoadedModel

    def of(self, modules: Sequence[ModuleRow]) -> list[tuple[int, ...]]:
        known = self.catalogue.token_ids([module.id for module in modules])
        for module in modules:
            if module.id not in known:
                known[module.id] = tuple(self.model.encode_untrusted(module.text))
                self.catalogue.add_tokens(module.id, known[module.id])
        return [known[module.id] for module in modules]
