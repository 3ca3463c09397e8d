"""Modes of reuse: how they are parsed, and what a new one takes."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import pytest
from langchain_core.messages import HumanMessage
from pydantic import BaseModel, ValidationError
from starlette.testclient import TestClient

from ragcache import RagCache
from ragcache.errors import ConfigurationError
from ragcache.models import LoadedModel
from ragcache.modes import EXACT, ISOLATED, KINDS, ROOTED, WITHOUT_CONTEXT, ModeKind, ReuseMode
from ragcache_api.cli.main import main
from ragcache_api.http import ServiceSettings, create_app
from ragcache_connectors.langchain import ChatRagCache
from tests.conftest import REPOSITORY

QUESTION = "Where does the spare key of the boathouse hang?"


@pytest.mark.parametrize(
    ("text", "encoding", "amount", "measured"),
    [("rooted", "rooted", 0, "rooted"),
     ("rooted:17", "rooted", 17, "rooted:16"),
     ("primed", "rooted", 0, "primed"),
     ("primed:1", "rooted", 1, "primed:1"),
     ("primed:31", "rooted", 31, "primed:16"),
     ("primed:999999", "rooted", 999_999, "primed:32"),
     ("isolated", "isolated", 0, "isolated"),
     ("exact", None, 0, "exact")],
)  # fmt: skip
def test_modes_are_parsed(text: str, encoding: str | None, amount: int, measured: str) -> None:
    mode = ReuseMode.parse(text)
    assert str(mode) == text
    assert ReuseMode.parse(mode) is mode
    assert (mode.encoding, mode.amount) == (encoding, amount)
    assert mode.reads_parts == bool(amount)
    assert mode.reads_states == (text != "exact")
    assert str(mode.measured) == measured


@pytest.mark.parametrize(
    ("text", "message"),
    [(text, "unknown mode .*; modes: rooted.:N., primed.:N., isolated, exact$")
     for text in ("Rooted", "", "fast", "linked:4", "exact:3", "recognized:rooted")]
    + [(text, "write primed.:N., such as primed:16")
       for text in ("primed:", "primed:0", "primed:-1", "primed:1.5", "primed:٣", "primed:015",
                    "primed:" + 5000 * "9")]
    + [("primed:1000000", "it takes 1 to 999999 tokens")],
)  # fmt: skip
def test_other_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        ReuseMode.parse(text)
    assert len(str(caught.value)) < 200


def test_leading_tokens_of_a_module_are_computed() -> None:
    primed = ReuseMode.parse("primed:4")
    assert [primed.leading_tokens(size) for size in (9, 3)] == [4, 3]
    assert primed.leading_tokens(9, follows_preamble=True) == 0, "its states are exact there"
    assert [mode.leading_tokens(9) for mode in (ROOTED, ISOLATED, EXACT)] == [0, 0, 9]


def test_the_first_module_of_a_primed_prompt_is_rooted() -> None:
    primed = ReuseMode.parse("primed:4")
    assert [primed.encoding_at(place) for place in range(3)] == ["rooted", "primed", "primed"]
    assert [mode.encoding_at(1) for mode in (ROOTED, ISOLATED, EXACT)] == [
        "rooted",
        "isolated",
        None,
    ]
    assert primed.encodings == ("rooted", "primed")
    assert (ISOLATED.encodings, EXACT.encodings) == (("isolated",), ())


def test_a_field_of_a_model_takes_a_mode() -> None:
    class Body(BaseModel):
        mode: ReuseMode | None = None

    assert Body.model_validate({"mode": "primed:16"}).model_dump_json() == '{"mode":"primed:16"}'
    with pytest.raises(ValidationError, match="1 to 999999 tokens"):
        Body.model_validate({"mode": "primed:1000000"})
    [field, _] = Body.model_json_schema()["properties"]["mode"]["anyOf"]
    for text in ("rooted", "rooted:1", "primed", "primed:16", "exact"):
        assert re.search(field["pattern"], text)
    for text in ("linked:4", "primed:", "primed:0", "rooted:1000000", "exact:1", "fast", "rooted "):
        assert not re.search(field["pattern"], text)


def test_names_of_modes_are_spelled_in_one_file() -> None:
    name = f"(?:{'|'.join(KINDS)})(?::[0-9NR]+)?"
    names = re.compile(rf"{name}(?:, ?{name})*")
    spelling = {
        path.relative_to(REPOSITORY).as_posix()
        for folder in ("ragcache", "api", "connectors", "schemas")
        for path in (REPOSITORY / folder).rglob("*.py")
        if re.search(f"[\"']{name}", text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        and names.fullmatch(node.value)
    }  # fmt: skip
    assert spelling == {"ragcache/modes.py"}


@pytest.mark.slow
def test_another_mode_takes_one_row(
    reader: LoadedModel, notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """LegoLink as its authors have it: modules without context, of which N tokens are computed."""
    lego = ModeKind("lego", WITHOUT_CONTEXT, "Isolated, N tokens computed.", 99, 32)
    monkeypatch.setitem(KINDS, lego.name, lego)
    state = tmp_path / "state"
    with RagCache.open(state, reader, max_tokens=4) as rag:
        rag.ingest("notes", [notes])
        asked = {"collection": "notes", "k": 2}
        isolated, answer = (rag.ask(QUESTION, mode=mode, **asked) for mode in (ISOLATED, "lego:3"))
        assert answer.mode == "lego:3"
        own = isolated.reuse.computed_tokens - isolated.reuse.created_tokens
        assert answer.reuse.computed_tokens == own + 3 * len(answer.sources)
        app = create_app(rag, ServiceSettings.read())
        with TestClient(app, base_url="http://localhost") as client:
            body = {"question": QUESTION, **asked, "mode": "lego:3"}
            served = client.post("/v1/answers", json=body).json()
            assert (served["mode"], served["text"]) == ("lego:3", answer.text)
        text = (notes / "keys.md").read_text(encoding="utf-8")
        message = ChatRagCache(rag=rag, mode="lego:3").invoke([HumanMessage(text)])
        assert message.response_metadata["ragcache"]["mode"] == "recognized:lego:3"
    words = f"ragcache ask --collection notes --state {state} --mode lego:3 --json".split()
    monkeypatch.setattr(sys, "argv", [*words, QUESTION])
    with pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code
    assert json.loads(capsys.readouterr().out)["mode"] == "lego:3"
