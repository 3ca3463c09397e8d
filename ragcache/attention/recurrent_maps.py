"""Equations of recurrent layers, as maps of a state.

A token changes the state S of a head by an affine map whose coefficients depend on the token alone:

    gated delta rule    S <- (I - b k k^T) exp(g) S + b k v^T    S [dk, dv]
    state space         S <- exp(g) S + b x k^T                  S [P, N]

A text therefore changes it by S <- M S + N. M and N are computed by the recurrence itself: the
columns of the state [I | 0] become [M | N] if the values of the first columns are zero.

Gated DeltaNet (Yang et al., 2025, arXiv 2412.06464, §3.3) has one decay g for each head, Kimi Delta
Attention (2025, arXiv 2510.26692) one for each channel of the key. Mamba 2 (Dao and Gu, 2024, arXiv
2405.21060) is the state space, with one decay for each head, so that its M is one number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

CHUNK, CHANNEL_CHUNK = 64, 16
"""Tokens that are computed at once, with one decay for each head, and one for each channel."""
_FEW_TOKENS = 4  # whose system of equations is inverted by products
_TINY = 1e-6  # in the norms of keys, as in transformers


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentInputs:
    """Inputs of a recurrence for some tokens, in float32. The axes in front are any number of
    layers and texts."""

    keys: Tensor
    """[..., H, T, dk], or [..., H, T, N] of a state space."""
    values: Tensor
    """[..., H, T, dv], or [..., H, T, P] of a state space."""
    decays: Tensor
    """Logarithms of the decays, at most 0: [..., H, T, 1], or [..., H, T, dk] with one for each
    channel."""
    steps: Tensor
    """Sizes b of the steps, [..., H, T, 1]."""

    @property
    def length(self) -> int:
        """Number of tokens (T)."""
        return int(self.steps.shape[-2])

    def part(self, begin: int, end: int) -> RecurrentInputs:
        """Return the inputs of tokens begin:end."""
        tensors = (self.keys, self.values, self.decays, self.steps)
        return RecurrentInputs(*(each[..., begin:end, :] for each in tensors))


@dataclass(frozen=True, slots=True, eq=False)
class StateUpdate:
    """Effect of a few tokens on states: S <- decay S + left (right + weights S).

    A product with M takes dk rows of S to dk rows. An update takes them to the T rows of its
    tokens and back.
    """

    decay: Tensor
    """[..., H, 1, 1], or [..., H, dk, 1] with one for each channel."""
    left: Tensor
    """[..., H, dk, T]."""
    right: Tensor
    """[..., H, T, dv]."""
    weights: Tensor | None
    """[..., H, T, dk]. None where a token changes the state by the same amount, whatever it is."""

    def of(self, heads: slice) -> StateUpdate:
        """Return the update of some heads, if these are the first axis."""
        weights = None if self.weights is None else self.weights[heads]
        return StateUpdate(self.decay[heads], self.left[heads], self.right[heads], weights)

    def unbind(self) -> Iterator[StateUpdate]:
        """Split the update along its first axis. The axes behind it become one axis of heads."""
        for number in range(len(self.decay)):
            decay, left, right = (
                each[number].flatten(0, -3) for each in (self.decay, self.left, self.right)
            )
            weights = None if self.weights is None else self.weights[number].flatten(0, -3)
            yield StateUpdate(decay, left, right, weights)

    def apply(self, state: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the state behind the tokens.

        Args:
            state: The state before them, [H, dk, m]. `right` changes the last columns.
            out: Memory for the result, other than the memory of `state`.
        """
        change = self.right
        if self.weights is not None:
            width = self.right.shape[-1]
            if width == state.shape[-1]:
                change = torch.baddbmm(self.right, self.weights, state)
            else:
                change = self.weights @ state
                change[..., -width:] += self.right
        return torch.mul(self.decay, state, out=out).baddbmm_(self.left, change)


