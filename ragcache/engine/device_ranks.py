"""Runners of several devices: the leader plans and sends tables, followers execute them.

A step is laid out in tables, which hold no addresses but of states. The leader sends the content of
its uploads; a follower puts its own addresses in place of the leader's, and launches the same work.
Graphs are captured at the same steps on every rank, since all ranks count alike.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from ragcache.attention.triton.launch import StepKind
from ragcache.attention.triton.plan import TableOverflow
from ragcache.attention.triton.tables import AttentionTables, TableContent
from ragcache.engine.batch import ScheduledChunk
from ragcache.engine.decode_batch import DecodeBatch
from ragcache.engine.device_runner import DeviceLaunch, DeviceModelRunner
from ragcache.engine.split_sampler import SplitSampler, likeliest_pairs
from ragcache.machine import new_stream
from ragcache.models.parallel.collectives import SignsOfLife
from ragcache.models.parallel.device_copies import FollowedCopies
from ragcache.models.parallel.device_memory import FollowerRegions
from ragcache.models.parallel.device_model import DeviceParallelLM, DeviceRankLM, finalize
from ragcache.models.parallel.memory import MappedMemory
from ragcache.models.parallel.messages import read_message
from ragcache.models.parallel.residuals import sums_add_residuals
from ragcache.models.parallel.ring import Part
from ragcache.states import Arrival


class DeviceMessage(Protocol):
    """A message of the leader."""

    def run(self, follower: DeviceFollower) -> None:
        """Carry the message out."""


class RankRunner(DeviceModelRunner):
    """The runner of any rank."""

    model: DeviceRankLM

    def _prepare(self) -> None:
        with self.model.alone(), sums_add_residuals():  # ranks take their own time to compile
            super()._prepare()

    def warm_up(self) -> None:
        super().warm_up()
        part = torch.zeros(2, self._columns, dtype=self.model.dtype, device=self.device)
        self.model.gather_logits(part)
        self._pairs(part)

    def _compute(self, kind: StepKind, tables: AttentionTables, rows: int, logits: int) -> Tensor:
        """See `DeviceModelRunner._compute`."""
        self.model.collectives.begin_pass()
        return super()._compute(kind, tables, rows, logits)

    @property
    def _columns(self) -> int:
        """Columns of the logits that a rank has. The last ranks may have fewer."""
        return -(-self.model.logits_width // self.model.collectives.ranks)

    def _pairs(self, part: Tensor) -> Tensor:
        """`likeliest_pairs` of all ranks, for the leader. part: this rank's logits."""
        collectives = self.model.collectives
        first = collectives.rank * self._columns
        pairs = likeliest_pairs(part, first, kernels=self.stream is not None)
        return collectives.gather_columns(pairs, 2 * collectives.ranks)


@dataclass(frozen=True, slots=True)
class NewRunner:
    """Message: the leader has a runner."""

    number: int
    prefill_tokens: int
    graphs: bool

    def run(self, follower: DeviceFollower) -> None:
        follower.runners[self.number] = FollowingRunner(
            follower, prefill_tokens=self.prefill_tokens, graphs=self.graphs
        )


@dataclass(frozen=True, slots=True)
class EndRunner:
    """Message: a runner of the leader has ended."""

    number: int

    def run(self, follower: DeviceFollower) -> None:
        del follower.runners[self.number]


