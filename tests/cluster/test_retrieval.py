"""Questions while other processes change a large collection."""

from __future__ import annotations

import random
from collections.abc import Iterator

from ragcache.db import Catalog, Database, NewDocument, NewModule
from ragcache.states import KVKey
from tests.cluster.conftest import Measured
from tests.cluster.machines import wait_until
from tests.cluster.services import COLLECTION, Service, Services

MODULES = 4000  # of a document's 10
WORDS = [f"word{n}" for n in range(5000)]


def documents(first: int, modules: int, *special: str) -> Iterator[NewDocument]:
    """Documents of ten modules, of which each holds the special words."""
    rng = random.Random(first)
    for number in range(first, first + modules // 10):
        texts = [" ".join([*rng.choices(WORDS, k=40), *special]) for _ in range(10)]
        rows = [
            NewModule(f"{number}#{n}", text, [1], KVKey(f"{number * 10 + n:064x}"))
            for n, text in enumerate(texts)
        ]
        yield NewDocument(str(number), "", "", rows)


def ask(service: Service, word: str) -> tuple[list[str], float]:
    """The documents that an answer cites, and the seconds that it waited for retrieval."""
    answered = service.ask(f"Where is {word}?").json()
    return [each["document"] for each in answered["sources"]], answered["timings"]["retrieve"]


def test_no_question_waits_for_an_index(services: Services, measured: Measured) -> None:
    database = Database.open(services.url)
    other = Catalog(database, "tokenizer", None)
    other.replace_documents(COLLECTION, list(documents(0, MODULES)))
    other.replace_documents(COLLECTION, list(documents(10_000, 10, "anchor")))
    service = services.start("a")  # which builds the first index aside
    cited, first = ask(service, "anchor")
    assert cited == ["10000"]
    warm = min(ask(service, "anchor")[1] for _ in range(5))
    other.replace_documents(COLLECTION, list(documents(20_000, 100, "beacon")))
    cited, few = ask(service, "beacon")
    assert cited[0].startswith("20"), "a few new modules are found at once"
    other.replace_documents(COLLECTION, list(documents(30_000, MODULES, "cutter")))
    other.delete_documents(COLLECTION, ["10000"])
    cited, many = ask(service, "anchor")
    assert "10000" not in cited
    wait_until(
        60, lambda: ask(service, "cutter")[0][:1] and ask(service, "cutter")[0][0] >= "30000"
    )
    name = f"retrieval, {MODULES:,} modules: first question, warm, 100 new, {MODULES:,} new"
    measured(name, ", ".join(f"{seconds:.2f} s" for seconds in (first, warm, few, many)))
    database.close()