class Recurrence(Protocol):
    """A recurrence whose states are affine maps of earlier states."""

    def channels(self, count: int, increment: Tensor) -> slice:
        """Return which of the convolution's channels the state depends on: all but the queries."""

    def inputs(
        self, mixed: Tensor, increment: Tensor, decays: Tensor, steps: Tensor
    ) -> RecurrentInputs:
        """Split the output of the convolution into the inputs of the recurrence.

        Args:
            mixed: Output of the convolution's `channels`, [..., channels, T].
            increment: Any state of the layer, [..., H, dk, dv], for its shape.
            decays: See `RecurrentInputs`.
            steps: See `RecurrentInputs`.
        """

    def update(self, inputs: RecurrentInputs) -> StateUpdate:
        """Return the effect of a few tokens."""

    def advance(self, state: Tensor, inputs: RecurrentInputs) -> Tensor:
        """Return the state behind some tokens, of the shape of `state`."""

    def empty_state(self, inputs: RecurrentInputs) -> Tensor:
        """Return the state before any text, for the shape of some inputs."""

    def identity(self, state: Tensor) -> Tensor:
        """Return the transition M of no text, for the shape of a state."""

    def extend(
        self, transition: Tensor, increment: Tensor, inputs: RecurrentInputs
    ) -> tuple[Tensor, Tensor]:
        """Return the map (M, N) of a text that continues the text of a map with some tokens."""


