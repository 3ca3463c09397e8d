"""`ragcache eval`."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from ragcache.models import INSTRUCTION
from ragcache.pipeline import gate
from ragcache.pipeline.gate_measurement import GateResult
from tests.api.cli.conftest import QUESTION, Run, error_of, json_of


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    row = {"id": "key", "question": QUESTION, "answers": ["nonsense"], "document": "keys.md"}
    path.write_text(json.dumps(row), encoding="utf-8")
    return path


@pytest.fixture
def squad(tmp_path: Path) -> Path:
    """Two paragraphs with a question each."""
    paragraphs = [
        {
            "context": f"The spare key of the {place} hangs in the {color} cupboard.",
            "qas": [{"id": place, "question": f"Where hangs the spare key of the {place}?",
                     "answers": [{"text": f"the {color} cupboard", "answer_start": 0}]}],
        }
        for place, color in (("boathouse", "red"), ("office", "blue"))
    ]  # fmt: skip
    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"data": [{"title": "Keys", "paragraphs": paragraphs}]}))
    return path


@pytest.mark.slow
def test_eval_marks_every_mode(run: Run, ingested: Path, questions: Path) -> None:
    found = json_of(run("eval", "notes", questions, "--mode", "rooted, primed:4, exact", "--json"))
    reports = found["reports"]
    assert [report["mode"] for report in reports] == ["rooted", "primed:4", "exact"]
    computed = [report["computed_tokens"] for report in reports]
    assert computed == sorted(computed)
    for report in reports:
        assert (report["questions"], report["exact_match"], report["retrieved"]) == (1, 0.0, 1.0)
        assert report["marked"][0]["question"]["id"] == "key"
        assert report["kl_divergence"] < 1e-3
    assert {each["reference"] for each in found["comparisons"]} == {"exact"}
    setting = found["setting"]
    assert (setting["questions"], setting["asked"]) == ("questions.jsonl", "1")
    assert setting["documents"] == "of the collection"


@pytest.mark.slow
def test_eval_calibrates_on_the_questions(
    run: Run, ingested: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ragcache import calibration

    file = tmp_path / "known.jsonl"
    texts = {
        "boats.md": ("north quay", "Where is the boat with the spare key and the days of leave?"),
        "leave.md": ("Ines Marlow", "Who has leave, and the spare key of the boat?"),
    }
    rows = [
        {"question": question, "answers": [answer], "document": document}
        for document, (answer, question) in texts.items()
    ]
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    command = ("eval", "notes", file, "--calibrate")
    few = error_of(run(*command), "ConfigurationError")
    assert "a calibration takes 20 right and 20 others" in few
    monkeypatch.setattr(calibration, "f1", lambda *_: 1.0)
    monkeypatch.setattr(calibration, "FEWEST", 1)
    monkeypatch.setattr(calibration, "FOLDS", 1)
    monkeypatch.setattr(calibration, "cross_validate", lambda known: calibration.judge(known, 0.5))
    status, out, _ = run(*command)
    assert status == 0
    assert "kept with notes: answers below" in out
    answer = json_of(run("ask", rows[0]["question"], "-c", "notes", "--json"))
    assert answer["confidence"] is not None


@pytest.mark.slow
def test_eval_through_a_chat_shows_how_many_agree(
    run: Run, ingested: Path, questions: Path
) -> None:
    chat = ("eval", "notes", questions, "--through", "chat")
    status, out, _ = run(*chat, "--modes", "rooted,exact")
    assert status == 0
    exact = next(line for line in out.splitlines() if line.startswith("chat:exact"))
    assert exact.split()[5:8] == ["100.0", "0.0000", "100.0"], "retrieved, KL, agreement"
    assert "chat:rooted against chat:exact: exact match +0.0 points" in " ".join(out.split())
    wrong = run("eval", "notes", questions, "--through", "mail")
    assert "--through is 'mail'" in error_of(wrong, "ConfigurationError")


def test_eval_prints_a_dash_for_what_is_not_known(run: Run, ingested: Path, tmp_path: Path) -> None:
    file = tmp_path / "open.jsonl"
    file.write_text(json.dumps({"question": QUESTION, "answers": ["nonsense"]}), encoding="utf-8")
    status, out, _ = run("eval", "notes", file, "--modes", "rooted")
    assert status == 0
    assert out.splitlines()[-1].split()[5:8] == ["-", "-", "-"], "retrieved, KL, agreement"


@pytest.mark.slow
def test_eval_lists_wrong_answers_on_request(run: Run, ingested: Path, questions: Path) -> None:
    status, out, _ = run("eval", "notes", questions, "--modes", "rooted", "--wrong")
    assert status == 0
    assert f"key {QUESTION} -> " in out
    assert "right: 'nonsense'" in out
    assert "right:" not in run("eval", "notes", questions, "--modes", "rooted")[1]


@pytest.mark.slow
def test_a_file_brings_its_documents_to_a_collection_that_stays(
    run: Run, ingested: Path, squad: Path
) -> None:
    command = ("eval", "keys", squad, "--mode", "rooted", "--sample", "1", "--json")
    [report] = json_of(run(*command))["reports"]
    assert (report["questions"], report["retrieved"]) == (1, 1.0)
    assert "keys" in run("collections")[1]
    again = json_of(run("eval", "keys", squad, "--mode", "rooted", "--over", "own", "--json"))
    assert again["setting"]["documents"] == 2
    assert again["setting"]["over"] == "each question's own documents"
    assert again["reports"][0]["retrieved"] == 1.0
    refused = error_of(run("eval", "notes", squad), "ConfigurationError")
    assert "bring 2 documents, and the collection 'notes' holds 3 others" in refused


@pytest.mark.slow
def test_documents_of_a_dash_are_forgotten(
    run: Run, squad: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = json_of(run("eval", "-", squad, "--mode", "rooted", "--json"))
    assert found["reports"][0]["questions"] == 2
    assert not list(tmp_path.glob("ragcache-eval-*"))
    assert not (tmp_path / "state").exists()


def test_what_eval_cannot_use_is_refused(run: Run, ingested: Path, questions: Path) -> None:
    calibrating = ("notes", questions, "--calibrate")
    for given, message in (
        (("-", questions, "--calibrate"), "name one instead of -"),
        ((*calibrating, "--through", "chat"), "does without --through chat"),
        ((*calibrating, "--wrong"), "does without --wrong"),
        (("-", questions), "the questions bring no documents"),
        (("notes", questions, "--over", "some"), "--over is 'some'; give all or own"),
        (("notes", questions, "--over", "own"), "brings no documents with its questions"),
        (("notes", questions, "--mode", "fast"), "unknown mode 'fast'"),
    ):
        assert message in error_of(run("eval", *given), "ConfigurationError")


@pytest.mark.slow
def test_a_model_is_calibrated_by_a_command(
    run: Run, ingested: Path, float_reader: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ragcache import calibration
    from ragcache.evaluation.builtin import builtin_dataset

    monkeypatch.setenv("RAGCACHE_FORCE_MODES", "0")
    near = GateResult("primed", 24, 0, 1, 2, 6, 1, 1)
    monkeypatch.setattr(gate, "measure_modes", lambda *_: [near])
    whole = builtin_dataset()
    few = replace(whole, questions=whole.questions[:2])
    monkeypatch.setattr(calibration, "builtin_dataset", lambda: few)
    asked = ("ask", QUESTION, "-c", "notes", "--model", float_reader, "--max-tokens", "2")
    _, _, said = run(*asked)
    assert said.startswith("No answer of this model is refused yet")
    assert f"`ragcache calibrate --model {float_reader}" in said
    _, _, said = run(*asked, "--instruction", INSTRUCTION, "--min-confidence", "1")
    assert said.startswith("The answer was judged by the calibration of two other models")
    error_of(run("calibrate", "--json"), "ConfigurationError")
    assert json_of(run("calibrate", "--model", float_reader, "--json")) == {"calibration": None}
    status, out, _ = run("calibrate", "--model", float_reader)
    assert (status, "too few questions" in out) == (0, True)
    _, _, said = run(*asked)
    assert "calibrate" not in said
