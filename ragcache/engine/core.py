"""The engine without its thread: takes requests, and runs one step at a time."""

# MERGED ragcache.engine.view: What the engine computes now, for whoever watches: a value that
#   its thread leaves behind.

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from ragcache.engine.batch import ScheduledChunk
from ragcache.engine.config import EngineConfig, EngineStats
from ragcache.engine.encoding import EncodeJob, EncodeQueue, Encoding, States
from ragcache.engine.handle import RequestChannel, coalesced_wakeups
from ragcache.engine.kv_cache import BlockPool, RadixCache
from ragcache.engine.kv_cache_manager import KVCacheManager
from ragcache.engine.request import Request, RequestOutput, TokenDelta, check_window
from ragcache.engine.runner import Runner
from ragcache.engine.sampler import choose
from ragcache.engine.scheduler import SchedulerConfig, SchedulerOutput, schedule
from ragcache.engine.sequence import Sequence, SequenceGroup
from ragcache.errors import DeadlineExceeded, PromptTooLong, UnsupportedModel, UnusableLogits

Clock = Callable[[], float]
Answers = RequestChannel[TokenDelta, RequestOutput]


@dataclass(frozen=True, slots=True)
class _Share:
    """A sequence or an encoding with the tokens that it computes in this step."""

    runs: Sequence | Encoding
    count: int
    work: ScheduledChunk


