"""Properties of the machine and the process: fast dtypes, timed once per process, free memory,
freed memory that stays with the process, objects that are not collected, and what is closed at its
exit.

Flags do not tell: torch offers bfloat16 on every processor, but without AVX-512 or AMX a linear
layer takes 4 to 6 times as long in it as in float32, and a product of two plain matrices up to 500
times. So the operations themselves are timed. The shortest of several runs in one thread counts,
which hardly depends on other processes.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache, partial
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar
from weakref import WeakValueDictionary

import torch

from ragcache.openmp import keeps_no_workers

T = TypeVar("T")

ROWS = 32  # about a question
SIDE = 2048  # weights of a larger layer are timed in part: the ratio of two dtypes stays
_FEWEST_RUNS, _MOST_RUNS = 4, 32
_PATIENCE = 0.02  # seconds for more runs than the fewest
_CGROUP = Path("/sys/fs/cgroup")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of mallopt(3)
_LARGEST_KEPT = 32 * 2**20  # bytes; the most that glibc takes
RELEASE_SECONDS = 15.0
"""Seconds between two returns of freed memory to the system."""
_openings = count()

logger = logging.getLogger(__name__)


@cache
@keeps_no_workers
def linear_seconds(out_features: int, in_features: int, dtype: torch.dtype) -> float:
    """Seconds of a linear layer over `ROWS` rows on the CPU; sizes beyond `SIDE` count as it."""
    weight = torch.ones(min(out_features, SIDE), min(in_features, SIDE), dtype=dtype)
    rows = torch.ones(ROWS, weight.shape[1], dtype=dtype)
    return _shortest(lambda: torch.nn.functional.linear(rows, weight))


@cache
@keeps_no_workers
def product_seconds(dtype: torch.dtype) -> float:
    """Seconds of a batch of plain products `a @ b` on the CPU, as attention has them."""
    scores, values = torch.ones(2, 64, 128, dtype=dtype), torch.ones(2, 128, 64, dtype=dtype)
    return _shortest(lambda: torch.bmm(scores, values))


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the CPU's attention multiplies states of `dtype`: bfloat16 only where
    products in it are quick, and never float16, whose exponent is too short for sums of
    exponentials."""
    if dtype == torch.float16:
        return torch.float32
    if dtype != torch.bfloat16:
        return dtype
    slow = product_seconds(torch.bfloat16) > 2 * product_seconds(torch.float32)
    return torch.float32 if slow else dtype


@keeps_no_workers
def quicker_rows(
    first: Callable[[torch.Tensor], object],
    second: Callable[[torch.Tensor], object],
    width: int,
    dtype: torch.dtype,
    counts: Sequence[int],
) -> int:
    """The largest of some numbers of rows up to which `first` is quicker than `second` on the CPU;
    0 if it never is. Both take rows [R, width] of `dtype`."""
    quicker = 0
    for size in counts:
        rows = torch.ones(size, width, dtype=dtype)
        if _shortest(partial(first, rows)) >= _shortest(partial(second, rows)):
            break
        quicker = size
    return quicker


def share_arena() -> bool:
    """Let all threads share malloc's main arena.

    Returns whether it does: not with another libc, and not where the environment sets the number of
    arenas. Threads that have begun keep their arenas, and later threads share all of these.
    Therefore a process calls this before it begins threads.

    Of other arenas `release_freed_memory` returns free memory between blocks in use alone. Memory
    at the end of an arena, up to 64 MiB, stays once it was used.
    """
    mallopt = _mallopt()
    if mallopt is None or "MALLOC_ARENA_MAX" in os.environ:
        return False
    return bool(mallopt(_M_ARENA_MAX, 1))


def keep_freed_memory() -> bool:
    """Let glibc's malloc keep freed blocks of up to 32 MiB, and 64 MiB at the end of a heap.

    Returns whether it does: not with another libc, and not where the environment sets these limits.

    These are the limits that malloc itself ends at once a block of 32 MiB was freed. Until then the
    larger results of a step are returned to the system and their pages are mapped anew, one by one,
    in the next: a fifth of the time of a prompt of 1,300 tokens.

    Threads that begin later share arenas (`share_arena`). Otherwise each thread that has written or
    read states keeps up to 64 MiB of an arena of its own, with eight arenas a core. A process that
    already has more than eight arenas keeps that limit; only the variable helps there.
    """
    share_arena()
    mallopt = _mallopt()
    if mallopt is None or {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys():
        return False
    return bool(
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT) and mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST_KEPT)
    )


