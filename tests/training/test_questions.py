"""Questions made from sentences by rules."""

from __future__ import annotations

import random

import pytest
from questions import chinese_questions, english_questions


@pytest.mark.parametrize(
    ("sentence", "question", "answer"),
    [
        (
            "The lighthouse was built by Anna Quill in the winter months.",
            "Who was the lighthouse built in the winter months by?",
            "Anna Quill",
        ),
        ("Denmark granted home rule in 1874.", "When did Denmark grant home rule?", "1874"),
        (
            "The committee must publish the annual report within 30 days.",
            "Within how many days must the committee publish the annual report?",
            "30",
        ),
        (
            "The committee must publish the annual report.",
            "Who must publish the annual report?",
            "The committee",
        ),
        ("By 1960, the British allowed autonomy.", "When did the British allow autonomy?", "1960"),
        (
            "The old ferry carried eleven passengers to the island.",
            "How many passengers did the old ferry carry to the island?",
            "eleven",
        ),
    ],
)
def test_english_sentences_are_turned_round(sentence: str, question: str, answer: str) -> None:
    asked = {
        pair for seed in range(40) for pair in english_questions(sentence, random.Random(seed))
    }
    assert (question, answer) in asked


@pytest.mark.parametrize(
    ("sentence", "question", "answer"),
    [
        ("本法自2021年1月1日起施行。", "本法自何时起施行？", "2021年1月1日"),
        ("用人单位应当在三十日内支付工资。", "用人单位应当在多少日内支付工资？", "三十日"),
        ("该条例由国务院制定。", "该条例由谁制定？", "国务院"),
        ("个人信息，是指与自然人有关的信息。", "什么是个人信息？", "与自然人有关的信息"),
    ],
)
def test_chinese_sentences_keep_their_order(sentence: str, question: str, answer: str) -> None:
    asked = {
        pair for seed in range(60) for pair in chinese_questions(sentence, random.Random(seed))
    }
    assert (question, answer) in asked


@pytest.mark.parametrize(
    "sentence", ["He was there in 1920.", "if x = 3; then {y} was built in 1920.", "Short one."]
)
def test_sentences_without_a_clear_subject_give_no_questions(sentence: str) -> None:
    assert english_questions(sentence, random.Random(1)) == []


def test_answers_are_words_of_the_sentence_alone() -> None:
    sentence = (
        "The harbour master was appointed in March 1921 by Ann Lee and kept seven boats in Oban."
    )
    pairs = english_questions(sentence, random.Random(0))
    assert len(pairs) >= 3
    for question, answer in pairs:
        assert answer in sentence
        assert answer not in question
