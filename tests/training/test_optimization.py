"""The optimizer, the clock, and runs that keep their model whatever ends them."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model import Reader, Shape
from optimization import Clock, Muon, Run, save_checkpoint


def ticking(step: float = 1.0, start: float = 0.0) -> Callable[[], float]:
    """A time that has gone on at every look."""
    return itertools.count(start, step).__next__


def test_muon_in_stacks_is_torchs_matrix_by_matrix() -> None:
    torch.manual_seed(0)
    ours = [torch.randn(s, requires_grad=True) for s in ((24, 12), (24, 12), (12, 36))]
    theirs = [m.detach().clone().requires_grad_() for m in ours]
    before = [m.detach().clone() for m in ours]
    steppers = [
        Muon(ours, 1e-2),
        torch.optim.Muon(theirs, lr=1e-2, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
    ]
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for stepper in steppers:
            stepper.step()
    for a, b, start in zip(ours, theirs, before, strict=True):
        assert (a - b).norm() < 0.05 * (a - start).norm()  # both orthogonalize in bfloat16


def test_minutes_count_the_loading() -> None:
    times = iter([950.0, 960.0, 1000.0, 1060.0, 1090.0])
    clock = Clock(minutes=3, steps=0, now=lambda: next(times), begun=900.0)  # until 1080
    progress = []
    for _ in range(5):
        clock.tick()
        progress.append(clock.progress)
    assert progress == pytest.approx([0, 0, 0, 60 / 80, 1])


@pytest.mark.parametrize("minutes", [0.0, 1.0])
def test_a_run_that_loaded_too_long_ends_at_the_third_step(minutes: float) -> None:
    clock = Clock(minutes, steps=0, now=ticking(start=100), begun=0.0)
    steps = 0
    while clock.progress < 1:
        clock.tick()
        steps += 1
    assert steps == 3


def test_models_are_saved_at_intervals_and_once_at_the_end() -> None:
    clock, saved = Clock(1.0, steps=0, now=ticking(), begun=0.0), []
    with Run(clock, lambda: saved.append(clock.step), every=10) as run:
        while not run.over:
            assert run.tick() == (saved[-1:] == [clock.step])
    assert saved == [13, 23, 33, 43, 53, 61]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_a_run_after_its_step_with_the_model_saved(number: int) -> None:
    clock, saved = Clock(900.0, steps=0), []
    before = signal.getsignal(number)
    with (
        pytest.raises(SystemExit) as ended,
        Run(clock, lambda: saved.append(clock.step), 60) as run,
    ):
        while not run.over:
            if clock.step == 4:
                os.kill(os.getpid(), number)
            run.tick()
    assert ended.value.code == 128 + number
    assert saved == [5]
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(("steps", "expected"), [(2, [2]), (0, [])])
def test_a_model_is_saved_after_an_error_if_it_made_a_step(steps: int, expected: list[int]) -> None:
    clock, saved = Clock(900.0, steps=0), []
    with pytest.raises(MemoryError), Run(clock, lambda: saved.append(clock.step), 60) as run:
        for _ in range(steps):
            run.tick()
        raise MemoryError
    assert saved == expected


def test_weights_that_are_not_finite_replace_no_checkpoint(tmp_path: Path) -> None:
    model: Any = Reader(Shape(64, 16, 32, 1, 2, 1, 8))
    file = tmp_path / "checkpoint.pt"
    save_checkpoint(model, file)
    kept = file.read_bytes()
    model.norm.weight.data[3] = float("nan")
    with pytest.raises(FloatingPointError, match="lower --lr"):
        save_checkpoint(model, file)
    assert file.read_bytes() == kept
    assert [f.name for f in tmp_path.iterdir()] == ["checkpoint.pt"]
