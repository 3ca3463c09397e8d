"""Questions asked of the notes, mode by mode."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ragcache import RagCache
from ragcache.errors import ConfigurationError
from ragcache.evaluation import (
    Evaluation,
    EvaluationReport,
    Question,
    compare_reports,
    evaluate_modes,
)
from ragcache.models import LoadedModel
from tests.conftest import write_notes


@pytest.fixture(scope="module")
def rag(tmp_path_factory: pytest.TempPathFactory, tiny_reader: LoadedModel) -> Iterator[RagCache]:
    state = tmp_path_factory.mktemp("evaluated")
    with RagCache.open(
        state / "state", tiny_reader, max_tokens=6, embedding="none", force_modes=True
    ) as opened:
        opened.ingest("notes", [write_notes(state / "notes")])
        yield opened


ASKED = [
    Question("1", "Where does the spare key hang?", ("unlikely answer",), "keys.md"),
    Question("2", "Who serviced the engine of the Pipit?", ("unlikely answer",), "boats.md"),
    Question("3", "How many days of leave are there?", ("unlikely answer",), "nowhere.md"),
]


@pytest.fixture(scope="module")
def evaluation(rag: RagCache) -> Evaluation:
    given = rag.ask(ASKED[0].question, collection="notes", k=1, mode="exact").text
    known = [replace(ASKED[0], answers=(given,)), *ASKED[1:]]
    seen: list[tuple[str, int, int]] = []
    found = evaluate_modes(
        rag, "notes", known, ["rooted", "exact", "isolated"], k=1,
        setting={"questions": "<notes> & more"}, progress=lambda *at: seen.append(at),
    )  # fmt: skip
    assert seen[:3] == [("exact", 1, 3), ("exact", 2, 3), ("exact", 3, 3)]
    assert len(seen) == 9
    return found


@pytest.mark.slow
def test_answers_to_the_notes_are_marked(evaluation: Evaluation) -> None:
    assert [report.mode for report in evaluation.reports] == ["rooted", "exact", "isolated"]
    for report in evaluation.reports:
        first = report.marked[0]
        assert report.questions == len(report.marked) == 3
        assert [m.retrieved for m in report.marked] == [True, True, False]
        for name in ("exact_match", "f1", "rouge_l", "retrieved", "computed_tokens"):
            expected = sum(getattr(m, name) for m in report.marked) / 3
            assert getattr(report, name) == pytest.approx(expected)
        assert 0 <= report.intervals["f1"].low <= report.f1 <= report.intervals["f1"].high
        assert report.first_token_seconds in [m.first_token_seconds for m in report.marked]
        assert first.prompt_tokens == first.cached_tokens + first.computed_tokens
    rooted, exact, _ = evaluation.reports
    assert exact.marked[0].exact_match
    assert exact.marked[0].f1 == exact.marked[0].rouge_l == 1.0
    assert rooted.marked[0].given == exact.marked[0].given


def test_no_states_are_encoded_within_a_measured_question(evaluation: Evaluation) -> None:
    """Isolated states are there only once a question has asked for them."""
    _, exact, isolated = evaluation.reports
    assert exact.cached_share == 0
    assert isolated.cached_share > 0.5
    assert isolated.computed_tokens < exact.computed_tokens / 2


def test_first_tokens_are_compared_with_mode_exact(rag: RagCache, evaluation: Evaluation) -> None:
    rooted, exact, isolated = evaluation.reports
    assert (exact.kl_divergence, exact.agreement) == (0.0, 1.0)
    assert rooted.kl_divergence is not None
    assert isolated.kl_divergence is not None
    assert 0 <= rooted.kl_divergence < 1e-5 < isolated.kl_divergence
    [alone] = evaluate_modes(rag, "notes", ASKED[:1], ["rooted"], k=1).reports
    assert alone.kl_divergence is alone.agreement is None


@pytest.mark.slow
def test_questions_are_asked_over_their_own_documents(tmp_path: Path, reader: LoadedModel) -> None:
    from ragcache import SourceDocument

    documents = [
        SourceDocument(name, f"The spare key hangs in the {name} cupboard.", metadata={
            "evaluated": name}) for name in ("red", "blue")
    ]  # fmt: skip
    asked = [
        Question(name, "In which cupboard does the spare key hang?", (), "blue", own=(name,))
        for name in ("blue", "red")
    ]  # fmt: skip
    with RagCache.open(tmp_path, reader, max_tokens=6, embedding="none", force_modes=True) as rag:
        rag.ingest("keys", documents)
        found = evaluate_modes(rag, "keys", asked, ["rooted"])
        chat = evaluate_modes(rag, "keys", asked, ["rooted"], through="chat")
    for report in (*found.reports, *chat.reports):
        assert [m.retrieved for m in report.marked] == [True, False]
        assert report.marked[0].given != report.marked[1].given


@pytest.mark.slow
def test_questions_through_a_chat_paste_what_was_retrieved(rag: RagCache) -> None:
    modes = ["rooted", "primed:400", "exact"]
    found = evaluate_modes(rag, "notes", ASKED[:2], modes, k=2, through="chat")
    rooted, primed, exact = found.reports
    assert [report.mode for report in found.reports] == [f"chat:{mode}" for mode in modes]
    assert rooted.computed_tokens < exact.computed_tokens
    assert rooted.retrieved == exact.retrieved == 1, "sources were recognized"
    assert [m.given for m in primed.marked] == [m.given for m in exact.marked]
    assert primed.agreement == 1.0
    assert primed.kl_divergence == pytest.approx(0, abs=1e-5)
    assert {each.reference for each in found.comparisons} == {"chat:exact"}


def test_modes_are_compared_over_the_same_questions(evaluation: Evaluation) -> None:
    exact = evaluation.reports[1]
    found = {(each.mode, each.mark): each for each in evaluation.comparisons}
    assert len(found) == 6
    for (mode, mark), each in found.items():
        mean = next(r for r in evaluation.reports if r.mode == mode)
        assert each.reference == "exact"
        assert each.difference == pytest.approx(getattr(mean, mark) - getattr(exact, mark))
    poor = tuple(replace(m, exact_match=False, f1=0.0, rouge_l=0.0) for m in exact.marked)
    good = tuple(replace(m, exact_match=True, f1=1.0, rouge_l=1.0) for m in exact.marked)
    worse, better = (
        EvaluationReport.of(mode, marked * 4) for mode, marked in [("x", poor), ("y", good)]
    )
    gains = compare_reports([worse, better])
    assert {(each.mode, each.reference, each.difference) for each in gains} == {("y", "x", 1.0)}
    assert all(each.p_value < 0.001 for each in gains)


def test_an_evaluation_is_a_table_in_notebooks(evaluation: Evaluation) -> None:
    rows = evaluation._repr_html_().split("<tr>")[2:]
    assert [row.split("</td>")[0] for row in rows] == ["<td>rooted", "<td>exact", "<td>isolated"]
    assert f"<td>{evaluation.reports[1].exact_match:.1%}</td>" in rows[1]
    assert "<td>100.0%</td>" in rows[1], "exact agrees with itself"


def test_an_evaluation_is_plain_json(evaluation: Evaluation) -> None:
    plain = json.loads(json.dumps(evaluation.to_dict()))
    assert plain["setting"] == {"questions": "<notes> & more"}
    assert plain["reports"][0]["marked"][0]["question"]["id"] == "1"
    assert set(plain["reports"][0]["intervals"]["f1"]) == {"low", "high"}


def test_an_evaluation_needs_questions_and_modes(rag: RagCache) -> None:
    with pytest.raises(ConfigurationError, match="no questions"):
        evaluate_modes(rag, "notes", [], ["rooted"])
    with pytest.raises(ConfigurationError, match="no modes"):
        evaluate_modes(rag, "notes", ASKED, [])
