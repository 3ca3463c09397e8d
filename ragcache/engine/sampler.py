"""Sampling the next token of each sequence of a batch.

Penalties, forbidden tokens and constraints change a row's logits. Then a token is drawn in the
exact arithmetic of `ragcache.engine.sampling`.

The host does not wait for a GPU before it needs the tokens. Sampling parameters become columns on
the device once per list of states; values that change from step to step go through pinned memory;
filters and draws are one kernel (`sampling_kernels`) instead of sorts whose sizes the host would
have to know.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import chain, cycle
from typing import Any, Protocol

import torch
from torch import Tensor

from ragcache.engine.constraint import penalties, penalty_table
from ragcache.engine.sampling import (
    Penalties,
    TokenCounts,
    draw,
    float_shares,
    keep_likeliest,
    likeliest_tokens,
    logprobs_of,
    shares_of,
    upload,
)
from ragcache.engine.sampling_params import SamplingParams
from ragcache.errors import UnusableLogits
from ragcache.machine import collect_while_waiting, new_event

CPU_ROWS, GPU_ROWS = 8, 64
"""Rows whose logits are copied at once: on a CPU for its cache, on a GPU to bound the memory."""

BLOCK = 4096
"""Tokens that a program of the draw kernel reads at a time."""

LIKELIEST_BLOCK = 16384
"""Logits that a program of the argmax kernel reads at a time."""

TIMESTAMPS = 32
"""Size of the pool of timestamps: a step takes three, and two steps are in flight."""


@dataclass(slots=True, eq=False)
class SamplerState:
    """One sequence's sampling parameters and its place in its stream of random numbers.

    The n-th number is a hash of (seed, index, n), so a sequence draws the same tokens whatever runs
    in its batch and whenever it is interrupted.
    """

    sampling: SamplingParams
    seed: int
    index: int = 0
    drawn: int = 0
    """Number of tokens sampled so far."""
    counts: TokenCounts | None = None
    """Token counts, if a penalty needs them."""
    first_logprobs: Tensor | None = None
    """Log-probabilities of all tokens at the first place, float32 [V] on the CPU, if
    `SamplingParams.first_logprobs` is set."""
    plain: bool = field(init=False)
    """Whether every next token is the likeliest one, and nothing else is reported with it."""

    def __post_init__(self) -> None:
        sampling = self.sampling
        self.plain = sampling.greedy and self.counts is None and sampling.logprobs is None

    @classmethod
    def start(
        cls, sampling: SamplingParams, prompt_tokens: Iterable[int], index: int = 0
    ) -> SamplerState:
        """The state of a request's answer `index`. Each answer has a random stream of its own."""
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        repeats = sampling.repetition_penalty != 1
        counts = TokenCounts(prompt_tokens if repeats else ()) if sampling.penalized else None
        return cls(sampling, seed, index, counts=counts)

    def uniform(self) -> float:
        """Random number for the next token, a multiple of 2**-48 in [0, 1)."""
        place = struct.pack(">qQQ", self.seed, self.index, self.drawn)
        return int.from_bytes(blake2b(place, digest_size=6).digest(), "big") / 2**48

    def ahead(self, tokens: int) -> SamplerState:
        """The state after `tokens` more tokens, to sample the token behind them."""
        return replace(self, drawn=self.drawn + tokens)

    @property
    def lacks_first_logprobs(self) -> bool:
        return self.sampling.first_logprobs and self.first_logprobs is None


@dataclass(slots=True)  # not frozen: every sequence has a new one in every step
class SampledToken:
    """A sampled token, with log-probabilities if `SamplingParams.logprobs` is set.

    They are natural logarithms of the model's own distribution: the softmax of the logits before
    penalties, temperature and filters, as OpenAI and vLLM report them.
    """

    token: int
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens with their log-probabilities, likeliest first. May include the chosen
    token."""
    allowed: float = 0.0
    """Log-probability of all tokens that the constraint allowed, 0 without one. Among them the
    chosen token has `logprob - allowed`."""


class PendingTokens(Protocol):
    """The sampled tokens of a step that may still run."""

    @property
    def inputs(self) -> Tensor:
        """Tokens for the next step, int64 [R], on the device of the logits.

        A row without a token has any valid one.
        """

    def wait(self) -> list[SampledToken | UnusableLogits]:
        """Wait for the step. Called once.

        Returns:
            A token for each row. A row whose largest allowed logit is not finite, or that holds
                NaN, has an `UnusableLogits` error instead; its state is unchanged, and other
                rows are not affected.
        """


class DeviceTimestamp(Protocol):
    """The time at which a device reaches a point of its work."""

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from this timestamp to `end`, once the device has passed both."""


