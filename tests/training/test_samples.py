"""Training sequences: answers are the documents' own tokens, or the one that says: no answer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from corpus import lose_sentence
from registers import draw_entries
from samples import Builder, only_naming, answer_tokens
from special_tokens import NO_ANSWER
from templates import Filled
from tokenizer import train


@pytest.fixture
def builder(corpus: Any, tokenizer: Any) -> Any:
    return Builder(corpus, tokenizer, 1024)


def answers(sequence: Any) -> Iterator[list[int]]:
    for block in sorted(set(sequence.blocks[sequence.kinds == 3].tolist())):
        chosen = (sequence.blocks == block) & (sequence.kinds == 3)
        yield sequence.tokens[chosen].tolist()[:-1]


def contains(row: list[int], run: list[int]) -> bool:
    return any(row[i : i + len(run)] == run for i in range(len(row) - len(run) + 1))


def test_answers_are_runs_of_the_context_or_the_no_answer_token(builder: Any) -> None:
    nothing = [builder.tokenizer.token_to_id(NO_ANSWER)]
    rng = random.Random(0)
    found = vain = 0
    for _ in range(60):
        sequence = builder.training(rng)
        context = sequence.tokens[sequence.kinds == 1].tolist()
        for answer in answers(sequence):
            if answer == nothing:
                vain += 1
            else:
                assert contains(context, answer)
                found += 1
    assert found > 100
    assert 0.03 < vain / (vain + found) < 0.4


def test_questions_start_where_the_context_ends(builder: Any) -> None:
    sequence = builder.training(random.Random(1))
    context = int((sequence.blocks < 64).sum() - (sequence.blocks < 0).sum())
    firsts = {int(b): i for i, b in reversed(list(enumerate(sequence.blocks))) if b >= 64}
    assert firsts
    assert all(sequence.positions[i] == context for i in firsts.values())


def test_near_copies_are_asked_by_what_tells_them_apart() -> None:
    rng = random.Random(5)
    for _ in range(30):
        entries = only_naming(draw_entries(rng, 5))
        for entry in entries:
            others = [e for e in entries if e is not entry]
            assert all(answer in entry.text for _, answer in entry.questions)
            assert not any(
                q == p for q, _ in entry.questions for e in others for p, _ in e.questions
            )
            assert len(entry.questions) >= 1


def test_a_lost_sentence_makes_its_question_unanswerable(passages: list[Any]) -> None:
    passage = passages[0]
    section = lose_sentence(Filled("", passage.text, passage.questions), random.Random(0))
    (question,) = section.unanswerable
    answer = dict(passage.questions)[question]
    assert answer not in section.text
    assert question not in dict(section.questions)


def test_any_run_of_chinese_or_digits_can_be_an_answer(
    tokenizer: Any,
) -> None:
    texts = ["消防演习在三月十四日上午九点举行。", "北京市图书馆成立于1909年。"] * 3
    chinese = train(iter(texts), vocabulary=400)
    text = texts[1]
    for answer in ("图书馆", "京市", "190"):
        run = answer_tokens(chinese.encode(text), text, answer, 384)
        assert chinese.decode(run) == answer


def test_an_answer_inside_a_word_is_no_run_of_tokens(tokenizer: Any) -> None:
    text = "The harbour office was opened."
    encoded = tokenizer.encode(text)
    assert answer_tokens(encoded, text, "arbou", 384) == []
    assert (
        tokenizer.decode(answer_tokens(encoded, text, "harbour office", 384)) == " harbour office"
    )
