"""`ragcache eval`: the quality of answers, mode by mode, beside the tokens that were computed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragcache.config import DEFAULT_K
from ragcache_api.cli import console as ui

if TYPE_CHECKING:
    from ragcache.evaluation import EvaluationReport


def evaluate_command(
    collection: Annotated[str, typer.Argument(help="The collection to ask.")],
    questions: Annotated[Path, typer.Argument(help="Questions with answers, JSON lines.")],
    state: ui.StateOption = ui.DEFAULT_STATE,
    modes: Annotated[
        str, typer.Option("--modes", "--mode", help="Modes to compare, with commas.")
    ] = "rooted,exact",
    k: ui.KOption = DEFAULT_K,
    model: ui.ModelOption = None,
    embedding: ui.EmbeddingOption = None,
    through: Annotated[
        str, typer.Option("--through", help="`ask`, or `chat` with the modules pasted into it.")
    ] = "ask",
    wrong: Annotated[bool, typer.Option("--wrong", help="List what was answered wrongly.")] = False,
    as_json: ui.JsonOption = False,
) -> None:
    """Mark the answers to known questions, mode by mode."""
    from ragcache.errors import ConfigurationError
    from ragcache.evaluation import evaluate, load_questions

    if through not in ("ask", "chat"):
        raise ConfigurationError(f"--through is {through!r}; give ask or chat")
    expected = load_questions(questions)
    reports = []
    with ui.open_existing_rag(state, model, embedding) as rag:
        for mode in modes.split(","):
            options: dict[str, Any] = {"mode": mode.strip(), "k": k, "through": through}
            with ui.progress_bar(f"asking, {mode}") as progress:
                report = evaluate(rag, collection, expected, progress=progress, **options)
            reports.append(report)
    if as_json:
        ui.print_json(reports)
        return
    _print_reports(reports)
    for marked in reports[0].marked if wrong else ():
        if not marked.exact_match:
            asked, right = marked.question, marked.question.answers[0]
            line = f"{asked.id} {asked.question} -> {marked.given!r}, right: {right!r}"
            ui.console.print(line, markup=False)


def _print_reports(reports: list[EvaluationReport]) -> None:
    table = ui.plain_table(
        "mode", "questions", "exact match", "F1", "document retrieved", "computed", "agree"
    )
    for report in reports:
        shares = (report.exact_match, report.f1, report.retrieved)
        table.add_row(
            report.mode, str(report.questions), *(f"{100 * share:.1f}%" for share in shares),
            f"{report.computed_tokens:,.1f} tokens", _agreement(report, reports),
        )  # fmt: skip
    ui.console.print(table)


def _agreement(report: EvaluationReport, reports: list[EvaluationReport]) -> str:
    """The share of answers whose first token is that of mode `exact`, where it was run too."""
    from ragcache.evaluation import first_tokens_agree

    exact = next((each for each in reports if each.mode in ("exact", "chat:exact")), None)
    return "-" if exact is None else f"{100 * first_tokens_agree(report, exact):.1f}%"
