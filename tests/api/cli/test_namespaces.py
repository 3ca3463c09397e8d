"""`ragcache namespaces`: names and deletion without a service."""

from __future__ import annotations

from pathlib import Path

from ragcache import RagCache, SourceDocument
from ragcache.models import LoadedModel
from tests.api.cli.conftest import Run, error_of, json_of


def test_a_namespace_is_deleted_from_the_command_line(
    run: Run, tmp_path: Path, quick_reader: LoadedModel
) -> None:
    error_of(run("namespaces", "rm", "lab"), "NoState")
    with RagCache.open(tmp_path / "state", quick_reader, force_modes=True) as rag:
        for each in (rag, rag.within("lab")):
            each.ingest("notes", [SourceDocument("key", "The key hangs in the red cupboard.")])
        rag.keys.create("lab", namespace="lab")
    assert run("namespaces", "ls")[1].split() == ["default", "lab"]
    error_of(run("namespaces", "rm", "lab"), "ConfigurationError")
    assert run("keys", "create", "ada", "--role", "admin")[0] == 0
    foreseen = json_of(run("namespaces", "rm", "lab", "--dry-run", "--json"))
    assert json_of(run("namespaces", "ls", "--json")) == ["default", "lab"]
    assert (foreseen["documents"], foreseen["api_keys"], foreseen["dry_run"]) == (1, 1, True)
    blobs = list((tmp_path / "state" / "states").rglob("*.safetensors"))
    told = run("namespaces", "rm", "lab")[1]
    assert "the namespace lab is deleted" in told
    assert f"{foreseen['tiers']['disk']:,}" in told
    left = list((tmp_path / "state" / "states").rglob("*.safetensors"))
    assert len(blobs) - len(left) == foreseen["states"] == len(left)
    error_of(run("namespaces", "rm", "lab"), "UnknownNamespace")
    error_of(run("namespaces", "rm", "a/b"), "ConfigurationError")
