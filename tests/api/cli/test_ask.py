"""`ragcache ask`, `prompt` and `demo`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.text import Text

from ragcache.answers.policy import AnswerSpan
from ragcache.db import ModuleRow
from ragcache.params import REFUSAL
from ragcache.pipeline import gate
from ragcache.pipeline.gate_measurement import GateResult
from ragcache_api.cli import ask
from ragcache_api.cli.console import format_span
from tests.api.cli.conftest import QUESTION, Run, error_of, json_of
from tests.conftest import REPOSITORY, write_notes

ANSWER_KEYS = {
    "question", "text", "sources", "mode", "finish_reason", "reuse", "timings", "choices",
    "spans", "confidence",
}  # fmt: skip


def test_ask_answers_with_sources_and_costs(run: Run, ingested: Path) -> None:
    answer = json_of(run("ask", QUESTION, "-c", "notes", "-k", 2, "--json"))
    assert set(answer) == ANSWER_KEYS | {"encoded"}
    assert answer["encoded"] == 0, "a later process computes no module again"
    assert answer["sources"][0]["document"] == "keys.md"
    assert {source["tier"] for source in answer["sources"]} == {"disk"}
    reuse = answer["reuse"]
    assert reuse["cached_tokens"] + reuse["computed_tokens"] == reuse["prompt_tokens"]
    assert reuse["bytes_moved"]["disk"] > 0


def test_ask_prints_the_answer_for_people(run: Run, ingested: Path) -> None:
    asked = ("ask", QUESTION, "--collection", "notes", "--mode", "exact")
    text = json_of(run(*asked, "--json"))["text"]
    status, out, _ = run(*asked)
    assert status == 0
    assert out.startswith(text)
    assert "mode exact · prompt" in out
    assert "= 0 cached" in out
    assert "keys.md" in out


@pytest.mark.slow
def test_ask_marks_a_quotation_in_its_document(run: Run, ingested: Path) -> None:
    asked = ("ask", QUESTION, "-c", "notes", "--min-confidence", 0)
    answer = json_of(run(*asked, "--extractive", "--json"))
    assert answer["text"]
    document, start, end = (answer["spans"][0][name] for name in ("document", "start", "end"))
    for streams in ("--stream", "--no-stream"):
        out = run(*asked, "--extractive", streams)[1]
        assert out.startswith(answer["text"])
        assert f"»{answer['text']}«" in out
        assert f"({document}, characters {start} to {end})" in out
    free = run(*asked, "--no-extractive")[1]
    assert "»" not in free


def test_a_mark_is_followed_by_the_passage_that_it_cites() -> None:
    text = "# Keys\n\nThe key is [red]. It hangs\nin the office. It is old."
    source = SimpleNamespace(module="keys.md#1", text=text)
    begin = text.index("It hangs")
    module = ModuleRow(1, "keys.md#1", "keys.md", "keys.md", text, places=((0, 100),))
    span = AnswerSpan.of(module, begin, text.index(" It is old"), mark=1)
    answer: Any = SimpleNamespace(text="The key hangs in the office [1].", sources=[source])
    cited = "»It hangs\nin the office.« It is old. (keys.md, characters 126 to 149)"
    shown, elsewhere, quotation = (
        Text.from_markup(format_span(each, answer)).plain
        for each in (span, replace(span, start=None, end=None), replace(span, mark=None))
    )
    assert shown == f"  [1] The key is [red]. {cited}"
    assert "»It hangs\nin the office.« It is old." in elsewhere
    assert f"»{answer.text}«" in quotation


@pytest.mark.slow
def test_a_mode_that_is_far_from_exact_is_refused_unless_forced(
    run: Run, ingested: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = GateResult("rooted", 24, 4.5, 0.25, 2.0, 6.0, 1.0, 0.75)
    monkeypatch.setattr(gate, "measure_modes", lambda *_: [far])
    monkeypatch.setenv("RAGCACHE_FORCE_MODES", "0")
    asked = ("ask", QUESTION, "-c", "notes", "--max-tokens", 4)
    refused = error_of(run(*asked), "ModeRefused")
    assert "4.50 nats from those of exact (limit 2.00), and 25% agree" in refused
    assert "--force-modes" in refused
    assert json_of(run(*asked, "--force-modes", "--json"))["mode"] == "rooted"
    assert json_of(run(*asked, "--mode", "exact", "--json"))["mode"] == "exact"


@pytest.mark.slow
def test_the_first_answer_of_a_model_does_not_wait_for_the_gate(
    run: Run, float_reader: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = GateResult("primed", 24, 0.25, 0.9, 2.0, 6.0, 1.0, 0.95)
    monkeypatch.setattr(gate, "measure_modes", lambda *_: [near])
    monkeypatch.setenv("RAGCACHE_FORCE_MODES", "0")
    model = ("--model", float_reader)
    run("sync", "notes", write_notes(tmp_path / "notes"), *model)
    asked = ("ask", QUESTION, "-c", "notes", "--max-tokens", 2, *model)
    status, out, err = run(*asked)
    assert status == 0
    assert "mode exact" in out
    assert "answered in exact, while primed is measured on this model" in err
    assert "primed serves: 0.25 nats from exact" in err
    status, out, err = run(*asked)
    assert "mode primed" in out
    assert "measured" not in err


@pytest.mark.slow
def test_ask_refuses_answers_of_little_confidence(run: Run, ingested: Path) -> None:
    asked = ("ask", QUESTION, "-c", "notes", "--max-tokens", 6)
    answer = json_of(run(*asked, "--min-confidence", 0, "--json"))
    assert 0 < answer["confidence"] < 1
    out = run(*asked, "--min-confidence", 1, "--refusal", "Unknown.", "--stream")[1]
    assert out.startswith("Unknown.\n")
    assert "»" not in out
    assert "keys.md" in out
    assert f"confidence {answer['confidence']:.2f} · mode rooted" in out
    plain = run(*asked, "--min-confidence", 1)[1]
    assert plain.startswith("The documents do not answer this question.")
    assert "an answer was refused; --min-confidence 0 shows it" in plain
    assert "confidence" not in run(*asked, "--no-confidence")[1]


@pytest.mark.slow
def test_ask_streams_the_answer(run: Run, ingested: Path) -> None:
    asked = ("ask", QUESTION, "-c", "notes", "--max-tokens", 6)
    answer = json_of(run(*asked, "--json"))
    assert len(answer["choices"][0]["token_ids"]) <= 6
    status, out, _ = run(*asked, "--stream")
    assert status == 0
    assert out.split("\n")[0].strip() == answer["text"]
    assert "keys.md" in out
    assert run("ask", "xylophone", "-c", "notes", "--stream")[1].startswith(REFUSAL)


@pytest.mark.slow
def test_the_instruction_is_part_of_what_states_are_kept_under(
    run: Run, ingested: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = ("--instruction", "Reply in one word.")
    assert json_of(run("warm", "notes", "--dry-run", "--json"))["encoded"] == 0
    assert json_of(run("warm", "notes", *kind, "--json"))["encoded"] == 3
    asked = ("ask", QUESTION, "-c", "notes", "-k", 2, "--max-tokens", 1, "--json")
    assert json_of(run(*asked, *kind))["encoded"] == 0
    assert "Reply in one word." in run("schema", "show", "notes", *kind)[1]
    monkeypatch.setenv("RAGCACHE_INSTRUCTION", "Reply in French.")
    assert json_of(run(*asked))["encoded"] > 0
    assert json_of(run(*asked, *kind))["encoded"] == 0, "the option comes first"


@pytest.mark.slow
def test_what_is_encoded_for_one_answer_is_kept(run: Run, ingested: Path) -> None:
    other = ("--instruction", "Reply in one word.", "--max-tokens", 1)
    asked = ("ask", QUESTION, "-c", "notes", "-k", 2, *other)
    first, again = (json_of(run(*asked, "--json")) for _ in range(2))
    assert (first["encoded"], again["encoded"]) == (2, 0), "a preamble and a module"
    assert {each["tier"] for each in again["sources"]} == {"disk"}
    assert "states were encoded" not in run(*asked, "--mode", "isolated")[2]
    assert json_of(run(*asked, "--mode", "isolated", "--json"))["encoded"] == 0


@pytest.mark.parametrize("command", ["ask", "chat", "warm", "ingest"])
def test_a_blank_instruction_is_refused(run: Run, ingested: Path, command: str) -> None:
    arguments = {"ask": ("x", "-c", "notes"), "ingest": ("notes", ingested)}
    rest = arguments.get(command, ("notes",) if command == "warm" else ())
    found = run(command, *rest, "--instruction", " ")
    assert "the instruction is blank" in error_of(found, "ConfigurationError")


@pytest.mark.slow
def test_ask_takes_generation_options(run: Run, ingested: Path) -> None:
    shown = ("--no-extractive", "--min-confidence", 0, "--json")
    short = ("ask", QUESTION, "-c", "notes", "--max-tokens", 12, *shown)
    asked = (*short, "--temperature", 2.0, "--seed", 5)
    assert json_of(run(*asked))["text"] == json_of(run(*asked))["text"]
    greedy = json_of(run(*short))["text"]
    first, second = greedy.split()[:2]
    cut = json_of(run(*short, "--stop", f" {second}"))
    assert (cut["text"], cut["finish_reason"]) == (first, "stop")
    bad = ("ask", QUESTION, "-c", "notes", "--temperature", -1, "--json")
    assert "temperature is '-1'" in error_of(run(*bad), "InvalidRequest")


def test_ask_reports_that_nothing_was_found(run: Run, ingested: Path) -> None:
    status, out, _ = run("ask", "xylophone", "-c", "notes")
    assert status == 0
    assert out.splitlines() == [REFUSAL, "no text in this collection fits the question"]
    answer = json_of(run("ask", "xylophone", "-c", "notes", "--json"))
    assert (answer["finish_reason"], answer["text"]) == ("no_documents", REFUSAL)


def test_the_reader_advises_a_model_where_it_refuses(
    run: Run, ingested: Path, tmp_path: Path
) -> None:
    advice = "Give a model: --model"
    assert advice in run("ask", "xylophone", "-c", "notes")[2]
    assert advice not in run("ask", "xylophone", "-c", "notes", "--json")[2]
    example = REPOSITORY / "examples" / "handbook" / "backups.md"
    run("ingest", "example", example)
    assert advice not in run("ask", "xylophone", "-c", "example")[2]


def test_request_errors_are_named(run: Run, ingested: Path) -> None:
    error_of(run("ask", "  ", "-c", "notes", "--json"), "EmptyQuestion")
    message = error_of(run("ask", QUESTION, "-c", "notes", "--mode", "fast"), "ConfigurationError")
    assert "unknown mode 'fast'" in message


def test_commands_that_read_make_no_folder(run: Run, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    for command in (["ask", "?", "-c", "notes"], ["schema", "show", "notes"], ["modules", "ls"]):
        error_of(run(*command, "--state", nowhere), "NoState")
    assert not nowhere.exists()


@pytest.mark.slow
def test_names_with_brackets_are_shown_as_they_are(run: Run, notes: Path) -> None:
    (notes / "[draft] plan.md").write_text("# Plan\n\nThe jetty gets a new handrail.")
    (notes / "[red].bin").write_bytes(b"x")
    assert "[red].bin" in run("ingest", "[b]", notes)[1]
    assert "[draft] plan.md#1" in run("ask", "Which handrail?", "-c", "[b]")[1]
    out = run("modules", "ls")[1]
    assert "[draft] plan.md#1  [b]" in out
    error_of(run("ask", QUESTION, "-c", "[b]", "-k", 0), "InvalidRequest")


@pytest.mark.slow
def test_a_schema_is_added_and_a_prompt_over_it_answered(run: Run, tmp_path: Path) -> None:
    folder = REPOSITORY / "examples" / "pml" / "trip-plan"
    status, out, err = run("schema", "add", folder / "schema.xml", "--placement", "compact")
    assert (status, err) == (0, "")
    assert "states encoded" in out
    prompt = sorted(folder.glob("prompt-*.xml"))[0]
    short = "--max-tokens", "4"
    answer = json_of(run("prompt", prompt, "--json", *short))
    assert (answer["encoded"], run("prompt", prompt, *short)[2]) == (0, "")
    reuse = answer["reuse"]
    assert reuse["cached_tokens"] > reuse["computed_tokens"] > 0
    exact = json_of(run("prompt", prompt, "--mode", "exact", "--json", *short))
    assert exact["reuse"]["cached_tokens"] == 0
    error_of(run("prompt", tmp_path / "absent.xml"), "UnreadableDocument")
    error_of(run("schema", "add", folder / "schema.xml", "--placement", "x"), "ConfigurationError")
    (tmp_path / "other.xml").write_text('<prompt schema="absent"><a/></prompt>')
    error_of(run("prompt", tmp_path / "other.xml"), "UnknownSchema")


@pytest.mark.parametrize(
    "texts",
    [None, pytest.param("zebra", marks=pytest.mark.slow)],
    ids=["notes", "nothing in common"],
)
def test_demo_compares_both_modes_for_every_question(
    run: Run, notes: Path, texts: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ask, "RUNS", 1)
    monkeypatch.setattr(ask, "QUESTIONS", ask.QUESTIONS[:2])
    for path in notes.iterdir() if texts else ():
        path.write_text(texts or "", encoding="utf-8")
    *compared, last = json_of(run("demo", "--handbook", notes, "--json"))
    assert (last["question"], set(last)) == (ask.UNANSWERABLE, ANSWER_KEYS)
    assert last["finish_reason"] in ("no_answer", "no_documents")
    assert [each["question"] for each in compared] == list(ask.QUESTIONS)
    figures = {"first_token_cached", "first_token_exact", "ratio"}
    for each in compared:
        assert set(each) == ANSWER_KEYS | figures
        assert each["mode"] == "rooted"
        assert each["ratio"] == each["first_token_exact"] / each["first_token_cached"]


@pytest.mark.slow
def test_demo_prints_questions_and_ratios(
    run: Run, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ask, "RUNS", 1)
    monkeypatch.setattr(ask, "QUESTIONS", ask.QUESTIONS[:2])
    status, out, _ = run("demo", "--handbook", notes)
    assert status == 0
    assert "3 documents, 3 modules" in out
    assert all(question in out for question in (*ask.QUESTIONS, ask.UNANSWERABLE))


@pytest.mark.slow
def test_demo_shows_another_model_beside_the_reader(
    run: Run, notes: Path, float_reader: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ask, "RUNS", 1)
    monkeypatch.setattr(ask, "QUESTIONS", (QUESTION,))
    arguments = ("demo", "--handbook", notes, "--model", float_reader)
    for each in json_of(run(*arguments, "--json")):
        assert each["other"]["model"] == str(float_reader)
        assert each["other"]["question"] == each["question"]
        assert "confidence" in each["other"]
    status, out, _ = run(*arguments)
    assert status == 0
    words = " ".join(out.split())  # as a terminal breaks it
    assert words.count("(confidence ") == 1, "the other question has no documents"
    assert words.count(f"{float_reader.name} ") == words.count("first token") - 1 == 2
    assert str(float_reader) not in out
