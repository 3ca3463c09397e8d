"""The retriever: parameters, sparse, dense and hybrid search, MMR, embedders, processes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.embeddings import Embeddings
from sqlalchemy import event

from ragcache.db import Catalog, Database, NewDocument, NewModule, Vectors
from ragcache.errors import ConfigurationError, InvalidRequest, LedgerUnavailable, UnknownCollection
from ragcache.params import SearchKind, SearchParams
from ragcache.retrieval import BM25Index, Retriever, Retrievers, Selection, bm25
from ragcache.states import KVKey


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"search": "fuzzy"}, "search is 'fuzzy'; it must be 'hybrid'"),
        ({"threshold": float("nan")}, "threshold is nan"),
        ({"threshold": 2.0}, r"threshold is 2.0; .* at most 0.0328\. Give relative_threshold"),
        ({"relative_threshold": 1.1}, "relative_threshold is 1.1; it must be from 0 to 1"),
        ({"mmr": 1.5}, "from 0 to 1"),
        ({"mmr": -0.1}, "from 0 to 1"),
        ({"candidates": 0}, "candidates is 0"),
        ({"k": 0}, "k is 0"),
        ({"filters": {"$xor": []}}, "unknown operator"),
    ],
)
def test_unusable_search_params_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        Retriever.retrieve(None, "key", "notes", SearchParams(**wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize(("search", "least"), [("hybrid", 2 / 61), ("sparse", 2.0)])
def test_a_threshold_that_can_be_met_is_taken(search: SearchKind, least: float) -> None:
    assert SearchParams(k=3, search=search, threshold=least).threshold == least


SEARCHES: tuple[SearchKind, ...] = ("sparse", "dense", "hybrid")
TOPICS = ("boat", "ship", "vessel"), ("key", "lock"), ("leave", "holiday")
TEXTS = {
    "boats.md": "The survey boat is moored at the quay.",
    "keys.md": "The spare key hangs in the cupboard.",
    "leave.md": "Everybody has 26 days of leave.",
}


class Topics(Embeddings):
    """One dimension a topic: synonyms meet, and every call is counted."""

    def __init__(self) -> None:
        self.embedded: list[str] = []

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.embedded += texts
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return [1e-3 + sum(text.lower().count(word) for word in words) for words in TOPICS]


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = Database.open(tmp_path / "ledger.sqlite")
    yield opened
    opened.close()


def document(
    name: str, text: str, vector: np.ndarray | None = None, **attributes: object
) -> NewDocument:
    key = KVKey(f"{abs(hash(name)):064x}"[:64])
    modules = [NewModule(f"{name}#1", text, [1, 2], key, vector)]
    return NewDocument(name, "", text, modules, attributes)


def opened(database: Database, embedder: Topics | None = None) -> tuple[Catalog, Retriever]:
    name = None if embedder is None else "topics"
    catalog = Catalog(database, "tokenizer", name)
    vectors = None if embedder is None else Vectors(database, "topics")
    return catalog, Retriever(catalog, embedder, vectors)


def fill(catalog: Catalog, embedder: Embeddings | None = None) -> None:
    """Stores the texts, with their vectors if there is an embedder."""

    def vector(text: str) -> np.ndarray | None:
        return embedder and np.array(embedder.embed_query(text), dtype=np.float32)

    documents = [document(name, text, vector(text)) for name, text in TEXTS.items()]
    catalog.replace_documents("notes", documents)


@pytest.fixture
def topics(database: Database) -> tuple[Retriever, Topics]:
    """A retriever over the texts and their vectors, and its embedder."""
    catalog, retriever = opened(database, embedder := Topics())
    fill(catalog, embedder)
    return retriever, embedder


def names(selection: Selection) -> list[str]:
    return [hit.module.document for hit in selection.hits]


def found(
    retriever: Retriever, query: str, k: int = 3, search: SearchKind = "hybrid", **options: Any
) -> list[str]:
    return names(retriever.retrieve(query, "notes", SearchParams(k=k, search=search, **options)))


def test_sparse_search_finds_modules_best_first(database: Database) -> None:
    catalog, retriever = opened(database)
    fill(catalog)
    params = SearchParams(k=3, relative_threshold=0.0)
    selection = retriever.retrieve("Does the spare key of the boat hang?", "notes", params)
    assert selection.query == "Does the spare key of the boat hang?"
    assert names(selection) == ["keys.md", "boats.md"]
    assert selection.hits[0].module.text == TEXTS["keys.md"]
    assert selection.hits[0].score > selection.hits[1].score
    assert found(retriever, "spare key boat", k=1) == ["keys.md"]
    assert found(retriever, "Which vessel?") == [], "no word is shared, and there is no embedder"
    assert retriever.indexes.embed_texts(["anything"]) is None
    with pytest.raises(InvalidRequest, match="needs an embedder"):
        found(retriever, "boat", search="dense")
    with pytest.raises(InvalidRequest, match="needs an embedder"):
        retriever.retrieve_by_vector([1.0], "notes", SearchParams(k=1, search="dense"))


def test_searches_rank_by_words_by_meaning_or_both(topics: tuple[Retriever, Topics]) -> None:
    retriever, embedder = topics
    assert found(retriever, "Which holiday?", k=1) == ["leave.md"]
    assert found(retriever, "cupboard vessel", search="sparse") == ["keys.md"]
    meaning = retriever.retrieve("cupboard vessel", "notes", SearchParams(k=1, search="dense"))
    assert names(meaning) == ["boats.md"]
    assert 0.9 < meaning.hits[0].score <= 1.0, "a cosine"
    near = retriever.retrieve_by_vector(
        embedder.embed_query("vessel"), "notes", SearchParams(k=1, search="dense")
    )
    assert near.hits[0].module == meaning.hits[0].module
    # keys.md is second by meaning and first by words; boats.md first by meaning only
    assert found(retriever, "vessel ship lock cupboard")[:2] == ["keys.md", "boats.md"]
    assert embedder.embedded == [], "stored vectors are used as they are"


def test_hits_have_the_scores_of_each_ranking(topics: tuple[Retriever, Topics]) -> None:
    sparse, dense, hybrid = (
        {
            hit.module.id: hit
            for hit in topics[0]
            .retrieve("The ship key?", "notes", SearchParams(k=3, search=search))
            .hits
        }
        for search in SEARCHES
    )
    assert all(hit.bm25 == hit.score and hit.cosine is None for hit in sparse.values())
    assert all(hit.cosine == hit.score and hit.bm25 is None for hit in dense.values())
    for number, hit in hybrid.items():
        assert hit.bm25 == (sparse[number].score if number in sparse else None)
        assert hit.cosine == dense[number].score


@pytest.mark.parametrize("search", SEARCHES)
def test_threshold_drops_lower_scores(topics: tuple[Retriever, Topics], search: SearchKind) -> None:
    query = "spare key boat"
    every = topics[0].retrieve(query, "notes", SearchParams(k=3, search=search)).hits
    least = every[0].score
    kept = topics[0].retrieve(query, "notes", SearchParams(k=3, search=search, threshold=least))
    assert kept.hits == tuple(hit for hit in every if hit.score >= least)
    if search != "hybrid":  # whose best score is the highest that there is
        assert found(topics[0], query, search=search, threshold=least + 1e-3) == []


class StuckTopics(Topics):
    """Embeds texts when it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go = threading.Event(), threading.Event()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.entered.set()
        assert self.go.wait(10), "a question waits for the embedder"
        return super().embed_documents(texts)


