"""Refusals of models, and questions to a folder of one's own."""

from __future__ import annotations

import json
import random
from pathlib import Path

import own_folder
import pytest
from refusals import BUILT_IN, bench_refusals, read_examples, write_examples

from ragcache.answers.confidence import ConfidenceFeatures
from ragcache.calibration import CalibrationExample
from ragcache.evaluation.builtin import builtin_dataset, read_dataset


def answered(seed: int) -> list[CalibrationExample]:
    """Answers of a model that is right where there is an answer, and more certain then."""
    rng, made = random.Random(seed), []
    for question in builtin_dataset().questions:
        right = bool(question.answers)
        grounding = rng.gauss(0.8 if right else 0.2, 0.1)
        evidence = ConfidenceFeatures(free=rng.gauss(-0.3, 0.1), grounding=grounding)
        made.append(CalibrationExample(question.question, right, right, evidence, 0.5))
    return made


def test_each_model_is_judged_by_three_calibrations(tmp_path: Path) -> None:
    asked = {name: {BUILT_IN: answered(seed)} for seed, name in enumerate(("small", "large"))}
    told = bench_refusals(asked)
    kinds = ["own, held out", "own", "others", "general"]
    assert [row["calibration"] for row in told["rows"]] == 2 * kinds
    for row in told["rows"]:
        assert row["refused_right"] < 0.05
        assert 0.8 < row["refused_unanswerable"] < 0.95
    assert told["general"]["questions"] == 400
    assert json.dumps(told)
    write_examples(tmp_path / "asked" / "small.json", asked["small"])
    assert read_examples(tmp_path / "asked" / "small.json") == asked["small"]


@pytest.mark.slow
def test_a_folder_is_asked_again_after_it_was_opened(tmp_path: Path, float_reader: Path) -> None:
    notes = own_folder.NOTES.read_text(encoding="utf-8").split("\n\n")
    whole = read_dataset(own_folder.NOTES, "notes")
    assert sum(bool(each.answers) for each in whole.questions) == len(whole.questions) / 2 == 20
    few = tmp_path / "notes.txt"
    few.write_text("\n\n".join(notes[:2]), encoding="utf-8")
    told = own_folder.bench_own_folder(str(float_reader), few, "cpu", None)
    assert len(told["questions"]) == 8
    assert min(told["opening_seconds"], *(each["seconds"] for each in told["questions"])) > 0
    assert {each["answerable"] for each in told["questions"] if each["right"]} <= {True}
