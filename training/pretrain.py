"""Pretrains the reader on packed natural text, on one GPU.

    python3 training/pretrain.py --packs training/build/packs/pack-0 --minutes 8 \\
        --tokenizer training/build/tokenizer --out training/build/pretrained

Writes checkpoint.pt (to go on from with `--resume`) and log.jsonl, the former every `--save-every`
minutes and whatever ends the run. The learning rate warms up, stays, and falls to a tenth over the last
fifth of the time (`--no-decay`: another run will go on).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from model import Reader, Shape
from optimization import Clock, Run, make_optimizers, save_checkpoint, set_rate
from pack import read_pack


class Windows:
    """Windows of a long row of tokens in random order; each epoch cuts them at other places."""

    def __init__(self, tokens: Tensor, length: int, batch: int, seed: int) -> None:
        """tokens: int32 [n], on the device that the batches are wanted on."""
        self.tokens, self.length, self.batch = tokens, length, batch
        self.generator = torch.Generator().manual_seed(seed)
        self.epoch = 0.0

    def __iter__(self) -> Iterator[Tensor]:
        """Endless [batch, length + 1]."""
        span = torch.arange(self.length + 1, device=self.tokens.device)
        while True:
            offset = int(torch.randint(self.length, (1,), generator=self.generator))
            count = (len(self.tokens) - offset - 1) // self.length
            order = torch.randperm(count, generator=self.generator).to(self.tokens.device)
            begun = int(self.epoch)
            for start in range(0, count - self.batch + 1, self.batch):
                starts = offset + order[start : start + self.batch] * self.length
                self.epoch = begun + start / count
                yield self.tokens[starts[:, None] + span].long()
            self.epoch = begun + 1.0


def next_token_loss(model: Reader, batch: Tensor) -> Tensor:
    tokens, targets = batch[:, :-1], batch[:, 1:]
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    logits = F.linear(model(tokens, positions), model.embed_tokens.weight)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def rate_at(progress: float, decay: bool) -> float:
    """The share of the learning rate: warm-up over 1 %, then flat, then down over the last 20 %."""
    if progress < 0.01:
        return max(progress / 0.01, 1e-3)
    return 1.0 - 0.9 * (progress - 0.8) / 0.2 if decay and progress > 0.8 else 1.0


def load_tokens(arguments: argparse.Namespace, device: torch.device) -> tuple[Tensor, Tensor]:
    """The tokens to train on (int32), and a batch of windows held out [batch, length + 1]."""
    file = arguments.tokenizer / "tokenizer.json"
    shards = [f.result() for f in read_pack(arguments.packs, file, arguments.workers)]
    np.random.default_rng(0).shuffle(shards)
    tokens = torch.from_numpy(np.concatenate(shards).astype(np.int32))
    size = arguments.length + 1
    starts = torch.arange(arguments.batch) * (len(tokens) // arguments.batch)
    held_out = tokens[starts[:, None] + torch.arange(size)].long()
    kept = torch.ones(len(tokens), dtype=torch.bool)
    kept[(starts[:, None] + torch.arange(size)).flatten()] = False
    return tokens[kept][: arguments.tokens].to(device), held_out.to(device)


def pretrain(arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Returns the rows of the log."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(arguments.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    begun = time.time()
    tokens, held_out = load_tokens(arguments, device)
    shape = Shape(**json.loads(arguments.shape))
    model = Reader(shape).to(device)
    steppers = make_optimizers(model, arguments.lr, arguments.optimizer)
    if arguments.resume:
        saved = torch.load(arguments.resume, map_location=device)
        model.load_state_dict(saved["model"])
        for stepper, state in zip(steppers, saved.get("optimizers", ()), strict=False):
            stepper.load_state_dict(state)
    loss_of = torch.compile(next_token_loss) if device.type == "cuda" else next_token_loss
    windows = Windows(tokens, arguments.length, arguments.batch, arguments.seed)
    print(json.dumps({"tokens": len(tokens), "loading_s": round(time.time() - begun)}), flush=True)
    clock, rows, reported = Clock(arguments.minutes, arguments.steps), [], 0.0
    log = (arguments.out / "log.jsonl").open("w")
    with log, Run(clock, lambda: save(model, steppers, arguments.out), 60 * arguments.save_every) as run:
        for batch in windows:
            set_rate(steppers, arguments.lr * rate_at(clock.progress, not arguments.no_decay))
            with torch.autocast(device.type, torch.bfloat16):
                loss = loss_of(model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for stepper in steppers:
                stepper.step()
                stepper.zero_grad(set_to_none=True)
            run.tick()
            if clock.step == 1 or clock.progress >= min(1.0, reported + arguments.report_every):
                reported = clock.progress
                with torch.autocast(device.type, torch.bfloat16):
                    held = loss_of(model, held_out).item()  # the compiled step: no other graph
                rows.append({"step": clock.step, "tokens": clock.step * batch[:, 1:].numel(),
                             "s": round(clock.seconds), "epoch": round(windows.epoch, 2),
                             "loss": round(loss.item(), 4), "held_out": round(held, 4)})  # fmt: skip
                print(json.dumps(rows[-1]), file=log, flush=True)
                print(json.dumps(rows[-1]), flush=True)
            if run.over:
                break
    return rows


def save(model: Reader, steppers: list[torch.optim.Optimizer], folder: Path) -> None:
    states = [stepper.state_dict() for stepper in steppers]
    save_checkpoint(model, folder / "checkpoint.pt", optimizers=states)


def arguments_of(command: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--packs", type=Path, nargs="+", required=True, help="folders of pack.py")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, help="read so many at most (what more text brings)")
    parser.add_argument("--resume", type=Path, help="a checkpoint.pt to go on from")
    parser.add_argument("--shape", default="{}", help="JSON: fields of model.Shape")
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--steps", type=int, default=0, help="stop after so many, whatever the time")
    parser.add_argument("--no-decay", action="store_true", help="keep the learning rate to the end")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="muon")
    parser.add_argument("--batch", type=int, default=96, help="windows")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report-every", type=float, default=0.1, help="share of the run")
    parser.add_argument("--save-every", type=float, default=1.0, help="minutes")
    return parser.parse_args(command)


if __name__ == "__main__":
    pretrain(arguments_of())
