"""Slots for the states of recurrent layers on a GPU, and the launch of the kernels over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch
import triton
from torch import Tensor

from ragcache.attention.triton.launch import StepKind
from ragcache.attention.triton.recurrent_kernels import (
    compose_kernel,
    convolve_kernel,
    gated_norm_kernel,
    recur_kernel,
)
from ragcache.attention.triton.tables import TableViews
from ragcache.machine import new_event
from ragcache.states.recurrent import LayerState, RecurrentStates

COMPOSE_WARPS: Final = 4
"""Warps of a program of the composition."""

COMPOSITIONS_IN_FLIGHT: Final = 64
"""Compositions whose addresses can wait for the device at once."""

COMPOSED_VALUES: Final = 64
"""Columns of a state that a program of the composition has. Each program reads the maps again."""

CHAINS_AT_ONCE: Final = 8
"""Chains of a step of any rows that have programs of their own. Others follow them. A graph has as
many chains as rows, and a question one."""

HEADS_AT_ONCE: Final = 4
"""Heads of a program of the gated norm."""

CHANNELS_AT_ONCE: Final = 256
"""Channels of a program of the convolution."""


class RecurConfig(NamedTuple):
    """Constants of the recurrence: columns of a state that a program has, and its warps."""

    values: int
    warps: int


def choose_recur(kind: StepKind, chains: int) -> RecurConfig:
    """Measured on an H200 for states of 128 x 128. Where each of many requests has one row, reading
    and writing states takes the time. Where rows follow each other, one warp is quicker: no row
    waits for a barrier."""
    return RecurConfig(64, 4) if kind == "decode" and chains >= 16 else RecurConfig(16, 1)


class StateSlot:
    """A place for the states of all recurrent layers behind one text. Free again when nothing
    references it: its readers were launched before its next writer."""

    __slots__ = ("_free", "index")

    def __init__(self, index: int, free: list[int]) -> None:
        self.index, self._free = index, free

    def __del__(self) -> None:
        self._free.append(self.index)


class SlotPool:
    """Slots for recurrent states, allocated at once.

    Attributes:
        windows: Last inputs of the convolutions, [slots, R, channels, kernel].
        states: Recurrent states, float32 [slots, R, H, ...]. Convolutions alone have none.
    """

    def __init__(self, layers: Sequence[LayerState], count: int) -> None:
        """Create a pool.

        Args:
            layers: A state of each recurrent layer, for shapes and dtypes.
            count: Number of slots.
        """
        first = layers[0]
        window = first.convolution[0]
        sizes = count, len(layers)
        self.windows = window.new_empty(*sizes, *window.shape[1:])
        self.states: Tensor | None = None
        if first.recurrent:
            state = first.recurrent[0]
            self.states = state.new_empty(*sizes, *state.shape[1:], dtype=torch.float32)
        self._free = list(range(count - 1, -1, -1))

    def take(self) -> StateSlot:
        """Take a free slot, whose content is not defined. Raises `torch.OutOfMemoryError`."""
        if not self._free:
            raise torch.OutOfMemoryError("no slot for recurrent states is free")
        return StateSlot(self._free.pop(), self._free)

    def layers(self, slot: StateSlot) -> list[LayerState]:
        """The states in a slot, as views."""
        windows = self.windows[slot.index][:, None].unbind(0)
        if self.states is None:
            return [LayerState({0: each}) for each in windows]
        states = self.states[slot.index][:, None].unbind(0)
        return [LayerState({0: w}, {0: s}) for w, s in zip(windows, states, strict=True)]

    def write(self, slot: StateSlot, layers: Sequence[LayerState]) -> None:
        """Copy the states of all recurrent layers into a slot."""
        source = [tensor for each in layers for tensor in each.tensors()]
        target = [tensor for each in self.layers(slot) for tensor in each.tensors()]
        torch._foreach_copy_(target, source)


class RecurrentKernels:
    """Launches the kernels of one model's recurrent layers over the slots of a pool."""

    def __init__(self, pool: SlotPool) -> None:
        self.pool = pool

    def convolve(
        self,
        tables: TableViews,
        layer: int,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        silu: bool,
    ) -> Tensor:
        """Return the convolution of a step's rows, and write the windows behind some of them.

        Args:
            tables: The step's tables.
            layer: Number of the recurrent layer.
            inputs: [1, channels, T], with any strides.
            weight: [channels, kernel].
            bias: [channels], or None.
            silu: Whether to apply SiLU to the result.

        Returns:
            [1, T, channels].
        """
        _, channels, rows = inputs.shape
        out = inputs.new_empty(1, rows, channels)
        windows = self.pool.windows[:, layer]
        block = min(CHANNELS_AT_ONCE, triton.next_power_of_2(channels))
        convolve_kernel[rows, triton.cdiv(channels, block)](
            *(inputs, inputs.stride(1), inputs.stride(2), weight, weight if bias is None else bias),
            *(out, out.stride(1), windows, windows.stride(0)),
            *(tables.chain, tables.row_chain, tables.keep, channels),
            KERNEL=weight.shape[-1],
            SILU=silu,
            BIAS=bias is not None,
            BLOCK=block,
            num_warps=4,
        )
        return out

    def recur(
        self,
        tables: TableViews,
        kind: StepKind,
        chains: int,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        step: Tensor,
        *,
        delta: bool,
        scale: float,
        gates: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Return the outputs of a recurrence, and write the states behind some rows.

        Args:
            tables: The step's tables.
            kind: Of the step.
            chains: The first chains, which are computed.
            layer: Number of the recurrent layer.
            query: [1, T, Hk, dk].
            key: [1, T, Hk, dk].
            value: [1, T, H, dv].
            decay: Logarithms of decays, [1, T, H], or [1, T, H, dk].
            step: Sizes of the steps, [1, T, H].
            delta: Whether it is the delta rule, with queries and keys of length one.
            scale: Factor of the outputs.
            gates: Logarithms of rates, and offsets, both [H], if `decay` and `step` are the
                projections from which decays and steps follow (`recur_kernel`).

        Returns:
            [1, T, H, dv], float32.
        """
        _, rows, heads, width = value.shape
        dim = key.shape[-1]
        out = torch.empty(1, rows, heads, width, dtype=torch.float32, device=value.device)
        assert self.pool.states is not None
        states = self.pool.states[:, layer]
        # a state space keeps its keys, the inputs B, in columns
        inner = (states.stride(2), states.stride(3)) if delta else (1, states.stride(2))
        config = choose_recur(kind, chains)
        block = min(config.values, triton.next_power_of_2(width))
        query, key, value, decay, step = (_dense_heads(x) for x in (query, key, value, decay, step))
        strided = [part for each in (query, key, value, decay, step) for part in _strided(each)]
        programs = chains if kind == "decode" else min(chains, CHAINS_AT_ONCE)
        recur_kernel[programs, heads, triton.cdiv(width, block)](
            *(*strided, out, states, states.stride(0), states.stride(1)),
            *(tables.chain, chains, tables.keep, heads, scale, *(gates or (decay, decay))),
            GROUP=heads // key.shape[2],
            DK=dim,
            DKP=triton.next_power_of_2(dim),
            DV=width,
            BV=block,
            KEY_STRIDE=inner[0],
            VALUE_STRIDE=inner[1],
            DELTA=delta,
            CHANNELS=decay.dim() == 4,
            GATES=gates is not None,
            num_warps=config.warps,
            num_stages=2,
        )
        return out


def normalize_gated(rows: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return rows [1, T, H, dv] with a mean square of one, times `weight` [dv] and the SiLU of
    `gate` [1, T, H, dv], whose dtype the result has."""
    _, count, heads, width = rows.shape
    rows, gate = rows.contiguous(), _dense_heads(gate)
    out = torch.empty(rows.shape, dtype=gate.dtype, device=gate.device)
    together = min(HEADS_AT_ONCE, triton.next_power_of_2(heads))
    gated_norm_kernel[count, triton.cdiv(heads, together)](
        *(rows, *_strided(gate), weight, out, heads, eps),
        DV=width,
        DVP=triton.next_power_of_2(width),
        HEADS=together,
        num_warps=4,
    )
    return out


def _dense_heads(tensor: Tensor) -> Tensor:
    """A tensor [1, T, H, ...] whose last axis is dense, if it has one."""
    return tensor if tensor.dim() == 3 or tensor.stride(3) == 1 else tensor.contiguous()


def _strided(tensor: Tensor) -> tuple[Tensor, int, int]:
    """A tensor [1, T, H, ...] with its strides of a row and of a head."""
    return tensor, tensor.stride(1), tensor.stride(2)


class _ComposeSizes(NamedTuple):
    """Sizes of a composition, which are the same for all of a model."""

    grid: tuple[int, int, int]
    ints: tuple[int, ...]
    constants: dict[str, Any]


class _Places:
    """Uploads the addresses of compositions, through memory that is allocated once: a pinned
    allocation for each takes the host longer than the copy."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._room, self._at = device, 0, 0

    def upload(self, places: Sequence[Sequence[int]]) -> Tensor:
        """Return addresses, [n, 6], on the device, which copies them behind its running work."""
        if self._device.type != "cuda":
            return torch.tensor(places, dtype=torch.int64)
        if len(places) > self._room:
            self._grow(2 * len(places))
        self._at = (self._at + 1) % COMPOSITIONS_IN_FLIGHT
        copied, to = self._copied[self._at], self._target[self._at]
        copied.synchronize()  # seldom waits: so many others were launched since
        self._arrays[self._at, : len(places)] = places
        to.copy_(self._source[self._at], non_blocking=True)
        copied.record()
        return to

    def _grow(self, room: int) -> None:
        torch.cuda.current_stream(self._device).synchronize()
        self._room, shape = max(64, room), (COMPOSITIONS_IN_FLIGHT, max(64, room), 6)
        self._source = torch.zeros(shape, dtype=torch.int64, pin_memory=True)
        self._arrays = self._source.numpy()
        self._target = torch.zeros(shape, dtype=torch.int64, device=self._device)
        self._copied = [new_event() for _ in range(COMPOSITIONS_IN_FLIGHT)]


class Composer:
    """Composes documents into slots by one kernel for all layers, documents and orders.

    Args:
        pool: The slots. Its layers have recurrent states.
        weight: Weights of the convolutions, [R, channels, kernel].
        bias: Their biases, [R, channels], or None.
        delta: Whether the recurrence is the delta rule, or else a state space.
        silu: Whether SiLU follows the convolution.
    """

    def __init__(
        self, pool: SlotPool, weight: Tensor, bias: Tensor | None, *, delta: bool, silu: bool
    ) -> None:
        self.pool, self.weight, self.bias = pool, weight.contiguous(), bias
        self.delta, self.silu = delta, silu
        self._places = _Places(pool.windows.device)
        self._known = WeakKeyDictionary[RecurrentStates, Sequence[int]]()
        self._sizes: _ComposeSizes | None = None
        self._compiled = dict[tuple[int, ...], Any]()

    def fits(self, documents: Sequence[RecurrentStates]) -> bool:
        """Tell whether the kernel composes documents: they are as long as the convolution, of the
        dtype of the windows, and aligned."""
        return all(map(self._addresses, documents))

    def _addresses(self, maps: RecurrentStates) -> Sequence[int]:
        """Addresses of the tensors of a document, as `compose_kernel` takes them. Empty if it does
        not fit."""
        found = self._known.get(maps)
        if found is None:
            kernel = self.weight.shape[-1]
            fits = (
                maps.last.shape[-1] == kernel
                and maps.first.shape[-1] == kernel - 1
                and maps.last.dtype == self.pool.windows.dtype
                and all(_is_aligned(each) for each in maps.tensors().values())
            )
            read = maps.transition, maps.increment, maps.first, maps.last, maps.decays, maps.steps
            found = self._known[maps] = [each.data_ptr() for each in read] if fits else []
        return found

    def compose(
        self,
        orders: Sequence[Sequence[RecurrentStates]],
        before: StateSlot | None,
        into: StateSlot,
    ) -> None:
        """Write the states behind documents into a slot.

        Args:
            orders: The same documents in each order. The first order ends with the prompt's last
                document, whose inputs the convolution sees.
            before: The states before the documents. None begins a text.
            into: The slot.
        """
        states, windows, first = self.pool.states, self.pool.windows, orders[0][0]
        assert states is not None
        places = self._places.upload([self._addresses(each) for order in orders for each in order])
        bias = self.weight if self.bias is None else self.bias
        number = -1 if before is None else before.index
        tensors = places, states, windows, self.weight, bias, first.increment, first.decays
        sizes = self._sizes = self._sizes or self._choose_sizes(channels=first.decays.shape[-1] > 1)
        arguments = (
            *(places, len(orders[0]), states, windows, number, into.index),
            *(self.weight, bias, first.increment, first.decays, *sizes.ints),
        )
        if not windows.is_cuda:
            compose_kernel[sizes.grid](*arguments, ORDERS=len(orders), **sizes.constants)
            return
        # launching a compiled kernel takes the host half the time
        kind = len(orders), *(each.data_ptr() % 16 for each in tensors)
        kernel = self._compiled.get(kind)
        if kernel is None:
            kernel = self._compiled[kind] = compose_kernel.warmup(
                *arguments,
                ORDERS=len(orders),
                **sizes.constants,
                num_warps=COMPOSE_WARPS,
                num_stages=1,
                grid=(1,),
            )
        kernel[sizes.grid](*arguments, len(orders), *sizes.constants.values())

    def _choose_sizes(self, *, channels: bool) -> _ComposeSizes:
        """The sizes of the pool's states and of the weights. `channels`: of the decays."""
        states, (layers, count, kernel) = self.pool.states, self.weight.shape
        assert states is not None
        heads, rows, columns = states.shape[2:]
        dim, width = (rows, columns) if self.delta else (columns, rows)
        keys = (count - heads * width) // (2 * dim)  # heads of queries and keys
        key_at = keys * dim if self.delta else heads * width
        value_at = 2 * keys * dim if self.delta else 0
        blocks = triton.cdiv(width, COMPOSED_VALUES)
        narrow = self.pool.windows.dtype == torch.bfloat16
        return _ComposeSizes(
            (layers, heads, blocks),
            (count, heads, key_at, value_at, rows * columns),
            {  # in the order of the kernel's parameters
                "GROUP": heads // keys,
                "DK": dim,
                "DKP": max(16, triton.next_power_of_2(dim)),
                "DV": width,
                "BV": COMPOSED_VALUES,
                "KEY_STRIDE": columns if self.delta else 1,
                "VALUE_STRIDE": 1 if self.delta else columns,
                "DELTA": self.delta,
                "CHANNELS": channels,
                "KERNEL": kernel,
                "SILU": self.silu,
                "BIAS": self.bias is not None,
                "NARROW": narrow,
                "LAST": triton.next_power_of_2(triton.cdiv(count * kernel, heads * blocks)),
            },
        )


def _is_aligned(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % 16 == 0
