"""Arguments of wrong types, and calls of a closed object."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ragcache import Generation, RagCache, SourceDocument
from ragcache.errors import ConfigurationError, EngineClosed
from ragcache.models import LoadedModel
from ragcache.retrieval import SearchParams

Q = "Where is the kiln?"
METHODS = {
    name: [
        each.name
        for each in inspect.signature(method).parameters.values()
        if each.name != "self" and each.kind is not each.VAR_KEYWORD
    ]
    for name, method in inspect.getmembers(RagCache, inspect.isfunction)
    if not name.startswith("_")
}
"""The public methods with the names of their arguments, but for options."""
VALUES: dict[str, Any] = {
    "collection": "n", "sources": [SourceDocument("b", "c")], "document_ids": ["a"], "names": ["a"],
    "document_id": "a", "to": "b", "space": "s", "ids": ["a"], "question": Q, "questions": [Q],
    "messages": "x", "conversations": ["x"], "text": "<schema name='x'/>", "name": "x",
    "query": Q, "namespace": "x", "observer": print, "instruction": "Briefly.", "calibration": None,
}  # fmt: skip


def required(method: str) -> dict[str, Any]:
    """Arguments with which a method may be called."""
    parameters = inspect.signature(getattr(RagCache, method)).parameters.values()
    given = {each.name: VALUES[each.name] for each in parameters
             if each.name != "self" and each.default is each.empty
             and each.kind is not each.VAR_KEYWORD}  # fmt: skip
    options = " ".join(str(each.annotation) for each in parameters)
    if "AskOptions" in options or "SearchOptions" in options:
        given["collection"] = "n"
    return given


def finish(result: object) -> None:
    if inspect.iscoroutine(result):
        asyncio.run(result)


@pytest.fixture(scope="module")
def kiln(reader: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RagCache]:
    with RagCache.open(tmp_path_factory.mktemp("kiln"), reader) as rag:
        rag.ingest("n", [SourceDocument("a", "The kiln is in the yard.")])
        yield rag


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("k", lambda rag: rag.ask(Q, collection="n", k="3")),
        ("k", lambda rag: rag.ask(Q, collection="n", k=2.5)),
        ("k", lambda rag: rag.ask(Q, collection="n", k=True)),
        ("mode", lambda rag: rag.ask(Q, collection="n", mode=3)),
        ("question", lambda rag: rag.ask(None, collection="n")),
        ("questions", lambda rag: rag.ask_batch("abc", collection="n")),
        ("collection", lambda rag: rag.ask(Q, collection=3)),
        ("generation", lambda rag: rag.ask(Q, collection="n", generation={"n": 2})),
        ("threshold", lambda rag: rag.ask(Q, collection="n", threshold="0.2")),
        ("mmr", lambda rag: rag.retrieve(Q, collection="n", mmr="x")),
        ("query", lambda rag: rag.retrieve(3, collection="n")),
        ("mode", lambda rag: rag.chat([{"role": "user", "content": "x"}], mode=3)),
        ("text", lambda rag: rag.prompt(3)),
        ("text", lambda rag: rag.add_schema(3)),
        ("document_ids", lambda rag: rag.delete("n", "a")),
        ("n", lambda _: Generation.of(n="2")),
        ("stop", lambda _: Generation.of(stop=3)),
        ("min_confidence", lambda _: Generation.of(min_confidence="0.5")),
        ("refusal", lambda _: Generation(refusal=3)),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_type_names_its_argument(
    kiln: RagCache, name: str, call: Callable[[Any], object]
) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{name} is .* of type \w+; it takes "):
        call(kiln)


@pytest.mark.parametrize(
    "options",
    [
        {"module_tokens": "x"}, {"module_tokens": 1.5}, {"host_bytes": None}, {"host_bytes": 1.5},
        {"queue": "3"}, {"embedding": 3}, {"warm_up": "yes"}, {"scaffold_after": "x"},
        {"scaffold_bytes": 1.5}, {"disk_bytes": [1]}, {"remote": 3}, {"model": 3},
    ],
)  # fmt: skip
def test_opening_names_the_argument_of_a_wrong_type(
    reader: LoadedModel, tmp_path: Path, options: dict[str, Any]
) -> None:
    [name] = options
    with pytest.raises(ConfigurationError, match=rf"^{name} is .* of type \w+; it takes "):
        RagCache.open(tmp_path, **{"model": reader, **options})


def test_numbers_of_numpy_are_numbers(kiln: RagCache) -> None:
    import numpy as np

    hits = kiln.retrieve(Q, collection="n", k=np.int64(1), threshold=np.float32(0.001)).hits
    assert len(hits) == 1


@pytest.mark.parametrize(("method", "name"), [
    (method, name)
    for method, takes in METHODS.items()
    for name in takes
    if (method, name) != ("close", "drain")
])  # fmt: skip
def test_every_argument_of_a_wrong_type_is_named(kiln: RagCache, method: str, name: str) -> None:
    given = {**required(method), name: object()}
    shown = {"questions": "questions?", "conversations": "conversations"}.get(name, name)
    with pytest.raises(ConfigurationError, match=rf"^{shown} is .* of type object; it takes "):
        finish(getattr(kiln, method)(**given))


def test_sequences_hold_texts(kiln: RagCache) -> None:
    with pytest.raises(ConfigurationError, match=r"^document_ids is \[3\]"):
        kiln.delete("n", [3])  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match=r"^sources is 3, of type int"):
        kiln.ingest("n", [3])  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match=r"^messages is 3, of type int"):
        kiln.chat_batch(["x", 3])  # type: ignore[list-item]


@pytest.fixture(scope="module")
def closed(
    reader: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RagCache, dict[str, Any]]:
    """A closed object, and what belonged to it."""
    rag = RagCache.open(tmp_path_factory.mktemp("closed"), reader)
    rag.ingest("n", [SourceDocument("a", "The kiln is in the yard.")])
    owned = {
        "tenant": rag.within("tenant"), "modules": rag.modules, "jobs": rag.jobs,
        "keys": rag.keys, "records": rag.records("s"), "retriever": rag.retriever(),
    }  # fmt: skip
    rag.close()
    rag.close()
    return rag, owned


@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"close"}))
def test_a_closed_object_refuses_every_call(closed: tuple[RagCache, Any], method: str) -> None:
    rag, owned = closed
    for each in (rag, owned["tenant"]):
        with pytest.raises(EngineClosed, match="open it again"):
            finish(getattr(each, method)(**required(method)))


@pytest.mark.parametrize("name", ["modules", "jobs", "keys", "internals"])
def test_a_closed_object_gives_no_part_of_itself(closed: tuple[RagCache, Any], name: str) -> None:
    with pytest.raises(EngineClosed, match="open it again"):
        getattr(closed[0], name)


@pytest.mark.parametrize(
    ("part", "call"),
    [
        ("modules", lambda modules: modules.page()), ("modules", lambda modules: modules.get(1)),
        ("modules", lambda modules: modules.warm("n")),
        ("modules", lambda modules: modules.pin("n")),
        ("jobs", lambda jobs: jobs.list()), ("jobs", lambda jobs: jobs.get(1)),
        ("jobs", lambda jobs: jobs.submit("n", [SourceDocument("b", "c")])),
        ("keys", lambda keys: keys.list()), ("keys", lambda keys: keys.create("x")),
        ("records", lambda records: records.exists(["a"])),
        ("retriever", lambda retriever: retriever.retrieve("x", "n", SearchParams(1))),
    ],
)  # fmt: skip
def test_what_belonged_to_a_closed_object_is_closed(
    closed: tuple[RagCache, Any], part: str, call: Callable[[Any], object]
) -> None:
    with pytest.raises(EngineClosed):
        call(closed[1][part])


def test_signatures_spell_no_objects_out() -> None:
    assert "SamplingParams(" not in str(inspect.signature(Generation))
    for _, method in inspect.getmembers(RagCache, callable):
        assert "object at" not in str(getattr(method, "__doc__", ""))
        if inspect.isfunction(method):
            assert "=<" not in str(inspect.signature(method))
