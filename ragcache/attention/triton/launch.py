"""Launches the kernels of one layer's attention, for a model's shape on one device.

    mixed   any rows      write -> partial over every item, squares -> merge
    decode  a row each    partial over the shared items -> tail over each row's own blocks

Over latents the tail is followed by a merge (`latent_launch`).

Nothing waits for the device, and nothing is allocated but the partial results, once, so that a CUDA
graph may capture a launch; it then serves whatever the tables hold when it is replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Literal, NamedTuple

import torch
import triton
from torch import Tensor

from ragcache.attention.triton.kernels import (
    merge_kernel,
    partial_kernel,
    tail_kernel,
    write_kernel,
)
from ragcache.attention.triton.plan import HeadLayout, ItemShape, Square
from ragcache.attention.triton.squares import attend_square
from ragcache.attention.triton.tables import TableViews

StepKind = Literal["mixed", "decode"]
"""`decode`: every row is the only one of its request, whose recent keys are in `pages`."""

BLOCK_SIZE = 64
"""Tokens of a block of the pool, as the tail reads it."""

_INTERPRETED_PROGRAMS = 3  # enough that one walks several items, and another none


@dataclass(frozen=True, slots=True, eq=False)
class RotationTables:
    """Cosines and sines of the angles of all positions, float32 [P, R/2], on the device."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    """Whether dimensions 2i and 2i+1 turn together (GPT-J layout), not i and i + R/2 (GPT-NeoX)."""

    @property
    def rotated(self) -> int:
        """R, the rotated width, at most D."""
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


def choose_config(
    heads: HeadLayout, dtype: torch.dtype, capability: tuple[int, int] = (9, 0)
) -> LaunchConfig:
    """Measured on an H200 for 16 bits and D = 128; for other shapes, what spills no registers.

    There, blocks of 64 rows and two programs a multiprocessor were faster than blocks of 128 also
    where all are full, so that larger ones are taken for larger groups only.
    """
    group = triton.next_power_of_2(heads.group)
    # those of graphics cards have 99 KB of shared memory, whatever their generation
    stages = 3 if (9, 0) <= capability < (12, 0) else 2
    if dtype == torch.float32:  # multiplied exactly, without tensor cores
        return LaunchConfig(max(16, group), 32, 4, 2, 2)
    if heads.head_dim > 128:
        return LaunchConfig(max(64, group), 32, 8, stages, 1)
    if group > 64:
        return LaunchConfig(group, 64, 8, 2, 1)
    return LaunchConfig(64, 64, 4, stages, 2)


def choose_decode_config(
    heads: HeadLayout, dtype: torch.dtype, config: LaunchConfig, *, quantized: bool
) -> LaunchConfig:
    """Constants of decode steps, from the constants of mixed steps.

    Where documents are kept in eight bits, many of them are read by few rows each, and every key
    becomes 16 bits for the rows of one item. On an H200, D = 128, 64 rows over 4 of 64 documents:
    231 instead of 332 microseconds a layer for groups of 1, and 82 instead of 96 for groups of 4,
    for which blocks of 16 rows take 113. States in 16 bits gain nothing.
    """
    if not quantized or dtype.itemsize != 2 or heads.head_dim > 128 or heads.group > 32:
        return config
    if heads.group == 1:
        return replace(config, block_rows=16, programs=3)
    return replace(config, block_rows=32)


class TailConfig(NamedTuple):
    """Constants of the tail kernel: keys of a product, entries added at once, warps."""

    keys: int
    entries: int
    warps: int


def choose_tail(heads: HeadLayout, dtype: torch.dtype, rows: int) -> TailConfig:
    """Measured on an H200 for 16 bits, D = 128 and groups of 1 and 4: programs of one warp, which
    needs fewer keys and entries at once where there are many. For other shapes, what spills
    little."""
    group, dim = triton.next_power_of_2(heads.group), padded(heads.head_dim)
    if heads.group == 1:
        few = rows <= 32 and dim <= 128
        return TailConfig(64 if few else 32, 16 if few else 8, 1)
    warps = min(8, max(1, max(group, max(16, group) // 4) * dim // 1024))
    if dtype == torch.float32:
        return TailConfig(16, max(1, min(8, 16384 // (group * dim))), max(4, warps))
    return TailConfig(32, max(1, min(8, 4096 * warps // (group * dim))), warps)


class MergeConfig(NamedTuple):
    """Constants of the merge kernel: entries added at once, heads of a program, warps."""

    entries: int
    heads: int
    warps: int


def choose_merge(rows: int) -> MergeConfig:
    """Measured on an H200: a program for each head of few rows; rows by the thousand, as of
    encodings, have few entries each."""
    if rows <= 512:
        return MergeConfig(32, 1, 1)
    return MergeConfig(8, 2, 1) if rows <= 4096 else MergeConfig(2, 4, 1)


def padded(head_dim: int) -> int:
    """Widths of tensors are powers of two; products need 16 at least."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def strided(states: Tensor) -> tuple[Tensor, int, int]:
    """A tensor [H, T, D] with its strides of a head and of a row."""
    return states, states.stride(0), states.stride(1)


