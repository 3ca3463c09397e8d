"""Steps of the engine: who computes what in one, and what is under way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ragcache.engine.batch import ScheduledChunk
from ragcache.engine.encoding import Encoding
from ragcache.engine.sampler import Mark, PendingTokens, SamplerState
from ragcache.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Share:
    """A sequence or an encoding with the tokens that it computes in a step. end: its private
    states after that."""

    owner: Sequence | Encoding
    chunk: ScheduledChunk
    end: int

    @classmethod
    def of(cls, owner: Sequence | Encoding, chunk: ScheduledChunk) -> Share:
        return cls(owner, chunk, chunk.private.length + len(chunk.token_ids))

    @property
    def count(self) -> int:
        return len(self.chunk.token_ids)

    @property
    def decodes(self) -> bool:
        """Whether it computes a token of an answer, which the next one follows directly."""
        if isinstance(self.owner, Encoding) or self.count > 1:
            return False
        return self.chunk.follows is not None or self.owner.generated > 0


@dataclass(frozen=True, slots=True, eq=False)
class PromptScores:
    """Log-probabilities [N] of tokens of a sequence's prompt, from the own token `begin` on."""

    sequence: Sequence
    begin: int
    logprobs: Tensor

    def record(self) -> None:
        """Notes them; waits for the device."""
        self.sequence.group.prompt_logprobs.update(enumerate(self.logprobs.tolist(), self.begin))


def take_scores(shares: Iterable[Share], logits: Tensor) -> tuple[Tensor, list[PromptScores]]:
    """The logits that next tokens are sampled from, and the scores that the others give. logits: of
    the rows that the shares' chunks want, in order."""
    shares = list(shares)
    if not any(share.chunk.scored[0] < share.chunk.scored[1] for share in shares):
        return logits, []
    scores, sampled, at = [], list[int](), 0
    for share in shares:
        begin, end = share.chunk.scored
        if begin < end and isinstance(share.owner, Sequence):
            first = share.end - share.count + begin + 1
            tokens = torch.tensor(share.owner.tokens[first : first + end - begin])
            rows = logits[at : at + end - begin].float().log_softmax(dim=-1)
            found = rows.gather(-1, tokens.to(rows.device)[:, None])[:, 0]
            scores.append(PromptScores(share.owner, first, found))
            at += end - begin
        if share.chunk.wants_logits:
            sampled.append(at)
            at += 1
    return logits[torch.tensor(sampled, dtype=torch.int64, device=logits.device)], scores


class Lineup:
    """Sequences that all decode: the next step is like the last one until one of them joins or
    leaves, so neither the scheduler nor a new batch is needed.

    left: steps until an answer reaches its limit. room: steps until one needs a block. free:
    whether nothing is ever forbidden to any.
    """

    def __init__(self, shares: list[Share], sequences: list[Sequence]) -> None:
        """Of the shares of a step that was launched, of one token each."""
        self.sequences = sequences
        self.tables = [each.private for each in sequences if each.private is not None]
        # the step gives each a token, as does the one before to those whose own is not yet known
        self.left = min(
            each.tokens_left - 1 - (share.chunk.follows is not None)
            for each, share in zip(sequences, shares, strict=True)
        )
        self.free = not any(
            each.constraint or each.request.min_tokens or each.request.suppress_tokens
            for each in sequences
        )
        self.room = 0
        self.measure()

    def measure(self) -> None:
        """Looks how much room there is."""
        self.room = min(table.capacity - table.length for table in self.tables)

    def lacking(self) -> list[Sequence]:
        """Those that need a block for their next token."""
        pairs = zip(self.sequences, self.tables, strict=True)
        return [each for each, table in pairs if table.capacity == table.length]

    def advance(self) -> None:
        """Counts a token of each that a step writes."""
        self.left -= 1
        self.room -= 1
        for table in self.tables:
            table.advance((table.positions[-1] + 1,))


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A step that was launched, and perhaps still runs. It keeps what the step reads.

    sequences: whose next tokens are sampled, in the order of the rows of the logits. lineup: of
    these, where nothing else is computed. tokens: None until they are sampled. marks: before the
    model, behind it, and behind the sampling (`Sampler.mark`). scores: log-probabilities of
    tokens of prompts (`Request.prompt_logprobs`).
    """

    shares: list[Share]
    logits: Tensor
    sequences: list[Sequence]
    states: list[SamplerState]
    lineup: Lineup | None = None
    continued: bool = False
    tokens: PendingTokens | None = None
    marks: list[Mark] = field(default_factory=list)
    scores: list[PromptScores] = field(default_factory=list)

    def rows(self) -> dict[int, int]:
        """The row of each sequence, by its number."""
        return {sequence.number: row for row, sequence in enumerate(self.sequences)}
