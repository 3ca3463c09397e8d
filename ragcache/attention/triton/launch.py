"""Launches the kernels of one layer's attention, for a model's shape on one device.

    mixed   any rows      write -> partial over every item -> merge
    decode  a row each    partial over the shared items -> tail over each row's own blocks

Nothing waits for the device, and nothing is allocated but the partial results, once, so that a CUDA
graph may capture a launch; it then serves whatever the tables hold when it is replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, Literal

import torch
import triton
from torch import Tensor

from ragcache.attention.triton.kernels import (
    merge_kernel,
    partial_kernel,
    tail_kernel,
    write_kernel,
)
from ragcache.attention.triton.tables import HeadLayout, TableViews

StepKind = Literal["mixed", "decode"]
"""`decode`: every row is a request's only one, and its own recent keys are in `pages`."""

BLOCK_SIZE = 64
"""Tokens of a block of the pool, as the tail reads it."""

_INTERPRETED_PROGRAMS = 3  # enough that one walks several items, and another none


@dataclass(frozen=True, slots=True, eq=False)
class RotationTables:
    """cos and sin of every position's angles, float32 [P, R/2], on the device.

    R is the rotated width, at most D. interleaved: dimensions 2i and 2i+1 turn together (GPT-J
    layout), not i and i + R/2 (GPT-NeoX).
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    @property
    def rotated(self) -> int:
        """R, in dimensions."""
        return 2 * self.cos.shape[1]


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Constants of the partial kernel: BM lines of query and BN keys of a product, warps, stages of
    the pipeline, and programs of a multiprocessor."""

    block_rows: int
    block_keys: int
    warps: int
    stages: int
    programs: int


def choose_config(heads: HeadLayout, dtype: torch.dtype) -> LaunchConfig:
    """Measured on an H200 for 16 bits and D = 128; the others are those without spills.

    Blocks of 64 rows with two programs a multiprocessor were faster there than blocks of 128, as
    long as the group fits in one.
    """
    wide = heads.head_dim > 128
    rows = max(64, triton.next_power_of_2(heads.group))
    if dtype == torch.float32:  # multiplied exactly, without tensor cores
        rows = max(16, triton.next_power_of_2(heads.group))
        return LaunchConfig(rows, 32, 4, 1, 2)
    warps = 4 if rows == 64 else 8
    if wide:
        return LaunchConfig(rows, 64, 8, 2, 1)
    return LaunchConfig(rows, 64, warps, 3, 2 if rows == 64 else 1)


