"""Trains the hybrid toy on one GPU, or slowly on a CPU, and measures what composition costs it.

    python3 training/hybrid_train.py --contexts training/build/hybrid --out training/build/hybrid-exact \\
        --composed 0 --minutes 5

`--composed` is the share of steps in which every module is read alone and composed in the prompt's
order; in the others the context is read in a row. Writes the Hugging Face model and `evaluation.json`:
for each evaluation set and way to read (`hybrid_model.Mode`), exact match over all questions and over
those about the first and the last module, and the KL divergence from `exact`. Both are teacher-forced:
an answer is right if each of its tokens is the first choice.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from hybrid_model import Mode, Pieces, config_of, forward, model_of_reader, new_model
from optimization import Clock, Run, make_optimizers, set_rate
from samples import PREAMBLE
from train import DOCUMENT_SHARE, DOCUMENT_WEIGHT, QUESTION_WEIGHT, schedule

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True)
class Batch:
    """Contexts of one size, on the device."""

    tokens: Pieces
    kinds: Tensor
    """[B, Q, L]."""
    asked: Tensor
    """[B, Q]."""

    @classmethod
    def of(cls, arrays: dict[str, np.ndarray], preamble: Tensor) -> Batch:
        used = (arrays["asked"] >= 0).any(0).sum(), (arrays["kinds"] > 0).any((0, 1)).sum()
        rows = {name: torch.from_numpy(each.astype(np.int64)) for name, each in arrays.items()}
        on_device = {"modules": rows["modules"].to(DEVICE), "asked": rows["asked"][:, : used[0]].to(DEVICE)}
        for name in ("questions", "kinds"):  # without columns of padding alone
            on_device[name] = rows[name][:, : used[0], : used[1]].to(DEVICE)
        tokens = Pieces(preamble, on_device["modules"], on_device["questions"])
        return cls(tokens, on_device["kinds"], on_device["asked"])

    @property
    def size(self) -> int:
        return self.tokens.modules.numel() + self.tokens.questions.numel()


def split(arrays: dict[str, np.ndarray], tokens: int) -> Iterator[dict[str, np.ndarray]]:
    """Arrays of at most so many tokens."""
    each = arrays["modules"][0].size + arrays["questions"][0].size
    size = max(1, tokens // each)
    for begin in range(0, len(arrays["modules"]), size):
        yield {name: rows[begin : begin + size] for name, rows in arrays.items()}


def training_batches(folder: Path, tokens: int, preamble: Tensor, seed: int) -> Iterator[Batch]:
    """Endless: all shards in random order, and those that have come since, again and again. Shards
    are mixed, so that contexts of all sizes follow each other."""
    rng, read = random.Random(seed), set[Path]()
    while True:
        shards = sorted(folder.glob("training-*.npz"))
        if not shards:
            raise SystemExit(f"no contexts in {folder}; hybrid_samples.py writes them")
        fresh = [each for each in shards if each not in read] or shards
        parts = []
        for shard in rng.sample(fresh, min(len(fresh), 6)):
            read.add(shard)
            with np.load(shard) as rows:
                parts += (part for part in split(dict(rows), tokens) if (part["asked"] >= 0).any())
        rng.shuffle(parts)
        for part in parts:
            yield Batch.of(part, preamble)


def loss_of(model: Any, batch: Batch, mode: Mode) -> Tensor:
    """Answer loss + 0.25 document loss + 0.1 question loss, each a mean over its tokens."""
    hidden = forward(model, batch.tokens, mode)
    head = model.lm_head.weight

    def mean(rows: Tensor, targets: Tensor, chosen: Tensor, share: float) -> Tensor:
        if share < 1:
            chosen = chosen & (torch.rand(chosen.shape, device=chosen.device) < share)
        logits = F.linear(rows[chosen], head)
        return F.cross_entropy(logits.float(), targets[chosen])

    asked, targets = hidden.questions[:, :, :-1], batch.tokens.questions[:, :, 1:]
    kinds = batch.kinds[:, :, 1:]
    read = batch.tokens.modules[:, :, 1:]
    return (
        mean(asked, targets, kinds == 3, 1.0)
        + QUESTION_WEIGHT * mean(asked, targets, kinds == 2, 0.3)
        + DOCUMENT_WEIGHT
        * mean(hidden.modules[:, :, :-1], read, torch.ones_like(read, dtype=torch.bool), DOCUMENT_SHARE)
    )


@torch.no_grad()
def evaluate(model: Any, sets: dict[str, dict[str, np.ndarray]], preamble: Tensor) -> list[dict[str, Any]]:
    """A row for each set and way to read."""
    rows = []
    model.eval()
    for name, arrays in sets.items():
        found = defaultdict[Mode, _Score](_Score)
        for part in split(arrays, 2**15):
            batch = Batch.of(part, preamble)
            expected = None
            for mode in MODES:
                with torch.autocast(DEVICE.type, torch.bfloat16, enabled=False):
                    hidden = forward(model, batch.tokens, mode).questions[:, :, :-1]
                log_probs = F.linear(hidden[batch.kinds[:, :, 1:] == 3], model.lm_head.weight).log_softmax(-1)
                expected = log_probs if expected is None else expected
                found[mode].add(batch, log_probs, expected)
        source, _, count = name.partition("-")
        rows += [
            {"set": source, "modules": int(count), "mode": mode, **score.row(int(count))}
            for mode, score in found.items()
        ]
    model.train()
    return rows


class _Score:
    """Right answers by the module that was asked about, and divergences of their tokens."""

    def __init__(self) -> None:
        self.asked, self.right = defaultdict[int, int](int), defaultdict[int, int](int)
        self.divergence, self.tokens = 0.0, 0

    def add(self, batch: Batch, log_probs: Tensor, expected: Tensor) -> None:
        """log_probs, expected: [answer tokens, vocabulary]."""
        answers = batch.kinds[:, :, 1:] == 3
        wrong = torch.zeros_like(answers)
        wrong[answers] = log_probs.argmax(-1) != batch.tokens.questions[:, :, 1:][answers]
        right = ~wrong.any(-1)
        for number, good in zip(batch.asked.flatten().tolist(), right.flatten().tolist(), strict=True):
            if number >= 0:
                self.asked[number] += 1
                self.right[number] += good
        self.divergence += float((expected.exp() * (expected - log_probs)).sum())
        self.tokens += len(log_probs)

    def row(self, count: int) -> dict[str, float]:
        share = lambda numbers: sum(self.right[n] for n in numbers) / max(1, sum(self.asked[n] for n in numbers))  # noqa: E731
        return {
            "questions": sum(self.asked.values()),
            "match": round(share(range(count)), 4),
            "first": round(share([0]), 4),
            "last": round(share([count - 1]), 4),
            "kl": round(self.divergence / max(1, self.tokens), 5),
        }


def evaluation_arrays(file: Path) -> dict[str, dict[str, np.ndarray]]:
    sets: dict[str, dict[str, np.ndarray]] = defaultdict(dict)
    with np.load(file) as rows:
        for name in rows.files:
            source, _, key = name.partition(".")
            sets[source][key] = rows[name]
    return dict(sets)


def initial_model(arguments: argparse.Namespace, vocabulary: int, preamble: Tensor) -> Any:
    """A model of random weights, or one with the weights of a reader."""
    attention = arguments.attention_layers
    if arguments.start_from is None:
        config = config_of(vocabulary, arguments.hidden, arguments.layers, arguments.heads, attention)
        return new_model(config, arguments.seed)
    with np.load(min(arguments.contexts.glob("training-*.npz"))) as rows:
        modules = torch.from_numpy(rows["modules"][:8].astype(np.int64)).flatten()
    text = torch.cat([preamble[0], modules])
    return model_of_reader(arguments.start_from, text, arguments.seed, attention)


def train(arguments: argparse.Namespace) -> None:
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("highest")  # the rule's products cancel
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json"))
    preamble = torch.tensor([tokenizer.encode(PREAMBLE).ids], device=DEVICE)
    model = initial_model(arguments, tokenizer.get_vocab_size(), preamble.cpu()).float().to(DEVICE)
    steppers = make_optimizers(model, arguments.lr, arguments.optimizer)
    rng, clock = random.Random(arguments.seed), Clock(arguments.minutes, arguments.steps)
    log, tokens = (arguments.out / "log.jsonl").open("a"), 0
    batches = training_batches(arguments.contexts, arguments.batch_tokens, preamble, arguments.seed)
    save = lambda: model.save_pretrained(arguments.out, max_shard_size="14MB")  # noqa: E731
    with Run(clock, save, 60 * arguments.save_every) as run:
        for batch in batches:
            set_rate(steppers, arguments.lr * max(schedule(clock.progress), 1e-2))
            mode: Mode = "order" if rng.random() < arguments.composed else "exact"
            with torch.autocast(DEVICE.type, torch.bfloat16):
                loss = loss_of(model, batch, mode)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for stepper in steppers:
                stepper.step()
                stepper.zero_grad(set_to_none=True)
            tokens += batch.size
            run.tick()
            if clock.step % arguments.log_every == 0 or run.over:
                row = {"step": clock.step, "tokens_M": round(tokens / 1e6, 2), "s": round(clock.seconds),
                       "mode": mode, "loss": round(loss.item(), 3)}  # fmt: skip
                print(json.dumps(row), flush=True)
                log.write(json.dumps(row) + "\n")
            if run.over:
                break
    sets = {
        name: {key: rows[: arguments.evaluated] for key, rows in each.items()}
        for name, each in evaluation_arrays(arguments.contexts / "evaluation.npz").items()
    }
    rows = evaluate(model, sets, preamble) if arguments.evaluated else []
    document = {
        "parameters": sum(each.numel() for each in model.parameters()), "tokens": tokens,
        "steps": clock.step, "seconds": clock.seconds, "composed": arguments.composed, "rows": rows,
    }  # fmt: skip
    (arguments.out / "evaluation.json").write_text(json.dumps(document, indent=1) + "\n")
    for row in rows:
        print(json.dumps(row), flush=True)


def arguments_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=Path, required=True, help="folder of hybrid_samples.py")
    parser.add_argument("--tokenizer", type=Path, default=Path(__file__).parent.parent / "ragcache" / "reader")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start-from", type=Path, help="folder of a reader whose weights are taken")
    parser.add_argument("--composed", type=float, default=0.0, help="share of the steps")
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--steps", type=int, default=0, help="stop after so many, whatever the time")
    parser.add_argument("--hidden", type=int, default=320)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--attention-layers", type=int, nargs="+", help="every fourth by default")
    parser.add_argument("--optimizer", choices=["muon", "adamw"], default="muon")
    parser.add_argument("--evaluated", type=int, default=96, help="contexts of each set, 0 to 96")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--batch-tokens", type=int, default=2**16)
    parser.add_argument("--save-every", type=float, default=1.0, help="minutes")
    parser.add_argument("--log-every", type=int, default=50, help="steps")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    train(arguments_of())
