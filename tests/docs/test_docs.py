"""README, pages and docstrings: every example runs and prints what it says."""

from __future__ import annotations

import doctest
import inspect
import re
import shlex
import shutil
import tomllib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import ragcache_schemas as pml
from ragcache import RagCache, planning
from ragcache.contents import Collections, Documents, Schemas
from ragcache.models import LoadedModel
from ragcache.params import OpenConfig, base, request
from ragcache.pipeline.ingestion_jobs import IngestionJobs
from ragcache.retrieval import filters
from ragcache_api.cli.main import app, load_command
from ragcache_api.http import ServiceSettings
from tests.api.http.server_process import start_server
from tests.conftest import REPOSITORY, write_notes
from tests.schemas.pml_trees import count_words
from tests.tiny_encoders import write_cross_encoder, write_embedder

GUIDES = REPOSITORY / "docs" / "guides"
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


SNIPPETS = re.findall(r"```(python|text)\n(.*?)```", README, re.DOTALL)
_NAMES = "chandlery cold-store fire key-loan lone-working merganser sample-labels travel visitors"
MENTIONED = _NAMES.split()


@pytest.fixture(scope="module")
def empty_clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with some documents of the examples, and nothing else."""
    clone = tmp_path_factory.mktemp("clone")
    handbook = clone / "examples" / "handbook"
    handbook.mkdir(parents=True)
    for name in MENTIONED:
        shutil.copy(REPOSITORY / "examples" / "handbook" / f"{name}.md", handbook)
    return clone


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_each_readme_snippet_runs_alone(
    empty_clone: Path, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    kind, snippet = SNIPPETS[number]
    (tmp_path / "examples").symlink_to(empty_clone / "examples")
    monkeypatch.chdir(tmp_path)
    if kind == "python":
        exec(compile(snippet, "README.md", "exec"), {})
        printed = capsys.readouterr().out
    else:
        for line in snippet.splitlines():
            program, *arguments = shlex.split(line.removeprefix("$ "))
            assert program == "ragcache"
            done = CliRunner().invoke(app, arguments)
            assert done.exit_code == 0, done.output
            printed = done.stdout
    assert (tmp_path / "state").is_dir()
    if "print(" in snippet or kind == "text":
        assert "cold-store.md" in printed


def test_readme_has_snippets_of_both_kinds() -> None:
    assert sorted(kind for kind, _ in SNIPPETS) == ["python", "python", "text"]


def test_readme_commands_exist() -> None:
    commands = get_command(app)
    names = set(re.findall(r"^(?:\$ |    )ragcache (\w+)", README, re.MULTILINE))
    assert {"ingest", "ask", "serve"} <= names <= set(commands.commands)


def options_of(command: Any) -> set[str]:
    """The long options of a command, and of the commands below it."""
    own = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    below = getattr(command, "commands", {}).values()
    return own.union(*(options_of(each) for each in below))


COMMAND = re.compile(r"(?:^|`|\$ )ragcache (\w+)([^`\n#|]*)", re.MULTILINE)


def test_options_of_commands_in_the_pages_exist() -> None:
    commands, pages = get_command(app).commands, [REPOSITORY / "README.md"]
    pages += (REPOSITORY / "docs").rglob("*.md")
    known = {name: options_of(load_command(name)) | {"--help"} for name in commands}
    wrong = [
        f"{page.name}: {found[0]}"
        for page in pages
        for found in COMMAND.finditer(page.read_text(encoding="utf-8"))
        if set(re.findall(r" (--[a-z-]+)", found[2])) - known.get(found[1], set())
    ]
    assert not wrong


PML = (REPOSITORY / "docs/guides/pml.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```([a-z ]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class PmlExample:
    """A fenced example; `line` is that of its first line."""

    kind: str
    text: str
    line: int


def pml_examples() -> list[PmlExample]:
    """The examples in the order of the page."""
    return [
        PmlExample(found[1], found[2], PML.count("\n", 0, found.start(2)) + 1)
        for found in BLOCK.finditer(PML)
    ]


def read(block: PmlExample, indexes: dict[str, pml.SchemaIndex]) -> None:
    """Parses a schema or a prompt and does what one does with it."""
    if pml.is_prompt(block.text):
        prompt = pml.parse_prompt(block.text)
        pml.resolve_prompt(indexes[prompt.schema], prompt)
        return
    schema = pml.parse_schema(block.text)
    assert pml.parse_schema(pml.write_schema(schema)) == schema
    indexes[schema.name] = pml.SchemaIndex.build(schema, count_words)


@pytest.mark.filterwarnings("error::ragcache_schemas.PMLWarning")
def test_pml_xml_examples_are_right_or_as_wrong_as_the_page_says() -> None:
    indexes: dict[str, pml.SchemaIndex] = {}
    found = pml_examples()
    for block, following in zip(found, [*found[1:], None], strict=True):
        if block.kind == "xml":
            read(block, indexes)
        elif block.kind == "xml error":
            assert following is not None
            with pytest.raises(pml.PMLError) as caught:
                read(block, indexes)
            assert str(caught.value) == following.text.strip(), f"line {block.line}"
    assert len(indexes) > 8


@pytest.mark.slow
def test_pml_python_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "pml_doc"}
    lines = 0
    for block in pml_examples():
        if block.kind == "python":
            file = tmp_path / f"line_{block.line}.py"  # a program's source must be at hand
            file.write_text(block.text, encoding="utf-8")
            exec(compile(block.text, str(file), "exec"), names)
            lines += block.text.count("\n")
    assert lines > 80


def test_pml_examples_are_all_of_known_kinds() -> None:
    assert {block.kind for block in pml_examples()} == {"xml", "xml error", "python", "text"}


STRUCTURED = (REPOSITORY / "docs/guides/structured.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_structured_examples_print_what_the_page_says(
    notes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(notes.parent)
    blocks = BLOCK.findall(STRUCTURED)
    assert {kind for kind, _ in blocks} == {"python", "text"}
    names: dict[str, Any] = {}
    shown = 0
    try:
        for (kind, text), (following, printed) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
            if kind == "python":
                capsys.readouterr()
                exec(compile(text, "structured.md", "exec"), names)
                expected = printed if following == "text" else ""
                assert capsys.readouterr().out == expected
                shown += bool(expected)
    finally:
        names["rag"].close()
    assert shown == 2


def page_blocks(page: str, kind: str) -> list[str]:
    text = (GUIDES / page).read_text(encoding="utf-8")
    return [found[2] for found in BLOCK.finditer(text) if found[1] == kind]


PYTHON_GUIDES = (
    "ask.md",
    "extractive.md",
    "confidence.md",
    "documents.md",
    "evaluate.md",
    "transfer.md",
)


@pytest.mark.slow
@pytest.mark.parametrize("page", PYTHON_GUIDES)
def test_python_examples_run(
    empty_clone: Path, page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "examples").symlink_to(empty_clone / "examples")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = page_blocks(page, "python")
    assert blocks
    try:
        for block in blocks:
            exec(compile(block, page, "exec"), names)
    finally:
        if "rag" in names:
            names["rag"].close()


def test_links_lead_to_files() -> None:
    """Links of pages work where the repository is read, beside the site that is built from it."""
    pages = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]
    links = [
        (page, link)
        for page in pages
        for link in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
        if not re.match(r"[a-z]+:", link)
    ]
    assert len(links) > 200
    assert not [(page.name, link) for page, link in links if not (page.parent / link).exists()]


def test_structured_styles_are_described() -> None:
    from ragcache.structured import ToolStyle

    assert all(f"| `{style}` |" in STRUCTURED for style in ToolStyle)


def test_limits_of_documents_are_the_defaults() -> None:
    page = (REPOSITORY / "docs/guides/documents.md").read_text()
    rows = re.findall(r"^\| `(document_\w+)` \| (\w+) \|", page, re.MULTILINE)
    defaults = {name: field.default for name, field in OpenConfig.model_fields.items()}
    assert len(rows) == 3
    for name, value in rows:
        assert str(defaults[name]).removesuffix(".0") == value


def test_types_of_documents_are_listed() -> None:
    from ragcache.documents.formats import is_supported
    from ragcache.documents.formats.text import TEXT_SUFFIXES

    page = (REPOSITORY / "docs/guides/documents.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `.")]
    listed = re.findall(r"\.\w+", " ".join(rows))
    assert all(is_supported(f"a{suffix}") for suffix in listed)
    assert set(listed) > TEXT_SUFFIXES & {".md", ".txt", ".rst"}


LANGCHAIN = (REPOSITORY / "docs/guides/langchain.md").read_text(encoding="utf-8")
LANGCHAIN_BLOCKS = re.findall(
    r"^```python( no-run)?\n(.*?)^```$", LANGCHAIN, re.MULTILINE | re.DOTALL
)


@pytest.mark.slow
def test_langchain_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(RagCache, "open", partial(RagCache.open, max_tokens=8))
    names: dict[str, Any] = {"__name__": "langchain_doc"}
    for skipped, code in LANGCHAIN_BLOCKS:
        if not skipped:
            exec(compile(code, "docs/guides/langchain.md", "exec"), names)
    assert len(LANGCHAIN_BLOCKS) > 8


def test_langchain_example_for_another_model_runs_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scripted model stands in for one that writes JSON."""
    from ragcache_connectors.langchain import ChatRagCache
    from tests.connectors.langchain.scripted_model import STRING, scripted_model

    with RagCache.open(tmp_path, model=scripted_model()) as rag:
        names = {"model": ChatRagCache(rag=rag, max_tokens=200), "note": "x", "__name__": "doc"}
        [code] = [code for skipped, code in LANGCHAIN_BLOCKS if skipped]
        *lines, last = code.rstrip().splitlines()
        exec(compile("\n".join(lines), "docs/guides/langchain.md", "exec"), names)
        assert eval(last, names) == names["Berth"](boat=STRING, quay=STRING)


