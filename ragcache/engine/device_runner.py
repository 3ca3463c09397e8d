"""The model runner of a GPU: one stream, static tables, and CUDA graphs by row bucket.

A step is laid out in tables with fixed addresses (`ragcache.attention.triton.tables`), so that one
captured graph serves any requests, documents and orders. Steps that fit no graph run eagerly, over
tables of their own: encodings and many questions at once, whose launches hide behind their
products, and steps whose states are still being copied from main memory, which wait for them layer
by layer.

The host never waits for the device, except to replace tables or kernels. Everything that reads a
step's logits is launched behind it on the same stream.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragcache.attention import Rotation
from ragcache.attention.triton.latent_launch import LatentKernels
from ragcache.attention.triton.launch import RotationTables, StepKind, TritonKernels
from ragcache.attention.triton.operator import OperatorMetadata, register_step
from ragcache.attention.triton.plan import (
    HeadLayout,
    Square,
    TableCapacity,
    TableOverflow,
    build_plan,
)
from ragcache.attention.triton.squares import FEWEST_ROWS as SQUARE_ROWS
from ragcache.attention.triton.squares import prepare_squares
from ragcache.attention.triton.tables import AttentionTables
from ragcache.engine.batch import ScheduledChunk
from ragcache.engine.decode_batch import DecodeBatch
from ragcache.engine.device_batch import MAX_TAIL_BLOCKS, DeviceBatch, DevicePlanner
from ragcache.engine.kv_cache import BLOCK_SIZE, BlockPool
from ragcache.engine.request import Segment
from ragcache.engine.sampler import Sampler
from ragcache.machine import new_stream
from ragcache.models import CausalLM, ForwardBatch, LayeredRotary, Rotary
from ragcache.models.compiled import FEWEST_ROWS, no_recompiles, prepare_for_device
from ragcache.models.experts import only_live_rows
from ragcache.states.kv import Arrival, capture_lock
from ragcache.states.quantization import QuantizedStates

logger = logging.getLogger(__name__)

_FEW_ROWS = (8, 16, 32, 64, 96, 128, 160, 176, 192)  # 176 rows take 8 % less than 192
BUCKETS: dict[StepKind, tuple[int, ...]] = {
    "decode": (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256),
    "mixed": (*_FEW_ROWS, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048),
}
"""Rows of the graphs, by kind of step. A step is padded to the next size."""

MOST_LOGITS = 256
"""Maximum rows of logits of a graph."""

EAGER_USES = 2
"""Steps of a bucket that run eagerly before its graph is captured."""

ROWS_BY_LAYER = 128
"""Maximum rows of a question for which a warm-up also captures graphs by layer."""

EARLY_SHARE = 8
"""A question's graph is cut in two behind the first of this many equal parts of its layers. The
device computes that part while the host launches the rest: 400 kernels take the host 0.3 ms."""

MOST_FAILURES = 3
"""Failed captures after which no more are tried."""

GRAPH_CAPACITY = TableCapacity(
    rows=2048, entries=2**15, items=2**13, bases=2**11, pages_per_row=MAX_TAIL_BLOCKS + 1
)
ENTRIES_PER_ROW = 6
"""Entries per row for which the tables of eager steps are sized at first. They grow."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class StepAttention:
    """The attention of the step that is being launched or captured (`DeviceStep`)."""

    kernels: TritonKernels
    tables: AttentionTables
    kind: StepKind = "mixed"
    arrivals: Sequence[Arrival] = ()
    squares: Sequence[Square] = ()
    before_layer: Callable[[], None] | None = None

    @contextmanager
    def with_reads(
        self, arrivals: Sequence[Arrival] = (), squares: Sequence[Square] = ()
    ) -> Iterator[None]:
        """Read arriving states and compute squares in the block alone, also if memory ends in it: a
        graph that is captured later must have neither."""
        self.arrivals, self.squares = arrivals, squares
        try:
            yield
        finally:
            self.arrivals = self.squares = ()

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend in one layer (`DeviceStep.attend`)."""
        if self.before_layer is not None:
            self.before_layer()
        for arrival in self.arrivals:
            arrival.wait(torch.cuda.current_stream(query.device), layer)
        _, heads, rows, _ = query.shape
        out = query.new_empty(1, rows, heads, value.shape[-1])
        self.kernels.attend(
            *(self.tables.views, self.kind, rows, layer, query[0], key[0], value[0], scale, out[0]),
            sinks=sinks,
            squares=self.squares,
        )
        return out


@dataclass(frozen=True, slots=True, eq=False)
class _Captured:
    """A step as graphs that run one after another."""

    graphs: Sequence[torch.cuda.CUDAGraph]
    logits: Tensor
    """[R, vocabulary], of the last replay."""


@dataclass(slots=True, eq=False)
class _Bucket:
    """Steps of one kind with up to `rows` rows."""

    kind: StepKind
    rows: int
    uses: int = 0
    whole: _Captured | None = None
    """The step as one graph, or as two (`EARLY_SHARE`)."""
    by_layer: _Captured | None = None
    """The step cut before each layer's attention, for steps that wait for the states of each."""

    @property
    def logit_rows(self) -> int:
        return min(self.rows, MOST_LOGITS)


