"""States of a schema's modules: their tokens and keys, encoding, and leases (Prompt Cache §3.3).

Modules are encoded at their positions in the schema. A prompt reads pieces of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import itemgetter

from ragcache.db import SchemaTexts
from ragcache.engine import EncodeJob
from ragcache.pipeline.chat_template import ChatTemplate
from ragcache.pipeline.module_states import StateEncoder
from ragcache.states import KVKey
from ragcache.store import Lease, Origin
from ragcache_schemas import Path, Piece, Scope


@dataclass(frozen=True, slots=True)
class ScopeTokens:
    """Tokens of a schema that are encoded together."""

    token_ids: tuple[int, ...]
    position_ids: tuple[int, ...]
    """Positions of the tokens, ascending."""
    runs: dict[Path, tuple[int, int]]
    """Tokens begin:end of each text, by the path of the text."""

    @property
    def start(self) -> int:
        return self.position_ids[0] if self.position_ids else 0


@dataclass(eq=False)
class ScopeEncoder(StateEncoder):
    """Leases the states of a schema's modules.

    A module's own texts and placeholders are encoded together, its nested modules on their own. A
    prompt reads the runs of the texts, never placeholders.
    """

    template: ChatTemplate
    """Tokenizer of texts with marks."""

    def tokens(self, scopes: Sequence[Scope]) -> ScopeTokens:
        """Return the tokens of one module, or of the modules of a scaffold."""
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

    def lease(
        self,
        groups: Sequence[ScopeTokens],
        origin: Origin = "question",
        patience: float = math.inf,
    ) -> Lease:
        """Lease the states of each group. Encodes missing ones. See `ModuleEncoder.lease`.

        Raises:
            StoreError: The states cannot be stored. Never raised for questions.
        """
        keys = [self.key(group) for group in groups]
        jobs = {
            key: EncodeJob(group.token_ids, group.start, None, group.position_ids)
            for key, group in zip(keys, groups, strict=True)
        }
        if origin == "question":
            self.store.look_up(keys)
        with ExitStack() as undo:
            lengths = {key: len(job.token_ids) for key, job in jobs.items()}
            request = self._request(origin, "schema", lengths, patience=patience)
            lease = self.store.lease(keys, request)
            undo.push(lease)
            self._encode_missing(lease, jobs)
            undo.pop_all()
        return lease

    def _ids(self, piece: Piece) -> list[int]:
        """Return the tokens of a text or, for an argument, its scaffold and placeholders."""
        ids = self.template.encode(piece.text)
        if piece.kind == "module":
            return ids
        placeholder = _placeholder(self.model.tokenizer)
        return (ids + [placeholder] * piece.reserved)[: piece.reserved]


def _placeholder(tokenizer: object) -> int:
    """Return the token of unfilled arguments: the paper's `<unk>`, or the nearest equivalent."""
    for name in ("unk_token_id", "pad_token_id", "eos_token_id"):
        token = getattr(tokenizer, name, None)
        if isinstance(token, int):
            return token
    return 0


@dataclass(frozen=True, slots=True)
class ScopeGroup:
    """Modules of a schema that are encoded together."""

    paths: tuple[Path, ...]
    """Paths of the modules."""
    tokens: ScopeTokens
    """Tokens of all modules."""

    @property
    def scaffold(self) -> str:
        """Names of the modules, as citations list them. Empty for a single module."""
        return " ".join("/".join(path) for path in self.paths) if len(self.paths) > 1 else ""


@dataclass(frozen=True, slots=True)
class SchemaStates:
    """States of a schema's modules: `PromptStates` of a PML prompt."""

    encoder: ScopeEncoder
    texts: SchemaTexts
    schema: str
    groups: tuple[ScopeGroup, ...]

    @property
    def token_ids(self) -> Sequence[tuple[int, ...]]:
        return [group.tokens.token_ids for group in self.groups]

    @property
    def keys(self) -> Sequence[KVKey]:
        return [self.encoder.key(group.tokens) for group in self.groups]

    def prefetch(self) -> None:
        """Do nothing: PML prompts are built one at a time, and the lease follows at once."""

    def lease(self, patience: float = math.inf) -> Lease:
        groups = [group.tokens for group in self.groups]
        return self.encoder.lease(groups, patience=patience)

    def record_owners(self, lease: Lease) -> None:
        if made := [key for key in lease.keys if lease.source[key] == "encoded"]:
            self.texts.add_keys(self.schema, made)
