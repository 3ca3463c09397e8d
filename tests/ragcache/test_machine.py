"""Timed products, how often they are timed, and the memory that a process may take."""

from __future__ import annotations

import gc
import json
import os
import platform
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from ragcache import machine
from ragcache.machine import (
    YOUNG_OBJECTS,
    available_memory,
    collect_while_waiting,
    frozen_heap,
    garbage_collector_paused,
    keep_freed_memory,
    linear_seconds,
    prefer_cublaslt,
    product_dtype,
)

MEBIBYTE = 2**20
FAULTS = """
import ctypes, json, resource, torch
from ragcache.machine import keep_freed_memory

for limit in (-1, -3):  # what malloc begins with, whatever this process has freed so far
    ctypes.CDLL(None).mallopt(limit, 128 * 2**10)

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        step = [torch.ones(4 * 2**20) for _ in range(3)]  # 16 MiB each
        del step
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
returned, kept = faults(), keep_freed_memory()
faults()
print(json.dumps([kept, returned, faults()]))
"""
THREADS = """
import json, threading, psutil
from ragcache.machine import keep_freed_memory

def resident():
    return psutil.Process().memory_info().rss // 2**20

def work():
    blocks = [bytearray(b"x") * 2**20 for _ in range(24)]
    del blocks
    done.release()
    ended.wait()

kept = keep_freed_memory()
done, ended, before = threading.Semaphore(0), threading.Event(), resident()
for _ in range(16):
    threading.Thread(target=work).start()
    done.acquire()
print(json.dumps([kept, resident() - before]))
ended.set()
"""
HOLES = """
import json, time, psutil
from ragcache import machine

def resident():
    return psutil.Process().memory_info().rss // 2**20

machine.RELEASE_SECONDS = 0.05
machine.keep_freed_memory()
blocks = [bytearray(b"x") * 2**20 for _ in range(200)]
kept, full = blocks[::2], resident()
del blocks
with_holes = resident()
machine.release_freed_memory_regularly()
until = time.monotonic() + 20
while resident() > with_holes - 50 and time.monotonic() < until:
    time.sleep(0.05)
print(json.dumps([full - with_holes, with_holes - resident()]))
"""
ENDS = """
import json, sys, threading, psutil
from ragcache import machine

def resident():
    return psutil.Process().memory_info().rss // 2**20

def work():
    begun.release()
    ready.wait()
    blocks = [bytearray(b"x") * 2**20 for _ in range(24)]
    del blocks
    done.release()
    ended.wait()

begun, ready = threading.Semaphore(0), threading.Event()
done, ended, before = threading.Semaphore(0), threading.Event(), resident()
if {shared}:
    machine.share_arena()
for _ in range(6):
    threading.Thread(target=work).start()
    begun.acquire()
machine.keep_freed_memory()
ready.set()
for _ in range(6):
    done.acquire()
machine.release_freed_memory()
print(json.dumps([resident() - before]))
ended.set()
"""
LIMITS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES")


def measure(script: str, **variables: str) -> list[float]:
    """Return the figures that a script prints in a new process without limits of malloc."""
    env = {name: value for name, value in os.environ.items() if name not in LIMITS} | variables
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    measured: list[float] = json.loads(run.stdout)
    return measured


def test_a_size_is_timed_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    monkeypatch.setattr(machine, "_shortest", lambda run: runs.append(run) or 0.5)
    linear_seconds.cache_clear()
    try:
        assert {linear_seconds(48, 32, torch.float32) for _ in range(3)} == {0.5}
        assert linear_seconds(48, 32, torch.bfloat16) == 0.5
        assert len(runs) == 2
        assert runs[1]().shape == (machine.ROWS, 48)
        linear_seconds(10**6, 16, torch.bfloat16)
        assert runs[2]().shape == (machine.ROWS, machine.SIDE), "no more than a part"
    finally:
        linear_seconds.cache_clear()


