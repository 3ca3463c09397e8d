"""Answers out: retrieve, lease, assemble, run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from ragcache.config import Mode, Settings
from ragcache.engine import Completion, Context, Request, assemble, check_window, generate
from ragcache.errors import EmptyQuestion
from ragcache.pipeline.answer import Answer, Reuse, Source, Timings
from ragcache.pipeline.encoding import ModuleEncoder, ModuleTokens
from ragcache.retrieval import Retriever, Selection
from ragcache.states import KVStates
from ragcache.store import Catalogue, Lease


@dataclass(frozen=True, slots=True)
class _Spelled:
    """A question in tokens, which fit the window."""

    selection: Selection
    modules: list[tuple[int, ...]]
    own: list[int]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A question ready to run."""

    selection: Selection
    context: Context
    lease: Lease | None
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class _Marks:
    """`time.perf_counter` readings, in seconds."""

    called: float
    retrieved: float
    assembled: float
    finished: float


@dataclass(frozen=True, slots=True)
class Answerer:
    """Answers questions over a collection, several in one ragged batch."""

    catalogue: Catalogue
    encoder: ModuleEncoder
    tokens: ModuleTokens
    retriever: Retriever
    settings: Settings

    def answer(self, questions: Sequence[str], collection: str, k: int, mode: Mode) -> list[Answer]:
        """One answer a question, in order. Raises `EmptyQuestion`, `UnknownCollection` or
        `PromptTooLong` before anything is computed."""
        called = time.perf_counter()
        for question in questions:
            if not question.strip():
                raise EmptyQuestion("the question is empty; write what you want to know")
        selections = [self.retriever.retrieve(q, collection, k) for q in questions]
        retrieved = time.perf_counter()
        with ExitStack() as leases:
            spelled = [self._spell(s) for s in selections if s.hits]
            prepared = [self._prepare(each, mode, leases) for each in spelled]
            assembled = time.perf_counter()
            completions = self._run(prepared)
        marks = _Marks(called, retrieved, assembled, time.perf_counter())
        ready = iter(zip(prepared, completions, strict=True))
        return [
            self._compose(*next(ready), mode, marks) if s.hits else _nothing_found(s, mode, marks)
            for s in selections
        ]

    def _spell(self, selection: Selection) -> _Spelled:
        """Raises `PromptTooLong`."""
        modules = self.tokens.of([hit.module for hit in selection.hits])
        frame = self.encoder.frame
        own = [
            *self.encoder.model.encode(frame.question),
            *self.encoder.model.encode_untrusted(selection.query.strip()),
            *self.encoder.model.encode(frame.epilogue),
        ]
        check_window(
            sum(map(len, modules)),
            len(self.encoder.preamble_ids) + len(own),
            window=self.encoder.model.causal.window,
            max_new_tokens=self.settings.max_new_tokens,
        )
        return _Spelled(selection, modules, own)

    def _prepare(self, spelled: _Spelled, mode: Mode, leases: ExitStack) -> _Prepared:
        selection, modules, own = spelled.selection, spelled.modules, spelled.own
        if mode == "exact":
            private = [*self.encoder.preamble_ids, *(t for ids in modules for t in ids), *own]
            return _Prepared(selection, self._assemble((), private), None, 0)
        lease = leases.enter_context(self.encoder.lease(modules, mode))
        for hit, key in zip(selection.hits, lease.keys[1:], strict=True):
            if lease.source[key] == "encoded":
                self.catalogue.claim(hit.module.id, key)
        cached = sum(
            states.length
            for key, states in zip(lease.keys, lease.states, strict=True)
            if lease.source[key] != "encoded"
        )
        return _Prepared(selection, self._assemble(lease.states, own), lease, cached)

    def _assemble(self, states: Sequence[KVStates], token_ids: Sequence[int]) -> Context:
        return assemble(
            states,
            token_ids,
            window=self.encoder.model.causal.window,
            max_new_tokens=self.settings.max_new_tokens,
        )

    def _run(self, prepared: Sequence[_Prepared]) -> list[Completion]:
        model = self.encoder.model
        requests = [
            Request(p.context, self.settings.max_new_tokens, model.stop_ids) for p in prepared
        ]
        return generate(model.causal, requests)

    def _compose(
        self, prepared: _Prepared, completion: Completion, mode: Mode, marks: _Marks
    ) -> Answer:
        context, lease = prepared.context, prepared.lease
        tiers = ["computed"] * len(prepared.selection.hits)
        if lease is not None:
            tiers = [lease.source[key] for key in lease.keys[1:]]
        sources = tuple(
            Source(hit.module.document, hit.module.name, hit.module.uri, hit.score, tier)
            for hit, tier in zip(prepared.selection.hits, tiers, strict=True)
        )
        return Answer(
            question=prepared.selection.query,
            text=self.encoder.model.decode(list(completion.token_ids)).strip(),
            sources=sources,
            mode=mode,
            finish_reason=completion.finish_reason,
            reuse=Reuse(
                prompt_tokens=context.prompt_tokens,
                cached_tokens=prepared.cached_tokens,
                computed_tokens=context.prompt_tokens - prepared.cached_tokens,
                bytes_moved=dict(lease.moved) if lease is not None else {},
            ),
            timings=Timings(
                retrieve=marks.retrieved - marks.called,
                assemble=marks.assembled - marks.retrieved,
                first_token=completion.first_token_at - marks.called,
                total=completion.finished_at - marks.called,
            ),
        )


def _nothing_found(selection: Selection, mode: Mode, marks: _Marks) -> Answer:
    """Retrieval found no module that shares anything with the question: nothing is made up."""
    elapsed = marks.finished - marks.called
    timings = Timings(marks.retrieved - marks.called, 0.0, elapsed, elapsed)
    return Answer(selection.query, "", (), mode, "no_documents", Reuse(0, 0, 0), timings)
