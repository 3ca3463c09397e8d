"""The gate: modes are measured on a model before they serve, and refused where they are too far."""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ragcache import RagCache
from ragcache.attention import Rotation
from ragcache.db import Database, Ledger
from ragcache.engine import EngineConfig, LLMEngine, SampledToken
from ragcache.errors import ConfigurationError, EngineFailed, LedgerUnavailable, ModeRefused
from ragcache.models import LoadedModel, Rotary, wrap_causal
from ragcache.modes import ISOLATED, ROOTED, ReuseMode
from ragcache.pipeline import gate, gate_sizes
from ragcache.pipeline.gate import ModeGate, propose_mode
from ragcache.pipeline.gate_measurement import (
    DOCUMENTS,
    LEAST_LIMIT,
    ORDERS,
    GateResult,
    SizeResult,
    measure_modes,
)
from ragcache.pipeline.gate_sizes import divergence_of, measure_sizes
from tests.tiny_models import tiny_model

NEAR = GateResult("rooted", 24, 0.05, 0.95, 2.0, 6.0, 1.0, 0.75)
FAR = replace(NEAR, kl_divergence=4.5, agreement=0.25)


class WrongPairs(Rotary):
    """Rotary positions whose moved states are read by other pairs than they were turned by."""

    def __init__(self, right: Rotary) -> None:
        super().__init__(right.inverse_frequency)
        self.name = right.name

    def relocation(self, delta: Tensor) -> Rotation:
        return Rotation.by(-delta, self.inverse_frequency, interleaved=True)


@pytest.fixture(scope="module")
def loud(reader: LoadedModel) -> LoadedModel:
    """A tiny random model of sharp attention that is very sure of its tokens: whatever a document
    did not see changes them, so that nothing but `exact` is near."""
    model = tiny_model("llama", vocab_size=len(reader.tokenizer))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) / 8)
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                weight.mul_(4)
        model.lm_head.weight.mul_(20)
    return LoadedModel("loud", wrap_causal(model), reader.tokenizer)


@pytest.fixture
def engine(tiny_reader: LoadedModel) -> Iterator[LLMEngine]:
    with LLMEngine(tiny_reader.causal, EngineConfig(pool_bytes=2**23)) as opened:
        yield opened


