"""Text becomes packs, packs become tokens, and a tiny reader learns from them and goes on."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import pretrain
import pytest
import torch
from int8 import quantize_rows
from model import Reader, Shape
from pack import divide, read_documents, read_shard, shard_tokens, write_pack
from tokenizer import save
from transformers import LlamaConfig, LlamaForCausalLM

from tests.training.conftest import SHAPE


@pytest.fixture(scope="module")
def text_folder(passages: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    with gzip.open(folder / "someone+prose.jsonl.gz", "wt", encoding="utf-8") as out:
        for i, passage in enumerate(passages * 8):
            row = {"text": f"{passage.text} Copy {i}.", "language": "zh" if i % 4 == 0 else "en"}
            out.write(json.dumps(row) + "\n")
    return folder


@pytest.fixture(scope="module")
def pack(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pack")
    documents = list(read_documents(text_folder))
    assert write_pack(divide(documents, {}, 1e9, 1)[0], folder) > 0
    return folder


@pytest.fixture(scope="module")
def saved_tokenizer(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save(tokenizer, folder)
    return folder


def test_packs_hold_every_document_once_and_keep_their_size(text_folder: Path) -> None:
    documents = list(read_documents(text_folder))
    size = sum(d.packed for d in documents) / 2.5
    packs = divide(documents, {}, size, 5)
    assert len(packs) == 3
    assert sorted(d.text for p in packs for d in p) == sorted(d.text for d in documents)
    assert all(sum(d.packed for d in p) <= size for p in packs)


def test_shards_give_back_their_texts_and_tokens(
    pack: Path, saved_tokenizer: Path, tokenizer: Any
) -> None:
    shard = sorted(pack.glob("*.bz2"))[0]
    texts = read_shard(shard)
    tokens = shard_tokens(shard, saved_tokenizer / "tokenizer.json")
    ends = [0, *((tokens == 3).nonzero()[0] + 1)]
    read = [tokenizer.decode(tokens[a:b].tolist()) for a, b in itertools.pairwise(ends)]
    assert len(texts) == 72
    assert sorted(read) == sorted(texts)


def run(pack: Path, tokenizer: Path, out: Path, *more: str) -> list[dict[str, float]]:
    return pretrain.pretrain(pretrain.arguments_of([
        "--packs", str(pack), "--tokenizer", str(tokenizer), "--out", str(out), "--workers", "1",
        "--shape", json.dumps(SHAPE), "--batch", "4", "--length", "32", "--lr", "1e-2", *more,
    ]))  # fmt: skip


@pytest.mark.slow
def test_pretraining_lowers_the_loss_and_goes_on(
    pack: Path, saved_tokenizer: Path, tmp_path: Path
) -> None:
    first = run(pack, saved_tokenizer, tmp_path / "a", "--steps", "40")
    assert first[-1]["held_out"] < first[0]["held_out"] - 1
    checkpoint = str(tmp_path / "a" / "checkpoint.pt")
    second = run(pack, saved_tokenizer, tmp_path / "b", "--steps", "10", "--resume", checkpoint)
    assert second[0]["held_out"] < first[0]["held_out"] - 1


def test_pretraining_keeps_its_model_when_it_is_asked_to_end(
    pack: Path, saved_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss_of, asked = pretrain.next_token_loss, itertools.count()

    def loss(*inputs: Any) -> torch.Tensor:
        if next(asked) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss_of(*inputs)

    monkeypatch.setattr(pretrain, "next_token_loss", loss)
    with pytest.raises(SystemExit, match="143"):
        run(pack, saved_tokenizer, tmp_path, "--minutes", "900")
    saved = torch.load(tmp_path / "checkpoint.pt")
    assert {"shape", "model", "optimizers"} == saved.keys()
    assert '"step": 1' in (tmp_path / "log.jsonl").read_text()


def test_each_epoch_reads_every_window_cut_elsewhere() -> None:
    windows = iter(pretrain.Windows(torch.arange(330), 10, 8, seed=0))
    epochs = [torch.cat([next(windows) for _ in range(4)]) for _ in range(2)]
    for rows in epochs:
        assert torch.equal(rows[:, 1:], rows[:, :-1] + 1)
        assert len(rows[:, 0].unique()) == 32
    assert set((epochs[0][:, 0] % 10).tolist()) != set((epochs[1][:, 0] % 10).tolist())


def test_the_exported_model_is_hugging_faces_llama() -> None:
    torch.manual_seed(0)
    reader = Reader(Shape(**SHAPE)).eval()
    config = LlamaConfig(**{k: v for k, v in reader.shape.config().items() if k != "dtype"})
    llama = LlamaForCausalLM(config).eval()
    state = {name: weight.float() for name, weight in reader.export().items()}
    llama.load_state_dict(state, strict=False)
    reader.load_state_dict({n.removeprefix("model."): w for n, w in state.items()})
    tokens = torch.randint(5, 600, (2, 24))
    positions = torch.arange(24).expand_as(tokens)
    expected = llama.model(tokens).last_hidden_state
    assert torch.allclose(reader(tokens, positions), expected, atol=1e-4)


def test_int8_rows_are_within_half_a_step() -> None:
    weights = {"a": torch.randn(7, 33), "norm": torch.ones(7)}
    kept = quantize_rows(weights)
    assert kept["a"].dtype == torch.int8
    restored = kept["a"].float() * kept["a_scale"][:, None]
    assert ((restored - weights["a"]).abs() <= kept["a_scale"][:, None] / 2 + 1e-6).all()
    assert kept["norm"] is weights["norm"]
