"""Finetunes the pretrained reader to answer questions, on one GPU.

    python3 training/train.py --data DIR --tokenizer training/build/tokenizer \\
        --start-from training/build/pretrained/checkpoint.pt --packs training/build/packs/pack-0 \\
        --out training/build/reader --minutes 8

Writes model.safetensors (int8 rows), config.json, checkpoint.pt and log.jsonl. The schedule is a
cosine over the time given, so that a run uses its machine to the end.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from corpus import load_corpus
from evaluation import evaluation_sets
from int8 import quantize_rows
from model import Reader, Shape, block_mask
from optimization import Clock, make_optimizers, set_rate
from pack import read_texts
from samples import Builder, Sequence

DOCUMENT_WEIGHT, QUESTION_WEIGHT = 0.25, 0.1
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DOCUMENT_SHARE = 0.25  # the share of document tokens whose loss is computed at each step


class Stream(IterableDataset[Sequence]):
    """Endless training sequences; every worker has its own random state."""

    def __init__(self, builder: Builder, seed: int) -> None:
        self.builder, self.seed = builder, seed

    def __iter__(self) -> Iterator[Sequence]:
        info = get_worker_info()
        rng = random.Random(self.seed * 1000 + (info.id if info else 0))
        while True:
            yield self.builder.training(rng)


def collate(sequences: list[Sequence]) -> dict[str, Tensor]:
    names = ("tokens", "positions", "blocks", "kinds")
    return {n: torch.from_numpy(np.stack([getattr(s, n) for s in sequences])).int() for n in names}


def to_device(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: column.to(DEVICE, non_blocking=True) for name, column in batch.items()}


def losses(model: Reader, hidden: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Answer loss + 0.25 document loss + 0.1 question loss, each a mean over its tokens."""
    targets, kinds = batch["tokens"][:, 1:].reshape(-1).long(), batch["kinds"][:, 1:].reshape(-1)
    same = (batch["blocks"][:, 1:] == batch["blocks"][:, :-1]).reshape(-1)
    rows = hidden[:, :-1].reshape(-1, hidden.shape[-1])
    total = rows.new_zeros(())
    for kind, weight, share in ((3, 1.0, 1.0), (1, DOCUMENT_WEIGHT, DOCUMENT_SHARE), (2, QUESTION_WEIGHT, 0.3)):
        chosen = (kinds == kind) & same
        if share < 1:
            chosen &= torch.rand(chosen.shape, device=chosen.device) < share
        index = chosen.nonzero()[:, 0]
        logits = F.linear(rows[index], model.embed_tokens.weight)
        total = total + weight * F.cross_entropy(logits.float(), targets[index])
    return total


@torch.no_grad()
def exact_match(model: Reader, forward: object, batches: list[dict[str, Tensor]], rooted: bool) -> float:
    """The share of answers whose every token is the model's first choice: greedy decoding would
    write exactly this answer."""
    right = asked = 0
    model.eval()
    for cpu in batches:
        batch = to_device(cpu)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            modes = torch.full((len(batch["tokens"]),), rooted, device=DEVICE)
            hidden = forward(batch["tokens"], batch["positions"], block_mask(batch["blocks"], modes))
            predicted = F.linear(hidden, model.embed_tokens.weight).argmax(-1)[:, :-1]
        wrong = (predicted != batch["tokens"][:, 1:]) & (batch["kinds"][:, 1:] == 3)
        rows = torch.arange(len(batch["tokens"]), device=DEVICE)[:, None]
        ids = (rows * 4096 + batch["blocks"][:, 1:])
        questions = ids[batch["kinds"][:, 1:] == 3].unique()
        failed = ids[wrong].unique()
        asked, right = asked + len(questions), right + len(questions) - len(failed)
    model.train()
    return right / max(1, asked)


def schedule(progress: float) -> float:
    if progress < 0.02:
        return progress / 0.02
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (progress - 0.02) / 0.98))


