"""Equations of recurrent layers, as maps of a state.

A token changes the state S of a head by an affine map whose coefficients depend on the token alone:

    gated delta rule    S <- (I - b k k^T) exp(g) S + b k v^T    S [dk, dv]
    state space         S <- exp(g) S + b x k^T                  S [P, N]

A text therefore changes it by S <- M S + N. The tokens of a chunk are one such map, and the maps of
consecutive chunks multiply out.

Gated DeltaNet (Yang et al., 2025, arXiv 2412.06464, §3.3) has one decay g for each head, Kimi Delta
Attention (2025, arXiv 2510.26692) one for each channel of the key. Mamba 2 (Dao and Gu, 2024, arXiv
2405.21060) is the state space, with one decay for each head, so that its M is one number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

CHUNK, CHANNEL_CHUNK = 64, 16
"""Tokens of a chunk, with one decay for each head, and one for each channel."""
_CHUNKS_AT_ONCE = 32  # which bounds the memory of a long text
_FEW_TOKENS = 4  # whose system of equations is inverted by one product
_SLOW_ROWS = 3  # of a product, which takes a processor longer than one with four rows
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

    def chunks(self, size: int, empty: int) -> RecurrentInputs:
        """Return the inputs in chunks, [n, ..., H, size, D]. So many empty tokens come before the
        others, and more fill up the last chunk: they change nothing."""
        tensors = (self.keys, self.values, self.decays, self.steps)
        return RecurrentInputs(*(_in_chunks(each, size, empty) for each in tensors))

    def some(self, chunks: slice) -> RecurrentInputs:
        """Return the inputs of some chunks."""
        return RecurrentInputs(
            self.keys[chunks], self.values[chunks], self.decays[chunks], self.steps[chunks]
        )


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
    """[..., H, T, dv], and any number of rows behind them, which count for nothing."""
    weights: Tensor | None
    """[..., H, T, dk], with as many rows behind them. None where a token changes the state by the
    same amount, whatever it is."""

    def of(self, heads: slice) -> StateUpdate:
        """Return the update of some heads, if these are the first axis."""
        weights = None if self.weights is None else self.weights[heads]
        return StateUpdate(self.decay[heads], self.left[heads], self.right[heads], weights)

    def split(self, heads: int) -> Iterator[StateUpdate]:
        """Split the update into updates of so many heads, if these are the first axis."""
        decays, lefts, rights = (
            torch.split(each, heads) for each in (self.decay, self.left, self.right)
        )
        weights = None if self.weights is None else torch.split(self.weights, heads)
        for number, parts in enumerate(zip(decays, lefts, rights, strict=True)):
            yield StateUpdate(*parts, None if weights is None else weights[number])

    def as_map(self) -> tuple[Tensor, Tensor]:
        """Return the update of a delta rule as a map (M, N), [..., H, dk, dk] and [..., H, dk,
        dv]."""
        assert self.weights is not None
        rows = slice(self.left.shape[-1])
        transition = self.left @ self.weights[..., rows, :]
        transition.diagonal(dim1=-2, dim2=-1).add_(self.decay[..., 0])
        return transition, self.left @ self.right[..., rows, :]

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
            state: The state before them, [H, dk, dv].
            out: Memory for the result, which may be the memory of `state`.
        """
        change = self.right
        if self.weights is not None:
            change = torch.baddbmm(change, self.weights, state)[..., : self.left.shape[-1], :]
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

    def empty_map(self, inputs: RecurrentInputs) -> tuple[Tensor, Tensor]:
        """Return the map (M, N) of no text, for the shapes of some inputs. N is also the state
        before any text."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadText:
    """Outputs of a recurrence for a text, and the effect of the text on states."""

    outputs: Tensor
    """[H, T, dv]."""
    state: Tensor
    """State behind the text, [H, dk, dv]."""
    map: tuple[Tensor, Tensor]
    """(M, N) of the tokens behind the first ones."""


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
        keys, values = self.normalized(keys, values), values.float()
        return RecurrentInputs(keys, values, decays.float(), steps.float())

    def normalized(self, keys: Tensor, values: Tensor) -> Tensor:
        """Return keys or queries of length one, for each head of the values."""
        keys = keys.float()
        keys = keys * torch.rsqrt(keys.square().sum(-1, keepdim=True) + _TINY)
        return _of_each_head(keys, values)

    def update(self, inputs: RecurrentInputs) -> StateUpdate:
        """See `Recurrence.update`. The tokens are at most a chunk.

        S <- D S + K^T (U - W S), where W and U solve one triangular system (Gated DeltaNet, eq. 8
        to 10).
        """
        found = self._update(inputs, _Decays.of(inputs))
        assert found.weights is not None
        if inputs.length != _SLOW_ROWS:
            return found
        right, weights = (
            nn.functional.pad(each, (0, 0, 0, 1)) for each in (found.right, found.weights)
        )
        return StateUpdate(found.decay, found.left, right, weights)

    def _update(self, inputs: RecurrentInputs, decays: _Decays) -> StateUpdate:
        keys, steps, values, total = inputs.keys, inputs.steps, inputs.values, decays.total
        inner = decays.products(keys, keys).tril(-1)
        inverse = _inverse(inner * steps)
        targets = (inverse * steps.mT) @ values
        begun = decays.begun * -steps
        weights = (inverse * begun.mT) @ keys if begun.shape[-1] == 1 else inverse @ (keys * begun)
        until = (total[..., -1:, :] - total).exp()
        return StateUpdate(decays.begun[..., -1:, :].mT, (keys * until).mT, targets, weights)

    def advance(self, state: Tensor, inputs: RecurrentInputs) -> Tensor:
        """See `Recurrence.advance`."""
        size = _chunk_size(inputs)
        for begin in range(0, inputs.length, size):
            state = self.update(inputs.part(begin, begin + size)).apply(state)
        return state

    def empty_map(self, inputs: RecurrentInputs) -> tuple[Tensor, Tensor]:
        """See `Recurrence.empty_map`."""
        heads, _, dim = inputs.keys.shape
        identity = torch.eye(dim, device=inputs.keys.device).expand(heads, dim, dim)
        return identity, inputs.values.new_zeros(heads, dim, inputs.values.shape[-1])

    def read(self, queries: Tensor, inputs: RecurrentInputs, state: Tensor, first: int) -> ReadText:
        """Compute the outputs of a text, and its map.

        The first tokens are a chunk of their own. The states before the other chunks follow from
        the state behind it and the maps of the chunks between, so that all outputs are computed at
        once.

        Args:
            queries: Queries of length one times the factor of the outputs, [H, T, dk].
            inputs: The other inputs.
            state: The state before the text, [H, dk, dv].
            first: Number of tokens that the map leaves out.
        """
        first, dim = min(first, inputs.length), queries.shape[-1]
        size = min(_chunk_size(inputs), max(first, inputs.length - first))
        empty = size - first if first else 0
        chunks, asked = inputs.chunks(size, empty), _in_chunks(queries, size, empty)
        outputs, found = list[Tensor](), None
        for begin in range(0, len(asked), _CHUNKS_AT_ONCE):
            here = slice(begin, begin + _CHUNKS_AT_ONCE)
            part = chunks.some(here)
            decays = _Decays.of(part)
            update = self._update(part, decays)
            transitions, increments = update.as_map()
            before = []
            if first and not begin:
                before = [state[None]]
                state = torch.baddbmm(increments[0], transitions[0], state)
            left = slice(len(before), None)
            maps = _multiplied(transitions[left], increments[left])  # [n + 1, H, dk, dk + dv]
            states = maps[..., dim:] + maps[..., :dim] @ state
            all_before = torch.cat([*before, states[:-1]])
            outputs.append(_outputs(asked[here], part.keys, decays, update, all_before))
            # copies of their own: views would keep the maps of all chunks
            new = maps[-1, ..., :dim].clone(), maps[-1, ..., dim:].clone()
            found = new if found is None else join_maps(found, new)
            state = states[-1].clone()
        assert found is not None
        out = torch.cat(outputs).transpose(0, 1).flatten(1, 2)
        return ReadText(out[:, empty : empty + inputs.length], state, found)


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

    def empty_map(self, inputs: RecurrentInputs) -> tuple[Tensor, Tensor]:
        """See `Recurrence.empty_map`."""
        keys, values = inputs.keys, inputs.values
        increment = keys.new_zeros(len(keys), values.shape[-1], keys.shape[-1])
        return keys.new_ones(len(keys), 1, 1), increment

    def map_of(self, inputs: RecurrentInputs) -> tuple[Tensor, Tensor]:
        """Return the map (M, N) of a text."""
        update = self.update(inputs)
        return update.decay, update.left @ update.right


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


def join_maps(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the map (M, N) of a text and of another text behind it."""
    transition, increment = second
    nothing = torch.zeros_like(first[0])
    return apply_map(transition, nothing, first[0]), apply_map(transition, increment, first[1])


