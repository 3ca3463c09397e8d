"""`ragcache schema`."""

# MERGED ragcache_api.cli.linting: `ragcache schema lint`: findings in files, prompts against
#   the schemas beside them.
# MERGED ragcache_api.cli.outline: A schema as a tree, with the positions and the tokens of
#   everything in it.

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files as package_files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.text import Text as Styled

from ragcache.config import DEFAULT_K
from ragcache_api.cli.console import (
    DEFAULT_STATE,
    JsonOption,
    KOption,
    ModelOption,
    StateOption,
    console,
    errors,
    open_existing_rag,
    open_rag,
    print_json,
    read_text,
)
from ragcache_api.schema_tree import SchemaNode, schema_nodes
from ragcache_schemas import (
    Finding,
    Layout,
    Module,
    Parameter,
    Placement,
    PMLError,
    PMLWarning,
    PositionSpan,
    Schema,
    SchemaIndex,
    Slot,
    Text,
    Union,
    is_prompt,
    lay_out,
    lint_prompt,
    lint_schema,
    parse_prompt,
    parse_schema,
    render_schema_turns,
    write_schema,
)

if TYPE_CHECKING:
    from ragcache.pipeline import ChatTemplate
    from ragcache_api.cli.console import Tokens


app = typer.Typer(help="PML schemas: written ones and generated ones.", no_args_is_help=True)
_SUFFIXES = (".xml", ".pml")


@app.callback()
def schema() -> None:
    """PML schemas: written ones and generated ones."""


@app.command("add")
def add(
    file: Annotated[Path, typer.Argument(help="A PML schema.")],
    state: StateOption = DEFAULT_STATE,
    placement: Annotated[
        str, typer.Option(help="schema (fixed positions) or compact (no gaps).")
    ] = "schema",
    model: ModelOption = None,
) -> None:
    """Store a schema and encode its modules, so that prompts can import them."""
    text = read_text(file)
    with open_rag(state, model, None) as rag:
        added = rag.add_schema(text, placement=cast("Placement", placement), source=str(file))
        encoded = rag.stats().encoded
    console.print(f"schema {added.name} added, {encoded} states encoded", markup=False)


@app.command("show")
def show(
    target: Annotated[str, typer.Argument(help="A collection, or an .xml or .pml file.")],
    state: StateOption = DEFAULT_STATE,
    k: KOption = DEFAULT_K,
    expand: Annotated[bool, typer.Option("--expand", help="Write the members out.")] = False,
    tree: Annotated[
        bool, typer.Option("--tree", help="Print a tree with positions; files always are.")
    ] = False,
    model: ModelOption = None,
) -> None:
    """Print the generated schema of a collection, or a tree with token counts and positions."""
    from ragcache_api.cli.console import Tokens

    if target.endswith(_SUFFIXES):
        _print_file(Path(target), Tokens.load(model))
        return
    with open_existing_rag(state, model) as rag:
        generated = rag.schema(target, k=k, expanded=expand)
    if tree:
        layout = lay_out(generated, Tokens.load(model).count_trusted, "compact")
        _print_tree(generated, layout)
    else:
        typer.echo(write_schema(generated))


@app.command("lint")
def lint(
    files: Annotated[
        list[Path],
        typer.Argument(exists=True, dir_okay=False, help="Schemas, and prompts for them."),
    ],
    model: ModelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find what is wrong, doubtful or wasteful in files. Exit status 1 if anything is."""
    from ragcache_api.cli.console import Tokens

    findings, notes = lint_files(files, Tokens.load(model).template)
    count = sum(map(len, findings.values()))
    for note in notes:
        errors.print(Styled(note, "dim"), soft_wrap=True)
    if as_json:
        print_json(findings_json(findings))
    else:
        for file, found in findings.items():
            for finding in found:
                console.print(shown(finding, file), soft_wrap=True)
        what = "file" if len(files) == 1 else "files"
        verdict = (
            f"{count} findings" if count > 1 else "1 finding" if count else "nothing to report"
        )
        console.print(f"{len(files)} {what}: {verdict}", style="bold" if count else "green")
    raise typer.Exit(1 if count else 0)


@app.command("xsd")
def xsd() -> None:
    """Print PML's XML Schema, for editors: `ragcache schema xsd > pml.xsd`."""
    typer.echo((package_files("ragcache_schemas") / "pml.xsd").read_text(encoding="utf-8"))


def _read(file: Path) -> Schema:
    if not file.is_file():
        raise typer.BadParameter(f"there is no file {file}", param_hint="TARGET")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PMLWarning)
        parsed = parse_schema(file.read_bytes(), source=str(file))
    for warning in caught:
        errors.print(Styled(str(warning.message), "yellow"), soft_wrap=True)
    return parsed


