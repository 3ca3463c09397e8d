"""Schemas and findings as lines for people: trees with positions, and marks under columns."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.text import Text as StyledText

from ragcache.errors import ModelNotFound
from ragcache_api.cli import console as ui
from ragcache_api.schema_tree import SchemaNode, schema_nodes
from ragcache_schemas import (
    Finding,
    Layout,
    Module,
    Parameter,
    PMLError,
    PMLWarning,
    PositionSpan,
    Schema,
    SchemaIndex,
    Slot,
    Text,
    Union,
    is_prompt,
    lint_prompt,
    lint_schema,
    parse_prompt,
    parse_schema,
)

if TYPE_CHECKING:
    from ragcache.models import LoadedModel
    from ragcache.pipeline import ChatTemplate

_SEVERITY_STYLES = {"error": "bold red", "warning": "yellow", "advice": "cyan"}
_NODE_STYLES = {"module": "bold", "union": "cyan", "param": "green", "slot": "cyan", "text": ""}
_WHITE_SPACE = re.compile(r"\s+")
_PREVIEW_SOURCE = 200  # characters of a text from which a preview is made
_SHORTEST_PREVIEW = 24


def read_schema(file: Path) -> Schema:
    """The schema of a file; its warnings go to standard error. Raises `PMLError`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PMLWarning)
        parsed = parse_schema(file.read_bytes(), source=str(file))
    for warning in caught:
        ui.errors.print(StyledText(str(warning.message), "yellow"), soft_wrap=True)
    return parsed


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
            index = _read_quietly(
                lambda text: SchemaIndex.build(parse_schema(text), template.count), text
            )
            if index is not None:
                indexes[index.schema.name] = index
    for file in prompts:
        prompt = _read_quietly(parse_prompt, texts[file])
        name = None if prompt is None else prompt.schema
        findings[file] = lint_prompt(texts[file], indexes.get(name or ""), source=str(file))
        if name is not None and name not in indexes:
            notes.append(f"{file}: name the file of the schema {name!r} too, to check against it")
    return {file: findings[file] for file in texts}, notes


def _read_quietly(read: Callable[[bytes], Any], text: bytes) -> Any:
    """None where the text is invalid: its findings say why."""
    with suppress(PMLError), warnings.catch_warnings():
        warnings.simplefilter("ignore", PMLWarning)
        return read(text)
    return None


