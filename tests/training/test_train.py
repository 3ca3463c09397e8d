"""Finetuning: the block mask of both modes, and a tiny reader that learns answers."""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sequences
import torch
import train
from model import Reader, Shape, block_mask
from optimization import Clock, make_optimizers
from safetensors.torch import load_file
from samples import Builder
from sequences import stacked
from train import as_batch, run, training_batches

from tests.training.conftest import SHAPE as SMALL

Batch = dict[str, torch.Tensor]
Rows = list[dict[str, float]]
SHAPE = SMALL | {"hidden": 64, "inner": 128, "head_dim": 16}


@pytest.fixture
def batch(corpus: Any, tokenizer: Any) -> Batch:
    rng = random.Random(3)
    drawn = [Builder(corpus, tokenizer, 1024).training(rng) for _ in range(8)]
    return as_batch(stacked(sorted(drawn, key=lambda s: -s.blocks[s.kinds == 1].max())[:2]))


def test_rooted_modules_see_the_preamble_and_themselves(batch: Batch) -> None:
    torch.manual_seed(0)
    model = Reader(Shape(**SHAPE)).eval()
    blocks = batch["blocks"][:1]
    second = (blocks[0] == 2).nonzero()[:, 0]
    changed = batch["tokens"][:1].clone()
    changed[0, blocks[0] == 1] = 9
    for rooted, same in ((True, True), (False, False)):
        mask = block_mask(blocks, torch.tensor([rooted]))
        rows = [
            model(t, batch["positions"][:1], mask)[0, second]
            for t in (batch["tokens"][:1], changed)
        ]
        assert torch.allclose(*rows, atol=1e-5) == same


def finetune(
    batches: Iterable[Batch], sets: dict[str, list[Batch]], out: Path, **more: Any
) -> Rows:
    """The rows of the log."""
    torch.manual_seed(0)
    model = Reader(Shape(**SHAPE))
    usual = {"minutes": 900.0, "steps": 0, "lr": 1e-2, "evaluate_every": 1.0, "save_every": 1.0}
    arguments = argparse.Namespace(**usual | more, out=out)
    with (out / "log.jsonl").open("w") as log:
        run(model, model, make_optimizers(model, 1e-2, "muon"), batches, sets, arguments, log)
    return log_of(out)


def log_of(folder: Path) -> Rows:
    return [json.loads(row) for row in (folder / "log.jsonl").read_text().splitlines()]


FILES = ["checkpoint.pt", "config.json", "log.jsonl", "model.safetensors"]


@pytest.mark.slow
def test_a_tiny_reader_learns_a_batch(batch: Batch, tmp_path: Path) -> None:
    sets = {"same": [batch]}
    rows = finetune([batch] * 12, sets, tmp_path, steps=12, evaluate_every=0.5)
    assert [row["step"] for row in rows] == [6, 12]
    assert rows[1]["loss"] < 0.9 * rows[0]["loss"] < 0.8 * 8.6  # from 8.6 at the start
    weights = load_file(tmp_path / "model.safetensors")
    assert weights["model.embed_tokens.weight"].dtype == torch.int8
    assert json.loads((tmp_path / "config.json").read_text())["int8_rows"] is True


def test_a_run_of_minutes_saves_and_reports_at_its_end(
    batch: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = itertools.count(1.0)  # of six seconds, five steps of a second
    monkeypatch.setattr(
        train, "Clock", lambda minutes, steps: Clock(minutes, steps, times.__next__, 0.0)
    )
    small = {name: column[:1, :256] for name, column in batch.items()}
    rows = finetune(itertools.repeat(small), {"same": [small]}, tmp_path, minutes=5 / 60)
    assert [row["step"] for row in rows] == [5]
    assert {"same_exact", "same_rooted"} < rows[0].keys()
    assert sorted(f.name for f in tmp_path.iterdir()) == FILES


@pytest.mark.slow
def test_the_command_keeps_its_model_after_sigterm(
    corpus: Any, tokenizer: Any, tmp_path: Path
) -> None:
    builder = Builder(corpus, tokenizer, 512)
    rows = sequences.stacked([builder.training(random.Random(i)) for i in range(4)])
    np.save(tmp_path / "training-00000.npy", rows)
    np.savez(tmp_path / "evaluation.npz", seen=rows[:1])
    script = Path(__file__).parents[2] / "training" / "train.py"
    command = [sys.executable, str(script), "--sequences", str(tmp_path), "--batch", "2"]
    command += ["--out", str(tmp_path / "out"), "--shape", json.dumps(SHAPE)]
    command += ["--minutes", "3", "--save-every", "0.001"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert '"loss"' in process.stdout.readline()
        process.terminate()
        assert "signal 15: saved" in process.stdout.read()
    assert process.returncode == 143
    assert sorted(f.name for f in (tmp_path / "out").iterdir()) == FILES


def test_sequences_written_ahead_are_all_read_and_then_again(
    corpus: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequences, "SHARD", 5)
    builder = Builder(corpus, tokenizer, 512)
    with pytest.raises(SystemExit, match=r"sequences\.py writes them"):
        next(training_batches([tmp_path], 4, 0))
    sequences.write_shards(builder, tmp_path, range(3), 1, until=0.0)
    assert not list(tmp_path.iterdir()), "the time is up"
    sequences.write_shards(builder, tmp_path, range(1), 1, until=float("inf"))
    batches = training_batches([tmp_path], 4, 0)
    first = next(batches)["tokens"]
    sequences.write_shards(builder, tmp_path, range(1, 3), 1, until=float("inf"))
    read = torch.cat([first, *(next(batches)["tokens"] for _ in range(3))])
    written = np.concatenate([np.load(f)[:, 0] for f in sorted(tmp_path.glob("*.npy"))])
    assert len(written) == 15
    assert {tuple(r) for r in read[:15].tolist()} == {tuple(r) for r in written.tolist()}
    assert tuple(read[15].tolist()) in {tuple(r) for r in written.tolist()}
