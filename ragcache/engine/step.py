"""Steps of the engine: who computes what, the step in flight, drafts, and times of steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Final, cast

import torch
from torch import Tensor

from ragcache.engine.batch import ScheduledChunk
from ragcache.engine.config import EngineConfig, EngineStats
from ragcache.engine.decode_batch import FilledBlock
from ragcache.engine.encoding import Encoding
from ragcache.engine.kv_cache_manager import KVCacheManager
from ragcache.engine.launching import LaunchTimer
from ragcache.engine.pacing import StepPace
from ragcache.engine.sampler import (
    GPU_ROWS,
    DeviceTimestamp,
    PendingTokens,
    SampledToken,
    SamplerState,
    report_logprobs,
)
from ragcache.engine.sampling import logprobs_of
from ragcache.engine.sequence import Sequence
from ragcache.errors import UnusableLogits

MOST_DRAFTED: Final = 32
"""Most drafted tokens of a step."""


@dataclass(slots=True)  # not frozen: every sequence has a new one in every step
class ScheduledWork:
    """The tokens that one sequence or encoding computes in a step."""

    owner: Sequence | Encoding
    chunk: ScheduledChunk

    count: int
    """Number of tokens."""

    end: int
    """Private tokens of the owner once the step has been computed."""

    @classmethod
    def of(cls, owner: Sequence | Encoding, chunk: ScheduledChunk) -> ScheduledWork:
        count = len(chunk.token_ids)
        return cls(owner, chunk, count, chunk.private.length + count)

    @property
    def decodes(self) -> bool:
        """Whether the owner is a sequence that computes one token of its answer, and drafts."""
        if isinstance(self.owner, Encoding) or self.count > 1 + self.chunk.drafted:
            return False
        return self.owner.generated > 0


@dataclass(frozen=True, slots=True, eq=False)
class PromptScores:
    """Log-probabilities of the tokens begin:begin + N of a sequence's own prompt."""

    sequence: Sequence
    begin: int
    found: list[tuple[Tensor, Tensor, Tensor]]
    """Results of `logprobs_of` for runs of the tokens."""

    def record(self) -> None:
        """Store the values in the sequence's group. Waits for the device."""
        at, group = self.begin, self.sequence.group
        for run in self.found:
            tokens = self.sequence.tokens[at : at + len(run[0])]
            counts = [self.sequence.request.sampling.logprobs or 0] * len(tokens)
            group.prompt_logprobs.update(enumerate(report_logprobs(tokens, counts, *run), at))
            at += len(tokens)


def take_scores(
    work: Iterable[ScheduledWork], logits: Tensor, decoding: int = 0
) -> tuple[Tensor, list[PromptScores]]:
    """Split a step's logits into rows to sample from and scores of prompt tokens.

    Args:
        work: The step's work beside the decode batch.
        logits: [R, V], the rows of the decode batch, then the rows of `ScheduledChunk.logit_rows`
            of each chunk, in order.
        decoding: Number of rows of the decode batch.

    Returns:
        The rows from which next tokens are sampled, and the scores that the other rows give.
    """
    work = list(work)
    if not any(item.chunk.scored[0] < item.chunk.scored[1] for item in work):
        return logits, []
    scores, sampled, at = [], [*range(decoding)], decoding
    for item in work:
        begin, end = item.chunk.scored
        if begin < end and isinstance(item.owner, Sequence):
            first = item.end - item.count + begin + 1
            rows = logits[at : at + end - begin]
            tokens = torch.tensor(item.owner.tokens[first : first + len(rows)]).to(rows.device)
            split = (torch.split(each, GPU_ROWS) for each in (rows, tokens))
            runs = zip(*split, strict=True)
            scores.append(PromptScores(item.owner, first, [logprobs_of(*run) for run in runs]))
            at += end - begin
        if item.chunk.wants_logits:
            count = 1 + item.chunk.drafted
            sampled += range(at, at + count)
            at += count
    return logits[torch.tensor(sampled, dtype=torch.int64, device=logits.device)], scores


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A step that was launched and may still run. Keeps everything that the step reads alive."""

    work: list[ScheduledWork]
    """Work of the step beside the decode batch."""

    logits: Tensor

    sequences: list[Sequence]
    """Sequence of each row of `logits`, whose next token is sampled from it. The rows of the decode
    batch come first."""

    states: list[SamplerState]
    """Sampler state of each row."""

    decoding: int = 0
    """Number of rows of the decode batch."""

    version: int = 0
    """Version of the decode batch."""

    filled: list[FilledBlock] = field(default_factory=list)
    """Blocks of the decode batch that the step fills."""

    tokens: PendingTokens | None = None
    """The sampled tokens, once sampling has been launched."""

    timestamps: list[DeviceTimestamp] = field(default_factory=list)
    """Device times before the model, after it and after sampling. Empty on a CPU."""

    scores: list[PromptScores] = field(default_factory=list)
    """Log-probabilities of prompt tokens (`Request.prompt_logprobs`)."""

    drafted: bool = False
    """Whether the step checks drafts, so that tokens of some rows may not count."""

    launched_at: float = 0.0
    """Time at which the launch was done, on the core's clock."""

    @property
    def rows(self) -> int:
        """Number of tokens that the step computes."""
        return self.decoding + sum(item.count for item in self.work)


