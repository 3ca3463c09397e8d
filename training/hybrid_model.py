"""A tiny Qwen3.5, trained over contexts whose modules are read in a row, or each alone.

The weights are a Hugging Face model's. The forward here computes what the model computes, for a
whole batch of contexts: the modules behind the preamble, and every question behind them, without
seeing the other questions. It reads a context in one of four ways (`Mode`):

    exact   a module sees the modules before it
    order   each module is read right behind the preamble, alone; the recurrent state that questions
            see is of the same inputs in the prompt's order
    both    the mean of that state and the state of the reverse order
    alone   the state behind the last module, as if it were the only one: what is left without
            composition
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import Reader, Shape

Mode = Literal["exact", "order", "both", "alone"]
CHUNK, BLOCK = 128, 16
"""Tokens that are computed at once, and in one block of their system of equations."""


def config_of(
    vocabulary: int = 16384, hidden: int = 320, layers: int = 8, heads: int = 4,
    attention: Sequence[int] | None = None,
) -> Any:  # fmt: skip
    """Three layers of Gated DeltaNet for one of attention, as in Qwen3.5, or attention in the layers of
    these numbers. Positions as the reader's."""
    from transformers import Qwen3_5TextConfig

    kinds = {True: "full_attention", False: "linear_attention"}
    turning = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    return Qwen3_5TextConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=2, head_dim=64,
        linear_num_key_heads=heads, linear_num_value_heads=heads, linear_key_head_dim=64,
        linear_value_head_dim=64, max_position_embeddings=4096, tie_word_embeddings=True,
        pad_token_id=0, bos_token_id=None, eos_token_id=3, rope_parameters=turning,
        layer_types=None if attention is None else [kinds[each in attention] for each in range(layers)],
    )  # fmt: skip


def new_model(config: Any, seed: int) -> Any:
    """A Hugging Face model with random weights."""
    from transformers import Qwen3_5ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(config)
    for name, weight in model.named_parameters():
        if name.endswith("dt_bias"):  # decays of 1 to 1/1000 a token, as Mamba's time steps
            step = torch.exp(torch.empty_like(weight).uniform_(-6.9, -2.3))
            weight.data.copy_(step + torch.log(-torch.expm1(-step)))
        elif name.endswith("A_log"):
            weight.data.copy_(torch.empty_like(weight).uniform_(1, 8).log())
    return model


