"""Names: what may be called what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_schemas import InvalidName, ReservedName, is_name, module_name
from ragcache_schemas.names import name_problem, title_problem


@pytest.mark.parametrize("name", ["a", "_a", "a.b", "a-b", "a1", "名字", "ñ", "unit.py", "😀"])
def test_names(name: str) -> None:
    assert is_name(name)
    assert name_problem(name, "module") is None


@pytest.mark.parametrize("name", ["", "1a", "-a", ".a", "a b", "a/b", "a:b", "a@b", "a\n", "a×b"])
def test_what_is_no_name(name: str) -> None:
    assert not is_name(name)
    assert type(name_problem(name, "module")) is InvalidName


@pytest.mark.parametrize("name", ["system", "user", "assistant", "module", "union", "xml-a", "XmL"])
def test_reserved_names_of_modules(name: str) -> None:
    assert type(name_problem(name, "module")) is ReservedName


def test_parameters_reserve_less() -> None:
    assert name_problem("user", "parameter") is None
    assert type(name_problem("schema", "parameter")) is ReservedName


def test_titles_are_one_line() -> None:
    assert title_problem("My hand-book / 2026", "schema") is None
    for title in ("", " a", "a ", "a\nb", "a\0b"):
        assert type(title_problem(title, "schema")) is InvalidName


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
def test_a_name_near_to_a_title(text: str, name: str) -> None:
    assert module_name(text) == name


@given(st.text())
def test_a_title_always_gives_a_valid_name(text: str) -> None:
    assert name_problem(module_name(text), "module") is None
