"""`ragcache plan` and `ragcache eval`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ragcache.errors import ConfigurationError, NoState
from ragcache_api.cli.main import app
from tests.api.cli.conftest import QUESTION, Run, error_of, json_of

runner = CliRunner()


def test_a_plan_of_files_is_printed(notes: Path, tmp_path: Path) -> None:
    where = ["--state", str(tmp_path / "state"), "--sample", "2", "--device-bytes", "1KiB"]
    shown = runner.invoke(app, ["plan", str(notes), *where])
    assert shown.exit_code == 0
    for word in ("3 documents", "device", "int8", "computed in", "bytes per token", "Ingestion"):
        assert word in shown.output
    assert not (tmp_path / "state").exists(), "a plan changes nothing"


def test_a_plan_of_a_collection_as_json(notes: Path, tmp_path: Path) -> None:
    state = ["--state", str(tmp_path / "state")]
    runner.invoke(app, ["ingest", "notes", str(notes), *state])
    result = runner.invoke(app, ["plan", "-c", "notes", *state, "--json", "--sample", "1"])
    plan = json.loads(result.stdout)
    assert (plan["documents"], plan["measured"]["modules"]) == (3, 1)
    assert plan["extrapolated"]["encode_s"] > 0
    assert plan["advice"]
    assert {size["tier"] for size in plan["tiers"]} == {"host", "disk"}


def test_a_plan_needs_either_files_or_a_collection(notes: Path, tmp_path: Path) -> None:
    for arguments in ([], [str(notes), "-c", "notes"]):
        assert isinstance(runner.invoke(app, ["plan", *arguments]).exception, ConfigurationError)
    missing = runner.invoke(app, ["plan", "-c", "notes", "--state", str(tmp_path)])
    assert isinstance(missing.exception, NoState)


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    row = {"id": "key", "question": QUESTION, "answers": ["nonsense"], "document": "keys.md"}
    path.write_text(json.dumps(row), encoding="utf-8")
    return path


def test_eval_marks_every_mode(run: Run, ingested: Path, questions: Path) -> None:
    reports = json_of(
        run("eval", "notes", questions, "--mode", "rooted, linked:4, exact", "--json")
    )
    assert [report["mode"] for report in reports] == ["rooted", "linked:4", "exact"]
    computed = [report["computed_tokens"] for report in reports]
    assert computed == sorted(computed)
    for report in reports:
        assert set(report) == {
            "mode", "questions", "exact_match", "f1", "retrieved", "computed_tokens", "marked"
        }  # fmt: skip
        assert (report["questions"], report["exact_match"], report["retrieved"]) == (1, 0.0, 1.0)
        assert report["marked"][0]["question"]["id"] == "key"


def test_eval_through_a_chat_shows_how_many_agree(
    run: Run, ingested: Path, questions: Path
) -> None:
    chat = ("eval", "notes", questions, "--through", "chat")
    status, out, _ = run(*chat, "--modes", "rooted,exact")
    assert status == 0
    assert "chat:exact" in out
    assert out.splitlines()[-1].split()[-1] == "100.0%"
    assert run(*chat, "--modes", "rooted")[1].splitlines()[-1].split()[-1] == "-"
    wrong = run("eval", "notes", questions, "--through", "mail")
    assert "--through is 'mail'" in error_of(wrong, "ConfigurationError")


def test_eval_prints_a_dash_where_questions_name_no_document(
    run: Run, ingested: Path, tmp_path: Path
) -> None:
    file = tmp_path / "open.jsonl"
    file.write_text(json.dumps({"question": QUESTION, "answers": ["nonsense"]}), encoding="utf-8")
    command = ("eval", "notes", file, "--modes", "exact")
    assert run(*command)[1].splitlines()[-1].split()[4] == "-"
    [report] = json_of(run(*command, "--json"))
    assert report["retrieved"] is None


def test_eval_lists_wrong_answers_on_request(run: Run, ingested: Path, questions: Path) -> None:
    status, out, _ = run("eval", "notes", questions, "--modes", "rooted", "--wrong")
    assert status == 0
    assert f"key {QUESTION} -> " in out
    assert "right: 'nonsense'" in out
    assert "100.0%" in out
    assert "right:" not in run("eval", "notes", questions, "--modes", "rooted")[1]
