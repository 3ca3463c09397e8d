"""Microseconds of sums and gathers over several GPUs, by size and way.

    python benchmarks/parallel_sums.py --ranks 2 --json sums.json
    python benchmarks/parallel_sums.py --ranks 2 --sweep --json sweep.json

`--sweep` compares launches of pushed sums. Each rank is a process of its own.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ragcache.machine import new_event, new_stream

if TYPE_CHECKING:
    from ragcache.models.parallel.one_shot import OneShot, Way

SECONDS = 300  # after which a rank ends, with its stacks
PUSH_BLOCKS = [
    (block, warps)
    for block in (256, 512, 1024, 2048, 4096)
    for warps in (1, 2, 4, 8)
    if 4 <= block // (32 * warps) <= 16
]
"""Elements and warps of a program, with 4 to 16 elements a thread."""
PUSH_PROGRAMS = (32, 64, 128, 256, 512)


def run_ranks(ranks: int) -> int:
    """Run this command in a process for each rank. Returns the first status that is not 0, or 0."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *sys.argv, "--folder", folder, "--rank"]
        processes = [subprocess.Popen([*command, str(rank)]) for rank in range(ranks)]
        statuses = [each.wait() for each in processes]
    return next(filter(None, statuses), 0)


def measure(options: argparse.Namespace) -> None:
    """Measure as one rank, and write what the first one saw."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    from torch import distributed

    from ragcache.models.parallel.device_collectives import DeviceCollectives

    device = torch.device("cuda", options.rank)
    folder = Path(options.folder)
    limits = {"sum_bytes": 2**26, "push_bytes": 2**23}
    both = DeviceCollectives(folder, options.rank, options.ranks, device, **limits)
    both.connect()
    print(f"rank {options.rank}: sums by {both.sums_by}", flush=True)
    found: dict[str, dict[str, float]] = {}

    def attempt(key: str, name: str, run: Callable[[], object], calls: int = 32) -> None:
        stream = new_stream()
        with torch.cuda.stream(stream):
            for _ in range(4):
                run()
            stream.synchronize()
            graph, times = torch.cuda.CUDAGraph(), list[float]()
            graph.capture_begin(capture_error_mode="thread_local")
            for _ in range(calls):
                run()
            graph.capture_end()
            for number in range(23):
                begin, end = (new_event(timing=True) for _ in range(2))
                distributed.barrier()  # on the device, too: ranks begin at once
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                if number >= 3:
                    times.append(1e3 * begin.elapsed_time(end) / calls)
            graph.reset()
        found.setdefault(key, {})[name] = round(statistics.median(times), 2)

    if options.sweep:
        sweep_pushes(both._shared, attempt)
        save(options, found)
        if options.rank == 0:
            for key, times in found.items():
                print(f"{key}: {dict(sorted(times.items(), key=itemgetter(1)))}", flush=True)
        torch.cuda.synchronize()
        os._exit(0)
    for width in (4096, 8192):
        for rows in (1, 16, 64, 256, 512, 1024, 2048, 4096):
            part = torch.randn(rows, width, dtype=torch.bfloat16, device=device)
            key, calls = f"{rows} x {width}", 32 if rows <= 512 else 8
            shared = both._shared
            if shared is not None and part.nbytes <= limits["sum_bytes"]:
                if shared.way(part.nbytes) == "push":
                    attempt(key, "push", partial(shared.sum_parts, part, way="push"), calls)
                ways: tuple[Way, ...] = ("one-shot", "two-shot")
                for way in ways:
                    call = partial(shared.sum_parts, part, way=way)
                    attempt(key, way, call, calls)
                    attempt(key, f"{way}, in place", partial(call, copy=False), calls)
            if options.nccl:
                attempt(key, "nccl", partial(distributed.all_reduce, part), calls)
            if options.rank == 0:
                print(f"{key}: {found.get(key)}", flush=True)
    for rows in (1, 32, 64, 256):
        part = torch.randn(rows, 128256 // options.ranks, dtype=torch.bfloat16, device=device)

        def gather() -> None:
            both.gather_columns(part, 128256)  # noqa: B023
            both.sum_parts(part[:1, :4096])  # noqa: B023

        attempt(f"logits {rows}", "gather and a small sum", gather, 8)
        if options.rank == 0:
            print(f"logits {rows}: {found[f'logits {rows}']}", flush=True)
    save(options, found)
    torch.cuda.synchronize()
    os._exit(0)


def sweep_pushes(
    shared: OneShot, attempt: Callable[[str, str, Callable[[], object]], None]
) -> None:
    """Times of pushed sums by their launch, each of which is seen to be right first."""
    from ragcache.models.parallel.one_shot import PushLaunch

    for rows in (1, 16, 64, 256):
        generator = torch.Generator("cuda").manual_seed(rows)
        parts = [
            torch.randn(rows, 4096, device="cuda", generator=generator).bfloat16()
            for _ in range(shared.ranks)
        ]
        part, total = parts[shared.rank], torch.zeros(rows, 4096, device="cuda")
        for each in parts:
            total += each.float()
        for block, warps in PUSH_BLOCKS:
            blocks, before = -(-part.numel() // block), 0
            for programs in PUSH_PROGRAMS:
                if before >= blocks:  # the same launch
                    continue
                before = programs
                shared.push_launch = PushLaunch(block, warps, programs)
                for _ in range(4):
                    found = shared.sum_parts(part, way="push")
                    assert torch.equal(found, total.bfloat16()), shared.push_launch
                name = f"{block} elements, {warps} warps, {min(programs, blocks)} programs"
                attempt(f"{rows} x 4096", name, partial(shared.sum_parts, part, way="push"))


def save(options: argparse.Namespace, found: dict[str, dict[str, float]]) -> None:
    """Write the figures of the first rank."""
    if options.json and options.rank == 0:
        machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        Path(options.json).write_text(json.dumps(machine | found, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sweep", action="store_true", help="launches of pushed sums")
    parser.add_argument("--nccl", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is None:
        sys.exit(run_ranks(options.ranks))
    measure(options)


if __name__ == "__main__":
    main()
