"""Sums and gathers of the GPUs of one host, each one kernel, over memory that all of them map.

Every rank writes its part into its own buffer, waits until the others have written theirs, and
reads all of them over NVLink. Sums are taken in float32 and in the order of ranks, so that every
rank gets the same bits. No multicast is used.

A large sum of more than two ranks takes two shots: each rank adds up one share of all parts, waits
again, and reads the other shares. The bits are the same.

One meeting a call is enough, because calls alternate between two slots of the buffer: a rank that
passes the meeting of call n + 1 has finished reading call n, so that call n + 2 may write the slot
of call n.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ragcache.machine import new_stream

PROGRAMS: Final = 128
"""Most programs of a kernel. All of them must run at once, since they wait for each other."""
BLOCK: Final = 2048
ONE_SHOT_BYTES: Final = 2**26
"""Largest sum: all of a CUDA graph, and those of two GPUs up to which NCCL was measured slower."""
MEETING_BYTES: Final = 2**20
"""Bytes that cross to a GPU about as long as a second meeting takes (900 GB/s both ways, 2 µs)."""
GATHER_BYTES: Final = 2**27
BROADCAST_BYTES: Final = 2**16
_GATHER_SLOT, _BROADCAST_SLOT = 2, 3
_RELEASED: Final = 2**24
"""Value of a flag that no rank has to raise any more."""


@triton.jit
def _meet(signals, program, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Waits until the same program of every other rank is here. Flags count: a rank may be one
    meeting ahead of another, never two."""
    tl.debug_barrier()  # everything that this program has stored
    for step in tl.static_range(1, RANKS):
        theirs = tl.load(signals + (RANK + step) % RANKS).to(tl.pointer_type(tl.int32))
        tl.atomic_add(theirs + program * RANKS + RANK, 1, sem="release", scope="sys")
    own = tl.load(signals + RANK).to(tl.pointer_type(tl.int32))
    for step in tl.static_range(1, RANKS):
        flag = own + program * RANKS + (RANK + step) % RANKS
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 1:
            pass
        tl.atomic_add(flag, -1, sem="relaxed", scope="sys")
    tl.debug_barrier()


@triton.jit
def sum_kernel(
    local,
    residual,
    buffers,
    signals,
    out,
    numel,
    slot,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
    COPY: tl.constexpr,
    ADD: tl.constexpr,
):
    """out = the sum of all ranks' parts, rounded, and of the residual with ADD.

    SHARES: 1 in one shot, in which each rank adds up everything. RANKS in two, in which it adds up
    its share alone. A program meets the same program of the other ranks, so it has the same blocks
    of every share.
    COPY: whether the part is still in `local`. Otherwise a product wrote it to the buffer.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    here = tl.arange(0, BLOCK)
    kind = out.dtype
    size = tl.cdiv(tl.cdiv(numel, SHARES), BLOCK) * BLOCK
    mine = tl.multiple_of(tl.load(buffers + RANK).to(kind) + slot, 16)
    if COPY:
        for share in tl.static_range(SHARES):
            end = tl.minimum(numel, (share + 1) * size)
            for begin in range(share * size + program * BLOCK, end, programs * BLOCK):
                at, inside = begin + here, begin + here < end
                tl.store(mine + at, tl.load(local + at, mask=inside), mask=inside)
    _meet(signals, program, RANK, RANKS)
    own: tl.constexpr = RANK % SHARES
    end = tl.minimum(numel, (own + 1) * size)
    for begin in range(own * size + program * BLOCK, end, programs * BLOCK):
        at, inside = begin + here, begin + here < end
        total = _sum_block(buffers, kind, slot, at, inside, RANKS, BLOCK)
        if SHARES == 1:
            _store_sum(residual, out, total, at, inside, ADD)
        else:
            tl.store(mine + at, total, mask=inside)  # no other rank reads it before the meeting
    if SHARES > 1:
        _meet(signals, program, RANK, RANKS)
        for share in tl.static_range(SHARES):
            theirs = tl.multiple_of(tl.load(buffers + share).to(kind) + slot, 16)
            end = tl.minimum(numel, (share + 1) * size)
            for begin in range(share * size + program * BLOCK, end, programs * BLOCK):
                at, inside = begin + here, begin + here < end
                total = tl.load(theirs + at, mask=inside, cache_modifier=".cg")
                _store_sum(residual, out, total, at, inside, ADD)


@triton.jit
def _sum_block(
    buffers, kind: tl.constexpr, slot, at, inside, RANKS: tl.constexpr, BLOCK: tl.constexpr
):
    """The sum of a block of all ranks' parts, rounded."""
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for rank in tl.static_range(RANKS):
        theirs = tl.multiple_of(tl.load(buffers + rank).to(kind) + slot, 16)
        part = tl.load(theirs + at, mask=inside, cache_modifier=".cg")
        total += part.to(tl.float32)
    return total.to(kind.element_ty)