class Sampler:
    """Samples the tokens of step after step, on the current stream of its device.

    Args:
        device: The device of the logits.
        kernels: Whether Triton kernels choose the tokens, all rows at once (on a CPU: under
            Triton's interpreter, for tests). Without them the same operations of PyTorch serve
            any device, some rows at a time.
    """

    def __init__(self, device: torch.device, *, kernels: bool = False) -> None:
        self.device, self._kernels = device, kernels
        on_gpu = device.type == "cuda"
        self._rows: _Rows | None = None
        self._timestamps = cycle(
            [new_event(timing=True) for _ in range(TIMESTAMPS if on_gpu else 0)]
        )
        self._penalty_table = penalty_table(device)

    def timestamp(self) -> DeviceTimestamp | None:
        """Record a timestamp behind the work launched so far. None on a CPU."""
        if self.device.type != "cuda":
            return None
        event = next(self._timestamps)
        event.record()
        return event

    @torch.inference_mode()
    def launch(
        self,
        logits: Tensor,
        states: Sequence[SamplerState],
        forbidden: Sequence[Collection[int]] | None = None,
        masks: Sequence[Tensor | None] | None = None,
    ) -> PendingTokens:
        """Start to sample the next token of every row. Does not wait if `kernels` is set.

        Args:
            logits: [R, V] of any floating type. They are not changed; the arithmetic is float32.
            states: State of each row, valid until the tokens have been waited for. Derived
                tensors are kept while the same list is passed. Without rows, waiting waits for
                the step.
            forbidden: Token ids that may not be chosen, for each row. Defaults to no such tokens.
            masks: Tokens that each row's constraint allows (`Constraint.mask`), for rows that
                have one.
        """
        size = GPU_ROWS if logits.is_cuda else CPU_ROWS
        few = self._kernels or len(states) <= size
        if few or (not forbidden and all(state.plain for state in states)):
            return self._launch(logits, states, forbidden, masks)
        portions = []
        for begin in range(0, len(states), size):
            here = slice(begin, begin + size)
            bans = forbidden[here] if forbidden else None
            allowed = masks[here] if masks else None
            portions.append(self._launch(logits[here], states[here], bans, allowed))
        return _Portions(portions)

    def _launch(
        self,
        logits: Tensor,
        states: Sequence[SamplerState],
        forbidden: Sequence[Collection[int]] | None,
        masks: Sequence[Tensor | None] | None,
    ) -> _PendingTokens:
        if not states:
            return _PendingTokens(states, *self._fetched(torch.empty(0, device=self.device)))
        rows = self._rows
        if rows is None or rows.states is not states:
            rows = self._rows = _Rows.of(states, logits)
        banned = forbidden is not None and any(forbidden)
        masked = masks is not None and any(mask is not None for mask in masks)
        firsts = [row for row in rows.firsts if states[row].lacks_first_logprobs]
        if rows.plain and not (firsts or banned or masked):
            return self._launch_likeliest(logits, states)
        adjusted = logits.float() if logits.dtype != torch.float32 else logits.clone()
        rows.penalize(adjusted)
        if banned and forbidden is not None:
            self._forbid(adjusted, forbidden)
        if masked and masks is not None:
            self._mask(adjusted, masks)
        tokens = likeliest_tokens(adjusted)
        if rows.random:
            tokens = rows.draw(adjusted, tokens, kernels=self._kernels)
        inputs = tokens.clamp(min=0)
        rows.count(tokens)
        logprobs = [*rows.logprobs(logits, inputs)]
        if logprobs and masked and masks is not None:
            logprobs.append(self._allowed(logits, rows, masks))
        host, event = self._fetched(tokens, *_all_logprobs(logits, firsts), *logprobs)
        return _PendingTokens(states, host, event, inputs, rows.reporting, firsts)

    def _launch_likeliest(self, logits: Tensor, states: Sequence[SamplerState]) -> _PendingTokens:
        """Sample greedily, the usual case. With kernels, in one launch."""
        if not self._kernels:
            tokens = likeliest_tokens(logits)
            return _PendingTokens(states, *self._fetched(tokens), tokens.clamp(min=0))
        from ragcache.engine.sampling_kernels import likeliest_kernel

        count, vocabulary = logits.shape
        assert logits.stride(1) == 1
        on_gpu = self.device.type == "cuda"
        host = torch.empty(count, dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        inputs = torch.empty(count, dtype=torch.int64, device=self.device)
        likeliest_kernel[(count,)](
            logits, logits.stride(0), inputs, host, vocabulary, BLOCK=LIKELIEST_BLOCK, num_warps=16
        )
        return self._pending(states, host, inputs)

    def _pending(
        self, states: Sequence[SamplerState], tokens: Tensor, inputs: Tensor
    ) -> _PendingTokens:
        """Tokens, -1 in a row without one, that the host sees after the work launched so far."""
        return _PendingTokens(states, [tokens], self._event(), inputs)

    def _event(self) -> torch.cuda.Event | None:
        """Record an event after the work launched so far."""
        if self.device.type != "cuda":
            return None
        event = new_event()
        event.record()
        return event

    def _fetched(self, *tensors: Tensor) -> tuple[list[Tensor], torch.cuda.Event | None]:
        """Copy tensors to the host. They are complete after the event."""
        if self.device.type != "cuda":
            return list(tensors), None
        found = []
        for tensor in tensors:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            found.append(host.copy_(tensor, non_blocking=True))
        return found, self._event()

    def _forbid(self, logits: Tensor, forbidden: Sequence[Collection[int]]) -> None:
        """Set the logits of forbidden tokens to minus infinity."""
        size = logits.shape[-1]
        places = [
            row * size + token
            for row, banned in enumerate(forbidden)
            for token in banned
            if 0 <= token < size
        ]
        if places:
            logits.view(-1).index_fill_(0, upload(places, torch.int64, self.device), -torch.inf)

    def _allowed(self, logits: Tensor, rows: _Rows, masks: Sequence[Tensor | None]) -> Tensor:
        """Compute `SampledToken.allowed` of the rows that report log-probabilities."""
        assert rows.reported is not None
        found = []
        for begin in range(0, len(rows.reporting), GPU_ROWS):
            here = slice(begin, begin + GPU_ROWS)
            own = logits.index_select(0, rows.reported[here]).float()
            whole = own.logsumexp(dim=-1)
            self._mask(own, [masks[row] for row in rows.reporting[here]])
            found.append(own.logsumexp(dim=-1) - whole)
        return torch.cat(found)

    def _mask(self, logits: Tensor, masks: Sequence[Tensor | None]) -> None:
        """Set the logits of tokens outside the masks to minus infinity (`Constraint.mask`)."""
        width = -(-logits.shape[-1] // 32)
        pins = self.device.type == "cuda"
        words = torch.zeros(len(masks), width, dtype=torch.int32, device="cpu", pin_memory=pins)
        rows = words.numpy()
        for row, mask in enumerate(masks):
            if mask is None:
                rows[row] = -1
            else:
                allowed = mask[:width].numpy()
                rows[row, : len(allowed)] = allowed
        words = words.to(self.device, non_blocking=True)
        for begin in range(0, len(masks), GPU_ROWS):
            here = slice(begin, begin + GPU_ROWS)
            logits[here] += penalties(words[here], self._penalty_table)[:, : logits.shape[-1]]


@dataclass(slots=True, eq=False)
class _PendingTokens:
    """Tokens of a step (`PendingTokens`)."""

    states: Sequence[SamplerState]
    host: list[Tensor]
    """Tokens (-1 in a row without one); log-probabilities of all tokens in the rows `firsts`, if
    any; results of `logprobs_of` for the rows `reporting`."""
    event: torch.cuda.Event | None
    inputs: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    reporting: Sequence[int] = ()
    firsts: Sequence[int] = ()

    def wait(self) -> list[SampledToken | UnusableLogits]:
        if self.event is not None:
            if not self.event.query():  # type: ignore[no-untyped-call]
                collect_while_waiting()
            self.event.synchronize()
        found: list[int] = self.host[0].tolist()
        results: list[SampledToken | UnusableLogits] = [*map(SampledToken, found)]
        for row, state in enumerate(self.states):
            if found[row] >= 0:
                state.drawn += 1
            else:
                results[row] = unusable(state)
        if self.reporting:
            tokens = [found[row] for row in self.reporting]
            counts = [self.states[row].sampling.logprobs or 0 for row in self.reporting]
            first = 2 if self.firsts else 1
            reported = report_logprobs(tokens, counts, *self.host[first:])
            for row, each in zip(self.reporting, reported, strict=True):
                if each.token >= 0:
                    results[row] = each
        for place, row in enumerate(self.firsts):
            if found[row] >= 0 and self.states[row].lacks_first_logprobs:
                self.states[row].first_logprobs = self.host[1][place].clone()
        return results


@dataclass(frozen=True, slots=True, eq=False)
class _Portions:
    """Tokens of a step that is sampled some rows at a time (`PendingTokens`)."""

    parts: Sequence[_PendingTokens]

    @property
    def inputs(self) -> Tensor:
        return torch.cat([part.inputs for part in self.parts])

    def wait(self) -> list[SampledToken | UnusableLogits]:
        return [*chain.from_iterable(part.wait() for part in self.parts)]


@dataclass(frozen=True, slots=True)
class _Counted:
    """The rows with penalties."""

    rows: Tensor
    """Numbers of the rows."""
    penalties: Penalties
    prompt: Tensor
    """[R, V], see `TokenCounts.tables`."""
    counts: Tensor
    """[R, V], see `TokenCounts.tables`."""


@dataclass(frozen=True, slots=True)
class _Random:
    """The rows that draw, and their settings."""

    states: list[SamplerState]
    rows: Tensor | None
    """Numbers of the rows, unless all rows draw."""
    temperatures: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def draw(self, logits: Tensor) -> Tensor:
        """Draw one token per row by PyTorch. logits: float32 [R, V], of these rows."""
        samplings = [state.sampling for state in self.states]
        shares = shares_of(logits, [sampling.temperature for sampling in samplings])
        if any(sampling.filtered for sampling in samplings):
            shares = keep_likeliest(shares, samplings)
        return draw(shares, [state.uniform() for state in self.states])

    def draw_by_kernel(self, logits: Tensor) -> Tensor:
        """Draw the same tokens by the kernel, some rows at a time."""
        from ragcache.engine.sampling_kernels import draw_kernel

        drawn = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        numbers = [state.uniform() for state in self.states]
        uniforms = upload(numbers, torch.float64, logits.device)
        for begin in range(0, len(logits), GPU_ROWS):
            here = slice(begin, begin + GPU_ROWS)
            shares = float_shares(logits[here], self.temperatures[here]).trunc_()
            keys = shares.view(torch.int32)
            draw_kernel[(len(keys),)](
                keys,
                self.top_k[here],
                self.top_p[here],
                self.min_p[here],
                uniforms[here],
                drawn[here],
                keys.shape[-1],
                BLOCK=BLOCK,
                num_warps=16,
            )
        return drawn


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Tensors on the device that follow from the states of rows."""

    states: Sequence[SamplerState]
    plain: bool
    firsts: Sequence[int]
    """Rows with `SamplingParams.first_logprobs`."""
    counted: _Counted | None = None
    random: _Random | None = None
    reporting: Sequence[int] = ()
    reported: Tensor | None = None

    @classmethod
    def of(cls, states: Sequence[SamplerState], logits: Tensor) -> _Rows:
        firsts = [i for i, s in enumerate(states) if s.sampling.first_logprobs]
        if all(state.plain for state in states):
            return cls(states, plain=True, firsts=firsts)
        reporting = [i for i, s in enumerate(states) if s.sampling.logprobs is not None]
        return cls(
            states,
            False,
            firsts,
            _counted(states, logits),
            _random(states, logits.device),
            reporting,
            upload(reporting, torch.int64, logits.device) if reporting else None,
        )

    def penalize(self, logits: Tensor) -> None:
        """Apply the penalties in place. logits: float32 [R, V]."""
        counted = self.counted
        if counted is not None:
            own = logits.index_select(0, counted.rows)
            penalized = counted.penalties.apply(own, counted.prompt, counted.counts)
            logits.index_copy_(0, counted.rows, penalized)

    def draw(self, logits: Tensor, tokens: Tensor, *, kernels: bool) -> Tensor:
        """Replace the tokens of rows that draw. logits: float32 [R, V]."""
        random = self.random
        assert random is not None
        own = logits if random.rows is None else logits.index_select(0, random.rows)
        drawn = random.draw_by_kernel(own) if kernels else random.draw(own)
        if random.rows is not None:
            drawn = tokens.index_copy(0, random.rows, drawn)
        return torch.where(tokens >= 0, drawn, -1)

    def count(self, tokens: Tensor) -> None:
        """Count the tokens of the rows with penalties."""
        counted = self.counted
        if counted is not None:
            own = tokens.index_select(0, counted.rows)[:, None]
            counted.counts.scatter_add_(1, own.clamp(min=0), (own >= 0).to(counted.counts.dtype))

    def logprobs(self, logits: Tensor, tokens: Tensor) -> Sequence[Tensor]:
        """Log-probabilities of the rows that report them (`logprobs_of`)."""
        if self.reported is None:
            return ()
        rows = torch.split(self.reported, GPU_ROWS)
        found = [
            logprobs_of(logits.index_select(0, own), tokens.index_select(0, own)) for own in rows
        ]
        return [torch.cat(each) for each in zip(*found, strict=True)]


def _all_logprobs(logits: Tensor, rows: Sequence[int]) -> Sequence[Tensor]:
    """Log-probabilities of all tokens in these rows: one tensor [rows, V], or none without rows."""
    if not rows:
        return ()
    own = upload(rows, torch.int64, logits.device)
    return [logits.index_select(0, own).float().log_softmax(dim=-1)]


def _counted(states: Sequence[SamplerState], logits: Tensor) -> _Counted | None:
    """Collect the tables of all rows with penalties."""
    pairs = [(row, s, s.counts) for row, s in enumerate(states) if s.counts is not None]
    if not pairs:
        return None
    tables = [counts.tables(logits) for _, _, counts in pairs]
    prompt = torch.stack([prompt for prompt, _ in tables])
    counts = torch.stack([counts for _, counts in tables])
    for (_, _, each), own_prompt, own_counts in zip(pairs, prompt, counts, strict=True):
        each.move(own_prompt, own_counts)
    penalties = Penalties.of([state.sampling for _, state, _ in pairs], logits)
    rows = upload([row for row, _, _ in pairs], torch.int64, logits.device)
    return _Counted(rows, penalties, prompt, counts)


def _random(states: Sequence[SamplerState], device: torch.device) -> _Random | None:
    pairs = [(row, state) for row, state in enumerate(states) if not state.sampling.greedy]
    if not pairs:
        return None
    samplings = [state.sampling for _, state in pairs]
    rows = None
    if len(pairs) < len(states):
        rows = upload([row for row, _ in pairs], torch.int64, device)
    return _Random(
        [state for _, state in pairs],
        rows,
        upload([s.temperature for s in samplings], torch.float32, device)[:, None],
        upload([s.top_k for s in samplings], torch.int64, device),
        upload([s.top_p for s in samplings], torch.float64, device),
        upload([s.min_p for s in samplings], torch.float64, device),
    )


def unusable(state: SamplerState) -> UnusableLogits:
    """The error of a row without a token."""
    return UnusableLogits(
        f"after {state.drawn} tokens every next one is forbidden, or the model's logits are not "
        "finite; check the stop tokens, the model's weights and its dtype"
    )


def report_logprobs(
    tokens: Sequence[int],
    counts: Sequence[int],
    own: Tensor,
    ids: Tensor,
    values: Tensor,
    allowed: Tensor | None = None,
) -> list[SampledToken]:
    """Combine tokens with the results of `logprobs_of`: the first `counts` alternatives of each
    row, and the share of allowed tokens (`SampledToken.allowed`), if a row has one."""
    chosen = []
    shares = [0.0] * len(tokens) if allowed is None else allowed.tolist()
    columns = (tokens, counts, own.tolist(), ids.tolist(), values.tolist(), shares)
    for token, count, logprob, likeliest, theirs, share in zip(*columns, strict=True):
        pairs = [pair for pair in zip(likeliest, theirs, strict=True) if pair[1] > -torch.inf]
        pairs.sort(key=lambda pair: (-pair[1], pair[0]))
        chosen.append(SampledToken(token, logprob, tuple(pairs[:count]), min(share, 0.0)))
    return chosen