def test_times_are_those_of_this_machine() -> None:
    assert 0 < linear_seconds(64, 64, torch.float32) < 1
    assert product_dtype(torch.bfloat16) in (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("dtype", "slower", "expected"),
    [
        (torch.bfloat16, 30.0, torch.float32),
        (torch.bfloat16, 1.0, torch.bfloat16),
        (torch.bfloat16, 0.3, torch.bfloat16),
        (torch.float16, 0.3, torch.float32),
        (torch.float32, 30.0, torch.float32),
        (torch.float64, 30.0, torch.float64),
    ],
)
def test_products_avoid_a_slow_bfloat16_and_any_float16(
    dtype: torch.dtype, slower: float, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {torch.bfloat16: slower, torch.float32: 1.0}
    monkeypatch.setattr(machine, "product_seconds", seconds.__getitem__)
    assert product_dtype(dtype) == expected


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the limits are glibc's malloc's")
@pytest.mark.slow
def test_memory_that_a_step_frees_is_there_for_the_next() -> None:
    kept, returned_faults, kept_faults = measure(FAULTS)
    assert kept
    assert 4 * kept_faults < returned_faults


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the limits are glibc's malloc's")
@pytest.mark.slow
def test_memory_that_a_thread_frees_is_there_for_other_threads() -> None:
    """16 threads use 24 MiB each, one after another, and stay."""
    kept, grown = measure(THREADS)
    assert kept
    assert grown < 150
    kept, grown = measure(THREADS, MALLOC_ARENA_MAX="64")
    assert kept
    assert grown > 300, "the number of the environment stands"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc can do it")
@pytest.mark.slow
def test_memory_between_blocks_in_use_is_returned_regularly() -> None:
    """Every other one of 200 blocks of 1 MiB is freed."""
    by_malloc, by_us = measure(HOLES)
    assert by_malloc < 20, "malloc itself keeps the holes"
    assert by_us > 50


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the limits are glibc's malloc's")
@pytest.mark.slow
def test_memory_at_the_end_of_a_shared_arena_is_returned() -> None:
    """Six threads, which begin before the engine, free 24 MiB each."""
    [grown] = measure(ENDS.replace("{shared}", "False"))
    assert grown > 50, "ends of other arenas stay"
    [grown] = measure(ENDS.replace("{shared}", "True"))
    assert grown < 20


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_TRIM_THRESHOLD_", "1"), ("GLIBC_TUNABLES", "glibc.malloc.arena_max=1")],
)
def test_limits_of_the_environment_stand(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert not keep_freed_memory()


def test_the_limit_of_a_control_group_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    free = available_memory()
    assert free > 0
    (tmp_path / "memory.max").write_text(f"{10 * MEBIBYTE}\n")
    (tmp_path / "memory.current").write_text(f"{8 * MEBIBYTE}\n")
    (tmp_path / "memory.stat").write_text(f"anon 77\ninactive_file {3 * MEBIBYTE}\n")
    assert available_memory() == 5 * MEBIBYTE, "files that were read can be dropped"
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory() > 10 * MEBIBYTE


@pytest.mark.parametrize(("said", "expected"), [(None, ["cublaslt"]), ("0", []), ("1", [])])
def test_cublaslt_unless_the_environment_speaks(
    monkeypatch: pytest.MonkeyPatch, said: str | None, expected: list[str]
) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", chosen.append)
    monkeypatch.delenv("TORCH_BLAS_PREFER_CUBLASLT", raising=False)
    if said is not None:
        monkeypatch.setenv("TORCH_BLAS_PREFER_CUBLASLT", said)
    prefer_cublaslt()
    assert chosen == expected


def test_old_objects_are_collected_after_the_last_frozen_block() -> None:
    with frozen_heap():
        assert gc.get_freeze_count() > 10_000
        with frozen_heap():
            pass
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0
    gc.freeze()  # as it was: later tests' collections pass by it too


def test_the_rarest_collections_of_frozen_blocks_count() -> None:
    before = gc.get_threshold()
    with frozen_heap():
        assert gc.get_threshold() == before
        with frozen_heap(700):
            assert gc.get_threshold()[0] == 700
            with frozen_heap(YOUNG_OBJECTS):
                assert gc.get_threshold()[0] == YOUNG_OBJECTS
            assert gc.get_threshold()[0] == 700
    assert gc.get_threshold() == before
    gc.freeze()


class Node:
    """An object that refers to itself, so that only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_a_waiting_thread_collects_new_objects_if_there_are_many() -> None:
    with frozen_heap(YOUNG_OBJECTS):
        few = weakref.ref(Node())
        collect_while_waiting()
        assert few() is not None
        many = [weakref.ref(Node()) for _ in range(2000)]
        with garbage_collector_paused():
            collect_while_waiting()
            assert few() is not None
        collect_while_waiting()
        assert few() is None
        assert not any(each() for each in many)
    gc.freeze()


def test_a_waiting_thread_collects_old_objects_from_time_to_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generations = list[int]()
    monkeypatch.setattr(gc, "collect", generations.append)
    for collections in (0, 600, 601):
        counts = (5000, 0, collections)
        monkeypatch.setattr(gc, "get_count", lambda counts=counts: counts)
        collect_while_waiting()
    assert generations == [1, 1, 2]


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python 3.14 has no middle generation")
def test_no_collection_looks_through_many_live_objects() -> None:
    looked_through = list[int]()

    def count(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            young = range(info["generation"] + 1)
            looked_through.append(sum(len(gc.get_objects(each)) for each in young))

    with frozen_heap(1000):
        gc.callbacks.append(count)
        kept = [[number] for number in range(25_000)]
        gc.callbacks.remove(count)
    gc.freeze()
    assert len(kept) == 25_000
    assert len(looked_through) > 20
    assert max(looked_through) < 4000
