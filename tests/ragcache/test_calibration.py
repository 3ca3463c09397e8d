"""Calibrations that are fitted on known questions, and what refusing by them does."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from ragcache import RagCache, SourceDocument
from ragcache.answers.confidence import GENERAL, ConfidenceFeatures
from ragcache.calibration import (
    BUILT_IN,
    BUILT_IN_REFUSALS,
    ENOUGH,
    FEWEST,
    CalibrationExample,
    calibrate_in_background,
    calibrate_model,
    collect_examples,
    cross_validate,
    fit_built_in,
    fit_calibration,
    judge,
    judge_by,
)
from ragcache.errors import ConfigurationError
from ragcache.evaluation import Dataset, Question
from ragcache.models import LoadedModel
from ragcache.params import REFUSAL, GenerationParams


def examples(count: int = 400) -> list[CalibrationExample]:
    """Right answers have a greater share of their question's words; `free` says nothing."""
    rng = random.Random(3)
    made = []
    for number in range(count):
        right = number % 2 == 0
        coverage = rng.gauss(0.6 if right else 0.3, 0.1)
        evidence = ConfidenceFeatures(free=rng.gauss(-1.0, 1.0), coverage=coverage)
        made.append(CalibrationExample(f"question {number}", right, right, evidence, 0.5))
    return made


def test_a_fit_finds_what_tells_right_answers_from_others() -> None:
    known = examples()
    fitted = fit_calibration(known)
    assert set(fitted.weights) == {"free", "coverage"}
    assert fitted.weights["coverage"] > 5
    assert abs(fitted.weights["free"]) < 0.3
    report = judge(judge_by(fitted, known), fitted.min_confidence)
    assert report.refused_right == pytest.approx(0.05, abs=0.006)
    assert report.refused_unanswerable > 0.75
    assert (report.answerable, report.right, report.unanswerable) == (200, 200, 200)
    confidences = [fitted.confidence(each.evidence) for each in known]
    assert sum(confidences) == pytest.approx(200, rel=0.02), "as many are right as it says"
    crossed = cross_validate(known)
    assert crossed.refused_right == pytest.approx(0.05, abs=0.04)
    assert crossed.area < 0.25 < judge(known, 0.0).area


def test_evidence_that_few_have_counts_as_its_mean() -> None:
    known = [
        replace(each, evidence=replace(each.evidence, cosine=0.5 if number < 40 else None))
        for number, each in enumerate(examples())
    ]
    fitted = fit_calibration(known)
    assert fitted.means["cosine"] == pytest.approx(0.5)
    assert fitted.confidence(ConfidenceFeatures(cosine=0.5)) == pytest.approx(
        fitted.confidence(ConfidenceFeatures())
    )


def test_too_few_answers_are_no_calibration() -> None:
    with pytest.raises(ConfigurationError, match="10 of 20 answers are right"):
        fit_calibration(examples(20))


def test_as_few_as_a_fit_takes_are_cross_validated() -> None:
    few = examples(40)
    assert fit_calibration(few).questions == 40
    crossed = cross_validate(few)
    assert (crossed.answerable, crossed.unanswerable, crossed.right) == (20, 20, 20)
    assert crossed.area < judge(few, 0.0).area
    with pytest.raises(ConfigurationError, match="19 of 39 answers are right"):
        cross_validate(few[1:])


