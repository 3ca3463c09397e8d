"""OpenMP worker threads: released by threads that compute beside the engine.

Every thread that has computed keeps a team of workers. With more workers than cores, libgomp does
not let them spin between two parallel regions, and each of the hundreds of regions of a step pays
for a wake-up: on two cores 0.37 s instead of 0.25 s to a first token, and about 320 instead of 460
tokens a second of 32 streams. A thread that submits its work to the engine, or has copied states,
therefore releases its team; it gets a new one when it computes again (about 0.1 ms).
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_HARD = 2  # omp_pause_hard: the calling thread's team ends (OpenMP 5.0, §3.2.44)


def give_workers_back() -> None:
    """Ends the calling thread's team of workers, if OpenMP is libgomp."""
    pause = _pause()
    if pause is not None:
        pause(_HARD)


def keeps_no_workers(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function that computes: the calling thread's workers end after each call."""

    @wraps(function)
    def computing(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        finally:
            give_workers_back()

    return computing


def spin_briefly() -> None:
    """Lets libgomp's workers spin between two parallel regions for a fraction of a millisecond
    instead of several, unless the environment sets it. Programs call it before importing torch.

    On free cores the engine is as fast (32 streams of the reader on two: 800 to 910 tokens a second
    against 820 to 890). Beside two busy processes, which spinning workers would slow down, it is
    faster (230 to 270 against 150 to 170).
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "10000"


@cache
def _pause() -> Callable[[int], int] | None:
    """None without libgomp: LLVM's runtime would pause the teams of all threads."""
    if not sys.platform.startswith("linux"):
        return None
    symbols = ctypes.CDLL(None)
    if hasattr(symbols, "kmp_set_blocktime") or not hasattr(symbols, "omp_pause_resource_all"):
        return None
    pause = symbols.omp_pause_resource_all
    pause.argtypes, pause.restype = [ctypes.c_int], ctypes.c_int
    function: Callable[[int], int] = pause
    return function
