"""Answers out: retrieve, lease, assemble, submit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from ragcache.config import Mode
from ragcache.engine import Context, Request, assemble
from ragcache.errors import EmptyQuestion
from ragcache.pipeline.answer import Marks, Ready, Source
from ragcache.pipeline.asked import Asked, give_up
from ragcache.pipeline.encoding import ModuleEncoder, ModuleTokens
from ragcache.pipeline.generation import Generation
from ragcache.pipeline.submitting import Submitter
from ragcache.retrieval import Retriever, Selection
from ragcache.states import KVStates
from ragcache.store import Catalogue, Lease


@dataclass(frozen=True, slots=True)
class _Spelled:
    """A question in tokens, which fit the window. draft: None where nothing was found."""

    selection: Selection
    modules: list[tuple[int, ...]]
    own: list[int]
    draft: Request | None


@dataclass(frozen=True, slots=True)
class _Call:
    """What the questions of a call have in common. Times as in `Marks`."""

    mode: Mode
    called: float
    retrieved: float


@dataclass(frozen=True, slots=True)
class Answerer:
    """Submits questions over a collection."""

    catalogue: Catalogue
    encoder: ModuleEncoder
    tokens: ModuleTokens
    retriever: Retriever
    submitter: Submitter

    def start(
        self,
        questions: Sequence[str],
        collection: str,
        k: int,
        mode: Mode,
        generation: Generation,
    ) -> list[Asked]:
        """Retrieves, leases and submits each question, in order. Raises `EmptyQuestion`,
        `UnknownCollection`, `InvalidRequest` or `PromptTooLong` before anything is computed."""
        called = time.perf_counter()
        for question in questions:
            if not question.strip():
                raise EmptyQuestion("the question is empty; write what you want to know")
        selections = [self.retriever.retrieve(q, collection, k) for q in questions]
        call = _Call(mode, called, time.perf_counter())
        spelled = [self._spell(selection, mode, generation) for selection in selections]
        asked: list[Asked] = []
        try:
            for each in spelled:
                asked.append(self._submit(each, call))
        except BaseException:
            give_up(asked)
            raise
        return asked

    def _spell(self, selection: Selection, mode: Mode, generation: Generation) -> _Spelled:
        """Raises `InvalidRequest` or `PromptTooLong`."""
        encode, frame = self.encoder.model.encode, self.encoder.frame
        modules = self.tokens.of([hit.module for hit in selection.hits])
        own = [
            *encode(frame.question),
            *self.encoder.model.encode_untrusted(selection.query.strip()),
            *encode(frame.epilogue),
        ]
        documents = len(self.encoder.preamble_ids) + sum(map(len, modules))
        draft = self.submitter.draft(len(own), documents, generation, reuse=mode != "exact")
        return _Spelled(selection, modules, own, draft if selection.hits else None)

    def _submit(self, spelled: _Spelled, call: _Call) -> Asked:
        if spelled.draft is None:
            marks = Marks(call.called, call.retrieved, call.retrieved)
            ready = Ready(spelled.selection.query, (), call.mode, 0, 0, {}, marks)
            return self.submitter.nothing_to_read(ready, call.retrieved)
        if call.mode == "exact":
            documents = (token for ids in spelled.modules for token in ids)
            everything = [*self.encoder.preamble_ids, *documents, *spelled.own]
            context = self._assemble(spelled.draft, (), (), everything)
            ready = self._ready(spelled, call, context, None)
            return self.submitter.submit(spelled.draft, context, ready, None)
        with ExitStack() as undo:
            lease = self.encoder.lease(spelled.modules, call.mode)
            undo.callback(lease.release)
            for hit, key in zip(spelled.selection.hits, lease.keys[1:], strict=True):
                if lease.source[key] == "encoded":
                    self.catalogue.claim(hit.module.id, key)
            names = tuple(map(str, lease.keys))
            context = self._assemble(spelled.draft, lease.states, names, spelled.own)
            ready = self._ready(spelled, call, context, lease)
            asked = self.submitter.submit(spelled.draft, context, ready, lease)
            undo.pop_all()
        return asked

    def _assemble(
        self,
        draft: Request,
        states: Sequence[KVStates],
        names: Sequence[str],
        token_ids: Sequence[int],
    ) -> Context:
        return assemble(
            states,
            token_ids,
            window=self.encoder.model.causal.window,
            max_new_tokens=draft.max_new_tokens,
            names=names,
        )

    def _ready(
        self, spelled: _Spelled, call: _Call, context: Context, lease: Lease | None
    ) -> Ready:
        hits = spelled.selection.hits
        tiers, cached = ["computed"] * len(hits), 0
        if lease is not None:
            tiers = [lease.source[key] for key in lease.keys[1:]]
            cached = sum(
                states.length
                for key, states in zip(lease.keys, lease.states, strict=True)
                if lease.source[key] != "encoded"
            )
        return Ready(
            question=spelled.selection.query,
            sources=tuple(
                Source(hit.module.document, hit.module.name, hit.module.uri, hit.score, tier)
                for hit, tier in zip(hits, tiers, strict=True)
            ),
            mode=call.mode,
            prompt_tokens=context.prompt_tokens,
            cached_tokens=cached,
            bytes_moved=dict(lease.moved) if lease is not None else {},
            marks=Marks(call.called, call.retrieved, time.perf_counter()),
        )
