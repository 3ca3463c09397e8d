"""Texts in place of lists, and calls of a closed object."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ragcache import RagCache, SourceDocument
from ragcache.contents import Collections, Documents, Schemas
from ragcache.errors import ConfigurationError, EngineClosed
from ragcache.models import LoadedModel
from ragcache.params import SearchParams

Q = "Where is the kiln?"
FACES = {"": RagCache, "collections": Collections, "documents": Documents, "schemas": Schemas}
"""Classes that users call, by the attribute of `RagCache` that gives them."""
METHODS = [
    (face, name)
    for face, owner in FACES.items()
    for name, _ in inspect.getmembers(owner, inspect.isfunction)
    if not name.startswith("_") and name != "close"
]
VALUES: dict[str, Any] = {
    "collection": "n", "sources": [SourceDocument("b", "c")], "document_ids": ["a"], "names": ["a"],
    "document_id": "a", "to": "b", "ids": ["a"], "question": Q, "questions": [Q],
    "messages": "x", "conversations": ["x"], "text": "<schema name='x'/>", "name": "x",
    "query": Q, "namespace": "x", "instruction": "Briefly.", "calibration": None,
    "path": "x.tar", "source": "x.tar", "description": "Notes.",
}  # fmt: skip


def required(method: Callable[..., object]) -> dict[str, Any]:
    """Arguments with which a method may be called."""
    parameters = inspect.signature(method).parameters.values()
    given = {each.name: VALUES[each.name] for each in parameters
             if each.name != "self" and each.default is each.empty
             and each.kind is not each.VAR_KEYWORD}  # fmt: skip
    options = " ".join(str(each.annotation) for each in parameters)
    if "AskOptions" in options or "SearchOptions" in options:
        given["collection"] = "n"
    return given


@pytest.fixture(scope="module")
def kiln(reader: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RagCache]:
    with RagCache.open(tmp_path_factory.mktemp("kiln"), reader) as rag:
        rag.ingest("n", [SourceDocument("a", "The kiln is in the yard.")])
        yield rag


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("questions", lambda rag: rag.ask_batch("abc", collection="n")),
        ("document_ids", lambda rag: rag.delete("n", "a")),
        ("document_ids", lambda rag: rag.collections.preview_deletion("n", "a")),
        ("document_ids", lambda rag: rag.documents.texts("n", "a")),
        ("ids", lambda rag: rag.documents.get("n", "a")),
        ("ids", lambda rag: rag.collections.add_scaffold("n", "a")),
        ("names", lambda rag: rag.modules.named("n", "a")),
        ("include", lambda rag: rag.ingest("n", [], include="*.md")),
        ("exclude", lambda rag: rag.sync("n", [], exclude="*.md")),
    ],
)
def test_a_text_is_no_list_of_its_letters(
    kiln: RagCache, name: str, call: Callable[[Any], object]
) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{name} is '.*'; it takes a list of texts"):
        call(kiln)
    assert [each.source_id for each in kiln.documents.get("n")] == ["a"]


def test_numbers_of_numpy_are_numbers(kiln: RagCache) -> None:
    import numpy as np

    hits = kiln.retrieve(Q, collection="n", k=np.int64(1), threshold=np.float32(0.001)).hits
    assert len(hits) == 1


@pytest.fixture(scope="module")
def closed(
    reader: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RagCache, dict[str, Any]]:
    """A closed object, and what belonged to it."""
    rag = RagCache.open(tmp_path_factory.mktemp("closed"), reader)
    rag.ingest("n", [SourceDocument("a", "The kiln is in the yard.")])
    owned = {
        "tenant": rag.within("tenant"), "modules": rag.modules, "jobs": rag.jobs,
        "keys": rag.keys, "retriever": rag.retriever(), "documents": rag.documents,
    }  # fmt: skip
    rag.close()
    rag.close()
    return rag, owned


@pytest.mark.parametrize(("face", "name"), METHODS)
def test_a_closed_object_refuses_every_call(
    closed: tuple[RagCache, Any], face: str, name: str
) -> None:
    arguments = required(getattr(FACES[face], name))
    for rag in (closed[0], closed[1]["tenant"]):
        with pytest.raises(EngineClosed, match="open it again"):
            getattr(getattr(rag, face) if face else rag, name)(**arguments)


def test_rag_cache_has_at_most_30_public_methods() -> None:
    assert len([name for name in vars(RagCache) if not name.startswith("_")]) <= 30


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
        ("documents", lambda documents: documents.get("n")),
        ("retriever", lambda retriever: retriever.retrieve("x", "n", SearchParams(k=1))),
    ],
)  # fmt: skip
def test_what_belonged_to_a_closed_object_is_closed(
    closed: tuple[RagCache, Any], part: str, call: Callable[[Any], object]
) -> None:
    with pytest.raises(EngineClosed):
        call(closed[1][part])


def test_signatures_spell_no_objects_out() -> None:
    for _, method in inspect.getmembers(RagCache, callable):
        assert "object at" not in str(getattr(method, "__doc__", ""))
        if inspect.isfunction(method):
            assert "=<" not in str(inspect.signature(method))
