"""`ragcache chat`: a conversation over a collection."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from ragcache import GenerationParams, RagCache
from ragcache.models import LoadedModel
from ragcache.params import REFUSAL
from ragcache_api.cli.chat import LocalTalk
from tests.api.cli.conftest import QUESTION, Run


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_messages_are_answered_from_what_they_retrieve(
    run: Run, ingested: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    type_lines(monkeypatch, QUESTION, "How many days of leave are there?", "", "never read")
    shown = ("--max-tokens", 4, "--min-confidence", 0)
    status, out, err = run("chat", "-c", "notes", "-k", 1, *shown)
    assert (status, err) == (0, "")
    assert [name in out for name in ("keys.md#1", "leave.md#1", "boats.md#1")] == [
        True,
        True,
        False,
    ]
    assert out.count("mode recognized:rooted · prompt") == 2


def test_a_chat_advises_a_model_once(
    run: Run, ingested: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    type_lines(monkeypatch, "Hello!", "xylophone?")
    _, out, err = run("chat", "-c", "notes")
    assert out.count(REFUSAL) == 2
    assert err.count("Give a model: --model") == 1


@pytest.mark.slow
def test_states_that_are_used_twice_are_kept_and_others_said(
    run: Run, ingested: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = ("--instruction", "Reply in one word.")
    shown = ("--max-tokens", 2, "--min-confidence", 0)
    short = ("chat", "-c", "notes", "-k", 1, *shown, *kind)
    type_lines(monkeypatch, QUESTION)
    notice = run(*short)[2]
    assert notice.startswith("2 states were encoded for this and not kept; ")
    remedy = " ".join(notice.split())  # as a terminal breaks it
    assert "`ragcache warm notes --instruction 'Reply in one word.'` keeps those" in remedy
    type_lines(monkeypatch, QUESTION, QUESTION)
    assert run(*short)[2] == ""
    type_lines(monkeypatch, QUESTION)
    assert run(*short)[2] == ""
    type_lines(monkeypatch, QUESTION)
    assert "`ragcache warm notes --mode isolated`" in run(*short[:-2], "--mode", "isolated")[2]


@pytest.mark.slow
def test_an_error_leaves_the_conversation(
    run: Run, ingested: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    type_lines(monkeypatch, "word " * 9000, QUESTION)
    status, out, err = run("chat", "-c", "notes", "-k", 1, "--max-tokens", 4)
    assert status == 0
    assert err.startswith("PromptTooLong: ")
    assert "keys.md#1" in out


@pytest.mark.parametrize(  # beyond the window, and too near to its end
    "words", [pytest.param(9000, marks=pytest.mark.slow), 4030]
)
def test_the_oldest_question_leaves_a_full_window(
    ingested: Path, quick_reader: LoadedModel, capsys: pytest.CaptureFixture[str], words: int
) -> None:
    with RagCache.open(ingested, quick_reader) as rag:
        talk = LocalTalk(rag, None, {}, "rooted", GenerationParams(max_tokens=200, stop=["."]))
        long = {"role": "user", "content": "word " * words}
        talk.said = [long, {"role": "assistant", "content": "a"}]
        talk.say("Hello")
    assert "the oldest question is forgotten" in capsys.readouterr().err
    assert talk.said[0] == {"role": "user", "content": "Hello"}
