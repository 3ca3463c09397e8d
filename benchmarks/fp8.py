"""Weights in fp8 beside bfloat16: the probabilities that a model gives to a text.

    python benchmarks/fp8.py --model Qwen/Qwen2.5-0.5B-Instruct --json FILE docs/guides/*.md

Reads the texts in windows, each of them alone. On a CPU, products are computed as on a GPU, which
takes minutes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ragcache.machine import describe_machine
from ragcache.models.checkpoint import load_checkpoint
from ragcache.models.fp8 import Fp8Linear, quantize_fp8


def compare(model: Any, windows: Sequence[Sequence[int]], device: torch.device) -> dict[str, float]:
    """Round the weights of a model, in place, and compare its probabilities with those before.

    Args:
        model: A model in bfloat16 on the device.
        windows: Token ids of the texts.
        device: Its device.

    Returns:
        The mean negative log-likelihood of the tokens in nats before and after, the mean and the
        99th percentile of the Kullback-Leibler divergence from bfloat16, and the share of places
        with the same likeliest token.
    """
    exact = log_probabilities(model, windows)
    quantize_fp8(model, model.get_output_embeddings(), device)
    for layer in model.modules():
        if isinstance(layer, Fp8Linear):
            layer.forward = partial(_product, layer)  # type: ignore[method-assign]  # on a CPU, too
    found = log_probabilities(model, windows)
    pairs = [*zip(exact, found, strict=True)]
    apart = torch.cat([(a.exp() * (a - b)).sum(1) for a, b in pairs])
    same = torch.cat([(a.argmax(1) == b.argmax(1)).float() for a, b in pairs])
    return {
        "tokens": float(sum(len(window) - 1 for window in windows)),
        "bfloat16_nll": _nll(exact, windows),
        "fp8_nll": _nll(found, windows),
        "kl_mean": float(apart.mean()),
        "kl_p99": float(apart.quantile(0.99)),
        "same_likeliest": float(same.mean()),
    }


@torch.inference_mode()
def log_probabilities(model: Any, windows: Sequence[Sequence[int]]) -> list[Tensor]:
    """Log-probabilities of all tokens at each place of each window, [T, vocabulary], on the CPU."""
    found = []
    for window in windows:
        logits = model(torch.tensor([window], device=model.device), use_cache=False).logits[0]
        found.append(logits.float().log_softmax(-1).cpu())
    return found


def _product(layer: Fp8Linear, hidden: Tensor) -> Tensor:
    out = layer.multiply(hidden.reshape(-1, layer.in_features))
    if layer.bias is not None:
        out = out + layer.bias
    return out.view(*hidden.shape[:-1], layer.out_features)


def _nll(found: Sequence[Tensor], windows: Sequence[Sequence[int]]) -> float:
    pairs = zip(found, windows, strict=True)
    chosen = [each[:-1].gather(1, torch.tensor(ids[1:])[:, None]) for each, ids in pairs]
    return -float(torch.cat(chosen).mean())


def main() -> None:
    """Prints the figures as JSON."""
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", nargs="+", type=Path, help="files of text")
    parser.add_argument("--model", required=True, help="folder or hub name")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="of a window")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device, size = torch.device(options.device), options.tokens
    text = "\n\n".join(each.read_text(encoding="utf-8") for each in options.texts)
    ids = AutoTokenizer.from_pretrained(options.model).encode(text)
    windows = [ids[at : at + size] for at in range(0, len(ids) - size + 1, size)]
    model = load_checkpoint(options.model, torch.bfloat16).to(device).eval()
    figures = compare(model, windows[: options.windows], device)
    document = {"machine": describe_machine(), "model": options.model, "figures": figures}
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
