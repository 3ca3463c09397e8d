"""Answers out: retrieve, lease, assemble, submit."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from ragcache.config import linked_tokens
from ragcache.engine import Context, Request
from ragcache.errors import EmptyQuestion
from ragcache.pipeline.answer import Marks, Ready, Source
from ragcache.pipeline.asked import Asked, give_up
from ragcache.pipeline.generation import Generation
from ragcache.pipeline.linking import Run, link, recomputed
from ragcache.pipeline.module_states import ModuleEncoder, ModuleTokens, Scaffolds, scaffold_modules
from ragcache.pipeline.submitting import Submitter
from ragcache.retrieval import Retriever, SearchParams, Selection
from ragcache.store import Catalogue, Lease


@dataclass(frozen=True, slots=True)
class _Spelled:
    """A question in tokens, which fit the window. draft: None where nothing was found."""

    selection: Selection
    runs: list[Run]
    own: list[int]
    draft: Request | None


@dataclass(frozen=True, slots=True)
class _Call:
    """What the questions of a call have in common. Times as in `Marks`."""

    collection: str
    mode: str
    called: float
    retrieved: float


@dataclass(frozen=True, slots=True)
class Answerer:
    """Submits questions over a collection."""

    catalogue: Catalogue
    encoder: ModuleEncoder
    tokens: ModuleTokens
    retriever: Retriever
    scaffolds: Scaffolds
    submitter: Submitter

    def start(
        self,
        questions: Sequence[str],
        collection: str,
        criteria: SearchParams,
        mode: str,
        generation: Generation,
    ) -> list[Asked]:
        """Retrieves, leases and submits each question, in order. Raises `EmptyQuestion`,
        `UnknownCollection`, `InvalidRequest` or `PromptTooLong` before anything is computed."""
        called = time.perf_counter()
        for question in questions:
            if not question.strip():
                raise EmptyQuestion("the question is empty; write what you want to know")
        selections = [self.retriever.retrieve(q, collection, criteria) for q in questions]
        call = _Call(collection, mode, called, time.perf_counter())
        spelled = [self._spell(selection, call, generation) for selection in selections]
        asked: list[Asked] = []
        try:
            for each in spelled:
                asked.append(self._submit(each, call))
        except BaseException:
            give_up(asked)
            raise
        return asked

    def add_scaffold(self, collection: str, ids: Sequence[str]) -> tuple[str, ...]:
        """Declares a scaffold and encodes it; returns the names of its modules. Raises
        `ConfigurationError`, `PromptTooLong` or `UnknownCollection`."""
        modules = scaffold_modules(self.catalogue.modules(collection), ids)
        token_ids = tuple(token for ids in self.tokens.of(modules) for token in ids)
        preamble = len(self.encoder.preamble_ids)
        self.submitter.draft(preamble, len(token_ids), Generation())
        key = self.encoder.key(token_ids, "rooted")
        self.scaffolds.declare(collection, [module.id for module in modules], key)
        with self.encoder.lease([token_ids], "rooted", "warm"):
            return tuple(module.name for module in modules)

    def _spell(self, selection: Selection, call: _Call, generation: Generation) -> _Spelled:
        """Raises `InvalidRequest` or `PromptTooLong`."""
        encode, frame = self.encoder.model.encode, self.encoder.frame
        own = [
            *encode(frame.question),
            *self.encoder.model.encode_untrusted(selection.query.strip()),
            *encode(frame.epilogue),
        ]
        runs = self._runs(selection, call)
        documents = len(self.encoder.preamble_ids) + sum(len(run.token_ids) for run in runs)
        exact = call.mode == "exact"
        again = documents if exact else sum(recomputed(runs, linked_tokens(call.mode)))
        draft = self.submitter.draft(
            len(own), documents, generation, recomputed=again, reuse=not exact
        )
        if not exact:
            self.encoder.prefetch([run.token_ids for run in runs], _encoded_as(call.mode))
        return _Spelled(selection, runs, own, draft if selection.hits else None)

    def _runs(self, selection: Selection, call: _Call) -> list[Run]:
        """The selection's modules as they are encoded: together where a scaffold says so."""
        tokens = self.tokens.of([hit.module for hit in selection.hits])
        numbers = [hit.module.id for hit in selection.hits]
        self.scaffolds.note(call.collection, numbers)
        return [
            Run(begin, end, tuple(token for ids in tokens[begin:end] for token in ids))
            for begin, end in self.scaffolds.runs(call.collection, numbers)
        ]

    def _submit(self, spelled: _Spelled, call: _Call) -> Asked:
        draft = spelled.draft
        if draft is None:
            marks = Marks(call.called, call.retrieved, call.retrieved)
            ready = Ready(
                spelled.selection.query, (), call.mode, 0, 0, {}, marks, collection=call.collection
            )
            return self.submitter.nothing_to_read(ready, call.retrieved)
        if call.mode == "exact":
            documents = (token for run in spelled.runs for token in run.token_ids)
            everything = (*self.encoder.preamble_ids, *documents, *spelled.own)
            size = len(everything)
            context = Context((), everything, tuple(range(size)), size)
            return self.submitter.submit(draft, context, _ready(spelled, call, context), None)
        with ExitStack() as undo:
            mode = _encoded_as(call.mode)
            lease = self.encoder.lease([run.token_ids for run in spelled.runs], mode)
            undo.callback(lease.release)
            self._claim(spelled, call, lease)
            linked = linked_tokens(call.mode)
            context = link(lease.keys, lease.states, spelled.runs, spelled.own, linked)
            ready = _ready(spelled, call, context, lease)
            asked = self.submitter.submit(draft, context, ready, lease)
            undo.pop_all()
        return asked

    def _claim(self, spelled: _Spelled, call: _Call, lease: Lease) -> None:
        """Notes whose states were made now."""
        for run, key in zip(spelled.runs, lease.keys[1:], strict=True):
            modules = [hit.module.id for hit in spelled.selection.hits[run.first : run.end]]
            if len(modules) > 1:
                self.scaffolds.keep(call.collection, modules, key)
            elif lease.source[key] == "encoded":
                self.catalogue.claim(modules[0], key)


