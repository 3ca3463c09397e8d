"""The optimizers and the clock that pretraining and finetuning share."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from model import Reader

_BEGUN = time.time()  # of the process, near enough


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al., 2024) with Nesterov momentum and updates of AdamW's size. All matrices of a
    shape are orthogonalized at once: of a small model each alone is too little work for a GPU."""

    def __init__(
        self, matrices: list[Tensor], lr: float, weight_decay: float = 0.05, momentum: float = 0.95
    ) -> None:
        alike: dict[torch.Size, list[Tensor]] = {}
        for matrix in matrices:
            alike.setdefault(matrix.shape, []).append(matrix)
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__([{"params": group} for group in alike.values()], defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        assert closure is None
        for group in self.param_groups:
            matrices, momentum = group["params"], group["momentum"]
            gradients = torch.stack([m.grad for m in matrices])  # [n, rows, columns]
            state = self.state[matrices[0]]
            if not state:
                state["average"] = torch.zeros_like(gradients)
            average = state["average"].lerp_(gradients, 1 - momentum)
            updates = orthogonalized(gradients.lerp_(average, momentum)).to(gradients.dtype)
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
            scale = 0.2 * max(matrices[0].shape) ** 0.5
            torch._foreach_add_(matrices, list(updates.unbind()), alpha=-group["lr"] * scale)


def orthogonalized(matrices: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices, about: five Newton-Schulz steps. [n, rows, columns]."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if tall else matrices).bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


def make_optimizers(model: Reader, lr: float, kind: str) -> list[torch.optim.Optimizer]:
    """`muon`: Muon for the matrices and AdamW for the rest; `adamw`: AdamW for all."""
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() < 2 or "embed" in n]
    fused = others[0].is_cuda
    if kind == "muon":
        adam = torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
        return [Muon(matrices, lr), adam]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=fused)]


def set_rate(optimizers: list[torch.optim.Optimizer], lr: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr


class Clock:
    """How far a run is: by its steps, if their number is set, else by its time. The minutes are those
    of the whole process, what it loads and compiles among them; progress starts at the third step."""

    def __init__(self, minutes: float, steps: int) -> None:
        self.steps, self.step, self._end = steps, 0, _BEGUN + 60 * minutes
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
        if self.steps > 0:
            return self.step / self.steps
        return self.seconds / max(self.seconds, self._end - (self._started or self._end), 1e-9)
