"""Sets of known questions as their projects publish them, with the documents that they bring.

| format | known by | documents | asked over |
|---|---|---|---|
| own lines | `question`, `answers` | none, or `context`, `contexts` | the collection |
| SQuAD, XQuAD | `data` of `paragraphs` | a paragraph each | the collection |
| CMRC 2018 | the same, or `context_text` | a paragraph each | the collection |
| QED | `paragraph_text` | a paragraph each | the collection |
| MuSiQue of CacheBlend | `ctxs` | a passage each | the question's own |
| QMSum | `meeting_transcripts` | a meeting each | the question's own |
| LongBench | `input`, `context` | a passage each, or the context | the question's own |
| RAGBench | `documents`, `response` | one each | the question's own |
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ragcache.documents import SourceDocument
from ragcache.errors import ConfigurationError

Over = Literal["auto", "all", "own"]
"""Which documents questions are asked over: the whole collection, their own, or as the format
says."""

DOCUMENT = "evaluated"
"""The metadata key by which a question finds its own documents."""

_PASSAGE = re.compile(r"^Passage \d+:\n", re.MULTILINE)  # in contexts of LongBench


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its accepted answers.

    Attributes:
        id: Its name in its file.
        question: The text.
        answers: Any of them is right; none: the documents do not answer it.
        document: The document that contains the answer, "" where that is not known.
        own: Ids of the documents that it is asked over; none: the whole collection.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    document: str = ""
    own: tuple[str, ...] = ()

    @property
    def filters(self) -> dict[str, Any] | None:
        """Those of its own documents."""
        return {DOCUMENT: {"$in": list(self.own)}} if self.own else None


@dataclass(frozen=True, slots=True)
class Dataset:
    """Questions and the documents that they bring.

    Attributes:
        name: Of the file, without its suffix.
        format: Of the file, such as `SQuAD`.
        questions: In the order of the file.
        documents: None where the questions are about a collection that exists.
        skipped: How many rows of a published set ask nothing, such as LongBench's summaries.
    """

    name: str
    format: str
    questions: tuple[Question, ...]
    documents: tuple[SourceDocument, ...] = ()
    skipped: int = 0

    def sample(self, count: int, seed: int = 0) -> Dataset:
        """So many questions, drawn at random, in the order of the file. Documents that only other
        questions are asked over are left out."""
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
class _Reading:
    """A file as it is read. Equal texts are one document. skips: whether empty questions are left
    out, or an error."""

    over: Over
    scoped: bool
    skips: bool
    skipped: int = 0
    questions: list[Question] = field(default_factory=list)
    documents: dict[str, SourceDocument] = field(default_factory=dict)

    def add_document(self, text: object, title: object = "") -> str:
        """Takes the text of a document; returns its id."""
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
        self, name: object, question: object, answers: Iterable[object],
        documents: Sequence[str] = (), document: str | None = None,
    ) -> None:  # fmt: skip
        """documents: its own; document: the one that answers it, if it is not the only one."""
        accepted = tuple(_text(each, "an answer") for each in answers)
        asked = _text(question, "the question")
        if not asked.strip() and self.skips:
            self.skipped += 1
            return
        if not asked.strip():
            raise ValueError("the question is empty")
        if document is None:
            document = documents[0] if len(documents) == 1 else ""
        scoped = self.over == "own" or (self.over == "auto" and self.scoped)
        own = tuple(dict.fromkeys(documents)) if scoped else ()
        self.questions.append(Question(str(name), asked, accepted, document, own))


def load_dataset(path: Path, over: Over = "auto") -> Dataset:
    """Reads questions in any of the known formats, as JSON or JSON lines.

    Args:
        path: The file.
        over: What they are asked over: `all` documents, each question's `own`, or (`auto`) what its
            format means.

    Raises:
        ConfigurationError: The file cannot be read, holds no questions, or a row is none; the
            message names the row.
    """
    rows = list(_rows(path))
    if not rows:
        raise ConfigurationError(f"{path} holds no questions")
    number, first = rows[0]
    known = next((each for each in _FORMATS if each.knows(first)), _LINES)
    reading = _Reading(over, known.scoped, skips=known is not _LINES)
    for number, row in rows:
        try:
            known.read(reading, row, number)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            shape = known.shape
            raise ConfigurationError(
                f"{path}:{number}: not a question ({error!r}); {shape}"
            ) from error
    if not reading.questions:
        raise ConfigurationError(
            f"{path} holds no questions: {reading.skipped} rows ask nothing, and summaries that no "
            "query asks for cannot be asked"
        )
    if over == "own" and not all(question.own for question in reading.questions):
        raise ConfigurationError(
            f"{path} brings no documents with its questions; ask over all of a collection"
        )
    documents = tuple(reading.documents.values())
    return Dataset(path.stem, known.name, tuple(reading.questions), documents, reading.skipped)


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    """The rows of a file with their numbers: lines of JSON lines, else from 1."""
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
                    f"{path}:{number}: not a question ({error!r}); {_LINES.shape}"
                ) from error


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a text, not {type(value).__name__}")
    return value


def _answers(row: Mapping[str, Any]) -> list[Any]:
    answers = row["answers"]
    if not isinstance(answers, list):
        raise TypeError("answers must be a list of texts, empty where there is no answer")
    return answers


def _read_line(reading: _Reading, row: Any, number: int) -> None:
    if not isinstance(row, dict):
        raise TypeError("a line must be an object")
    contexts = row.get("contexts", [row["context"]] if "context" in row else [])
    if not isinstance(contexts, list):
        raise TypeError("contexts must be a list of texts; a single one is a context")
    documents = [reading.add_document(each) for each in contexts]
    named = _text(row["document"], "document") if "document" in row else None
    name = row.get("id", number)
    reading.add_question(name, row["question"], _answers(row), documents, named)


def _read_squad(reading: _Reading, row: Any, number: int) -> None:
    """An article. Answers of SQuAD are objects; where `is_impossible`, there is none."""
    for place, paragraph in enumerate(row["paragraphs"]):
        document = reading.add_document(
            paragraph["context"], row.get("title", "").replace("_", " ")
        )
        for index, asked in enumerate(paragraph["qas"]):
            answers = [] if asked.get("is_impossible") else _answers(asked)
            texts = [each["text"] for each in answers]
            name = asked.get("id", f"{number}-{place}-{index}")
            reading.add_question(name, asked["question"], dict.fromkeys(texts), [document])


def _read_cmrc(reading: _Reading, row: Any, _: int) -> None:
    """A context of CMRC 2018 as it was first published."""
    document = reading.add_document(row["context_text"], row.get("title", ""))
    for asked in row["qas"]:
        answers = dict.fromkeys(_answers(asked))
        reading.add_question(asked["query_id"], asked["query_text"], answers, [document])


def _read_qed(reading: _Reading, row: Any, number: int) -> None:
    document = reading.add_document(row["paragraph_text"], row.get("title_text", ""))
    answers = [each["string"] for each in row["original_nq_answers"]]
    question = row["question"] if "question" in row else row["question_text"]
    reading.add_question(row.get("example_id", number), question, answers, [document])


def _read_passages(reading: _Reading, row: Any, number: int) -> None:
    documents = [reading.add_document(each["text"], each.get("title", "")) for each in row["ctxs"]]
    reading.add_question(row.get("id", number), row["question"], _answers(row), documents)


def _read_meeting(reading: _Reading, row: Any, number: int) -> None:
    turns = [f"{each['speaker']}: {each['content']}" for each in row["meeting_transcripts"]]
    document = reading.add_document("\n\n".join(turns))
    queries = [*row.get("general_query_list", ()), *row.get("specific_query_list", ())]
    for index, asked in enumerate(queries):
        name = f"{number}-{index}"
        reading.add_question(name, asked["query"], [asked["answer"]], [document])


def _read_longbench(reading: _Reading, row: Any, number: int) -> None:
    passages = _PASSAGE.split(row["context"])
    whole = passages[1:] if len(passages) > 1 and not passages[0].strip() else [row["context"]]
    documents = [reading.add_document(each) for each in whole]
    reading.add_question(row.get("_id", number), row["input"], _answers(row), documents)


def _read_ragbench(reading: _Reading, row: Any, number: int) -> None:
    documents = [reading.add_document(each) for each in row["documents"]]
    name = row.get("id", number)
    reading.add_question(name, row["question"], [row["response"]], documents)


@dataclass(frozen=True, slots=True)
class _Format:
    """keys: by which its rows are known. scoped: whether its questions are asked over their own
    documents. read: takes a row and its number. shape: of a row, for errors."""

    name: str
    keys: frozenset[str]
    scoped: bool
    read: Callable[[_Reading, Any, int], None]
    shape: str

    def knows(self, row: object) -> bool:
        return isinstance(row, dict) and row.keys() >= self.keys


def _format(
    name: str, keys: str, read: Callable[[_Reading, Any, int], None], *, scoped: bool
) -> _Format:
    names = keys.split()
    shape = f"rows of {name} hold {', '.join(names)}"
    return _Format(name, frozenset(names), scoped, read, shape)


_LINES = _Format(
    "lines", frozenset(), False, _read_line,
    'each line holds {"question": "...", "answers": ["..."], "document": "..."}',
)  # fmt: skip
_FORMATS = (
    _format("SQuAD", "paragraphs", _read_squad, scoped=False),
    _format("CMRC", "context_text qas", _read_cmrc, scoped=False),
    _format("QED", "paragraph_text original_nq_answers", _read_qed, scoped=False),
    _format("MuSiQue", "ctxs question answers", _read_passages, scoped=True),
    _format("QMSum", "meeting_transcripts", _read_meeting, scoped=True),
    _format("LongBench", "input context answers", _read_longbench, scoped=True),
    _format("RAGBench", "question documents response", _read_ragbench, scoped=True),
)