SERVICE_PAGES = ("rest.md", "operate.md", "doors.md")


@pytest.mark.enable_socket
@pytest.mark.allow_hosts(["127.0.0.1"])
@pytest.mark.slow
@pytest.mark.parametrize("page", [*SERVICE_PAGES, "mcp.md"])
def test_service_examples_run(page: str, reader: LoadedModel, tmp_path: Path) -> None:
    with RagCache.open(tmp_path / "state", reader) as rag:
        rag.ingest("notes", write_notes(tmp_path / "notes"))
    encoders = {}
    if page == "doors.md":  # its embeddings and ranks need an embedder and a reranker
        encoders["RAGCACHE_EMBEDDING"] = str(write_embedder(tmp_path / "embedder"))
        encoders["RAGCACHE_RERANKER"] = str(write_cross_encoder(tmp_path / "reranker"))
    server = start_server(tmp_path / "state", **encoders)
    try:
        names: dict[str, object] = {}
        examples = page_blocks(page, "python")
        assert len(examples) >= (1 if page == "mcp.md" else 4)
        for example in examples:
            code = example.replace("http://127.0.0.1:8000", server.url)
            exec(compile(code, page, "exec"), names)
    finally:
        assert server.stop() == 0


@pytest.mark.parametrize("page", [*SERVICE_PAGES, "../start.md", "transfer.md", "mcp.md"])
def test_commands_of_pages_exist(page: str) -> None:
    blocks = "\n".join(page_blocks(page, "sh"))
    lines = [shlex.split(line) for line in blocks.splitlines() if line.startswith("ragcache ")]
    assert lines
    for words in lines:
        command = load_command(words[1])
        for word in words[2:]:
            if not hasattr(command, "commands"):
                break
            command = command.commands[word]
        options = {name for each in command.params for name in each.opts}
        assert {word for word in words if word.startswith("--")} <= options, words


