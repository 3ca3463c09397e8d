"""The device tier: states in GPU memory, within a budget that is reserved once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ragcache.config import parse_optional_bytes
from ragcache.errors import StoreBudgetExceeded, StoreFull
from ragcache.states import Arrival, KVKey
from ragcache.states.kv import CopyEvent, capture_lock
from ragcache.states.quantization import (
    KVDtype,
    QuantizedStates,
    StoredStates,
    model_dtype,
    quantize,
    rebuild,
    tensors_of,
)
from ragcache.store.tiers.base import MemoryTier, check_budget
from ragcache.store.tiers.ranks import CopyTensor, RankCopies, Way, copy_tensor, own_heads
from ragcache.store.tiers.slabs import ALIGNMENT, SLAB_BYTES, Extent, SlabPool, rounded
from ragcache.store.tiers.streams import DeviceStreams, indexed
from ragcache.tiers import TIERS, TierOptions

_PIECE = 1 << 21  # bytes from which a copy nearly reaches the bandwidth of the bus
_DIFFERENCE = 1 << 29  # bytes by which the free memory of two devices may differ
_PIECES = 8  # minimum number of pieces of that size: a step starts after the first one


@dataclass(slots=True, eq=False)
class _Memory:
    """An extent in use."""

    extent: Extent
    arrival: Arrival | None = None
    """Arrival of the states that are copied into it, once it is known."""


@dataclass(slots=True, eq=False)
class _Freed:
    """An extent without references that queued work may still read or write."""

    memory: _Memory
    read: CopyEvent | None
    """End of the work that was queued on the compute stream when the extent was freed."""

    def is_idle(self) -> bool:
        """Return whether all work on the extent has ended."""
        arrival = self.memory.arrival
        return (self.read is None or self.read.query()) and (arrival is None or arrival.ready())

    def order(self, streams: DeviceStreams) -> None:
        """Make work that is queued later wait for the work on the extent."""
        if self.read is not None:
            self.read.wait(streams.upload)
        if self.memory.arrival is not None:
            with capture_lock:
                self.memory.arrival.wait(streams.compute)


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """A copy of states to views of an extent."""

    source: StoredStates
    target: dict[str, Tensor]
    """Views of the extent by tensor name."""
    memory: _Memory

    @property
    def num_layers(self) -> int:
        return int(self.source.keys.shape[0])

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's keys as they are transferred."""
        return self.source.keys.nbytes // max(1, self.num_layers)

    def copy_layers(self, begin: int, end: int, copy: CopyTensor) -> None:
        """Queue the copy of layers begin:end. Restores int8 states on the device if needed.

        The states of recurrent layers are copied with the first layer.
        """
        layers, source = slice(begin, end), self.source
        if source.recurrent is not None:
            if begin == 0:
                for name, tensor in source.recurrent.tensors().items():
                    copy(self.target[name], tensor)
            source = replace(source, recurrent=None)
        parts = {name: tensor[layers] for name, tensor in tensors_of(source).items()}
        if isinstance(source, QuantizedStates) and "key_scales" not in self.target:
            device = self.target["keys"].device
            there = {name: part.to(device, non_blocking=True) for name, part in parts.items()}
            parts = tensors_of(rebuild(there, source.start, source.dtype).restore())
        for name, part in parts.items():
            copy(self.target[name][layers], part)

    def states(self) -> StoredStates:
        """Return the copied states, with their arrival."""
        source = self.source
        arrival = self.memory.arrival
        return rebuild(self.target, source.start, model_dtype(source), arrival)