class StepTimes:
    """Counts the times of steps, and lets the pace and the launches learn from them.

    Args:
        stats: Counters of the engine.
        pace: Number of tokens beside answers. None if gaps between tokens have no bound.
        launches: Timer of the launches. None if steps are computed one at a time.

    Attributes:
        pace: The pace.
        launches: The timer.
    """

    def __init__(
        self, stats: EngineStats, pace: StepPace | None, launches: LaunchTimer | None
    ) -> None:
        self.pace, self.launches = pace, launches
        self._stats = stats
        self._computed_at: float | None = None  # host time at the end of the last computed step
        self._computed: DeviceTimestamp | None = None  # device time at its end

    def seconds_left(self, step: LaunchedStep, now: float, *, prompts: bool) -> float:
        """Seconds that the launch behind a running step may wait. See `LaunchTimer`."""
        if self.launches is None:
            return 0.0
        return self.launches.seconds_left(now - self._begin_of(step), prompts=prompts)

    def observe_launch(self, step: LaunchedStep, began: float) -> None:
        """Take into account how long the host has planned and launched a step, since `began`."""
        if self.launches is not None:
            self.launches.observe_launch(step.launched_at - began, prompts=bool(step.work))

    def observe_step(self, step: LaunchedStep, now: float, waited: float) -> None:
        """Take the time of a computed step into account.

        Args:
            step: The step.
            now: Time at which its tokens became known.
            waited: Seconds for which the host waited for them.
        """
        if self.launches is not None and not step.work:
            self.launches.observe_step(now - self._begin_of(step))
        if self.pace is not None and self._computed_at is not None:
            self.pace.observe(step.rows, now - self._computed_at)
        self._computed_at = now
        if step.timestamps:
            self._observe_device(step)
        else:
            self._stats.forward += waited

    def pause(self) -> None:
        """Count the time until the next step neither as the step's nor as idle time."""
        self._computed = self._computed_at = None
        if self.launches is not None:
            self.launches.forget_steps()

    def _observe_device(self, step: LaunchedStep) -> None:
        """Take the device times of a step into account: its own, and the idle time before it."""
        begin, computed, end = step.timestamps
        self._stats.forward += begin.elapsed_time(computed) / 1e3
        if self._computed is not None:
            idle = self._computed.elapsed_time(begin) / 1e3
            self._stats.idle += idle
            if self.launches is not None and not step.work:  # a late request may hold up its step
                self.launches.observe_idle(idle)
        self._computed = end

    def _begin_of(self, step: LaunchedStep) -> float:
        """The time from which the device computes a step, by the host's clock."""
        return max(step.launched_at, self._computed_at or 0.0)


