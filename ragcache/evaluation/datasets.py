"""Sets of known questions and their documents: JSON lines of your own, or SQuAD.

| format | known by | documents |
|---|---|---|
| lines | `question`, `answers` | the texts in `context` or `contexts`, if any |
| SQuAD 1.1 and 2.0, XQuAD | `paragraphs` within `data` | a paragraph each |
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ragcache.documents import SourceDocument
from ragcache.errors import ConfigurationError

Over = Literal["all", "own"]
"""Documents that a question is asked over: the whole collection, or its own documents."""

DOCUMENT = "evaluated"
"""Metadata key by which a question finds its own documents."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its accepted answers."""

    id: str
    """Name of the question in its file."""
    question: str
    """Text of the question."""
    answers: tuple[str, ...]
    """Right answers. Empty if the documents do not answer the question."""
    document: str = ""
    """Document that contains the answer. Empty if unknown."""
    own: tuple[str, ...] = ()
    """Ids of the documents to ask over. Empty for the whole collection."""

    @property
    def filters(self) -> dict[str, Any] | None:
        """Filter that selects the question's own documents, if it has any."""
        return {DOCUMENT: {"$in": list(self.own)}} if self.own else None


@dataclass(frozen=True, slots=True)
class Dataset:
    """Questions and their documents."""

    name: str
    """Name of the file, without its suffix."""
    format: str
    """Format of the file, such as `SQuAD`."""
    questions: tuple[Question, ...]
    """Questions in the order of the file."""
    documents: tuple[SourceDocument, ...] = ()
    """Documents to ingest. Empty if the questions are about an existing collection."""

    def sample(self, count: int, seed: int = 0) -> Dataset:
        """Draw questions at random, and keep them in the order of the file.

        Documents that only other questions are asked over are left out.
        """
        if count >= len(self.questions):
            return self
        chosen = sorted(random.Random(seed).sample(range(len(self.questions)), count))
        questions = tuple(self.questions[each] for each in chosen)
        documents = self.documents
        if all(question.own for question in questions):
            needed = {each for question in questions for each in question.own}
            documents = tuple(each for each in documents if each.id in needed)
        return replace(self, questions=questions, documents=documents)


