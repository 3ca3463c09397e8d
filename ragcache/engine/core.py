"""The engine without its thread: takes requests, and runs one step at a time.

Iteration-level batching: requests join and leave between steps (Orca §3.1).

A runner that is asynchronous computes steps while the host goes on. Step n + 1 is then planned and
launched while step n runs, with rows whose tokens step n will give. Only after that the tokens of n
are waited for and accepted: stop tokens, limits and constraints. Sampling n + 1 is launched next,
and the text of n is delivered last, while the device computes n + 1. An answer that ends with n
leaves a row in n + 1 that nobody reads. Where a plan needs what n gives, n is waited for first.
"""

from __future__ import annotations

import sys
import time
from bisect import insort
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from ragcache.engine.checks import RequestChecker
from ragcache.engine.config import EngineConfig, EngineStats
from ragcache.engine.encoding import EncodeJob, EncodeQueue, Encoding, StatesChannel
from ragcache.engine.handle import RequestChannel, coalesced_wakeups
from ragcache.engine.kv_cache import BlockPool, RadixCache
from ragcache.engine.kv_cache_manager import KVCacheManager
from ragcache.engine.request import (
    Request,
    RequestOutput,
    TokenDelta,
)
from ragcache.engine.runner import AsynchronousRunner, ModelRunner
from ragcache.engine.sampler import Mark, SampledToken, SamplerState
from ragcache.engine.scheduler import (
    SchedulableRequest,
    SchedulerConfig,
    SchedulerOutput,
    schedule,
)
from ragcache.engine.sequence import Sequence, SequenceGroup
from ragcache.engine.step import (
    LaunchedStep,
    Lineup,
    Share,
    take_scores,
)
from ragcache.errors import (
    DeadlineExceeded,
    EngineFailed,
    TextFailed,
    UnusableLogits,
)

Clock = Callable[[], float]
AnswerChannel = RequestChannel[TokenDelta, RequestOutput]

ANSWER_AHEAD = 256
"""Tokens of an answer whose states a device finds one after another, where there is room."""


