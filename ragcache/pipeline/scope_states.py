"""States of a schema's modules: each encoded as a whole, read piece by piece.

A module's own texts and placeholders are encoded together at their positions in the schema
(Prompt Cache §3.3); modules nested in it are encoded on their own. A prompt then reads the runs of
its texts; placeholders and stand-ins never take part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from ragcache.engine import EncodeJob
from ragcache.models import LoadedModel
from ragcache.pipeline.encoding import Encode
from ragcache.pipeline.template_text import TemplateText
from ragcache.states import KVKey, KVStates, state_key
from ragcache.store import KVStore, Lease, Origin, Wish
from ragcache_schemas import Path, Piece, Scope


@dataclass(frozen=True, slots=True)
class ScopeTokens:
    """What is encoded together: tokens with ascending positions, and where each text's run is."""

    token_ids: tuple[int, ...]
    position_ids: tuple[int, ...]
    runs: dict[Path, tuple[int, int]]

    @property
    def start(self) -> int:
        return self.position_ids[0] if self.position_ids else 0


@dataclass(frozen=True, slots=True)
class ScopeEncoder:
    """Lays a module's tokens out, names their states, and encodes what is missing."""

    model: LoadedModel
    text: TemplateText
    store: KVStore
    encode: Encode
    salt: str = ""

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
        return state_key(
            model=self.model.causal.fingerprint,
            tokenizer=self.model.tokenizer_fingerprint,
            scheme=self.model.causal.scheme.name,
            mode="schema",
            token_ids=tokens.token_ids,
            start=tokens.start,
            root=None,
            offsets=offsets,
            salt=self.salt,
        )

    def lease(self, groups: Sequence[ScopeTokens], origin: Origin = "question") -> Lease:
        """The states of each group, encoded if need be."""
        keys = [self.key(group) for group in groups]
        keyed = dict(zip(keys, groups, strict=True))

        def produce(missing: Sequence[KVKey]) -> Iterable[KVStates]:
            groups = [keyed[key] for key in missing]
            return self.encode(
                [EncodeJob(g.token_ids, g.start, None, g.position_ids) for g in groups]
            )

        wish = Wish(origin, "schema", None, self.model.causal.fingerprint)
        return self.store.lease(keys, produce, wish)

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