class DeltaRule:
    """The gated delta rule, in chunks (UT transform). States are [H, dk, dv], M is [H, dk, dk]."""

    def channels(self, count: int, increment: Tensor) -> slice:
        """See `Recurrence.channels`. The channels are queries, keys and values."""
        heads, _, value_dim = increment.shape[-3:]
        return slice((count - heads * value_dim) // 2, count)

    def inputs(
        self, mixed: Tensor, increment: Tensor, decays: Tensor, steps: Tensor
    ) -> RecurrentInputs:
        """See `Recurrence.inputs`."""
        heads, key_dim, value_dim = increment.shape[-3:]
        keys, values = mixed.tensor_split([mixed.shape[-2] - heads * value_dim], -2)
        return self.prepared(
            _split_heads(keys, key_dim),
            _split_heads(values, value_dim),
            decays,
            steps,
        )

    def prepared(
        self, keys: Tensor, values: Tensor, decays: Tensor, steps: Tensor
    ) -> RecurrentInputs:
        """Return inputs with keys of length one, for each head of the values."""
        keys, values = keys.float(), values.float()
        keys = keys * torch.rsqrt(keys.square().sum(-1, keepdim=True) + _TINY)
        keys = _of_each_head(keys, values)
        return RecurrentInputs(keys, values, decays.float(), steps.float())

    def update(self, inputs: RecurrentInputs) -> StateUpdate:
        """See `Recurrence.update`. The tokens are at most a chunk.

        S <- D S + K^T (U - W S), where W and U solve one triangular system (Gated DeltaNet, eq. 8
        to 10).
        """
        keys, steps, values = inputs.keys, inputs.steps, inputs.values
        total = inputs.decays.cumsum(-2)  # [..., H, C, 1 or dk]
        apart = total[..., :, None, :] - total[..., None, :, :]  # [..., H, C, C, 1 or dk]
        later = torch.ones(apart.shape[-3:-1], dtype=torch.bool, device=keys.device).tril(-1)
        apart = apart.masked_fill(~later[..., None], float("-inf")).exp()
        if apart.shape[-1] == 1:
            inner = keys @ keys.mT * apart[..., 0]
        else:
            inner = torch.einsum("...ik,...jk,...ijk->...ij", keys, keys, apart)
        known = torch.cat([-keys * total.exp() * steps, values * steps], -1)
        solved = _solve(inner * steps, known)
        weights, targets = torch.split(solved, [keys.shape[-1], values.shape[-1]], -1)
        until = (total[..., -1:, :] - total).exp()
        return StateUpdate(total[..., -1:, :].exp().mT, (keys * until).mT, targets, weights)

    def advance(self, state: Tensor, inputs: RecurrentInputs) -> Tensor:
        """See `Recurrence.advance`. The values change the last columns of a wider state."""
        size = CHUNK if inputs.decays.shape[-1] == 1 else CHANNEL_CHUNK
        for begin in range(0, inputs.length, size):
            state = self.update(inputs.part(begin, begin + size)).apply(state)
        return state

    def empty_state(self, inputs: RecurrentInputs) -> Tensor:
        """See `Recurrence.empty_state`."""
        keys, values = inputs.keys, inputs.values
        return keys.new_zeros(len(keys), keys.shape[-1], values.shape[-1])

    def identity(self, state: Tensor) -> Tensor:
        """See `Recurrence.identity`."""
        heads, key_dim, _ = state.shape
        return torch.eye(key_dim, device=state.device).expand(heads, key_dim, key_dim)

    def extend(
        self, transition: Tensor, increment: Tensor, inputs: RecurrentInputs
    ) -> tuple[Tensor, Tensor]:
        """See `Recurrence.extend`."""
        both = self.advance(torch.cat([transition, increment], -1), inputs)
        width = transition.shape[-1]
        return both[..., :width].contiguous(), both[..., width:].contiguous()


class StateSpace:
    """The state space of Mamba 2. States are [H, P, N], M is [H, 1, 1]."""

    def channels(self, count: int, increment: Tensor) -> slice:
        """See `Recurrence.channels`. The channels are x, B and C."""
        heads, head_dim, _ = increment.shape[-3:]
        return slice((count + heads * head_dim) // 2)

    def inputs(
        self, mixed: Tensor, increment: Tensor, decays: Tensor, steps: Tensor
    ) -> RecurrentInputs:
        """See `Recurrence.inputs`."""
        heads, head_dim, state_dim = increment.shape[-3:]
        values, keys = mixed.tensor_split([heads * head_dim], -2)
        return self.prepared(
            _split_heads(keys, state_dim),
            _split_heads(values, head_dim),
            decays,
            steps,
        )

    def prepared(
        self, keys: Tensor, values: Tensor, decays: Tensor, steps: Tensor
    ) -> RecurrentInputs:
        """Return inputs with the keys of each head."""
        keys, values = keys.float(), values.float()
        keys = _of_each_head(keys, values)
        return RecurrentInputs(keys, values, decays.float(), steps.float())

    def update(self, inputs: RecurrentInputs) -> StateUpdate:
        """See `Recurrence.update`. The tokens may be any number."""
        decays = inputs.decays
        until = decays.flip(-2).cumsum(-2).flip(-2) - decays  # sums of few terms at the end
        left = (inputs.values * inputs.steps * until.exp()).mT
        return StateUpdate(decays.sum(-2, keepdim=True).exp(), left, inputs.keys, None)

    def advance(self, state: Tensor, inputs: RecurrentInputs) -> Tensor:
        """See `Recurrence.advance`."""
        return self.update(inputs).apply(state)

    def empty_state(self, inputs: RecurrentInputs) -> Tensor:
        """See `Recurrence.empty_state`."""
        keys, values = inputs.keys, inputs.values
        return keys.new_zeros(len(keys), values.shape[-1], keys.shape[-1])

    def identity(self, state: Tensor) -> Tensor:
        """See `Recurrence.identity`."""
        return torch.ones(len(state), 1, 1, device=state.device)

    def extend(
        self, transition: Tensor, increment: Tensor, inputs: RecurrentInputs
    ) -> tuple[Tensor, Tensor]:
        """See `Recurrence.extend`."""
        decay = inputs.decays.sum(1, keepdim=True).exp()
        return decay * transition, self.advance(increment, inputs)


DELTA_RULE, STATE_SPACE = DeltaRule(), StateSpace()


def apply_map(
    transition: Tensor, increment: Tensor, state: Tensor, out: Tensor | None = None
) -> Tensor:
    """Return M S + N.

    Args:
        transition: M, [H, dk, dk] or [H, 1, 1].
        increment: N, [H, dk, dv].
        state: S, [H, dk, dv].
        out: Memory for the result, other than the memory of `state`.
    """
    transition, increment = transition.float(), increment.float()
    if transition.shape[-1] == 1:
        return torch.addcmul(increment, transition, state, out=out)
    return torch.baddbmm(increment, transition, state, out=out)


def _split_heads(channels: Tensor, size: int) -> Tensor:
    """Split channels [..., H * size, T] into heads [..., H, T, size]."""
    *front, count, tokens = channels.shape
    return channels.view(*front, count // size, size, tokens).mT


def _of_each_head(keys: Tensor, values: Tensor) -> Tensor:
    """Keys of groups, as keys of the heads of the values: [..., H, T, D]."""
    return keys.repeat_interleave(values.shape[-3] // keys.shape[-3], -3)


def _solve(strictly_lower: Tensor, known: Tensor) -> Tensor:
    """Solve (I + L) X = known, by the inverse of the small side.

    A product of two short sums inverts what seams have, up to four tokens: L to the fourth power
    is zero. A solver takes longer for so small a system.
    """
    size = strictly_lower.shape[-1]
    identity = torch.eye(size, device=known.device)
    if size <= _FEW_TOKENS:
        square = strictly_lower @ strictly_lower
        inverse = (identity - strictly_lower) @ (identity + square)
    else:
        inverse = torch.linalg.solve_triangular(
            strictly_lower, identity.expand_as(strictly_lower), upper=False, unitriangular=True
        )
    solved: Tensor = inverse @ known
    return solved