class DraftPlanner:
    """Adds drafts to the work of steps, and takes the tokens that count from their results.

    A drafted token costs a row. A few more rows take little time in a step of few requests, which
    reads the model's weights for any number of rows.

    Args:
        config: Limits of the engine.
        kv_manager: Blocks of the sequences.
    """

    def __init__(self, config: EngineConfig, kv_manager: KVCacheManager) -> None:
        self._config, self._kv_manager = config, kv_manager

    def expects(self, running: Seq[Sequence]) -> bool:
        """Whether a token that is not known yet may continue with a draft."""
        return self._suits(running) and any(
            each.draftable and each.drafter.expects for each in running
        )

    def add_to(self, work: list[ScheduledWork], running: Seq[Sequence]) -> list[ScheduledWork]:
        """Add drafts to the tokens of sequences that decode. All tokens must be known."""
        decoding = sum(item.decodes for item in work) if self._suits(running) else 0
        if not decoding:
            return work
        rows = self._config.step_tokens - sum(item.count for item in work)
        most = min(self._config.draft_tokens, min(rows, MOST_DRAFTED) // decoding)
        return [self._drafted(item, most, running) if item.decodes else item for item in work]

    def settle(
        self, step: LaunchedStep, tokens: Seq[SampledToken | UnusableLogits], stats: EngineStats
    ) -> Iterable[tuple[Sequence, SampledToken | UnusableLogits]]:
        """Return the tokens of a step that count, with their sequences: of each draft the tokens
        that the model chose too, and the token behind them. Sequences forget the rest.

        Args:
            step: A step that has been computed.
            tokens: The token of each row.
            stats: Counters of the drafts.
        """
        if step.drafted:
            return self._settle_drafts(step, tokens, stats)
        return zip(step.sequences, tokens, strict=True)

    def _settle_drafts(
        self, step: LaunchedStep, tokens: Seq[SampledToken | UnusableLogits], stats: EngineStats
    ) -> Iterator[tuple[Sequence, SampledToken | UnusableLogits]]:
        row = 0
        for item in _sampled(step.work):
            sequence, chunk = _owner(item), item.chunk
            chosen = tokens[row : row + 1 + chunk.drafted]
            row += len(chosen)
            right = 0
            while right < chunk.drafted and _equals(chosen[right], chunk.token_ids[1 + right]):
                right += 1
            if chunk.drafted and sequence.private is chunk.private:  # it still runs
                sequence.forget_draft(item.end - chunk.drafted + right, drawn=right + 1)
                stats.drafted_tokens += chunk.drafted
                stats.accepted_tokens += right
            for each in chosen[: right + 1]:
                yield sequence, each

    def _suits(self, running: Seq[Sequence]) -> bool:
        config = self._config
        return config.draft_tokens > 0 and len(running) <= config.draft_requests

    def _drafted(self, item: ScheduledWork, most: int, running: Seq[Sequence]) -> ScheduledWork:
        """The work of a sequence that decodes, with up to `most` drafted tokens."""
        sequence = _owner(item)
        if not sequence.draftable or sequence.private is None:
            return item
        room = sequence.private.capacity - item.end
        if self._kv_manager.available_blocks > len(running):  # each may need one soon
            room += sequence.private.pool.block_size
        draft = sequence.drafter.propose(min(most, room, sequence.tokens_left - 1))
        if not draft:
            return item
        self._kv_manager.allocate_slots(sequence, 1 + len(draft))
        return ScheduledWork.of(sequence, sequence.draft_chunk(draft))


def sampled_rows(work: Seq[ScheduledWork]) -> tuple[list[Sequence], list[SamplerState]]:
    """The sequence and the sampler state of each row from which a token is sampled."""
    sequences, states = list[Sequence](), list[SamplerState]()
    for item in _sampled(work):
        sequence = _owner(item)
        assert sequence.sampler is not None
        rows = range(1 + item.chunk.drafted)
        sequences += [sequence for _ in rows]
        drafted = item.chunk.drafted > 0
        states += [sequence.sampler.ahead(n) if drafted else sequence.sampler for n in rows]
    return sequences, states


def _sampled(work: Seq[ScheduledWork]) -> Iterator[ScheduledWork]:
    for item in work:
        if item.chunk.wants_logits and not isinstance(item.owner, Encoding):
            yield item


def _owner(item: ScheduledWork) -> Sequence:
    return cast("Sequence", item.owner)


def _equals(chosen: SampledToken | UnusableLogits, token: int) -> bool:
    return isinstance(chosen, SampledToken) and chosen.token == token