def format_finding(finding: Finding, file: Path) -> StyledText:
    """A finding with the line of the file that it is about and a mark under its column."""
    where = finding.location
    place = f"{file}:{where.line}:{where.column}" if where else str(file)
    out = StyledText.assemble(
        (place, "bold"), ": ", (finding.severity, _SEVERITY_STYLES[finding.severity]), ": ",
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


def finding_values(finding: Finding, file: Path) -> dict[str, object]:
    """A finding as plain values, for JSON."""
    where = finding.location
    line, column = (where.line, where.column) if where else (None, None)
    return {
        "file": str(file), "line": line, "column": column, "severity": finding.severity,
        "kind": finding.kind, "message": finding.message,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class OutlineRow:
    """A node in one line behind the guides of the tree."""

    guide: str
    kind: str
    name: str
    span: PositionSpan
    preview: str

    @property
    def label(self) -> StyledText:
        name = f" {self.name}" if self.name else ""
        kind = (self.kind, _NODE_STYLES[self.kind])
        return StyledText.assemble((self.guide, "dim"), kind, (name, "bold"))

    @property
    def positions(self) -> str:
        span = self.span
        return f"{span.start:,}–{span.end - 1:,}" if span.length else f"{span.start:,}"


def outline_lines(
    schema: Schema, layout: Layout, readable: Callable[[str], str] = str, *, width: int = 100
) -> Iterator[StyledText]:
    """The tree of a schema as lines of about `width`, with the positions and tokens of every node;
    `readable` is applied to the text of a preview."""
    rows = list(_outline_rows(schema_nodes(schema, layout), ""))
    modules = sum(row.kind == "module" for row in rows)
    title = f"{schema.name} ({modules} modules)"
    widest = max(len(title), *(len(row.label) for row in rows)) if rows else len(title)
    room = max(_SHORTEST_PREVIEW, width - widest - 28)
    yield StyledText(f"{title:<{widest}}  {'positions':>13}  {'tokens':>7}  text", "bold")
    for row in rows:
        label = row.label
        label.pad_right(widest - len(label))
        tokens = f"≤ {row.span.length:,}" if row.kind == "param" else f"{row.span.length:,}"
        preview = readable(row.preview)
        preview = preview if len(preview) <= room else preview[: room - 1] + "…"
        numbers = f"  {row.positions:>13}  {tokens:>7}  "
        yield StyledText.assemble(label, numbers, (preview, "dim"))
    for scaffold in schema.scaffolds:
        paths = " ".join("/".join(path) for path in scaffold.modules)
        yield StyledText.assemble(("scaffold ", "magenta"), paths)
    note = "unions count with their longest member"
    if layout.placement == "compact":
        note = "what a prompt always holds; modules close up behind it"
    total = f"{'in all':<{widest}}  {'':>13}  {layout.length:>7,}  "
    yield StyledText.assemble((total, "bold"), (note, "dim"))


def _outline_rows(nodes: Sequence[SchemaNode], guide: str) -> Iterator[OutlineRow]:
    for number, node in enumerate(nodes):
        last = number == len(nodes) - 1
        here, below = guide + ("└── " if last else "├── "), guide + ("    " if last else "│   ")
        name, preview = _name_and_preview(node)
        yield OutlineRow(here, node.kind, name, node.span, preview)
        match node.part:
            case Module(children=(Text(),)):
                pass  # the module's own line shows its text
            case Module() | Union():
                yield from _outline_rows(node.children, below)


def _name_and_preview(node: SchemaNode) -> tuple[str, str]:
    match node.part:
        case Text(text=text):
            return "", _WHITE_SPACE.sub(" ", text[:_PREVIEW_SOURCE])
        case Parameter(name=name, scaffold=scaffold):
            return name, scaffold or ""
        case Slot(name=name, collection=collection):
            return name, f"of the collection {collection}"
        case Union(members=members):
            return f"of {len(members)}", ""
        case Module(name=name, children=(Text(text=text),)):
            return name, _WHITE_SPACE.sub(" ", text[:_PREVIEW_SOURCE])
        case Module(name=name, cache=cache):
            return name, "" if cache else "not cached"


# Control tokens in a rendered chat template stand as these private characters.
_HIDDEN_TOKEN = re.compile("[\U00100000-\U0010fffd]")


@dataclass(frozen=True, slots=True)
class TemplateTokenizer:
    """The tokenizer and chat template of a model, loaded without its weights."""

    model: LoadedModel
    template: ChatTemplate

    @classmethod
    def load(cls, model: str | None) -> TemplateTokenizer:
        """Loads those of a model folder or hub name; None is the embedded reader."""
        from ragcache.models import LoadedModel
        from ragcache.models.reader import READER, ReaderTokenizer
        from ragcache.pipeline import ChatTemplate

        tokenizer = ReaderTokenizer(READER) if model is None else _hub_tokenizer(model)
        name = model or str(READER)
        loaded = LoadedModel(name, cast("Any", None), tokenizer)  # text needs no weights
        return cls(loaded, ChatTemplate(loaded))

    def count_trusted(self, text: str) -> int:
        """Tokens of a text in which control tokens are recognized, as in a generated schema."""
        return len(self.model.encode(text))

    def show_control_tokens(self, text: str) -> str:
        """`text` with the template's control tokens spelled out."""
        from ragcache.pipeline.chat_template import MARK

        decode, encode = self.model.tokenizer.decode, self.template.encode
        return MARK.sub(lambda mark: str(decode(encode(mark[0]))), text)


def _hub_tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ModelNotFound(
            f"cannot load the tokenizer of {model!r}: {error}. Give a folder with a tokenizer, or "
            "the name of a hub model that this machine can reach"
        ) from error
