"""The average of two readers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from average import average
from int8 import quantize_rows
from safetensors.torch import load_file, save_file

from ragcache.models.reader import dequantize_rows


def write_reader(folder: Path, matrix: torch.Tensor, norm: torch.Tensor, **config: int) -> Path:
    folder.mkdir()
    weights = quantize_rows({"matrix": matrix, "norm": norm})
    save_file(weights, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps({"int8_rows": True, **config}))
    return folder


def test_weights_lie_between_those_of_the_readers(tmp_path: Path) -> None:
    one, other = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1))
    norms = torch.ones(8, dtype=torch.bfloat16), torch.full((8,), 3.0, dtype=torch.bfloat16)
    folders = [
        write_reader(tmp_path / "one", one, norms[0]),
        write_reader(tmp_path / "other", other, norms[1]),
    ]
    average(folders, tmp_path / "out")
    found = dequantize_rows(load_file(tmp_path / "out/model.safetensors"), torch.float32)
    torch.testing.assert_close(found["matrix"], (one + other) / 2, rtol=0, atol=0.04)
    assert torch.equal(found["norm"], torch.full((8,), 2.0, dtype=torch.bfloat16))
    assert json.loads((tmp_path / "out/config.json").read_text()) == {"int8_rows": True}


def test_readers_of_two_shapes_are_refused(tmp_path: Path) -> None:
    matrix, norm = torch.ones(2, 2), torch.ones(2)
    folders = [write_reader(tmp_path / str(n), matrix, norm, hidden_size=n) for n in (2, 3)]
    with pytest.raises(SystemExit, match=r"differ in config\.json"):
        average(folders, tmp_path / "out")
    assert not (tmp_path / "out").exists()
