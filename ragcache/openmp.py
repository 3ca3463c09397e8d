"""OpenMP worker threads: how many, how long they spin, and their release by threads that compute
beside the engine.

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
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_CGROUP = Path("/sys/fs/cgroup")
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
    instead of several, unless the environment sets it.

    libgomp reads the setting when torch is imported; `import ragcache` therefore calls this. It has
    no effect in a program that imports torch first.

    Spinning workers keep other processes, and the workers that everyone waits for, from a core:
    beside two busy processes on two cores, four questions took 17 s with libgomp's default, 2.3 to
    3.9 s at 10,000 turns, 0.9 to 1.8 s at 2,000, and 1.0 to 1.6 s in one thread.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "2000"


def fit_threads(processes: int = 1) -> None:
    """Lower torch's number of threads to the cores that this process may use, or to its share of
    them beside other processes that compute the same steps.

    torch counts the machine's cores. In a container with a quota, the threads beyond it would be
    halted for most of each period, and all others wait for them. `OMP_NUM_THREADS` overrides it.
    """
    import torch

    cores = share_of_cores(processes)
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > cores:
        torch.set_num_threads(cores)


def share_of_cores(processes: int) -> int:
    """Cores for each of some processes that compute the same steps. At least 1."""
    return max(1, available_cores() // processes)


def available_cores() -> int:
    """Cores that this process may use: of its affinity and of its control group's quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    try:
        if (version_2 := _CGROUP / "cpu.max").exists():
            quota, period = version_2.read_text().split()
        else:
            quota, period = (
                (_CGROUP / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
            )
        limit = int(quota) // int(period)
    except (OSError, ValueError):  # no control groups, or no limit: "max"
        return cores
    return max(1, min(cores, limit)) if int(quota) > 0 else cores  # version 1: -1 is no limit


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