def test_every_question_is_asked_over_documents_at_many_places() -> None:
    asked = Counter((each, n // 2) for n, order in enumerate(ORDERS) for each in order)
    assert asked == Counter((each, n) for each in range(len(DOCUMENTS)) for n in range(3))
    for first, second in zip(ORDERS[::2], ORDERS[1::2], strict=True):
        assert not set(first) & set(second)
    for each in range(len(DOCUMENTS)):
        assert len({order.index(each) for order in ORDERS if each in order}) == 3


@pytest.mark.slow
def test_the_reader_passes_unless_states_are_moved_wrongly(
    reader: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLMEngine(reader.causal) as engine:
        right = ModeGate(reader, engine, None)
        right.check_mode(ROOTED)
        [result] = right.results()
        assert result.prompts == 24
        assert result.kl_divergence < 0.5
        assert result.agreement > 0.8
        assert isinstance(reader.causal.scheme, Rotary)
        monkeypatch.setattr(reader.causal, "scheme", WrongPairs(reader.causal.scheme))
        with pytest.raises(ModeRefused, match=r"'rooted' is refused on this model: over 24 .*"):
            ModeGate(reader, engine, None).check_mode(ROOTED)


def test_what_is_all_computed_in_context_is_exact(
    tiny_reader: LoadedModel, engine: LLMEngine
) -> None:
    modes = ["rooted", "isolated", "primed:400", "primed"]
    found = measure_modes(tiny_reader, engine, list(map(ReuseMode.parse, modes)))
    assert found is not None
    rooted, isolated, computed, primed = found
    assert computed.kl_divergence < 1e-6 < primed.kl_divergence
    assert primed.kl_divergence != rooted.kl_divergence
    assert rooted.kl_divergence < isolated.kl_divergence
    assert computed.equal_answers == computed.agreement == 1.0
    assert rooted.other_documents > rooted.kl_divergence


def test_the_cheapest_mode_that_keeps_answers_is_proposed() -> None:
    def result(mode: str, equal: float, divergence: float = 0.1) -> GateResult:
        return replace(NEAR, mode=mode, equal_answers=equal, kl_divergence=divergence)

    computed, primed = result("primed:16", 1.0), result("primed", 0.95)
    assert propose_mode([computed, result("rooted", 0.8), primed]) == primed
    assert propose_mode([computed, primed, result("rooted", 0.9)]) == result("rooted", 0.9)
    assert propose_mode([result("rooted", 1.0, divergence=4.5), computed]) == computed
    assert propose_mode([result("rooted", 0.8), result("primed", 0.89)]) is None


def test_sizes_of_prompts_that_were_measured_decide() -> None:
    few, many = SizeResult(2, 100, 6, 0.01, 1.0), SizeResult(8, 384, 8, 0.2, 0.5)
    short = replace(NEAR, equal_answers=1.0)
    assert propose_mode([short]) == short
    assert propose_mode([replace(short, sizes=(few,))]) is not None
    mixed = replace(short, sizes=(few, many))
    assert mixed.equal_share == pytest.approx(10 / 14)
    assert propose_mode([mixed]) is None
    assert str(mixed).endswith("7 of 10 answers are those of exact (modules x tokens: 2 x 100: "
                               "100%, 8 x 384: 50%)")  # fmt: skip
    assert GateResult.parse(json.dumps(asdict(mixed))) == mixed


def test_prompts_of_several_sizes_are_compared_token_by_token(loud: LoadedModel) -> None:
    computed, rooted = ReuseMode.parse("primed:400"), ROOTED
    with LLMEngine(loud.causal, EngineConfig(pool_bytes=2**23)) as engine:
        found = measure_sizes(loud, engine, [computed, rooted], math.inf)
        [first] = measure_sizes(loud, engine, [rooted], 0.0)[rooted]
    sizes = [(each.documents, each.module_tokens, each.prompts) for each in found[rooted]]
    assert sizes == [(2, 100, 6), (4, 100, 8)]  # the window ends there
    for same, other in zip(found[computed], found[rooted], strict=True):
        assert same.kl_divergence < 0.01 < other.kl_divergence
        assert same.equal_answers == 1
    again = found[rooted][0]
    assert first.kl_divergence == pytest.approx(again.kl_divergence, rel=1e-3)  # other batches
    assert replace(first, kl_divergence=again.kl_divergence) == again


def test_a_model_is_not_measured_over_more_modules_than_it_reads(
    loud: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_sizes, "most_modules", lambda _: 2)
    with LLMEngine(loud.causal, EngineConfig(pool_bytes=2**23)) as engine:
        [found] = measure_sizes(loud, engine, [ROOTED], math.inf).values()
    assert [(each.documents, each.module_tokens) for each in found] == [(2, 100)]


def test_sizes_are_measured_once(
    tiny_reader: LoadedModel, engine: LLMEngine, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, calls = Ledger(database), list[list[str]]()
    size = SizeResult(2, 100, 6, 0.01, 1.0)

    def measure(
        _: object, __: object, modes: list[ReuseMode], ___: float
    ) -> dict[ReuseMode, tuple[SizeResult, ...]]:
        calls.append([str(mode) for mode in modes])
        return dict.fromkeys(modes, (size,))

    monkeypatch.setattr(gate, "measure_modes", lambda *_: [NEAR, replace(FAR, mode="isolated")])
    monkeypatch.setattr(gate, "measure_sizes", measure)
    first = ModeGate(tiny_reader, engine, ledger)
    assert first.measure(["rooted", "isolated"]) == [NEAR, replace(FAR, mode="isolated")]
    assert first.results() == [replace(FAR, mode="isolated"), NEAR]
    expected = [replace(NEAR, sizes=(size,))]
    assert first.measure_sizes(["rooted", "isolated"]) == expected  # isolated is refused
    again = ModeGate(tiny_reader, engine, ledger)
    assert again.measure_sizes(["rooted", "isolated"]) == expected
    assert again.results() == [replace(FAR, mode="isolated"), *expected]
    assert calls == [["rooted"]]


@given(st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4),
       st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4), st.integers(1, 4))  # fmt: skip
def test_divergence_over_likely_tokens_is_a_lower_bound(
    one: list[float], other: list[float], kept: int
) -> None:
    p, q = ([math.log(x / sum(many)) for x in many] for many in (one, other))

    def scored(logs: list[float], most: int) -> SampledToken:
        likeliest = sorted(enumerate(logs), key=lambda pair: -pair[1])[:most]
        return SampledToken(0, logs[0], tuple(likeliest))

    whole = sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))
    full = divergence_of([scored(p, 4)], [scored(q, 4)])
    assert full == pytest.approx(whole, abs=1e-6)
    assert 0 <= divergence_of([scored(p, kept)], [scored(q, kept)]) <= whole + 1e-6


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "gpt2"])
def test_a_model_that_is_unsure_of_everything_passes(family: str, reader: LoadedModel) -> None:
    """Also one whose positions are learned: its documents are encoded where they stand."""
    causal = wrap_causal(tiny_model(family, vocab_size=len(reader.tokenizer)))
    model = LoadedModel(family, causal, reader.tokenizer)
    with LLMEngine(causal, EngineConfig(pool_bytes=2**23, queue=1)) as engine:
        [result] = ModeGate(model, engine, None).measure(["isolated"])
    assert result is not None
    assert result.passes
    assert result.limit == LEAST_LIMIT


