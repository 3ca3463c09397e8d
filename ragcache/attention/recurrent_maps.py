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

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

CHUNK, CHANNEL_CHUNK = 64, 16
"""Tokens that are computed at once, with one decay for each head, and one for each channel."""
_TINY = 1e-6  # in the norms of keys, as in transformers


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentInputs:
    """Inputs of a recurrence for some tokens, in float32."""

    keys: Tensor
    """[H, T, dk], or [H, T, N] of a state space."""
    values: Tensor
    """[H, T, dv], or [H, T, P] of a state space."""
    decays: Tensor
    """Logarithms of the decays, at most 0: [H, T, 1], or [H, T, dk] with one for each channel."""
    steps: Tensor
    """Sizes b of the steps, [H, T, 1]."""

    @property
    def length(self) -> int:
        """Number of tokens (T)."""
        return int(self.steps.shape[1])

    def part(self, begin: int, end: int) -> RecurrentInputs:
        """Return the inputs of tokens begin:end."""
        here = slice(begin, end)
        return RecurrentInputs(
            self.keys[:, here], self.values[:, here], self.decays[:, here], self.steps[:, here]
        )


class Recurrence(Protocol):
    """A recurrence whose states are affine maps of earlier states."""

    def inputs(
        self, mixed: Tensor, increment: Tensor, decays: Tensor, steps: Tensor
    ) -> RecurrentInputs:
        """Split the output of the convolution into the inputs of the recurrence.

        Args:
            mixed: Output of the convolution, [channels, T].
            increment: Any state of the layer, for its shape.
            decays: See `RecurrentInputs`.
            steps: See `RecurrentInputs`.
        """

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

    def inputs(
        self, mixed: Tensor, increment: Tensor, decays: Tensor, steps: Tensor
    ) -> RecurrentInputs:
        """See `Recurrence.inputs`. The channels are queries, keys and values."""
        _, key_dim, value_dim = increment.shape
        width = len(increment) * value_dim
        keys = mixed[(len(mixed) - width) // 2 : len(mixed) - width]
        values = mixed[len(mixed) - width :]
        return self.prepared(
            keys.view(-1, key_dim, mixed.shape[1]).mT,
            values.view(-1, value_dim, mixed.shape[1]).mT,
            decays,
            steps,
        )

    def prepared(
        self, keys: Tensor, values: Tensor, decays: Tensor, steps: Tensor
    ) -> RecurrentInputs:
        """Return inputs with keys of length one, for each head of the values."""
        keys, values = keys.float(), values.float()
        keys = keys * torch.rsqrt(keys.square().sum(-1, keepdim=True) + _TINY)
        keys = keys.repeat_interleave(len(values) // len(keys), 0)
        return RecurrentInputs(keys, values, decays.float(), steps.float())

    def advance(self, state: Tensor, inputs: RecurrentInputs) -> Tensor:
        """See `Recurrence.advance`. The values change the last columns of a wider state."""
        size = CHUNK if inputs.decays.shape[-1] == 1 else CHANNEL_CHUNK
        for begin in range(0, inputs.length, size):
            state = _advance_chunk(state, inputs.part(begin, begin + size))
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

    def inputs(
        self, mixed: Tensor, increment: Tensor, decays: Tensor, steps: Tensor
    ) -> RecurrentInputs:
        """See `Recurrence.inputs`. The channels are x, B and C."""
        heads, head_dim, state_dim = increment.shape
        width = heads * head_dim
        keys = mixed[width : width + (len(mixed) - width) // 2]
        return self.prepared(
            keys.view(-1, state_dim, mixed.shape[1]).mT,
            mixed[:width].view(heads, head_dim, mixed.shape[1]).mT,
            decays,
            steps,
        )

    def prepared(
        self, keys: Tensor, values: Tensor, decays: Tensor, steps: Tensor
    ) -> RecurrentInputs:
        """Return inputs with the keys of each head."""
        keys, values = keys.float(), values.float()
        keys = keys.repeat_interleave(len(values) // len(keys), 0)
        return RecurrentInputs(keys, values, decays.float(), steps.float())

    def advance(self, state: Tensor, inputs: RecurrentInputs) -> Tensor:
        """See `Recurrence.advance`."""
        decays = inputs.decays
        until = decays.flip(1).cumsum(1).flip(1) - decays  # sums of few terms at the end
        added = (inputs.values * inputs.steps * until.exp()).mT @ inputs.keys
        return decays.sum(1, keepdim=True).exp() * state + added

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


def apply_map(transition: Tensor, increment: Tensor, state: Tensor) -> Tensor:
    """Return M S + N.

    Args:
        transition: M, [H, dk, dk] or [H, 1, 1].
        increment: N, [H, dk, dv].
        state: S, [H, dk, dv].
    """
    if transition.shape[-1] == 1:
        return transition.float() * state + increment.float()
    return torch.baddbmm(increment.float(), transition.float(), state)


def _advance_chunk(state: Tensor, inputs: RecurrentInputs) -> Tensor:
    """Advance a state [H, dk, m] over a chunk: S <- D S + K^T (U - W S).

    W and U solve one triangular system (Gated DeltaNet, eq. 8 to 10).
    """
    keys, steps, values = inputs.keys, inputs.steps, inputs.values
    total = inputs.decays.cumsum(1)  # [H, C, 1 or dk]
    apart = total[:, :, None] - total[:, None]  # [H, C, C, 1 or dk]
    later = torch.ones(apart.shape[1:3], dtype=torch.bool, device=keys.device).tril(-1)
    apart = apart.masked_fill(~later[..., None], float("-inf")).exp()
    if apart.shape[-1] == 1:
        inner = keys @ keys.mT * apart[..., 0]
    else:
        inner = torch.einsum("hik,hjk,hijk->hij", keys, keys, apart)
    known = torch.cat([keys * total.exp() * steps, values * steps], -1)
    solved = torch.linalg.solve_triangular(inner * steps, known, upper=False, unitriangular=True)
    weights, targets = solved.split([keys.shape[-1], values.shape[-1]], -1)
    change = -(weights @ state)  # [H, C, m]
    change[..., -values.shape[-1] :] += targets
    until = (total[:, -1:] - total).exp()
    decayed = total[:, -1].exp()[..., None] * state
    return decayed.baddbmm_((keys * until).mT, change)
