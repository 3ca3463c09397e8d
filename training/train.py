"""Finetunes the pretrained reader to answer questions, on one GPU.

    python3 training/train.py --sequences training/build/sequences \\
        --start-from training/build/pretrained/checkpoint.pt --out training/build/reader --minutes 8

Writes model.safetensors (int8 rows), config.json, checkpoint.pt and log.jsonl, every `--save-every`
minutes and whatever ends the run. The schedule is a cosine over the time given, so that a run uses its
machine to the end.
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
from torch import Tensor

from int8 import quantize_rows
from model import Reader, Shape, block_mask
from optimization import Clock, Run, make_optimizers, save_checkpoint, set_rate
from sequences import COLUMNS

DOCUMENT_WEIGHT, QUESTION_WEIGHT = 0.25, 0.1
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DOCUMENT_SHARE = 0.25  # the share of document tokens whose loss is computed at each step

Batch = dict[str, Tensor]  # each of `COLUMNS`: int32 [sequence, token]


def training_batches(folders: list[Path], size: int, seed: int) -> Iterator[Batch]:
    """Endless: all shards in random order, and those that have come since, again and again."""
    rng, read, left = random.Random(seed), set(), []
    while True:
        shards = [f for folder in folders for f in sorted(folder.glob("training-*.npy"))]
        fresh = [f for f in shards if f not in read] or shards
        if not fresh:
            raise SystemExit(f"no sequences in {folders}; sequences.py writes them")
        shard = rng.choice(fresh)
        read.add(shard)
        rows = np.load(shard)
        left.append(rows[np.random.default_rng(rng.randrange(2**32)).permutation(len(rows))])
        rows = np.concatenate(left)
        whole = len(rows) // size * size
        for start in range(0, whole, size):
            yield as_batch(rows[start : start + size])
        left = [rows[whole:]]


def evaluation_batches(file: Path, size: int) -> dict[str, list[Batch]]:
    sets = np.load(file)
    return {
        name: [as_batch(rows[i : i + size]) for i in range(0, len(rows), size)]
        for name, rows in sets.items()
    }


def as_batch(rows: np.ndarray) -> Batch:
    """rows: int16 [sequence, column, token]."""
    return {name: torch.from_numpy(rows[:, i].astype(np.int32)) for i, name in enumerate(COLUMNS)}


def to_device(batch: Batch) -> Batch:
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
def exact_match(model: Reader, batches: list[Batch], rooted: bool) -> float:
    """The share of answers whose every token is the model's first choice: greedy decoding would
    write exactly this answer."""
    right = asked = 0
    model.eval()
    for cpu in batches:
        batch = to_device(cpu)
        modes = torch.full((len(batch["tokens"]),), rooted, device=DEVICE)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            mask = block_mask(batch["blocks"], modes, dense=True)
            hidden = model(batch["tokens"], batch["positions"], mask)[:, :-1]
            of_answers = batch["kinds"][:, 1:] == 3
            predicted = F.linear(hidden[of_answers], model.embed_tokens.weight).argmax(-1)
        rows = torch.arange(len(batch["tokens"]), device=DEVICE)[:, None]
        questions = (rows * 4096 + batch["blocks"][:, 1:])[of_answers]
        wrong = questions[predicted != batch["tokens"][:, 1:][of_answers]]
        asked += len(questions.unique())
        right += len(questions.unique()) - len(wrong.unique())
    model.train()
    return right / max(1, asked)


def schedule(progress: float) -> float:
    if progress < 0.02:
        return progress / 0.02
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (progress - 0.02) / 0.98))


def save(model: Reader, folder: Path) -> None:
    save_checkpoint(model, folder / "checkpoint.pt")
    part = folder / "model.part"
    save_file(quantize_rows(model.export()), str(part), metadata={"format": "pt"})
    part.replace(folder / "model.safetensors")
    config = model.shape.config() | {"int8_rows": True}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


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
    sets = evaluation_batches(arguments.sequences[0] / "evaluation.npz", 32)
    batches = training_batches(arguments.sequences, arguments.batch, arguments.seed)
    model = initial_model(arguments)
    forward = torch.compile(model) if DEVICE.type == "cuda" else model
    steppers = make_optimizers(model, arguments.lr, arguments.optimizer)
    log = (arguments.out / "log.jsonl").open("a")
    run(model, forward, steppers, batches, sets, arguments, log)


def run(model, forward, steppers, batches, sets, arguments, log) -> None:  # noqa: ANN001
    clock, evaluated, tokens = Clock(arguments.minutes, arguments.steps), 0.0, 0
    with Run(clock, lambda: save(model, arguments.out), 60 * arguments.save_every) as training:
        for cpu in batches:
            batch = to_device(cpu)
            set_rate(steppers, arguments.lr * max(schedule(clock.progress), 1e-2))
            loss = step(model, forward, steppers, batch)
            tokens += batch["tokens"].numel()
            saved = training.tick()
            due = clock.progress >= min(1.0, evaluated + arguments.evaluate_every)
            if saved or due:
                evaluated = clock.progress if due else evaluated
                report(model, sets if due else {}, log, clock, tokens, loss.item())
            if training.over:
                break


def step(model, forward, steppers, batch) -> Tensor:  # noqa: ANN001
    """One step on a batch; returns its loss."""
    rooted = torch.rand(len(batch["tokens"]), device=DEVICE) < 0.5
    with torch.autocast(DEVICE.type, torch.bfloat16):
        hidden = forward(batch["tokens"], batch["positions"], block_mask(batch["blocks"], rooted))
        loss = losses(model, hidden, batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for stepper in steppers:
        stepper.step()
        stepper.zero_grad(set_to_none=True)
    return loss.detach()


def report(model, sets, log, clock, tokens, loss) -> None:  # noqa: ANN001
    row = {"step": clock.step, "tokens_M": tokens // 10**6, "s": round(clock.seconds), "loss": round(loss, 3)}
    for name, batches in sets.items():
        for mode, rooted in (("exact", False), ("rooted", True)):
            row[f"{name}_{mode}"] = round(exact_match(model, batches, rooted), 3)
    print(json.dumps(row), flush=True)
    log.write(json.dumps(row) + "\n")
    log.flush()


def arguments_of(command: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=Path, nargs="+", required=True, help="folders of sequences.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start-from", type=Path, help="a checkpoint.pt to go on from")
    parser.add_argument("--shape", default="{}", help="JSON: fields of model.Shape")
    parser.add_argument("--steps", type=int, default=0, help="stop after so many, whatever the time")
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="muon")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--evaluate-every", type=float, default=0.5, help="share of the run")
    parser.add_argument("--save-every", type=float, default=1.0, help="minutes")
    return parser.parse_args(command)


if __name__ == "__main__":
    train(arguments_of())
