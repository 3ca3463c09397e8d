"""Finetuning: the block mask of both modes, and a tiny reader that learns answers."""

from __future__ import annotations

import argparse
import io
import json
import random
from pathlib import Path
from typing import Any

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
    from train import collate

    rng = random.Random(3)
    drawn = [Builder(corpus, tokenizer, 1024).training(rng) for _ in range(8)]
    return collate(sorted(drawn, key=lambda s: -s.blocks[s.kinds == 1].max())[:2])


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
    run(model, model, steppers, [batch] * 12, {"same": [batch]}, arguments, log)
    rows = [json.loads(row) for row in log.getvalue().splitlines()]
    assert [row["step"] for row in rows] == [6, 12]
    assert rows[1]["loss"] < 0.9 * rows[0]["loss"] < 0.8 * 8.6  # from 8.6 at the start
    assert (
        load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"].dtype == torch.int8
    )
    assert json.loads((tmp_path / "config.json").read_text())["int8_rows"] is True
