"""Collectives of ranks on GPUs of one host: our sums over shared memory, and NCCL above them."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.nn import functional

from ragcache.models.parallel.collectives import RankLost

logger = logging.getLogger(__name__)

_WORLD = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg")
"""Tables of groups in `torch.distributed`."""
CONNECTING = timedelta(seconds=120)
_ENVIRONMENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""NCCL's own watch would end the leader's process, which has callers. The leader's watch ends
ranks."""
ONE_SHOT_VARIABLE = "RAGCACHE_ONE_SHOT"
"""Environment variable: `0` leaves all sums to NCCL."""


class DeviceCollectives:
    """Collectives of processes with one GPU each (`Collectives`).

    Sums and gathers are queued on the current stream. Nothing waits for the host.

    Args:
        folder: An empty folder that all ranks reach, for their addresses.
        rank: Number of this process.
        ranks: Number of processes.
        device: The GPU of this process, among all visible ones.
        limits: `sum_bytes` and `push_bytes` of `OneShot`. Larger sums are left to NCCL.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        ranks: int,
        device: torch.device,
        **limits: int,
    ) -> None:
        self.rank, self.ranks, self.device, self.alone = rank, ranks, device, False
        self._folder, self._limits = folder, limits
        self._distributed: Any = import_module("torch.distributed")  # whose stubs lack what is used
        self._group: Any = None
        self._shared: Any = None
        self._released = False

    def connect(self) -> None:
        """See `Collectives.connect`."""
        distributed, folder = self._distributed, self._folder
        torch.cuda.set_device(self.device)
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        # ranks find each other by a group's name, which is the number of groups in the process
        distributed.distributed_c10d._world.group_count = crc32(folder.name.encode())
        distributed.init_process_group(
            "nccl",
            store=distributed.FileStore(str(folder / "devices"), self.ranks),
            rank=self.rank,
            world_size=self.ranks,
            timeout=CONNECTING,
            device_id=self.device,
        )
        self._group = distributed.group.WORLD
        self._shared = self._share()
        self._warm_up()

    @property
    def sums_by(self) -> str:
        """Who makes sums that are small enough: `one-shot`, which is `OneShot`, or `nccl`."""
        return "nccl" if self._shared is None else "one-shot"

    def begin_pass(self) -> None:
        """See `Collectives.begin_pass`. The device's work is watched by messages."""
        if self._shared is not None:
            self._shared.begin_pass()

    def sum_parts(self, part: Tensor) -> Tensor:
        """See `Collectives.sum_parts`."""
        if self.alone:
            return part
        if self._shared is not None and self._shared.holds(part.shape[:-1].numel(), part.nbytes):
            total: Tensor = self._shared.sum_parts(part.contiguous())
            return total
        self._nccl().all_reduce(part)
        return part

    def sum_products(
        self, hidden: Tensor, weight: Tensor, residual: Tensor | None = None
    ) -> Tensor:
        """See `Collectives.sum_products`. The product writes its part where the sum reads it."""
        width, rows = weight.shape[0], hidden.shape[:-1].numel()
        shared = self._shared
        if self.alone or shared is None or not shared.holds(rows, rows * width * hidden.itemsize):
            whole = self.sum_parts(functional.linear(hidden, weight))
            return whole if residual is None else residual + whole
        flat = hidden.reshape(rows, -1)
        room = shared.room((rows, width), hidden.dtype)
        torch.mm(flat, weight.t(), out=room)
        total: Tensor = shared.sum_parts(room, residual, copy=False)
        return total.view(*hidden.shape[:-1], width)

    def gather_columns(self, part: Tensor, width: int) -> Tensor:
        """See `Collectives.gather_columns`."""
        if self.alone or not len(part):
            return part.new_empty(len(part), width)
        most = -(-width // self.ranks)
        if part.shape[1] < most:
            part = functional.pad(part, (0, most - part.shape[1]))
        part = part.contiguous()
        if self._shared is not None and self._shared.gathers(part):
            whole: Tensor = self._shared.gather_columns(part)
            if self.rank:
                return part
        else:
            parts = part.new_empty(self.ranks * len(part), most)
            self._nccl().all_gather_into_tensor(parts, part)
            whole = parts.view(self.ranks, len(part), most).transpose(0, 1).flatten(1)
        return whole if whole.shape[1] == width else whole[:, :width].contiguous()

    def broadcast(self, tensor: Tensor) -> None:
        """See `Collectives.broadcast`."""
        if self._shared is not None and self._shared.passes(tensor):
            self._shared.broadcast(tensor)
        else:
            self._nccl().broadcast(tensor, 0)

    def release(self) -> None:
        """See `Collectives.release`. Sums end with any result, and NCCL's memory is free."""
        self._released, shared, group = True, self._shared, self._group
        if group is not None:  # in a thread of its own: it may wait for an ended rank
            threading.Thread(target=group.abort, daemon=True).start()
        if shared is not None:
            shared.release()

    def close(self) -> None:
        """See `Collectives.close`. Makes room for another default group, and keeps this one until
        the process ends, since NCCL's end may wait for the other ranks for ever."""
        self._shared = None
        group, self._group = self._group, None
        if group is None or not self._distributed.is_initialized():
            return
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        c10d = self._distributed.distributed_c10d
        world = c10d._world
        c10d._update_default_pg(None)
        for name in _WORLD:
            getattr(world, name).clear()
        c10d._unregister_all_process_groups()

    def _nccl(self) -> Any:
        """Return what makes the calls that are left to NCCL."""
        if self._released:
            raise RankLost("another rank has ended")
        return self._distributed

    def _share(self) -> Any:
        """Our own sums, unless a GPU cannot reach the memory of another."""
        if os.environ.get(ONE_SHOT_VARIABLE) == "0" or not self._peers():
            return None
        from ragcache.models.parallel.one_shot import OneShot

        return OneShot(self._group, self.rank, self.ranks, self.device, **self._limits)

    def _peers(self) -> bool:
        first = self.device.index - self.rank
        others = [first + each for each in range(self.ranks) if each != self.rank]
        return all(torch.cuda.can_device_access_peer(self.device, each) for each in others)

    def _warm_up(self) -> None:
        """Connect NCCL, which does it at the first sum."""
        self._distributed.all_reduce(torch.zeros(16, device=self.device))
        torch.cuda.synchronize(self.device)