def _mallopt() -> Callable[[int, int], int] | None:
    """None with another libc, and where the environment has tunables of malloc."""
    if sys.platform != "linux" or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return None
    return getattr(ctypes.CDLL(None), "mallopt", None)


def release_freed_memory() -> bool:
    """Return freed pages of malloc to the system, also those between blocks in use.

    Returns whether malloc can do that; only glibc's can. Takes about 0.2 ms for each MiB returned.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is None:
        return False
    trim(ctypes.c_size_t(0))
    return True


@cache
def release_freed_memory_regularly() -> None:
    """Call `release_freed_memory` in a background thread, each `RELEASE_SECONDS`.

    For processes that serve for days. Blocks of states have many sizes and lives. After an hour
    four tenths of the heap of a service were holes between them, and malloc itself returns only
    what is free at the end of a heap.
    """

    def release() -> None:
        while release_freed_memory():
            time.sleep(RELEASE_SECONDS)

    threading.Thread(target=release, name="ragcache-release", daemon=True).start()


def describe_machine() -> dict[str, object]:
    """Hardware, versions and date, as they stand beside a figure."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def processor_name() -> str:
    """Name of the processor's model, as the system reports it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


YOUNG_OBJECTS: Final = 10_000
"""New objects between two collections while a GPU computes. A step of 256 answers makes 768 that
live as long as the answers. At Python's 700, every step looked through them."""
_YOUNG_COLLECTIONS: Final = 1 if sys.version_info < (3, 14) else 10
"""Collections of new objects before those that are left are collected again. At Python's 10, these
were 100,000 objects, whose collection halts all answers for milliseconds. Python 3.14 collects in
parts, which a smaller number would make larger."""
_MIDDLE_COLLECTIONS: Final = 30
"""Such collections before a full one, which Python makes after a million new objects then, too."""

_WAITING_OBJECTS: Final = 1_000
"""New objects that a thread collects while it waits for a GPU, in half a millisecond."""
_FULL_COLLECTIONS: Final = 600
"""Collections between two full ones, if threads that wait for a GPU make them."""

_heap_lock = threading.Lock()
_frozen_heaps: list[int | None] = []
_thresholds: tuple[int, int, int] | None = None  # before the blocks, if one has set others


@contextmanager
def frozen_heap(young_objects: int | None = None) -> Iterator[None]:
    """Exclude the objects that exist now from garbage collection within the block.

    The libraries have half a million objects, and each full collection of them would halt every
    stream for 0.26 to 0.41 s. New objects are collected as before. Blocks may overlap, in any
    threads: the last one to end includes all objects again.

    Args:
        young_objects: Number of new objects after which these are collected. Of overlapping blocks,
            the largest number counts. By default, the process's own threshold stays.
    """
    gc.collect()
    with _heap_lock:
        gc.freeze()
        _frozen_heaps.append(young_objects)
        _set_thresholds()
    try:
        yield
    finally:
        with _heap_lock:
            _frozen_heaps.remove(young_objects)
            _set_thresholds()
            if not _frozen_heaps:
                gc.unfreeze()


def _set_thresholds() -> None:
    """Set the collector's thresholds by the blocks that are open, or as they were before."""
    global _thresholds
    wanted = [each for each in _frozen_heaps if each is not None]
    if wanted:
        _thresholds = _thresholds or gc.get_threshold()
        gc.set_threshold(max(wanted), _YOUNG_COLLECTIONS, _MIDDLE_COLLECTIONS)
    elif _thresholds is not None:
        gc.set_threshold(*_thresholds)
        _thresholds = None


def collect_while_waiting() -> None:
    """Collect new objects, if there are enough, in a thread that has nothing to do for a while.

    While a GPU computes a step, nobody waits for the collection, which would halt a later step.
    """
    young, _, collections = gc.get_count()
    if young >= _WAITING_OBJECTS and gc.isenabled():
        gc.collect(2 if collections > _FULL_COLLECTIONS else 1)