@dataclass(frozen=True, slots=True)
class Prepare:
    """Message: the leader merges projections and compiles layers."""

    number: int

    def run(self, follower: DeviceFollower) -> None:
        follower.runners[self.number]._prepare()


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Message: the leader captures all graphs of a runner."""

    number: int

    def run(self, follower: DeviceFollower) -> None:
        follower.runners[self.number].warm_up()


@dataclass(frozen=True, slots=True)
class GrowTables:
    """Message: the leader doubles the tables of eager steps."""

    number: int

    def run(self, follower: DeviceFollower) -> None:
        follower.runners[self.number]._grow_tables(TableOverflow("as the leader's"))


@dataclass(frozen=True, slots=True)
class ReadEightBits:
    """Message: the leader reads its first int8 states."""

    number: int

    def run(self, follower: DeviceFollower) -> None:
        follower.runners[self.number]._read_eight_bits()


@dataclass(frozen=True, slots=True)
class FollowedLogits:
    """Message: the leader samples from the logits of the last step."""

    number: int
    likeliest: bool
    """Whether pairs of the largest logits and their tokens are enough."""

    def run(self, follower: DeviceFollower) -> None:
        follower.runners[self.number].join_logits(likeliest=self.likeliest)


@dataclass(slots=True)
class FollowedStep:
    """Message: a step that the leader launches.

    It crosses as a run of int64 and the lines of its tables, since it precedes every step: a
    pickled message takes both ranks several times as long.
    """

    number: int
    eager: bool
    """Whether the step is laid out in the tables of eager steps."""
    kind: StepKind
    rows: int
    logits: int
    bucket: int | None
    """Rows of the step's graphs."""
    follows: int
    """Number of first rows whose tokens only the leader's device knows."""
    whole: bool
    """Whether the leader needs the logits of all ranks directly, to score prompts."""
    waits: Sequence[int]
    """Batches of uploads that the step reads and has to wait for."""
    others: Sequence[int]
    """Batches that have not arrived, and that the step does not read."""
    content: TableContent

    def run(self, follower: DeviceFollower) -> None:
        arrivals = follower.copies.arrivals(self.waits, self.others)
        follower.runners[self.number].follow(self, follower.regions, arrivals)

    def parts(self) -> Sequence[Part]:
        """Lay out the message for `read_device_message`."""
        waits, others, content = self.waits, self.others, self.content
        fields = (
            *(_STEP_MARK, self.number, self.eager, _KINDS.index(self.kind), self.rows),
            *(self.logits, self.bucket or 0, self.follows, self.whole),
            *(len(waits), len(others), len(content.lines)),
        )
        head = array("q", (*fields, *waits, *others, *content.lines))
        return head.tobytes(), *content.parts

    @classmethod
    def read(cls, content: memoryview) -> FollowedStep:
        """Read a message. Its tables stay where `content` lies."""
        words = content.cast("q")
        head = words[:_STEP_WORDS].tolist()
        _, number, eager, kind, rows, logits, bucket, follows, whole, *counts = head
        ends = list(accumulate(counts, initial=_STEP_WORDS))
        waits, others, lines = (words[begin:end].tolist() for begin, end in pairwise(ends))
        tables = TableContent(lines, (content[8 * ends[-1] :],))
        return cls(
            *(number, bool(eager), _KINDS[kind], rows, logits, bucket or None, follows),
            *(bool(whole), waits, others, tables),
        )


_KINDS: Final[tuple[StepKind, ...]] = ("decode", "mixed")
_STEP_MARK: Final = 1
"""First int64 of a step. No pickled object begins with such a byte."""
_STEP_WORDS: Final = 12
"""Int64 of a step before its lists."""


def read_device_message(
    content: memoryview, memory: MappedMemory, regions: FollowerRegions
) -> DeviceMessage:
    """Return a message of the leader. A step's tables are read while it runs."""
    if content[0] == _STEP_MARK:
        return FollowedStep.read(content)
    found: DeviceMessage = read_message(content, memory, regions)
    return found


class LeadingRunner(RankRunner):
    """The leader's runner: `DeviceModelRunner`, each of whose launches is a message, too."""

    model: DeviceParallelLM

    def __init__(
        self, model: DeviceParallelLM, *, prefill_tokens: int = 8192, graphs: bool = True
    ) -> None:
        super().__init__(model, prefill_tokens=prefill_tokens, graphs=graphs)
        self._channel = model.channel
        self._number = self._channel.number()
        self._channel.send(NewRunner(self._number, prefill_tokens, graphs))
        finalize(self, self._channel, EndRunner(self._number))

    def warm_up(self) -> None:
        with self._leading():
            self._channel.send(WarmUp(self._number))
            super().warm_up()
            ranks = self.model.collectives.ranks
            none = torch.zeros(2, 2 * ranks, dtype=torch.float64, device=self.device)
            self.create_sampler().choose(none, ())

    def _prepare(self) -> None:
        if not self._prepared:
            with self._leading():
                self._channel.send(Prepare(self._number))
                super()._prepare()

    def prepare_batch(
        self,
        chunks: Sequence[ScheduledChunk],
        previous: Tensor | None = None,
        decoding: DecodeBatch | None = None,
    ) -> Callable[[], Tensor]:
        self._channel.wake()  # while this rank plans
        return super().prepare_batch(chunks, previous, decoding)

    def create_sampler(self) -> SplitSampler:
        return SplitSampler(
            self.device,
            self.model.logits_width,
            partial(self._join, likeliest=False),
            partial(self._join, likeliest=True),
            kernels=self.stream is not None,
        )

    def _join(self, part: Tensor, *, likeliest: bool) -> Tensor:
        """Get the logits of all ranks, or their pairs."""
        with self._leading():
            self._channel.send(FollowedLogits(self._number, likeliest))
            return self._pairs(part) if likeliest else self.model.gather_logits(part)

    def _run(self, launch: DeviceLaunch, previous: Tensor | None) -> Tensor:
        with self._leading():
            part = super()._run(launch, previous)
            return self.model.gather_logits(part) if _scores(launch) else part

    def _upload(self, launch: DeviceLaunch, previous: Tensor | None) -> None:
        launch.tables.upload(partial(self._send_step, launch, previous))

    def _send_step(
        self, launch: DeviceLaunch, previous: Tensor | None, content: TableContent
    ) -> None:
        batch, bucket = launch.batch, launch.bucket
        waits, others = self.model.copies.waits(launch.arrivals)
        step = FollowedStep(
            self._number,
            launch.tables is self._eager_tables,
            batch.kind,
            batch.rows,
            batch.logits,
            None if bucket is None else bucket.rows,
            0 if previous is None else len(launch.follows),
            _scores(launch),
            waits,
            others,
            content,
        )
        self._channel.send_parts(*step.parts())

    def _take_tokens(self, launch: DeviceLaunch, previous: Tensor) -> None:
        super()._take_tokens(launch, previous)
        if count := len(launch.follows):
            self.model.collectives.broadcast(launch.tables.views.token_ids[:count])

    def _grow_tables(self, overflow: TableOverflow) -> None:
        with self._leading():
            self._channel.send(GrowTables(self._number))
            super()._grow_tables(overflow)

    def _read_eight_bits(self) -> None:
        with self._leading():
            self._channel.send(ReadEightBits(self._number))
            super()._read_eight_bits()

    @contextmanager
    def _leading(self) -> Iterator[None]:
        """Send messages in the order in which this thread launches work. An error within ends all
        ranks, which are in step no more."""
        with self._channel.launching():
            yield