class EngineCore:
    """Iteration-level batching: requests join and leave between steps (Orca §3.1)."""

    def __init__(
        self, runner: Runner, settings: EngineConfig, clock: Clock = time.perf_counter
    ) -> None:
        self.runner, self.settings, self.clock = runner, settings, clock
        pool = runner.pool(settings.pool_bytes)
        self.memory = KVCacheManager(
            pool, RadixCache(pool.chunk, int(settings.retained * pool.total))
        )
        self.tally = EngineStats()
        self.view = IDLE
        self._seen: object = None
        self._limits = SchedulerConfig(
            pool.chunk, settings.step_tokens, settings.prefill_tokens, settings.running
        )
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._encodings = EncodeQueue(runner.model)
        self._numbers = 0

    @property
    def pool(self) -> BlockPool:
        return self.memory.pool

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running or self._encodings)

    def check(self, request: Request) -> None:
        """Raises `PromptTooLong` or `UnsupportedModel` for a request that could never run."""
        context = request.context
        if not self.runner.model.scheme.movable and any(each.delta for each in context.segments):
            raise UnsupportedModel(
                "the model's positions are learned, so that cached states cannot stand elsewhere "
                "than where they were encoded; place schemas with placement='schema'"
            )
        self.check_sizes(
            own=len(context.token_ids),
            documents=context.cached_tokens,
            end=context.next_position,
            max_new_tokens=request.max_new_tokens,
        )

    def check_sizes(
        self, *, own: int, documents: int, end: int, max_new_tokens: int, recomputed: int = 0
    ) -> None:
        """Raises `PromptTooLong` for a prompt and answer of sizes that could never run.

        own, documents: tokens of question and template, and of what it reads. recomputed: how many
        of the documents' tokens are computed nevertheless. end: the position after the prompt.
        """
        window = self.runner.window
        if documents:
            check_window(documents, own, window=window, max_new_tokens=max_new_tokens)
        if end + max_new_tokens > window:
            raise PromptTooLong(
                f"the prompt ends at position {end} and the answer may take "
                f"{max_new_tokens} more, but the model's window holds {window}"
            )
        tokens = own + recomputed + max_new_tokens
        if not self.memory.holds(tokens):
            raise PromptTooLong(
                f"the request may need {tokens} tokens of its own, but the pool holds "
                f"{self.pool.total * self.pool.chunk}; give the engine more pool bytes"
            )

    def room(self, computed: int, end: int) -> int:
        """The most tokens that an answer can have after a prompt of so many computed tokens that
        ends at `end`; one where there is no room, so that `check_sizes` refuses it."""
        left = self.pool.total * self.pool.chunk - computed
        return max(1, min(left, self.runner.window - end))

    def add(self, request: Request, channel: Answers, submitted_at: float) -> None:
        """Puts a request that was checked in the queue, unless it was given up meanwhile."""
        if channel.cancelled:
            return
        try:
            group = SequenceGroup(request, channel, submitted_at, shares=self.runner.shares)
            sequence = self._sequence(group, 0)
        except Exception as error:  # its `text` cannot be made: nobody else may suffer from that
            channel.fail(error)
        else:
            self._enqueue(sequence)

    def add_encoding(self, jobs: list[EncodeJob], channel: States) -> None:
        """Puts jobs in the queue of what is encoded beside the requests."""
        self._encodings.add(jobs, channel)

    def step(self) -> None:
        """Runs one step: whoever joins, leaves or goes on is decided first."""
        begin = self.clock()
        self._drop_gone(begin)
        shares = self._plan(begin)
        if shares:
            self._run(shares, begin)
        else:
            self._encodings.hand_over()
        if not self.busy:
            self.runner.idle()
            self.view, self._seen = IDLE, None

    def _run(self, shares: list[_Share], begin: float) -> None:
        step = self.runner.prepare([share.work for share in shares])
        self._publish(shares)
        planned = self.clock()
        logits = step()
        computed = self.clock()
        self._account(shares)
        with coalesced_wakeups():  # one wake-up tells a loop of all that the step brought
            self._sample(shares, logits, computed)
        tally = self.tally
        tally.steps += 1
        tally.planning += planned - begin
        tally.forward += computed - planned
        tally.sampling += self.clock() - computed

    def _publish(self, shares: list[_Share]) -> None:
        """Leaves a view of the step for whoever watches, unless it is as the last one was."""
        seen = [(id(share.runs), share.count) for share in shares]
        if seen != self._seen:
            works = ((share.work, isinstance(share.runs, Encoding)) for share in shares)
            self.view, self._seen = BatchSnapshot.of(works), seen

    def fail_all(self, error: BaseException) -> None:
        """Ends every request with `error`, and takes all memory back."""
        for sequence in (*self._running, *self._waiting):
            self._release(sequence)
            sequence.group.channel.fail(error)
        self._encodings.fail_all(error)
        self._running, self._waiting = [], []
        self.runner.idle()
        self.view, self._seen = IDLE, None

    def _plan(self, now: float) -> list[_Share]:
        """Who computes what in this step; preempted requests have left, admitted ones entered."""
        decision = schedule(
            [sequence.candidate() for sequence in self._running],
            (sequence.candidate() for sequence in self._waiting),
            self._limits,
            free_chunks=self.memory.available,
            now=now,
        )
        self._preempt(decision)
        self._admit(decision, now)
        shares = []
        for sequence in self._running:
            count = decision.tokens.get(sequence.number, 0)
            count = min(count, len(sequence.tokens) - sequence.computed)
            if count:
                self.memory.make_room(sequence, count)
                shares.append(_Share(sequence, count, sequence.work(count)))
        decoding = any(share.count == 1 for share in shares)
        most = self._limits.step_tokens if decoding else self._limits.prefill_tokens
        left = most - sum(share.count for share in shares)
        for encoding, count in self._encodings.portions(left):
            shares.append(_Share(encoding, count, encoding.work(count)))
        return shares

    def _preempt(self, decision: SchedulerOutput) -> None:
        for number in decision.preempted:
            sequence = next(each for each in self._running if each.number == number)
            self._running.remove(sequence)
            self._release(sequence)
            self._enqueue(sequence)
            self.tally.preempted += 1

    def _admit(self, decision: SchedulerOutput, now: float) -> None:
        entering = set(decision.admitted)
        if not entering:
            return
        admitted = [each for each in self._waiting if each.number in entering]
        self._waiting = [each for each in self._waiting if each.number not in entering]
        for sequence in admitted:
            insort(self._running, sequence, key=_order)
        for sequence in admitted:
            found = self.memory.enter(sequence)
            group = sequence.group
            group.channel.started = True
            if not group.admitted_at:
                group.admitted_at = now
                group.shared_tokens = found
                self.tally.admitted += 1
                self.tally.queued += now - group.submitted_at
            self.tally.shared_tokens += found

    def _account(self, shares: list[_Share]) -> None:
        """The step's states stand now."""
        for share in shares:
            if isinstance(share.runs, Encoding):
                share.runs.computed(share.count)
                self.tally.encoded_tokens += share.count
                continue
            self.memory.computed(share.runs, share.count)
            if share.runs.generated:
                self.tally.decoded_tokens += share.count
            else:
                self.tally.prompt_tokens += share.count
        self._encodings.hand_over()

    def _sample(self, shares: list[_Share], logits: Tensor, now: float) -> None:
        """The next token of every sequence whose last token was computed."""
        asked = [
            share.runs
            for share in shares
            if isinstance(share.runs, Sequence) and share.work.wants_logits
        ]
        if not asked:
            return
        forbidden = [sequence.forbidden() for sequence in asked]
        masks = [sequence.mask() for sequence in asked]
        chosen = choose(logits, [sequence.sampler for sequence in asked], forbidden, masks)
        for sequence, token in zip(asked, chosen, strict=True):
            if isinstance(token, UnusableLogits):
                self._fail(sequence.group, sequence.failure or token)
                continue
            if sequence.index == 0 and not sequence.generated:
                self._fork(sequence)
            sequence.accept(token, now)
            if sequence.failure is not None:
                self._fail(sequence.group, sequence.failure)
        for sequence in [each for each in self._running if each.finished]:
            self._running.remove(sequence)
            self._release(sequence)

    def _fork(self, leader: Sequence) -> None:
        """The prompt stands: the other answers to it begin."""
        for index in range(1, leader.request.n):
            sequence = self._sequence(leader.group, index)
            free = self.runner.shares and len(self._running) < self.settings.running
            if free and self.memory.fork(leader, sequence):
                insort(self._running, sequence, key=_order)
            else:
                self._enqueue(sequence)

    def _drop_gone(self, now: float) -> None:
        """Requests whose caller went away, or whose time is over, leave at once."""
        for sequence in (*self._running, *self._waiting):
            group = sequence.group
            if group.channel.cancelled:
                self._drop(group)
            elif group.expires_at is not None and now >= group.expires_at:
                self._fail(group, _too_late(group, started=sequence in self._running))
        self._encodings.drop_cancelled()

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
            self.runner.release(sequence.private)
        self.memory.leave(sequence)

    def _sequence(self, group: SequenceGroup, index: int) -> Sequence:
        self._numbers += 1
        return Sequence(group, index, self._numbers)

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
    """A segment that steps read. name: that of its states. requests, rows: that read it."""

    name: str
    tokens: int
    requests: int
    rows: int