@contextmanager
def garbage_collector_paused() -> Iterator[None]:
    """Pause the garbage collector.

    It takes a third of the time of reading 100,000 rows, which have no cycles.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def available_memory() -> int:
    """Bytes that this process can still take: of the machine, or of its control group."""
    return host_memory()["available_bytes"]


def host_memory() -> dict[str, int]:
    """`total_bytes` and `available_bytes` of the machine, or of the process's control group."""
    import psutil

    machine = psutil.virtual_memory()
    total, free = int(machine.total), int(machine.available)
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        cached = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no version 2 of control groups, its root, or no limit: "max"
        return {"total_bytes": total, "available_bytes": free}
    left = limit - used + int(cached.get("inactive_file", 0))
    return {"total_bytes": min(total, limit), "available_bytes": min(free, left)}


def process_memory() -> dict[str, int]:
    """`rss_bytes` of this process, and `mapped_bytes`, the part of it that maps files."""
    import psutil

    memory = psutil.Process().memory_info()
    return {"rss_bytes": memory.rss, "mapped_bytes": getattr(memory, "shared", 0)}


def device_memory(device: torch.device) -> dict[str, Any]:
    """`name`, `total_bytes` and `free_bytes` of a GPU, and `reserved_bytes` of this process."""
    free, total = torch.cuda.mem_get_info(device)
    return {
        "name": torch.cuda.get_device_name(device),
        "total_bytes": total,
        "free_bytes": free,
        "reserved_bytes": torch.cuda.memory_reserved(device),
    }


def new_stream(device: torch.device | str | None = None) -> torch.cuda.Stream:
    """Create a CUDA stream, by default on the current device."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # PyTorch does not type it


def new_event(*, timing: bool = False) -> torch.cuda.Event:
    """An event of the current device, not yet recorded. timing: whether it measures time."""
    return torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]  # PyTorch does not type it


def prefer_cublaslt() -> None:
    """Make PyTorch multiply with cuBLASLt, in the whole process.

    The environment variable TORCH_BLAS_PREFER_CUBLASLT takes precedence. On an H200 products of 16
    to 64 rows, of which questions and decoding consist, take up to 15 % less time than with cuBLAS,
    PyTorch's own choice; larger ones take the same.
    """
    if "TORCH_BLAS_PREFER_CUBLASLT" not in os.environ:
        torch.backends.cuda.preferred_blas_library("cublaslt")


def run_in_daemon(work: Callable[[], T], name: str) -> Future[T]:
    """Run work that may never end in a thread of its own, which the end of the process ends.

    Returns:
        The result of the work, or its error.
    """
    done = Future[T]()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


class Closable(Protocol):
    """An object whose threads compute until it is closed."""

    def close(self) -> None:
        """End the threads. A second call does nothing."""


_closed_at_exit: WeakValueDictionary[int, Closable] = WeakValueDictionary()


def close_at_exit(opened: Closable) -> None:
    """Close an object when the interpreter exits, the last opened one first, unless it is gone.

    PyTorch aborts a process whose threads are killed in its code (`terminate called without an
    active exception`), as daemon threads are after the exit functions. A forked process inherits
    the objects; their `close` has to leave the threads of the parent alone.
    """
    _closed_at_exit[next(_openings)] = opened


@atexit.register
def _close_all() -> None:
    for opened in [each for _, each in sorted(_closed_at_exit.items(), reverse=True)]:
        try:
            opened.close()
        except Exception:  # the others are closed, too
            logger.exception("%r could not be closed at exit", opened)


def _shortest(run: Callable[[], object]) -> float:
    """Seconds of the shortest of some runs in one thread, after one that does not count. Beside
    busy processes a team of threads waits for its slowest in every run."""
    threads, begin, times = torch.get_num_threads(), time.perf_counter(), list[float]()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            run()
            while len(times) < _FEWEST_RUNS or (
                len(times) < _MOST_RUNS and time.perf_counter() - begin < _PATIENCE
            ):
                before = time.perf_counter()
                run()
                times.append(time.perf_counter() - before)
    finally:
        torch.set_num_threads(threads)
    return min(times)
