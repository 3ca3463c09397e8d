"""JSON, and JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from ragcache.documents.charset import decode_text
from ragcache.documents.formats.base import Content, Format, RawFile
from ragcache.documents.formats.text import CODE
from ragcache.documents.markdown import write_table
from ragcache.documents.source import DocumentPart


def read_json(file: RawFile) -> Content:
    """Read JSON as headings, lines and tables."""
    text = decode_text(file.raw)
    try:
        lines = file.suffix != ".json"
        value = (
            [json.loads(each) for each in text.splitlines() if each.strip()]
            if lines
            else (json.loads(text))
        )
    except ValueError:  # comments, or another format of the same suffix
        return Content([DocumentPart(text, language=CODE)])
    return Content([DocumentPart("\n\n".join(_json_blocks(value, 1)))])


_DEEPEST = 3  # level of JSON that becomes a heading


def _json_blocks(value: Any, level: int) -> Iterable[str]:
    """Yield JSON as text: keys of objects become headings, lists of flat objects tables."""
    if _is_table(value):
        keys = list(dict.fromkeys(key for each in value for key in each))
        yield write_table([keys, *([_scalar(each.get(key)) for key in keys] for each in value)])
        return
    if not isinstance(value, dict) or level > _DEEPEST:
        yield "\n".join(_json_lines(value, 0))
        return
    plain = [f"{key}: {_scalar(inner)}" for key, inner in value.items() if _is_scalar(inner)]
    if plain:
        yield "\n".join(plain)
    for key, inner in value.items():
        if not _is_scalar(inner):
            yield f"{'#' * level} {' '.join(key.split())}"
            yield from _json_blocks(inner, level + 1)


def _is_table(value: Any) -> bool:
    """Whether it is a list of objects that hold no others, and mostly have the same keys."""
    if not (isinstance(value, list) and value and all(isinstance(each, dict) for each in value)):
        return False
    width = len({key for each in value for key in each})
    if width * len(value) > 4 * sum(map(len, value)):
        return False
    return all(_is_scalar(inner) for each in value for inner in each.values())


def _json_lines(value: Any, depth: int) -> Iterable[str]:
    indent = "  " * depth
    if isinstance(value, dict):
        for key, inner in value.items():
            if _is_scalar(inner):
                yield f"{indent}{key}: {_scalar(inner)}"
            else:
                yield f"{indent}{key}:"
                yield from _json_lines(inner, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            first, *rest = [*_json_lines(inner, 0)] or [""]
            yield f"{indent}- {first}"
            yield from (f"{indent}  {line}" for line in rest)
    else:
        yield indent + _scalar(value)


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, dict | list) or not value


def _scalar(value: Any) -> str:
    if value is None or value == {} or value == []:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


FORMATS = (Format.of(".json .jsonl .ndjson", read_json),)
