"""The command line: what it prints for people and for programs, and how it fails."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ragcache import RagCache
from ragcache.models import LoadedModel
from ragcache_api.cli import ask
from ragcache_api.cli.main import main
from ragcache_schemas import parse_schema
from tests.conftest import REPOSITORY, write_notes

QUESTION = "Where does the spare key of the boathouse hang?"
ANSWER_KEYS = {
    "question", "text", "sources", "mode", "finish_reason", "reuse", "timings", "choices"
}  # fmt: skip
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `ragcache ARGUMENTS`; gives exit status, standard output and standard error."""
    monkeypatch.setenv("RAGCACHE_STATE", str(tmp_path / "state"))

    def command(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ragcache", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return command


def parsed(result: tuple[int, str, str]) -> Any:
    """The JSON on standard output of a command that succeeded."""
    status, out, err = result
    assert status == 0, err
    return json.loads(out)


def failed(result: tuple[int, str, str], name: str) -> str:
    """The message of a command that failed with this error, and printed nothing else."""
    status, out, err = result
    assert (status, out) == (1, "")
    assert err.startswith(f"{name}: ")
    assert "Traceback" not in err
    return err


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory, reader: LoadedModel) -> Path:
    """A state folder into which the notes were ingested."""
    folder = tmp_path_factory.mktemp("library")
    with RagCache.open(folder / "state", reader) as rag:
        rag.ingest("notes", [write_notes(folder / "notes")])
    return folder / "state"


@pytest.fixture
def ingested(library: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(library, tmp_path / "state"))


def test_ingest_reports_what_it_stored(run: Run, notes: Path) -> None:
    (notes / "plan.pdf").write_bytes(b"%PDF\0")
    stored = parsed(run("ingest", "notes", notes, "--json"))
    counts = ("added", "updated", "unchanged", "modules", "encoded")
    assert [stored[name] for name in counts] == [3, 0, 0, 3, 4]
    assert stored["collection"] == "notes"
    assert stored["tokens"] > 50
    assert [Path(path).name for path in stored["ignored"]] == ["plan.pdf"]
    status, out, _ = run("ingest", "notes", notes)
    assert status == 0
    assert "0 documents added, 0 updated, 3 unchanged in notes: 0 modules" in out
    assert "passed over (not text)" in out


def test_ask_answers_with_sources_and_accounts(run: Run, ingested: Path) -> None:
    answer = parsed(run("ask", QUESTION, "-c", "notes", "-k", 2, "--json"))
    assert set(answer) == ANSWER_KEYS | {"encoded"}
    assert answer["encoded"] == 0, "a later process computes no module again"
    assert answer["sources"][0]["document"] == "keys.md"
    assert {source["tier"] for source in answer["sources"]} == {"disk"}
    reuse = answer["reuse"]
    assert reuse["cached_tokens"] + reuse["computed_tokens"] == reuse["prompt_tokens"]
    assert reuse["bytes_moved"]["disk"] > 0


def test_ask_prints_the_answer_for_people(run: Run, ingested: Path) -> None:
    asked = ("ask", QUESTION, "--collection", "notes", "--mode", "exact")
    text = parsed(run(*asked, "--json"))["text"]
    status, out, _ = run(*asked)
    assert status == 0
    assert out.startswith(text)
    assert "mode exact · prompt" in out
    assert "= 0 cached" in out
    assert "keys.md" in out


def test_ask_prints_the_answer_as_it_comes(run: Run, ingested: Path) -> None:
    asked = ("ask", QUESTION, "-c", "notes", "--max-new-tokens", 6)
    answer = parsed(run(*asked, "--json"))
    assert len(answer["choices"][0]["token_ids"]) <= 6
    status, out, _ = run(*asked, "--stream")
    assert status == 0
    assert out.split("\n")[0].strip() == answer["text"]
    assert "keys.md" in out
    assert run("ask", "xylophone", "-c", "notes", "--stream")[1].startswith("nothing in this")


def test_ask_takes_generation_options(run: Run, ingested: Path) -> None:
    asked = ("ask", QUESTION, "-c", "notes", "--temperature", 3.0, "--seed", 5, "--json")
    assert parsed(run(*asked))["text"] == parsed(run(*asked))["text"]
    greedy = parsed(run("ask", QUESTION, "-c", "notes", "--json"))["text"]
    cut = parsed(run("ask", QUESTION, "-c", "notes", "--stop", greedy[2:4], "--json"))
    assert (cut["text"], cut["finish_reason"]) == (greedy[:2].strip(), "stop")
    bad = ("ask", QUESTION, "-c", "notes", "--temperature", -1, "--json")
    assert "temperature is -1.0" in failed(run(*bad), "InvalidRequest")


