"""Averages the weights of two runs, of which the second went on from the first.

    python3 training/average.py FIRST/model.safetensors SECOND/model.safetensors OUT
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    first, second = load_file(arguments.first), load_file(arguments.second)
    mean = {
        name: ((weight.float() + second[name].float()) / 2).to(torch.bfloat16)
        for name, weight in first.items()
    }
    save_file(mean, str(arguments.out), metadata={"format": "pt"})


if __name__ == "__main__":
    main()