@dataclass(frozen=True, slots=True)
class BatchSnapshot:
    """A step. rows: its new tokens; requests: those that they belong to; encodings: modules that
    are encoded beside them; segments: what is read, the most read first."""

    rows: int = 0
    requests: int = 0
    encodings: int = 0
    segments: tuple[SegmentUse, ...] = ()

    @classmethod
    def of(cls, works: Iterable[tuple[ScheduledChunk, bool]]) -> BatchSnapshot:
        """Of the works of a step, each with whether it encodes a module. Only what answers read
        is told, and of that what has a name."""
        uses: dict[str, tuple[int, int, int]] = {}
        rows = requests = encodings = 0
        for work, encodes in works:
            rows += len(work.token_ids)
            encodings, requests = encodings + encodes, requests + (not encodes)
            for segment in () if encodes else work.segments:
                if segment.name is not None:
                    _, readers, asking = uses.get(segment.name, (0, 0, 0))
                    asking += len(work.token_ids)
                    uses[segment.name] = segment.states.length, readers + 1, asking
        segments = (SegmentUse(name, *use) for name, use in uses.items())
        ranked = sorted(segments, key=lambda use: (-use.requests, -use.rows, use.name))
        return cls(rows, requests, encodings, tuple(ranked))


IDLE = BatchSnapshot()
