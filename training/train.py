"""Trains the embedded reader on one GPU.

    python3 training/train.py --data DIR --tokenizer training/build/tokenizer \\
        --out training/build/reader --minutes 25

Writes model.safetensors (bf16), config.json and log.jsonl. The schedule is a cosine over the time
given, so that a run uses its machine to the end.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from corpus import load_corpus
from evaluation import evaluation_sets
from model import CONFIG, Reader, block_mask
from samples import QUESTION, Builder, Sequence

DOCUMENT_WEIGHT, QUESTION_WEIGHT = 0.25, 0.1
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
    return {name: column.cuda(non_blocking=True) for name, column in batch.items()}


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
        with torch.autocast("cuda", torch.bfloat16):
            modes = torch.full((len(batch["tokens"]),), rooted, device="cuda")
            hidden = forward(batch["tokens"], batch["positions"], block_mask(batch["blocks"], modes))
            predicted = F.linear(hidden, model.embed_tokens.weight).argmax(-1)[:, :-1]
        wrong = (predicted != batch["tokens"][:, 1:]) & (batch["kinds"][:, 1:] == 3)
        rows = torch.arange(len(batch["tokens"]), device="cuda")[:, None]
        ids = (rows * 4096 + batch["blocks"][:, 1:])
        questions = ids[batch["kinds"][:, 1:] == 3].unique()
        failed = ids[wrong].unique()
        asked, right = asked + len(questions), right + len(questions) - len(failed)
    model.train()
    return right / max(1, asked)


def optimizers(model: Reader, arguments: argparse.Namespace) -> list[torch.optim.Optimizer]:
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() < 2 or "embed" in n]
    if arguments.optimizer == "muon":
        muon = torch.optim.Muon(
            matrices, lr=arguments.lr, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        )
        adam = torch.optim.AdamW(others, lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        return [muon, adam]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, lr=arguments.lr, betas=(0.9, 0.95), fused=True)]


def schedule(progress: float) -> float:
    if progress < 0.02:
        return progress / 0.02
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (progress - 0.02) / 0.98))


def save(model: Reader, folder: Path) -> None:
    save_file(model.export(), str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")


def initial_model(arguments: argparse.Namespace) -> Reader:
    torch.manual_seed(arguments.seed)
    model = Reader(arguments.dropout)
    if arguments.embeddings:
        table = torch.from_numpy(np.load(arguments.embeddings)).float()
        model.embed_tokens.weight.data.copy_(table / table.std() * 0.02)
    if arguments.start_from:
        weights = load_file(arguments.start_from)
        model.load_state_dict({n.removeprefix("model."): w.float() for n, w in weights.items()})
    return model.cuda()


def train(arguments: argparse.Namespace) -> None:
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json"))
    corpus = load_corpus(Path(__file__).parent, arguments.data, arguments.swap)
    builder = Builder(corpus, tokenizer, arguments.length)
    sets = {
        name: [collate(part) for part in parts]
        for name, parts in evaluation_sets(builder, arguments.data).items()
    }
    loader = DataLoader(
        Stream(builder, arguments.seed), arguments.batch, collate_fn=collate,
        num_workers=arguments.workers, pin_memory=True, prefetch_factor=4,
    )  # fmt: skip
    model = initial_model(arguments)
    forward = torch.compile(model)
    steppers = optimizers(model, arguments)
    log = (arguments.out / "log.jsonl").open("a")
    run(model, forward, steppers, loader, sets, arguments, log)
    save(model, arguments.out)


def run(model, forward, steppers, loader, sets, arguments, log) -> None:  # noqa: ANN001
    start, evaluated, step, tokens = None, 0.0, 0, 0
    for cpu in loader:
        batch = to_device(cpu)
        if step == 3:  # the compiler has run
            start = time.time()
        progress = (time.time() - start) / (60 * arguments.minutes) if start else 0.0
        if progress >= 1:
            break
        for stepper in steppers:
            for group in stepper.param_groups:
                group["lr"] = arguments.lr * max(schedule(progress), 1e-4)
        rooted = torch.rand(len(batch["tokens"]), device="cuda") < 0.5
        with torch.autocast("cuda", torch.bfloat16):
            hidden = forward(batch["tokens"], batch["positions"], block_mask(batch["blocks"], rooted))
            loss = losses(model, hidden, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + batch["tokens"].numel()
        if start and (progress - evaluated > arguments.evaluate_every):
            evaluated = progress
            report(model, forward, sets, log, step, tokens, time.time() - start, loss.item())
            save(model, arguments.out)
    report(model, forward, sets, log, step, tokens, time.time() - start, loss.item())


def report(model, forward, sets, log, step, tokens, seconds, loss) -> None:  # noqa: ANN001
    row = {"step": step, "tokens_M": tokens // 10**6, "s": round(seconds), "loss": round(loss, 3)}
    for name, batches in sets.items():
        for mode, rooted in (("exact", False), ("rooted", True)):
            row[f"{name}_{mode}"] = round(exact_match(model, forward, batches, rooted), 3)
    print(json.dumps(row), flush=True)
    log.write(json.dumps(row) + "\n")
    log.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--embeddings", type=Path, help="initial token embeddings (.npy)")
    parser.add_argument("--start-from", type=Path, help="a model.safetensors to go on from")
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--swap", type=float, default=0.3, help="share of fillings swapped")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=1792)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--evaluate-every", type=float, default=0.1)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
