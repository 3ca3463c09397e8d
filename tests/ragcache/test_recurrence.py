"""Recurring texts are found where they recur, from edge to edge, in bounded time and memory."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache import recurrence
from ragcache.recurrence import (
    GRAM,
    MIN_CHARACTERS,
    MOST_SPANS,
    RecurrenceTable,
    Span,
    gaps,
    natural_spans,
    pieces,
)

WORDS = "leave manager office request policy travel expense report team budget days letter".split()


def passage(seed: int, sentences: int = 12) -> str:
    rng = random.Random(seed)
    every = [f"{' '.join(rng.choices(WORDS, k=9))} {rng.random()}." for _ in range(sentences)]
    return "\n\n".join(" ".join(every[at : at + 4]) for at in range(0, sentences, 4))


def recurring(table: RecurrenceTable, prompt: str) -> list[str]:
    return [
        prompt[begin:end]
        for span in table.observe(prompt)
        for begin, end in natural_spans(prompt, span)
    ]


OPEN_WEBUI = '<source id="{n}" name="{name}">{text}</source>'
PLAIN = "{text}\n"
FENCED = "Contents of {name}.md:\n```\n{text}\n```\n"


def prompt_of(template: str, seeds: list[int], question: str) -> str:
    parts = [
        template.format(n=n, name=f"doc{seed}", text=passage(seed))
        for n, seed in enumerate(seeds, 1)
    ]
    return "Answer from these texts.\n" + "\n".join(parts) + f"\nQuestion: {question}"


@pytest.mark.parametrize("template", [OPEN_WEBUI, PLAIN, FENCED])
def test_a_text_in_another_place_is_found_from_edge_to_edge(template: str) -> None:
    table = RecurrenceTable()
    assert recurring(table, prompt_of(template, [1, 2, 3], "How many days?")) == []
    found = recurring(table, prompt_of(template, [4, 2, 5, 1], "Who decides?"))
    assert len(found) == 2
    for text, seed in zip(found, (2, 1), strict=True):
        assert passage(seed) in text
        assert len(text) < len(passage(seed)) + 40, "the lines around it may recur with it"


def test_what_two_prompts_begin_with_does_not_recur() -> None:
    table = RecurrenceTable()
    first = prompt_of(PLAIN, [1, 2, 3], "How many days?")
    table.observe(first)
    assert table.observe(f"{first}\nThirty.\nAnd who decides?") == []


def test_overlapping_passages_share_what_they_have_in_common() -> None:
    table, whole = RecurrenceTable(), passage(1, 24)
    paragraphs = whole.split("\n\n")
    table.observe("A.\n" + "\n\n".join(paragraphs[:4]) + "\nWhat?")
    later = "Another beginning.\n" + "\n\n".join(paragraphs[2:]) + "\nWhich?"
    assert recurring(table, later) == ["\n\n".join(paragraphs[2:4])]


@given(st.integers(0, 2**32), st.integers(0, 400), st.integers(0, 400))
def test_every_text_of_the_least_length_is_found(seed: int, before: int, after: int) -> None:
    rng = random.Random(seed)
    noise = lambda size: "".join(rng.choices("abcdefghijklmnop ", k=size))  # noqa: E731
    text = noise(3 * MIN_CHARACTERS)
    table = RecurrenceTable()
    table.observe(noise(before) + text + noise(100))
    prompt = noise(before + 1 + after) + text + noise(after)
    begin = before + 1 + after
    found = table.observe(prompt)
    assert len(found) == 1
    assert abs(found[0].begin - begin) <= 64
    assert abs(found[0].end - begin - len(text)) <= 64


@pytest.mark.parametrize(
    "prompt",
    ["a" * 40_000, "\n" * 40_000, "<\n>" * 13_000, "".join(f"{n % 7}abc" for n in range(10_000))],
    ids=["one character", "all edges", "all tags", "a short period"],
)
def test_a_hostile_prompt_leaves_few_spans_and_little_memory(prompt: str) -> None:
    table = RecurrenceTable()
    before = table.nbytes
    for prefix in ("", "x", "yy" * 60):
        assert len(table.observe(prefix + prompt)) <= MOST_SPANS
    assert table.nbytes <= 4 * before


def test_the_table_grows_and_then_forgets() -> None:
    table = RecurrenceTable()
    before = table.nbytes
    first = prompt_of(PLAIN, [0], "First?")
    table.observe(first)
    for seed in range(1, 2000):
        table.observe(prompt_of(PLAIN, [seed], f"Question {seed}?"))
    assert before < table.nbytes <= 64 * 2**20
    later = f"Elsewhere.\n{passage(0)}\nAnd now?"
    assert recurring(table, later) == [passage(0)], "growing forgets nothing"


def test_pieces_join_to_the_text_and_are_cut_at_edges() -> None:
    text = passage(3, 40)
    cut = list(pieces(text, 60, lambda part: len(part.split())))
    assert "".join(cut) == text
    assert all(len(part.split()) <= 60 for part in cut)
    assert all(part.endswith("\n\n") for part in cut[:-1])
    assert list(pieces("word", 0, len)) == ["wo"[:1], "ord"[:1], "rd"[:1], "d"]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=5))
def test_gaps_and_covered_parts_make_the_whole(covered: list[tuple[int, int]]) -> None:
    covered = sorted((min(each), max(each)) for each in covered)
    inside = {at for begin, end in covered for at in range(begin, end)}
    between = {at for begin, end in gaps(50, covered) for at in range(begin, end)}
    assert between == set(range(50)) - inside
    assert all(isinstance(each, Span) for each in gaps(50, covered))


def test_a_text_behind_another_number_keeps_its_first_sentence() -> None:
    table = RecurrenceTable()
    for number in (1, 2):
        other = passage(number + 10)
        prompt = f"Turn {number}.\n[{number}] {passage(1)}\n[{number + 2}] {other}"
        found = recurring(table, prompt)
    assert found == [passage(1)]


def test_a_number_that_changes_within_a_text_recurs_in_no_span() -> None:
    table = RecurrenceTable()
    for seed, time in ((1, "07:31"), (2, "09:48")):
        text = f"{passage(3)}\n\nThe time is {time} today.\n\n{passage(4)}"
        found = recurring(table, f"{passage(seed)}\n{text}\n{passage(seed + 10)}")
    assert found == [passage(3), passage(4)]


def test_texts_that_begin_alike_keep_their_first_sentences() -> None:
    table = RecurrenceTable()
    one, two, three = (f"The same words begin. {passage(seed)}" for seed in range(3))
    table.observe(f"Some.\n\n{one}\n\n{two}\n\nWho?")
    assert recurring(table, f"Others.\n\n{two}\n\n{three}\n\n{one}\n\nWhy?") == [two, one]


def test_every_fingerprint_of_a_prompt_is_kept() -> None:
    for seed in range(20):
        table, text = RecurrenceTable(), passage(seed, 120)
        table.observe(text)
        [span] = table.observe(f"Another beginning.\n{text}")
        assert span == (len("Another beginning.\n"), len("Another beginning.\n") + len(text))


@given(
    st.text(alphabet="ab <>\n.:/source\ue000😀", min_size=1, max_size=40),
    st.integers(1, 20_000),
    st.text(max_size=100),
)
def test_a_repetitive_prompt_costs_a_bounded_time(unit: str, size: int, other: str) -> None:
    table = RecurrenceTable()
    prompt = (unit * size)[:size]
    for before in ("", other, f"{other}\n{unit}"):
        text = before + prompt + other
        spans = table.observe(text)
        assert len(spans) <= MOST_SPANS
        assert all(0 <= begin < end <= len(text) for begin, end in spans)
        assert sum(end - begin for begin, end in spans) <= len(text) + 64 * MOST_SPANS
        for span in spans:
            within = list(natural_spans(text, span))
            assert all(span.begin <= each.begin < each.end <= span.end for each in within)
            assert all(one.end <= two.begin for one, two in pairwise(within))
    assert table.nbytes <= 2**20


@contextmanager
def counted_work() -> Iterator[Counter[str]]:
    """Counts the characters that each step of detection looks at."""
    work: Counter[str] = Counter()

    def counting(step: str, size: Callable[..., int], function: Any) -> Any:
        def counted(*given: Any) -> Any:
            work[step] += size(*given)
            return function(*given)

        return counted

    sizes: dict[str, Callable[..., int]] = {
        "window_hashes": lambda text, *_: len(text),
        "_within_edges": lambda _, begin, end: end - begin,
        "_middle_edge": len,
    }
    seams = counting("seams", lambda _, begin, end: end - begin, recurrence._SEAM.finditer)
    with pytest.MonkeyPatch.context() as patch:
        for step, size in sizes.items():
            patch.setattr(recurrence, step, counting(step, size, getattr(recurrence, step)))
        patch.setattr(recurrence, "_SEAM", SimpleNamespace(finditer=seams))
        yield work


def check_work(table: RecurrenceTable, prompt: str) -> int:
    """Detects in a prompt, as a service does, within bounds of its work; returns its spans."""
    with counted_work() as work:
        spans = table.observe(prompt)
        for text in (prompt[a:b] for span in spans for a, b in natural_spans(prompt, span)):
            for _ in pieces(text, 96, lambda part: work.update(tokens=len(part)) or len(part) // 4):
                pass
    looked_at = len(prompt) + MOST_SPANS * GRAM
    levels = 2 + math.log(max(2, len(prompt)), 4 / 3)  # a cut leaves at most three quarters
    assert work["window_hashes"] <= len(prompt)
    assert work["_within_edges"] <= looked_at
    assert work["seams"] <= looked_at + 2 * MOST_SPANS * recurrence._LONGEST_SEAM
    assert work["_middle_edge"] <= levels * looked_at
    assert work["tokens"] <= levels * looked_at
    return len(spans)


def near_equal(number: int) -> str:
    return (
        f"Clause {number:06d} of the lease says that the tenant keeps the yard clean, and that "
        f"the keys are returned on day {number % 31} of the month. Whoever loses a key pays for "
        f"another lock and for {number % 7} copies of the new key, within a week of the loss.\n"
    )


@pytest.mark.slow
def test_a_hundred_thousand_near_equal_spans_cost_bounded_work() -> None:
    table, rng = RecurrenceTable(), random.Random(3)
    numbers = list(range(100_000))
    for begin in range(0, len(numbers), 2000):
        check_work(table, "".join(map(near_equal, numbers[begin : begin + 2000])))
    assert table.nbytes <= 64 * 2**20
    for _ in range(3):
        hostile = "".join(map(near_equal, rng.sample(numbers, 2000)))
        assert 0 < check_work(table, hostile) <= MOST_SPANS
    assert table.nbytes <= 64 * 2**20


@given(
    st.text(alphabet="ab <>\n.:/source\ue000", min_size=1, max_size=40),
    st.integers(1, 20_000),
    st.lists(st.sampled_from(("<source>", "</document>", "\n\n", ". ", "\ue000", "x")), max_size=9),
)
def test_hostile_prompts_cost_bounded_work(unit: str, size: int, between: list[str]) -> None:
    table = RecurrenceTable()
    prompt = (unit * size)[:size]
    for before in ("", *between):
        check_work(table, before + prompt + before.join(between))
        check_work(table, before.join([prompt[:200]] * 40))
