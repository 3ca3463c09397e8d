"""`ragcache schema lint`: findings in files, prompts against the schemas beside them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from ragcache_schemas import (
    Finding,
    PMLError,
    PMLWarning,
    SchemaIndex,
    is_prompt,
    lint_prompt,
    lint_schema,
    parse_prompt,
    parse_schema,
)

if TYPE_CHECKING:
    from ragcache.pipeline import ChatTemplate

_STYLES = {"error": "bold red", "warning": "yellow", "advice": "cyan"}


def lint_files(
    files: Sequence[Path], template: ChatTemplate
) -> tuple[dict[Path, list[Finding]], list[str]]:
    """The findings in each file, and notes on prompts whose schema is not among the files."""
    texts = {file: file.read_bytes() for file in files}
    prompts = [file for file in texts if is_prompt(texts[file])]
    findings: dict[Path, list[Finding]] = {}
    indexes: dict[str, SchemaIndex] = {}
    notes: list[str] = []
    for file, text in texts.items():
        if file not in prompts:
            findings[file] = lint_schema(
                text, source=str(file), count_tokens=template.count, render=template.render
            )
            if index := _index(text, template):
                indexes[index.schema.name] = index
    for file in prompts:
        name = _schema_name(texts[file])
        findings[file] = lint_prompt(texts[file], indexes.get(name or ""), source=str(file))
        if name is not None and name not in indexes:
            notes.append(f"{file}: name the file of the schema {name!r} too, to check against it")
    return {file: findings[file] for file in texts}, notes


def _index(text: bytes, template: ChatTemplate) -> SchemaIndex | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PMLWarning)
            return SchemaIndex.build(parse_schema(text), template.count)
    except PMLError:
        return None


def _schema_name(text: bytes) -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PMLWarning)
            return parse_prompt(text).schema
    except PMLError:
        return None


def shown(finding: Finding, file: Path) -> Text:
    """A finding, with the line that it is about and a mark under its place."""
    where = finding.location
    place = f"{file}:{where.line}:{where.column}" if where else str(file)
    out = Text.assemble(
        (place, "bold"), ": ", (finding.severity, _STYLES[finding.severity]), ": ",
        finding.message, " ", (f"[{finding.kind}]", "dim"),
    )  # fmt: skip
    if where is None:
        return out
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    if where.line > len(lines):
        return out
    line = lines[where.line - 1].replace("\t", " ")
    start = max(0, where.column - 50)
    number = f"{where.line:>6} │ "
    out.append(f"\n{number}{line[start : start + 90]}", "dim")
    out.append("\n" + " " * (len(number) + where.column - 1 - start) + "^", "bold")
    return out


def as_json(findings: dict[Path, list[Finding]]) -> list[dict[str, object]]:
    """Findings for programs."""
    return [
        {
            "file": str(file),
            "line": finding.location.line if finding.location else None,
            "column": finding.location.column if finding.location else None,
            "severity": finding.severity,
            "kind": finding.kind,
            "message": finding.message,
        }
        for file, found in findings.items()
        for finding in found
    ]
