"""Folders opened with several processes: the same answers, keys and files as with one."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ragcache import GenerationParams, RagCache, SourceDocument
from ragcache.errors import ConfigurationError, EngineFailed, UnsupportedModel
from ragcache.models import LoadedModel, load_model, wrap_causal
from tests.tiny_models import tiny_config, tiny_model

DOCUMENTS = [
    SourceDocument("leave.md", "There are 28 days of leave a year. " * 6),
    SourceDocument("travel.md", "Trips are booked by the office in Bern. " * 8),
    SourceDocument("boats.md", "The survey boat Pipit is moored at the north quay. " * 5),
]
QUESTIONS = ("How many days of leave are there?", "Who books trips?", "Where is the boat?")


@pytest.fixture
def model(forked_ranks: None, quick_reader: LoadedModel) -> LoadedModel:
    """A tiny random model of its own, whose answers are not quoted."""
    size = {"vocab_size": quick_reader.causal.vocabulary, "max_position_embeddings": 2048}
    return replace(quick_reader, causal=wrap_causal(tiny_model("llama", **size)), extractive=False)


def opened(folder: Path, model: LoadedModel, ranks: int, **options: Any) -> RagCache:
    return RagCache.open(folder, model, max_tokens=12, tensor_parallel=ranks, **options)


def blobs(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in folder.glob("states/??/*.safetensors")}


def ask_all(rag: RagCache) -> list[str]:
    """Answers that are free, drawn and constrained."""
    kinds = (
        GenerationParams(),
        GenerationParams(temperature=0.9, seed=5),
        GenerationParams(choice=["28 days", "the office in Bern", "at the north quay"]),
    )
    return [
        rag.ask(question, collection="handbook", generation=kind).text
        for question in QUESTIONS
        for kind in kinds
    ]


def ask_until(rag: RagCache, end: float) -> None:
    while time.monotonic() < end:
        ask_all(rag)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("writers", "readers"),
    [
        (1, 2),
        (8, 1),
        pytest.param(2, 1, marks=pytest.mark.nightly),
        pytest.param(4, 8, marks=pytest.mark.nightly),
    ],
)
def test_a_folder_is_written_and_read_by_any_number_of_processes(
    tmp_path: Path, model: LoadedModel, writers: int, readers: int
) -> None:
    """Eight ranks have each of four key heads twice."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
    sizes |= {"vocab_size": model.causal.vocabulary, "max_position_embeddings": 2048}
    model = replace(model, causal=wrap_causal(tiny_model("llama", **sizes)))
    with opened(tmp_path / "state", model, writers) as rag:
        rag.ingest("handbook", DOCUMENTS)
        expected = ask_all(rag)
    written = blobs(tmp_path / "state")
    assert len(written) >= len(DOCUMENTS)
    with opened(tmp_path / "state", model, readers) as rag:
        assert ask_all(rag) == expected
        assert rag.internals.shared.engine.stats.encoded_tokens == 0, "every state was found"
        assert rag.internals.shared.model.causal.ranks == readers
    assert blobs(tmp_path / "state") == written, "the same files, byte for byte"


@pytest.mark.slow
def test_blobs_have_the_same_names_and_headers(tmp_path: Path, model: LoadedModel) -> None:
    for ranks in (1, 2):
        with opened(tmp_path / str(ranks), model, ranks) as rag:
            rag.ingest("handbook", DOCUMENTS)
    alone, together = blobs(tmp_path / "1"), blobs(tmp_path / "2")
    assert alone.keys() == together.keys()
    for name, content in alone.items():
        assert len(together[name]) == len(content)
        paths = (next((tmp_path / ranks).rglob(name)) for ranks in ("1", "2"))
        ours, theirs = map(load_file, paths)
        assert ours.keys() == theirs.keys()
        for tensor in ours:
            torch.testing.assert_close(ours[tensor], theirs[tensor], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_full_tiers_and_states_in_eight_bits_answer_alike(
    tmp_path: Path, model: LoadedModel
) -> None:
    """Memory for one document, so that states are read from files and from copies of these."""
    found = []
    for ranks in (1, 2):
        with opened(
            tmp_path / str(ranks), model, ranks, host_bytes=150_000, kv_dtype="int8"
        ) as rag:
            rag.ingest("handbook", DOCUMENTS)
            found.append([ask_all(rag) for _ in range(3)])
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_folder_with_a_dead_rank_is_opened_again(tmp_path: Path, model: LoadedModel) -> None:
    rag = opened(tmp_path / "state", model, 2)
    rag.ingest("handbook", DOCUMENTS)
    expected = ask_all(rag)
    followers = rag.internals.shared.model.causal._followers  # type: ignore[attr-defined]
    [follower] = [each.process for each in followers._followers]
    os.kill(follower.pid, signal.SIGKILL)
    with pytest.raises(EngineFailed, match="rank 1 of 2 ended with SIGKILL"):
        ask_until(rag, time.monotonic() + 5)
    rag.close()
    assert follower.poll() is not None
    with opened(tmp_path / "state", model, 2) as rag:
        assert ask_all(rag) == expected


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "falcon-7b": ({}, "falcon models have no plan"),
    "llama": ({"quantization": "int8"}, "packed weights are not split"),
    "qwen3": ({"device": "meta"}, "served on GPUs of CUDA and on a CPU"),
}


@pytest.fixture(params=REFUSED)
def refused(
    request: pytest.FixtureRequest, tmp_path: Path, reader: LoadedModel
) -> tuple[Path, dict[str, Any], str]:
    """A checkpoint without weights: nothing that is refused reads them."""
    options, reason = REFUSED[request.param]
    tiny_config(request.param, vocab_size=len(reader.tokenizer)).save_pretrained(tmp_path / "model")
    reader.tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model", options, reason


def test_what_is_not_served_is_refused_before_weights_are_read(
    refused: tuple[Path, dict[str, Any], str],
) -> None:
    folder, options, reason = refused
    with pytest.raises((UnsupportedModel, ConfigurationError), match=reason):
        load_model(folder, tensor_parallel=2, **options)


def test_the_embedded_reader_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="embedded reader runs in one process"):
        RagCache.open(tmp_path / "state", tensor_parallel=2)
    with pytest.raises(ConfigurationError, match="tensor_parallel"):
        RagCache.open(tmp_path / "state", tensor_parallel=0)
