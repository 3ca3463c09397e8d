"""Options of a request by their plain names, and the three steps from built prompts to the engine:
what cannot run is refused before anything is leased, and a batch is submitted whole or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
import torch

from ragcache.answers.confidence import UNCALIBRATED, ConfidenceFeatures
from ragcache.answers.confidence_policy import ConfidencePolicy
from ragcache.db import CollectionVersion, ModuleRow
from ragcache.engine import Context, EngineConfig, LLMEngine, Request, SamplingParams
from ragcache.errors import InvalidRequest, PromptTooLong, QueueFull
from ragcache.models import LoadedModel, wrap_causal
from ragcache.params import GenerationParams, OpenConfig
from ragcache.pipeline import Citation
from ragcache.pipeline.answer import DeferredReleases, Timestamps
from ragcache.pipeline.prompt import AskedQuestion, CachedSpan, Retrieved, TokenPrompt
from ragcache.pipeline.submit import Submitter, prepare_answer, request_maker
from ragcache.retrieval import Selection
from ragcache.states import KVKey, KVStates
from ragcache.store import Lease
from ragcache.structured import Grammar
from tests.tiny_models import tiny_model

CONTEXT = Context((), (1, 2), (0, 1), 2)


def test_none_is_not_given_and_one_string_stops() -> None:
    options: dict[str, Any] = {"temperature": 0.5, "seed": 7, "stop": "\n", "n": 2, "top_p": None}
    made = GenerationParams(max_tokens=9, **options)
    assert made == GenerationParams(temperature=0.5, seed=7, max_tokens=9, stop=("\n",), n=2)
    assert GenerationParams() == GenerationParams()
    assert GenerationParams(stop=["a", "b"]).stop == ("a", "b")


def test_an_unknown_option_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match=r"unknown option 'heat'; options: .*temperature"):
        GenerationParams(heat=1)


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 0},
        {"n": 0},
        {"min_tokens": 9, "max_tokens": 8},
        {"timeout": 0.0},
        {"stop": ["x"] * 17},
        {"stop": [""]},
        {"temperature": -1},
        {"top_p": 0},
    ],
)
def test_options_out_of_their_range_are_refused(
    model: LoadedModel, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest):
        request_maker(GenerationParams(**options), model, 4, "local")(CONTEXT)


def test_the_default_is_greedy_and_as_long_as_the_setting(model: LoadedModel) -> None:
    def made(generation: GenerationParams, tenant: str = "local") -> Request:
        return request_maker(generation, model, 4, tenant)(CONTEXT)

    request = made(GenerationParams())
    assert (request.max_tokens, request.sampling, request.n) == (4, SamplingParams(), 1)
    assert request.stop_ids == model.stop_ids
    assert made(GenerationParams(max_tokens=3)).max_tokens == 3
    assert (request.tenant, made(GenerationParams(share=False), "x").tenant) == ("local", None)


def test_grammars_by_their_plain_names() -> None:
    schema = {"type": "integer"}
    assert Grammar.of(GenerationParams(json_schema=schema)) == Grammar.json_schema(schema)
    assert Grammar.of(GenerationParams(json_object=True)) == Grammar.json_object()
    assert Grammar.of(GenerationParams(regex="a+")) == Grammar.regex("a+")
    assert Grammar.of(GenerationParams(ebnf='root ::= "a"')) == Grammar.ebnf('root ::= "a"')
    assert Grammar.of(GenerationParams(grammar=Grammar.regex("a"))) == Grammar.regex("a")
    assert Grammar.of(GenerationParams(json_object=False, regex=None)) is None


@pytest.mark.parametrize(
    "options",
    [
        {"json_object": True, "regex": "a"},
        {"grammar": Grammar.regex("a"), "regex": "a"},
        {"json_schema": "{"},
        {"regex": ""},
    ],
)
def test_one_grammar_and_a_sound_one(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        Grammar.of(GenerationParams(**options))


def test_a_grammar_is_compiled_with_the_request(model: LoadedModel) -> None:
    made = request_maker(GenerationParams(regex="[ab]+"), model, 4, "local")(CONTEXT).constraint
    assert made is not None
    assert made() is not made()
    assert request_maker(GenerationParams(), model, 4, "local")(CONTEXT).constraint is None
    with pytest.raises(InvalidRequest, match="the regex cannot be compiled"):
        request_maker(GenerationParams(regex="[a"), model, 4, "local")(CONTEXT)


def test_a_reader_gives_no_answer_only_if_that_is_a_refusal(reader: LoadedModel) -> None:
    assert reader.no_answer_id is not None
    assert reader.decode([reader.no_answer_id]) == ""
    free = request_maker(GenerationParams(), reader, 4, "local")(CONTEXT)
    assert free.suppress_tokens == {reader.no_answer_id}
    for least, suppressed in ((0.5, set()), (0.0, {reader.no_answer_id})):
        policy = ConfidencePolicy(
            UNCALIBRATED, ConfidenceFeatures(), least, no_answer=reader.no_answer_id
        )
        made = request_maker(GenerationParams(), reader, 4, "local", [policy])(CONTEXT)
        assert made.suppress_tokens == suppressed
    grammar = request_maker(GenerationParams(regex="[ab]+"), reader, 4, "local")(CONTEXT)
    assert grammar.suppress_tokens == set(), "its masks allow no control tokens"


@dataclass
class FakeLease:
    """The parts of a lease that a submitter uses."""

    source: dict[KVKey, str]
    states: tuple[KVStates, ...] = ()
    calls: list[str] = field(default_factory=list)
    moved: dict[str, int] = field(default_factory=dict)

    @property
    def keys(self) -> list[KVKey]:
        return list(self.source)

    def release(self) -> None:
        self.calls.append("release")


@dataclass
class FakeStates:
    """States of one group of three tokens that came from the disk; notes what is called."""

    model: LoadedModel
    calls: list[str] = field(default_factory=list)
    fault: Exception | None = None
    token_ids: tuple[tuple[int, ...], ...] = ((1, 1, 1),)

    def prefetch(self) -> None:
        self.calls.append("prefetch")

    def lease(self, patience: float = math.inf) -> Lease:
        self.calls.append("lease" if patience == math.inf else f"lease within {patience:g} s")
        causal = self.model.causal
        shape = (causal.num_layers, causal.num_kv_heads, 3, causal.head_dim)
        states = KVStates(torch.zeros(shape), torch.zeros(shape), 0)
        return cast("Lease", FakeLease({KVKey("0" * 64): "disk"}, (states,), self.calls))

    def record_owners(self, lease: Lease) -> None:
        self.calls.append("own")
        if self.fault is not None:
            raise self.fault


@pytest.fixture
def submitter(model: LoadedModel) -> Iterator[Submitter]:
    settings = EngineConfig(pool_bytes=2**22, queue=2)
    with LLMEngine(model.causal, settings) as engine:
        yield Submitter(model, engine, DeferredReleases(), OpenConfig(max_tokens=4))


def reading(states: FakeStates | None, own: int = 2) -> TokenPrompt:
    """A prompt of three tokens that are read and some of its own."""
    tokens = tuple((at, 1) for at in range(3, 3 + own))
    spans = (CachedSpan(0, 0, 3, 0, 0),)
    cited = Citation("d", "d#1", "", 1.0)
    modules = (ModuleRow(1, "d#1", "d", "", ""),)
    retrieved = Retrieved(modules, ((cited, 0),))
    asked = AskedQuestion("q")
    return TokenPrompt(tokens, spans, 3 + own, states, question=asked, retrieved=retrieved)


def test_a_prompt_is_checked_leased_owned_and_submitted(submitter: Submitter) -> None:
    states = FakeStates(submitter.model)
    [pending] = submitter.run([reading(states)])
    assert states.calls == ["lease", "own"]
    answer = pending.result()
    assert states.calls[2:] == ["release"]
    assert [source.tier for source in answer.sources] == ["disk"]
    reuse = answer.reuse
    assert (reuse.prompt_tokens, reuse.cached_tokens, reuse.computed_tokens) == (5, 3, 2)


def test_a_waiting_lease_ends_those_of_answers_nobody_took(submitter: Submitter) -> None:
    states = FakeStates(submitter.model)
    [pending] = submitter.run([reading(states)])
    pending.handle.result()
    assert "release" not in states.calls
    submitter.deferred.release_finished()
    assert states.calls == ["lease", "own", "release"]
    assert pending.result().finish_reason
    assert states.calls == ["lease", "own", "release"]


def test_waiting_for_room_takes_of_the_time_of_a_request(submitter: Submitter) -> None:
    states = FakeStates(submitter.model)
    [pending] = submitter.run([reading(states)], GenerationParams(timeout=60.0))
    assert states.calls == ["lease within 60 s", "own"]
    assert pending.result().finish_reason


@pytest.mark.parametrize(
    ("own", "generation", "error"),
    [
        (2, GenerationParams(max_tokens=2, min_tokens=3), InvalidRequest),
        (2, GenerationParams(stop=("",)), InvalidRequest),
        (600, GenerationParams(), PromptTooLong),
        (2, GenerationParams(max_tokens=508, min_tokens=508), PromptTooLong),
    ],
)
def test_what_cannot_run_is_refused_before_any_prompt_is_leased(
    submitter: Submitter, own: int, generation: GenerationParams, error: type[Exception]
) -> None:
    first, second = FakeStates(submitter.model), FakeStates(submitter.model)
    with pytest.raises(error):
        submitter.run([reading(first), reading(second, own)], generation)
    assert first.calls == second.calls == []


def test_an_answer_takes_at_most_what_the_window_leaves(reader: LoadedModel) -> None:
    causal = wrap_causal(tiny_model("llama", max_position_embeddings=64))
    model = LoadedModel("narrow", causal, reader.tokenizer)
    generation = GenerationParams(max_tokens=1000, ignore_eos=True)
    with LLMEngine(causal, EngineConfig(pool_bytes=2**22)) as engine:
        narrow = Submitter(model, engine, DeferredReleases(), OpenConfig())
        [pending] = narrow.run([reading(FakeStates(model))], generation)
        assert len(pending.result().choices[0].token_ids) == 64 - 5


def test_a_prompt_with_gaps_is_measured_by_its_end(submitter: Submitter) -> None:
    prompt = replace(reading(FakeStates(submitter.model)), end=512)
    said = r"length is 512 tokens\. However, the prompt ends at position 512"
    with pytest.raises(PromptTooLong, match=said):
        submitter.run([prompt])


def test_a_lease_ends_where_its_owners_cannot_be_recorded(submitter: Submitter) -> None:
    states = FakeStates(submitter.model, fault=RuntimeError("read-only"))
    with pytest.raises(RuntimeError, match="read-only"):
        submitter.run([reading(states)])
    assert states.calls == ["lease", "own", "release"]


def test_submitted_prompts_are_canceled_if_a_later_one_fails(submitter: Submitter) -> None:
    good = FakeStates(submitter.model)
    bad = FakeStates(submitter.model, fault=QueueFull("no room"))
    with pytest.raises(QueueFull):
        submitter.run([reading(good), reading(bad)])
    assert bad.calls == ["prefetch", "lease", "own", "release"], "brought while the first is leased"
    assert good.calls == ["lease", "own"], "its lease waits for the next call"
    submitter.run([])
    assert good.calls[2:] == ["release"]


def test_a_prompt_without_documents_is_answered_at_once(submitter: Submitter) -> None:
    asked = AskedQuestion("q", times=Timestamps(1.0, 3.0))
    nothing = Selection("q", (), CollectionVersion(1, 1))
    prompt = replace(reading(None), retrieved=Retrieved(selection=nothing), question=asked)
    [pending] = submitter.run([prompt])
    answer = pending.result()
    assert (answer.finish_reason, answer.reuse.prompt_tokens) == ("no_documents", 0)
    assert answer.sources == ()
    assert (answer.timings.retrieve, answer.timings.assemble, answer.timings.total) == (2, 0, 2)


def test_tokens_are_counted_by_the_tier_of_their_group() -> None:
    tiers = ("host", "encoded", "disk")
    lease = FakeLease({KVKey(f"{n:064x}"): tier for n, tier in enumerate(tiers)})
    spans = tuple(CachedSpan(g, 0, n, at, 0) for g, n, at in ((0, 2, 0), (1, 3, 2), (0, 4, 5)))
    prepared = prepare_answer(replace(reading(None), spans=spans), cast("Lease", lease), 1.0)
    assert prepared.tokens == {"host": 6, "encoded": 3}
    assert (prepared.cached_tokens, prepared.created_tokens) == (6, 3)
    assert prepared.prompt_tokens == 9 + 2
