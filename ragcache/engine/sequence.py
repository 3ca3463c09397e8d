"""Sequences: answers in progress, with their tokens, private states and end."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Hashable
from itertools import chain

from torch import Tensor

from ragcache.engine.batch import ScheduledChunk
from ragcache.engine.constraint import GuardedConstraint, bits_of
from ragcache.engine.drafter import Drafter
from ragcache.engine.handle import RequestChannel
from ragcache.engine.kv_cache import BlockTable, EphemeralRoot, NodePath
from ragcache.engine.request import (
    AnswerText,
    Choice,
    RepetitionRule,
    Request,
    RequestOutput,
    TokenDelta,
)
from ragcache.engine.sampler import SampledToken, SamplerState
from ragcache.engine.scheduler import AGING_SECONDS, SchedulableRequest
from ragcache.errors import ConstraintFailed

NO_TOKENS: frozenset[int] = frozenset()


class SequenceGroup:
    """A request and the answers that are sampled for it."""

    def __init__(
        self,
        request: Request,
        channel: RequestChannel[TokenDelta, RequestOutput],
        submitted_at: float,
    ) -> None:
        self.request, self.channel, self.submitted_at = request, channel, submitted_at
        self.choices: dict[int, Choice] = {}
        self.prompt_logprobs: dict[int, SampledToken] = {}  # by index of the own token
        if request.prompt_logprobs == len(request.context.token_ids):
            self.prompt_logprobs[0] = SampledToken(request.context.token_ids[0])
        self.shared_tokens = 0
        self.admitted_at = self.first_token_at = 0.0
        self.expires_at = math.inf if request.timeout is None else submitted_at + request.timeout
        root: Hashable = request.root
        if root is None and request.n > 1:  # its own answers still share the prompt
            root = EphemeralRoot()
        self.root = root

    @property
    def seniority(self) -> float:
        return self.submitted_at - AGING_SECONDS * self.request.priority

    def close_choice(self, index: int, choice: Choice, now: float) -> None:
        """Record a finished answer. The last one ends the request."""
        self.choices[index] = choice
        if len(self.choices) == self.request.n:
            choices = tuple(self.choices[i] for i in range(self.request.n))
            times = self.submitted_at, self.admitted_at, self.first_token_at, now
            scores = tuple(score for _, score in sorted(self.prompt_logprobs.items()))
            self.channel.finish(RequestOutput(choices, self.shared_tokens, *times, scores))


class RepetitionDetector:
    """Finds the place at which an answer has repeated one pattern for `limit` times.

    Counts, for each period up to `rule.period`, the last tokens that equal the token one period
    before them. A token costs one comparison for each period.
    """

    def __init__(self, rule: RepetitionRule) -> None:
        self._rule = rule
        self._last: deque[int] = deque(maxlen=rule.period)  # the latest token first
        self._equal = [0] * rule.period

    def push(self, token: int) -> bool:
        """Add the next token. Returns whether the tokens end with a repeated pattern."""
        found, repeats = False, self._rule.limit - 1
        for index, earlier in enumerate(self._last):
            equal = self._equal[index] + 1 if earlier == token else 0
            self._equal[index] = equal
            found = found or equal >= repeats * (index + 1)
        self._last.appendleft(token)
        return found


class Sequence:
    """One answer of a group.

    Attributes:
        tokens: The prompt's own tokens, then the answer's. Tokens beyond `private.length` are
            pending.
        prompt_length: Number of the prompt's own tokens.
        positions: Positions of the tokens.
        forks: Whether the request's other answers begin with this one's first token.
        private: Blocks of the sequence while it runs.
        path: Full blocks in the radix cache while it runs.
        restricted: Whether some tokens may not come next, at some places.
        sampler: Sampling state, once the first token is about to be sampled.
        text: Text of the answer, if the request has one.
        finished: Whether the answer has ended or the request was dropped.
        kept: Whether the states were offered to `Request.keep`.
    """

    def __init__(self, group: SequenceGroup, index: int, number: int) -> None:
        request = group.request
        self.group, self.index, self.number = group, index, number
        self.request = request
        self.tokens = list(request.context.token_ids)
        self.prompt_length = len(self.tokens)
        self.positions = list(request.context.position_ids)
        self.forks = index == 0 and request.n > 1
        self._stops = NO_TOKENS if request.ignore_eos else request.stop_ids
        self._behind = request.context.next_position - self.prompt_length - 1
        self._longest = self.prompt_length + request.max_tokens
        self.sampler: SamplerState | None = None
        self._drafter: Drafter | None = None
        self.text: AnswerText | None = None
        make = request.constraint
        self.constraint = None if make is None else GuardedConstraint(make)
        limits = request.min_tokens or request.suppress_tokens
        self.restricted = self.constraint is not None or bool(limits)
        rule = request.repetition
        self._repetition = None if rule is None else RepetitionDetector(rule)
        self.private: BlockTable | None = None
        self.path: NodePath | None = None
        self.shown: list[str] = []
        self.chosen: list[SampledToken] = []
        self.finished = self.kept = False
        self._ending: SampledToken | None = None  # the stop token, if it is reported
        self._accepted: list[SampledToken] = []  # accepted and not yet delivered
        self._end: tuple[str, int | str | None] | None = None  # finish reason, stopped by

    def new_sampler(self) -> SamplerState:
        """Create the sampling state before the first token."""
        request = self.request
        return SamplerState.start(request.sampling, request.context.seen_token_ids, self.index)

    def begin_text(self) -> None:
        """Create `text`, if the request has one. Raises errors of the caller's code."""
        if self.request.text is not None:
            self.text = self.request.text(self.request.stop)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def tokens_left(self) -> int:
        """Number of tokens until the answer reaches its limit."""
        return self.request.max_tokens - self.generated

    @property
    def computed(self) -> int:
        """Number of tokens whose states are computed or in a launched step."""
        return 0 if self.private is None else self.private.length

    def schedulable(self) -> SchedulableRequest:
        """The sequence as the scheduler sees it."""
        private, seniority = self.private, self.group.seniority
        if private is None or self.path is None:
            return SchedulableRequest(self.number, seniority, len(self.tokens))
        computed, held = private.length, len(private.block_ids)
        free_slots = held * private.pool.block_size - computed
        for node in self.path.nodes:  # preemption frees the blocks that no other request uses
            held -= node.references > 1
        pending = len(self.tokens) - computed
        return SchedulableRequest(self.number, seniority, pending, free_slots, held)

    @property
    def draftable(self) -> bool:
        """Whether one step can check several next tokens. Constraints and penalties change with
        each token, which then needs a step of its own."""
        request = self.request
        plain = self.constraint is None and not request.sampling.penalized
        return plain and self.generated >= max(1, request.min_tokens)

    @property
    def drafter(self) -> Drafter:
        """The drafter of the answer, which knows all tokens so far. Made at the first use."""
        if self._drafter is None:
            segments = self.request.context.segments
            known = chain.from_iterable(segment.token_ids or () for segment in segments)
            self._drafter = Drafter(known, self.prompt_length + self.request.max_tokens)
        self._drafter.follow(self.tokens)
        return self._drafter

    def draft_chunk(self, draft: list[int]) -> ScheduledChunk:
        """The last token, which is the only pending one, and a draft of those that follow."""
        assert self.private is not None
        position = self.positions[-1]
        behind = self.request.context.next_position + self.generated
        return ScheduledChunk(
            self.request.context.segments,
            self.private,
            [self.tokens[-1], *draft],
            [position, *range(behind, behind + len(draft))],
            drafted=len(draft),
        )

    def forget_draft(self, length: int, drawn: int) -> None:
        """Keep the states of the first `length` tokens. `drawn` tokens were sampled."""
        assert self.private is not None
        assert self.sampler is not None
        self.private.truncate(length)
        self.sampler.drawn += drawn

    def next_chunk(self, count: int) -> ScheduledChunk:
        """The next `count` tokens; logits are wanted if they include the last pending one."""
        assert self.private is not None
        segments = self.request.context.segments
        begin, end = self.computed, self.computed + count
        return ScheduledChunk(
            segments,
            self.private,
            self.tokens[begin:end],
            self.positions[begin:end],
            wants_logits=end == len(self.tokens),
            scored=self._scored_rows(begin, end),
        )

    def most_tokens(self, scored: int) -> int:
        """Most tokens of the next chunk of which at most `scored` score the token after them."""
        last = self.prompt_length - 1
        if not self.request.prompt_logprobs or self.computed >= last:
            return len(self.tokens)
        return max(0, last - self.request.prompt_logprobs - self.computed) + scored

    def _scored_rows(self, begin: int, end: int) -> tuple[int, int]:
        """Rows of the chunk begin:end whose logits score the next prompt token."""
        wanted = self.request.prompt_logprobs
        last = self.prompt_length - 1
        if not wanted or begin >= last:
            return (0, 0)
        return max(0, last - wanted - begin), max(0, min(end, last) - begin)

    def forbidden(self) -> Collection[int]:
        """Tokens that may not come next."""
        request = self.request
        early = self.generated < request.min_tokens
        # a constraint does not continue behind an ignored stop token
        endless = request.ignore_eos and self.constraint is not None
        stops = request.stop_ids if early or endless else NO_TOKENS
        return stops | request.suppress_tokens

    def mask(self) -> Tensor | None:
        """Tokens that the constraint allows next (`Constraint.mask`)."""
        return None if self.constraint is None else self.constraint.mask()

    @property
    def failure(self) -> ConstraintFailed | None:
        return None if self.constraint is None else self.constraint.failure

    def explain_failure(self, error: Exception) -> Exception:
        """Return the reason why no token could be sampled.

        A constraint that leaves no token, or only an end that is forbidden, is the request's own
        error. Otherwise the sampler's error stays.
        """
        if self.failure is None and (mask := self.mask()) is not None:
            words = mask.tolist()
            forbidden = self.forbidden()
            allowed = (32 * at + bit for at, word in enumerate(words) for bit in bits_of(word))
            if all(token in forbidden for token in allowed):
                return ConstraintFailed(
                    f"after {self.generated} tokens the request's constraint allows no further "
                    "one, or only an end that min_tokens or ignore_eos forbids"
                )
        return self.failure or error

    def accept_token(self, chosen: SampledToken, now: float) -> None:
        """Accept the next token; `deliver` shows it.

        Sets `finished` if the answer ends for another reason than a stop string. Does nothing if
        the constraint fails.
        """
        token, complete = chosen.token, False
        if not self.group.first_token_at:
            self.group.first_token_at = now
        if token in self._stops:
            self._end, self.finished = ("stop", token), True
            self._ending = None if chosen.logprob is None else chosen
            return
        if self.constraint is not None:
            complete = self.constraint.accept(token)
            if self.constraint.failure is not None:
                return
        self.tokens.append(token)
        length = len(self.tokens)
        self.positions.append(self._behind + length)
        if self.request.sampling.logprobs is not None:
            self.chosen.append(chosen)
        self._accepted.append(chosen)
        repeats = self._repetition is not None and self._repetition.push(token)
        if complete or length == self._longest:
            self._end, self.finished = ("stop" if complete else "length", None), True
        elif repeats and self.generated >= self.request.min_tokens:
            self._end, self.finished = ("repetition", None), True

    def deliver(self, now: float) -> None:
        """Deliver the accepted tokens to the caller, and close the answer if it has ended."""
        accepted, self._accepted = self._accepted, []
        if self.text is None:
            for chosen in accepted:
                self.group.channel.put(TokenDelta(self.index, chosen))
        else:
            self._deliver_text(accepted, self.text)
        if self._end is not None:
            self._close(*self._end, now)

    def _deliver_text(self, accepted: list[SampledToken], text: AnswerText) -> None:
        """Deliver tokens with their text. A stop string ends the answer."""
        for number, chosen in enumerate(accepted, 1):
            self._emit(chosen, text.push(chosen.token))
            if text.stopped is not None:
                self._end, self.finished = ("stop", text.stopped), True
                self._forget_last(len(accepted) - number)
                break

    def _forget_last(self, count: int) -> None:
        """Forget tokens behind the stop string that ended the answer."""
        self._ending = None
        if count:
            del self.tokens[-count:], self.positions[-count:], self.chosen[-count:]

    def _emit(self, chosen: SampledToken | None, text: str) -> None:
        if text:
            self.shown.append(text)
        self.group.channel.put(TokenDelta(self.index, chosen, text))

    def _close(self, reason: str, stopped_by: int | str | None, now: float) -> None:
        held_back = "" if self.text is None else self.text.finish()
        if held_back:
            self._emit(None, held_back)
        if self.text is not None and self.text.stopped is not None:
            reason, stopped_by = "stop", self.text.stopped
        answer = tuple(self.tokens[self.prompt_length :])
        text, chosen = "".join(self.shown), tuple(self.chosen)
        first = None if self.sampler is None else self.sampler.first_logprobs
        choice = Choice(answer, text, reason, stopped_by, chosen, first, self._ending)
        self.group.close_choice(self.index, choice, now)
