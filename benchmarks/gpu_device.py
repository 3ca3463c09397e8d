"""The device by itself: what its memory, bus and products reach, and attention alone."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from gpu_table import Ceilings, GpuWorkload
from torch import Tensor

from ragcache.bench.harness import LlamaShape
from ragcache.machine import new_event, new_stream

if TYPE_CHECKING:
    from ragcache.attention.triton.tables import AttentionTables

_MEMORY = 600e6  # bytes that one replay reads at least: ten times a cache of the second level
_MOST_LAYERS = 16
_BLOCK = 64


def measure_ceilings(device: str, nbytes: int = 2**32, side: int = 8192) -> Ceilings:
    """The best of two ways to read memory, a copy from pinned memory, and a square product. On a
    CPU everything is a thousandth of the size."""
    if device == "cpu":
        nbytes, side = nbytes >> 10, side >> 5
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    product = _seconds(lambda: a @ b, device)
    memory = torch.zeros(nbytes // 4, device=device)
    vector = torch.zeros(4096, device=device)
    by_product = _seconds(lambda: memory.view(-1, 4096) @ vector, device)
    read = min(_seconds(memory.sum, device), by_product)
    host = torch.zeros(nbytes // 16, pin_memory=device != "cpu")
    room = memory[: host.numel()]
    copied = _seconds(lambda: room.copy_(host, non_blocking=True), device)
    return Ceilings(nbytes / read / 1e9, host.nbytes / copied / 1e9, 2 * side**3 / product / 1e12)


def _seconds(run: Callable[[], object], device: str, runs: int = 10) -> float:
    """The median of a call's time, by the device's clock where there is one."""
    if device != "cpu":
        return device_microseconds(run, runs) / 1e6
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def bench_attention(shape: LlamaShape, load: GpuWorkload, device: str) -> dict[str, Any]:
    """Microseconds a layer, by rows and shared tokens: over one run of them (`us`), and over four
    runs in another order for every row (`orders_us`). Every row also reads its own block. The
    layers' states are distinct memory, so that no cache holds them."""
    if device == "cpu":
        return {"skipped": "the kernels need a CUDA device"}
    return {name: _figures(shape, rows, tokens, device) for name, rows, tokens in load.attention}


def _figures(shape: LlamaShape, rows: int, tokens: int, device: str) -> dict[str, float]:
    one = DecodeAttention(shape, rows, tokens, 1, device).microseconds()
    orders = DecodeAttention(shape, rows, tokens, 4, device).microseconds()
    found = {"us": one, "orders_us": orders, "orders_ratio": orders / one}
    if find_spec("flashinfer") is not None:
        found["flashinfer_us"] = _flashinfer(shape, rows, tokens, device)
    return found


def _flashinfer(shape: LlamaShape, rows: int, tokens: int, device: str) -> float:
    """The same over one run of tokens by FlashInfer's cascade, whose planning is not counted."""
    flashinfer: Any = import_module("flashinfer")
    heads, size, page = shape.num_kv_heads, shape.head_dim, 16
    shared, own = tokens // page, _BLOCK // page
    pages = shared + rows * own
    layers = _layers(shape, rows, tokens)
    caches = [
        torch.empty(pages, 2, page, heads, size, dtype=torch.bfloat16, device=device).normal_()
        for _ in range(layers)
    ]
    query = torch.randn(rows, shape.num_heads, size, dtype=torch.bfloat16, device=device)

    def numbers(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    workspace = torch.empty(2**28, dtype=torch.uint8, device=device)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace, "NHD")
    wrapper.plan(
        [numbers(0, rows), numbers(*range(rows + 1))],
        [numbers(0, shared), numbers(*range(0, rows * own + 1, own))],
        [numbers(*range(shared)), numbers(*range(shared, pages))],
        [numbers(page), numbers(*[page] * rows)],
        shape.num_heads, heads, size, page, q_data_type=torch.bfloat16,
    )  # fmt: skip
    return graph_microseconds(lambda: [wrapper.run(query, cache) for cache in caches]) / layers


