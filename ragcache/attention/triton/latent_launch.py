"""Launches the kernels of attention over latents, with the tables of all other models."""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ragcache.attention.triton.kernels import write_kernel
from ragcache.attention.triton.latent_kernels import latent_partial_kernel, latent_tail_kernel
from ragcache.attention.triton.launch import (
    BLOCK_SIZE,
    LaunchConfig,
    MergeConfig,
    StepKind,
    TritonKernels,
    padded,
    strided,
)
from ragcache.attention.triton.plan import HeadLayout
from ragcache.attention.triton.tables import TableViews

SMALL_LATENT = 128
"""Width up to which a program needs no more registers than for ordinary heads."""


def choose_latent_config(
    heads: HeadLayout, dtype: torch.dtype, capability: tuple[int, int]
) -> LaunchConfig:
    """Return constants with which the partial kernel spills few registers, and fits the shared
    memory of the GPU: queries and two or three blocks of states, 576 wide in DeepSeek's models, are
    there at once."""
    group = triton.next_power_of_2(heads.group)
    if dtype == torch.float32:  # multiplied exactly, without tensor cores
        return LaunchConfig(max(16, group), 16, 8, 1, 1)
    if heads.latent <= SMALL_LATENT:
        return LaunchConfig(max(64, group), 32, 4, 2, 2)
    if (9, 0) <= capability < (12, 0):
        return LaunchConfig(max(64, group), 32, 8, 3, 1)
    return LaunchConfig(max(32, group), 16, 8, 2, 1)


class LatentTailConfig(NamedTuple):
    """Constants of the tail kernel: keys of a product, warps, stages of the pipeline."""

    keys: int
    warps: int
    stages: int


def choose_latent_tail(heads: HeadLayout, dtype: torch.dtype) -> LatentTailConfig:
    """Return constants with which the tail kernel spills few registers."""
    elements = max(16, triton.next_power_of_2(heads.group)) * padded(heads.latent)
    warps = max(1, min(8, elements // 1024))
    if dtype == torch.float32:
        return LatentTailConfig(16, max(4, warps), 1)
    return LatentTailConfig(32, warps, 2)


class LatentKernels(TritonKernels):
    """The kernels of a model whose keys hold latents. See `TritonKernels` for arguments."""

    def constants(self, layer: int) -> dict[str, Any]:  # noqa: ARG002
        """Compile-time constants of all kernels over latents."""
        heads, nbytes = self.heads, self.dtype.itemsize
        turned, width = heads.head_dim - heads.latent, heads.latent
        return {
            "HKV": heads.num_kv_heads,
            "G": heads.group,
            "R": turned,
            "RP": padded(turned),
            "C": width,
            "CP": padded(width),
            "ALIGN": gcd(16, turned * nbytes, width * nbytes),
            "DEPENDENT": self.overlapped,
        }

    def partial_constants(self, layer: int, kind: StepKind = "mixed") -> dict[str, Any]:
        """Compile-time constants of the partial kernel."""
        config, rotation, heads = self.configs[kind], self._rotation(layer), self.heads
        return self.constants(layer) | {
            "ROTATED": rotation.rotated if rotation else 0,
            "INTERLEAVED": rotation.interleaved if rotation else False,
            "QUANTIZED": self.quantized,
            "ALIGN8": gcd(16, heads.head_dim, heads.latent),
            "BM": config.block_rows,
            "BN": config.block_keys,
            "STAGES": config.stages,
        }

    def latent_tail_constants(self, layer: int, config: LatentTailConfig) -> dict[str, Any]:
        """Compile-time constants of the tail kernel."""
        lines = max(16, triton.next_power_of_2(self.heads.group))
        sizes = {"BLOCK": BLOCK_SIZE, "BN": config.keys, "STAGES": config.stages, "LINES": lines}
        return self.constants(layer) | sizes

    def _choose_configs(self, capability: tuple[int, int]) -> dict[StepKind, LaunchConfig]:
        config = choose_latent_config(self.heads, self.dtype, capability)
        return {"mixed": config, "decode": config}

    def _choose_merge(self, rows: int) -> MergeConfig:
        if self.heads.latent <= SMALL_LATENT:
            return super()._choose_merge(rows)
        return MergeConfig(8 if rows <= 512 else 4, 1, 2)  # of one warp along the entries

    def _write(self, tables: TableViews, rows: int, layer: int, key: Tensor, value: Tensor) -> None:
        width = self.heads.head_dim
        write_kernel[rows, 1](
            *(*strided(key), *strided(value)),
            *(tables.bases, tables.write_base, tables.write_slot, layer),
            HKV=1,
            D=width,
            DP=padded(width),
            ALIGN=gcd(16, width * self.dtype.itemsize),
            HEADS=1,
            VALUES=False,
            DEPENDENT=self.overlapped,
            **self._options(4),
        )

    def _partial(
        self, tables: TableViews, kind: StepKind, layer: int, query: Tensor, scale: float
    ) -> None:
        config = self.configs[kind]
        items = tables.counts, tables.bases, tables.scales, tables.items
        entries = tables.entry_row, tables.entry_delta, tables.entry_limit
        latent_partial_kernel[self.shapes[kind].programs,](
            *(*strided(query), self.out, self.lse, *items, *entries),
            *(*self._angles(layer), layer, scale),
            **self.partial_constants(layer, kind),
            **self._options(config.warps, config.stages),
        )

    def _tail(
        self,
        tables: TableViews,
        rows: int,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,  # noqa: ARG002
        scale: float,
        out: Tensor,
        sinks: Tensor | None,
    ) -> None:
        config = choose_latent_tail(self.heads, self.dtype)
        heads = len(query)
        lse = torch.empty(rows, heads, dtype=torch.float32, device=query.device)
        tail = query.new_empty(rows, heads, self.heads.latent), lse
        places = tables.tail_length, tables.pages, tables.pages.stride(0)
        latent_tail_kernel[rows, self.heads.num_kv_heads](
            *(*strided(query), key, key.stride(1), *tail, tables.bases, *places, layer, scale),
            **self.latent_tail_constants(layer, config),
            **self._options(config.warps, config.stages),
        )
        self._merge(tables, slice(0, rows), out, sinks, tail)
