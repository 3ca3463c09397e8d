"""`ragcache schema`: schemas are added, shown as PML or as a tree, and linted."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files as package_files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.text import Text as StyledText

from ragcache.config import DEFAULT_K, check_placement
from ragcache_api.cli import console as ui

if TYPE_CHECKING:
    from ragcache_schemas import Layout, Placement, Schema


app = typer.Typer(help="PML schemas: written ones and generated ones.", no_args_is_help=True)
_FILE_SUFFIXES = (".xml", ".pml")


@app.command("add")
def add(
    file: Annotated[Path, typer.Argument(help="A PML schema.")],
    state: ui.StateOption = ui.DEFAULT_STATE,
    placement: Annotated[
        str, typer.Option(help="schema (fixed positions) or compact (no gaps).")
    ] = "schema",
    model: ui.ModelOption = None,
    dtype: ui.DTypeOption = "auto",
) -> None:
    """Store a schema and encode its modules, so that prompts can import them."""
    ui.check_model(model)
    text = ui.read_text(file)
    check_placement(placement)
    with ui.open_rag(state, model, None, dtype=dtype) as rag:
        added = rag.add_schema(text, placement=cast("Placement", placement), source=str(file))
        encoded = rag.stats().encoded
    ui.console.print(f"schema {added.name} added, {encoded} states encoded", markup=False)


@app.command("show")
def show(
    target: Annotated[str, typer.Argument(help="A collection, or an .xml or .pml file.")],
    state: ui.StateOption = ui.DEFAULT_STATE,
    k: ui.KOption = DEFAULT_K,
    expand: Annotated[bool, typer.Option("--expand", help="Write the members out.")] = False,
    tree: Annotated[
        bool, typer.Option("--tree", help="Print a tree with positions; files always are.")
    ] = False,
    model: ui.ModelOption = None,
    dtype: ui.DTypeOption = "auto",
    instruction: ui.InstructionOption = None,
) -> None:
    """Print the generated schema of a collection, or a tree with token counts and positions."""
    is_file = target.endswith(_FILE_SUFFIXES)
    file = _require_file(target) if is_file else Path()
    from ragcache_api.cli.schema_outline import TemplateTokenizer, read_schema
    from ragcache_schemas import lay_out, render_schema_turns, write_schema

    if is_file:
        tokenizer = TemplateTokenizer.load(model)
        rendered = render_schema_turns(read_schema(file), tokenizer.template.render)
        layout = lay_out(rendered, tokenizer.template.count)
        _print_tree(rendered, layout, tokenizer.show_control_tokens)
        return
    with ui.open_existing_rag(state, model, dtype=dtype, instruction=instruction) as rag:
        generated = rag.schema(target, k=k, expanded=expand)
    if tree:
        layout = lay_out(generated, TemplateTokenizer.load(model).count_trusted, "compact")
        _print_tree(generated, layout)
    else:
        typer.echo(write_schema(generated))


@app.command("lint")
def lint(
    files: Annotated[
        list[Path],
        typer.Argument(exists=True, dir_okay=False, help="Schemas, and prompts for them."),
    ],
    model: ui.ModelOption = None,
    as_json: ui.JsonOption = False,
) -> None:
    """Find what is wrong, doubtful or wasteful in files. Exit status 1 if anything is."""
    from ragcache_api.cli.schema_outline import (
        TemplateTokenizer,
        finding_values,
        format_finding,
        lint_files,
    )

    ui.check_model(model)
    findings, notes = lint_files(files, TemplateTokenizer.load(model).template)
    found = [(file, finding) for file, each in findings.items() for finding in each]
    count = len(found)
    for note in notes:
        ui.errors.print(StyledText(note, "dim"), soft_wrap=True)
    if as_json:
        ui.print_json([finding_values(finding, file) for file, finding in found])
    else:
        for file, finding in found:
            ui.console.print(format_finding(finding, file), soft_wrap=True)
        what = "file" if len(files) == 1 else "files"
        verdict = f"{count} finding{'s' * (count > 1)}" if count else "nothing to report"
        ui.console.print(f"{len(files)} {what}: {verdict}", style="bold" if count else "green")
    raise typer.Exit(1 if count else 0)


@app.command("xsd")
def xsd() -> None:
    """Print PML's XML Schema, for editors: `ragcache schema xsd > pml.xsd`."""
    typer.echo((package_files("ragcache_schemas") / "pml.xsd").read_text(encoding="utf-8"))


def _require_file(target: str) -> Path:
    """The file of a target that is spelled as one. Raises `BadParameter`."""
    file = Path(target)
    if not file.is_file():
        raise typer.BadParameter(f"there is no file {file}", param_hint="TARGET")
    return file


def _print_tree(schema: Schema, layout: Layout, readable: Callable[[str], str] = str) -> None:
    from ragcache_api.cli.schema_outline import outline_lines

    for line in outline_lines(schema, layout, readable, width=max(ui.console.width, 100)):
        ui.console.print(line, no_wrap=True, crop=False, overflow="ignore", soft_wrap=True)