class TritonKernels:
    """The kernels of one model on one device.

    Args:
        heads: The model's heads.
        dtype: Of queries and states: bfloat16, float16 or float32.
        device: A CUDA device, or the CPU under Triton's interpreter.
        rotation: Tables of the rotary embedding, or None where queries do not turn.
        slopes: ALiBi's slopes [Hq], float32.
        max_entries: Capacity of the partial results, that of the tables.
        windows: Of each layer: None, or how many positions up to its own a row sees. An empty
            sequence is no window at all.
        softcap: Bound of the scores: cap * tanh(score / cap).
        quantized: Whether any base may be int8.
        config: Constants of the partial kernel; by default those for heads and dtype.
    """

    def __init__(
        self, heads: HeadLayout, dtype: torch.dtype, device: torch.device | str,
        rotation: RotationTables | None = None, slopes: Tensor | None = None, *,
        max_entries: int, windows: Sequence[int | None] = (), softcap: float | None = None,
        quantized: bool = False, config: LaunchConfig | None = None,
    ) -> None:  # fmt: skip
        self._num_heads = heads.num_kv_heads * heads.group
        self.heads, self.dtype, self.device = heads, dtype, torch.device(device)
        self.rotation, self.slopes = rotation, slopes
        self.windows, self.softcap, self.quantized = tuple(windows), softcap, quantized
        self.config = config or choose_config(heads, dtype)
        on_gpu = self.device.type == "cuda"
        self._processors, newest = 1, False
        if on_gpu:
            properties = torch.cuda.get_device_properties(self.device)
            self._processors, newest = properties.multi_processor_count, properties.major >= 9
        self.programs = self._processors * self.config.programs if on_gpu else _INTERPRETED_PROGRAMS
        self._overlap: dict[str, Any] = {"launch_pdl": True} if newest else {}
        self.out = torch.empty(
            max_entries, self._num_heads, heads.head_dim, dtype=dtype, device=self.device
        )
        self.lse = torch.empty(
            max_entries, self._num_heads, dtype=torch.float32, device=self.device
        )
        size, padded = dtype.itemsize, max(16, triton.next_power_of_2(heads.head_dim))
        self._shape: dict[str, Any] = {
            "HKV": heads.num_kv_heads, "G": heads.group, "D": heads.head_dim, "DP": padded,
            "ALIGN": gcd(16, heads.head_dim * size), "DEPENDENT": newest,
        }  # fmt: skip
        self._score: dict[str, Any] = {"ALIBI": slopes is not None, "SOFTCAP": softcap or 0.0}

    @property
    def block_rows(self) -> int:
        """Lines of query of an item: entries times `group` are at most as many."""
        return self.config.block_rows

    def attend(
        self, tables: TableViews, kind: StepKind, rows: int, layer: int,
        query: Tensor, key: Tensor, value: Tensor, scale: float, out: Tensor,
    ) -> None:  # fmt: skip
        """Writes the new keys and values of the first `rows` rows, and their attention to `out`.

        Args:
            tables: The step's tables.
            kind: Of the step.
            rows: T, padding rows included; these get zeros.
            layer: Which layer of the states.
            query: [Hq, T, D], turned to its position; any strides, but the last is 1.
            key: [Hkv, T, D], likewise.
            value: [Hkv, T, D], with any strides likewise.
            scale: Of the scores.
            out: [T, Hq, D], contiguous.
        """
        if kind == "mixed":
            self._write(tables, rows, layer, key, value)
            self._partial(tables, layer, query, scale)
            self._merge(tables, rows, out)
        else:
            self._partial(tables, layer, query, scale)
            self._tail(tables, rows, layer, query, key, value, scale, out)

    def _window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def _write(self, tables: TableViews, rows: int, layer: int, key: Tensor, value: Tensor) -> None:
        shape = {name: self._shape[name] for name in ("HKV", "D", "DP", "ALIGN", "DEPENDENT")}
        together = min(8, triton.next_power_of_2(self.heads.num_kv_heads))
        write_kernel[rows, triton.cdiv(self.heads.num_kv_heads, together)](
            key, key.stride(0), key.stride(1), value, value.stride(0), value.stride(1),
            tables.bases, tables.write_base, tables.write_slot, layer,
            **shape, HEADS=together, num_warps=4, **self._overlap,
        )  # fmt: skip

    def _partial(self, tables: TableViews, layer: int, query: Tensor, scale: float) -> None:
        config, window, rotation = self.config, self._window(layer), self.rotation
        cos, sin = (self.lse, self.lse) if rotation is None else (rotation.cos, rotation.sin)
        partial_kernel[self.programs,](
            query, query.stride(0), query.stride(1), self.out, self.lse,
            tables.counts, tables.bases, tables.scales, tables.items, tables.entry_row,
            tables.entry_delta, tables.entry_limit, tables.entry_origin, tables.position_ids,
            cos, sin, self.lse if self.slopes is None else self.slopes, layer, window or 0, scale,
            **self._shape, **self._score,
            ROTATED=rotation.rotated if rotation else 0,
            INTERLEAVED=rotation.interleaved if rotation else False,
            WINDOW=window is not None, QUANTIZED=self.quantized,
            ALIGN8=gcd(16, self.heads.head_dim),
            BM=config.block_rows, BN=config.block_keys, STAGES=config.stages,
            num_warps=config.warps, num_stages=config.stages, **self._overlap,
        )  # fmt: skip

    def _merge(self, tables: TableViews, rows: int, out: Tensor) -> None:
        heads = self._num_heads
        entries, together, warps = self._merge_config(rows)
        merge_kernel[rows, triton.cdiv(heads, together)](
            self.out, self.lse, tables.row_ptr, tables.row_entries, out,
            HQ=heads, D=self._shape["D"], DP=self._shape["DP"], ENTRIES=entries, HEADS=together,
            DEPENDENT=self._shape["DEPENDENT"], num_warps=warps, **self._overlap,
        )  # fmt: skip

    def _merge_config(self, rows: int) -> tuple[int, int, int]:
        """Entries and heads at once, and warps: few rows need programs, many need few of them."""
        if rows <= 512:
            return 16, 1, 1
        return (8, 2, 1) if rows <= 4096 else (2, 4, 1)

    def _tail(
        self, tables: TableViews, rows: int, layer: int,
        query: Tensor, key: Tensor, value: Tensor, scale: float, out: Tensor,
    ) -> None:  # fmt: skip
        window, group = self._window(layer), triton.next_power_of_2(self.heads.group)
        keys, entries, warps = self._tail_config(rows)
        tail_kernel[rows, self.heads.num_kv_heads](
            query, query.stride(0), query.stride(1), key, key.stride(0), key.stride(1),
            value, value.stride(0), value.stride(1), self.out, self.lse, out,
            tables.bases, tables.row_ptr, tables.row_entries, tables.tail_length, tables.pages,
            tables.pages.stride(0), self.lse if self.slopes is None else self.slopes, layer,
            window or 0, scale, **self._shape, **self._score, WINDOW=window is not None,
            BLOCK=BLOCK_SIZE, BN=keys, ENTRIES=entries, GP=group, LINES=max(16, group),
            num_warps=warps, num_stages=1, **self._overlap,
        )  # fmt: skip

    def _tail_config(self, rows: int) -> tuple[int, int, int]:
        """Keys of a product, entries at once, and warps."""
        keys = min(BLOCK_SIZE, 64 if rows <= 32 else 32)
        entries, warps = (16, 1) if rows < 256 else (8, 1)
        return keys, entries, warps
