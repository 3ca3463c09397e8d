"""Averages the weights of readers of one descent, such as a run and the run that went on from it.

    python3 training/average.py training/build/reader1 training/build/reader2 --out training/build/reader

Each folder holds `model.safetensors` in int8 rows and `config.json`, as train.py writes them. The averages
are computed in float32 and rounded to int8 rows again.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from int8 import quantize_rows
from ragcache.models.reader import dequantize_rows


def average(folders: list[Path], out: Path) -> None:
    """Raises `SystemExit` where the readers differ in shape."""
    shapes = {json.dumps(json.loads((each / "config.json").read_text()), sort_keys=True) for each in folders}
    if len(shapes) > 1:
        raise SystemExit(f"the readers of {', '.join(map(str, folders))} differ in config.json; average alike ones")
    out.mkdir(parents=True, exist_ok=True)
    readers = [load_file(folder / "model.safetensors") for folder in folders]
    plain = [dequantize_rows(weights, torch.float32) for weights in readers]
    mean = {
        name: torch.stack([weights[name].float() for weights in plain]).mean(dim=0).to(weight.dtype)
        for name, weight in plain[0].items()
    }
    save_file(quantize_rows(mean), str(out / "model.safetensors"), metadata={"format": "pt"})
    shutil.copy(folders[0] / "config.json", out / "config.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("readers", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    average(arguments.readers, arguments.out)


if __name__ == "__main__":
    main()
