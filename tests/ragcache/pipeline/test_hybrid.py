"""A folder with a hybrid model: states of documents compose, and `exact` shares prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ragcache import GenerationParams, RagCache
from ragcache.engine import EngineConfig, LLMEngine
from ragcache.errors import ConfigurationError, ModeRefused
from ragcache.models import LoadedModel, wrap_causal
from ragcache.modes import EXACT, GATED, ROOTED, ReuseMode
from ragcache.pipeline import collection_import, gate
from ragcache.pipeline.gate import ModeGate
from ragcache.pipeline.gate_measurement import GateResult
from ragcache.pipeline.prompt import ModuleGroup, PromptLayout
from ragcache.planning import Budgets, Corpus, advise, make_plan
from ragcache.store.verify import verify
from tests.ragcache.pipeline.conftest import DOCUMENTS
from tests.tiny_hybrids import tiny_hybrid

QUESTION = "Where does the spare key of the boathouse hang, and who keeps the key figures?"


@pytest.fixture(scope="module")
def hybrid(reader: LoadedModel) -> LoadedModel:
    sizes = {"vocab_size": len(reader.tokenizer), "max_position_embeddings": 4096}
    return LoadedModel("hybrid", wrap_causal(tiny_hybrid("bamba", **sizes)), reader.tokenizer)


@pytest.fixture
def rag(tmp_path: Path, hybrid: LoadedModel) -> Iterator[RagCache]:
    with RagCache.open(
        tmp_path / "state", hybrid, max_tokens=4, private_bytes="64MB", force_modes=True
    ) as opened:
        yield opened


@pytest.fixture(scope="module")
def engine(hybrid: LoadedModel) -> Iterator[LLMEngine]:
    with LLMEngine(hybrid.causal, EngineConfig(64 * 2**20)) as opened:
        yield opened


def test_a_question_reads_composed_documents(rag: RagCache) -> None:
    ingested = rag.ingest("notes", DOCUMENTS)
    assert (ingested.added, ingested.modules, ingested.encoded) == (3, 3, 4)  # and the preamble
    first = rag.ask(QUESTION, collection="notes", k=3)
    assert (first.mode, first.reuse.replaced_mode) == ("rooted", None)
    assert first.sources[0].document == "keys"
    assert first.reuse.cached_tokens > first.reuse.prompt_tokens / 2
    again = rag.ask(QUESTION, collection="notes", k=3)
    assert again.text == first.text


def test_one_document_is_answered_as_in_exact(rag: RagCache) -> None:
    """The document was encoded where it stands."""
    rag.ingest("notes", DOCUMENTS)
    generation = GenerationParams(first_logprobs=True)
    read, exact = (
        rag.ask(QUESTION, collection="notes", k=1, mode=mode, generation=generation).choices[0]
        for mode in ("rooted", "exact")
    )
    assert read.first_logprobs is not None
    assert exact.first_logprobs is not None
    torch.testing.assert_close(read.first_logprobs, exact.first_logprobs, rtol=0, atol=1e-4)


def test_states_are_kept_on_disk(tmp_path: Path, hybrid: LoadedModel) -> None:
    options = {"max_tokens": 4, "private_bytes": "64MB", "force_modes": True}
    with RagCache.open(tmp_path / "state", hybrid, **options) as rag:
        rag.ingest("notes", DOCUMENTS)
        first = rag.ask(QUESTION, collection="notes", k=3)
        assert verify(rag.internals.shared.store).found == ()
    with RagCache.open(tmp_path / "state", hybrid, **options) as rag:
        again = rag.ask(QUESTION, collection="notes", k=3)
        assert again.text == first.text
        assert again.reuse.created_tokens == 0
        assert again.reuse.cached_tokens > 0


def test_states_travel_with_their_collection(
    tmp_path: Path, hybrid: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collection_import, "_LONGEST_HEADER", 2048)  # less than tiny maps take
    options = {"max_tokens": 4, "private_bytes": "64MB", "force_modes": True}
    with RagCache.open(tmp_path / "one", hybrid, **options) as rag:
        rag.ingest("notes", DOCUMENTS)
        first = rag.ask(QUESTION, collection="notes", k=3)
        rag.collections.export_archive("notes", tmp_path / "notes.tar")
    with RagCache.open(tmp_path / "two", hybrid, **options) as rag:
        rag.collections.import_archive(tmp_path / "notes.tar")
        again = rag.ask(QUESTION, collection="notes", k=3)
        assert again.text == first.text
        assert again.reuse.created_tokens <= len(rag.internals.ingestor.encoder.preamble_ids)


def test_questions_over_the_same_documents_share_computed_states(rag: RagCache) -> None:
    """A snapshot is kept where prompts were seen to part, which the second question shows."""
    rag.ingest("notes", DOCUMENTS)
    question = QUESTION + " Tell me all of it." * 30
    first, second, third = (rag.ask(question, collection="notes", k=3) for _ in range(3))
    assert first.text == second.text == third.text
    assert third.reuse.shared_tokens > first.reuse.shared_tokens == 0


def test_the_next_turn_of_a_chat_shares_the_one_before(rag: RagCache) -> None:
    messages = [{"role": "user", "content": " ".join(d.text for d in DOCUMENTS * 3)}]
    first = rag.chat(messages)
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "Where is the boat?"},
    ]
    assert rag.chat(messages).reuse.shared_tokens >= 64


def test_a_chat_reads_whole_documents(rag: RagCache) -> None:
    rag.ingest("notes", DOCUMENTS)
    chat = [{"role": "user", "content": f"{DOCUMENTS[0].text}\n\n{QUESTION}"}]
    answer = rag.chat(chat)
    assert answer.mode == "recognized:rooted"
    assert answer.reuse.cached_tokens >= 15


def test_a_pml_prompt_is_answered_in_exact(rag: RagCache) -> None:
    """Its texts are parts of modules."""
    rag.schemas.add(
        '<schema name="trip">You plan trips.<module name="oslo">Oslo has a fjord.</module></schema>'
    )
    assert rag.stats().encoded == 0
    answer = rag.prompt('<prompt schema="trip"><oslo/>What is there?</prompt>')
    assert (answer.mode, answer.reuse.replaced_mode) == ("exact", "isolated")


def test_a_document_at_the_end_of_a_prompt_is_computed() -> None:
    """The answer needs a token to follow, and a map cannot be cut."""
    for divides, own in ((True, [(4, 4)]), (False, [(2, 2), (3, 3), (4, 4)])):
        layout = PromptLayout([0, 1], divides=divides)
        layout.read(0, 0, 2)
        layout.read(layout.add(ModuleGroup((1,), (2, 3, 4), 2)), 0, 3)
        layout.close()
        prompt = layout.prompt()
        assert list(prompt.computed_tokens) == own
        assert prompt.end == prompt.read_tokens + len(own) == 5


@pytest.mark.slow
def test_a_plan_says_what_maps_take(tmp_path: Path, hybrid: LoadedModel) -> None:
    corpus = Corpus(1, ([7] * 8, [7] * 40))
    plan = make_plan(hybrid, corpus, Budgets(10**9), tmp_path, sample=1)
    assert plan.map_bytes == hybrid.causal.map_bytes
    [advice] = [each for each in advise(plan) if "recurrent layers" in each]
    tokens = hybrid.causal.map_tokens
    assert f"keys and values of {tokens:,} tokens, where modules have 24 on average" in advice
    assert f"raise module_tokens to {tokens:,}" in advice
    sizes = plan.sizes("disk")["model"]
    assert sizes.nbytes > 3 * plan.map_bytes, "of two modules and the preamble"
    [advice] = [each for each in advise(replace(plan, map_bytes=64)) if "recurrent layers" in each]
    assert advice.endswith("Modules of this length are worth their maps.")


def test_modes_that_read_parts_are_refused(rag: RagCache) -> None:
    rag.gate.check_mode(ROOTED)
    rag.gate.check_mode(EXACT)
    with pytest.raises(ModeRefused, match=r"reads parts of modules, .* recurrent layers"):
        rag.gate.check_mode(ReuseMode.parse("primed:8"))


@pytest.mark.slow
def test_modes_that_read_parts_are_not_measured(hybrid: LoadedModel, engine: LLMEngine) -> None:
    measured = ModeGate(hybrid, engine, None)
    measured.measure_in_background(())
    mode = ReuseMode.parse("primed:16")
    assert not measured.defers(mode), "no prompt is answered in exact meanwhile"
    assert measured.measure([mode]) == [None]
    assert not measured.passes(mode)
    assert not ModeGate(hybrid, engine, None, forced=True).passes(mode)
    with pytest.raises(ModeRefused, match="reads parts"):
        measured.check_mode(mode)


def test_the_gate_measures_early_documents(hybrid: LoadedModel, engine: LLMEngine) -> None:
    modes = ModeGate(hybrid, engine, None)
    results = dict(zip(GATED, modes.measure(), strict=True))
    measured = [str(mode) for mode, result in results.items() if result is not None]
    assert measured == ["rooted", "primed", "isolated"]
    result = results[ROOTED]
    assert result is not None
    sizes = result.compositions[result.compose]
    farthest = max(sizes, key=lambda size: sizes[size])
    assert result.prompts == {"2": 6, "4": 12, "8": 24}[farthest]
    assert result.kl_divergence == sizes[farthest]
    assert {way: list(each) for way, each in result.compositions.items()} == {
        "order": ["2", "4", "8"],
        "both": ["2", "4", "8"],
    }
    worst = {way: max(each.values()) for way, each in result.compositions.items()}
    assert result.kl_divergence == worst[result.compose] == min(worst.values()) > 0
    assert modes.composition(ROOTED) == result.compose


@pytest.mark.slow
def test_a_composition_can_be_chosen(hybrid: LoadedModel, engine: LLMEngine) -> None:
    modes = ModeGate(hybrid, engine, None, compose="both")
    assert modes.composition(ROOTED) == "both"
    [result] = modes.measure([ROOTED])
    assert result is not None
    assert list(result.compositions) == [result.compose] == ["both"]


def test_a_mode_far_from_exact_is_refused(
    hybrid: LoadedModel, engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = GateResult("rooted", 42, 4.5, 0.25, 2.0, 6.0, 1.0, 0.75, "both", {"both": {"8": 4.5}})
    monkeypatch.setattr(gate, "measure_compositions", lambda *_: [far])
    with pytest.raises(ModeRefused, match="mode 'rooted' is refused on this model"):
        ModeGate(hybrid, engine, None).check_mode(ROOTED)
    assert str(far).startswith("rooted (documents compose in both) is refused: 4.50 nats")


def test_an_unknown_composition_is_refused(tmp_path: Path, hybrid: LoadedModel) -> None:
    with pytest.raises(ConfigurationError, match="compose"):
        RagCache.open(tmp_path / "state", hybrid, compose="mean")
