"""Commands on PML schemas: `ragcache schema`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.resources import files as package_files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import typer
from rich.text import Text as StyledText

from ragcache.config import check_placement
from ragcache.params import SearchParams
from ragcache_api.cli import console as ui
from ragcache_api.cli.options import ENCODING, Offer, expand_options
from ragcache_api.service_options import ServiceOptions

if TYPE_CHECKING:
    from ragcache.pipeline import ChatTemplate
    from ragcache_schemas import Finding, Placement


app = typer.Typer(help="PML schemas: written ones and generated ones.", no_args_is_help=True)
_SEVERITY_STYLES = {"error": "bold red", "warning": "yellow", "advice": "cyan"}

T = TypeVar("T")


@app.command("add")
@expand_options
def add(
    file: Annotated[Path, typer.Argument(help="A PML schema.")],
    options: Annotated[ServiceOptions, Offer(("model", "dtype", "state"))],
    placement: Annotated[
        str, typer.Option(help="schema (fixed positions) or compact (no gaps).")
    ] = "schema",
) -> None:
    """Store a schema and encode its modules, so that prompts can import them."""
    ui.check_model(options.model)
    text = ui.read_text(file)
    check_placement(placement)
    with ui.open_rag(options, embedding="none") as rag:
        added = rag.schemas.add(text, placement=cast("Placement", placement), source=str(file))
        encoded = rag.stats().encoded
    ui.console.print(f"schema {added.name} added, {encoded} states encoded", markup=False)


@app.command("show")
@expand_options
def show(
    collection: Annotated[str, typer.Argument(help="The collection.")],
    search: Annotated[SearchParams, Offer(("k",))],
    options: Annotated[ServiceOptions, ENCODING],
    expand: Annotated[bool, typer.Option("--expand", help="Write the members out.")] = False,
) -> None:
    """Print the generated schema of a collection as PML."""
    from ragcache_schemas import write_schema

    with ui.open_existing_rag(options, embedding="none") as rag:
        typer.echo(write_schema(rag.schemas.generate(collection, k=search.k, expanded=expand)))


@app.command("lint")
@expand_options
def lint(
    files: Annotated[
        list[Path],
        typer.Argument(exists=True, dir_okay=False, help="Schemas, and prompts for them."),
    ],
    options: Annotated[ServiceOptions, Offer(("model",))],
    as_json: ui.JsonOption = False,
) -> None:
    """Find errors, doubtful passages and waste in files. Exit status 1 if there are any."""
    model = ui.read_settings(options).model
    ui.check_model(model)
    findings, notes = _lint_files(files, load_template(model))
    found = [(file, finding) for file, each in findings.items() for finding in each]
    count = len(found)
    for note in notes:
        ui.errors.print(StyledText(note, "dim"), soft_wrap=True)
    if as_json:
        ui.print_json([_finding_values(finding, file) for file, finding in found])
    else:
        for file, finding in found:
            ui.console.print(_format_finding(finding, file), soft_wrap=True)
        what = "file" if len(files) == 1 else "files"
        verdict = f"{count} finding{'s' * (count > 1)}" if count else "nothing to report"
        ui.console.print(f"{len(files)} {what}: {verdict}", style="bold" if count else "green")
    raise typer.Exit(1 if count else 0)


@app.command("xsd")
def xsd() -> None:
    """Print PML's XML Schema, for editors: `ragcache schema xsd > pml.xsd`."""
    typer.echo((package_files("ragcache_schemas") / "pml.xsd").read_text(encoding="utf-8"))


def load_template(model: str | None) -> ChatTemplate:
    """Load the chat template of a model folder or hub name, without weights.

    Defaults to the embedded reader. Raises `ModelNotFound`.
    """
    from ragcache.models import LoadedModel
    from ragcache.models.plain_tokenizer import PlainTokenizer
    from ragcache.models.reader import READER
    from ragcache.pipeline import ChatTemplate

    tokenizer = PlainTokenizer(READER) if model is None else _hub_tokenizer(model)
    return ChatTemplate(LoadedModel(model or str(READER), cast("Any", None), tokenizer))


def _hub_tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    from ragcache.errors import ModelNotFound

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ModelNotFound(
            f"cannot load the tokenizer of {model!r}: {error}. Give a folder with a tokenizer, or "
            "the name of a hub model that this machine can reach"
        ) from error


def _lint_files(
    files: Sequence[Path], template: ChatTemplate
) -> tuple[dict[Path, list[Finding]], list[str]]:
    """Return the findings in each file, and notes on prompts whose schema is in none of them."""
    from ragcache_schemas import (
        SchemaIndex,
        is_prompt,
        lint_prompt,
        lint_schema,
        parse_prompt,
        parse_schema,
    )

    texts = {file: file.read_bytes() for file in files}
    prompts = [file for file in texts if is_prompt(texts[file])]
    findings: dict[Path, list[Finding]] = {file: [] for file in texts}
    indexes: dict[str, SchemaIndex] = {}
    notes: list[str] = []
    for file in (each for each in texts if each not in prompts):
        findings[file] = lint_schema(
            texts[file], source=str(file), count_tokens=template.count, render=template.render
        )
        index = _read_quietly(
            lambda text: SchemaIndex.build(parse_schema(text), template.count), texts[file]
        )
        if index is not None:
            indexes[index.schema.name] = index
    for file in prompts:
        prompt = _read_quietly(parse_prompt, texts[file])
        name = "" if prompt is None else prompt.schema
        findings[file] = lint_prompt(texts[file], indexes.get(name), source=str(file))
        if prompt is not None and name not in indexes:
            notes.append(f"{file}: name the file of the schema {name!r} too, to check against it")
    return findings, notes


def _read_quietly(read: Callable[[bytes], T], text: bytes) -> T | None:
    """Parse a text. An invalid one gives None, as its findings name the errors."""
    from ragcache_schemas import PMLError, PMLWarning

    with suppress(PMLError), warnings.catch_warnings():
        warnings.simplefilter("ignore", PMLWarning)
        return read(text)
    return None


def _format_finding(finding: Finding, file: Path) -> StyledText:
    """Format a finding with its line of the file and a mark under its column."""
    where = finding.location
    place = f"{file}:{where.line}:{where.column}" if where else str(file)
    out = StyledText.assemble(
        (place, "bold"),
        ": ",
        (finding.severity, _SEVERITY_STYLES[finding.severity]),
        ": ",
        finding.message,
        " ",
        (f"[{finding.kind}]", "dim"),
    )
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    if where is None or where.line > len(lines):
        return out
    line = lines[where.line - 1].replace("\t", " ")
    start = max(0, where.column - 50)
    number = f"{where.line:>6} │ "
    out.append(f"\n{number}{line[start : start + 90]}", "dim")
    out.append("\n" + " " * (len(number) + where.column - 1 - start) + "^", "bold")
    return out


def _finding_values(finding: Finding, file: Path) -> dict[str, object]:
    """Return a finding as plain values, for JSON."""
    where = finding.location
    line, column = (where.line, where.column) if where else (None, None)
    return {
        "file": str(file),
        "line": line,
        "column": column,
        "severity": finding.severity,
        "kind": finding.kind,
        "message": finding.message,
    }
