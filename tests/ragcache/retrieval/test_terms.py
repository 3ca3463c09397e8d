"""Words as BM25 counts them."""

from __future__ import annotations

import pytest

from ragcache.retrieval.terms import STOP_WORDS, characters, lone_characters, terms


def test_words_are_stemmed_so_that_their_forms_meet() -> None:
    assert terms("requests") == terms("Requested") == terms("REQUEST")
    assert terms("mooring boats") == terms("Moored: boat!")


def test_words_of_the_question_itself_do_not_count() -> None:
    assert terms("How many of the boats are there?") == terms("boats")
    assert terms(" ".join(STOP_WORDS)) == []


def test_numbers_and_letters_count_and_punctuation_does_not() -> None:
    assert terms("26 days, 3.5%; B-17_x") == ["26", "day", "3", "5", "b", "17", "x"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("北京大学", ["北京", "京大", "大学"]),
        ("船", ["船"]),
        ("すし。", ["すし"]),
        ("한국어", ["한국", "국어"]),
    ],
)
def test_writing_without_spaces_counts_as_pairs_of_characters(
    text: str, expected: list[str]
) -> None:
    assert terms(text) == expected


@pytest.mark.parametrize("text", ["", "  \n", "?!…", "\0"])
def test_a_text_without_words_has_no_terms(text: str) -> None:
    assert terms(text) == []


def test_characters_are_those_of_writing_without_spaces() -> None:
    assert characters("A4纸 (すし), 한국!") == ["纸", "す", "し", "한", "국"]
    assert characters("boats") == []


def test_a_lone_character_has_no_neighbour() -> None:
    assert lone_characters("船 北京 a 7 猫?") == ["船", "猫"]