def _scores(launch: DeviceLaunch) -> bool:
    """Whether a step scores tokens of prompts."""
    return any(begin < end for begin, end in (chunk.scored for chunk in launch.chunks))


@dataclass(frozen=True, slots=True)
class _FollowedBatch:
    """The sizes of a step that another rank has planned."""

    kind: StepKind
    rows: int
    logits: int


class FollowingRunner(RankRunner):
    """A follower's runner, without requests and plans."""

    def __init__(self, follower: DeviceFollower, *, prefill_tokens: int, graphs: bool) -> None:
        super().__init__(follower.model, prefill_tokens=prefill_tokens, graphs=graphs)
        self.stream = follower.stream
        self._received: tuple[TableContent, FollowerRegions] | None = None
        self._logits = torch.empty(0)

    def follow(
        self, step: FollowedStep, regions: FollowerRegions, arrivals: Sequence[Arrival]
    ) -> None:
        """Launch a step of the leader."""
        tables = self._eager_tables if step.eager else self._tables
        batch: Any = _FollowedBatch(step.kind, step.rows, step.logits)
        buckets = self._buckets[step.kind]
        bucket = next((each for each in buckets if each.rows == step.bucket), None)
        follows = np.arange(step.follows)
        launch = DeviceLaunch((), batch, tables, arrivals, bucket, follows, 0)
        self._received = step.content, regions
        self._logits = self._run(launch, tables.views.token_ids if step.follows else None)
        if step.whole:
            self.model.gather_logits(self._logits)

    def join_logits(self, *, likeliest: bool) -> None:
        """Give the leader this rank's part of the last step's logits."""
        if likeliest:
            self._pairs(self._logits)
        else:
            self.model.gather_logits(self._logits)

    def _upload(self, launch: DeviceLaunch, previous: Tensor | None) -> None:  # noqa: ARG002
        assert self._received is not None
        content, regions = self._received
        launch.tables.receive(content, regions.move)
        self._received = None

    def _take_tokens(self, launch: DeviceLaunch, previous: Tensor) -> None:
        count = len(launch.follows)
        self.model.collectives.broadcast(previous[:count])


class DeviceFollower:
    """A follower's part of the model, its regions, and a runner for each runner of the leader.

    Attributes:
        model: The part of the model.
        regions: Device memory.
        stream: The stream of all steps. None on a CPU.
        copies: Copies of states between tiers.
        runners: Runners by number.
    """

    def __init__(
        self,
        model: DeviceRankLM,
        regions: FollowerRegions,
        memory: MappedMemory,
        signs: SignsOfLife,
        rank: int,
    ) -> None:
        self.model, self.regions = model, regions
        self.stream: torch.cuda.Stream | None = None
        self.runners: dict[int, FollowingRunner] = {}
        if model.device.type == "cuda":
            self.stream = new_stream(model.device)
            self.stream.wait_stream(torch.cuda.current_stream(model.device))
        self.copies = FollowedCopies(model, self.stream, memory, signs, rank)
