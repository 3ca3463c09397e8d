"""The optimizers that pretraining and finetuning share."""

from __future__ import annotations

import time

import torch

from model import Reader


def make_optimizers(model: Reader, lr: float, kind: str) -> list[torch.optim.Optimizer]:
    """`muon`: Muon for the matrices and AdamW for the rest; `adamw`: AdamW for all."""
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() < 2 or "embed" in n]
    fused = others[0].is_cuda
    if kind == "muon":
        muon = torch.optim.Muon(
            matrices, lr=lr, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        )
        adam = torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
        return [muon, adam]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=fused)]


def set_rate(optimizers: list[torch.optim.Optimizer], lr: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr


class Clock:
    """How far a run is: by its steps, if their number is set, else by its time, which starts when
    the compiler has run."""

    def __init__(self, minutes: float, steps: int) -> None:
        self.minutes, self.steps, self.step = minutes, steps, 0
        self._started: float | None = None

    def tick(self) -> None:
        self.step += 1
        if self.step == 3:
            self._started = time.time()

    @property
    def seconds(self) -> float:
        return time.time() - self._started if self._started else 0.0

    @property
    def progress(self) -> float:
        return self.step / self.steps if self.steps > 0 else self.seconds / (60 * self.minutes)
