"""Sums and gathers of the GPUs of one host, each one kernel, over memory that all of them map.

Every rank writes its part into its own buffer, waits until the others have written theirs, and
reads all of them over NVLink. Sums are taken in float32 and in the order of ranks, so that every
rank gets the same bits. No multicast is used.

A large sum of more than two ranks takes two shots: each rank adds up one share of all parts, waits
again, and reads the other shares. The bits are the same.

One meeting a call is enough, because calls alternate between two slots of the buffer: a rank that
passes the meeting of call n + 1 has finished reading call n, so that call n + 2 may write the slot
of call n.

A small sum has no meeting. Every rank pushes its part into the memory of the others, and an element
that has arrived is its own flag: an empty place holds -0.0, which is sent as 0.0 (the Lamport
protocol of NCCL's LL and TensorRT-LLM's all-reduce). The reader empties a place after reading it.
One shot computes the same bits.

Two slots are enough for pushes as well. Every kernel, of whatever kind, waits for something that
each other rank's kernel of the same call does, and kernels of a rank run one after another. So a
rank that begins call n + 2 knows that all others began call n + 1, and have read and emptied the
slot of call n.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ragcache.machine import new_stream
from ragcache.models.parallel.peer_memory import SharedMemory

PROGRAMS: Final = 128
"""Most programs of a kernel. All of them must run at once, since they wait for each other."""
BLOCK: Final = 2048
SUM_BYTES: Final = 2**26
"""Largest sum: all of a CUDA graph, and those of two GPUs up to which NCCL was measured slower."""
GRAPH_ROWS: Final = 2048
"""Most rows of a sum of more than two GPUs. NCCL is quicker from 1,024 rows on, but steps of so
many rows are CUDA graphs, which have none of its sums."""
PUSH_BYTES: Final = 2**21
"""Largest part that is pushed to one or three others, up to which shots were measured slower. For
more of them it is smaller by as much as they are more."""
GATHER_BYTES: Final = 2**27
BROADCAST_BYTES: Final = 2**16
_GATHER_SLOT, _BROADCAST_SLOT, _PUSH_SLOT = 2, 3, 4
_RELEASED: Final = 2**24
"""Value of a flag that no rank has to raise any more."""
_EMPTY: Final = {torch.int16: 0x8000 - 2**16, torch.int32: 0x80008000 - 2**32}
"""Bits of an empty place, by the integers that elements are pushed as: -0.0 in 16 bits. Two of them
are a subnormal float32, -4.6e-41, so that a slot is empty for either width."""
_WORDS: Final = {2: torch.int16, 4: torch.int32}

Way = Literal["push", "one-shot", "two-shot"]
"""How a sum is made."""


class PushLaunch(NamedTuple):
    """How the kernel of pushed sums is launched."""

    block: int = 1024
    """Elements, at least one a thread: a thread must not see an element that another one sees."""
    warps: int = 2
    programs: int = 512
    """Most programs. They need not run at once: each waits for the same one of the others alone."""


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
        total = _add(tl.load(residual + at, mask=inside), total)
    tl.store(out + at, total, mask=inside)


@triton.jit
def _add(before, total):
    """The residual and a rounded sum, rounded."""
    return (before.to(tl.float32) + total.to(tl.float32)).to(total.dtype)


@triton.jit
def push_kernel(
    local,
    residual,
    buffers,
    signals,
    out,
    numel,
    slot,
    stride,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    EMPTY: tl.constexpr,
    ADD: tl.constexpr,
):
    """out = the sum of all ranks' parts, rounded, and of the residual with ADD.

    local, buffers: Elements as integers of their width, so that -0.0 and NaN are bits.
    stride: Elements between the parts of two ranks in a slot.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    here = tl.arange(0, BLOCK)
    for begin in range(program * BLOCK, numel, programs * BLOCK):
        at, inside = begin + here, begin + here < numel
        sent = _sendable(tl.load(local + at, mask=inside), EMPTY)
        for step in tl.static_range(1, RANKS):  # every rank begins with another one
            theirs = tl.load(buffers + (RANK + step) % RANKS).to(local.dtype)
            theirs = tl.multiple_of(theirs + slot + RANK * stride, 16)
            tl.store(theirs + at, sent, mask=inside)
    received = tl.multiple_of(tl.load(buffers + RANK).to(local.dtype) + slot, 16)
    own_flag = tl.load(signals + RANK).to(tl.pointer_type(tl.int32)) + RANK  # raised by a release
    for begin in range(program * BLOCK, numel, programs * BLOCK):
        at, inside = begin + here, begin + here < numel
        own = _sendable(tl.load(local + at, mask=inside, other=0), EMPTY)
        if ADD:
            before = tl.load(residual + at, mask=inside)
        total, missing = tl.zeros((BLOCK,), dtype=tl.float32), 1
        while missing > 0:
            total, missing = _sum_received(
                own,
                received,
                own_flag,
                at,
                inside,
                stride,
                out.dtype.element_ty,
                RANK,
                RANKS,
                BLOCK,
                EMPTY,
            )
        rounded = total.to(out.dtype.element_ty)
        if ADD:
            rounded = _add(before, rounded)
        tl.store(out + at, rounded, mask=inside)
        for step in tl.static_range(1, RANKS):
            place = tl.multiple_of(received + (RANK + step) % RANKS * stride, 16) + at
            tl.store(place, tl.full((BLOCK,), EMPTY, local.dtype.element_ty), mask=inside)