def _layers(shape: LlamaShape, rows: int, tokens: int) -> int:
    """How many layers hold enough memory together."""
    nbytes = 2 * shape.pair_elements * (tokens + rows * _BLOCK)
    return max(2, min(_MOST_LAYERS, int(_MEMORY // nbytes)))


class DecodeAttention:
    """One decoding step's attention: `rows` rows over `runs` runs of shared tokens, each row in an
    order of its own, and the block of its own tokens.

    states: keys and values of the runs, encoded at position 0. orders: of the runs, for each row.
    """

    def __init__(
        self, shape: LlamaShape, rows: int, tokens: int, runs: int, device: str,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        from ragcache.attention.triton.launch import RotationTables, TritonKernels
        from ragcache.attention.triton.plan import HeadLayout

        size, heads = shape.head_dim, shape.num_kv_heads
        rng = random.Random(3)
        self.orders = [rng.sample(range(runs), runs) for _ in range(rows)]
        self.layers = _layers(shape, rows, tokens)
        self.rows, self.scale = rows, size**-0.5

        def drawn(*dimensions: int) -> Tensor:
            return torch.empty(dimensions, dtype=dtype, device=device).normal_()

        self.pool = [drawn(self.layers, heads, rows * _BLOCK, size) for _ in range(2)]
        length = tokens // runs
        self.states = [
            [drawn(self.layers, heads, length, size) for _ in range(2)] for _ in range(runs)
        ]
        self.query = drawn(rows, shape.num_heads, size).transpose(0, 1)
        self.key, self.value = (drawn(rows, heads, size).transpose(0, 1) for _ in range(2))
        self.out = torch.empty(rows, shape.num_heads, size, dtype=dtype, device=device)
        angles = torch.arange(tokens + _BLOCK, device=device)[:, None] * shape.theta ** (
            -torch.arange(0, size, 2, device=device) / size
        )
        self.heads = HeadLayout(heads, shape.num_heads // heads, size)
        entries = 64 * rows * runs + 4096
        self.kernels = TritonKernels(
            self.heads, dtype, device, RotationTables(angles.cos(), angles.sin()),
            max_entries=entries,
        )  # fmt: skip
        self.tables = self._tables(entries, length, device)

    def _tables(self, entries: int, length: int, device: str) -> AttentionTables:
        from ragcache.attention.triton import plan
        from ragcache.attention.triton.tables import AttentionTables

        reads = [
            plan.KVRead(plan.KVRun(plan.KVBase(keys, values), 0, length))
            for keys, values in self.states
        ]
        for row, order in enumerate(self.orders):
            for place, number in enumerate(order):
                origin = place * length
                reads[number].readers.append(plan.KVConsumer(row, row + 1, origin, origin))
        capacity = plan.TableCapacity(self.rows, entries, 16384, 64, 1)
        made = AttentionTables(capacity, device)
        pool = plan.KVBase(self.pool[0], self.pool[1])
        made.set_plan(
            plan.build_plan(
                reads, rows=self.rows, heads=self.heads, capacity=capacity, pool=pool,
                **self.kernels.shapes["decode"]._asdict(),
            )
        )  # fmt: skip
        step = made.step
        step.position_ids[:] = length * len(self.states) + _BLOCK - 1
        step.tail_length[:] = _BLOCK - 1
        step.pages[:, 0] = range(self.rows)
        made.upload()
        return made

    def launch(self) -> None:
        """The step's attention, in all layers."""
        for layer in range(self.layers):
            self.kernels.attend(
                self.tables.views, "decode", self.rows, layer, self.query, self.key, self.value,
                self.scale, self.out,
            )  # fmt: skip

    def microseconds(self) -> float:
        """Microseconds of a layer."""
        return graph_microseconds(self.launch) / self.layers


def graph_microseconds(run: Callable[[], object], runs: int = 12) -> float:
    """The median time of a call as a CUDA graph, by the device's clock."""
    stream: Any = new_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return device_microseconds(graph.replay, runs)


def device_microseconds(run: Callable[[], object], runs: int) -> float:
    """The median time of a call by the device's clock, after three warm calls."""
    for _ in range(3):
        run()
    events: list[Sequence[Any]] = [[new_event(timing=True) for _ in range(2)] for _ in range(runs)]
    for first, last in events:
        first.record()
        run()
        last.record()
    torch.cuda.synchronize()
    return 1e3 * float(statistics.median(first.elapsed_time(last) for first, last in events))
