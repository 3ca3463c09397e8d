"""The engine without its thread: takes requests, and runs one step at a time.

Iteration-level batching: requests join and leave between steps (Orca §3.1).
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from ragcache.engine.batch import ScheduledChunk
from ragcache.engine.config import EngineConfig, EngineStats
from ragcache.engine.encoding import EncodeJob, EncodeQueue, Encoding, StatesChannel
from ragcache.engine.handle import RequestChannel, coalesced_wakeups
from ragcache.engine.kv_cache import BlockPool, RadixCache
from ragcache.engine.kv_cache_manager import KVCacheManager
from ragcache.engine.request import Request, RequestOutput, TokenDelta, check_window
from ragcache.engine.runner import ModelRunner
from ragcache.engine.sampler import sample_tokens
from ragcache.engine.scheduler import SchedulerConfig, SchedulerOutput, schedule
from ragcache.engine.sequence import Sequence, SequenceGroup
from ragcache.errors import DeadlineExceeded, PromptTooLong, UnsupportedModel, UnusableLogits

Clock = Callable[[], float]
AnswerChannel = RequestChannel[TokenDelta, RequestOutput]


@dataclass(frozen=True, slots=True)
class _Share:
    """A sequence or an encoding with the tokens that it computes in this step."""

    owner: Sequence | Encoding
    count: int
    chunk: ScheduledChunk


class EngineCore:
    """Schedules requests and encodings, runs the model, and samples the next tokens.

    snapshot: the step that runs now, for monitoring from other threads.
    """

    def __init__(
        self, runner: ModelRunner, config: EngineConfig, clock: Clock = time.perf_counter
    ) -> None:
        self.runner, self.config, self.clock = runner, config, clock
        pool = runner.create_pool(config.pool_bytes)
        self.kv_manager = KVCacheManager(
            pool, RadixCache(pool.block_size, int(config.retained * pool.num_blocks))
        )
        self.stats = EngineStats()
        self.snapshot = IDLE
        self._seen: object = None
        self._scheduler_config = SchedulerConfig(
            pool.block_size, config.step_tokens, config.prefill_tokens, config.running
        )
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._encode_queue = EncodeQueue(runner.model)
        self._last_number = 0

    @property
    def pool(self) -> BlockPool:
        return self.kv_manager.pool

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running or self._encode_queue)

    def check_request(self, request: Request) -> None:
        """Raises `PromptTooLong` or `UnsupportedModel` for a request that could never run."""
        context = request.context
        if not self.runner.model.scheme.movable and any(each.delta for each in context.segments):
            raise UnsupportedModel(
                "the model's positions are learned, so that cached states cannot stand elsewhere "
                "than where they were encoded; place schemas with placement='schema'"
            )
        self.check_sizes(
            own=len(context.token_ids), documents=context.cached_tokens,
            end=context.next_position, max_new_tokens=request.max_new_tokens,
        )  # fmt: skip

    def check_sizes(
        self, *, own: int, documents: int, end: int, max_new_tokens: int, recomputed: int = 0
    ) -> None:
        """Raises `PromptTooLong` for a prompt and answer of sizes that could never run. own: tokens
        of question and template; documents: of what it reads, of which so many are `recomputed`;
        end: the position after the prompt."""
        window = self.runner.window
        if documents:
            check_window(documents, own, window=window, max_new_tokens=max_new_tokens)
        if end + max_new_tokens > window:
            raise PromptTooLong(
                f"the prompt ends at position {end} and the answer may take "
                f"{max_new_tokens} more, but the model's window holds {window}"
            )
        tokens = own + recomputed + max_new_tokens
        if not self.kv_manager.can_hold(tokens):
            raise PromptTooLong(
                f"the request may need {tokens} tokens of its own, but the pool holds "
                f"{self.pool.num_blocks * self.pool.block_size}; give the engine more pool bytes"
            )

    def max_answer_tokens(self, computed: int, end: int) -> int:
        """The most tokens that an answer can have after a prompt of so many computed tokens that
        ends at `end`; one where nothing fits, so that `check_sizes` refuses it."""
        left = self.pool.num_blocks * self.pool.block_size - computed
        return max(1, min(left, self.runner.window - end))

    def add_request(self, request: Request, channel: AnswerChannel, submitted_at: float) -> None:
        """Queues a checked request, unless it was cancelled meanwhile."""
        if channel.cancelled:
            return
        shares = self.runner.shares_prefixes
        try:
            group = SequenceGroup(request, channel, submitted_at, shares_prefixes=shares)
            sequence = self._sequence(group, 0)
        except Exception as error:  # its `text` cannot be made: the others go on
            channel.fail(error)
        else:
            self._enqueue(sequence)

    def add_encoding(self, jobs: list[EncodeJob], channel: StatesChannel) -> None:
        """Queues modules to encode beside the requests."""
        self._encode_queue.add_jobs(jobs, channel)

    def step(self) -> None:
        """Runs one step: cancelled requests leave, the scheduler decides, the model computes."""
        begin = self.clock()
        self._drop_gone(begin)
        shares = self._plan(begin)
        if shares:
            self._run(shares, begin)
        else:
            self._encode_queue.hand_over()
        if not self.busy:
            self.runner.release_batch()
            self.snapshot, self._seen = IDLE, None

    def _run(self, shares: list[_Share], begin: float) -> None:
        step = self.runner.prepare_batch([share.chunk for share in shares])
        seen = [(id(share.owner), share.count) for share in shares]
        if seen != self._seen:  # else the step is like the last one
            chunks = ((share.chunk, isinstance(share.owner, Encoding)) for share in shares)
            self.snapshot, self._seen = BatchSnapshot.of(chunks), seen
        planned = self.clock()
        logits = step()
        computed = self.clock()
        self._account(shares)
        with coalesced_wakeups():
            self._sample(shares, logits, computed)
        stats = self.stats
        stats.steps += 1
        stats.planning += planned - begin
        stats.forward += computed - planned
        stats.sampling += self.clock() - computed

    def fail_all(self, error: BaseException) -> None:
        """Ends every request with `error`, and frees all memory."""
        for sequence in (*self._running, *self._waiting):
            self._release(sequence)
            sequence.group.channel.fail(error)
        self._encode_queue.fail_all(error)
        self._running, self._waiting = [], []
        self.runner.release_batch()
        self.snapshot, self._seen = IDLE, None

    def _plan(self, now: float) -> list[_Share]:
        """What each request computes in this step, after preemption and admission."""
        output = schedule(
            [sequence.schedulable() for sequence in self._running],
            (sequence.schedulable() for sequence in self._waiting),
            self._scheduler_config,
            free_blocks=self.kv_manager.available_blocks,
            now=now,
        )
        self._preempt(output)
        self._admit(output, now)
        shares = []
        for sequence in self._running:
            count = output.tokens.get(sequence.number, 0)
            count = min(count, len(sequence.tokens) - sequence.computed)
            if count:
                self.kv_manager.allocate_slots(sequence, count)
                shares.append(_Share(sequence, count, sequence.next_chunk(count)))
        decoding = any(share.count == 1 for share in shares)
        most = self.config.step_tokens if decoding else self.config.prefill_tokens
        left = most - sum(share.count for share in shares)
        for encoding, count in self._encode_queue.portions(left):
            shares.append(_Share(encoding, count, encoding.next_chunk(count)))
        return shares

    def _preempt(self, output: SchedulerOutput) -> None:
        for number in output.preempted:
            sequence = next(each for each in self._running if each.number == number)
            self._running.remove(sequence)
            self._release(sequence)
            self._enqueue(sequence)
            self.stats.preempted += 1

    def _admit(self, output: SchedulerOutput, now: float) -> None:
        entering = set(output.admitted)
        if not entering:
            return
        admitted = [each for each in self._waiting if each.number in entering]
        self._waiting = [each for each in self._waiting if each.number not in entering]
        for sequence in admitted:
            insort(self._running, sequence, key=_order)
        for sequence in admitted:
            found = self.kv_manager.admit_sequence(sequence)
            group = sequence.group
            group.channel.started = True
            if not group.admitted_at:
                group.admitted_at = now
                group.shared_tokens = found
                self.stats.admitted += 1
                self.stats.queued += now - group.submitted_at
            self.stats.shared_tokens += found

    def _account(self, shares: list[_Share]) -> None:
        """Counts the tokens whose states the step has written."""
        for share in shares:
            if isinstance(share.owner, Encoding):
                share.owner.computed(share.count)
                self.stats.encoded_tokens += share.count
                continue
            self.kv_manager.commit_tokens(share.owner, share.count)
            if share.owner.generated:
                self.stats.decoded_tokens += share.count
            else:
                self.stats.prompt_tokens += share.count
        self._encode_queue.hand_over()

    def _sample(self, shares: list[_Share], logits: Tensor, now: float) -> None:
        """The next token of every sequence whose last token was computed."""
        sampling = [
            share.owner
            for share in shares
            if isinstance(share.owner, Sequence) and share.chunk.wants_logits
        ]
        if not sampling:
            return
        forbidden = [sequence.forbidden() for sequence in sampling]
        masks = [sequence.mask() for sequence in sampling]
        samplers = [sequence.sampler for sequence in sampling]
        sampled = sample_tokens(logits, samplers, forbidden, masks)
        for sequence, token in zip(sampling, sampled, strict=True):
            if isinstance(token, UnusableLogits):
                self._fail(sequence.group, sequence.failure or token)
                continue
            if sequence.index == 0 and not sequence.generated:
                self._fork(sequence)
            sequence.append_token(token, now)
            if sequence.failure is not None:
                self._fail(sequence.group, sequence.failure)
        for sequence in [each for each in self._running if each.finished]:
            self._running.remove(sequence)
            self._release(sequence)

    def _fork(self, leader: Sequence) -> None:
        """Begins the other answers to a prompt that has just been computed."""
        for index in range(1, leader.request.n):
            sequence = self._sequence(leader.group, index)
            free = self.runner.shares_prefixes and len(self._running) < self.config.running
            if free and self.kv_manager.fork_sequence(leader, sequence):
                insort(self._running, sequence, key=_order)
            else:
                self._enqueue(sequence)

    def _drop_gone(self, now: float) -> None:
        """Ends requests that were cancelled or are past their deadline."""
        for sequence in (*self._running, *self._waiting):
            group = sequence.group
            if group.channel.cancelled:
                self._drop(group)
            elif group.expires_at is not None and now >= group.expires_at:
                self._fail(group, _too_late(group, started=sequence in self._running))
        self._encode_queue.drop_cancelled()

    def _fail(self, group: SequenceGroup, error: BaseException) -> None:
        self._drop(group)
        group.channel.fail(error)

    def _drop(self, group: SequenceGroup) -> None:
        for sequence in self._running:
            if sequence.group is group:
                self._release(sequence)
        self._running = [each for each in self._running if each.group is not group]
        self._waiting = [each for each in self._waiting if each.group is not group]

    def _release(self, sequence: Sequence) -> None:
        if sequence.private is not None:
            self.runner.release_states(sequence.private)
        self.kv_manager.release_sequence(sequence)

    def _sequence(self, group: SequenceGroup, index: int) -> Sequence:
        self._last_number += 1
        return Sequence(group, index, self._last_number)

    def _enqueue(self, sequence: Sequence) -> None:
        insort(self._waiting, sequence, key=_order)


def _order(sequence: Sequence) -> tuple[float, int]:
    return (sequence.group.seniority, sequence.number)


def _too_late(group: SequenceGroup, *, started: bool) -> DeadlineExceeded:
    where = "while it ran" if started else "while it waited in the queue"
    return DeadlineExceeded(
        f"the request's {group.request.timeout} s were over {where}; give it more time, or fewer "
        "requests to the engine"
    )


@dataclass(frozen=True, slots=True)
class SegmentUse:
    """A segment that a step reads: its name, length, and the requests and rows that read it."""

    name: str
    tokens: int
    requests: int
    rows: int


@dataclass(frozen=True, slots=True)
class BatchSnapshot:
    """What one step computes: rows of new tokens, the requests that they belong to, modules that
    are encoded beside them, and the segments that answers read, the most read first."""

    rows: int = 0
    requests: int = 0
    encodings: int = 0
    segments: tuple[SegmentUse, ...] = ()

    @classmethod
    def of(cls, chunks: Iterable[tuple[ScheduledChunk, bool]]) -> BatchSnapshot:
        """Of the chunks of a step, each with whether it encodes a module. Segments without a name
        are left out."""
        uses: dict[str, tuple[int, int, int]] = {}
        rows = requests = encodings = 0
        for chunk, encodes in chunks:
            rows += len(chunk.token_ids)
            encodings, requests = encodings + encodes, requests + (not encodes)
            for segment in () if encodes else chunk.segments:
                if segment.name is not None:
                    _, readers, reading = uses.get(segment.name, (0, 0, 0))
                    reading += len(chunk.token_ids)
                    uses[segment.name] = segment.states.length, readers + 1, reading
        segments = (SegmentUse(name, *use) for name, use in uses.items())
        ranked = sorted(segments, key=lambda use: (-use.requests, -use.rows, use.name))
        return cls(rows, requests, encodings, tuple(ranked))


IDLE = BatchSnapshot()
