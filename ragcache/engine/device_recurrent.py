"""The model runner of a GPU for models with recurrent layers.

Recurrent states are in slots (`ragcache.attention.triton.recurrent_launch`). A step reads the slot
of a request's state and writes a new one, so that one captured graph serves any requests. Documents
are composed into a slot before the step that computes the tokens behind them. Modules are encoded
by transformers' own recurrences, which are recorded, in passes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ragcache.attention.recurrent import RecurrentBatch, RecurrentRun
from ragcache.attention.recurrent_maps import DELTA_RULE
from ragcache.attention.triton.launch import StepKind
from ragcache.attention.triton.recurrent_launch import (
    Composer,
    RecurrentKernels,
    SlotPool,
    StateSlot,
)
from ragcache.attention.triton.tables import AttentionTables
from ragcache.engine.batch import ScheduledChunk, await_segments
from ragcache.engine.contiguous_kv import EncodedKV
from ragcache.engine.decode_batch import DecodeBatch
from ragcache.engine.device_runner import DeviceLaunch, DeviceModelRunner, StepAttention
from ragcache.engine.recurrent import RecurrentTable
from ragcache.models import CausalLM, ForwardBatch
from ragcache.models.composition import (
    compose_layers,
    convolutions_of,
    orders_of,
    recurrence_of,
)
from ragcache.models.recurrent import HybridLM, recurrent_mixers
from ragcache.states.recurrent import LayerState, RecurrentSnapshot

MOST_CHAINS = 64
"""Requests of a step of any rows that a graph has programs for. Other steps run eagerly."""


@dataclass(slots=True, eq=False)
class _HybridStep(StepAttention):
    """The operators of a step whose model has recurrent layers (`RecurrentStep`)."""

    recurrent: RecurrentKernels | None = None
    chains: int = 0

    def convolve(
        self, layer: int, inputs: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool
    ) -> Tensor:
        """See `RecurrentStep.convolve`."""
        assert self.recurrent is not None
        return self.recurrent.convolve(self.tables.views, layer, inputs, weight, bias, silu=silu)

    def recur(
        self,
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
        """See `RecurrentStep.recur`."""
        assert self.recurrent is not None
        inputs = query, key, value, decay, step
        states = self.tables.views, self.kind, self.chains
        return self.recurrent.recur(*states, layer, *inputs, delta=delta, scale=scale, gates=gates)


@dataclass(frozen=True, slots=True)
class _OpenedText:
    """A request's rows of a step, beside the decode batch."""

    runs: Sequence[RecurrentRun]
    slot: StateSlot | None
    """Slot of the state before the rows, behind the documents there."""


