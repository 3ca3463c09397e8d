"""Calibrations that are fitted on known questions, and what refusing by them does."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from ragcache import RagCache, SourceDocument
from ragcache.answers.confidence import ConfidenceFeatures
from ragcache.calibration import (
    CalibrationExample,
    collect_examples,
    cross_validate,
    fit_calibration,
    judge,
    judge_by,
)
from ragcache.errors import ConfigurationError
from ragcache.evaluation import Question
from ragcache.models import LoadedModel


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