def save(model: Reader, folder: Path) -> None:
    weights = quantize_rows(model.export())
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config = model.shape.config() | {"int8_rows": True}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    torch.save({"shape": vars(model.shape), "model": model.state_dict()}, folder / "checkpoint.pt")


def initial_model(arguments: argparse.Namespace) -> Reader:
    torch.manual_seed(arguments.seed)
    if not arguments.start_from:
        return Reader(Shape(**json.loads(arguments.shape)), arguments.dropout).to(DEVICE)
    saved = torch.load(arguments.start_from, map_location="cpu")
    model = Reader(Shape(**saved["shape"]), arguments.dropout)
    model.load_state_dict(saved["model"])
    return model.to(DEVICE)


def train(arguments: argparse.Namespace) -> None:
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json"))
    documents = read_texts(arguments.packs, max(1, arguments.workers)) if arguments.packs else []
    corpus = load_corpus(Path(__file__).parent, arguments.data, arguments.swap, documents)
    builder = Builder(corpus, tokenizer, arguments.length)
    sets = {
        name: [collate(part) for part in parts]
        for name, parts in evaluation_sets(builder, arguments.data).items()
    }
    loader = DataLoader(
        Stream(builder, arguments.seed), arguments.batch, collate_fn=collate,
        num_workers=arguments.workers, pin_memory=DEVICE.type == "cuda",
        prefetch_factor=4 if arguments.workers else None,
    )  # fmt: skip
    model = initial_model(arguments)
    forward = torch.compile(model) if DEVICE.type == "cuda" else model
    steppers = make_optimizers(model, arguments.lr, arguments.optimizer)
    log = (arguments.out / "log.jsonl").open("a")
    run(model, forward, steppers, loader, sets, arguments, log)


def run(model, forward, steppers, loader, sets, arguments, log) -> None:  # noqa: ANN001
    clock, evaluated, tokens = Clock(arguments.minutes, arguments.steps), 0.0, 0
    for cpu in loader:
        batch = to_device(cpu)
        set_rate(steppers, arguments.lr * max(schedule(clock.progress), 1e-2))
        rooted = torch.rand(len(batch["tokens"]), device=DEVICE) < 0.5
        with torch.autocast(DEVICE.type, torch.bfloat16):
            hidden = forward(batch["tokens"], batch["positions"], block_mask(batch["blocks"], rooted))
            loss = losses(model, hidden, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad(set_to_none=True)
        clock.tick()
        tokens += batch["tokens"].numel()
        if clock.progress >= min(1.0, evaluated + arguments.evaluate_every):
            evaluated = clock.progress
            report(model, forward, sets, log, clock.step, tokens, clock.seconds, loss.item())
            save(model, arguments.out)
        if clock.progress >= 1:
            break


def report(model, forward, sets, log, step, tokens, seconds, loss) -> None:  # noqa: ANN001
    row = {"step": step, "tokens_M": tokens // 10**6, "s": round(seconds), "loss": round(loss, 3)}
    for name, batches in sets.items():
        for mode, rooted in (("exact", False), ("rooted", True)):
            row[f"{name}_{mode}"] = round(exact_match(model, forward, batches, rooted), 3)
    print(json.dumps(row), flush=True)
    log.write(json.dumps(row) + "\n")
    log.flush()


def arguments_of(command: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--packs", type=Path, nargs="*", default=[], help="natural text: pack.py's")
    parser.add_argument("--start-from", type=Path, help="a checkpoint.pt to go on from")
    parser.add_argument("--shape", default="{}", help="JSON: fields of model.Shape")
    parser.add_argument("--steps", type=int, default=0, help="stop after so many, whatever the time")
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="muon")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--swap", type=float, default=0.3, help="share of fillings swapped")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=1792)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--evaluate-every", type=float, default=0.25)
    return parser.parse_args(command)


if __name__ == "__main__":
    train(arguments_of())
