"""Arguments of wrong types, and calls of a closed object."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ragcache import Generation, RagCache, SourceDocument
from ragcache.errors import ConfigurationError, EngineClosed
from ragcache.models import LoadedModel

Q = "Where is the kiln?"


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
        {"disk_bytes": [1]}, {"remote": 3}, {"model": 3},
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


def test_a_closed_object_refuses_every_call(reader: LoadedModel, tmp_path: Path) -> None:
    rag = RagCache.open(tmp_path, reader)
    rag.ingest("n", [SourceDocument("a", "The kiln is in the yard.")])
    tenant = rag.within("tenant")
    rag.close()
    rag.close()
    calls: list[Callable[[], object]] = [
        lambda: rag.ask(Q, collection="n"), lambda: rag.ask(Q, collection="n", mode="exact"),
        lambda: rag.chat("x"), lambda: rag.retrieve(Q, collection="n"), rag.stats, rag.tiers,
        lambda: rag.ingest("n", [SourceDocument("b", "c")]), lambda: rag.delete("n", ["a"]),
        lambda: rag.rename("n", "a", "b"), lambda: rag.create_collection("x"),
        lambda: rag.delete_collection("n"), lambda: rag.documents("n"), rag.list_modules,
        lambda: rag.modules, lambda: rag.jobs, lambda: rag.keys, lambda: rag.records("s"),
        lambda: rag.add_schema("<schema name='x'/>"), rag.schemas, lambda: rag.within("x"),
        lambda: rag.prompt("<prompt schema='x'/>"), rag.running, rag.batch, rag.evictions,
        rag.collection_page, lambda: rag.texts("n", ["a"]), rag.retriever,
        lambda: rag.observe(print), lambda: rag.schema("n"), tenant.stats,
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(EngineClosed, match="open it again"):
            call()


def test_signatures_spell_no_objects_out() -> None:
    assert "SamplingParams(" not in str(inspect.signature(Generation))
    for _, method in inspect.getmembers(RagCache, callable):
        assert "object at" not in str(getattr(method, "__doc__", ""))
        if inspect.isfunction(method):
            assert "=<" not in str(inspect.signature(method))
