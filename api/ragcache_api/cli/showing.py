"""An answer as people read it: its text, whole or as it comes, its sources and what it cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from ragcache_api.cli.console import console, milliseconds

if TYPE_CHECKING:
    from ragcache import Answer, AnswerStream


def report(stream: AnswerStream, *, pieces: bool | None) -> None:
    """Prints an answer; piece by piece if asked to, or on a terminal unless asked not to."""
    if console.is_terminal if pieces is None else pieces:
        show_text(stream)
    else:
        console.print(_said(stream.result()), style="bold", markup=False, highlight=False)
    show_account(stream.answer)


def show_text(stream: AnswerStream) -> None:
    """The pieces of an answer as they come, without outer whitespace at the front."""
    begun = False
    for piece in stream:
        text = piece if begun else piece.lstrip()
        begun = begun or bool(text)
        console.print(text, end="", style="bold", markup=False, highlight=False, soft_wrap=True)
    console.print("" if begun else _said(stream.answer), markup=False, highlight=False)


def show_account(answer: Answer) -> None:
    """Sources, mode, tokens and times."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for source in answer.sources:
        score = f"{source.score:.3f}" if source.score else ""
        table.add_row(escape(source.module), score, source.tier, style="dim")
    console.print(table)
    timings = answer.timings
    console.print(
        f"mode {answer.mode} · prompt {tokens(answer)} · "
        f"first token {milliseconds(timings.first_token)} · total {milliseconds(timings.total)}",
        highlight=False,
    )


def tokens(answer: Answer) -> str:
    """The tokens of the prompt, summed up."""
    reuse = answer.reuse
    shared = f"+ {reuse.shared_tokens} shared " if reuse.shared_tokens else ""
    return (
        f"{reuse.prompt_tokens} tokens = {reuse.cached_tokens} cached {shared}"
        f"+ {reuse.computed_tokens} computed"
    )


def _said(answer: Answer) -> str:
    if answer.finish_reason == "no_documents":
        return "nothing in this collection shares a word with the question"
    return answer.text
