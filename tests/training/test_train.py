"""Finetuning: the block mask of both modes, and a tiny reader that learns answers."""

from __future__ import annotations

import argparse
import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

SHAPE = {
    "vocabulary": 600,
    "hidden": 64,
    "inner": 128,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
}


@pytest.fixture
def batch(corpus: Any, tokenizer: Any) -> dict[str, torch.Tensor]:
    from samples import Builder
    from sequences import stacked
    from train import as_batch

    rng = random.Random(3)
    drawn = [Builder(corpus, tokenizer, 1024).training(rng) for _ in range(8)]
    return as_batch(stacked(sorted(drawn, key=lambda s: -s.blocks[s.kinds == 1].max())[:2]))


def test_rooted_modules_see_the_preamble_and_themselves(batch: dict[str, torch.Tensor]) -> None:
    from model import Reader, Shape, block_mask

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


def test_a_tiny_reader_learns_a_batch(batch: dict[str, torch.Tensor], tmp_path: Path) -> None:
    from model import Reader, Shape
    from optimization import make_optimizers
    from safetensors.torch import load_file
    from train import run

    torch.manual_seed(0)
    model = Reader(Shape(**SHAPE))
    arguments = argparse.Namespace(minutes=9.0, steps=12, lr=1e-2, evaluate_every=0.5, out=tmp_path)
    log = io.StringIO()
    steppers = make_optimizers(model, 1e-2, "muon")
    run(model, model, steppers, iter([batch] * 12), {"same": [batch]}, arguments, log)
    rows = [json.loads(row) for row in log.getvalue().splitlines()]
    assert [row["step"] for row in rows] == [6, 12]
    assert rows[1]["loss"] < 0.9 * rows[0]["loss"] < 0.8 * 8.6  # from 8.6 at the start
    assert (
        load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"].dtype == torch.int8
    )
    assert json.loads((tmp_path / "config.json").read_text())["int8_rows"] is True


def test_sequences_written_ahead_are_all_read_and_then_again(
    corpus: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sequences
    from samples import Builder
    from train import training_batches

    monkeypatch.setattr(sequences, "SHARD", 5)
    builder = Builder(corpus, tokenizer, 512)
    with pytest.raises(SystemExit, match=r"sequences\.py writes them"):
        next(training_batches([tmp_path], 4, 0))
    sequences.write_shards(builder, tmp_path, range(1), 1, until=float("inf"))
    batches = training_batches([tmp_path], 4, 0)
    first = next(batches)["tokens"]
    sequences.write_shards(builder, tmp_path, range(1, 3), 1, until=float("inf"))
    read = torch.cat([first, *(next(batches)["tokens"] for _ in range(3))])
    written = np.concatenate([np.load(f)[:, 0] for f in sorted(tmp_path.glob("*.npy"))])
    assert len(written) == 15
    assert {tuple(r) for r in read[:15].tolist()} == {tuple(r) for r in written.tolist()}
    assert tuple(read[15].tolist()) in {tuple(r) for r in written.tolist()}


def test_no_shard_is_written_once_the_time_is_up(
    corpus: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sequences
    from samples import Builder

    monkeypatch.setattr(sequences, "SHARD", 1)
    sequences.write_shards(Builder(corpus, tokenizer, 512), tmp_path, range(3), 1, until=0.0)
    assert not list(tmp_path.iterdir())


def test_muon_in_stacks_is_torchs_matrix_by_matrix() -> None:
    from optimization import Muon

    torch.manual_seed(0)
    ours = [torch.randn(s, requires_grad=True) for s in ((24, 12), (24, 12), (12, 36))]
    theirs = [m.detach().clone().requires_grad_() for m in ours]
    before = [m.detach().clone() for m in ours]
    steppers = [
        Muon(ours, 1e-2),
        torch.optim.Muon(theirs, lr=1e-2, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
    ]
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for stepper in steppers:
            stepper.step()
    for a, b, start in zip(ours, theirs, before, strict=True):
        assert (a - b).norm() < 0.05 * (a - start).norm()  # both orthogonalize in bfloat16


def test_a_clock_of_minutes_counts_the_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    import optimization

    now = 1000.0
    monkeypatch.setattr(optimization.time, "time", lambda: now)
    monkeypatch.setattr(optimization, "_BEGUN", 900.0)
    clock = optimization.Clock(minutes=3, steps=0)
    for _ in range(3):
        assert clock.progress == 0
        clock.tick()
    now = 1060.0
    assert clock.progress == pytest.approx(60 / 80)  # the end is at 900 + 180
    now = 1090.0
    assert clock.progress == 1
