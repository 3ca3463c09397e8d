"""`ragcache conversations`: sizes and deletion without a service."""

from __future__ import annotations

from pathlib import Path

from ragcache import GenerationParams, RagCache
from ragcache.models import LoadedModel
from tests.api.cli.conftest import Run, error_of, json_of
from tests.ragcache.test_recurrence import passage


def keep(folder: Path, model: LoadedModel, *names: str) -> None:
    with RagCache.open(folder, model, conversation_storage="disk", force_modes=True) as rag:
        for number, name in enumerate(names):
            messages = [{"role": "user", "content": passage(number, 16)}]
            options = GenerationParams(max_tokens=2, prompt_cache_key=name)
            rag.chat(messages, generation=options)


def test_conversations_are_deleted_from_the_command_line(
    run: Run, tmp_path: Path, quick_reader: LoadedModel
) -> None:
    error_of(run("conversations", "ls"), "NoState")
    keep(tmp_path / "state", quick_reader, "mine", "other")
    before = json_of(run("conversations", "ls", "--json"))["disk"]
    foreseen = json_of(run("conversations", "rm", "mine", "--dry-run", "--json"))
    assert foreseen["conversations"] == 1
    assert json_of(run("conversations", "ls", "--json"))["disk"] == before
    assert "1 conversations deleted" in run("conversations", "rm", "mine")[1]
    left = json_of(run("conversations", "ls", "--json"))["disk"]
    assert left == before - foreseen["bytes"]["disk"]
    every = ("conversations", "rm", "--all", "--json")
    assert json_of(run(*every, "--namespace", "lab"))["states"] == 0
    assert json_of(run(*every))["conversations"] == 1
    assert "no conversation is kept" in run("conversations", "ls")[1]
    assert not list((tmp_path / "state" / "states").rglob("*.safetensors"))


def test_a_deletion_names_one_conversation_or_all(
    run: Run, tmp_path: Path, quick_reader: LoadedModel
) -> None:
    keep(tmp_path / "state", quick_reader)
    assert run("conversations", "rm")[0] == 2
    assert run("conversations", "rm", "mine", "--all")[0] == 2