@triton.jit
def _sendable(bits, EMPTY: tl.constexpr):
    """Elements, with 0.0 instead of an empty place's bits."""
    return tl.where(bits == EMPTY, 0, bits).to(bits.dtype)


@triton.jit
def _sum_received(
    own,
    received,
    own_flag,
    at,
    inside,
    stride,
    kind: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    EMPTY: tl.constexpr,
):
    """The sum of a block, and 1 while elements are missing. Every thread sums the registers that it
    checks, and all threads get the same answer."""
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    empty = tl.zeros((BLOCK,), dtype=tl.int1)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            bits = own
        else:
            place = tl.multiple_of(received + rank * stride, 16) + at
            bits = tl.load(place, mask=inside, other=0, volatile=True)
            empty = empty | (bits == EMPTY)
        total += bits.to(kind, bitcast=True).to(tl.float32)
    waited_for = tl.load(own_flag, volatile=True) == 0
    return total, tl.max((empty & waited_for).to(tl.int32), axis=0)


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


def most_pushed(push_bytes: int, ranks: int) -> int:
    """Return the bytes of the largest part that so many ranks push, aligned (`PUSH_BYTES`)."""
    return 4 * push_bytes // max(4, ranks) // 16 * 16


class OneShot:
    """Buffers and flags that all ranks map.

    Args:
        group: Process group of the ranks, with NCCL for their devices.
        rank: Number of this process.
        ranks: Number of processes.
        device: The GPU of this process, among all visible ones.
        sum_bytes: Bytes of the largest sum.
        push_bytes: Largest part that is pushed, as `PUSH_BYTES`. 0 leaves all sums to shots.
    """

    def __init__(
        self,
        group: Any,
        rank: int,
        ranks: int,
        device: torch.device,
        sum_bytes: int = SUM_BYTES,
        push_bytes: int = PUSH_BYTES,
    ) -> None:
        self.rank, self.ranks, self._next = rank, ranks, 0
        self._sum_bytes = sum_bytes
        self._pushed_bytes = most_pushed(push_bytes, ranks)
        self.push_launch = PushLaunch()
        area = ranks * self._pushed_bytes
        flags = 4 * PROGRAMS * ranks
        slots = (sum_bytes, sum_bytes, GATHER_BYTES, BROADCAST_BYTES, area, area, flags)
        self._begins = [sum(slots[:number]) for number in range(len(slots))]
        pushes, end = self._begins[_PUSH_SLOT], self._begins[-1]
        self._peers = SharedMemory(sum(slots), group, device)
        self._memory, begins = self._peers.tensor, torch.tensor(self._peers.addresses)
        self._memory[pushes:end].view(torch.int32).fill_(_EMPTY[torch.int32])
        self._flags = self._memory[end:].view(torch.int32)
        self._buffers, self._signals = begins.to(device), (begins + end).to(device)
        self._releases = new_stream(device)
        self._released = torch.full((PROGRAMS * ranks,), _RELEASED, dtype=torch.int32).pin_memory()
        torch.cuda.synchronize(device)
        torch.distributed.barrier(group)

    def holds(self, rows: int, nbytes: int) -> bool:
        """Whether a sum of so many rows and bytes is made here, and not by NCCL."""
        return nbytes <= self._sum_bytes and (self.ranks == 2 or rows <= GRAPH_ROWS)

    def gathers(self, part: Tensor) -> bool:
        """Whether a gather fits into its slot."""
        return part.nbytes <= GATHER_BYTES

    def passes(self, tensor: Tensor) -> bool:
        """Whether a broadcast fits into its slot."""
        return tensor.nbytes <= BROADCAST_BYTES and tensor.is_contiguous()

    def begin_pass(self) -> None:
        """Take the first slot again. A pass whose capture has failed may have taken an odd number
        of them, on this rank alone."""
        self._next = 0

    def way(self, nbytes: int) -> Way:
        """Return how a sum of so many bytes is made.

        One shot reads ranks - 1 parts of others. Two read 2 (ranks - 1) / ranks of a part.
        """
        if nbytes <= self._pushed_bytes:
            return "push"
        return "one-shot" if self.ranks == 2 else "two-shot"

    def room(self, shape: tuple[int, ...], dtype: torch.dtype, way: Way | None = None) -> Tensor:
        """Return memory for a product to write its part of the next sum into.

        It is a view of the next slot, or plain memory if the sum is pushed.

        Args:
            shape: Shape of the part.
            dtype: Type of the part.
            way: The `way` that `sum_parts` is given.
        """
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if (way or self.way(nbytes)) == "push":
            return torch.empty(shape, dtype=dtype, device=self._memory.device)
        begin = self._begins[self._next]
        return self._memory[begin : begin + nbytes].view(dtype).view(shape)

    def sum_parts(
        self,
        part: Tensor,
        residual: Tensor | None = None,
        *,
        copy: bool = True,
        way: Way | None = None,
    ) -> Tensor:
        """Return the sum of all ranks' parts, and of a residual.

        Args:
            part: This rank's part, of equal size on every rank.
            residual: A tensor of the same size, which is the same on every rank.
            copy: Whether the part is not in `room`.
            way: How the sum is made. Defaults to the way that suits the size.
        """
        way = way or self.way(part.nbytes)
        slot, self._next = self._next, 1 - self._next
        if way == "push":
            return self._push(part, residual, slot)
        out, numel = torch.empty_like(part), part.numel()
        shares = self.ranks if way == "two-shot" else 1
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

    def _push(self, part: Tensor, residual: Tensor | None, slot: int) -> Tensor:
        out, numel, itemsize = torch.empty_like(part), part.numel(), part.element_size()
        block, warps, programs = self.push_launch
        word = _WORDS[itemsize]
        push_kernel[min(programs, triton.cdiv(numel, block)),](
            part.view(word),
            out if residual is None else residual.contiguous(),
            self._buffers,
            self._signals,
            out,
            numel,
            self._begins[_PUSH_SLOT + slot] // itemsize,
            self._pushed_bytes // itemsize,
            RANK=self.rank,
            RANKS=self.ranks,
            BLOCK=block,
            EMPTY=_EMPTY[word],
            ADD=residual is not None,
            num_warps=warps,
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