def test_risk_falls_with_coverage() -> None:
    report = judge(judge_by(fit_calibration(examples()), examples()), 0.2)
    coverage, risk = report.risk_coverage()
    assert (coverage[-1], risk[-1]) == (1.0, 0.5)
    assert risk[: len(risk) // 4].mean() < 0.05


def test_examples_are_asked_with_and_without_their_document(
    tiny_reader: LoadedModel, tmp_path: Path
) -> None:
    documents = [
        SourceDocument("leave", "Everybody has 28 days of leave."),
        SourceDocument("keys", "Everybody has a key of the boathouse."),
    ]
    questions = [
        Question("1", "How many days of leave has everybody?", ("28 days",), "leave"),
        Question("2", "Which elephants?", ("none",), ""),
    ]
    asked: list[tuple[int, int]] = []
    with RagCache.open(tmp_path, tiny_reader, max_tokens=4, embedding="none") as rag:
        rag.ingest("notes", documents)
        found = collect_examples(
            rag, "notes", questions, extractive=True, progress=lambda *at: asked.append(at)
        )
    assert [each.answerable for each in found] == [True, True, False]
    assert asked == [(3, 3)]
    with_document, nothing, without = found
    assert with_document.evidence.coverage is not None
    assert without.evidence.coverage is not None
    assert with_document.evidence.coverage > without.evidence.coverage > 0
    assert with_document.evidence.lift is not None, "nothing was calibrated yet"
    assert nothing.confidence is None, "retrieval found nothing"


def answered_by(model: LoadedModel, folder: Path) -> Dataset:
    """Documents with questions whose accepted answer is the one that the model gives."""
    documents = [
        SourceDocument(f"{number}", f"Box {number} holds {number} keys of the boathouse.")
        for number in range(FEWEST)
    ]
    asked = [f"What does box {number} hold?" for number in range(FEWEST)]
    plain = GenerationParams(extractive=False, confidence=False)
    with RagCache.open(folder, model, max_tokens=4, embedding="none") as rag:
        rag.ingest("boxes", documents)
        said = [
            rag.ask(each, collection="boxes", generation=plain, k=4, relative_threshold=0.5).text
            for each in asked
        ]
    questions = tuple(
        Question(str(number), question, (answer,), str(number))
        for number, (question, answer) in enumerate(zip(asked, said, strict=True))
    )
    return Dataset("boxes", "lines", questions, tuple(documents))


@pytest.mark.parametrize(("distance", "enough"), [(0.1, False), (1.0, True)])
def test_a_model_refuses_no_more_than_enough(distance: float, enough: bool) -> None:
    known = []
    for each in examples():
        grounding = 1 + (each.evidence.free or 0.0) / 5 - (0.0 if each.right else distance)
        evidence = ConfidenceFeatures(free=-1.0, grounding=grounding)
        known.append(replace(each, evidence=evidence))
    fitted = fit_built_in(known)
    report = judge(judge_by(fitted, known), fitted.min_confidence)
    if enough:
        assert report.refused_unanswerable == pytest.approx(ENOUGH, abs=0.005)
        assert report.refused_right < BUILT_IN_REFUSALS
    else:
        assert report.refused_right == pytest.approx(BUILT_IN_REFUSALS, abs=0.006)
        assert report.refused_unanswerable < ENOUGH


@pytest.mark.slow
def test_a_model_is_calibrated_once_for_all_collections(
    tiny_reader: LoadedModel, tmp_path: Path
) -> None:
    dataset = answered_by(tiny_reader, tmp_path / "asked")
    folder, fitted = tmp_path / "0", []
    for name in "01":
        with RagCache.open(tmp_path / name, tiny_reader, max_tokens=4, embedding="none") as rag:
            rag.ingest("boxes", dataset.documents)
            assert rag.ask("Which box?", collection="boxes").confidence is None
            fitted.append(calibrate_model(rag, dataset=dataset))
            assert rag.within(BUILT_IN).stats().collections == {}
    first, second = fitted
    assert first is not None
    assert second is not None
    assert first.questions == second.questions == 2 * FEWEST
    assert second.weights == pytest.approx(first.weights, rel=1e-3), "equal to their rounding"
    assert second.min_confidence == pytest.approx(first.min_confidence, rel=1e-3)

    def never(_: int, __: int) -> None:
        raise AssertionError("the model is asked again")

    with RagCache.open(folder, tiny_reader, max_tokens=4, embedding="none") as rag:
        assert calibrate_model(rag, dataset=dataset, progress=never) == first
        assert rag.collections.calibration("boxes") == first
        question = dataset.questions[3].question
        answer = rag.ask(question, collection="boxes")
        assert answer.confidence is not None
        strict = GenerationParams(min_confidence=1.0)
        refused = rag.ask(question, collection="boxes", generation=strict)
        assert (refused.finish_reason, refused.confidence) == ("no_answer", answer.confidence)
        unchecked = GenerationParams(confidence=False)
        assert rag.ask(question, collection="boxes", generation=unchecked).confidence is None
        rag.collections.set_instruction("boxes", "Answer in one word.")
        assert rag.collections.calibration("boxes") is None
        assert rag.ask(question, collection="boxes").confidence is None


def test_a_model_is_judged_as_others_until_it_has_its_own(
    tiny_reader: LoadedModel, quick_reader: LoadedModel, tmp_path: Path
) -> None:
    note = [SourceDocument("key", "The spare key hangs in the boathouse.")]
    options = {"embedding": "none", "force_modes": False, "max_tokens": 2}
    with RagCache.open(tmp_path / "state", tiny_reader, **options) as rag:
        rag.ingest("notes", note)
        ask = partial(rag.ask, "Where is the spare key?", collection="notes", mode="exact")
        assert rag.collections.calibration("notes") == GENERAL
        refused, shown = ask(), ask(generation=GenerationParams(min_confidence=0.0))
        assert refused.confidence == shown.confidence
        assert refused.confidence is not None
        assert refused.confidence < GENERAL.min_confidence
        assert (refused.finish_reason, refused.text) == ("no_answer", REFUSAL)
        assert shown.finish_reason != "no_answer"
        assert ask(generation=GenerationParams(confidence=False)).confidence is None
        rag.collections.set_instruction("notes", "Answer in one word.")
        assert rag.collections.calibration("notes") is None
        assert ask().confidence is None
        rag.collections.set_instruction("notes", None)
        own = replace(GENERAL, bias=GENERAL.bias + 1)
        rag.internals.shared.calibration.keep(own)
        assert rag.collections.calibration("notes") == own
    with RagCache.open(tmp_path / "forced", tiny_reader, **options | {"force_modes": True}) as rag:
        rag.ingest("notes", note)
        assert rag.collections.calibration("notes") is None
    with RagCache.open(tmp_path / "reader", quick_reader, **options) as rag:
        rag.ingest("notes", note)
        assert rag.collections.calibration("notes", extractive=False) is None


@pytest.mark.slow
def test_a_model_without_right_answers_refuses_nothing(
    tiny_reader: LoadedModel, quick_reader: LoadedModel, tmp_path: Path
) -> None:
    wrong = replace(quick_reader, extractive=False)
    for number, model in enumerate((tiny_reader, wrong)):  # the window of the first is too small
        with RagCache.open(tmp_path / str(number), model, max_tokens=2, embedding="none") as rag:
            assert calibrate_model(rag) is None
            assert rag.internals.shared.calibration.is_fitted
            assert rag.within(BUILT_IN).stats().collections == {}


@pytest.mark.slow
def test_a_calibration_in_the_background_ends_with_the_folder(
    tiny_reader: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"embedding": "none", "force_modes": False, "max_tokens": 2}
    with RagCache.open(tmp_path, tiny_reader, **options) as rag:
        rag.gate.measure_in_background()
        calibrate_in_background(rag)
    assert not any(each.name == "ragcache-calibration" for each in threading.enumerate())
    assert "could not be calibrated" not in caplog.text
    with RagCache.open(tmp_path, tiny_reader, **options) as rag:
        rag.gate.measure_in_background()
        calibrate_in_background(rag)
        rag.internals.shared.join_background()
        assert rag.internals.shared.calibration.is_fitted
        assert rag.within(BUILT_IN).stats().collections == {}