class DeviceTier(MemoryTier):
    """States on one device, as views of a slab that is reserved when the tier is created.

    A `put` from main memory queues its copies layer by layer on an upload stream and returns.
    `KVStates.arrival` tells when a layer can be read. The entries of one `put_all` are copied side
    by side, so that a step over all of them can follow the copies. States computed on the device
    are copied in the order of the engine's stream, which does not have to wait.

    An extent counts as used until nothing refers to its states. It is written again only after all
    work that the engine's stream had queued by then. The host never waits for this. With
    `device="cpu"` the tier is a second host tier, for tests.
    """

    name = "device"
    traits = TIERS["device"].traits

    def __init__(
        self,
        budget_bytes: int | None,
        device: torch.device | str,
        *,
        kv_dtype: KVDtype = "model",
        streams: DeviceStreams | None = None,
        ranks: RankCopies | None = None,
    ) -> None:
        """Create the tier and reserve its budget.

        Args:
            budget_bytes: Budget. With None, all memory that is free when `bind` is called.
            device: Device of the states.
            kv_dtype: `model`, or `int8` for a GPU whose attention reads int8 states.
            streams: Streams of the device. Defaults to new ones on a GPU.
            ranks: Copies on several devices, each of which has states of its own heads. The budget
                is then that of each device.

        Raises:
            StoreFull: The device has no room for the budget.
        """
        super().__init__()
        self.budget_bytes: int | None = 0
        self.kv_dtype = kv_dtype
        self.device = indexed(torch.device(device))
        self._streams, self._ranks = streams, ranks
        self._pool = SlabPool(0, self._reserve)
        if self.device.type == "cuda":
            self._streams = streams or DeviceStreams(self.device)
        self.traits = replace(self.traits, on_gpu=self._streams is not None)
        if budget_bytes is not None:
            self._set_budget(budget_bytes)
        self._used = 0
        self._ended: deque[_Memory] = deque()  # filled by finalizers at any time
        self._freed: deque[_Freed] = deque()
        self._arriving: deque[Arrival] = deque()  # keep the sources alive

    @classmethod
    def from_options(
        cls, options: TierOptions, device: torch.device, ranks: RankCopies | None = None
    ) -> DeviceTier | None:
        if options.device_bytes is None and device.type != "cuda":
            return None
        budget = parse_optional_bytes(options.device_bytes)
        return cls(budget, device, kv_dtype=options.device_kv_dtype, ranks=ranks)

    @property
    def used_bytes(self) -> int:
        self.settle()
        return self._used

    def is_computed(self, states: StoredStates) -> bool:
        return self._streams is not None and self._streams.holds(states.keys)

    def bind(self, stream: Any, keep_free: int) -> None:
        """Read states on the engine's stream from now on.

        A tier without a budget reserves all free memory of the GPU except `keep_free` bytes.
        """
        if self._streams is not None and stream is not None:
            self._streams.compute = stream
        if self.traits.on_gpu and not self.budget_bytes:
            with capture_lock:  # freeing memory synchronizes, which a capture forbids
                torch.cuda.empty_cache()
                free, _ = torch.cuda.mem_get_info(self.device)
                if self._ranks is None:
                    self._set_budget(max(0, free - keep_free))
            if self._ranks is not None:  # allocates on all devices, in the order of their work
                self._set_budget(max(0, free - keep_free - _DIFFERENCE))

    def _set_budget(self, nbytes: int) -> None:
        """Set the budget. On a GPU, reserve it at once as one slab.

        Components that are sized by free memory then see it as used.
        """
        self.budget_bytes = nbytes
        slab_bytes = max(nbytes, SLAB_BYTES) if self.traits.on_gpu else SLAB_BYTES
        self._pool = SlabPool(nbytes, self._reserve, slab_bytes)
        if self.traits.on_gpu and nbytes:
            self._pool.grow(1)

    def size_of(self, states: StoredStates) -> int:
        states = own_heads(states, self._ranks)
        kept = states.keys, states.values
        itemsize = model_dtype(states).itemsize if self.kv_dtype == "model" else 1
        numbers = sum(rounded(itemsize * each.numel()) for each in kept)
        if states.recurrent is not None:
            numbers += sum(rounded(each.nbytes) for each in states.recurrent.tensors().values())
        if self.kv_dtype == "model":
            return max(ALIGNMENT, numbers)
        layers, heads, tokens, size = states.keys.shape
        scales = torch.float32.itemsize * layers * heads
        return max(ALIGNMENT, rounded(scales * size) + rounded(scales * tokens) + numbers)

    def put(self, key: KVKey, states: StoredStates) -> int:
        return self.put_all([(key, states)])[0]

    def put_all(self, entries: Sequence[tuple[KVKey, StoredStates]]) -> list[int]:
        """Store several states, all or none: layer l of all entries before layer l + 1 of any."""
        sources = [states for _, states in entries]
        if self.kv_dtype != "model":  # `model` states are restored by the device, in the copy
            sources = [quantize(states, self.kv_dtype) for states in sources]
        with self._lock:
            copies = self._begin(sources)
            try:
                self._copy_computed([copy for copy in copies if self.is_computed(copy.source)])
                self._upload([copy for copy in copies if not self.is_computed(copy.source)])
            except torch.OutOfMemoryError as error:
                if self._streams is not None:  # some copies may be queued
                    self._note_arrival(copies, [self._streams.record(self._streams.upload)])
                raise StoreFull(
                    f"{self.device} has no room to restore states: its tier takes {self._used:,} "
                    "bytes; lower device_bytes"
                ) from error
            for (key, _), copy in zip(entries, copies, strict=True):
                self._states[key] = copy.states()
            return [copy.memory.extent.nbytes for copy in copies]

    def delete(self, key: KVKey) -> None:
        super().delete(key)
        self.settle()

    def _reserve(self, nbytes: int) -> Tensor:
        try:
            # zeros: padding that is read together with states must be finite
            if self._ranks is not None:
                slab = self._ranks.new_memory(nbytes)
            else:
                slab = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            raise StoreFull(
                f"{self.device} has no room for {nbytes:,} bytes of states; lower device_bytes"
            ) from error
        if slab.is_cuda:  # other streams write to it
            torch.cuda.current_stream(self.device).synchronize()
        return slab

    def _begin(self, sources: Sequence[StoredStates]) -> list[_Copy]:
        """Allocate an extent for each source. Raises `StoreBudgetExceeded`."""
        self.settle()
        own = [own_heads(states, self._ranks) for states in sources]
        shapes = [_target_shapes(states, self.kv_dtype) for states in own]
        sizes = [sum(rounded(nbytes) for _, _, nbytes in each.values()) for each in shapes]
        check_budget(self.name, self.budget_bytes, self._used, sum(sizes))
        copies = []
        for states, shape, memory in zip(sources, shapes, self._take(sizes), strict=True):
            end = partial(self._ended.append, memory)
            room, at, target = self._pool.memory(memory.extent, end), 0, {}
            for name, (size, dtype, nbytes) in shape.items():
                target[name] = room[at : at + nbytes].view(dtype).view(size)
                at += rounded(nbytes)
            copies.append(_Copy(states, target, memory))
        return copies

    def _take(self, sizes: Sequence[int]) -> list[_Memory]:
        taken: list[_Memory] = []
        for nbytes in sizes:
            extent = self._pool.take(nbytes)
            while extent is None and self._freed:
                assert self._streams is not None
                freed = self._freed.popleft()
                freed.order(self._streams)
                self._pool.give_back(freed.memory.extent)
                extent = self._pool.take(nbytes)
            if extent is None:
                for memory in taken:
                    self._pool.give_back(memory.extent)
                raise StoreBudgetExceeded(
                    f"the device tier may hold {self.budget_bytes:,} bytes, of which {self._used:,}"
                    f" are taken; {nbytes:,} more are not free in one piece. Raise device_bytes"
                )
            taken.append(_Memory(extent))
        self._used += sum(memory.extent.nbytes for memory in taken)
        return taken

    def settle(self) -> None:
        with self._lock:
            ended = len(self._ended)  # before the event: later ends may have later reads
            if ended:
                streams = self._streams
                read = None if streams is None else streams.record(streams.compute)
                for _ in range(ended):
                    memory = self._ended.popleft()
                    self._used -= memory.extent.nbytes
                    self._freed.append(_Freed(memory, read))
            while self._freed and self._freed[0].is_idle():
                self._pool.give_back(self._freed.popleft().memory.extent)
            while self._arriving and self._arriving[0].ready():
                self._arriving.popleft()

    def _copy_computed(self, copies: Sequence[_Copy]) -> None:
        """Copy states computed on this device, in the order of the engine's stream.

        The copies follow all work that the calling thread has queued.
        """
        streams = self._streams
        if not copies or streams is None:
            return
        with self._copying("compute") as (copy_tensor, _):
            streams.follow_thread()
            with streams.on(streams.compute):
                for copy in copies:
                    if copy.source.arrival is not None:
                        copy.source.arrival.wait(streams.compute)
                    copy.copy_layers(0, copy.num_layers, copy_tensor)
        event = streams.record(streams.compute)
        self._note_arrival(copies, [event], stream=streams.compute)

    def _upload(self, copies: Sequence[_Copy]) -> None:
        """Queue copies from main memory, with an event after every few layers of all states.

        Without streams the copies have ended on return.
        """
        if not copies:
            return
        streams = self._streams
        layers = max(copy.num_layers for copy in copies)
        if streams is None:
            with self._copying("compute") as (copy_of_ranks, _):
                for copy in copies:
                    copy.copy_layers(0, layers, copy_of_ranks)
            return
        of_layer = max(1, sum(copy.layer_bytes for copy in copies) // len(copies))
        ends = _piece_ends(layers, fewest=-(-_PIECE // of_layer))
        if self._ranks is not None:
            self._upload_on_ranks(copies, ends, self._ranks, streams)
            return
        events = list[CopyEvent]()
        for begin, end in pairwise([0, *ends]):
            with streams.on(streams.upload):
                for copy in copies:
                    copy.copy_layers(begin, end, copy_tensor)
            events.append(streams.record(streams.upload))
        self._note_arrival(copies, events, ends)

    def _upload_on_ranks(
        self,
        copies: Sequence[_Copy],
        ends: Sequence[int],
        ranks: RankCopies,
        streams: DeviceStreams,
    ) -> None:
        pairs = [
            (copy.target[name], tensor)
            for copy in copies
            for name, tensor in tensors_of(copy.source).items()
        ]
        with streams.on(streams.upload):
            events, number = ranks.upload(pairs, ends, lambda: streams.record(streams.upload))
        ours = events[-1]
        events[-1] = ranks.event(ours, "upload", number)
        ranks.note_arrival(self._note_arrival(copies, events, ends), number, ours)

    def _copying(self, way: Way) -> AbstractContextManager[tuple[CopyTensor, int]]:
        """A function that copies tensors, on all ranks if there are several."""
        if self._ranks is None:
            return nullcontext((copy_tensor, 0))
        return self._ranks.copying(way)

    def _note_arrival(
        self,
        copies: Sequence[_Copy],
        events: Sequence[CopyEvent],
        ends: Sequence[int] = (),
        stream: Any = None,
    ) -> Arrival:
        arrival = Arrival(events, ends, [copy.source for copy in copies], stream)
        self._arriving.append(arrival)
        for copy in copies:
            copy.memory.arrival = arrival
        return arrival


def _piece_ends(layers: int, fewest: int) -> list[int]:
    """Return the layers at which the pieces of a copy end.

    Work after the last piece is not hidden by the copy. Pieces therefore become shorter towards the
    end, down to `fewest` layers.
    """
    ends, end = list[int](), 0
    while end < layers:
        end += max(fewest, min(layers // _PIECES, (layers - end) // 2), 1)
        ends.append(min(end, layers))
    return ends


_Shape = tuple[torch.Size, torch.dtype, int]


def _target_shapes(states: StoredStates, kv_dtype: KVDtype) -> dict[str, _Shape]:
    """Return shape, dtype and bytes of each tensor that a tier of this `kv_dtype` stores."""
    shapes = {name: (t.shape, t.dtype, t.nbytes) for name, t in tensors_of(states).items()}
    if kv_dtype == "int8" and isinstance(states, QuantizedStates):
        return shapes
    dtype = model_dtype(states)
    for name in ("keys", "values"):
        kept = getattr(states, name)
        shapes[name] = (kept.shape, dtype, kept.numel() * dtype.itemsize)
    return {name: shape for name, shape in shapes.items() if not name.endswith("_scales")}
