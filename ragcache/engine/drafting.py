"""Steps that check drafts: which sequences get one, and which of its tokens count.

A drafted token costs a row of the step. A few more rows take little time, because a step of few
requests reads the model's weights for any of them; so only few requests at once get drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from typing import Final, cast

from ragcache.engine.config import EngineConfig, EngineStats
from ragcache.engine.encoding import Encoding
from ragcache.engine.kv_cache_manager import KVCacheManager
from ragcache.engine.sampler import SampledToken, SamplerState
from ragcache.engine.sequence import Sequence
from ragcache.engine.step import LaunchedStep, ScheduledWork
from ragcache.errors import UnusableLogits

MOST_SEQUENCES: Final = 8
"""Most running sequences with drafts."""

MOST_ROWS: Final = 32
"""Most drafted tokens of a step."""


class DraftPlanner:
    """Adds drafts to the work of steps.

    Args:
        config: Limits of the engine.
        kv_manager: Blocks of the sequences.
    """

    def __init__(self, config: EngineConfig, kv_manager: KVCacheManager) -> None:
        self._config, self._kv_manager = config, kv_manager

    def expects(self, running: Many[Sequence]) -> bool:
        """Whether a token that is not known yet may continue with a draft."""
        return self._suits(running) and any(
            each.draftable and each.drafter.expects for each in running
        )

    def add_to(self, work: list[ScheduledWork], running: Many[Sequence]) -> list[ScheduledWork]:
        """Add drafts to the tokens of sequences that decode. All tokens must be known."""
        decoding = sum(item.decodes for item in work) if self._suits(running) else 0
        if not decoding:
            return work
        rows = self._config.step_tokens - sum(item.count for item in work)
        most = min(self._config.draft_tokens, min(rows, MOST_ROWS) // decoding)
        return [self._drafted(item, most, running) if item.decodes else item for item in work]

    def settle(
        self, step: LaunchedStep, tokens: Many[SampledToken | UnusableLogits], stats: EngineStats
    ) -> Iterator[tuple[Sequence, SampledToken | UnusableLogits]]:
        """Yield the tokens of a step that count, with their sequences: of each draft the tokens
        that the model chose too, and the token behind them. Sequences forget the rest.

        Args:
            step: A step that has been computed.
            tokens: The token of each row.
            stats: Counters of the drafts.
        """
        if not step.drafted:
            yield from zip(step.sequences, tokens, strict=True)
            return
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

    def _suits(self, running: Many[Sequence]) -> bool:
        return self._config.draft_tokens > 0 and len(running) <= MOST_SEQUENCES

    def _drafted(self, item: ScheduledWork, most: int, running: Many[Sequence]) -> ScheduledWork:
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


def sampled_rows(work: Many[ScheduledWork]) -> tuple[list[Sequence], list[SamplerState]]:
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


def _sampled(work: Many[ScheduledWork]) -> Iterator[ScheduledWork]:
    for item in work:
        if item.chunk.wants_logits and not isinstance(item.owner, Encoding):
            yield item


def _owner(item: ScheduledWork) -> Sequence:
    return cast("Sequence", item.owner)


def _equals(chosen: SampledToken | UnusableLogits, token: int) -> bool:
    return isinstance(chosen, SampledToken) and chosen.token == token