def test_operating_settings_file_is_valid() -> None:
    [text] = page_blocks("operate.md", "toml")
    assert ServiceSettings.read(**tomllib.loads(text)).host


def test_every_route_is_documented() -> None:
    from fastapi import FastAPI

    from ragcache_api.http.app import ROUTERS

    text = "".join((GUIDES / page).read_text(encoding="utf-8") for page in SERVICE_PAGES)
    app = FastAPI()
    for router in ROUTERS:
        app.include_router(router)
    paths = app.openapi()["paths"]
    assert len(paths) > 40
    for path in paths:
        stem = re.sub(r"/\{.*", "", path)
        assert stem in text, path


MAIN = {"open", "ingest", "ask", "stream", "chat", "prompt", "retrieve", "within"}


def examples() -> dict[str, doctest.DocTest]:
    """The examples by method, in the order of the source."""
    parser = doctest.DocTestParser()
    owners = (RagCache, IngestionJobs, Collections, Documents, Schemas)
    methods = {name: method for owner in owners[::-1] for name, method in vars(owner).items()}
    methods = {**vars(RagCache), **methods}  # `open` first
    found = {
        name: parser.get_doctest(inspect.getdoc(method) or "", {}, name, None, None)
        for name, method in methods.items()
    }
    return {name: test for name, test in found.items() if test.examples}


@pytest.mark.slow
def test_every_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "boats.md").write_text("The survey boat is moored at the north quay.")
    names: dict[str, Any] = {"__name__": "docstrings"}
    runner = doctest.DocTestRunner()
    try:
        for test in examples().values():
            test.globs = names
            report: list[str] = []
            failed, _ = runner.run(test, out=report.append, clear_globs=False)
            assert failed == 0, "".join(report)
    finally:
        if "rag" in names:
            names["rag"].close()


def test_every_main_method_has_an_example() -> None:
    assert examples().keys() >= MAIN | {"submit", "add", "set_instruction"}


@pytest.mark.parametrize(
    "module", [base, request, filters, planning], ids=lambda each: each.__name__
)
def test_examples_of_functions_run(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed


def test_the_limits_of_the_service_have_the_values_of_the_code() -> None:
    from ragcache.engine import EngineConfig
    from ragcache_api.http.admission import LOOKAHEAD
    from ragcache_api.http.connection import HEADER_BYTES
    from ragcache_api.http.envelope import DRAIN_BYTES, DRAIN_PAUSE_SECONDS, DRAIN_SECONDS
    from ragcache_api.service_options import ServiceOptions

    text = " ".join((GUIDES / "operate.md").read_text(encoding="utf-8").split())
    seconds = ServiceOptions.model_fields["queue_seconds"].default
    assert LOOKAHEAD == 0.25
    for said in (
        f"| {HEADER_BYTES // 2**10} KiB of path and headers | 431",
        f"at most {DRAIN_BYTES // 2**20} MiB, for at most {DRAIN_SECONDS:g} s and",
        f"{DRAIN_PAUSE_SECONDS:g} s without bytes",
        f"| `queue_seconds` | `{seconds:g}` |",
        f"beyond the {EngineConfig().running} that the engine runs at once",
        "and a quarter of them wait for their turn",
    ):
        assert said in text, said
