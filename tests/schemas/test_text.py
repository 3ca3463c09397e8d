"""White space, characters and names; the effect of white space on PML is in test_parser.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ragcache_schemas as pml
from ragcache_schemas.text import PARAMETER, name_problem, tidy, title_problem


@given(st.text(st.sampled_from(" \t\nab\r\u3000" + PARAMETER)))
def test_tidy_is_idempotent_and_keeps_every_word(flow: str) -> None:
    once = tidy(flow)
    assert tidy(once) == once
    assert once.split() == flow.split()
    assert once.count(PARAMETER) == flow.count(PARAMETER)


@pytest.mark.parametrize(
    ("text", "carried"),
    [
        ("plain\ttext\r\n", "plain\ttext\r\n"),
        ("page one\fpage two", "page one\npage two"),
        ("page one\n\f\npage two\v", "page one\npage two\n"),
        ("\x1b[1mbold\x1b[0m\x00", "[1mbold[0m"),
        ("a\ud800b\ufffe", "a\ufffdb"),
    ],
)
def test_sanitize_text(text: str, carried: str) -> None:
    assert pml.sanitize_text(text) == carried


@given(st.text(st.characters(exclude_categories=[])))
def test_sanitized_text_survives_writing_and_parsing(text: str) -> None:
    schema = pml.Schema("s", (pml.Module("m", (pml.Text(pml.sanitize_text(text)),)),))
    assert pml.parse_schema(pml.write_schema(schema)) == schema
    assert pml.sanitize_text(pml.sanitize_text(text)) == pml.sanitize_text(text)


NAMES = {
    None: ["a", "_a", "a.b", "a-b", "a1", "名字", "ñ", "unit.py", "😀"],
    pml.InvalidName: ["", "1a", "-a", ".a", "a b", "a/b", "a:b", "a@b", "a\n", "a×b"],
    pml.ReservedName: ["system", "user", "assistant", "module", "union", "xml-a", "XmL"],
}


@pytest.mark.parametrize(("name", "error"), [(n, e) for e, names in NAMES.items() for n in names])
def test_names_of_modules(name: str, error: type | None) -> None:
    problem = name_problem(name, "module")
    assert (None if problem is None else type(problem)) is error
    assert pml.is_name(name) == (error is not pml.InvalidName)


def test_names_of_parameters_and_titles() -> None:
    assert name_problem("user", "parameter") is None
    assert type(name_problem("schema", "parameter")) is pml.ReservedName
    assert title_problem("My hand-book / 2026", "schema") is None
    for title in ("", " a", "a ", "a\nb", "a\0b"):
        assert type(title_problem(title, "schema")) is pml.InvalidName


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("docs/leave policy.md", "docs-leave-policy.md"),
        ("2026 plan", "_2026-plan"),
        ("user", "_user"),
        ("请假制度.md", "请假制度.md"),
        ("***", "document"),
        ("xml notes", "_xml-notes"),
        (".hidden", "_.hidden"),
    ],
)
def test_module_name(text: str, name: str) -> None:
    assert pml.module_name(text) == name


@given(st.text())
def test_module_name_is_always_valid(text: str) -> None:
    assert name_problem(pml.module_name(text), "module") is None


def test_paths_with_the_same_module_name_get_different_names() -> None:
    paths = ["a/b.md", "a-b.md", "a b.md"]
    names = pml.module_names(paths)
    assert names["a-b.md"] == "a-b.md"
    assert len(set(names.values())) == 3
    assert pml.module_names(reversed(paths)) == names, "whatever the order"
