"""Queries of messages that continue a conversation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ragcache import RagCache, SourceDocument
from ragcache.models import LoadedModel
from ragcache.retrieval.follow_ups import search_query

ALARM = "Who do I ring if the alarm of the cold store goes off?"


def said(*texts: str) -> list[dict[str, Any]]:
    """Messages of the user, each answered."""
    messages = []
    for text in texts:
        messages += [
            {"role": "user", "content": text},
            {"role": "assistant", "content": "Yuki Tanabe"},
        ]
    return messages[:-1]


def test_a_first_message_is_the_query() -> None:
    assert search_query([{"role": "system", "content": "Be brief."}, *said(ALARM)]) == ALARM


def test_a_short_message_is_joined_with_the_question_before() -> None:
    assert search_query(said(ALARM, "And if she is away?")) == f"{ALARM}\nAnd if she is away?"


def test_questions_are_joined_until_they_name_their_subject() -> None:
    query = search_query(said("The pool car", ALARM, "And then?", "Why?"))
    assert query == f"{ALARM}\nAnd then?\nWhy?"


def test_a_message_with_its_own_words_outweighs_earlier_ones() -> None:
    printer = "Which printer prints colour pages?"
    assert search_query(said(ALARM, printer)).count(printer) == 2
    assert search_query(said("And you?", printer)) == printer
    assert len(search_query(said(ALARM * 100, "Why?"))) < 600


def test_a_chat_finds_what_its_last_message_leaves_out(
    tmp_path: Path, tiny_reader: LoadedModel
) -> None:
    store = SourceDocument("store", "The alarm of the cold store: ring Yuki, or else Desmond.")
    away = SourceDocument("away", "Everybody has a month of paid holiday a year.")
    with RagCache.open(tmp_path / "state", tiny_reader, max_tokens=4) as rag:
        rag.ingest("notes", [store, away])
        answer = rag.chat(said(ALARM, "And if she is away?"), collection="notes", k=1)
        assert [source.document for source in answer.sources] == ["store"]
        changed = rag.chat(said(ALARM, "How long a paid holiday a year?"), collection="notes", k=1)
        assert [source.document for source in changed.sources] == ["away"]
        assert answer.question == "And if she is away?"


def test_notes_of_programs_are_no_questions() -> None:
    note = "<environment_context>\n  <cwd>/srv</cwd>\n</environment_context>"
    assert search_query(said(note, ALARM)) == ALARM
    assert search_query(said(f"{note}\n\n<reminder>Be brief.</reminder>\n{ALARM}")) == ALARM
    assert search_query(said(note)) == note
    assert search_query(said(f"{ALARM} <tide> rises")) == f"{ALARM} <tide> rises"


def test_the_reader_gets_the_question_without_notes(
    tmp_path: Path, quick_reader: LoadedModel
) -> None:
    with RagCache.open(tmp_path, quick_reader, embedding="none") as rag:
        rag.ingest("boats", [SourceDocument("pipit", "The boat Pipit is at the north quay.")])
        asked = [{"role": "user", "content": "Where is the boat?"}]
        noted = [
            {"role": "user", "content": "<reminder>Be brief.</reminder>\n\nWhere is the boat?"}
        ]
        plain = rag.chat(asked, collection="boats")
        assert rag.chat(noted, collection="boats").reuse.prompt_tokens == plain.reuse.prompt_tokens