def test_words_are_searched_until_vectors_are_computed(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was ingested before the embedder was installed."""
    fill(Catalog(database, "tokenizer", None))
    monkeypatch.setattr("ragcache.retrieval.indexes.EMBEDDED_AT_ONCE", 1)
    catalog, retriever = opened(database, embedder := StuckTopics())
    hit = retriever.retrieve("Which boat?", "notes", SearchParams(k=1)).hits[0]
    assert (hit.module.document, hit.cosine) == ("boats.md", None)
    assert embedder.entered.wait(10)
    assert found(retriever, "Which vessel?") == []
    embedder.go.set()
    assert found(retriever, "Which vessel?", 1, "dense") == ["boats.md"], "a dense search waits"
    wait_until_built(retriever)
    assert found(retriever, "Which vessel?", 1) == ["boats.md"]
    assert sorted(embedder.embedded) == sorted(TEXTS.values())
    catalog.replace_documents("notes", [document(f"d{n}", "A ship.") for n in range(3)])
    embedder.go.clear()
    assert found(retriever, "leave holiday", 1) == ["leave.md"]
    assert set(found(retriever, "ship")) >= {"d0", "boats.md"}, "the others have their vectors"
    assert len(found(retriever, "ship", mmr=0.5)) == 3
    embedder.go.set()
    wait_until_built(retriever)
    assert len(embedder.embedded) == len(TEXTS) + 3


_EXIT = """
import sys, threading, torch
from langchain_core.embeddings import Embeddings
from ragcache.db import Catalog, Database, NewDocument, NewModule, Vectors
from ragcache.retrieval import Retriever
from ragcache.params import SearchParams
from ragcache.states import KVKey

entered = threading.Event()

class Slow(Embeddings):
    def embed_query(self, text):
        return [1.0, 0.0]

    def embed_documents(self, texts):
        entered.set()
        rows = torch.ones(256, 256)
        for _ in range(200):
            rows = torch.tanh(rows @ rows)
        return [[1.0, 0.0] for _ in texts]

database = Database.open(sys.argv[1])
catalog = Catalog(database, "tokenizer", "slow")
modules = [NewModule(f"a#{n}", f"boat {n}", [1], KVKey("0" * 64)) for n in range(2000)]
catalog.replace_documents("notes", [NewDocument("a", "", "", modules)])
retriever = Retriever(catalog, Slow(), Vectors(database, "slow"))
assert retriever.retrieve("boat", "notes", SearchParams(k=1)).hits
assert entered.wait(10)
"""


@pytest.mark.slow
def test_a_process_ends_well_while_vectors_are_computed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _EXIT, str(tmp_path / "ledger.sqlite")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_only_vectors_of_new_modules_are_read_after_a_change(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder, read = Topics(), []
    catalog = Catalog(database, "tokenizer", "topics")
    fill(catalog, embedder)
    vectors = Vectors(database, "topics")
    retriever = Retriever(catalog, embedder, vectors)
    assert found(retriever, "ship", 1) == ["boats.md"]
    read_vectors = vectors.read_vectors

    def watched(collection: str, ids: Any = None) -> dict[int, np.ndarray]:
        assert ids is not None, "all are read"
        rows = read_vectors(collection, ids)
        read.append(len(rows))
        return rows

    monkeypatch.setattr(vectors, "read_vectors", watched)
    catalog.delete_documents("notes", ["boats.md"])
    rooms = document("rooms.md", "A locked room.", np.array([0, 3, 0], dtype=np.float32))
    catalog.replace_documents("notes", [rooms, document("ships.md", "A ship.")])
    assert found(retriever, "vessel", 1, "dense") == ["ships.md"]
    assert read == [1], "the other one has none yet"
    assert found(retriever, "lock", 1) == ["rooms.md"]
    assert embedder.embedded == ["A ship."]
    fresh = Retriever(catalog, embedder, Vectors(database, "topics"))
    for query in ("vessel", "lock", "holiday"):
        one, two = (r.retrieve(query, "notes", SearchParams(k=3)).hits for r in (retriever, fresh))
        assert [hit.module for hit in one] == [hit.module for hit in two]
        assert [hit.cosine for hit in one] == pytest.approx([hit.cosine for hit in two])
    wait_until_built(retriever)


def test_many_texts_are_embedded_in_order(database: Database) -> None:
    retriever = Retriever(Catalog(database, "tokenizer", "topics"), Topics())
    texts = [f"boat {'key ' * number}" for number in range(150)]
    vectors = retriever.indexes.embed_texts(texts)
    assert vectors is not None
    assert vectors.dtype == np.float32
    assert vectors[:, 1].round().tolist() == list(range(150))


@pytest.mark.parametrize("anew", [64, 0])
@pytest.mark.parametrize("embedder", [Topics(), None])
def test_changes_by_other_processes_are_seen(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embedder: Topics | None,
    anew: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(bm25, "BUILT_ANEW", anew)
    catalog, retriever = opened(database, embedder)
    fill(catalog, embedder)
    sparse = SearchParams(k=5, search="sparse")

    def searched(query: str) -> list[str]:
        return sorted(found(retriever, query, 5, "sparse"))

    assert searched("boat") == ["boats.md"]
    elsewhere = Database.open(tmp_path / "ledger.sqlite")
    other = Catalog(elsewhere, "tokenizer", None)
    tins = document("tins.md", "A tin and a boat.")
    other.replace_documents("notes", [tins, document("c", "船")])
    assert (searched("boat"), searched("船")) == (["boats.md", "tins.md"], ["c"])
    other.delete_documents("notes", ["boats.md"])
    assert searched("boat") == ["tins.md"]
    assert "boats.md" not in found(retriever, "boat", 9), "deleted is never answered"
    other.replace_documents("notes", [document("keys.md", "A key in a drawer.")])
    assert searched("cupboard") == []
    other.rename_document("notes", "keys.md", "drawers.md")
    [hit] = retriever.retrieve("drawer", "notes", sparse).hits
    assert (hit.module.document, hit.module.name) == ("drawers.md", "drawers.md#1")
    fresh = Retriever(catalog)
    for query in ("boat", "drawer", "leave", "船"):
        one, two = (each.retrieve(query, "notes", sparse).hits for each in (retriever, fresh))
        assert [hit.module for hit in one] == [hit.module for hit in two]
        if anew:
            assert [hit.score for hit in one] == [hit.score for hit in two]
    other.delete_documents("notes", list(catalog.documents("notes")))
    assert found(retriever, "boat") == [], "an empty collection finds nothing"
    elsewhere.close()


def test_a_change_is_seen_and_read_in_one_transaction(database: Database) -> None:
    catalog, retriever = opened(database)
    catalog.replace_documents("notes", [document("a", "The lamp is green.")])
    assert found(retriever, "lamp") == ["a"]
    catalog.replace_documents("notes", [document("b", "The boat is green.")])
    begun: list[object] = []
    begins = begun.append
    event.listen(database.engine, "begin", begins)
    assert found(retriever, "boat") == ["b"]
    event.remove(database.engine, "begin", begins)
    assert len(begun) == 1


def test_a_search_is_of_one_collection_that_there_is(database: Database) -> None:
    catalog, retriever = opened(database)
    with pytest.raises(UnknownCollection, match=r"no collection 'notes'; known: none yet\. Make"):
        found(retriever, "boat")
    fill(catalog)
    catalog.replace_documents("other", [document("boats.md", "Another boat.")])
    hits = retriever.retrieve("boat", "other", SearchParams(k=5)).hits
    assert [hit.module.text for hit in hits] == ["Another boat."]
    with pytest.raises(UnknownCollection, match=r"'recipes'; known: 'notes', 'other'\."):
        retriever.retrieve("boat", "recipes", SearchParams(k=3))


@pytest.mark.parametrize("search", SEARCHES)
def test_filters_apply_before_the_cut(database: Database, search: SearchKind) -> None:
    """The two that are wanted rank below sixty that are not, more than there are candidates."""
    catalog, retriever = opened(database, Topics())
    better = [document(f"b{n}", f"boat boat boat {n}", team="lab") for n in range(60)]
    wanted = [document(f"w{n}", f"boat key leave filler words {n}", team="ops") for n in range(2)]
    catalog.replace_documents("notes", [*better, *wanted])
    params = SearchParams(k=2, search=search, filters={"team": "ops"})
    selection = retriever.retrieve("boat", "notes", params)
    assert sorted(names(selection)) == ["w0", "w1"]
    assert selection.hits[0].module.attributes == {"team": "ops"}
    assert found(retriever, "boat", search=search, filters={"team": "none"}) == []


def test_k_may_exceed_the_candidates(database: Database) -> None:
    catalog, retriever = opened(database)
    catalog.replace_documents("notes", [document(f"d{n}", f"boat {n}") for n in range(70)])
    assert len(found(retriever, "boat", 65)) == 65


@pytest.mark.parametrize("search", SEARCHES)
def test_hits_far_below_the_best_are_left_out(
    topics: tuple[Retriever, Topics], search: SearchKind
) -> None:
    """A module that shares but a common word stood in every prompt. Fused scores, which count
    ranks, do not tell."""
    retriever, _ = topics
    query = "Where does the spare key to the lock of the key cupboard hang, not of the boat?"
    every = SearchParams(k=3, search=search, relative_threshold=0.0)
    hits = retriever.retrieve(query, "notes", every).hits
    assert [hit.module.document for hit in hits][:2] == ["keys.md", "boats.md"]
    assert found(retriever, query, 3, search) == ["keys.md"]
    if search != "hybrid":  # where a hit may pass by its words or by its vector
        share = hits[1].score / hits[0].score
        for least, expected in ((share * 0.999, 2), (share * 1.001, 1)):
            assert len(found(retriever, query, 3, search, relative_threshold=least)) == expected


@pytest.mark.parametrize("embedder", [Topics(), None])
def test_mmr_passes_over_duplicates(database: Database, embedder: Topics | None) -> None:
    catalog, retriever = opened(database, embedder)
    texts = {"a": "boat boat ship", "b": "boat boat ship", "c": "boat key lock holiday"}
    catalog.replace_documents("notes", [document(name, text) for name, text in texts.items()])
    plain = found(retriever, "boat ship", 2)
    assert sorted(plain) == ["a", "b"]
    assert found(retriever, "boat ship", 2, mmr=0.8, relative_threshold=0.0)[1] == "c"
    assert found(retriever, "boat ship", 2, mmr=0.0) == plain


class Wide(Topics):
    """The same name, vectors of another length."""

    def embed_query(self, text: str) -> list[float]:
        return [*super().embed_query(text), 0.5]


def test_changed_embedder_of_the_same_name_embeds_again(database: Database) -> None:
    catalog, retriever = opened(database, before := Topics())
    fill(catalog, before)
    assert found(retriever, "Which vessel?", k=1) == ["boats.md"]
    _, changed = opened(database, wide := Wide())
    catalog.replace_documents("notes", [document("new.md", "A sloop.")])
    assert found(changed, "Which vessel?", k=1) == ["boats.md"]
    assert sorted(wide.embedded) == sorted([*TEXTS.values(), "A sloop."])
    assert found(changed, "Which holiday?", k=1) == ["leave.md"]
    assert len(wide.embedded) == 4, "once"


class Uneven(Topics):
    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [[1.0, 2.0] for _ in texts]


def test_vectors_of_different_lengths_are_refused(database: Database) -> None:
    catalog, retriever = opened(database, Uneven())
    fill(catalog)
    with pytest.raises(ConfigurationError, match="vector has 3 numbers, those of texts have 2"):
        retriever.retrieve("boat", "notes", SearchParams(k=1))


def counted_builds(monkeypatch: pytest.MonkeyPatch) -> list[BM25Index]:
    built: list[BM25Index] = []
    first = BM25Index.__init__
    monkeypatch.setattr(
        BM25Index, "__init__", lambda self, *a: (built.append(self), first(self, *a))[1]
    )
    return built


def test_concurrent_threads_build_one_index(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog, retriever = opened(database, embedder := Topics())
    fill(catalog)
    built = counted_builds(monkeypatch)
    with ThreadPoolExecutor(8) as pool:
        every = list(pool.map(lambda _: found(retriever, "Which vessel?", 1), range(32)))
    assert every == [["boats.md"]] * 32
    assert len(built) == 1
    assert len(embedder.embedded) == len(TEXTS)


def test_building_one_index_does_not_block_another(database: Database) -> None:
    class Stuck(Topics):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            if "stop" in texts[0]:
                entered.set()
                assert go.wait(30)
            return super().embed_documents(texts)

    entered, go = threading.Event(), threading.Event()
    catalog, retriever = opened(database, Stuck())
    fill(catalog)
    catalog.replace_documents("slow", [document("s", "stop boat")])
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(retriever.retrieve, "boat", "slow", SearchParams(k=1))
        assert entered.wait(30)
        assert found(retriever, "vessel", 1) == ["boats.md"]
        catalog.replace_documents("notes", [document("new.md", "A sloop.")])
        retriever.indexes.update("notes")
        assert "new.md" in found(retriever, "sloop"), "an ingestion does not wait either"
        go.set()
        assert names(slow.result()) == ["s"]


def wait_until_built(retriever: Retriever) -> None:
    for thread in threading.enumerate():
        if thread.name == "ragcache-index":
            thread.join(30)


def test_a_change_is_applied_without_a_question(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog, retriever = opened(database)
    fill(catalog)
    retriever.indexes.update("notes")
    assert retriever.indexes._indexes == {}, "what nobody has searched gets no index"
    assert found(retriever, "boat") == ["boats.md"]
    catalog.replace_documents("notes", [document("new.md", "A sloop.")])
    retriever.indexes.update("notes")
    monkeypatch.setattr(BM25Index, "update", lambda *_: pytest.fail("a question updates"))
    assert found(retriever, "sloop") == ["new.md"]


class BrokenTopics(Topics):
    """Fails to embed texts while it is broken."""

    broken = True

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.embedded += texts
        if self.broken:
            raise MemoryError
        return [self.embed_query(text) for text in texts]


def test_failed_embedding_is_retried_after_pauses_that_double(
    database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ragcache.retrieval.indexes.EMBEDDED_AT_ONCE", 1)
    catalog, retriever = opened(database, embedder := BrokenTopics())
    fill(catalog)
    now, tried = [1_000.0], []
    monkeypatch.setattr("ragcache.retrieval.indexes.time.monotonic", lambda: now[0])
    for at in (1_000.0, 1_000.9, 1_001.1, 1_002.9, 1_003.2):
        now[0] = at
        assert found(retriever, "boat") == ["boats.md"], "words serve"
        wait_until_built(retriever)
        if embedder.embedded:
            tried.append(at)
        embedder.embedded.clear()
    assert tried == [1_000.0, 1_001.1, 1_003.2]
    assert "the index of 'notes' was not completed; what there is serves" in caplog.text
    embedder.broken = False
    now[0] += 60
    found(retriever, "vessel")
    wait_until_built(retriever)
    assert found(retriever, "vessel", 1) == ["boats.md"]


@pytest.mark.parametrize("ending", ["close", "delete"])
def test_closing_or_deleting_ends_the_building_of_an_index(
    database: Database, caplog: pytest.LogCaptureFixture, ending: str
) -> None:
    catalog, retriever = opened(database, embedder := StuckTopics())
    fill(catalog)
    retriever.indexes.prepare("notes")
    assert embedder.entered.wait(10)
    database.close() if ending == "close" else catalog.delete_collection("notes")
    embedder.go.set()
    wait_until_built(retriever)
    assert "the index of" not in caplog.text


def test_a_ledger_that_is_away_is_named_without_a_traceback(
    database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    catalog, retriever = opened(database)
    fill(catalog)

    def fail(*arguments: Any) -> None:
        raise LedgerUnavailable("the ledger does not answer")

    monkeypatch.setattr(catalog, "reread_modules", fail)
    retriever.indexes.prepare("notes")
    wait_until_built(retriever)
    said = "the index of 'notes' is built by a later question: the ledger does not answer"
    assert said in caplog.text
    assert "Traceback" not in caplog.text


def test_a_first_index_and_its_vectors_are_built_in_background(
    database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill(Catalog(database, "tokenizer", None))
    _, retriever = opened(database, embedder := Topics())
    built = counted_builds(monkeypatch)
    for name in ("notes", "notes", "gone"):
        retriever.indexes.prepare(name)
    wait_until_built(retriever)
    assert sorted(embedder.embedded) == sorted(TEXTS.values())
    assert found(retriever, "Which vessel?", 1) == ["boats.md"]
    assert (len(built), len(embedder.embedded)) == (1, len(TEXTS))
    database.close()
    retriever.indexes.prepare("another")
    wait_until_built(retriever)
    assert "not completed" not in caplog.text


@pytest.mark.parametrize("set_back", [False, True])
def test_a_new_collection_of_the_same_name_has_its_own_index(
    database: Database, monkeypatch: pytest.MonkeyPatch, set_back: bool
) -> None:
    """Even if the clock is set back. SQLite gives the id to the next collection."""
    catalog, retriever = opened(database)
    catalog.replace_documents("notes", [document("old", "boat")])
    assert found(retriever, "boat") == ["old"]
    if set_back:
        monkeypatch.setattr(time, "time_ns", lambda: 0)
    catalog.delete_collection("notes")
    catalog.replace_documents("notes", [document("new", "boat")])
    assert found(retriever, "boat") == ["new"]


def test_the_index_of_a_deleted_collection_goes(database: Database) -> None:
    """At once where this process deletes it, or else with the first index of another one."""
    catalog, retriever = opened(database)
    for name in ("notes", "other", "plans"):
        catalog.replace_documents(name, [document("a", "boat")])
    for name in ("notes", "other"):
        retriever.retrieve("boat", name, SearchParams())
    catalog.delete_collection("notes")
    retriever.indexes.update("notes")
    assert retriever.indexes._indexes.keys() == {"other"}
    catalog.delete_collection("other")
    retriever.retrieve("boat", "plans", SearchParams())
    assert retriever.indexes._indexes.keys() == {"plans"}


class Other(Topics):
    """Another name."""


def test_embedders_of_one_name_share_vectors_and_index(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs make a LangChain object with an embedder of its own for each request. What one
    process has embedded for a namespace, the next one reads."""
    catalog, first = Catalog(database, "tokenizer", None, "tenant"), Topics()
    fill(catalog)
    retrievers, built = Retrievers(catalog, database, first), counted_builds(monkeypatch)
    assert retrievers.retriever_for() is retrievers.retriever_for(first)
    others = [Other() for _ in range(3)]
    for other in others:
        retriever = retrievers.retriever_for(other)
        assert retriever.embedder is other
        assert found(retriever, "Which vessel?", 1, "dense") == ["boats.md"]
    assert retrievers.retriever_for(others[0]) is retrievers.retriever_for(others[0])
    assert retrievers.retriever_for(others[0]) is not retrievers.retriever_for()
    assert (len(built), sum(len(each.embedded) for each in others)) == (1, len(TEXTS))
    later, again = Retrievers(catalog, database, None), Other()
    assert later.retriever_for().embedder is None
    assert found(later.retriever_for(again), "Which vessel?", 1, "dense") == ["boats.md"]
    assert again.embedded == []