@pytest.mark.parametrize(("window", "prompts"), [(175, 12), (100, 0)])
def test_a_small_window_gets_smaller_prompts_or_none(
    window: int, prompts: int, reader: LoadedModel
) -> None:
    config = {"vocab_size": len(reader.tokenizer), "max_position_embeddings": window}
    causal = wrap_causal(tiny_model("llama", **config))
    model = LoadedModel("small", causal, reader.tokenizer)
    with LLMEngine(causal, EngineConfig(pool_bytes=2**23)) as engine:
        modes = ModeGate(model, engine, None)
        [result] = modes.measure(["rooted"])
        modes.check_mode(ROOTED)
    assert (0 if result is None else result.prompts) == prompts


@pytest.mark.slow
def test_a_far_mode_is_refused_before_anything_is_leased(
    loud: LoadedModel, tmp_path: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In questions, chats and PML alike, in this process and, without measuring, in the next."""
    question = "Where does the spare key hang?"
    folder = tmp_path / "state"
    text = (notes / "keys.md").read_text(encoding="utf-8")
    with RagCache.open(folder, loud, embedding="none", force_modes=False, max_tokens=2) as rag:
        rag.ingest("notes", [notes])
        rag.schemas.add('<schema name="s"><module name="m">The key is red.</module></schema>')
        with pytest.raises(ModeRefused, match=r"of exact \(limit"):
            rag.ask(question, collection="notes")
        assert rag.ask(question, collection="notes", mode="exact").mode == "exact"
        assert rag.chat([{"role": "user", "content": "Hello"}]).mode == "exact"
        with pytest.raises(ModeRefused, match="'rooted'"):
            rag.chat([{"role": "user", "content": text}])
        assert [each.mode for each in rag.gate.results()] == ["rooted"]
        with pytest.raises(ModeRefused, match="'isolated'"):
            rag.prompt('<prompt schema="s"><m/>Which color?</prompt>')
    monkeypatch.setattr(gate, "measure_modes", None)  # nothing is measured twice
    with RagCache.open(folder, loud, embedding="none", force_modes=False) as rag:
        assert [each.mode for each in rag.gate.results()] == ["isolated", "rooted"]
        with pytest.raises(ModeRefused, match=r"RagCache\.open\(force_modes=True\), --force-modes"):
            rag.ask(question, collection="notes")
        assert rag.ask("zzz", collection="notes", k=1).finish_reason == "no_documents"
    with RagCache.open(folder, loud, embedding="none", force_modes=True, max_tokens=2) as rag:
        assert rag.ask(question, collection="notes").mode == "rooted"


def test_modes_are_measured_once_however_many_ask(
    tiny_reader: LoadedModel, engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    def measure(model: LoadedModel, engine: LLMEngine, modes: list[ReuseMode]) -> list[GateResult]:
        measured.extend(map(str, modes))
        return [replace(NEAR, mode=str(mode)) for mode in modes]

    monkeypatch.setattr(gate, "measure_modes", measure)
    modes = ModeGate(tiny_reader, engine, None)
    for mode in ("rooted", "rooted", "exact", "primed:17", "primed:30"):
        modes.check_mode(ReuseMode.parse(mode))
    assert measured == ["rooted", "primed:16"]
    ModeGate(tiny_reader, engine, None, forced=True).check_mode(ISOLATED)
    assert "isolated" not in measured


@pytest.fixture
def unmeasured(tiny_reader: LoadedModel, tmp_path: Path, notes: Path) -> Iterator[RagCache]:
    """A folder whose modes have to be measured."""
    options: dict[str, Any] = {"embedding": "none", "force_modes": False, "max_tokens": 2}
    with RagCache.open(tmp_path / "state", tiny_reader, **options) as rag:
        rag.ingest("notes", [notes])
        yield rag


QUESTION = "Where does the spare key hang?"


def test_no_answer_waits_for_a_measurement_in_the_background(
    unmeasured: RagCache, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rag, finish, measured = unmeasured, threading.Event(), list[str]()

    def measure(_: object, __: object, modes: list[ReuseMode]) -> list[GateResult]:
        assert finish.wait(60)
        measured.extend(map(str, modes))
        return [replace(NEAR, mode=str(mode)) for mode in modes]

    monkeypatch.setattr(gate, "measure_modes", measure)
    rag.gate.measure_in_background()
    message = {"role": "user", "content": (notes / "keys.md").read_text(encoding="utf-8")}
    rag.schemas.add('<schema name="s"><module name="m">The key is red.</module></schema>')
    pml = '<prompt schema="s"><m/>Which color?</prompt>'
    early = [
        rag.ask(QUESTION, collection="notes"),
        rag.ask(QUESTION, collection="notes", mode="primed:17"),
        rag.chat([message]),
        rag.prompt(pml),
    ]
    assert [answer.mode for answer in early] == ["exact"] * 4
    named = [answer.reuse.replaced_mode for answer in early]
    assert named == ["rooted", "primed:17", "rooted", "isolated"]
    greeting = rag.chat([{"role": "user", "content": "Hello"}])
    assert (greeting.mode, greeting.reuse.replaced_mode) == ("exact", None)
    with pytest.raises(ConfigurationError, match="use the mode `isolated`"):
        rag.prompt(pml, mode="rooted")
    finish.set()
    rag.gate.join()
    late = [rag.ask(QUESTION, collection="notes"), rag.chat([message]), rag.prompt(pml)]
    assert [answer.mode for answer in late] == ["rooted", "recognized:rooted", "isolated"]
    assert {answer.reuse.replaced_mode for answer in late} == {None}
    assert sorted(measured) == ["isolated", "primed:16", "rooted"]


def test_a_failed_measurement_starts_again_with_the_next_prompt(
    unmeasured: RagCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes: list[Exception | list[GateResult]] = [EngineFailed("out of order"), [FAR]]

    def measure(*_: object) -> list[GateResult]:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(gate, "measure_modes", measure)
    unmeasured.gate.measure_in_background()
    unmeasured.gate.join()
    assert "rooted could not be measured" in caplog.text
    assert unmeasured.ask(QUESTION, collection="notes").reuse.replaced_mode == "rooted"
    unmeasured.gate.join()
    with pytest.raises(ModeRefused):
        unmeasured.ask(QUESTION, collection="notes")


def test_a_folder_closes_while_a_mode_is_measured(unmeasured: RagCache) -> None:
    unmeasured.gate.measure_in_background()
    unmeasured.close()
    assert not any(thread.name == "ragcache-gate" for thread in threading.enumerate())


def test_an_answer_that_waits_for_a_measurement_says_so(
    unmeasured: RagCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gate, "measure_modes", lambda *_: [NEAR])
    for _ in range(2):
        answer = unmeasured.ask(QUESTION, collection="notes")
        assert (answer.mode, answer.reuse.replaced_mode) == ("rooted", None)
    told = [each for each in caplog.records if "measuring how far rooted" in each.message]
    assert [each.levelname for each in told] == ["WARNING"]
    assert "the first answer waits" in told[0].message


def test_a_ledger_that_does_not_answer_refuses_nothing(
    tiny_reader: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def away(*_: object) -> None:
        raise LedgerUnavailable("the ledger does not answer")

    monkeypatch.setattr(gate, "measure_modes", lambda *_: [FAR])
    with RagCache.open(tmp_path / "state", tiny_reader, embedding="none", force_modes=False) as rag:
        ledger = rag.internals.shared.store.ledger
        monkeypatch.setattr(ledger, "get_fact", away)
        monkeypatch.setattr(ledger, "agree_on_fact", away)
        for _ in range(2):
            with pytest.raises(ModeRefused, match=r"4\.50 nats"):
                rag.gate.check_mode(ROOTED)
        assert [each.passes for each in rag.gate.results()] == [False]
    assert sum("is not kept" in line for line in caplog.messages) == 1
