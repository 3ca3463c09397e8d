"""Source marks in free answers: where they are, and which places of documents they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache import GenerationParams, RagCache, SourceDocument
from ragcache.answers.citations import cite
from ragcache.db import ModuleRow
from ragcache.errors import InvalidRequest
from ragcache.models import LoadedModel

FERRY = (
    "# The ferry\n\nThe ferry Odalys crosses the sound at 7:40. A return ticket costs 11 crowns."
)
MILL = "# The mill\n\nThe windmill was built in 1783 by Anselm Prout. It grinds rye on Tuesdays."
MODULES = tuple(
    ModuleRow(number, f"{name}#1", name, name, text, places=((0, 0),))
    for number, (name, text) in enumerate({"ferry": FERRY, "mill": MILL}.items())
)
TEXTS = {module.document: module.text for module in MODULES}
SENTENCES = (
    "The ferry crosses the sound at 7:40.",
    "The windmill was built in 1783 by Anselm Prout.",
    "A return ticket for the ferry costs eleven crowns.",
)
INVENTED = (
    "The head office has the number 0123456789.",
    "A return ticket costs 12 crowns.",
    "A return ticket costs twelve crowns.",
    "Yes!",
)


def quoted(text: str) -> tuple[str, list[str]]:
    """The marked answer, and the document texts that its marks name, in order."""
    marked, spans = cite(text, MODULES)
    assert [span.mark for span in spans] == list(range(1, len(spans) + 1))
    return marked, [TEXTS[span.document][span.start : span.end] for span in spans]


def test_each_sentence_names_the_passage_that_says_it() -> None:
    marked, places = quoted("The ticket costs 11 crowns. The mill grinds rye on Tuesdays!")
    assert marked == "The ticket costs 11 crowns [1]. The mill grinds rye on Tuesdays [2]!"
    assert places == ["A return ticket costs 11 crowns.", "It grinds rye on Tuesdays."]


def test_a_passage_has_one_mark_however_often_it_is_cited() -> None:
    marked, places = quoted("It costs 11 crowns. A return ticket is 11 crowns.")
    assert marked == "It costs 11 crowns [1]. A return ticket is 11 crowns [1]."
    assert len(places) == 1


def test_a_sentence_from_two_passages_has_two_marks() -> None:
    text = "The ferry Odalys crosses the sound, and Anselm Prout built the windmill in 1783."
    marked, places = quoted(text)
    assert marked.endswith("in 1783 [1][2].")
    assert {"Odalys" in place for place in places} == {True, False}


@pytest.mark.parametrize("text", INVENTED)
def test_what_no_document_says_has_no_mark(text: str) -> None:
    assert quoted(text) == (text, [])


def test_marks_that_the_model_wrote_are_dropped() -> None:
    marked, places = quoted("The ticket costs 11 crowns [7]. It is cheap [1, 2].")
    assert marked == "The ticket costs 11 crowns [1]. It is cheap."
    assert len(places) == 1


def test_chinese_sentences_are_cited() -> None:
    module = ModuleRow(1, "a#1", "a", "a", "茶厂建于1953年。厂长是沈玉兰。", places=((0, 0),))
    marked, [span] = cite("厂长是沈玉兰。", [module])
    assert marked == "厂长是沈玉兰 [1]。"
    assert module.text[span.start : span.end] == "厂长是沈玉兰。"


@given(st.lists(st.sampled_from((*SENTENCES, *INVENTED, "See [3].", "[1]")), max_size=6))
def test_no_mark_is_without_a_source(sentences: list[str]) -> None:
    marked, places = quoted(" ".join(sentences))
    named = {int(number) for number in re.findall(r"\[(\d+)\]", marked)}
    assert named == set(range(1, len(places) + 1))
    assert all(place in FERRY + MILL for place in places)
    assert len(re.findall(r"\[\d+\]", marked)) >= sum(each in SENTENCES for each in sentences)


CITED = GenerationParams(citations=True)


def test_answers_and_streams_of_a_model_cite_alike(
    tiny_reader: LoadedModel, tmp_path: Path
) -> None:
    with RagCache.open(tmp_path, tiny_reader, max_tokens=6, embedding="none") as rag:
        rag.ingest("plain", [SourceDocument("ferry", FERRY)])
        plain = rag.ask("What does a ticket cost?", collection="plain")
        said = plain.text or "crowns"
        documents = [SourceDocument("ferry", FERRY), SourceDocument("said", f"{said}.")]
        rag.ingest("notes", documents)
        asked = {"collection": "notes", "generation": CITED}
        answer = rag.ask("What does a ticket cost?", **asked)
        assert {int(each) for each in re.findall(r"\[(\d+)\]", answer.text)} == {
            span.mark for span in answer.spans
        }
        with rag.stream("What does a ticket cost?", **asked) as stream:
            assert "".join(stream).strip() == answer.text
        assert stream.answer.spans == answer.spans
        chat = rag.chat([{"role": "user", "content": FERRY}], generation=CITED)
        assert chat.spans == () or all(span.mark for span in chat.spans)
        rag.schemas.add('<schema name="s"><module name="m">The key is red.</module></schema>')
        with pytest.raises(InvalidRequest, match="citations name documents"):
            rag.prompt('<prompt schema="s"><m/>Which color?</prompt>', generation=CITED)


@pytest.mark.parametrize("other", [{"extractive": True}, {"regex": "a+"}])
def test_citations_are_in_free_answers_alone(other: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="marks in a free answer"):
        GenerationParams(citations=True, **other)