def _encoded_as(mode: str) -> str:
    return "isolated" if mode == "isolated" else "rooted"


def _ready(spelled: _Spelled, call: _Call, context: Context, lease: Lease | None = None) -> Ready:
    again = [0, *recomputed(spelled.runs, linked_tokens(call.mode))]
    tokens: Counter[str] = Counter() if lease is None else read_tokens(lease, again)
    return Ready(
        question=spelled.selection.query,
        sources=_sources(spelled, lease),
        mode=call.mode,
        prompt_tokens=context.prompt_tokens,
        cached_tokens=tokens.total() - tokens["encoded"],
        bytes_moved=dict(lease.moved) if lease is not None else {},
        marks=Marks(call.called, call.retrieved, time.perf_counter()),
        created_tokens=tokens["encoded"],
        collection=call.collection,
        tokens=tokens,
    )


def read_tokens(lease: Lease, again: Sequence[int]) -> Counter[str]:
    """How many tokens of leased states a prompt reads, by the tier that they came from; `encoded`
    for those that were made for it and kept. again: how many of each are computed all the same."""
    tokens: Counter[str] = Counter()
    for key, states, count in zip(lease.keys, lease.states, again, strict=True):
        tokens[lease.source[key]] += states.length - count
    return tokens


def _sources(spelled: _Spelled, lease: Lease | None) -> tuple[Source, ...]:
    hits = spelled.selection.hits
    sources: list[Source] = []
    for number, run in enumerate(spelled.runs, start=1):
        tier = "computed" if lease is None else lease.source[lease.keys[number]]
        together = hits[run.first : run.end]
        alone = lease is None or len(together) == 1
        scaffold = "" if alone else " ".join(hit.module.name for hit in together)
        sources += [
            Source(hit.module.document, hit.module.name, hit.module.uri, hit.score, tier, scaffold)
            for hit in together
        ]
    return tuple(sources)
