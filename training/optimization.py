"""The optimizers, the clock and the saving that pretraining and finetuning share."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model import Reader

_BEGUN = time.monotonic()  # of the process, near enough


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
    others = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n]
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
    of the whole process, what it loads and compiles among them; progress starts at the third step.

    Time is looked at once a step: within one, all who ask hear the same. (Two looks at the end of a
    run disagreed: the first said that it was not over, the second that it was.)
    """

    def __init__(
        self, minutes: float, steps: int, now: Callable[[], float] = time.monotonic, begun: float = _BEGUN
    ) -> None:
        """now: seconds; begun: when the process began, by `now`."""
        self.step, self.seconds, self.progress = 0, 0.0, 0.0
        self._steps, self._end, self._now = steps, begun + 60 * minutes, now
        self._started = 0.0

    def tick(self) -> None:
        """A step has been made."""
        self.step += 1
        now = self._now()
        if self.step == 3:
            self._started = now
        if self.step >= 3:
            self.seconds = now - self._started
        if self._steps > 0:
            self.progress = self.step / self._steps
        elif self.step >= 3:
            self.progress = 1.0 if now >= self._end else self.seconds / (self._end - self._started)


class Run:
    """A training run, which keeps its model whatever ends it.

        with Run(clock, save, every=60) as run:
            for batch in batches:
                ...
                run.tick()
                if run.over:
                    break

    The model is saved every so many seconds, at the end, after an exception, and after SIGTERM (which
    `timeout` sends) or SIGINT, for which the step in progress is still made. After a signal the
    process ends with 128 + its number.
    """

    def __init__(self, clock: Clock, save: Callable[[], None], every: float) -> None:
        """every: seconds between two saves."""
        self.clock, self._save, self._every = clock, save, every
        self._saved_step, self._saved_at = 0, 0.0
        self.signal = 0  # that asked to end; there may be little time left
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Run:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._handlers[number] = signal.signal(number, self._note_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._save_step()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        if self.signal and kind is None:
            print(f"signal {self.signal}: saved after step {self.clock.step}", flush=True)
            raise SystemExit(128 + self.signal)

    def _note_signal(self, number: int, frame: object) -> None:
        self.signal = number

    @property
    def over(self) -> bool:
        return self.clock.progress >= 1 or self.signal != 0

    def tick(self) -> bool:
        """A step has been made. Returns whether the model has been saved, as it is at the end."""
        self.clock.tick()
        due = self.over or self.clock.seconds >= self._saved_at + self._every
        if due:
            self._save_step()
        return due

    def _save_step(self) -> None:
        """Saves the model, unless it was saved after this very step."""
        if self.clock.step > self._saved_step:
            self._save()
            self._saved_step, self._saved_at = self.clock.step, self.clock.seconds


def save_checkpoint(model: Reader, file: Path, **more: Any) -> None:
    """The file is whole at any moment, and weights that are not finite never replace others."""
    if not all(weight.isfinite().all() for weight in model.parameters()):
        raise FloatingPointError(f"weights are not finite: {file} stays as it was; lower --lr")
    part = file.with_suffix(".part")
    torch.save({"shape": vars(model.shape), "model": model.state_dict(), **more}, part)
    part.replace(file)