def test_ask_says_where_nothing_was_found(run: Run, ingested: Path) -> None:
    status, out, _ = run("ask", "xylophone", "-c", "notes")
    assert status == 0
    assert out.startswith("nothing in this collection shares a word with the question")
    answer = parsed(run("ask", "xylophone", "-c", "notes", "--json"))
    assert (answer["finish_reason"], answer["text"]) == ("no_documents", "")


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    row = {"id": "key", "question": QUESTION, "answers": ["nonsense"], "document": "keys.md"}
    path.write_text(json.dumps(row), encoding="utf-8")
    return path


def test_eval_marks_every_mode(run: Run, ingested: Path, questions: Path) -> None:
    reports = parsed(run("eval", "notes", questions, "--mode", "rooted, linked:4, exact", "--json"))
    assert [report["mode"] for report in reports] == ["rooted", "linked:4", "exact"]
    computed = [report["computed_tokens"] for report in reports]
    assert computed == sorted(computed)
    for report in reports:
        assert set(report) == {
            "mode", "questions", "exact_match", "f1", "retrieved", "computed_tokens", "marked"
        }  # fmt: skip
        assert (report["questions"], report["exact_match"], report["retrieved"]) == (1, 0.0, 1.0)
        assert report["marked"][0]["question"]["id"] == "key"


def test_eval_asks_through_a_chat_and_tells_how_many_agree(
    run: Run, ingested: Path, questions: Path
) -> None:
    chat = ("eval", "notes", questions, "--through", "chat")
    status, out, _ = run(*chat, "--modes", "rooted,exact")
    assert status == 0
    assert "chat:exact" in out
    assert out.splitlines()[-1].split()[-1] == "100.0%"
    assert run(*chat, "--modes", "rooted")[1].splitlines()[-1].split()[-1] == "-"
    wrong = run("eval", "notes", questions, "--through", "mail")
    assert "--through is 'mail'" in failed(wrong, "ConfigurationError")


def test_eval_lists_wrong_answers_on_request(run: Run, ingested: Path, questions: Path) -> None:
    status, out, _ = run("eval", "notes", questions, "--modes", "rooted", "--wrong")
    assert status == 0
    assert f"key {QUESTION} -> " in out
    assert "right: 'nonsense'" in out
    assert "100.0%" in out
    assert "right:" not in run("eval", "notes", questions, "--modes", "rooted")[1]


def test_modules_ls_lists_sizes_and_tiers(run: Run, ingested: Path) -> None:
    listed = parsed(run("modules", "ls", "--json"))
    assert len(listed) == 3
    for row in listed:
        assert {"name", "collection", "tokens", "nbytes", "tiers", "hits"} <= set(row)
        assert row["collection"] == "notes"
        assert "disk" in row["tiers"]
    failed(run("modules", "ls", "elsewhere", "--json"), "UnknownCollection")
    _, out, _ = run("modules", "ls", "notes")
    tokens = sum(row["tokens"] for row in listed)
    assert f"3 modules, {tokens} tokens" in out
    assert all(row["name"] in out for row in listed)


def test_modules_ls_counts_hits(run: Run, ingested: Path) -> None:
    run("ask", QUESTION, "-c", "notes", "-k", 1)
    hits = {row["name"]: row["hits"] for row in parsed(run("modules", "ls", "--json"))}
    assert sorted(hits.values()) == [0, 0, 1]


def test_schema_show_prints_pml(run: Run, ingested: Path) -> None:
    status, out, _ = run("schema", "show", "notes", "-k", 2)
    assert status == 0
    parse_schema(out)
    expanded = run("schema", "show", "notes", "-k", 2, "--expand")[1]
    parse_schema(expanded)
    for name in ("boats.md", "keys.md", "leave.md"):
        assert name not in out, "the members are named by their collection"
        assert expanded.count(f'<module name="{name}">') == 2, "once in either slot"
    assert "hangs in the red cupboard" in expanded


def test_doctor_finds_everything_in_order(run: Run, ingested: Path) -> None:
    checks = parsed(run("doctor", "--json"))
    assert set(checks) == {"machine", "attention backend", "embedded reader", "state folder"}
    assert all(check["ok"] for check in checks.values())
    assert checks["state folder"]["detail"].startswith("3 modules in ")


def test_doctor_reports_a_damaged_state_folder(run: Run, tmp_path: Path) -> None:
    assert "does not exist yet" in parsed(run("doctor", "--json"))["state folder"]["detail"]
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "ledger.sqlite").write_bytes(b"not a database" * 100)
    status, out, _ = run("doctor", "--json")
    assert status == 1
    checks = json.loads(out)
    assert [name for name, check in checks.items() if not check["ok"]] == ["state folder"]
    assert "failed state folder" in run("doctor")[1]


