"""Built-in documents, with questions that they answer and questions that they do not answer.

A model's calibration is fitted to them (`ragcache.calibration.calibrate_model`). The texts were
written for this project, with invented names and numbers, so that no model knows the answers.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ragcache.evaluation.datasets import Dataset, DatasetBuilder

_FILE = Path(__file__).with_name("builtin.txt")


@cache
def builtin_dataset() -> Dataset:
    """Return the built-in documents and their questions.

    Example:
        >>> dataset = builtin_dataset()
        >>> len(dataset.documents), len(dataset.questions)
        (50, 200)
    """
    return read_dataset(_FILE, "built-in")


def read_dataset(file: Path, name: str) -> Dataset:
    """Read documents and their questions from a text.

    The file has a document in each paragraph of lines: its title after `#`, its text, questions
    after `+` with an answer after `=`, and questions without an answer after `-`.

    Args:
        file: The file.
        name: Name of the dataset.
    """
    builder = DatasetBuilder()
    for paragraph in file.read_text(encoding="utf-8").strip().split("\n\n"):
        lines = paragraph.split("\n")
        text = "\n".join(line for line in lines if line[0] not in "#+-")
        document = builder.add_document(text, lines[0].removeprefix("# "))
        for number, line in enumerate(lines):
            asked, _, answer = line[2:].partition(" = ")
            key = f"{document} {number}"
            if line[0] == "+":
                builder.add_question(key, asked, [answer], document=document)
            elif line[0] == "-":
                builder.add_question(key, asked, [], document=document)
    return builder.build(file, name)