@torch.no_grad()
def model_of_reader(folder: Path, text: Tensor, seed: int, attention: Sequence[int] | None = None) -> Any:
    """A model that begins with the weights of a trained reader: its embeddings, norms and MLPs, and in
    every mixer its projections of queries, keys, values and outputs. Gates, convolutions, decays and
    steps are new, so that a reader of attention alone becomes a hybrid within minutes (Wang et al.,
    2024, arXiv 2408.15237, begin alike).

    Qwen3.5 scales each query and key to one length, as the reader does not. That length is the mean
    one of the reader's over a text [T]: with the length of new norms the attention is too weak to
    find anything."""
    from ragcache.models.reader import read_reader

    reader, _ = read_reader(folder)
    given, size = {name: w.float() for name, w in reader.state_dict().items()}, reader.config
    lengths = _lengths(given, text)
    heads, width = size.num_attention_heads, size.head_dim
    assert (size.num_key_value_heads, width, 4 * size.intermediate_size) == (2, 64, 11 * size.hidden_size)
    layers = size.num_hidden_layers
    model = new_model(config_of(size.vocab_size, size.hidden_size, layers, heads, attention), seed)
    model.model.embed_tokens.weight.copy_(given["model.embed_tokens.weight"])
    model.model.norm.weight.copy_(given["model.norm.weight"] - 1)  # Qwen's factors are 1 + weight
    for number, layer in enumerate(model.model.layers):
        own = {name.removeprefix(f"model.layers.{number}."): w for name, w in given.items()}
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(layer.mlp, name).weight.copy_(own[f"mlp.{name}.weight"])
        for name in ("input_layernorm", "post_attention_layernorm"):
            getattr(layer, name).weight.copy_(own[f"{name}.weight"] - 1)
        query, key, value, out = (own[f"self_attn.{name}_proj.weight"] for name in "qkvo")
        if hasattr(layer, "self_attn"):
            mixer = layer.self_attn
            gates = torch.zeros_like(query).unflatten(0, (heads, width))  # of one half
            mixer.q_proj.weight.copy_(
                torch.cat([query.unflatten(0, (heads, width)), gates], 1).flatten(0, 1)
            )
            mixer.k_proj.weight.copy_(key)
            mixer.v_proj.weight.copy_(value)
            mixer.o_proj.weight.copy_(2 * out)
            for norm, name in ((mixer.q_norm, "q_proj"), (mixer.k_norm, "k_proj")):
                norm.weight.fill_(lengths[f"layers.{number}.self_attn.{name}"] - 1)
        else:
            mixer = layer.linear_attn
            each = [x.unflatten(0, (2, width)).repeat_interleave(heads // 2, 0) for x in (key, value)]
            mixer.in_proj_qkv.weight.copy_(torch.cat([query, *(x.flatten(0, 1) for x in each)]))
            mixer.conv1d.weight[..., -1] = 1.0
            mixer.out_proj.weight.copy_(out)
    return model


def _lengths(weights: dict[str, Tensor], text: Tensor) -> dict[str, float]:
    """The root mean square of a reader's queries and keys over a text [T], by projection."""
    reader, found = Reader(Shape()), dict[str, float]()
    reader.load_state_dict({n.removeprefix("model."): w for n, w in weights.items() if n != "lm_head.weight"})

    def note(name: str) -> Any:
        return lambda module, inputs, out: found.update({name: float(out.square().mean().sqrt())})

    for name, module in reader.named_modules():
        if name.endswith(("q_proj", "k_proj")):
            module.register_forward_hook(note(name))
    reader(text[None], torch.arange(len(text))[None])
    return found


@dataclass(frozen=True)
class Pieces:
    """Tokens of a batch of contexts, or their hidden states with a further axis."""

    preamble: Tensor
    """[1, P]. All contexts have the same."""
    modules: Tensor
    """[B, K, M]."""
    questions: Tensor
    """[B, Q, L]."""

    def map(self, function: Any) -> Pieces:
        return Pieces(*map(function, (self.preamble, self.modules, self.questions)))

    def plus(self, other: Pieces) -> Pieces:
        return Pieces(
            self.preamble + other.preamble,
            self.modules + other.modules,
            self.questions + other.questions,
        )


def forward(model: Any, tokens: Pieces, mode: Mode) -> Pieces:
    """Hidden states of all tokens: [..., hidden]."""
    stack = model.model
    hidden = tokens.map(stack.embed_tokens)
    read = _Reading(stack.rotary_emb, tokens, mode)
    for layer in stack.layers:
        normed = hidden.map(layer.input_layernorm)
        if hasattr(layer, "linear_attn"):
            hidden = hidden.plus(read.recurrent(layer.linear_attn, normed))
        else:
            hidden = hidden.plus(read.attention(layer.self_attn, normed))
        hidden = hidden.plus(hidden.map(lambda x, to=layer: to.mlp(to.post_attention_layernorm(x))))
    return hidden.map(stack.norm)


class _Reading:
    """The mixers of all layers over one batch."""

    def __init__(self, rotary: nn.Module, tokens: Pieces, mode: Mode) -> None:
        self.mode: Mode = mode
        self._rotary, device = rotary, tokens.modules.device
        self._begin = tokens.preamble.shape[1]
        batch, count, size = tokens.modules.shape
        queries = tokens.questions.shape[1], tokens.questions.shape[2]
        self._end = self._begin + count * size
        rows = torch.arange(queries[0] * queries[1], device=device)
        own = rows[:, None] // queries[1] == rows // queries[1]
        own &= rows[:, None] >= rows
        seen = torch.ones(len(rows), self._end, dtype=torch.bool, device=device)
        self._of_questions = torch.cat([seen, own], 1)
        length = size if mode != "exact" else count * size
        seen = torch.ones(length, self._begin, dtype=torch.bool, device=device)
        causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        self._of_modules = torch.cat([seen, causal], 1)

    def _rotated(self, x: Tensor, begin: int) -> Tensor:
        """x: [B, H, T, D], of tokens from a position on."""
        positions = torch.arange(begin, begin + x.shape[2], device=x.device).expand(3, 1, -1)
        cos, sin = self._rotary(x, positions)
        width = cos.shape[-1]
        turned, rest = x[..., :width], x[..., width:]
        left, right = turned.chunk(2, -1)
        return torch.cat([turned * cos + torch.cat([-right, left], -1) * sin, rest], -1)

    def attention(self, module: Any, hidden: Pieces) -> Pieces:
        """Attention of all pieces. Keys of the context are seen where they are placed."""
        width = module.head_dim

        def project(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            """x: [B, T, hidden]. Returns [B, H, T, D] each, and gates [B, T, H * D]."""
            batch, length, _ = x.shape
            query, gate = module.q_proj(x).view(batch, length, -1, 2 * width).chunk(2, -1)
            key = module.k_norm(module.k_proj(x).view(batch, length, -1, width)).transpose(1, 2)
            value = module.v_proj(x).view(batch, length, -1, width).transpose(1, 2)
            return module.q_norm(query).transpose(1, 2), key, value, gate.flatten(2)

        def attend(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, mask: Tensor) -> Tensor:
            batch = query.shape[0]
            key, value = (x.expand(batch, -1, -1, -1) for x in (key, value))
            out = F.scaled_dot_product_attention(
                query, key, value.to(key.dtype), attn_mask=mask, enable_gqa=True
            )
            return module.o_proj(out.transpose(1, 2).flatten(2) * torch.sigmoid(gate))

        begin, (batch, count, size, _) = self._begin, hidden.modules.shape
        query, key0, value0, gate = project(hidden.preamble)
        key0 = self._rotated(key0, 0)
        ones = torch.ones(begin, begin, dtype=torch.bool, device=query.device).tril()
        preamble = attend(self._rotated(query, 0), key0, value0, gate, ones)

        alone = self.mode != "exact"
        rows = hidden.modules.flatten(0, 1) if alone else hidden.modules.flatten(1, 2)
        query, key, value, gate = project(rows)
        behind = lambda first, x: torch.cat([first.expand(len(x), -1, -1, -1), x], 2)  # noqa: E731
        turned = behind(key0, self._rotated(key, begin))
        out = attend(self._rotated(query, begin), turned, behind(value0, value), gate, self._of_modules)
        modules = out.view(batch, count, size, -1)

        if alone:  # keys and values of a context in a row, [B, H, K * M, D]
            key, value = (
                x.view(batch, count, *x.shape[1:]).transpose(1, 2).flatten(2, 3) for x in (key, value)
            )
        context = behind(key0, self._rotated(key, begin)), behind(value0, value)
        query, key, value, gate = project(hidden.questions.flatten(1, 2))
        number, length = hidden.questions.shape[1:3]

        def placed(x: Tensor) -> Tensor:
            """Every question begins where the context ends."""
            split = x.unflatten(2, (number, length)).transpose(1, 2).flatten(0, 1)
            turned = self._rotated(split, self._end)
            return turned.unflatten(0, (batch, number)).transpose(1, 2).flatten(2, 3)

        keys = torch.cat([context[0], placed(key)], 2)
        values = torch.cat([context[1], value], 2)
        questions = attend(placed(query), keys, values, gate, self._of_questions)
        return Pieces(preamble, modules, questions.view(hidden.questions.shape))

    def recurrent(self, module: Any, hidden: Pieces) -> Pieces:
        """Gated DeltaNet over all pieces."""
        batch, count, size, _ = hidden.modules.shape
        number = hidden.questions.shape[1]
        start = _inputs(module, hidden.preamble)
        preamble, state = _mixed(module, start, None, None)
        tail = start.mixed[:, -3:]
        each = _inputs(module, hidden.modules.flatten(0, 1))  # [B * K, M, ...]
        rows = each.regrouped(batch, count)
        if self.mode == "exact":
            out, behind = _mixed(module, rows, tail, state)
        else:
            out, own = _mixed(module, each, tail, state)
            if self.mode == "alone":
                behind = own.unflatten(0, (batch, count))[:, -1]
            else:
                _, behind = _mixed(module, rows, tail, state, states_alone=True)
            if self.mode == "both" and count > 1:
                turned = each.regrouped(batch, count, reverse=True)
                _, other = _mixed(module, turned, tail, state, states_alone=True)
                behind = (behind + other) / 2
        last = rows.mixed[:, -3:]
        asked = _inputs(module, hidden.questions.flatten(0, 1))
        questions, _ = _mixed(
            module,
            asked,
            last.repeat_interleave(number, 0),
            behind.repeat_interleave(number, 0),
        )
        return Pieces(
            preamble,
            out.reshape(batch, count, size, -1),
            questions.reshape(hidden.questions.shape),
        )


@dataclass(frozen=True)
class _Inputs:
    """Projections of a mixer's inputs, [B, T, ...] each."""

    mixed: Tensor
    gate: Tensor
    steps: Tensor
    decays: Tensor

    def regrouped(self, batch: int, count: int, *, reverse: bool = False) -> _Inputs:
        """[B * K, M, ...] as [B, K * M, ...]."""

        def joined(x: Tensor) -> Tensor:
            split = x.unflatten(0, (batch, count))
            return (split.flip(1) if reverse else split).flatten(1, 2)

        return _Inputs(*map(joined, (self.mixed, self.gate, self.steps, self.decays)))


def _inputs(module: Any, x: Tensor) -> _Inputs:
    """x: [B, T, hidden]."""
    decays = -module.A_log.float().exp() * F.softplus(module.in_proj_a(x).float() + module.dt_bias)
    steps = module.in_proj_b(x).sigmoid().float()
    return _Inputs(module.in_proj_qkv(x), module.in_proj_z(x), steps, decays)


def _mixed(
    module: Any,
    inputs: _Inputs,
    tail: Tensor | None,
    state: Tensor | None,
    *,
    states_alone: bool = False,
) -> tuple[Tensor, Tensor]:
    """The output [B, T, hidden] and the state behind [B, H, dk, dv] of a mixer.

    Args:
        module: The mixer.
        inputs: Its inputs.
        tail: Inputs of the convolution before, [B or 1, 3, channels]. None begins a text.
        state: The state before, [B or 1, H, dk, dv]. None begins a text.
        states_alone: Whether the output is not needed.
    """
    batch, length, channels = inputs.mixed.shape
    if tail is None:
        tail = inputs.mixed.new_zeros(1, 3, channels)
    window = torch.cat([tail.expand(batch, -1, -1), inputs.mixed], 1).transpose(1, 2)
    weight = module.conv1d.weight.to(window.dtype)
    mixed = F.silu(F.conv1d(window, weight, groups=channels)).transpose(1, 2)
    heads = lambda x, width: x.reshape(batch, length, -1, width).transpose(1, 2).float()  # noqa: E731
    query, key, value = mixed.split([module.key_dim, module.key_dim, module.value_dim], -1)
    out, behind = gated_delta_rule(
        heads(query, module.head_k_dim), heads(key, module.head_k_dim), heads(value, module.head_v_dim),
        inputs.decays.transpose(1, 2), inputs.steps.transpose(1, 2), state,
    )  # fmt: skip
    if states_alone:
        return out, behind
    out = out.transpose(1, 2).to(inputs.gate.dtype)
    normed = module.norm(out.flatten(0, -2), inputs.gate.reshape(-1, module.head_v_dim))
    return module.out_proj(normed.view(batch, length, -1)), behind


@torch.autocast("cuda", enabled=False)
@torch.autocast("cpu", enabled=False)
def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, step: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Outputs [B, H, T, dv] and the state behind, in float32: Yang et al., 2025, in chunks.

    Args:
        query: Queries [B, H, T, dk].
        key: Keys [B, H, T, dk].
        value: Values [B, H, T, dv].
        decay: Logarithms of the decays, [B, H, T].
        step: Sizes of the steps, [B, H, T].
        state: The state before, [B or 1, H, dk, dv].
    """
    length, width = value.shape[2], value.shape[3]
    size = min(CHUNK, -(-length // BLOCK) * BLOCK)
    pad = -length % size
    query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query = query * key.shape[-1] ** -0.5
    query, key, value = (F.pad(x, (0, 0, 0, pad)).unflatten(2, (-1, size)) for x in (query, key, value))
    total = F.pad(decay, (0, pad)).unflatten(2, (-1, size)).cumsum(-1)
    step = F.pad(step, (0, pad)).unflatten(2, (-1, size))[..., None]
    later = torch.ones(size, size, dtype=torch.bool, device=key.device).triu(1)
    apart = (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
    inner = (key @ key.mT * apart * step).tril(-1)
    grown = total.exp()[..., None]
    known = torch.cat([value * step, key * grown * step], -1)
    target, weight = (_inverse(inner) @ known).split([width, key.shape[-1]], -1)
    seen = query @ key.mT * apart
    query = query * grown
    left = (key * (total[..., -1:] - total).exp()[..., None]).mT
    ends = total[..., -1].exp()[..., None, None]
    if state is None:
        state = key.new_zeros(1, key.shape[1], key.shape[-1], width)
    state = state.expand(key.shape[0], -1, -1, -1)
    outs = []
    for number in range(key.shape[2]):
        change = target[:, :, number] - weight[:, :, number] @ state
        outs.append(query[:, :, number] @ state + seen[:, :, number] @ change)
        state = ends[:, :, number] * state + left[:, :, number] @ change
    out = torch.stack(outs, 2).flatten(2, 3)[:, :, :length]
    return out, state


def _inverse(lower: Tensor) -> Tensor:
    """(I + L)^-1 for strictly lower L, [..., C, C], by products alone: a GPU solves many small
    triangular systems slowly.

    Blocks on the diagonal are I - L + L^2 - ..., as products of few factors; they are short, so that
    powers stay small. Two neighbours become one block: [A, 0; B, D] has the inverse [A', 0; -D'BA', D'].
    """
    size = lower.shape[-1]
    count = size // BLOCK
    blocks = lower.unflatten(-1, (count, BLOCK)).unflatten(-3, (count, BLOCK))
    diagonal = blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)  # [..., count, BLOCK, BLOCK]
    one = torch.eye(BLOCK, device=lower.device)
    found, power = one - diagonal, diagonal @ diagonal
    for number in range(3):
        found = found + found @ power
        power = power @ power if number < 2 else power
    width = BLOCK
    while found.shape[-3] > 1:
        if found.shape[-3] % 2:  # a block of no tokens
            more = torch.eye(width, device=lower.device).expand(*found.shape[:-3], 1, -1, -1)
            found = torch.cat([found, more], -3)
        before, behind = found[..., ::2, :, :], found[..., 1::2, :, :]
        corners = []
        for number in range(before.shape[-3]):
            begin = 2 * number * width
            corner = lower[..., begin + width : begin + 2 * width, begin : begin + width]
            corners.append(F.pad(corner, (0, 0, 0, width - corner.shape[-2])))
        corner = -behind @ torch.stack(corners, -3) @ before
        upper = torch.cat([before, torch.zeros_like(corner)], -1)
        found = torch.cat([upper, torch.cat([corner, behind], -1)], -2)
        width *= 2
    return found[..., 0, :size, :size]