class HybridDeviceRunner(DeviceModelRunner):
    """Computes the steps of a model with recurrent layers. See `DeviceModelRunner`."""

    model: HybridLM
    _step: _HybridStep

    def __init__(self, model: CausalLM, **options: Any) -> None:
        assert isinstance(model, HybridLM)
        super().__init__(model, **options)
        self._slots: SlotPool | None = None
        self._composer: Composer | None = None
        self._decoding = DecodeBatch()
        self._chains: int | None = None  # of an eager step
        self._texts: list[_OpenedText] = []  # of the next step, behind the decode batch
        self._held: list[_OpenedText] = []  # of the last step, whose slots it reads

    def create_slots(self, count: int) -> None:
        """See `ModelRunner.create_slots`."""
        self._slots = SlotPool(self.model.layer_states(), count)
        self._step.recurrent = RecurrentKernels(self._slots)
        self._composer = new_composer(self._mixers, self._slots)

    def prepare_batch(
        self,
        chunks: Sequence[ScheduledChunk],
        previous: Tensor | None = None,
        decoding: DecodeBatch | None = None,
    ) -> Callable[[], Tensor]:
        """See `DeviceModelRunner.prepare_batch`. Encodings are launched at once."""
        encoded = [each for each in chunks if isinstance(each.private, EncodedKV)]
        if encoded:
            chunks = [each for each in chunks if not isinstance(each.private, EncodedKV)]
            logits = self._encode(encoded)
            if not chunks and not (decoding and decoding.rows):
                return lambda: logits
        await_segments(chunks, self.device)
        self._decoding = decoding or DecodeBatch()
        self._texts = self._open(chunks)  # documents compose while the host plans
        return super().prepare_batch(chunks, previous, decoding)

    def release_batch(self) -> None:
        """See `ModelRunner.release_batch`."""
        super().release_batch()
        self._decoding, self._texts, self._held = DecodeBatch(), [], []

    def _new_step(self) -> StepAttention:
        return _HybridStep(self._kernels, self._tables)

    @cached_property
    def _mixers(self) -> list[nn.Module]:
        return list(recurrent_mixers(self.model.model))

    def _plan(self, chunks: Sequence[ScheduledChunk], decoding: DecodeBatch) -> DeviceLaunch:
        """See `DeviceModelRunner._plan`."""
        launch = super()._plan(chunks, decoding)
        if launch.batch.kind == "mixed" and decoding.rows + len(chunks) > MOST_CHAINS:
            launch.bucket = None
        return launch

    def _run(self, launch: DeviceLaunch, previous: Tensor | None) -> Tensor:
        """See `DeviceModelRunner._run`."""
        self._place_states(launch)
        return super()._run(launch, previous)

    def _compute(self, kind: StepKind, tables: AttentionTables, rows: int, logits: int) -> Tensor:
        """See `DeviceModelRunner._compute`."""
        step, most = self._step, rows if kind == "decode" else min(rows, MOST_CHAINS)
        step.chains = most if self._chains is None else self._chains
        return super()._compute(kind, tables, rows, logits)

    def _open(self, chunks: Sequence[ScheduledChunk]) -> list[_OpenedText]:
        """Compose the documents before chunks, whose rows follow the decode batch."""
        opened, row = list[_OpenedText](), self._decoding.rows
        for chunk in chunks:
            assert isinstance(chunk.private, RecurrentTable)
            runs = chunk.private.runs(row, row + len(chunk.position_ids))
            opened.append(_OpenedText(runs, self._slot_before(runs[0])))
            row = runs[-1].end
        return opened

    def _place_states(self, launch: DeviceLaunch) -> None:
        """Take slots for the states behind the rows, and lay them out for the upload."""
        chains, keep = list[tuple[int, int, int]](), list[tuple[int, int]]()
        for row, table in enumerate(self._decoding.tables):
            assert isinstance(table, RecurrentTable)
            before, behind = table.step()
            chains.append((row, row + 1, _slot_of(before).index))
            keep.append((row, self._take(behind).index))
        for text in self._texts:
            begin, end = text.runs[0].begin, text.runs[-1].end
            chains.append((begin, end, -1 if text.slot is None else text.slot.index))
            keep += [(run.end - 1, self._take(run.after).index) for run in text.runs]
        self._held = self._texts
        self._chains = None if launch.bucket is not None else len(chains)
        rows = chains[-1][1] if chains else 0
        launch.tables.set_chains(chains, keep, rows)

    def _take(self, snapshot: RecurrentSnapshot) -> StateSlot:
        """Give a snapshot a slot."""
        assert self._slots is not None
        slot = self._slots.take()
        snapshot.slot = slot
        return slot

    @torch.inference_mode()
    def _slot_before(self, run: RecurrentRun) -> StateSlot | None:
        """The slot of the state before a request's rows, into which its documents are composed."""
        before = None if run.before is None else _slot_of(run.before)
        if not run.documents:
            return before
        assert self._slots is not None
        slot = self._take(run.composed or RecurrentSnapshot())
        if self._composer is not None and self._composer.fits(run.documents):
            orders = orders_of(run.documents, begins=before is None, both=run.both)
            self._composer.compose(orders, before, slot)
            return slot
        if before is None:
            states = [LayerState() for _ in self._mixers]
        else:
            states = self._slots.layers(before)
        found = compose_layers(self._mixers, states, run.documents, both=run.both)
        self._slots.write(slot, found)
        return slot

    def _encode(self, chunks: Sequence[ScheduledChunk]) -> Tensor:
        """Launch a pass over modules that are encoded."""
        self._prepare()
        self._last = None
        await_segments(chunks, self.device)
        launch = super()._plan(chunks, DecodeBatch())
        self._upload(launch, None)
        runs, row = list[RecurrentRun](), 0
        for chunk in chunks:
            assert isinstance(chunk.private, EncodedKV)
            runs += chunk.private.runs(row, row + len(chunk.position_ids))
            row = runs[-1].end
        step, views = self._step, launch.tables.views
        step.kind, step.tables = launch.batch.kind, launch.tables
        step.kernels = self._kernels if launch.tables is self._tables else self._eager_kernels
        inputs = views.token_ids[:row], views.position_ids[:row], views.logit_rows[:0]
        recurrent = RecurrentBatch(runs, self.device)
        with step.with_reads(squares=launch.squares):
            return self.model.forward(ForwardBatch(*inputs, self._metadata, recurrent))


def _slot_of(snapshot: RecurrentSnapshot) -> StateSlot:
    assert isinstance(snapshot.slot, StateSlot)
    return snapshot.slot


def new_composer(mixers: Sequence[nn.Module], slots: SlotPool) -> Composer | None:
    """Create the composer of a model. Layers that are a convolution alone have no maps, and other
    activations than SiLU no kernel."""
    recurrence, activation = recurrence_of(mixers[0]), getattr(mixers[0], "activation", None)
    if recurrence is None or activation not in (None, "silu", "swish"):
        return None
    weight, bias = convolutions_of(mixers)
    delta, silu = recurrence is DELTA_RULE, activation is not None
    return Composer(slots, weight, bias, delta=delta, silu=silu)
