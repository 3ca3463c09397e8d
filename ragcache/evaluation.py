"""Evaluation of answers: exact match and F1 after SQuAD's normalization (Rajpurkar et al., 2016),
and agreement of first tokens."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ragcache.config import DEFAULT_K, DEFAULT_RELATIVE_THRESHOLD
from ragcache.errors import ConfigurationError
from ragcache.options import SearchOptions
from ragcache.pipeline import Answer, Generation, Message
from ragcache.rag import RagCache

Through = Literal["ask", "chat"]
"""How questions are sent: by `ask`, or as a chat whose message contains the retrieved modules."""

PASTED = (
    "Use the following pieces of context to answer the question at the end. Keep the answer as "
    "short as possible.\n\n{documents}\n\nQuestion: {question}"
)
"""The message of such a chat, whose beginning differs from the one modules are encoded after."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its accepted answers, and the document that contains them."""

    id: str
    question: str
    answers: tuple[str, ...]
    document: str


@dataclass(frozen=True, slots=True)
class MarkedAnswer:
    """A question with its answer and marks. retrieved: None where it names no document."""

    question: Question
    given: str
    exact_match: bool
    f1: float
    retrieved: bool | None
    first_token: int | None


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """Means over all questions, 0 to 1. computed_tokens: the mean number of prompt tokens that were
    computed; retrieved: of the questions that name a document, None where none does."""

    mode: str
    questions: int
    exact_match: float
    f1: float
    retrieved: float | None
    computed_tokens: float
    marked: tuple[MarkedAnswer, ...]


def normalize(text: str) -> str:
    """Lower case, without punctuation and articles, with single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(given: str, answers: Sequence[str]) -> bool:
    """Whether an answer equals an accepted one after normalization."""
    return any(normalize(given) == normalize(answer) for answer in answers)


def f1(given: str, answers: Sequence[str]) -> float:
    """The best F1 of words over the accepted answers."""
    return max(_f1(normalize(given).split(), normalize(answer).split()) for answer in answers)


def _f1(given: list[str], answer: list[str]) -> float:
    if not given or not answer:
        return float(given == answer)
    common = sum((Counter(given) & Counter(answer)).values())
    return 2 * common / (len(given) + len(answer))


def load_questions(path: Path) -> list[Question]:
    """Reads `{"id", "question", "answers", "document"}` lines. Raises `ConfigurationError`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the questions in {path}: {error}") from error
    questions = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            questions.append(_question(json.loads(line), number))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"{path}:{number}: not a question ({error!r}); each line holds "
                '{"question": "...", "answers": ["..."], "document": "..."}'
            ) from error
    if not questions:
        raise ConfigurationError(f"{path} holds no questions")
    return questions


def _question(row: Any, number: int) -> Question:
    if not isinstance(row, dict) or not isinstance(row["answers"], list) or not row["answers"]:
        raise TypeError("answers must be a list of one text or more")
    question, document = row["question"], row.get("document", "")
    if not all(isinstance(text, str) for text in (question, document, *row["answers"])):
        raise TypeError("question, answers and document must be texts")
    return Question(str(row.get("id", number)), question, tuple(row["answers"]), document)


def evaluate(
    rag: RagCache, collection: str, questions: Sequence[Question], *,
    mode: str, k: int = DEFAULT_K, relative_threshold: float = DEFAULT_RELATIVE_THRESHOLD,
    through: Through = "ask", batch: int = 8, extractive: bool | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> EvaluationReport:  # fmt: skip
    """Asks questions, `batch` at once, and marks the answers. Raises `ConfigurationError` where
    there are no questions.

    through: `chat` puts the `k` retrieved modules into a message, and its report has the mode
    `chat:MODE`. extractive: as in `Generation`. progress: called with the numbers of marked and
    of all questions.
    """
    if not questions:
        raise ConfigurationError("there are no questions to ask")
    search: SearchOptions = {
        "collection": collection, "k": k, "relative_threshold": relative_threshold,
    }  # fmt: skip
    marked: list[MarkedAnswer] = []
    computed = 0
    options: dict[str, Any] = {"mode": mode, "generation": Generation.of(extractive=extractive)}
    for start in range(0, len(questions), batch):
        part = questions[start : start + batch]
        asked = [question.question for question in part]
        if through == "chat":
            answers = rag.chat_batch([_pasted(rag, q, search) for q in asked], **options)
        else:
            answers = rag.ask_batch(
                asked, collection=collection, k=k, relative_threshold=relative_threshold, **options
            )
        for question, answer in zip(part, answers, strict=True):
            computed += answer.reuse.computed_tokens
            found = _retrieved(question, answer)
            text, accepted = answer.text, question.answers
            first = next(iter(answer.choices[0].token_ids), None)
            marks = exact_match(text, accepted), f1(text, accepted)
            marked.append(MarkedAnswer(question, text, *marks, found, first))
        if progress is not None:
            progress(len(marked), len(questions))
    count = len(marked)
    return EvaluationReport(
        f"chat:{mode}" if through == "chat" else mode,
        count,
        exact_match=sum(m.exact_match for m in marked) / count,
        f1=sum(m.f1 for m in marked) / count,
        retrieved=_mean([m.retrieved for m in marked if m.retrieved is not None]),
        computed_tokens=computed / count,
        marked=tuple(marked),
    )


def _retrieved(question: Question, answer: Answer) -> bool | None:
    if not question.document:
        return None
    return any(source.document == question.document for source in answer.sources)


def _mean(values: Sequence[bool]) -> float | None:
    return sum(values) / len(values) if values else None


def first_tokens_agree(one: EvaluationReport, other: EvaluationReport) -> float:
    """The share of questions whose answers begin with the same token in both reports."""
    pairs = zip(one.marked, other.marked, strict=True)
    return sum(a.first_token == b.first_token for a, b in pairs) / len(one.marked)


def _pasted(rag: RagCache, question: str, search: SearchOptions) -> list[Message]:
    """A chat with the texts of the retrieved modules, as RAG programs write it."""
    hits = rag.retrieve(question, **search).hits
    documents = "\n\n".join(hit.module.text.strip() for hit in hits)
    return [{"role": "user", "content": PASTED.format(documents=documents, question=question)}]