@dataclass(slots=True)
class DatasetBuilder:
    """Collects the questions and documents of a file. Equal texts become one document."""

    over: Over = "all"
    """Whether a question is asked over `all` documents, or over its `own`."""
    skip_empty: bool = False
    """Leave out questions without text, which published sets have. By default they are errors."""
    skipped: int = 0
    """Number of questions that were left out."""
    questions: list[Question] = field(default_factory=list)
    documents: dict[str, SourceDocument] = field(default_factory=dict)

    def add_document(self, text: object, title: object = "") -> str:
        """Add the text of a document, below its title. Returns its id."""
        checked, heading = _text(text, "a document"), _text(title, "a title").strip()
        if not checked.strip():
            raise ValueError("a document is empty")
        if heading:
            checked = f"# {heading}\n\n{checked}"
        digest = hashlib.sha256(checked.encode()).hexdigest()[:12]
        name = f"{heading[:60]} {digest}" if heading else digest
        self.documents.setdefault(name, SourceDocument(name, checked, metadata={DOCUMENT: name}))
        return name

    def add_question(
        self,
        name: object,
        question: object,
        answers: Iterable[object],
        documents: Sequence[str] = (),
        document: str | None = None,
    ) -> None:
        """Add a question.

        Args:
            name: Id of the question.
            question: Text of the question.
            answers: Accepted answers.
            documents: Ids of the question's own documents.
            document: Id of the document that answers it. Defaults to its only document.
        """
        accepted = tuple(_text(each, "an answer") for each in answers)
        asked = _text(question, "the question")
        if not asked.strip() and self.skip_empty:
            self.skipped += 1
            return
        if not asked.strip():
            raise ValueError("the question is empty")
        if document is None:
            document = documents[0] if len(documents) == 1 else ""
        own = tuple(dict.fromkeys(documents)) if self.over == "own" else ()
        self.questions.append(Question(str(name), asked, accepted, document, own))

    def add_line(self, row: Any, number: int) -> None:
        """Add the question of a line."""
        if not isinstance(row, dict):
            raise TypeError("a line must be an object")
        contexts = row.get("contexts", [row["context"]] if "context" in row else [])
        if not isinstance(contexts, list):
            raise TypeError("contexts must be a list of texts; a single one is a context")
        documents = [self.add_document(each) for each in contexts]
        named = _text(row["document"], "document") if "document" in row else None
        name = row.get("id", number)
        self.add_question(name, row["question"], answers_of(row), documents, named)

    def add_article(self, row: Any, number: int) -> None:
        """Add an article of SQuAD, whose answers are objects. `is_impossible` means no answer."""
        for place, paragraph in enumerate(row["paragraphs"]):
            title = row.get("title", "").replace("_", " ")
            document = self.add_document(paragraph["context"], title)
            for index, asked in enumerate(paragraph["qas"]):
                answers = [] if asked.get("is_impossible") else answers_of(asked)
                texts = dict.fromkeys(each["text"] for each in answers)
                name = asked.get("id", f"{number}-{place}-{index}")
                self.add_question(name, asked["question"], texts, [document])

    def build(self, path: Path, format: str) -> Dataset:
        """Build the data set of a file.

        Raises:
            ConfigurationError: It has no questions, or a question that is to be asked over its own
                documents has none.
        """
        if not self.questions:
            raise ConfigurationError(f"{path} holds no questions")
        if self.over == "own" and not all(question.own for question in self.questions):
            raise ConfigurationError(
                f"{path} brings no documents with its questions; ask over all of a collection"
            )
        documents = tuple(self.documents.values())
        if self.skipped:
            format = f"{format}; {self.skipped} without a question left out"
        return Dataset(path.stem, format, tuple(self.questions), documents)


_LINE = 'each line holds {"question": "...", "answers": ["..."], "document": "..."}'
_ARTICLE = "`data` of SQuAD holds articles with `paragraphs`"


def load_dataset(path: Path, over: Over = "all") -> Dataset:
    """Read questions from JSON lines, or from a file of SQuAD.

    Questions without text are left out of SQuAD files, and counted in `Dataset.format`. In JSON
    lines they are errors.

    Args:
        path: The file.
        over: Whether questions are asked over `all` documents, or each over its `own`.

    Raises:
        ConfigurationError: The file cannot be read or holds no questions, or a row is not a
            question; the message names the row.
    """
    rows = list(read_rows(path))
    squad = bool(rows) and isinstance(rows[0][1], dict) and "paragraphs" in rows[0][1]
    builder = DatasetBuilder(over, skip_empty=squad)
    for number, row in rows:
        try:
            (builder.add_article if squad else builder.add_line)(row, number)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            shape = _ARTICLE if squad else _LINE
            raise ConfigurationError(
                f"{path}:{number}: not a question ({error!r}); {shape}"
            ) from error
    return builder.build(path, "SQuAD" if squad else "lines")


def read_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a file of JSON or JSON lines with their numbers, which start at 1."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the questions in {path}: {error}") from error
    try:
        whole = json.loads(text)
    except ValueError:
        yield from _lines(path, text)
        return
    inner = whole.get("data") if isinstance(whole, dict) else None
    rows = inner if isinstance(inner, list) else whole if isinstance(whole, list) else [whole]
    yield from enumerate(rows, start=1)


def _lines(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise ConfigurationError(
                    f"{path}:{number}: not a question ({error!r}); {_LINE}"
                ) from error


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a text, not {type(value).__name__}")
    return value


def answers_of(row: Mapping[str, Any]) -> list[Any]:
    """Return the `answers` of a row, which must be a list."""
    answers = row["answers"]
    if not isinstance(answers, list):
        raise TypeError("answers must be a list of texts, empty where there is no answer")
    return answers
