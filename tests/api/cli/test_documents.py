"""`ragcache collections`, `documents`, `rm`, `retrieve` and `warm`."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragcache import RagCache, SourceDocument
from ragcache.models import LoadedModel
from tests.api.cli.conftest import QUESTION, Run, error_of, json_of
from tests.tiny_encoders import write_cross_encoder


def test_collections_and_documents_are_listed(run: Run, ingested: Path) -> None:
    [notes] = json_of(run("collections", "--json"))
    counts = {"documents": 3, "modules": 3}
    primings = {"own_priming": False, "similar_priming": False}
    assert notes == {"name": "notes", "description": ""} | counts | primings
    listed = json_of(run("documents", "notes", "--json"))
    assert [row["id"] for row in listed] == ["boats.md", "keys.md", "leave.md"]
    assert {row["modules"] for row in listed} == {1}
    assert "3 documents, 3 modules" in run("documents", "notes")[1]
    error_of(run("documents", "absent"), "UnknownCollection")


def test_a_filter_chooses_documents_by_metadata(
    run: Run, quick_reader: LoadedModel, tmp_path: Path
) -> None:
    with RagCache.open(tmp_path / "state", quick_reader) as rag:
        sources = [
            SourceDocument(f"rule-{year}", f"The jetty rule of {year}.", "", {"year": year})
            for year in (2019, 2024)
        ]
        rag.ingest("rules", sources)
    recent = ("--filter", '{"year": {"$gte": 2020}}')
    [row] = json_of(run("documents", "rules", *recent, "--json"))
    assert row == {"id": "rule-2024", "uri": "", "modules": 1, "metadata": {"year": 2024}}
    [hit] = json_of(run("retrieve", "jetty rule", "-c", "rules", *recent, "--json"))
    assert hit["document"] == "rule-2024"
    answer = json_of(run("ask", "Which jetty rule?", "-c", "rules", *recent, "--json"))
    assert [source["document"] for source in answer["sources"]] == ["rule-2024"]
    for text in ("{year", "[1]"):
        status, _, err = run("documents", "rules", "--filter", text)
        assert status == 2
        assert "JSON" in err
    error_of(run("documents", "rules", "--filter", '{"$near": 1}'), "InvalidRequest")


def test_documents_are_removed_with_their_states(run: Run, ingested: Path) -> None:
    dry = json_of(run("rm", "notes", "keys.md", "--dry-run", "--json"))
    taken = {key: dry.pop(key) for key in ("modules", "states", "tiers")}
    assert dry == {"dry_run": True, "documents": ["keys.md"], "collection": False}
    assert taken["modules"] == taken["states"] == 1
    assert set(taken["tiers"]) == {"disk"}
    assert json_of(run("stats", "--json"))["tiers"]["disk"]["states"] == 4
    assert "1 documents removed from notes" in run("rm", "notes", "keys.md")[1]
    assert json_of(run("stats", "--json"))["tiers"]["disk"]["states"] == 3
    assert json_of(run("verify", "--json"))["clean"]
    assert [row["id"] for row in json_of(run("documents", "notes", "--json"))] == [
        "boats.md", "leave.md",
    ]  # fmt: skip


def test_a_collection_is_removed_on_request_only(run: Run, ingested: Path) -> None:
    error_of(run("rm", "notes"), "ConfigurationError")
    error_of(run("rm", "notes", "keys.md", "--all"), "ConfigurationError")
    message = error_of(run("rm", "notes", "keys.md", "absent.md"), "DocumentError")
    assert "'absent.md'" in message
    assert "nothing was changed" in message
    assert len(json_of(run("documents", "notes", "--json"))) == 3
    assert "the collection notes removed" in run("rm", "notes", "--all")[1]
    assert json_of(run("collections", "--json")) == []


def test_retrieve_prints_scores_by_name(run: Run, ingested: Path) -> None:
    hits = json_of(run("retrieve", QUESTION, "-c", "notes", "--json"))
    assert hits[0]["document"] == "keys.md"
    assert hits[0]["bm25"] > 0
    assert hits[0]["cosine"] is None
    assert "bm25 " in run("retrieve", QUESTION, "-c", "notes", "-k", 1)[1]
    both = "the boathouse key in the red cupboard, the boat"
    near = json_of(run("retrieve", both, "-c", "notes", "--relative-threshold", 1, "--json"))
    every = json_of(run("retrieve", both, "-c", "notes", "--relative-threshold", 0, "--json"))
    assert near == every[:1]
    assert len(every) == 2
    assert "nothing in this collection" in run("retrieve", "xylophone", "-c", "notes")[1]
    error_of(run("retrieve", QUESTION, "-c", "notes", "--search", "fuzzy"), "InvalidRequest")
    error_of(run("retrieve", QUESTION, "-c", "notes", "--embedding", "x"), "ConfigurationError")


@pytest.mark.slow
def test_retrieve_takes_a_reranker(run: Run, ingested: Path, tmp_path: Path) -> None:
    folder = write_cross_encoder(tmp_path / "cross")
    command = ("retrieve", "the boathouse key, the survey boat", "-c", "notes")
    hits = json_of(run(*command, "--reranker", folder, "--relative-threshold", 0, "--json"))
    scores = [hit["rerank"] for hit in hits]
    assert len(scores) == 2
    assert 1 > scores[0] > scores[1] > 0
    assert " · rerank 0." in run(*command, "--reranker", folder)[1]
    assert "unknown reranker 'x'" in error_of(
        run(*command, "--reranker", "x"), "ConfigurationError"
    )


@pytest.mark.slow
def test_ingest_encodes_what_a_repair_removed(run: Run, notes: Path) -> None:
    run("ingest", "notes", notes)
    blobs = (notes.parent / "state" / "states").rglob("*.safetensors")
    for blob in blobs:
        blob.write_bytes(blob.read_bytes()[:-1])
    assert run("verify", "--repair")[0] == 0
    assert not any(row["tiers"] for row in json_of(run("modules", "ls", "--json")))
    again = json_of(run("ingest", "notes", notes, "--json"))
    assert (again["unchanged"], again["encoded"]) == (3, 3)
    assert all(row["tiers"] for row in json_of(run("modules", "ls", "--json")))
    assert json_of(run("ingest", "notes", notes, "--json"))["encoded"] == 0


@pytest.mark.slow
def test_warm_encodes_states_that_were_lost(
    run: Run, ingested: Path, quick_reader: LoadedModel
) -> None:
    with RagCache.open(ingested, quick_reader) as rag:
        rag.modules.evict("notes", ["keys.md"])
    dry = json_of(run("warm", "notes", "--dry-run", "--json"))
    assert dry == {"dry_run": True, "documents": 3, "encoded": 1}
    assert "3 documents: 1 states encoded" in run("warm", "notes")[1]
    assert json_of(run("warm", "notes", "--json"))["encoded"] == 0
    assert all(row["tiers"] for row in json_of(run("modules", "ls", "--json")))
    error_of(run("warm", "notes", "absent.md"), "DocumentError")
    error_of(run("warm", "notes", "--mode", "exact"), "ConfigurationError")


@pytest.mark.slow
def test_a_collection_gets_a_description(run: Run, ingested: Path) -> None:
    command = ("description", "notes")
    assert run(*command)[1].strip() == ""
    assert run(*command, "Boats [and] keys.")[1] == run(*command)[1] == "Boats [and] keys.\n"
    assert "Boats [and] keys." in run("collections")[1]
    assert json_of(run("collections", "--json"))[0]["description"] == "Boats [and] keys."
    error_of(run(*command, "x" * 2001), "ConfigurationError")
    error_of(run("description", "nowhere", "Boats."), "UnknownCollection")
    assert run(*command, "")[1].strip() == ""


def test_a_collection_gets_a_priming_text(run: Run, ingested: Path, tmp_path: Path) -> None:
    command = ("priming", "notes")
    assert run(*command)[1] == "the built-in text\n"
    file = tmp_path / "minutes.md"
    file.write_text("# Minutes\n\nThe boats are painted in May.", encoding="utf-8")
    assert run(*command, file)[1] == "# Minutes\n\nThe boats are painted in May.\n"
    assert run(*command)[1] == "# Minutes\n\nThe boats are painted in May.\n"
    assert run(*command, "--similar")[1] == "the most similar other module of each\n"
    assert run(*command, "--default")[1] == "the built-in text\n"
    error_of(run(*command, file, "--default"), "ConfigurationError")
    error_of(run(*command, file, "--similar"), "ConfigurationError")
    file.write_text(" ", encoding="utf-8")
    error_of(run(*command, file), "ConfigurationError")
    error_of(run("priming", "nowhere"), "UnknownCollection")


@pytest.mark.slow
def test_a_collection_gets_an_instruction(run: Run, ingested: Path) -> None:
    command = ("instruction", "notes")
    assert run(*command)[1] == "the folder's (--instruction)\n"
    assert run(*command, "Answer in French.")[1] == "Answer in French.\n"
    before = json_of(run("ask", QUESTION, "-c", "notes", "-k", 1, "--json"))
    assert before["sources"][0]["tier"] == "encoded"
    assert run(*command)[1] == "Answer in French.\n"
    assert "(--instruction)" in run(*command, "--default")[1]
    error_of(run(*command, " "), "ConfigurationError")
    error_of(run(*command, "Briefly.", "--default"), "ConfigurationError")
    error_of(run("instruction", "nowhere", "Briefly."), "UnknownCollection")
