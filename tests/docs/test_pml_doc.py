"""Every example in docs/pml.md runs.

Schemas are parsed and laid out, prompts resolved against the schema of their name that stands
before them; what is marked "xml error" raises what the block after it says. Python blocks run in
order, in one namespace.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ragcache_schemas import (
    PMLError,
    SchemaIndex,
    is_prompt,
    parse_prompt,
    parse_schema,
    resolve_prompt,
    write_schema,
)

DOC = Path(__file__).resolve().parents[2] / "docs/pml.md"
_BLOCK = re.compile(r"^```([a-z ]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced example; `line` is that of its first line."""

    kind: str
    text: str
    line: int


def blocks() -> list[Block]:
    """The examples in the order of the page."""
    page = DOC.read_text(encoding="utf-8")
    return [
        Block(found[1], found[2], page.count("\n", 0, found.start(2)) + 1)
        for found in _BLOCK.finditer(page)
    ]


def count_words(text: str) -> int:
    return len(text.split())


def read(block: Block, indexes: dict[str, SchemaIndex]) -> None:
    """Parses a schema or a prompt and does what one does with it."""
    if is_prompt(block.text):
        prompt = parse_prompt(block.text)
        resolve_prompt(indexes[prompt.schema], prompt)
        return
    schema = parse_schema(block.text)
    assert parse_schema(write_schema(schema)) == schema
    indexes[schema.name] = SchemaIndex.build(schema, count_words)


@pytest.mark.filterwarnings("error::ragcache_schemas.PMLWarning")
def test_every_xml_example_is_right_or_as_wrong_as_it_says() -> None:
    indexes: dict[str, SchemaIndex] = {}
    found = blocks()
    for block, following in zip(found, [*found[1:], None], strict=True):
        if block.kind == "xml":
            read(block, indexes)
        elif block.kind == "xml error":
            assert following is not None
            with pytest.raises(PMLError) as caught:
                read(block, indexes)
            assert str(caught.value) == following.text.strip(), f"line {block.line}"
    assert len(indexes) > 8


def test_every_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "pml_doc"}
    lines = 0
    for block in blocks():
        if block.kind == "python":
            file = tmp_path / f"line_{block.line}.py"  # a program's source must be at hand
            file.write_text(block.text, encoding="utf-8")
            exec(compile(block.text, str(file), "exec"), names)
            lines += block.text.count("\n")
    assert lines > 80


def test_no_example_is_left_out() -> None:
    assert {block.kind for block in blocks()} == {"xml", "xml error", "python", "text"}


def test_the_tree_that_is_shown_is_the_one_that_is_printed() -> None:
    from ragcache_api.cli.schema import outline_lines
    from ragcache_schemas import lay_out

    [shown] = [block.text for block in blocks() if block.text.startswith("trip (3 modules)")]
    [source] = [block.text for block in blocks() if "trip = parse_schema(" in block.text]
    schema = parse_schema(source.split('"""')[1])
    printed = [line.plain.rstrip() for line in outline_lines(schema, lay_out(schema, len))]
    assert [_bare(line) for line in printed] == [_bare(line) for line in shown.splitlines()]


def _bare(line: str) -> str:
    """A line of the tree without its numbers, which depend on the tokenizer."""
    return re.sub(r"\s+", " ", re.sub(r"\d+(–\d+)?", "", line)).strip()