@pytest.mark.parametrize("texts", [None, "zebra"], ids=["notes", "nothing in common"])
def test_demo_compares_both_ways_for_every_question(
    run: Run, notes: Path, texts: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ask, "RUNS", 1)
    monkeypatch.setattr(ask, "QUESTIONS", ask.QUESTIONS[:2])
    for path in notes.iterdir() if texts else ():
        path.write_text(texts or "", encoding="utf-8")
    compared = parsed(run("demo", "--handbook", notes, "--json"))
    assert [each["question"] for each in compared] == list(ask.QUESTIONS)
    figures = {"first_token_cached", "first_token_exact", "ratio"}
    for each in compared:
        assert set(each) == ANSWER_KEYS | figures
        assert each["mode"] == "rooted"
        assert each["ratio"] == each["first_token_exact"] / each["first_token_cached"]


def test_demo_prints_questions_and_ratios(
    run: Run, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ask, "RUNS", 1)
    monkeypatch.setattr(ask, "QUESTIONS", ask.QUESTIONS[:2])
    status, out, _ = run("demo", "--handbook", notes)
    assert status == 0
    assert "3 documents, 3 modules" in out
    assert all(question in out for question in ask.QUESTIONS)


def test_named_errors_are_one_line_on_standard_error(
    run: Run, ingested: Path, tmp_path: Path
) -> None:
    nowhere = tmp_path / "nowhere"
    message = failed(run("ask", QUESTION, "-c", "absent", "--json"), "UnknownCollection")
    assert "absent" in message
    assert str(nowhere) in failed(run("ingest", "notes", nowhere, "--json"), "UnreadableDocument")
    failed(run("demo", "--handbook", nowhere, "--json"), "NoDocuments")
    failed(run("ask", "?", "-c", "notes", "--model", nowhere), "ModelNotFound")
    failed(run("eval", "notes", nowhere), "ConfigurationError")
    failed(run("schema", "show", "absent"), "UnknownCollection")


def test_asking_where_nothing_was_ingested_makes_no_folder(run: Run, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    for command in (["ask", "?", "-c", "notes"], ["schema", "show", "notes"]):
        failed(run(*command, "--state", nowhere), "NoState")
    assert not nowhere.exists()


def test_errors_of_a_request_are_named_too(run: Run, ingested: Path) -> None:
    failed(run("ask", "  ", "-c", "notes", "--json"), "EmptyQuestion")
    message = failed(run("ask", QUESTION, "-c", "notes", "--mode", "fast"), "ConfigurationError")
    assert "unknown mode 'fast'" in message


def test_modules_ls_makes_no_state_where_there_is_none(run: Run, tmp_path: Path) -> None:
    failed(run("modules", "ls", "--json"), "NoState")
    assert not (tmp_path / "state").exists()


def test_a_folder_with_brackets_is_shown_as_it_is(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "[red]x[bold]"
    assert "[red]x[bold]" in failed(run("modules", "ls", "--state", folder), "NoState")


def test_the_module_runs_as_a_program(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ragcache_api.cli.main", "modules", "ls"]
    done = subprocess.run(
        [*command, "--state", str(tmp_path / "none")], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("NoState: ")


def test_names_with_brackets_are_shown_as_they_are(run: Run, notes: Path) -> None:
    (notes / "[draft] plan.md").write_text("# Plan\n\nThe jetty gets a new handrail.")
    (notes / "[red].bin").write_bytes(b"x")
    assert "[red].bin" in run("ingest", "[b]", notes)[1]
    assert "[draft] plan.md#1" in run("ask", "Which handrail?", "-c", "[b]")[1]
    out = run("modules", "ls")[1]
    assert "[draft] plan.md#1  [b]" in out
    failed(run("ask", QUESTION, "-c", "[b]", "-k", 0), "ConfigurationError")


def test_a_schema_is_added_and_a_prompt_over_it_answered(run: Run, tmp_path: Path) -> None:
    folder = REPOSITORY / "examples" / "pml" / "trip-plan"
    status, out, err = run("schema", "add", folder / "schema.xml", "--placement", "compact")
    assert (status, err) == (0, "")
    assert "states encoded" in out
    prompt = sorted(folder.glob("prompt-*.xml"))[0]
    answer = parsed(run("prompt", prompt, "--json"))
    reuse = answer["reuse"]
    assert reuse["cached_tokens"] > reuse["computed_tokens"] > 0
    assert parsed(run("prompt", prompt, "--mode", "exact", "--json"))["reuse"]["cached_tokens"] == 0
    failed(run("prompt", tmp_path / "absent.xml"), "UnreadableDocument")
    failed(run("schema", "add", folder / "schema.xml", "--placement", "x"), "ConfigurationError")
    (tmp_path / "other.xml").write_text('<prompt schema="absent"><a/></prompt>')
    failed(run("prompt", tmp_path / "other.xml"), "UnknownSchema")