def _chunk_size(inputs: RecurrentInputs) -> int:
    return CHUNK if inputs.decays.shape[-1] == 1 else CHANNEL_CHUNK


def _in_chunks(tensor: Tensor, size: int, empty: int) -> Tensor:
    """Tokens [..., T, D] in chunks [n, ..., size, D]. Zeros stand before the tokens, and fill the
    last chunk."""
    behind = -(empty + tensor.shape[-2]) % size
    filled = nn.functional.pad(tensor, (0, 0, empty, behind))
    chunks = filled.view(*filled.shape[:-2], -1, size, filled.shape[-1])
    return chunks.movedim(-3, 0)


@dataclass(frozen=True, slots=True, eq=False)
class _Decays:
    """Decays between the tokens of chunks."""

    total: Tensor
    """Sums of the logarithms up to each token, [..., H, C, 1 or dk]."""
    begun: Tensor
    """Decay from the begin of the chunk up to each token, [..., H, C, 1 or dk]."""
    apart: Tensor
    """Decay from each token to each one that is not before it, else 0, [..., H, C, C, 1 or dk]."""

    @classmethod
    def of(cls, inputs: RecurrentInputs) -> _Decays:
        total = inputs.decays.cumsum(-2)
        apart = total[..., :, None, :] - total[..., None, :, :]
        shape = apart.shape[-3:-1]
        earlier = torch.ones(shape, dtype=torch.bool, device=total.device).triu(1)
        apart = apart.masked_fill(earlier[..., None], float("-inf"))
        return cls(total, total.exp(), apart.exp())

    def products(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Products of queries with the keys up to their own, [..., H, C, C], which decay by the
        tokens between them."""
        if self.apart.shape[-1] == 1:
            return queries @ keys.mT * self.apart[..., 0]
        return torch.einsum("...ik,...jk,...ijk->...ij", queries, keys, self.apart)


def _multiplied(transitions: Tensor, increments: Tensor) -> Tensor:
    """Maps [M | N] of the texts before each of n consecutive texts, and of all, [n + 1, H, dk, dk +
    dv], from the map of each."""
    count, heads, dim, width = increments.shape
    added = nn.functional.pad(increments, (dim, 0))
    found = added.new_empty(count + 1, heads, dim, dim + width)
    found[0] = torch.eye(dim, dim + width, device=added.device)
    for number in range(count):
        before, behind = found[number], found[number + 1]
        torch.baddbmm(added[number], transitions[number], before, out=behind)
    return found


def _outputs(
    queries: Tensor, keys: Tensor, decays: _Decays, update: StateUpdate, state: Tensor
) -> Tensor:
    """Outputs of chunks, [n, H, C, dv]: queries read the state before the chunk, and the values
    that the chunk's tokens up to their own add (Gated DeltaNet, eq. 9)."""
    assert update.weights is not None
    added = update.right + update.weights @ state
    return (queries * decays.begun) @ state + decays.products(queries, keys) @ added


def _split_heads(channels: Tensor, size: int) -> Tensor:
    """Split channels [..., H * size, T] into heads [..., H, T, size]."""
    *front, count, tokens = channels.shape
    return channels.view(*front, count // size, size, tokens).mT


def _of_each_head(keys: Tensor, values: Tensor) -> Tensor:
    """Keys of groups, as keys of the heads of the values: [..., H, T, D]."""
    each = values.shape[-3] // keys.shape[-3]
    return keys if each == 1 else keys.repeat_interleave(each, -3)


def _inverse(strictly_lower: Tensor) -> Tensor:
    """Return the inverse of I + L, [..., C, C].

    A product of two short sums inverts what seams have, up to four tokens: L to the fourth power
    is zero. A solver takes longer for so small a system.
    """
    size = strictly_lower.shape[-1]
    identity = torch.eye(size, device=strictly_lower.device)
    if size <= _FEW_TOKENS:
        return (identity - strictly_lower) @ (identity + strictly_lower @ strictly_lower)
    inverse: Tensor = torch.linalg.solve_triangular(
        strictly_lower, identity.expand_as(strictly_lower), upper=False, unitriangular=True
    )
    return inverse
