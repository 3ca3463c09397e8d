"""Sources are read from clones, cleaned, and freed of copies and of what measures the reader."""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from gather import Cleaner, Shingles, Source, clone, gather, load_sources, words
from markup import CONVERTERS

PARAGRAPH = (
    "The keeper of the {0} light writes in the book at noon and at dusk, and the boats that come "
    "in from the {0} bank wait for the tide that is the highest of the {0} day before they land. "
    "It is one of the duties of the {0} post that is never put off for the weather."
)
OTHER = (
    "In the winter the road to the {0} farm is closed, so that the post is brought by the ferry "
    "and is left in the box at the gate, where the farmer of the {0} hill finds it on his way."
)
MEASURED = (
    "The blue ledger of the museum was bought in the spring of the year by the daughter of a "
    "printer who had found it in the attic of the house that she was born in."
)


@pytest.fixture
def clones(tmp_path: Path) -> Path:
    repository = tmp_path / "clones" / "someone+prose"
    repository.mkdir(parents=True)
    body = "\n\n".join([PARAGRAPH.format("old"), OTHER.format("old"), "x = y { 1 };", MEASURED])
    files = {
        "a.md": f"# Lights\n\n{body}\n",
        "b.md": f"{body}\n\nThe last line of the copy is new.\n",
        "c.md": "\n\n".join([PARAGRAPH.format("new"), OTHER.format("low")]),
        "notes/skipped.md": PARAGRAPH.format("skipped"),
        "d.py": "print('code')",
    }
    for name, text in files.items():
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_text(text)
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        author = ["-c", "user.name=n", "-c", "user.email=e"]
        subprocess.run(["git", "-C", str(repository), *author, *command], check=True)
    return tmp_path / "clones"


@pytest.fixture
def source() -> Any:
    return Source("someone/prose", "CC0-1.0", "markdown", ("*.md",), skip=("notes/*",))


def test_gather_keeps_new_prose_alone(clones: Path, source: Any, tmp_path: Path) -> None:
    held_out = set(Shingles(12, 4).of(words(f"Asked: {MEASURED}")))
    cleaner = Cleaner(held_out)
    repository = clone(source, tmp_path / "new", clones)
    sizes = gather(source, repository, cleaner, tmp_path / "out.jsonl.gz")
    with gzip.open(tmp_path / "out.jsonl.gz", "rt") as rows:
        documents = [json.loads(row) for row in rows]
    text = "\n".join(document["text"] for document in documents)
    assert sizes["documents"] == len(documents) == 2
    assert text.count(PARAGRAPH.format("old")) == 1  # a.md or b.md, whichever was read first
    assert text.count(OTHER.format("low")) == 1
    assert "blue ledger" not in text
    assert "x = y" not in text
    assert "skipped" not in text
    assert {"repeated", "held out"} <= set(cleaner.dropped)


def test_every_source_names_its_licence_and_a_known_format() -> None:
    sources = load_sources()
    assert len({s.repository for s in sources}) == len(sources)
    for source in sources:
        assert source.licence
        assert source.format in CONVERTERS
        assert not any(word in source.licence for word in ("-NC", "-SA", "-ND"))
