"""`ragcache eval`: answer quality beside speed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from ragcache.config import DEFAULT_K
from ragcache_api.cli.console import (
    DEFAULT_STATE,
    EmbeddingOption,
    JsonOption,
    KOption,
    ModelOption,
    StateOption,
    console,
    open_existing_rag,
    print_json,
    progress_bar,
)

if TYPE_CHECKING:
    from ragcache.evaluation import EvaluationReport, Through


def evaluate_command(
    collection: Annotated[str, typer.Argument(help="The collection to ask.")],
    questions: Annotated[Path, typer.Argument(help="Questions with answers, JSON lines.")],
    state: StateOption = DEFAULT_STATE,
    modes: Annotated[
        str, typer.Option("--modes", "--mode", help="Modes to compare, with commas.")
    ] = "rooted,exact",
    k: KOption = DEFAULT_K,
    model: ModelOption = None,
    embedding: EmbeddingOption = None,
    through: Annotated[
        str, typer.Option("--through", help="`ask`, or `chat` with the modules pasted into it.")
    ] = "ask",
    wrong: Annotated[bool, typer.Option("--wrong", help="List what was answered wrongly.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Mark the answers to known questions, mode by mode."""
    from ragcache.errors import ConfigurationError
    from ragcache.evaluation import evaluate, load_questions

    if through not in ("ask", "chat"):
        raise ConfigurationError(f"--through is {through!r}; give ask or chat")
    way: Through = "chat" if through == "chat" else "ask"
    asked = load_questions(questions)
    reports = []
    with open_existing_rag(state, model, embedding) as rag:
        for mode in modes.split(","):
            with progress_bar(f"asking, {mode}") as report:
                reports.append(
                    evaluate(
                        rag, collection, asked, mode=mode.strip(), k=k, through=way, progress=report
                    )
                )
    if as_json:
        print_json([asdict(report) for report in reports])
        return
    _show(reports)
    for marked in reports[0].marked if wrong else ():
        if not marked.exact_match:
            console.print(
                f"{marked.question.id} {marked.question.question} -> {marked.given!r}, "
                f"right: {marked.question.answers[0]!r}",
                markup=False,
                highlight=False,
            )


def _show(reports: list[EvaluationReport]) -> None:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    columns = ("mode", "questions", "exact match", "F1", "document retrieved", "computed", "agree")
    for column in columns:
        table.add_column(column, justify="left" if column == "mode" else "right")
    for report in reports:
        shares = (report.exact_match, report.f1, report.retrieved)
        table.add_row(
            report.mode,
            str(report.questions),
            *(f"{100 * share:.1f}%" for share in shares),
            f"{report.computed_tokens:,.1f} tokens",
            _agreement(report, reports),
        )
    console.print(table)


def _agreement(report: EvaluationReport, reports: list[EvaluationReport]) -> str:
    """How many answers begin as those of mode `exact` do, where it was asked for."""
    from ragcache.evaluation import first_tokens_agree

    exact = next((each for each in reports if each.mode in ("exact", "chat:exact")), None)
    return "-" if exact is None else f"{100 * first_tokens_agree(report, exact):.1f}%"