class TritonKernels:
    """The kernels of one model on one device.

    Args:
        heads: The model's heads.
        dtype: Dtype of queries and states: bfloat16, float16 or float32.
        device: A CUDA device, or the CPU under Triton's interpreter.
        rotation: Tables of the rotary embedding, of all layers or of each. Without them,
            queries do not turn.
        slopes: ALiBi's slopes [Hq], float32.
        max_entries: Capacity of the partial results; equals the capacity of the tables.
        windows: Number of positions up to its own that a row sees, for each layer with a window.
        softcap: Bound of the scores: softcap * tanh(score / softcap).
        quantized: Whether any base may be int8.
        config: Constants of the partial kernel. Defaults to `choose_config`.
    """

    def __init__(
        self,
        heads: HeadLayout,
        dtype: torch.dtype,
        device: torch.device | str,
        rotation: RotationTables | Sequence[RotationTables] | None = None,
        slopes: Tensor | None = None,
        *,
        max_entries: int,
        windows: Sequence[int | None] = (),
        softcap: float | None = None,
        quantized: bool = False,
        config: LaunchConfig | None = None,
    ) -> None:
        self.heads, self.dtype, self.device = heads, dtype, torch.device(device)
        self.rotation, self.slopes = rotation, slopes
        self.windows, self.softcap, self.quantized = tuple(windows), softcap, quantized
        processors, capability = 0, (0, 0)
        if self.device.type == "cuda":
            processors = torch.cuda.get_device_properties(self.device).multi_processor_count
            capability = torch.cuda.get_device_capability(self.device)
        self.configs = self._choose_configs(capability)
        if config is not None:
            self.configs = {"mixed": config, "decode": config}
        self.shapes: dict[str, ItemShape] = {
            kind: ItemShape(processors * each.programs or _INTERPRETED_PROGRAMS, each.block_rows)
            for kind, each in self.configs.items()
        }
        self.overlapped = capability >= (9, 0)
        sizes = max_entries, heads.num_kv_heads * heads.group
        self.out = torch.empty(*sizes, heads.value_dim, dtype=dtype, device=self.device)
        self.lse = torch.empty(*sizes, dtype=torch.float32, device=self.device)

    def attend(
        self,
        tables: TableViews,
        kind: StepKind,
        rows: int,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        out: Tensor,
        sinks: Tensor | None = None,
        squares: Sequence[Square] = (),
    ) -> None:
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
            out: [T, Hq, D], contiguous; as wide as the values.
            sinks: [Hq], the score of one more key per head, whose value is zero.
            squares: The plan's squares, in a mixed step that no graph has.
        """
        if kind == "mixed":
            self._write(tables, rows, layer, key, value)
            self._partial(tables, kind, layer, query, scale)
            begin = 0
            for first, end in squares:
                here = slice(first, end)
                own = attend_square(query[:, here], key[:, here], value[:, here], scale)
                self._merge(tables, slice(begin, first), out, sinks)
                self._merge(tables, here, out, sinks, own)
                begin = end
            self._merge(tables, slice(begin, rows), out, sinks)
        else:
            self._partial(tables, kind, layer, query, scale)
            self._tail(tables, rows, layer, query, key, value, scale, out, sinks)

    def constants(self, layer: int) -> dict[str, Any]:
        """Compile-time constants of all kernels of a layer."""
        heads, dim = self.heads, self.heads.head_dim
        sizes = {"HKV": heads.num_kv_heads, "G": heads.group, "D": dim, "DP": padded(dim)}
        bias = {"ALIBI": self.slopes is not None, "WINDOW": self._window(layer) is not None}
        aligned = gcd(16, dim * self.dtype.itemsize)
        others = {"SOFTCAP": self.softcap or 0.0, "DEPENDENT": self.overlapped}
        return sizes | {"ALIGN": aligned} | bias | others

    def partial_constants(self, layer: int, kind: StepKind = "mixed") -> dict[str, Any]:
        """Compile-time constants of the partial kernel."""
        config, rotation = self.configs[kind], self._rotation(layer)
        return self.constants(layer) | {
            "ROTATED": rotation.rotated if rotation else 0,
            "INTERLEAVED": rotation.interleaved if rotation else False,
            "QUANTIZED": self.quantized,
            "ALIGN8": gcd(16, self.heads.head_dim),
            "BM": config.block_rows,
            "BN": config.block_keys,
            "STAGES": config.stages,
        }

    def tail_constants(
        self, layer: int, config: TailConfig, *, sinks: bool = False
    ) -> dict[str, Any]:
        """Compile-time constants of the tail kernel."""
        group = triton.next_power_of_2(self.heads.group)
        sizes = {"BLOCK": BLOCK_SIZE, "BN": config.keys, "ENTRIES": config.entries}
        sizes |= {"GP": group, "LINES": max(16, group), "SINKS": sinks}
        return self.constants(layer) | sizes

    def _choose_configs(self, capability: tuple[int, int]) -> dict[StepKind, LaunchConfig]:
        mixed = choose_config(self.heads, self.dtype, capability)
        decode = choose_decode_config(self.heads, self.dtype, mixed, quantized=self.quantized)
        return {"mixed": mixed, "decode": decode}

    def _choose_merge(self, rows: int) -> MergeConfig:
        return choose_merge(rows)

    def _write(self, tables: TableViews, rows: int, layer: int, key: Tensor, value: Tensor) -> None:
        constants, heads = self.constants(layer), self.heads.num_kv_heads
        together = min(8, triton.next_power_of_2(heads))
        places = tables.bases, tables.write_base, tables.write_slot
        write_kernel[rows, triton.cdiv(heads, together)](
            *(*strided(key), *strided(value), *places, layer),
            **{name: constants[name] for name in ("HKV", "D", "DP", "ALIGN", "DEPENDENT")},
            HEADS=together,
            VALUES=True,
            **self._options(4),
        )

    def _partial(
        self, tables: TableViews, kind: StepKind, layer: int, query: Tensor, scale: float
    ) -> None:
        config = self.configs[kind]
        items = tables.counts, tables.bases, tables.scales, tables.items
        entries = tables.entry_row, tables.entry_delta, tables.entry_limit, tables.entry_origin
        partial_kernel[self.shapes[kind].programs,](
            *(*strided(query), self.out, self.lse, *items, *entries, tables.position_ids),
            *(*self._angles(layer), self._slopes()),
            *(layer, self._window(layer) or 0, scale),
            **self.partial_constants(layer, kind),
            **self._options(config.warps, config.stages),
        )

    def _merge(
        self,
        tables: TableViews,
        rows: slice,
        out: Tensor,
        sinks: Tensor | None,
        tail: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Adds the partial results of some rows, and a tail: [rows, Hq, D] and [rows, Hq]."""
        count = rows.stop - rows.start
        if not count:
            return
        config, heads = self._choose_merge(count), self.heads.num_kv_heads * self.heads.group
        dim = self.heads.value_dim
        merge_kernel[count, triton.cdiv(heads, config.heads)](
            *(self.out, self.lse, tables.row_ptr, tables.row_entries),
            *(tail or (self.out, self.lse)),
            *(self.lse if sinks is None else sinks, out, rows.start),
            HQ=heads,
            D=dim,
            DP=padded(dim),
            TAIL=tail is not None,
            SINKS=sinks is not None,
            ENTRIES=config.entries,
            HEADS=config.heads,
            DEPENDENT=self.overlapped,
            **self._options(config.warps),
        )

    def _tail(
        self,
        tables: TableViews,
        rows: int,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        out: Tensor,
        sinks: Tensor | None,
    ) -> None:
        config = choose_tail(self.heads, self.dtype, rows)
        entries = tables.bases, tables.row_ptr, tables.row_entries
        tail = tables.tail_length, tables.pages, tables.pages.stride(0)
        tail_kernel[rows, self.heads.num_kv_heads](
            *(*strided(query), *strided(key), *strided(value), self.out, self.lse, out),
            *(*entries, *tail, self._slopes(), self.lse if sinks is None else sinks),
            *(layer, self._window(layer) or 0, scale),
            **self.tail_constants(layer, config, sinks=sinks is not None),
            **self._options(config.warps),
        )

    def _window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def _rotation(self, layer: int) -> RotationTables | None:
        if self.rotation is None or isinstance(self.rotation, RotationTables):
            return self.rotation
        return self.rotation[layer]

    def _angles(self, layer: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines; any tensor where none is read."""
        rotation = self._rotation(layer)
        return (self.lse, self.lse) if rotation is None else (rotation.cos, rotation.sin)

    def _slopes(self) -> Tensor:
        return self.lse if self.slopes is None else self.slopes

    def _options(self, warps: int, stages: int = 1) -> dict[str, Any]:
        options: dict[str, Any] = {"num_warps": warps, "num_stages": stages}
        options["enable_fp_fusion"] = True  # scores are scaled and reduced by their maximum at once
        if self.overlapped:
            options["launch_pdl"] = True
        return options
