"""`ragcache schema`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.resources import files as package_files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.text import Text

from ragcache.config import DEFAULT_K
from ragcache_api.cli import linting
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
from ragcache_api.cli.outline import outline_lines
from ragcache_schemas import (
    Layout,
    Placement,
    PMLWarning,
    Schema,
    lay_out,
    parse_schema,
    render_schema_turns,
    write_schema,
)

if TYPE_CHECKING:
    from ragcache_api.cli.tokens import Tokens

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
    from ragcache_api.cli.tokens import Tokens

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
    from ragcache_api.cli.tokens import Tokens

    findings, notes = linting.lint_files(files, Tokens.load(model).template)
    count = sum(map(len, findings.values()))
    for note in notes:
        errors.print(Text(note, "dim"), soft_wrap=True)
    if as_json:
        print_json(linting.as_json(findings))
    else:
        for file, found in findings.items():
            for finding in found:
                console.print(linting.shown(finding, file), soft_wrap=True)
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
        errors.print(Text(str(warning.message), "yellow"), soft_wrap=True)
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
