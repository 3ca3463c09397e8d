"""The engine core: runs the requests of its queue one step at a time, without a thread of its own.

Batching is per iteration: requests join and leave between steps (Orca §3.1).

An asynchronous runner computes a step while the host goes on. The core then works one step ahead:

1. Plan and launch step n + 1 while step n runs. Its decoding rows take their tokens from step n.
   The engine's thread begins with it as late as the device allows (`seconds_to_spare`), so that
   requests that arrive while step n runs join it.
2. Wait for the tokens of step n and accept them: stop tokens, limits, constraints.
3. Launch the sampling of step n + 1.
4. Deliver the text of step n to callers, while the device computes.

If an answer ends with step n, its row in step n + 1 is ignored. A plan that depends on the tokens
of step n (preemption, for example) waits for them first. While a question has a step for itself
(`QuestionTurns`), the tokens of all answers become known: they are planned behind it one by one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from ragcache.engine.config import EngineConfig, EngineStats
from ragcache.engine.constraint import PROCESS_ENDS
from ragcache.engine.decode_batch import DecodeBatch
from ragcache.engine.encoding import EncodeJob, Encoding, StatesChannel
from ragcache.engine.handle import coalesced_wakeups
from ragcache.engine.kv_cache import BlockPool
from ragcache.engine.kv_cache_manager import create_cache_manager
from ragcache.engine.launching import LaunchTimer, QuestionTurns
from ragcache.engine.pacing import StepPace
from ragcache.engine.queues import AnswerChannel, EncodeQueue, RequestQueue
from ragcache.engine.request import Request
from ragcache.engine.runner import AsynchronousRunner, ModelRunner
from ragcache.engine.sampler import DeviceTimestamp, SampledToken, SamplerState
from ragcache.engine.sampling_params import SamplingParams
from ragcache.engine.scheduler import SchedulerConfig, SchedulerOutput, schedule
from ragcache.engine.sequence import Sequence
from ragcache.engine.step import (
    DraftPlanner,
    LaunchedStep,
    ScheduledWork,
    StepTimes,
    sampled_rows,
    take_scores,
)
from ragcache.errors import EngineFailed, TextFailed, UnusableLogits

Clock = Callable[[], float]

SCORED_ROWS = 256
"""Most prompt tokens that a step scores. Each takes logits of the whole vocabulary: 256 of them
take 155 MB in float32 for a vocabulary of 151,936."""


ENCODING_SHARE = 4
"""Waiting encodings get one of this many tokens of a step, however many prompts wait."""


class EngineCore:
    """Schedules requests and encodings, runs the model, and samples the next tokens.

    Not thread-safe: one thread calls every method.

    Args:
        runner: Runner of the model.
        config: Memory and limits.
        clock: Returns the time in seconds.
    """

    def __init__(
        self, runner: ModelRunner, config: EngineConfig, clock: Clock = time.perf_counter
    ) -> None:
        self.runner, self.clock = runner, clock
        self._ahead = cast("AsynchronousRunner", runner) if runner.asynchronous else None
        self._sampler = runner.create_sampler()
        self.kv_manager, config = create_cache_manager(runner, config)
        self.config = config
        self.stats = EngineStats()
        self._drafts = DraftPlanner(config, self.kv_manager)
        self._scheduler_config = SchedulerConfig(
            self.pool.block_size, config.step_tokens, config.prefill_tokens, config.running
        )
        self._requests = RequestQueue(
            self.kv_manager, self.stats, config.running, runner.model.states_dtype
        )
        self._encode_queue = EncodeQueue(runner.model, config.encode_bytes)
        self._launched: LaunchedStep | None = None  # a step with tokens that are not known yet
        self._decoding = DecodeBatch()  # the rows of the launched step that the next one repeats
        self._measured_at = 0.0
        pace = None if config.max_gap_ms is None else StepPace(config.max_gap_ms / 1e3)
        launches = None if self._ahead is None else LaunchTimer()
        self._times = StepTimes(self.stats, pace, launches)
        self._question_turns = QuestionTurns()

    @property
    def pool(self) -> BlockPool:
        return self.kv_manager.pool

    @property
    def waiting(self) -> int:
        """Number of sequences in the waiting queue."""
        return len(self._requests.waiting)

    @property
    def running(self) -> int:
        """Number of running sequences."""
        return len(self._requests.running)

    @property
    def busy(self) -> bool:
        """Whether another step is needed."""
        return bool(self._requests or self._encode_queue or self._launched)

    @property
    def is_stalled(self) -> bool:
        """Whether the only work left is encodings that wait for callers to take finished states."""
        return not (self._requests or self._launched) and self._encode_queue.is_stalled

    def seconds_to_spare(self) -> float:
        """Seconds for which the next step can wait for more requests, because one still runs."""
        step = self._launched
        if step is None or not step.decoding:
            return 0.0
        beside = len(self._requests.running) > len(step.sequences)
        prompts = bool(beside or self._requests.waiting or self._encode_queue)
        return self._times.seconds_left(step, self.clock(), prompts=prompts)

    def lift_encode_budget(self) -> None:
        """Remove the memory limit of encodings, so that all of them can finish."""
        self._encode_queue.budget_bytes = sys.maxsize

    def warm_up(self) -> None:
        """Compile and capture what steps and their sampling need, before the first request."""
        self.runner.warm_up()
        model = self.runner.model
        logits = torch.zeros(2, model.vocabulary, dtype=model.dtype, device=model.device)
        for sampling in (SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9)):
            states = [SamplerState.start(sampling, ()) for _ in logits]
            self._sampler.launch(logits, states).wait()

    def add_request(self, request: Request, channel: AnswerChannel, submitted_at: float) -> None:
        """Queue a request that a `RequestChecker` has accepted. Ignores a canceled one."""
        if not channel.cancelled:
            self._requests.add_request(request, channel, submitted_at)

    def add_encoding(self, jobs: list[EncodeJob], channel: StatesChannel) -> None:
        """Queue modules to encode in the same steps as requests."""
        self._encode_queue.add_jobs(jobs, channel)

    def step(self) -> None:
        """Run one step: drop canceled requests, schedule, compute, sample and deliver."""
        self._measured_at = self.clock()
        begin = self._measured_at
        self._requests.drop_gone(begin)
        self._encode_queue.drop_cancelled()
        last, step = self._launched, self._launch()
        if last is not None and step is not None:
            self._times.observe_launch(step, begin)
        accepted, now = list[Sequence](), self._measured_at
        try:
            if last is not None:
                accepted, now = self._accept(last)
                if step is None and self.busy:
                    step = self._launch()
                first, accepted = _split_first(last, accepted)
                if first:  # these wait neither for others nor for a sampling
                    self._deliver(first, now)
            if step is not None:
                self._sample(step)
                if self._ahead is None:
                    accepted, now = self._accept(step)
            elif last is None:
                self._encode_queue.hand_over()
        finally:  # accepted tokens reach their callers even if the step failed
            self._deliver(accepted, now)
        if not self.busy:
            self._forget_decoding()
            self.runner.release_batch()
        if not self.busy or self.is_stalled:  # the engine waits for a caller
            self._times.pause()
        self.stats.sampling += self._elapsed()

    def _elapsed(self) -> float:
        """Seconds since the previous call in this step, or since the step began."""
        begin, self._measured_at = self._measured_at, self.clock()
        return self._measured_at - begin

    def fail_all(self, error: BaseException) -> None:
        """Fail every request with `error` and free all memory."""
        self._requests.fail_all(error)  # first: freeing may fail
        self._encode_queue.fail_all(error)
        launched, self._launched = self._launched, None
        if launched is not None:
            with suppress(Exception):  # the device may still read the step's memory
                (launched.tokens or self._sampler.launch(launched.logits, [])).wait()
        self._requests.clear()
        self.kv_manager.forget_retained()  # may hold states of the failed step
        self._forget_decoding()
        self.runner.release_batch()
        self._times.pause()

    def _launch(self) -> LaunchedStep | None:
        """Launch the next step.

        Returns:
            The step, unless there is no work or the plan depends on tokens of the running step.
        """
        last = self._launched
        if last is None:
            self._forget_decoding()
            return self._start(self._plan(self._measured_at), None)
        if last.drafted or self._drafts.expects(self._requests.running):
            return None  # a draft continues tokens that the host knows
        work = self._plan_behind(last, self._measured_at)
        return None if work is None else self._start(work, last)

    def _start(self, work: list[ScheduledWork], last: LaunchedStep | None) -> LaunchedStep | None:
        """Launch a step, with less work if the device runs out of memory."""
        logits = None
        while logits is None:
            if not work and not self._decoding.rows:
                return None
            try:
                logits, timestamps = self._compute(work, last)
                logits, scores = take_scores(work, logits, self._decoding.rows)
            except torch.OutOfMemoryError as error:
                if last is not None:  # preemption needs the tokens of the running step
                    return None
                logits = None
                work = self._reduce(work, error)
        for item in work:
            if isinstance(item.owner, Encoding):
                item.owner.launched(item.count)
            else:
                item.chunk.private.advance(item.chunk.position_ids)
        filled = self._decoding.advance() if self._decoding.rows else []
        sequences, states = self._sampled(work, last)
        self._launched = LaunchedStep(
            work,
            logits,
            sequences,
            states,
            self._decoding.rows,
            self._decoding.version,
            filled,
            timestamps=timestamps,
            scores=scores,
            drafted=any(item.chunk.drafted for item in work),
            launched_at=self._measured_at,
        )
        return self._launched

    def _forget_decoding(self) -> None:
        """Empty the decode batch. Its sequences are then planned as any others."""
        if self._decoding.rows:
            self._decoding = DecodeBatch()

    def _sampled(
        self, work: list[ScheduledWork], last: LaunchedStep | None
    ) -> tuple[list[Sequence], list[SamplerState]]:
        """Return the sequence and the sampler state of each row from which a token is sampled.

        If nothing has changed, these are the lists of the running step. The sampler then keeps its
        columns.
        """
        batch = self._decoding
        for item in work:
            if item.chunk.wants_logits and isinstance(item.owner, Sequence):
                self._begin_answer(item.owner)
        sequences, states = sampled_rows(work)
        if not batch.rows:
            return sequences, states
        if (
            last is not None
            and not sequences
            and batch.version == last.version
            and len(last.sequences) == last.decoding
        ):
            return last.sequences, last.states
        return [*batch.sequences, *sequences], [*batch.states, *states]

    def _begin_answer(self, sequence: Sequence) -> None:
        """Create the sampler state of a sequence, and the answer's text, once.

        Fails the request if its text cannot be created.
        """
        if sequence.sampler is not None:
            return
        sequence.sampler = sequence.new_sampler()
        try:
            sequence.begin_text()
        except PROCESS_ENDS:
            raise
        except BaseException as error:  # a caller's text; panics of Rust are no `Exception`
            self._requests.fail_request(sequence.group, _text_failed(error))

    def _timestamps(self) -> list[DeviceTimestamp]:
        """A list with the device's present timestamp. Empty on a CPU."""
        timestamp = self._sampler.timestamp()
        return [] if timestamp is None else [timestamp]

    def _compute(
        self, work: list[ScheduledWork], last: LaunchedStep | None
    ) -> tuple[Tensor, list[DeviceTimestamp]]:
        """Launch a step. Returns its logits and the timestamp of its begin."""
        chunks = [item.chunk for item in work]
        if self._ahead is None:
            compute = self.runner.prepare_batch(chunks)
            _mark_launched(work)
            self.stats.planning += self._elapsed()
            logits = compute()
            self.stats.forward += self._elapsed()
            return logits, []
        inputs = None if last is None or last.tokens is None else last.tokens.inputs
        launch = self._ahead.prepare_batch(chunks, inputs, self._decoding)
        timestamps = self._timestamps()
        logits = launch()
        _mark_launched(work)
        self.stats.planning += self._elapsed()
        return logits, timestamps

    def _plan(self, now: float) -> list[ScheduledWork]:
        """Plan the next step from known tokens; preempt and admit requests."""
        requests = self._requests
        decoding = sum(each.generated > 0 for each in requests.running)
        output = schedule(
            [each.schedulable() for each in requests.running],
            (each.schedulable() for each in requests.waiting),
            self._limits(requests.max_running, decoding),
            free_blocks=self.kv_manager.available_blocks,
            now=now,
        )
        for number in output.preempted:
            requests.preempt_sequence(next(e for e in requests.running if e.number == number))
        requests.admit_sequences(output.admitted, now)
        work = self._work_of(requests.running, output)
        return self._with_encodings(self._drafts.add_to(work, requests.running))

    def _plan_behind(self, last: LaunchedStep, now: float) -> list[ScheduledWork] | None:
        """Plan the step behind the running one: move the decode batch on, admit requests, and
        return the work beside the batch. Returns None if a request may have to be preempted."""
        requests, batch = self._requests, self._decoding
        size = self.pool.block_size
        batch.leave()
        batch.join(last.sequences[last.decoding :], last.decoding)
        full, available = batch.full_rows(), self.kv_manager.available_blocks
        beside, ending = list[Sequence](), 0
        if len(requests.running) > batch.rows:
            sampled = set(last.sequences)
            beside = [each for each in requests.running if each not in sampled]
            ending = len(requests.running) - batch.rows - len(beside)  # their last token is to come
        running = [sequence.schedulable() for sequence in beside]
        available -= len(full)
        if sum(each.blocks_for(1, size) for each in running) > available:
            return None
        for row in full:
            self.kv_manager.allocate_slots(batch.sequences[row], 1)
            batch.put_blocks(row)
        limits = self._limits(requests.max_running - ending, batch.rows)
        if not running and not (requests.waiting and batch.rows < limits.max_running):
            return self._with_encodings([])
        output = schedule(
            running,
            (sequence.schedulable() for sequence in requests.waiting),
            limits,
            free_blocks=available,
            now=now,
            decoding=batch.rows,
        )
        admitted = requests.admit_sequences(output.admitted, now)
        work = self._work_of([*beside, *admitted], output)
        alone = admitted and not beside and not self._encode_queue and self._times.pace is None
        if alone and self._question_turns.take(batch.rows, sum(item.count for item in work), now):
            self._forget_decoding()  # this step samples no token of an answer
            return work
        return self._with_encodings(work)

    def _limits(self, max_running: int, decoding: int) -> SchedulerConfig:
        """The scheduler's limits for a step in which `decoding` running requests decode."""
        config = self._scheduler_config
        if config.max_running != max_running:
            config = replace(config, max_running=max_running)
        if decoding and self._times.pace is not None:
            fitting = decoding + self._times.pace.tokens_beside(decoding)
            config = replace(config, step_tokens=min(config.step_tokens, fitting))
        if self._encode_queue and not self._encode_queue.is_stalled:
            budgets = config.step_tokens, config.prefill_tokens
            step_tokens, prefill_tokens = (each - each // ENCODING_SHARE for each in budgets)
            config = replace(config, step_tokens=step_tokens, prefill_tokens=prefill_tokens)
        return config

    def _work_of(
        self, sequences: Iterable[Sequence], output: SchedulerOutput
    ) -> list[ScheduledWork]:
        """The scheduled work of sequences whose tokens are known."""
        work, scored = list[ScheduledWork](), SCORED_ROWS
        for sequence in sequences:
            count = output.tokens.get(sequence.number, 0)
            count = min(count, len(sequence.tokens) - sequence.computed)
            count = min(count, sequence.most_tokens(scored))
            count = self.kv_manager.limit_tokens(sequence, count)
            if count:
                self.kv_manager.allocate_slots(sequence, count)
                chunk = sequence.next_chunk(count)
                scored -= chunk.scored[1] - chunk.scored[0]
                work.append(ScheduledWork.of(sequence, chunk))
        return work

    def _with_encodings(self, work: list[ScheduledWork]) -> list[ScheduledWork]:
        """Add encodings to the work of a step, within its token budget."""
        if not self._encode_queue:
            return work
        rows = self._decoding.rows
        decoding = rows or any(item.count == 1 or item.chunk.drafted for item in work)
        most = self.config.step_tokens if decoding else self.config.prefill_tokens
        rows += sum(item.count for item in work)
        left = most - rows
        if decoding and self._times.pace is not None:
            left = min(left, self._times.pace.tokens_beside(rows))
        for encoding, count in self._encode_queue.portions(left):
            work.append(ScheduledWork.of(encoding, encoding.next_chunk(count)))
        return work

    def _reduce(
        self, work: list[ScheduledWork], error: torch.OutOfMemoryError
    ) -> list[ScheduledWork]:
        """Reduce work for which the device had too little memory.

        Drops encodings first, then the youngest sequence, then half of the last one's tokens.
        """
        sequences = [item for item in work if isinstance(item.owner, Sequence)]
        if sequences and len(sequences) < len(work):
            return sequences
        *others, youngest = work
        owner = youngest.owner
        if isinstance(owner, Sequence) and others:
            self._requests.preempt_sequence(owner)
            self._requests.admit_no_more()
            return others
        if others:
            return others
        if youngest.count > 1:
            return [ScheduledWork.of(owner, owner.next_chunk(youngest.count // 2))]
        if isinstance(owner, Encoding):
            raise error
        failure = EngineFailed("the device has no memory left for a single token of the request")
        failure.__cause__ = error
        self._requests.fail_request(owner.group, failure)
        return []

    def _sample(self, step: LaunchedStep) -> None:
        """Launch the sampling of the next token of each of the step's sequences."""
        forbidden = masks = None
        if any(sequence.restricted for sequence in step.sequences):
            forbidden = [sequence.forbidden() for sequence in step.sequences]
            masks = [None if each.finished else each.mask() for each in step.sequences]
        step.timestamps += self._timestamps() if step.timestamps else []
        step.tokens = self._sampler.launch(step.logits, step.states, forbidden, masks)
        step.timestamps += self._timestamps() if step.timestamps else []

    def _accept(self, step: LaunchedStep) -> tuple[list[Sequence], float]:
        """Wait for the tokens of a step and give them to their sequences.

        Returns the sequences that have a token to deliver, and the time.
        """
        assert step.tokens is not None
        self._share_blocks(step)  # while the device computes: readers are launched later
        self.stats.sampling += self._elapsed()
        tokens = step.tokens.wait()
        if (failure := self.runner.model.failure) is not None:
            raise failure  # sums that no longer wait for a rank have any result
        for each in step.scores:
            each.record()
        waited, now = self._elapsed(), self._measured_at
        if self._launched is step:
            self._launched = None
        self._count_tokens(step)
        accepted = self._accept_tokens(step, tokens, now)
        if self._launched is None and self._is_drained():
            self._deliver(accepted, now)
            accepted = []
        self._requests.retire_sequences(accepted)
        self._times.observe_step(step, now, waited)
        return accepted, now

    def _accept_tokens(
        self, step: LaunchedStep, tokens: Seq[SampledToken | UnusableLogits], now: float
    ) -> list[Sequence]:
        """Give the tokens of a step to their sequences. Requests without a usable one fail.

        Returns the sequences that have a token to deliver.
        """
        accepted = list[Sequence]()
        for sequence, token in self._drafts.settle(step, tokens, self.stats):
            if sequence.finished:  # ended or canceled while the step ran
                continue
            if not isinstance(token, SampledToken):
                self._requests.fail_request(sequence.group, sequence.explain_failure(token))
                continue
            if sequence.forks:
                self._requests.fork_sequence(sequence)
            sequence.accept_token(token, now)
            if sequence.constraint is not None and sequence.failure is not None:
                self._requests.fail_request(sequence.group, sequence.failure)
            elif not (accepted and accepted[-1] is sequence):
                accepted.append(sequence)
        return accepted

    def _is_drained(self) -> bool:
        """Whether no work is left."""
        running = any(not sequence.finished for sequence in self._requests.running)
        return not (running or self._requests.waiting or self._encode_queue)

    def _share_blocks(self, step: LaunchedStep) -> None:
        """Offer the blocks that the step fills to other requests."""
        for sequence, table, length in step.filled:
            if sequence.private is table and self.kv_manager.share_blocks(sequence, length):
                self._decoding.exchange(sequence)
        for item in step.work:
            owner = item.owner
            if isinstance(owner, Sequence) and owner.private is item.chunk.private:
                known = item.end - item.chunk.drafted
                if self.kv_manager.share_blocks(owner, known):
                    self._decoding.exchange(owner)

    def _count_tokens(self, step: LaunchedStep) -> None:
        """Add the tokens of a computed step to the counters; hand over finished encodings."""
        self.stats.steps += 1
        self.stats.decoded_tokens += step.decoding
        for item in step.work:
            if isinstance(item.owner, Encoding):
                item.owner.computed()
                self.stats.encoded_tokens += item.count
            elif item.owner.generated:
                self.stats.decoded_tokens += item.count
            else:
                self.stats.prompt_tokens += item.count
        self._encode_queue.hand_over()

    def _deliver(self, accepted: list[Sequence], now: float) -> None:
        """Deliver accepted tokens to their callers."""
        with coalesced_wakeups():
            for sequence in accepted:
                if sequence.finished:  # before the caller can ask the next question
                    self._requests.keep_states(sequence)
                try:
                    sequence.deliver(now)
                except PROCESS_ENDS:
                    raise
                except BaseException as error:  # a caller's text: fails its own request only
                    self._requests.fail_request(sequence.group, _text_failed(error))
        self._requests.retire_sequences(accepted)


def _mark_launched(work: list[ScheduledWork]) -> None:
    for item in work:
        if isinstance(item.owner, Sequence) and not item.owner.group.channel.launched:
            item.owner.group.channel.mark_launched()


def _split_first(
    step: LaunchedStep, accepted: list[Sequence]
) -> tuple[list[Sequence], list[Sequence]]:
    """Split the sequences with a token of a step: first tokens of answers, and later tokens.

    Only rows behind the decode batch have first tokens.
    """
    begin = max(0, len(accepted) - (len(step.sequences) - step.decoding))
    later, new = accepted[:begin], accepted[begin:]
    first = [each for each in new if each.generated <= 1]
    return first, later + [each for each in new if each.generated > 1]


def _text_failed(error: BaseException) -> TextFailed:
    failure = TextFailed(f"the text of the request's answer could not be made: {error!r}")
    failure.__cause__ = error
    return failure