def _print_file(file: Path, tokens: Tokens) -> None:
    spelled = render_schema_turns(_read(file), tokens.template.render)
    layout = lay_out(spelled, tokens.template.count)
    _print_tree(spelled, layout, tokens.shown)


def _print_tree(
    schema: Schema, layout: Layout, shown: Callable[[str], str] = lambda text: text
) -> None:
    for line in outline_lines(schema, layout, shown, width=max(console.width, 100)):
        console.print(line, no_wrap=True, crop=False, overflow="ignore", soft_wrap=True)


_SEVERITY_STYLES = {"error": "bold red", "warning": "yellow", "advice": "cyan"}


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


def shown(finding: Finding, file: Path) -> Styled:
    """A finding, with the line that it is about and a mark under its place."""
    where = finding.location
    place = f"{file}:{where.line}:{where.column}" if where else str(file)
    out = Styled.assemble(
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


def findings_json(findings: dict[Path, list[Finding]]) -> list[dict[str, object]]:
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


_NODE_STYLES = {"module": "bold", "union": "cyan", "param": "green", "slot": "cyan", "text": ""}
_WHITE = re.compile(r"\s+")
_PREVIEW = 200
_SHORTEST = 24


@dataclass(frozen=True, slots=True)
class Row:
    """One line: the lines of the tree before it, what it is, where it stands, how it begins."""

    guide: str
    kind: str
    name: str
    span: PositionSpan
    preview: str = ""


def outline(schema: Schema, layout: Layout) -> list[Row]:
    """The rows of `schema`, whose spans are those of `layout`."""
    return list(_rows(schema_nodes(schema, layout), ""))


def _rows(nodes: Sequence[SchemaNode], guide: str) -> Iterator[Row]:
    for number, node in enumerate(nodes):
        last = number == len(nodes) - 1
        here, below = guide + ("└── " if last else "├── "), guide + ("    " if last else "│   ")
        match node.part:
            case Text(text=text):
                yield Row(here, node.kind, "", node.span, _WHITE.sub(" ", text[:_PREVIEW]))
            case Parameter(name=name):
                yield Row(here, node.kind, name, node.span, node.part.scaffold or "")
            case Slot(name=name, collection=collection):
                yield Row(here, node.kind, name, node.span, f"of the collection {collection}")
            case Union(members=members):
                yield Row(here, node.kind, f"of {len(members)}", node.span)
                yield from _rows(node.children, below)
            case Module(name=name, children=(Text(text=text),)):
                yield Row(here, node.kind, name, node.span, _WHITE.sub(" ", text[:_PREVIEW]))
            case Module(name=name, cache=cache):
                yield Row(here, node.kind, name, node.span, "" if cache else "not cached")
                yield from _rows(node.children, below)


def outline_lines(
    schema: Schema,
    layout: Layout,
    shown: Callable[[str], str] = lambda text: text,
    *,
    width: int = 100,
) -> Iterator[Styled]:
    """The outline as lines of about `width`; `shown` makes the text of a preview readable."""
    rows = outline(schema, layout)
    modules = sum(row.kind == "module" for row in rows)
    title = f"{schema.name} ({modules} modules)"
    widest = max(len(title), *(len(_what(row)) for row in rows)) if rows else len(title)
    room = max(_SHORTEST, width - widest - 28)
    yield Styled(f"{title:<{widest}}  {'positions':>13}  {'tokens':>7}  text", "bold")
    for row in rows:
        what = _what(row)
        what.pad_right(widest - len(what))
        tokens = f"≤ {row.span.length:,}" if row.kind == "param" else f"{row.span.length:,}"
        numbers = f"  {_positions(row.span):>13}  {tokens:>7}  "
        preview = shown(row.preview)
        short = preview if len(preview) <= room else preview[: room - 1] + "…"
        yield Styled.assemble(what, numbers, (short, "dim"))
    for scaffold in schema.scaffolds:
        paths = " ".join("/".join(path) for path in scaffold.modules)
        yield Styled.assemble(("scaffold ", "magenta"), paths)
    total = f"{'in all':<{widest}}  {'':>13}  {layout.length:>7,}  "
    yield Styled.assemble((total, "bold"), (_note(layout), "dim"))


def _what(row: Row) -> Styled:
    name = f" {row.name}" if row.name else ""
    return Styled.assemble((row.guide, "dim"), (row.kind, _NODE_STYLES[row.kind]), (name, "bold"))


def _positions(span: PositionSpan) -> str:
    return f"{span.start:,}–{span.end - 1:,}" if span.length else f"{span.start:,}"


def _note(layout: Layout) -> str:
    if layout.placement == "compact":
        return "what a prompt always holds; modules close up behind it"
    return "unions count with their longest member"