@triton.jit
def _store_sum(residual, out, total, at, inside, ADD: tl.constexpr):
    """Write a block of a sum, and of the residual with ADD."""
    if ADD:
        before = tl.load(residual + at, mask=inside).to(tl.float32)
        total = (before + total.to(tl.float32)).to(total.dtype)
    tl.store(out + at, total, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def gather_kernel(
    local,
    buffers,
    signals,
    out,
    rows,
    width,
    slot,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [rows, RANKS * width] of rank 0 = every rank's columns [rows, width]."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    here = tl.arange(0, BLOCK)
    kind = out.dtype
    blocks = tl.cdiv(width, BLOCK)
    mine = tl.multiple_of(tl.load(buffers + RANK).to(kind) + slot, 16)
    for work in range(program, rows * blocks, programs):
        row, column = (work // blocks).to(tl.int64), (work % blocks) * BLOCK + here
        at, inside = row * width + column, column < width
        tl.store(mine + at, tl.load(local + at, mask=inside), mask=inside)
    _meet(signals, program, RANK, RANKS)
    if RANK == 0:
        for work in range(program, rows * blocks, programs):
            row, column = (work // blocks).to(tl.int64), (work % blocks) * BLOCK + here
            inside = column < width
            for rank in tl.static_range(RANKS):
                theirs = tl.multiple_of(tl.load(buffers + rank).to(kind) + slot, 16)
                part = tl.load(theirs + row * width + column, mask=inside, cache_modifier=".cg")
                tl.store(out + (row * RANKS + rank) * width + column, part, mask=inside)


@triton.jit
def broadcast_kernel(
    tensor,
    buffers,
    signals,
    numel,
    slot,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """tensor = the tensor of rank 0."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    here = tl.arange(0, BLOCK)
    kind = tensor.dtype
    first = tl.multiple_of(tl.load(buffers).to(kind) + slot, 2)
    if RANK == 0:
        for begin in range(program * BLOCK, numel, programs * BLOCK):
            inside = begin + here < numel
            tl.store(first + begin + here, tl.load(tensor + begin + here, mask=inside), mask=inside)
    _meet(signals, program, RANK, RANKS)
    if RANK != 0:
        for begin in range(program * BLOCK, numel, programs * BLOCK):
            inside = begin + here < numel
            part = tl.load(first + begin + here, mask=inside, cache_modifier=".cg")
            tl.store(tensor + begin + here, part, mask=inside)


class OneShot:
    """Buffers and flags that all ranks map.

    Args:
        group: Process group of the ranks, with NCCL for their devices.
        rank: Number of this process.
        ranks: Number of processes.
        device: The GPU of this process, among all visible ones.
        sum_bytes: Bytes of the largest sum.
    """

    def __init__(
        self,
        group: Any,
        rank: int,
        ranks: int,
        device: torch.device,
        sum_bytes: int = ONE_SHOT_BYTES,
    ) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        self.rank, self.ranks, self._next = rank, ranks, 0
        self._sum_bytes = sum_bytes
        slots = (sum_bytes, sum_bytes, GATHER_BYTES, BROADCAST_BYTES)
        self._begins = [sum(slots[:number]) for number in range(len(slots))]
        self._memory = symmetric.empty(sum(slots), dtype=torch.uint8, device=device)
        self._flags = symmetric.empty(PROGRAMS * ranks, dtype=torch.int32, device=device)
        self._handles = [symmetric.rendezvous(each, group) for each in (self._memory, self._flags)]
        self._flags.zero_()
        self._buffers, self._signals = (
            torch.tensor([*each.buffer_ptrs], dtype=torch.int64, device=device)
            for each in self._handles
        )
        self._releases = new_stream(device)
        self._released = torch.full((PROGRAMS * ranks,), _RELEASED, dtype=torch.int32).pin_memory()
        torch.cuda.synchronize(device)
        torch.distributed.barrier(group)

    def holds(self, part: Tensor) -> bool:
        """Whether a sum fits into a slot."""
        return self.has_room(part.nbytes)

    def has_room(self, nbytes: int) -> bool:
        """Whether a sum of so many bytes fits into a slot."""
        return nbytes <= self._sum_bytes

    def gathers(self, part: Tensor) -> bool:
        """Whether a gather fits into its slot."""
        return part.nbytes <= GATHER_BYTES

    def passes(self, tensor: Tensor) -> bool:
        """Whether a broadcast fits into its slot."""
        return tensor.nbytes <= BROADCAST_BYTES and tensor.is_contiguous()

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a view of the next slot, for a product to write its part into."""
        begin, nbytes = self._begins[self._next], torch.Size(shape).numel() * dtype.itemsize
        return self._memory[begin : begin + nbytes].view(dtype).view(shape)

    def shots(self, nbytes: int) -> int:
        """Return how many shots a sum of so many bytes takes.

        One shot reads ranks - 1 parts of others. Two read 2 (ranks - 1) / ranks of a part.
        """
        saved = nbytes * (self.ranks - 1) * (self.ranks - 2) // self.ranks
        return 2 if saved > MEETING_BYTES else 1

    def sum_parts(
        self,
        part: Tensor,
        residual: Tensor | None = None,
        *,
        copy: bool = True,
        shots: int | None = None,
    ) -> Tensor:
        """Return the sum of all ranks' parts, and of a residual.

        Args:
            part: This rank's part, of equal size on every rank.
            residual: A tensor of the same size, which is the same on every rank.
            copy: Whether the part is not in `room`.
            shots: 1 or 2. Defaults to the number that suits the size.
        """
        slot, self._next = self._next, 1 - self._next
        out, numel = torch.empty_like(part), part.numel()
        shares = self.ranks if (shots or self.shots(part.nbytes)) == 2 else 1
        blocks = triton.cdiv(triton.cdiv(numel, shares), BLOCK)
        sum_kernel[min(PROGRAMS, blocks),](
            part,
            part if residual is None else residual.contiguous(),
            self._buffers,
            self._signals,
            out,
            numel,
            self._begins[slot] // part.element_size(),
            RANK=self.rank,
            RANKS=self.ranks,
            SHARES=shares,
            BLOCK=BLOCK,
            COPY=copy,
            ADD=residual is not None,
            num_warps=8,
        )
        return out

    def gather_columns(self, part: Tensor) -> Tensor:
        """Return [R, ranks * width] of every rank's [R, width] to rank 0. Others get an empty
        tensor. Sums lie between two gathers."""
        rows, width = part.shape
        out = part.new_empty(0 if self.rank else rows, self.ranks * width)
        gather_kernel[min(PROGRAMS, rows * triton.cdiv(width, BLOCK)),](
            part,
            self._buffers,
            self._signals,
            out,
            rows,
            width,
            self._begins[_GATHER_SLOT] // part.element_size(),
            RANK=self.rank,
            RANKS=self.ranks,
            BLOCK=BLOCK,
            num_warps=8,
        )
        return out

    def broadcast(self, tensor: Tensor) -> None:
        """Copy the tensor of rank 0 to the others'. Another call lies between two broadcasts."""
        broadcast_kernel[min(PROGRAMS, triton.cdiv(tensor.numel(), BLOCK)),](
            tensor,
            self._buffers,
            self._signals,
            tensor.numel(),
            self._begins[_BROADCAST_SLOT] // tensor.element_size(),
            RANK=self.rank,
            RANKS=self.ranks,
            BLOCK=BLOCK,
            num_warps=4,
        )

    def release(self) -> None:
        """Let kernels that wait for other ranks end, now and later, with any result."""
        with torch.cuda.device(self._flags.device), torch.cuda.stream(self._releases):
            self._flags.copy_(self._released, non_blocking=True)
