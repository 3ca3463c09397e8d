"""From module texts to leased states: keys, the root, and encoding of what is missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ragcache.config import Mode
from ragcache.engine import EncodeJob, Segment, encode
from ragcache.models import LoadedModel, PromptFrame
from ragcache.states import KVKey, KVStates, state_key
from ragcache.store import Catalogue, KVStore, Lease, ModuleRow, Origin, Wish


class ModuleEncoder:
    """Knows under which key a module's states are kept, and makes those that are not."""

    def __init__(self, model: LoadedModel, frame: PromptFrame, store: KVStore) -> None:
        self.model, self.frame, self.store = model, frame, store

    @cached_property
    def preamble_ids(self) -> list[int]:
        return self.model.encode(self.frame.preamble)

    @cached_property
    def preamble_key(self) -> KVKey:
        return self._key(self.preamble_ids, "root", 0, None)

    def key(self, token_ids: Sequence[int], mode: Mode) -> KVKey:
        """The key of a module's states: encoded where the first slot starts, after the preamble;
        `rooted` sees the preamble, `isolated` does not."""
        root = self.preamble_key if mode == "rooted" else None
        return self._key(token_ids, mode, len(self.preamble_ids), root)

    def lease(
        self, modules: Sequence[Sequence[int]], mode: Mode, origin: Origin = "question"
    ) -> Lease:
        """The states of the preamble and then of each module, encoded if need be."""
        module_keys = [self.key(ids, mode) for ids in modules]
        tokens = dict(zip(module_keys, modules, strict=True))

        def produce(missing: Sequence[KVKey]) -> Iterator[KVStates]:
            if missing[0] == self.preamble_key:
                yield from self._encode_preamble(missing[:1])
                missing = missing[1:]
            if missing:
                yield from self._encode([tokens[key] for key in missing], mode)

        return self.store.lease(
            [self.preamble_key, *module_keys], produce, self._wish(mode, origin)
        )

    def prefetch(self, modules: Sequence[Sequence[int]], mode: Mode) -> None:
        """Begins to bring states to memory that a lease will ask for soon; returns at once."""
        self.store.prefetch([self.preamble_key, *(self.key(ids, mode) for ids in modules)])

    def _wish(self, mode: Mode, origin: Origin) -> Wish:
        return Wish(origin, mode, self.preamble_key, self.model.causal.fingerprint)

    def _encode(self, modules: Sequence[Sequence[int]], mode: Mode) -> Iterator[KVStates]:
        start = len(self.preamble_ids)
        if mode == "isolated":
            yield from encode(self.model.causal, [EncodeJob(ids, start) for ids in modules])
            return
        wish = self._wish(mode, "question")
        with self.store.lease([self.preamble_key], self._encode_preamble, wish) as lease:
            root = Segment(lease.states[0], 0)
            yield from encode(self.model.causal, [EncodeJob(ids, start, root) for ids in modules])

    def _encode_preamble(self, _: Sequence[KVKey]) -> Iterator[KVStates]:
        return encode(self.model.causal, [EncodeJob(self.preamble_ids)])

    def _key(self, token_ids: Sequence[int], mode: str, start: int, root: KVKey | None) -> KVKey:
        return state_key(
            model=self.model.causal.fingerprint,
            tokenizer=self.model.tokenizer_fingerprint,
            scheme=self.model.causal.scheme.name,
            mode=mode,
            token_ids=token_ids,
            start=start,
            root=root,
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