class DeviceModelRunner:
    """Computes all chunks of a step in one pass, on a GPU.

    Prepares the model: merges its projections and compiles its layers. On a CPU, under Triton's
    interpreter, it serves tests: eagerly, with the model as it is.

    Args:
        model: The model.
        prefill_tokens: Rows for which the tables of eager steps are sized at first.
        graphs: Whether to capture graphs.
        int8_states: Whether the kernels read int8 states from the beginning. Otherwise they are
            replaced at the first such states.
    """

    asynchronous = True

    def __init__(
        self,
        model: CausalLM,
        *,
        prefill_tokens: int = 8192,
        graphs: bool = True,
        int8_states: bool = False,
    ) -> None:
        self.model = model
        self.device = model.device
        self.stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self.stream = new_stream(self.device)
            self.stream.wait_stream(torch.cuda.current_stream(self.device))  # writes the weights
            self._memory = torch.cuda.graph_pool_handle()
        self._graphs = self._cuts = graphs and self.stream is not None
        self._heads = HeadLayout.of(
            model.num_heads, model.num_kv_heads, model.head_dim, model.latent
        )
        self._rotation = rotation_tables(model)
        self._quantized = int8_states
        capacity = replace(
            GRAPH_CAPACITY,
            rows=max(prefill_tokens, GRAPH_CAPACITY.rows),
            entries=max(ENTRIES_PER_ROW * prefill_tokens, GRAPH_CAPACITY.entries),
        )
        self._tables = AttentionTables(GRAPH_CAPACITY, self.device)  # of graphs
        self._eager_tables = AttentionTables(capacity, self.device)
        self._kernels = self._new_kernels(GRAPH_CAPACITY.entries)
        self._eager_kernels = self._new_kernels(capacity.entries)
        self._step = self._new_step()
        self._metadata = OperatorMetadata(register_step(self._step), model.softcap)
        self._buckets = {
            kind: [_Bucket(kind, rows) for rows in sizes] for kind, sizes in BUCKETS.items()
        }
        self._planner: DevicePlanner | None = None
        self._prepared = False
        self._square_rows = 0
        self._failures = 0
        self._last: DeviceLaunch | None = None
        self._segments: dict[int, _SegmentFacts] = {}  # of the last step, by identity

    def create_pool(self, nbytes: int) -> BlockPool:
        pool = BlockPool.create(self.model, nbytes, clears=False)  # kernels read no other slots
        self._planner = DevicePlanner(
            pool,
            self._heads,
            gapless=self.model.by_position,
            shapes=self._kernels.shapes,
        )
        return pool

    def create_slots(self, count: int) -> None:
        """See `ModelRunner.create_slots`. Models without recurrent layers have none."""

    def create_sampler(self) -> Sampler:
        return Sampler(self.device, kernels=self.stream is not None)

    def prepare_batch(
        self,
        chunks: Sequence[ScheduledChunk],
        previous: Tensor | None = None,
        decoding: DecodeBatch | None = None,
    ) -> Callable[[], Tensor]:
        """Plan a step (`AsynchronousRunner.prepare_batch`)."""
        self._prepare()
        decoding = decoding or DecodeBatch()
        last = self._last
        if last is not None and not chunks and last.repeats(decoding) and last.batch.advance():
            last.follows = decoding.follows.copy()
            return partial(self._run, last, previous)
        launch = self._last = self._plan(chunks, decoding)
        return partial(self._run, launch, previous)

    def release_batch(self) -> None:
        self._last = None
        self._segments = {}
        if self._planner is not None:
            self._planner.forget()

    def warm_up(self) -> None:
        """Compile the model and capture all graphs, the largest first, and run a step of as many
        rows as the tables hold. Logs the progress."""
        self._prepare()
        begin = time.perf_counter()
        every = sorted(chain.from_iterable(self._buckets.values()), key=lambda each: -each.rows)
        for tables in (self._tables, self._eager_tables):
            self._empty_tables(tables)
        for number, bucket in enumerate(every if self._graphs else (), 1):
            self._compute(bucket.kind, self._tables, bucket.rows, bucket.logit_rows)
            bucket.whole = self._capture(bucket, by_layer=False)
            if not self._graphs:
                break
            logger.info("captured %d of %d graphs", number, len(every))
        for bucket in self._buckets["mixed"]:
            if self._cuts and bucket.rows <= ROWS_BY_LAYER:
                bucket.by_layer = self._capture(bucket, by_layer=True)
        most, squares = self._eager_tables.capacity.rows, list[Square]()
        if self._square_rows:
            prepare_squares(self._heads, self.model.dtype, self.device, most)
            sizes = pairwise((0, self._square_rows, most))  # of few rows, and of many
            squares = [Square(*each) for each in sizes]
        with self._step.with_reads(squares=squares):
            self._compute("mixed", self._eager_tables, most, MOST_LOGITS)
        logger.info("warmed up in %.1f s", time.perf_counter() - begin)

    def _plan(self, chunks: Sequence[ScheduledChunk], decoding: DecodeBatch) -> DeviceLaunch:
        """Lay out a step, in the tables of the graphs if it fits."""
        if self._planner is None:  # encodings need no pool
            self.create_pool(BLOCK_SIZE * self.model.computed_bytes_per_token)
        assert self._planner is not None
        arrivals = self._look_at_segments(chunks)
        rows = decoding.rows + sum(len(chunk.position_ids) for chunk in chunks)
        launch = partial(
            DeviceLaunch,
            chunks=tuple(chunks),
            arrivals=arrivals,
            follows=decoding.follows.copy(),
            version=decoding.version,
        )
        if rows <= GRAPH_CAPACITY.rows:
            with suppress(TableOverflow):
                batch = self._planner.plan_batch(chunks, self._tables, decoding)
                bucket = self._bucket(batch.kind, rows, batch.logits)
                return launch(batch=batch, tables=self._tables, bucket=bucket)
        while True:
            try:
                tables = self._eager_tables
                batch = self._planner.plan_batch(chunks, tables, decoding, self._square_rows)
            except TableOverflow as error:
                self._grow_tables(error)
            else:
                squares = batch.plan.squares
                return launch(batch=batch, tables=tables, bucket=None, squares=squares)

    def _look_at_segments(self, chunks: Sequence[ScheduledChunk]) -> tuple[Arrival, ...]:
        """Return arrivals that are not complete yet, of states that chunks read. Creates the
        kernels of int8 states if they read the first such states. The step that computed a prompt
        has waited for all that the rows of its answer read.
        """
        known, kept = self._segments, dict[int, _SegmentFacts]()
        arrivals: dict[Arrival, None] = {}
        for chunk in chunks:
            name = id(chunk.segments)
            facts = kept[name] = known.get(name) or _SegmentFacts.of(chunk.segments)
            if facts.quantized and not self._quantized:
                self._read_eight_bits()
            if facts.arrivals:
                facts.arrivals = [each for each in facts.arrivals if not each.ready(self.stream)]
                arrivals |= dict.fromkeys(facts.arrivals)
        self._segments = kept
        return tuple(arrivals)

    def _bucket(self, kind: StepKind, rows: int, logits: int) -> _Bucket | None:
        buckets = self._buckets[kind]
        at = bisect_left(buckets, rows, key=lambda each: each.rows)
        if at == len(buckets) or logits > buckets[at].logit_rows:
            return None
        return buckets[at]

    def _run(self, launch: DeviceLaunch, previous: Tensor | None) -> Tensor:
        """Launches a step; returns its logits, which the device has still to compute."""
        self._upload(launch, previous)
        if previous is not None:
            self._take_tokens(launch, previous)
        logits = self._replay(launch.bucket, launch.arrivals) if launch.bucket else None
        if logits is None:
            rows, wanted = launch.batch.rows, launch.batch.logits
            if launch.bucket is not None:
                rows, wanted = launch.bucket.rows, launch.bucket.logit_rows
            rows = max(rows, FEWEST_ROWS)
            with self._step.with_reads(launch.arrivals, launch.squares):
                logits = self._compute(launch.batch.kind, launch.tables, rows, wanted)
        return logits[: launch.batch.logits]

    def _upload(self, launch: DeviceLaunch, previous: Tensor | None) -> None:  # noqa: ARG002
        """Queue the upload of a step's tables. `previous`: see `prepare_batch`."""
        launch.tables.upload()

    def _take_tokens(self, launch: DeviceLaunch, previous: Tensor) -> None:
        """Copy tokens that only the device knows to the rows of the decode batch."""
        token_ids, follows = launch.tables.views.token_ids, launch.follows
        count = len(follows)
        if not count:
            return
        if np.array_equal(follows, np.arange(count)):
            token_ids[:count].copy_(previous[:count])
        else:
            places = torch.from_numpy(follows)
            if self.stream is not None:
                places = places.pin_memory().to(self.device, non_blocking=True)
            torch.index_select(previous, 0, places, out=token_ids[:count])

    def _replay(self, bucket: _Bucket, arrivals: Sequence[Arrival]) -> Tensor | None:
        """Replay the graphs of a step. Returns no logits if there are no graphs yet."""
        bucket.uses += 1
        captured = bucket.by_layer if arrivals else bucket.whole
        wanted = self._cuts if arrivals else self._graphs
        if captured is None and wanted and bucket.uses > EAGER_USES:
            captured = self._capture(bucket, by_layer=bool(arrivals))
            if arrivals:
                bucket.by_layer = captured
            else:
                bucket.whole = captured
        if captured is None:
            return None
        for layer, graph in enumerate(captured.graphs, -1):
            for arrival in arrivals if layer >= 0 else ():
                arrival.wait(self.stream, layer)
            graph.replay()
        return captured.logits

    def _capture(self, bucket: _Bucket, *, by_layer: bool) -> _Captured | None:
        """Capture the graphs of a bucket whose steps have run before.

        Another thread's use of the device can make a capture fail. It is tried a few times; then
        steps stay eager, and a warning says why.
        """
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin() -> None:
            # other threads copy states meanwhile, which is no part of the graph
            graph = torch.cuda.CUDAGraph()
            with _random_state_apart(self.device):
                graph.capture_begin(self._memory, capture_error_mode="thread_local")
            graphs.append(graph)

        def cut() -> None:
            self._end_capture(graphs[-1])
            begin()

        def cut_early() -> None:
            if next(layers) == self.model.num_layers // EARLY_SHARE:
                cut()

        layers = count()
        cuts = cut_early if bucket.kind == "mixed" else None
        self._step.before_layer = cut if by_layer else cuts
        try:
            with capture_lock, no_recompiles():
                begin()
                try:
                    logits = self._compute(
                        bucket.kind, self._tables, bucket.rows, bucket.logit_rows
                    )
                except BaseException:
                    with suppress(Exception):  # the error above is the reason
                        self._end_capture(graphs[-1])
                    raise
                self._end_capture(graphs[-1])
        except Exception as error:  # CUDA, the compiler or a model that looks at its tokens
            self._failures += 1
            if by_layer:
                logger.warning("steps over states that still arrive run without graphs: %s", error)
                self._cuts = False
            elif self._failures >= MOST_FAILURES:
                logger.warning("steps run without CUDA graphs: none can be captured: %s", error)
                self._graphs = self._cuts = False
            return None
        finally:
            self._step.before_layer = None
        return _Captured(graphs, logits)

    def _end_capture(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture. If it has failed, PyTorch's allocator would go on with it."""
        try:
            graph.capture_end()
        except BaseException:
            with suppress(RuntimeError):  # it may have ended
                torch._C._cuda_endAllocateToPool(_index_of(self.device), self._memory)
            raise

    def _compute(self, kind: StepKind, tables: AttentionTables, rows: int, logits: int) -> Tensor:
        """Launch the model over the first rows of some tables."""
        step, views = self._step, tables.views
        step.kind, step.tables = kind, tables
        step.kernels = self._kernels if tables is self._tables else self._eager_kernels
        with only_live_rows(views.live_rows):
            return self.model.forward(
                ForwardBatch(
                    views.token_ids[:rows],
                    views.position_ids[:rows],
                    views.logit_rows[:logits],
                    self._metadata,
                )
            )

    def _new_step(self) -> StepAttention:
        """Create the operators of the steps."""
        return StepAttention(self._kernels, self._tables)

    def _empty_tables(self, tables: AttentionTables) -> None:
        """Lay out a step that reads and writes nothing."""
        plan = build_plan([], rows=0, heads=self._heads, capacity=tables.capacity)
        tables.set_plan(plan)
        tables.begin_step(0)
        tables.upload()

    def _grow_tables(self, overflow: TableOverflow) -> None:
        """Double the tables of eager steps."""
        old = self._eager_tables.capacity
        logger.info("larger attention tables: %s", overflow)
        self._finish_steps()
        capacity = TableCapacity(
            2 * old.rows, 2 * old.entries, 2 * old.items, 2 * old.bases, old.pages_per_row
        )
        tables = AttentionTables(capacity, self.device)
        kernels = self._new_kernels(capacity.entries)  # may raise: then neither is replaced
        self._eager_tables, self._eager_kernels = tables, kernels

    def _new_kernels(self, entries: int, *, quantized: bool | None = None) -> TritonKernels:
        kind = LatentKernels if self._heads.latent else TritonKernels
        return kind(
            self._heads,
            self.model.dtype,
            self.device,
            self._rotation,
            self.model.scheme.slopes,
            max_entries=entries,
            windows=self.model.windows,
            softcap=self.model.softcap,
            quantized=self._quantized if quantized is None else quantized,
        )

    def _read_eight_bits(self) -> None:
        """Create kernels that also read int8 states, at the first such states."""
        self._finish_steps()
        for bucket in chain.from_iterable(self._buckets.values()):
            bucket.whole, bucket.by_layer, bucket.uses = None, None, 0
        if self.stream is not None:  # PyTorch takes no pool again that all graphs have left
            self._memory = torch.cuda.graph_pool_handle()
        tables = (self._tables, self._eager_tables)
        kernels = [self._new_kernels(each.capacity.entries, quantized=True) for each in tables]
        self._kernels, self._eager_kernels = kernels
        if self._planner is not None:
            self._planner.shapes = self._kernels.shapes
        self._quantized = True  # and not where memory has ended before

    def _finish_steps(self) -> None:
        """Wait for running steps before their memory is replaced: neither allocator knows its
        readers."""
        if self.stream is not None:
            self.stream.synchronize()

    def _prepare(self) -> None:
        """Merge projections and compile layers, before the first step."""
        if not self._prepared:
            with capture_lock:  # while another engine captures, nothing can be compiled or freed
                prepare_for_device(self.model)
                self._square_rows = self._try_squares()
            self._prepared = True

    def _try_squares(self) -> int:
        """Fewest new tokens of a chunk that are a square. 0 where none are."""
        model = self.model
        plain = not any(model.windows) and model.softcap is None and model.scheme.slopes is None
        plain = plain and not model.latent  # wider than cuDNN's heads
        if not plain or model.ranks > 1:  # a follower knows tables only
            return 0
        return SQUARE_ROWS if prepare_squares(self._heads, model.dtype, self.device) else 0


@dataclass(slots=True, eq=False)
class _SegmentFacts:
    """The segments of a request, and what a step over them has to wait for."""

    segments: tuple[Segment, ...]
    quantized: bool
    """Whether some have int8 states."""
    arrivals: list[Arrival]
    """Arrivals that were not complete at the last step."""

    @classmethod
    def of(cls, segments: tuple[Segment, ...]) -> _SegmentFacts:
        arrivals = dict.fromkeys(each.states.arrival for each in segments)
        quantized = any(isinstance(each.states, QuantizedStates) for each in segments)
        return cls(segments, quantized, [each for each in arrivals if each is not None])


@dataclass(slots=True, eq=False)
class DeviceLaunch:
    """A step that is laid out. It may be repeated many times."""

    chunks: Sequence[ScheduledChunk]
    """Chunks beside the decode batch."""
    batch: DeviceBatch
    tables: AttentionTables
    arrivals: Sequence[Arrival]
    bucket: _Bucket | None
    follows: NDArray[np.int64]
    """Rows of the step before that sample the tokens of the decode batch."""
    version: int
    """Version of the decode batch."""
    squares: Sequence[Square] = ()
    """Squares of an eager step."""

    def repeats(self, decoding: DecodeBatch) -> bool:
        """Whether the next step has the same rows, if it computes no chunks."""
        return bool(decoding.rows) and not self.chunks and self.version == decoding.version


def _index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@contextmanager
def _random_state_apart(device: torch.device) -> Iterator[None]:
    """Give the device's random generator another state within the block.

    The begin of a capture marks the generator's state, and random draws raise until its end: those
    of other threads too, and for ever if the capture fails. Steps draw nothing by the generator.
    """
    generator = torch.cuda.default_generators[_index_of(device)]
    kept = generator.graphsafe_get_state()
    generator.graphsafe_set_state(generator.clone_state())
    try:
        yield
    finally:
        generator.graphsafe_set_state(kept)


def rotation_tables(model: CausalLM) -> RotationTables | list[RotationTables] | None:
    """Angles of all distances by which a segment can be moved: one table, or one for each layer.
    Without rotary positions there are none."""
    scheme = model.scheme
    if isinstance(scheme, LayeredRotary):
        tables = {each: _tables_of(each, model) for each in set(scheme.layers)}
        return [tables[each] for each in scheme.layers]
    return _tables_of(scheme, model) if isinstance(scheme, Rotary) else None


def _tables_of(rotary: Rotary, model: CausalLM) -> RotationTables:
    deltas = torch.arange(model.window, device=model.device)
    turned = Rotation.by(deltas, rotary.inverse_frequency, interleaved=rotary.interleaved)
    return RotationTables(turned.cos, turned.sin, rotary.interleaved)
