"""Initial token embeddings for the reader: each token's text as all-MiniLM-L6-v2 sees it.

The encoder's hidden size is the reader's (384). Words of like meaning start near each other,
which a few hundred megabytes of template text could not teach.

    python3 training/embeddings.py --encoder DIR --tokenizer training/build/tokenizer --out FILE.npy
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import AutoModel, AutoTokenizer


def token_texts(tokenizer: Tokenizer) -> list[str]:
    size = tokenizer.get_vocab_size()
    texts = [tokenizer.decode([i], skip_special_tokens=False).strip() for i in range(size)]
    return [text or "." for text in texts]


@torch.no_grad()
def embed(texts: list[str], encoder_folder: Path) -> np.ndarray:
    """[len(texts), 384]: mean-pooled encoder outputs, centred, in units of their deviation."""
    encoder = AutoModel.from_pretrained(encoder_folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(encoder_folder)
    rows = []
    for start in range(0, len(texts), 256):
        batch = tokenizer(texts[start : start + 256], padding=True, return_tensors="pt")
        hidden = encoder(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None]
        rows.append((hidden * mask).sum(1) / mask.sum(1))
    table = torch.cat(rows).numpy()
    table = table - table.mean(0)
    return table / table.std()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--encoder", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json"))
    table = embed(token_texts(tokenizer), arguments.encoder)
    # Tokens of one text (with and without the leading space) must not start identical.
    table += np.random.default_rng(0).normal(scale=0.15, size=table.shape)
    np.save(arguments.out, table.astype(np.float16))


if __name__ == "__main__":
    main()
