"""How confident answers are, and which are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from langchain_core.embeddings import DeterministicFakeEmbedding

from ragcache import AsyncRagCache, GenerationParams, RagCache, SourceDocument
from ragcache.answers.confidence import (
    Calibration,
    ConfidenceFeatures,
    reader_calibration,
)
from ragcache.answers.confidence_policy import ConfidencePolicy
from ragcache.answers.passages import LexicalSupport
from ragcache.answers.policy import AnswerOutput
from ragcache.engine import Choice, Context, Request, RequestOutput, TokenDelta
from ragcache.engine.sampler import SampledToken
from ragcache.errors import ConfigurationError, InvalidRequest, QueueFull, UnknownCollection
from ragcache.models import LoadedModel
from ragcache.modes import ROOTED
from ragcache.params import REFUSAL

LEAVE = SourceDocument("leave", "Everybody has 28 days of leave. Requests go to Ines Marlow.")
KEYS = SourceDocument("keys", "The spare key hangs in the red cupboard of the boathouse.")
QUESTION = "How many days of leave does everybody have?"
ASK = {"collection": "notes"}
SPAN = Calibration(0.0, {"span": 1.0}, {"span": -1.0}, min_confidence=0.5)
FIRST = torch.zeros(3)
NOBODY = Calibration(-50.0, {"span": 0.0}, {"span": 0.0}, min_confidence=0.5)


@pytest.fixture(scope="module")
def rag(tiny_reader: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RagCache]:
    """A random model that quotes, without a calibration of its own."""
    folder = tmp_path_factory.mktemp("confidence")
    with RagCache.open(folder, tiny_reader, max_tokens=6, private_bytes="8MiB") as opened:
        opened.ingest("notes", [LEAVE, KEYS])
        yield opened


def sampled(*logprobs: float, allowed: float = 0.0) -> tuple[SampledToken, ...]:
    return tuple(
        SampledToken(number, each, ((99, -3.0), (98, -4.0)), allowed)
        for number, each in enumerate(logprobs)
    )


def test_evidence_is_the_mean_of_an_answers_tokens_and_its_end() -> None:
    [ending] = sampled(-3.0, allowed=-1.0)
    choice = Choice(
        (0, 1), "two words", "stop", 7, sampled(-1.0, -2.0, allowed=-0.5), ending=ending
    )
    found = ConfidenceFeatures(coverage=0.5).with_answer(choice, None)
    assert found.free == pytest.approx(-2.0)
    assert found.span == pytest.approx(-2.0 + (0.5 + 0.5 + 1.0) / 3)
    assert (found.coverage, found.no_answer) == (0.5, None)
    assert found.with_answer(choice, 99).no_answer == pytest.approx(-3.0 + 1.0)
    assert found.with_answer(choice, 42).no_answer == pytest.approx(-4.0 + 1.0), "at most so much"
    assert found.with_answer(choice, 0).no_answer == 20.0, "the model chose it"
    assert ConfidenceFeatures().with_answer(Choice((), "", "stop"), None).span == -20.0


def test_a_calibration_is_a_logistic_model_of_what_is_known() -> None:
    calibration = Calibration(0.2, {"span": 2.0, "coverage": 1.0}, {"span": -1.0, "coverage": 0.5})
    assert calibration.confidence(ConfidenceFeatures(span=-1.0)) == pytest.approx(
        1 / (1 + 2.718281828**-0.2)
    )
    better = calibration.confidence(ConfidenceFeatures(span=-0.5, coverage=0.9))
    assert better == pytest.approx(1 / (1 + 2.718281828 ** -(0.2 + 1.0 + 0.4)))
    assert calibration.confidence(ConfidenceFeatures(span=-1e9)) == pytest.approx(0.0)
    assert Calibration.from_dict(calibration.to_dict()) == calibration


@pytest.mark.parametrize(
    "values",
    [
        {"bias": 0.0, "weights": {"luck": 1.0}, "means": {"luck": 0.0}},
        {"bias": 0.0, "weights": {"span": 1.0}, "means": {}},
        {"bias": float("nan"), "weights": {}, "means": {}},
        {"bias": 0.0, "weights": {}, "means": {}, "min_confidence": 1.5},
        {"weights": {}},
    ],
)
def test_a_calibration_that_is_none_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        Calibration.from_dict(values)


def test_only_the_embedded_reader_has_a_calibration(tmp_path: Path) -> None:
    shipped = reader_calibration()
    assert shipped is not None
    assert 0 < shipped.min_confidence < 0.5
    assert shipped.weights["support"] > 0 < shipped.weights["span"]
    assert reader_calibration(tmp_path / "calibration.json") is None


def test_one_choice_is_refused_and_the_other_is_shown() -> None:
    policy = ConfidencePolicy(SPAN, ConfidenceFeatures(), 0.5, refusal="No.", logprobs=1)
    sure = Choice((0,), "sure", "stop", 7, sampled(-0.1))
    doubtful = Choice((1,), "doubtful", "stop", 7, sampled(-9.0), first_logprobs=FIRST)
    output = RequestOutput((sure, doubtful), 0, 0.0, 0.0, 0.0, 1.0)
    assert not policy.follow_up(output)
    checked = policy.finish(AnswerOutput(output), ())
    assert [each.text for each in checked.output.choices] == ["sure", "No."]
    assert [each.finish_reason for each in checked.output.choices] == ["stop", "no_answer"]
    assert checked.output.choices[0].chosen[0].alternatives == ((99, -3.0),)
    assert checked.output.choices[1].first_logprobs is FIRST, "how far modes are apart stays known"
    assert checked.output.choices[1].chosen == ()
    assert checked.confidences[0] > 0.5 > checked.confidences[1]
    seen = [TokenDelta(1, doubtful.chosen[0], "doubt"), TokenDelta(0, sure.chosen[0], "sure")]
    shown = policy.release(seen, checked)
    assert [(each.choice, each.text) for each in shown] == [(0, "sure"), (1, "No.")]
    silent = replace(policy, logprobs=None).finish(AnswerOutput(output), ())
    assert silent.output.choices[0].chosen == ()


def test_a_sure_answer_from_a_single_document_is_not_refused(rag: RagCache) -> None:
    shipped = reader_calibration()
    assert shipped is not None
    rag.ingest("one", SourceDocument("lighthouse", "The lighthouse is 43 metres high."))
    found = ConfidenceFeatures.of_selection(
        rag.retrieve("How tall is the lighthouse?", collection="one")
    )
    sure = replace(found, span=-0.01, free=-0.01, no_answer=-8.0)
    assert shipped.confidence(sure) > shipped.min_confidence


def test_a_search_of_vectors_alone_says_nothing_of_words(
    tiny_reader: LoadedModel, tmp_path: Path
) -> None:
    embedding = DeterministicFakeEmbedding(size=6)
    with RagCache.open(tmp_path, tiny_reader, embedding=embedding) as rag:
        rag.ingest("notes", [LEAVE, KEYS])
        found = {
            search: ConfidenceFeatures.of_selection(
                rag.retrieve(QUESTION, search=search, **ASK)
            ).known()
            for search in ("hybrid", "dense")
        }
    assert set(found["hybrid"]) == {"coverage", "gap", "cosine"}
    assert set(found["dense"]) == {"cosine"}, "none of it is 0"


def test_the_margin_counts_a_second_module_that_was_left_out(rag: RagCache) -> None:
    found = [
        rag.retrieve("What does everybody have in the cupboard?", relative_threshold=share, **ASK)
        for share in (0, 1)
    ]
    assert [len(each.hits) for each in found] == [2, 1]
    one, other = map(ConfidenceFeatures.of_selection, found)
    assert one == other
    assert one.coverage is not None
    assert one.gap is not None
    assert 0 < one.gap < one.coverage


def test_what_stands_around_the_answer_speaks_for_it(rag: RagCache) -> None:
    asked = GenerationParams(extractive=True, confidence=True)
    found = rag.retrieve(QUESTION, **ASK)
    assert found.words is not None
    support = LexicalSupport(found.words, [hit.module for hit in found.hits])
    [prompt] = rag.internals.ask.prepare_prompts([QUESTION], "notes", _params(), ROOTED)
    checked = rag.internals.submitter.run([prompt], asked)[0].output()
    [evidence], [choice] = checked.features, checked.output.choices
    assert evidence.support == support.share(choice.text)
    assert evidence.support is not None
    sure = replace(NOBODY, bias=0.0, weights={"support": 9.0}, means={"support": 0.0})
    assert (
        sure.confidence(ConfidenceFeatures(support=1.0))
        > 0.99
        > sure.confidence(ConfidenceFeatures(support=0.1))
    )


def test_confidence_is_zero_if_the_model_says_there_is_no_answer() -> None:
    policy = ConfidencePolicy(SPAN, ConfidenceFeatures(), 0.5, no_answer=0)
    choice = Choice((0,), "words", "stop", 7, sampled(-0.1))
    assert policy.confidence_of(choice, policy.features_of(choice)) == 0.0
    request = Request(Context((), (1,), (0,), 1), 8)
    assert policy.change_request(request).sampling.logprobs == 20


def test_a_refused_answer_has_sources_and_no_spans(rag: RagCache) -> None:
    rag.collections.set_calibration("notes", NOBODY, extractive=True)
    assert rag.collections.calibration("notes", extractive=True) == NOBODY
    generation = GenerationParams(extractive=True)
    refused = rag.ask(QUESTION, generation=generation, **ASK)
    assert (refused.text, refused.finish_reason, refused.spans) == (REFUSAL, "no_answer", ())
    assert refused.sources
    assert refused.confidence == pytest.approx(0.0)
    stream = rag.stream(QUESTION, generation=generation, **ASK)
    assert list(stream) == [REFUSAL]
    assert stream.answer.finish_reason == "no_answer"
    own = rag.ask(QUESTION, generation=generation.replace(refusal="Unknown."), **ASK)
    assert own.text == "Unknown."
    shown = rag.ask(QUESTION, generation=generation.replace(min_confidence=0.0), **ASK)
    assert shown.finish_reason != "no_answer"
    assert shown.spans
    assert shown.confidence == refused.confidence
    ignored = rag.ask(QUESTION, generation=generation.replace(confidence=False), **ASK)
    assert (ignored.text, ignored.confidence) == (shown.text, None)
    rag.collections.set_calibration("notes", None, extractive=True)
    assert rag.ask(QUESTION, generation=generation, **ASK).confidence is None
    with pytest.raises(UnknownCollection):
        rag.collections.set_calibration("nowhere", NOBODY)


def test_streams_hold_text_back_until_it_is_not_refused(rag: RagCache) -> None:
    rag.collections.set_calibration("notes", replace(NOBODY, bias=50.0), extractive=True)
    generation = GenerationParams(extractive=True, logprobs=1)
    answer = rag.ask(QUESTION, generation=generation, **ASK)
    assert answer.confidence == pytest.approx(1.0)
    assert len(answer.choices[0].chosen[0].alternatives) == 1

    async def streamed() -> tuple[str, float | None, str]:
        calls = AsyncRagCache(rag)
        stream = await calls.stream(QUESTION, generation=generation, **ASK)
        text = "".join([piece async for piece in stream])
        awaited = await calls.ask(QUESTION, generation=generation, **ASK)
        return text.strip(), stream.answer.confidence, awaited.text

    assert asyncio.run(streamed()) == (answer.text, answer.confidence, answer.text)
    rag.collections.set_calibration("notes", None, extractive=True)


def test_confidence_without_a_calibration_is_the_documents_share(rag: RagCache) -> None:
    asked = GenerationParams(extractive=True, confidence=True, logprobs=0)
    answer = rag.ask(QUESTION, generation=asked, **ASK)
    [prompt] = rag.internals.ask.prepare_prompts([QUESTION], "notes", _params(), ROOTED)
    tokens = [*prompt.without_documents(), *answer.choices[0].token_ids]
    causal = rag.internals.shared.model.causal
    logits = causal.model(torch.tensor([tokens])).logits[0].detach().log_softmax(-1)
    count = len(answer.choices[0].token_ids)
    alone = [float(logits[at - 1, tokens[at]]) for at in range(len(tokens) - count, len(tokens))]
    beside = [float(each.logprob or 0.0) for each in answer.choices[0].chosen]
    lift = sum(b - a for a, b in zip(alone, beside, strict=True)) / count
    assert answer.confidence == pytest.approx(1 / (1 + 2.718281828**-lift), abs=1e-3)
    assert rag.ask(QUESTION, generation=GenerationParams(extractive=True), **ASK).confidence is None
    strict = rag.ask(QUESTION, generation=asked.replace(min_confidence=1.0), **ASK)
    assert strict.finish_reason == "no_answer"
    stream = rag.stream(QUESTION, generation=asked, **ASK)
    assert "".join(stream).strip() == answer.text
    assert stream.answer.confidence == pytest.approx(answer.confidence, abs=1e-3)


def test_a_full_queue_at_scoring_loses_no_answer(
    rag: RagCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = rag.internals.shared.engine
    asked = GenerationParams(extractive=True, confidence=True)
    stream = rag.stream(QUESTION, generation=asked, **ASK)
    monkeypatch.setattr(engine, "config", replace(engine.config, queue=0))
    "".join(stream)
    assert stream.answer.confidence is not None
    with pytest.raises(QueueFull):
        rag.ask(QUESTION, generation=asked, **ASK)


def test_a_chat_is_checked_by_what_its_documents_add(rag: RagCache) -> None:
    generation = GenerationParams(confidence=True)
    text = f"{LEAVE.text}\n\n{QUESTION}"
    said = rag.chat([{"role": "user", "content": text}], generation=generation)
    assert said.confidence is not None
    assert 0 <= said.confidence <= 1
    alone = rag.chat([{"role": "user", "content": QUESTION}], generation=generation)
    assert (alone.confidence, alone.finish_reason == "no_answer") == (None, False)


def _params() -> object:
    from ragcache.params import SearchParams

    return SearchParams(k=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_confidence": 1.5}, "from 0 to 1"),
        ({"min_confidence": 0.5, "confidence": False}, "leave out either"),
        ({"min_confidence": 0.5, "json_object": True}, "no grammar"),
        ({"refusal": " "}, "blank"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        GenerationParams(**options)