class EngineCore:
    """Schedules requests and encodings, runs the model, and samples the next tokens. checker: of
    what callers submit."""

    def __init__(
        self, runner: ModelRunner, config: EngineConfig, clock: Clock = time.perf_counter
    ) -> None:
        self.runner, self.config, self.clock = runner, config, clock
        # the runner as one that runs ahead, if it does
        self._ahead = cast("AsynchronousRunner", runner) if runner.asynchronous else None
        self._sampler = runner.create_sampler()
        pool = runner.create_pool(config.pool_bytes)
        self.kv_manager = KVCacheManager(
            pool,
            RadixCache(pool.block_size, int(config.retained * pool.num_blocks)),
            ahead=ANSWER_AHEAD if runner.asynchronous else 0,
        )
        self.checker = RequestChecker(runner, self.kv_manager)
        self.stats = EngineStats()
        self._scheduler_config = SchedulerConfig(
            pool.block_size, config.step_tokens, config.prefill_tokens, config.running
        )
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._encode_queue = EncodeQueue(runner.model, config.encode_bytes)
        self._last_number = 0
        self._launched: LaunchedStep | None = None  # whose tokens are not known yet
        self._changed = True  # since the last step was launched, so that it cannot be continued
        self._most_running = config.running  # less after memory ended
        self._lap_at = 0.0
        self._last_mark: Mark | None = None  # behind the last step that was computed

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
        return bool(self._waiting or self._running or self._encode_queue or self._launched)

    @property
    def is_stalled(self) -> bool:
        """Whether nothing is left but encodings for which there is no room until a caller takes
        states."""
        requests = self._waiting or self._running or self._launched
        return not requests and self._encode_queue.is_stalled

    def lift_encode_budget(self) -> None:
        """Lets encodings begin whatever they take."""
        self._encode_queue.budget_bytes = sys.maxsize

    def add_request(self, request: Request, channel: AnswerChannel, submitted_at: float) -> None:
        """Queues a checked request, unless it was cancelled meanwhile."""
        if channel.cancelled:
            return
        group = SequenceGroup(request, channel, submitted_at)
        self._enqueue(self._sequence(group, 0))

    def add_encoding(self, jobs: list[EncodeJob], channel: StatesChannel) -> None:
        """Queues modules to encode beside the requests."""
        self._encode_queue.add_jobs(jobs, channel)

    def step(self) -> None:
        """Runs one step: cancelled requests leave, the scheduler decides, the model computes."""
        self._lap_at = self.clock()
        self._drop_gone(self._lap_at)
        last, step = self._launched, self._launch()
        accepted: list[Sequence] = []
        now = self._lap_at
        try:
            if last is not None:
                accepted, now = self._accept(last)
                if step is None and self.busy:
                    step = self._launch()
                if any(sequence.generated == 1 for sequence in accepted):
                    self._deliver(accepted, now)  # first tokens do not wait for the next sampling
                    accepted = []
            if step is not None:
                self._sample(step)
                if self._ahead is None:
                    accepted, now = self._accept(step)
            elif last is None:
                self._encode_queue.hand_over()
        finally:  # what was accepted is the callers', whatever comes
            self._deliver(accepted, now)
        if not self.busy:
            self.runner.release_batch()
            self._last_mark = None
        self.stats.sampling += self._lap()

    def _lap(self) -> float:
        """Seconds since it was called last in this step."""
        begin, self._lap_at = self._lap_at, self.clock()
        return self._lap_at - begin

    def fail_all(self, error: BaseException) -> None:
        """Ends every request with `error`, and frees all memory."""
        launched, self._launched = self._launched, None
        if launched is not None:
            with suppress(Exception):  # unless the device has failed, it reads nothing after that
                (launched.tokens or self._sampler.launch(launched.logits, [])).wait()
        for sequence in (*self._running, *self._waiting):
            sequence.finished = True
            self.kv_manager.release_sequence(sequence)
            sequence.group.channel.fail(error)
        self._encode_queue.fail_all(error)
        self.kv_manager.forget_retained()  # states of a step that failed may be among them
        self._running, self._waiting = [], []
        self._changed = True
        self.runner.release_batch()

    def _launch(self) -> LaunchedStep | None:
        """Launches the next step. None where there is nothing to do, or where the tokens of the
        step that runs have to be known first."""
        last = self._launched
        if last is not None and last.lineup is not None and self._continues(last.lineup):
            return self._continue(last, last.lineup)
        shares = self._plan(self._lap_at, last)
        return self._start(shares, last) if shares else None

    def _continues(self, lineup: Lineup) -> bool:
        """Whether the next step is like the last one. Allocates the blocks that it needs."""
        full = len(self._running) >= self._most_running
        if self._changed or not lineup.left or self._encode_queue or (self._waiting and not full):
            return False
        if not lineup.room:
            lacking = lineup.lacking()
            if len(lacking) > self.kv_manager.available_blocks:
                return False
            for sequence in lacking:
                self.kv_manager.allocate_slots(sequence, 1)
            lineup.measure()
        return True

    def _continue(self, last: LaunchedStep, lineup: Lineup) -> LaunchedStep | None:
        assert self._ahead is not None
        assert last.tokens is not None
        try:
            launch = self._ahead.continue_batch(last.tokens.inputs)
            marks = self._marks()
            logits = launch()
        except torch.OutOfMemoryError:
            self._changed = True
            return None
        self.stats.planning += self._lap()
        lineup.advance()
        self._launched = LaunchedStep(
            last.shares, logits, last.sequences, last.states, lineup, True, marks=marks
        )
        return self._launched

    def _start(self, shares: list[Share], last: LaunchedStep | None) -> LaunchedStep | None:
        """Launches a step of these shares, or of fewer where the device's memory ends."""
        logits = None
        while logits is None:
            try:
                logits, marks = self._compute(shares, last)
                logits, scores = take_scores(shares, logits)
            except torch.OutOfMemoryError as error:
                if last is not None:  # once its tokens are known, some may be preempted
                    return None
                logits = None
                shares = self._fewer(shares, error)
                if not shares:
                    return None
        sequences = []
        for share in shares:
            if isinstance(share.owner, Encoding):
                share.owner.launched(share.count)
            else:
                share.chunk.private.advance(share.chunk.position_ids)
                if share.chunk.wants_logits:
                    sequences.append(share.owner)
        states = [self._begin_answer(sequence) for sequence in sequences]
        self._launched = LaunchedStep(shares, logits, sequences, states, marks=marks, scores=scores)
        alike = len(sequences) == len(shares) == len(self._running)
        if self._ahead is not None and alike and all(share.decodes for share in shares):
            self._launched.lineup = Lineup(shares, sequences)
        self._changed = False
        return self._launched

    def _begin_answer(self, sequence: Sequence) -> SamplerState:
        """The state of a sequence whose token is sampled next. Its text is made while the device
        computes; where it cannot be, its request ends and the others go on."""
        if sequence.sampler is None:
            sequence.sampler = sequence.new_sampler()
            try:
                sequence.begin_text()
            except Exception as error:  # foreign code
                self._fail(sequence.group, _text_failed(error))
        return sequence.sampler

    def _marks(self) -> list[Mark]:
        """A new list of marks, with that before the next step."""
        mark = self._sampler.mark()
        return [] if mark is None else [mark]

    def _compute(self, shares: list[Share], last: LaunchedStep | None) -> tuple[Tensor, list[Mark]]:
        """Launches a step of these shares; its logits, and the mark before it."""
        chunks = [share.chunk for share in shares]
        if self._ahead is None:
            compute = self.runner.prepare_batch(chunks)
            _mark_launched(shares)
            self.stats.planning += self._lap()
            logits = compute()
            self.stats.forward += self._lap()
            return logits, []
        inputs = None if last is None or last.tokens is None else last.tokens.inputs
        launch = self._ahead.prepare_batch(chunks, inputs)
        marks = self._marks()
        logits = launch()
        _mark_launched(shares)
        self.stats.planning += self._lap()
        return logits, marks

    def _plan(self, now: float, last: LaunchedStep | None) -> list[Share]:
        """What each request computes in this step, after preemption and admission. last: the step
        that runs; its sequences have one token more than is known."""
        rows = {} if last is None else last.rows()
        going = [
            sequence
            for sequence in self._running
            if sequence.number not in rows or sequence.tokens_left > 1
        ]
        ending = len(self._running) - len(going)  # they only wait for their last tokens
        config = self._scheduler_config
        if config.running != self._most_running - ending:
            config = replace(config, running=self._most_running - ending)
        running = [sequence.schedulable(unknown=sequence.number in rows) for sequence in going]
        output = schedule(
            running,
            (sequence.schedulable() for sequence in self._waiting),
            config,
            free_blocks=self.kv_manager.available_blocks,
            now=now,
        )
        if last is not None and (output.preempted or self._lacks_blocks(running, output)):
            return []
        for number in output.preempted:
            self._preempt(next(each for each in self._running if each.number == number))
        self._admit(output, now)
        shares = []
        for sequence in self._running:
            count = output.tokens.get(sequence.number, 0)
            row = rows.get(sequence.number)
            if row is None:
                count = min(count, len(sequence.tokens) - sequence.computed)
            if count:
                self.kv_manager.allocate_slots(sequence, count)
                shares.append(Share.of(sequence, sequence.next_chunk(count, row)))
        decoding = any(share.count == 1 for share in shares)
        most = self.config.step_tokens if decoding else self.config.prefill_tokens
        left = most - sum(share.count for share in shares)
        for encoding, count in self._encode_queue.portions(left):
            shares.append(Share.of(encoding, encoding.next_chunk(count)))
        return shares

    def _lacks_blocks(self, running: list[SchedulableRequest], output: SchedulerOutput) -> bool:
        """Whether a request lacks blocks that those hold which only wait for their last tokens."""
        size, tokens = self.pool.block_size, output.tokens
        needed = sum(each.blocks_for(tokens.get(each.number, 0), size) for each in running)
        return needed > self.kv_manager.available_blocks

    def _fewer(self, shares: list[Share], error: torch.OutOfMemoryError) -> list[Share]:
        """What to try where the device had too little memory for these shares: without encodings,
        without the youngest sequence, or with fewer of its tokens."""
        sequences = [share for share in shares if isinstance(share.owner, Sequence)]
        if sequences and len(sequences) < len(shares):
            return sequences
        *others, youngest = shares
        owner = youngest.owner
        if isinstance(owner, Sequence) and others:
            self._preempt(owner)
            self._most_running = len(self._running)  # until one of them ends
            return others
        if others:
            return others
        if youngest.count > 1:
            return [Share.of(owner, owner.next_chunk(youngest.count // 2))]
        if isinstance(owner, Encoding):
            raise error
        failure = EngineFailed("the device has no memory left for a single token of the request")
        failure.__cause__ = error
        self._fail(owner.group, failure)
        return []

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self.kv_manager.release_sequence(sequence)
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

    def _sample(self, step: LaunchedStep) -> None:
        """Launches the sampling of the next token of every sequence whose last one is computed."""
        forbidden = masks = None
        if step.lineup is None or not step.lineup.free:
            forbidden = [sequence.forbidden() for sequence in step.sequences]
            masks = [None if each.finished else each.mask() for each in step.sequences]
        step.marks += self._marks() if step.marks else []
        step.tokens = self._sampler.launch(step.logits, step.states, forbidden, masks)
        step.marks += self._marks() if step.marks else []

    def _accept(self, step: LaunchedStep) -> tuple[list[Sequence], float]:
        """Waits for the tokens of a step, and gives them to their sequences. Returns the sequences
        that have something to deliver, and the time."""
        assert step.tokens is not None
        self._share_blocks(step)  # while the device computes: what reads them is launched later
        self.stats.sampling += self._lap()
        tokens = step.tokens.wait()
        for each in step.scores:
            each.record()
        waited, now = self._lap(), self._lap_at
        if self._launched is step:
            self._launched = None
        self._account(step)
        accepted = []
        for sequence, token in zip(step.sequences, tokens, strict=True):
            if sequence.finished:  # it ended or left while the step ran
                continue
            if not isinstance(token, SampledToken):
                self._fail(sequence.group, sequence.failure or token)
                continue
            if sequence.index == 0 and len(sequence.tokens) == sequence.prompt_length:
                self._fork(sequence)
            sequence.accept_token(token, now)
            if sequence.constraint is not None and sequence.failure is not None:
                self._fail(sequence.group, sequence.failure)
            else:
                accepted.append(sequence)
        if self._launched is None and self._ends():  # nothing waits for the device but callers
            self._deliver(accepted, now)
            accepted = []
        self._retire(accepted)
        self._time(step, waited)
        return accepted, now

    def _ends(self) -> bool:
        """Whether there is nothing left to compute."""
        running = any(not sequence.finished for sequence in self._running)
        return not (running or self._waiting or self._encode_queue)

    def _time(self, step: LaunchedStep, waited: float) -> None:
        """Counts the seconds of a step that has been computed."""
        if not step.marks:
            self.stats.forward += waited
            return
        begin, computed, end = step.marks
        self.stats.forward += begin.elapsed_time(computed) / 1e3
        if self._last_mark is not None:
            self.stats.idle += self._last_mark.elapsed_time(begin) / 1e3
        self._last_mark = end

    def _share_blocks(self, step: LaunchedStep) -> None:
        """Lets the blocks be found that the step fills."""
        if step.continued:
            size = self.pool.block_size
            for sequence in step.sequences:
                if len(sequence.tokens) % size == 0 and not sequence.finished:
                    self._changed |= self.kv_manager.share_blocks(sequence, len(sequence.tokens))
            return
        for share in step.shares:
            owner = share.owner
            if isinstance(owner, Sequence) and owner.private is share.chunk.private:
                self._changed |= self.kv_manager.share_blocks(owner, share.end)

    def _account(self, step: LaunchedStep) -> None:
        """Counts the tokens whose states the step has written, and hands encodings over."""
        self.stats.steps += 1
        if step.continued:
            self.stats.decoded_tokens += len(step.sequences)
            return
        for share in step.shares:
            if isinstance(share.owner, Encoding):
                share.owner.computed()
                self.stats.encoded_tokens += share.count
            elif share.owner.generated:
                self.stats.decoded_tokens += share.count
            else:
                self.stats.prompt_tokens += share.count
        self._encode_queue.hand_over()

    def _deliver(self, accepted: list[Sequence], now: float) -> None:
        """Shows callers the tokens of a step."""
        with coalesced_wakeups():
            for sequence in accepted:
                try:
                    sequence.deliver(now)
                except Exception as error:  # foreign code, whose errors end only its own request
                    self._fail(sequence.group, _text_failed(error))
        self._retire(accepted)

    def _retire(self, accepted: list[Sequence]) -> None:
        """Those that have ended no longer run."""
        if not any(sequence.finished for sequence in accepted):
            return
        for sequence in self._running:
            if sequence.finished:
                self.kv_manager.release_sequence(sequence)
        self._running = [each for each in self._running if not each.finished]
        self._changed, self._most_running = True, self.config.running

    def _fork(self, leader: Sequence) -> None:
        """Begins the other answers to a prompt that has just been computed."""
        for index in range(1, leader.request.n):
            sequence = self._sequence(leader.group, index)
            free = len(self._running) < self.config.running
            if free and self.kv_manager.fork_sequence(leader, sequence):
                self._changed = True
                insort(self._running, sequence, key=_order)
            else:
                self._enqueue(sequence)

    def _drop_gone(self, now: float) -> None:
        """Ends requests that were cancelled or are past their deadline."""
        groups = [sequence.group for sequence in (*self._running, *self._waiting)]
        for group in [g for g in groups if g.channel.cancelled or now >= g.expires_at]:
            if group.channel.cancelled:
                self._drop(group)
            else:
                started = any(sequence.group is group for sequence in self._running)
                self._fail(group, _too_late(group, started=started))
        self._encode_queue.drop_cancelled()

    def _fail(self, group: SequenceGroup, error: BaseException) -> None:
        if isinstance(error, UnusableLogits):
            for sequence in self._running:
                if sequence.group is group:
                    self.kv_manager.disown_blocks(sequence)
        self._drop(group)
        group.channel.fail(error)

    def _drop(self, group: SequenceGroup) -> None:
        for sequence in (*self._running, *self._waiting):
            if sequence.group is group:
                sequence.finished = True
                self.kv_manager.release_sequence(sequence)
        self._changed, self._most_running = True, self.config.running
        self._running = [each for each in self._running if each.group is not group]
        self._waiting = [each for each in self._waiting if each.group is not group]

    def _sequence(self, group: SequenceGroup, index: int) -> Sequence:
        self._last_number += 1
        return Sequence(group, index, self._last_number)

    def _enqueue(self, sequence: Sequence) -> None:
        self._changed = True
        insort(self._waiting, sequence, key=_order)


def _mark_launched(shares: list[Share]) -> None:
    for share in shares:
        if isinstance(share.owner, Sequence) and not share.owner.group.channel.launched:
            share.owner.group.channel.mark_launched()


def _order(sequence: Sequence) -> tuple[float, int]:
    return (sequence.group.seniority, sequence.number)


def _text_failed(error: Exception) -> TextFailed:
    failure = TextFailed(f"the text of the request's answer could not be made: {error!r}")
    failure.__cause__ = error
    return failure


def _too_late(group: SequenceGroup, *, started: bool) -> DeadlineExceeded:
    where = "while it ran" if started else "while it waited in the queue"
    return DeadlineExceeded(
        f"the request's {group.request.timeout} s were over {where}; give it more time, or fewer "
        "requests to the engine"
    )
