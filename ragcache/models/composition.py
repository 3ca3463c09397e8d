"""Documents that compose in recurrent layers: maps of encoded texts, and states behind several.

A text that is encoded is read by transformers' own layers. `record_mixer` calls the forward of a
mixer with one change: the recurrence also computes the map of the text
(`ragcache.attention.recurrent_maps`), from which the delta rule takes its outputs, too.
`compose_layers` applies the maps of a prompt's
documents, in order, to the states before them.

The convolution of a mixer reaches over the seam between two texts. It is computed when documents
are composed, for the first tokens of each. What these tokens do to the state depends on the order
of the documents, and not on the state: it is computed for all layers, documents and orders at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ragcache.attention.recurrent_maps import (
    DELTA_RULE,
    STATE_SPACE,
    Recurrence,
    RecurrentInputs,
    StateUpdate,
    apply_map,
    join_maps,
)
from ragcache.states.recurrent import LayerMap, LayerState, RecurrentStates

Arguments = Mapping[str, Any]
"""Arguments of one call of a recurrence of transformers, by name."""


@dataclass(frozen=True, slots=True, eq=False)
class _ReadTokens:
    """The tokens of one call of a recurrence."""

    tokens: RecurrentInputs
    map: tuple[Tensor, Tensor]
    """Map of the tokens, but for the first ones."""


@dataclass(frozen=True, slots=True)
class _KnownFunction:
    """A recurrence that transformers has as a function."""

    recurrence: Recurrence
    read: Callable[[Callable[[], Any], Arguments, int], tuple[Any, _ReadTokens]]
    """Returns the result of a call of the function, and what the call read. Takes the call, its
    arguments, and the number of the first tokens, which the map leaves out."""


def _read_delta(
    call: Callable[[], Any],  # noqa: ARG001  # whose place this takes
    arguments: Arguments,
    first: int,
) -> tuple[tuple[Tensor, Tensor], _ReadTokens]:
    """query, key, value: [1, T, H, D]; beta [1, T, H]; g [1, T, H], or [1, T, H, dk]."""
    queries, keys, values, decays, steps = (
        arguments[name][0].transpose(0, 1) for name in ("query", "key", "value", "g", "beta")
    )
    decays = decays if decays.dim() == 3 else decays[..., None]
    tokens = DELTA_RULE.prepared(keys, values, decays, steps[..., None])
    queries = DELTA_RULE.normalized(queries, values) * keys.shape[-1] ** -0.5
    state = arguments.get("initial_state")
    before = DELTA_RULE.empty_map(tokens)[1] if state is None else state[0].float()
    found = DELTA_RULE.read(queries, tokens, before, first)
    out = found.outputs.transpose(0, 1)[None].to(arguments["query"].dtype)
    return (out, found.state[None]), _ReadTokens(tokens, found.map)


def _read_scan(
    call: Callable[[], Any], arguments: Arguments, first: int
) -> tuple[Any, _ReadTokens]:
    """A call of `mamba2_chunk_scan`."""
    return call(), _mapped(_scan_inputs(arguments), first)


def _read_update(
    call: Callable[[], Any], arguments: Arguments, first: int
) -> tuple[Any, _ReadTokens]:
    """A call of `mamba2_selective_state_update`."""
    return call(), _mapped(_update_inputs(arguments), first)


def _mapped(tokens: RecurrentInputs, first: int) -> _ReadTokens:
    return _ReadTokens(tokens, STATE_SPACE.map_of(tokens.part(first, tokens.length)))


def _scan_inputs(arguments: Arguments) -> RecurrentInputs:
    """hidden_states [1, T, H, P]; dt [1, T, H]; A, dt_bias: [H]; B [1, T, G, N]."""
    dt = nn.functional.softplus(arguments["dt"][0] + arguments["dt_bias"]).float()  # [T, H]
    steps = dt.clamp(*arguments.get("dt_limit", (0.0, float("inf")))).mT[..., None]
    keys, values = (arguments[name][0].transpose(0, 1) for name in ("B", "hidden_states"))
    decays = steps * arguments["A"].float()[:, None, None]
    return STATE_SPACE.prepared(keys, values, decays, steps)


def _update_inputs(arguments: Arguments) -> RecurrentInputs:
    """One token: hidden_states, dt: [1, H, P]; A [H, P, N]; dt_bias [H, P]; B [1, G, N]."""
    return _scan_inputs(
        {
            "hidden_states": arguments["hidden_states"][:, None],
            "dt": arguments["dt"][:, None, :, 0],
            "dt_bias": arguments["dt_bias"][:, 0],
            "A": arguments["A"][:, 0, 0],
            "B": arguments["B"][:, None],
        }
    )


Document = TypeVar("Document")

_LAYERS_AT_ONCE = 6
"""Layers that a CPU composes at once: their seams are some MiB, which caches hold."""
_DELTA = _KnownFunction(DELTA_RULE, _read_delta)
_FUNCTIONS = {
    "torch_chunk_gated_delta_rule": _DELTA,
    "torch_recurrent_gated_delta_rule": _DELTA,
    "chunk_kimi_delta_attention": _DELTA,
    "recurrent_kimi_delta_attention": _DELTA,
    "mamba2_chunk_scan": _KnownFunction(STATE_SPACE, _read_scan),
    "mamba2_selective_state_update": _KnownFunction(STATE_SPACE, _read_update),
}
"""Functions of transformers that are known to be affine in the state."""


def recurrence_of(module: nn.Module) -> Recurrence | None:
    """Return the recurrence of a mixer, if it has one and its functions are known."""
    names = inspect.unwrap(type(module).forward).__code__.co_names
    found = [_FUNCTIONS[name].recurrence for name in names if name in _FUNCTIONS]
    return found[0] if found else None


def is_affine(module: nn.Module, state: LayerState) -> bool:
    """Tell whether the states of a mixer are known to be affine maps of earlier states.

    Args:
        module: The mixer.
        state: A state of its layer.
    """
    known = recurrence_of(module) is not None or not state.recurrent
    return known and len(state.convolution) == 1 and len(state.recurrent) <= 1


def record_mixer(
    module: nn.Module,
    call: Callable[[Callable[..., Any]], tuple[Tensor, Tensor]],
    before: LayerMap | None,
) -> tuple[Tensor, LayerMap]:
    """Run a mixer over the next tokens of a text that is encoded, and extend the text's map.

    Args:
        module: The mixer.
        call: Calls a forward of the mixer. Returns the mixer's output, and the inputs of its
            convolution, [1, channels, T].
        before: Map of the text before these tokens. None at its beginning.

    Returns:
        The output of the mixer, and the map up to the last token.
    """
    forward, kernel = inspect.unwrap(type(module).forward), _kernel(module)
    first = kernel - 1 - (0 if before is None else before.first.shape[-1])
    recorded: list[_ReadTokens] = []
    names = {
        name: _recording(forward.__globals__[name], known, recorded, first)
        for name, known in _FUNCTIONS.items()
        if name in forward.__code__.co_names
    }
    changed = FunctionType(
        forward.__code__,
        {**forward.__globals__, **names},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    changed.__kwdefaults__ = forward.__kwdefaults__
    out, inputs = call(changed)
    read = recorded[0] if recorded else None
    return out, _extended(before, inputs, read, recurrence_of(module), kernel)


def compose_layers(
    mixers: Sequence[nn.Module],
    states: Sequence[LayerState],
    documents: Sequence[RecurrentStates],
    *,
    first: int = 0,
    both: bool,
) -> list[LayerState]:
    """Return the states of consecutive recurrent layers behind several documents.

    Args:
        mixers: The mixers of the layers, whose convolutions reach over the seams.
        states: The states of the layers before the documents. `LayerState`s without tensors begin
            a text.
        documents: Maps of the documents, in order.
        first: Number of the first layer, counted over the recurrent layers of the model.
        both: Whether recurrent states are means over the order and its reverse.
    """
    size = len(mixers) if documents[0].last.is_cuda else _LAYERS_AT_ONCE
    found = list[LayerState]()
    for begin in range(0, len(mixers), size):
        group = slice(begin, begin + size)
        layers = slice(first + begin, first + begin + len(mixers[group]))
        maps = [_Document(each.part(layers), each.forgets[layers]) for each in documents]
        found += _compose(mixers[group], states[group], maps, both=both)
    return found


def orders_of(
    documents: Sequence[Document], *, begins: bool, both: bool
) -> list[Sequence[Document]]:
    """Return the orders over which the states behind documents are a mean.

    Args:
        documents: The documents, in the prompt's order.
        begins: Whether the first document begins the text, and stays first.
        both: Whether states are means over the order and its reverse.
    """
    first = documents[: int(begins)]
    others = documents[len(first) :]
    turned = both and len(others) > 1
    return [documents, [*first, *others[::-1]]] if turned else [documents]


def convolutions_of(mixers: Sequence[nn.Module]) -> tuple[Tensor, Tensor | None]:
    """Return weights [R, channels, kernel] and biases [R, channels] of the mixers' convolutions."""
    found = [_convolution(each) for each in mixers]
    weights = torch.stack([each.weight[:, 0].detach() for each in found])
    biases = [each.bias.detach() for each in found if each.bias is not None]
    return weights, torch.stack(biases) if biases else None


def _recording(
    function: Callable[..., Any], known: _KnownFunction, recorded: list[_ReadTokens], first: int
) -> Callable[..., Any]:
    signature = inspect.signature(inspect.unwrap(function))

    def recording(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        result, read = known.read(partial(function, *args, **kwargs), arguments, first)
        recorded.append(read)
        return result

    return recording


def _extended(
    before: LayerMap | None,
    inputs: Tensor,
    read: _ReadTokens | None,
    recurrence: Recurrence | None,
    kernel: int,
) -> LayerMap:
    """Extend a map by tokens with these inputs of the convolution, [1, channels, T]."""
    begins = before is None
    if before is None:
        before = _empty_map(inputs, read, recurrence)
    opened = min(inputs.shape[-1], kernel - 1 - before.first.shape[-1])
    first = torch.cat([before.first, inputs[..., :opened]], -1)
    # a copy of its own: a view would keep the inputs of all tokens
    last = torch.cat([before.last, inputs[..., -kernel:]], -1)[..., -kernel:].clone()
    if read is None:
        return LayerMap(
            before.transition, before.increment, before.decays, before.steps, first, last
        )
    tokens = read.tokens.part(0, opened)
    return LayerMap(
        *(read.map if begins else join_maps((before.transition, before.increment), read.map)),
        torch.cat([before.decays, tokens.decays], 1),
        torch.cat([before.steps, tokens.steps], 1),
        first,
        last,
    )


def _empty_map(inputs: Tensor, read: _ReadTokens | None, recurrence: Recurrence | None) -> LayerMap:
    """The map of no text."""
    first = inputs[..., :0]
    if read is None or recurrence is None:
        nothing = inputs.new_zeros(0, 0, 0, dtype=torch.float32)
        return LayerMap(nothing, nothing, nothing, nothing, first, first)
    none = read.tokens.part(0, 0)
    return LayerMap(*recurrence.empty_map(read.tokens), none.decays, none.steps, first, first)


@dataclass(frozen=True, slots=True, eq=False)
class _Document:
    """A document, as R consecutive recurrent layers read it."""

    maps: RecurrentStates
    """Its maps, of these layers."""
    forgets: Tensor
    """See `RecurrentStates.forgets`, [R, H]."""


@dataclass(frozen=True, slots=True, eq=False)
class _Order:
    """Documents in one order, as R consecutive recurrent layers read them."""

    maps: Sequence[RecurrentStates]
    """Maps of the documents, from the first one on that changes what some head holds at the end."""
    tails: Sequence[Tensor]
    """Last inputs of the convolution before each document and at the end, [R, channels, kernel]."""
    remembered: Tensor
    """Whether each head remembers at the end the state before each document, [documents + 1, R, H].
    The last row is the state at the end."""

    @classmethod
    def of(cls, documents: Sequence[_Document], tail: Tensor) -> _Order:
        """Lead the last inputs of the convolution, [R, channels, kernel], through documents."""
        kept = [~each.forgets for each in documents]
        remembered = (
            torch.stack([*kept, torch.ones_like(kept[0])]).flip(0).cumprod(0).flip(0).bool()
        )
        some = remembered.flatten(1).any(1).tolist()
        begin = some.index(True, 1) - 1 if remembered.numel() else 0
        tails, width = [tail], tail.shape[-1]
        for each in documents:
            last = each.maps.last[:, 0]
            short = last.shape[-1] < width
            tails.append(torch.cat([tails[-1], last], -1)[..., -width:] if short else last)
        maps = [each.maps for each in documents[begin:]]
        return cls(maps, tails[begin:], remembered[begin:])

    def advance(self, state: Tensor, steps: Sequence[_Step], layers: slice) -> Tensor:
        """Return the recurrent states of some of the layers behind the documents.

        Args:
            state: Their states before the documents, [heads, dk, dv].
            steps: Effect of each document on them.
            layers: The layers.
        """
        found, other = torch.empty_like(state), torch.empty_like(state)
        remembered = self.remembered[:, layers].flatten(1).tolist()
        for number, (transition, increment, seam) in enumerate(steps):
            if all(remembered[number]):  # no head is left out, and nothing is cut
                opened = seam.apply(state, other)
                state = apply_map(transition, increment, opened, found)
            else:
                runs = _runs(remembered[number], remembered[number + 1])
                for begin, end, (before, behind) in runs:
                    here = slice(begin, end)
                    if before:
                        opened = seam.of(here).apply(state[here], other[here])
                        apply_map(transition[here], increment[here], opened, found[here])
                    elif behind:
                        found[here] = increment[here]
                state = found
            found, other = other, found
        return state


def _runs(*marks: Sequence[bool]) -> Iterator[tuple[int, int, tuple[bool, ...]]]:
    """Runs of consecutive heads that have the same marks, with these marks."""
    begin = 0
    for same, heads in groupby(zip(*marks, strict=True)):
        end = begin + len(list(heads))
        yield begin, end, same
        begin = end


def _compose(
    mixers: Sequence[nn.Module],
    states: Sequence[LayerState],
    documents: Sequence[_Document],
    *,
    both: bool,
) -> list[LayerState]:
    """The states of a few layers behind documents."""
    found = list(states)
    if not found[0].convolution:  # the first document begins the text, and stays first
        found, documents = _behind(mixers, found, [documents[:1]]), documents[1:]
    if not documents:
        return found
    return _behind(mixers, found, orders_of(documents, begins=False, both=both))


def _behind(
    mixers: Sequence[nn.Module],
    states: Sequence[LayerState],
    orders: Sequence[Sequence[_Document]],
) -> list[LayerState]:
    """The states behind documents. Recurrent states are the mean over the orders."""
    weight = _weight(mixers[0])
    if states[0].convolution:
        tail = torch.cat([each.convolution[0] for each in states])
    else:
        tail = weight.new_zeros(len(mixers), weight.shape[0], weight.shape[-1])
    placed = [_Order.of(each, tail) for each in orders]
    last = placed[0].tails[-1]
    behind = [LayerState({0: each[None].to(weight.dtype, copy=True)}) for each in last]
    recurrence = recurrence_of(mixers[0])
    if recurrence is None:
        return behind
    seams = iter(_seams(mixers, placed, recurrence))
    size = len(mixers) if weight.is_cuda else 1  # the caches of a CPU hold the states of one layer
    heads = size * placed[0].maps[0].increment.shape[1]
    steps = [[list(_steps(each, next(seams), heads)) for each in order.maps] for order in placed]
    for number, begin in enumerate(range(0, len(mixers), size)):
        layers = slice(begin, begin + size)
        if states[0].recurrent:
            parts = [each.recurrent[0][0] for each in states[layers]]
            before = parts[0].float() if size == 1 else torch.cat(parts).float()
        else:
            shape = placed[0].maps[0].increment[layers].flatten(0, 1).shape
            before = torch.zeros(shape, device=weight.device)
        ends = [
            order.advance(before, [each[number] for each in documents], layers)
            for order, documents in zip(placed, steps, strict=True)
        ]
        end = ends[0] if len(ends) == 1 else ends[0].add_(ends[1]).div_(2)
        for state, each in zip(behind[layers], end.chunk(size), strict=True):
            state.recurrent[0] = each[None]
    return behind


_Step = tuple[Tensor, Tensor, StateUpdate]
"""M and N of a document, and the effect of its first tokens, of some heads."""


def _steps(maps: RecurrentStates, seam: StateUpdate, heads: int) -> Iterator[_Step]:
    """A document, so many heads at once."""
    tensors = maps.transition, maps.increment
    parts = (torch.split(each.flatten(0, 1), heads) for each in tensors)
    return zip(*parts, seam.split(heads), strict=True)


def _seams(
    mixers: Sequence[nn.Module], orders: Sequence[_Order], recurrence: Recurrence
) -> Iterator[StateUpdate]:
    """Effect of the first tokens of each document of all orders, [R * H, ...] each.

    Documents that are shorter than the convolution get tokens that change nothing.
    """
    documents = [each for order in orders for each in order.maps]
    tails = [each for order in orders for each in order.tails[:-1]]
    some, (layers, channels, kernel) = documents[0].increment, tails[0].shape
    seen = recurrence.channels(channels, some)
    shape = 2 * (kernel - 1), len(documents), layers, len(range(channels)[seen])
    windows = torch.empty(shape, device=some.device)
    for window, tail, each in zip(windows.unbind(1), tails, documents, strict=True):
        opened = kernel - 1 + each.first.shape[-1]
        window[: kernel - 1] = tail[:, seen, 1:].permute(2, 0, 1)
        window[kernel - 1 : opened] = each.first[:, 0, seen].permute(2, 0, 1)
        window[opened:] = 0
    mixed = _convolved(mixers, windows, seen).permute(1, 2, 3, 0)

    def padded(tensors: Sequence[Tensor]) -> Tensor:
        return torch.stack(
            [nn.functional.pad(each, (0, 0, 0, kernel - 1 - each.shape[-2])) for each in tensors]
        )

    decays = padded([each.decays for each in documents])
    steps = padded([each.steps for each in documents])
    return recurrence.update(recurrence.inputs(mixed, some, decays, steps)).unbind()


def _convolution(module: nn.Module) -> nn.Conv1d:
    return next(each for each in module.children() if isinstance(each, nn.Conv1d))


def _weight(module: nn.Module) -> Tensor:
    return _convolution(module).weight


def _kernel(module: nn.Module) -> int:
    return int(_weight(module).shape[-1])


def _convolved(mixers: Sequence[nn.Module], inputs: Tensor, channels: slice) -> Tensor:
    """Output of some channels of the convolutions of R mixers, in float32.

    Args:
        mixers: The mixers.
        inputs: Inputs of these channels, [kernel - 1 + T, n, R, channels]. The axis of the tokens
            is the first one, so that each operation takes long rows.
        channels: The channels.

    Returns:
        [T, n, R, channels].
    """
    taps = torch.stack([_weight(each)[channels, 0].float() for each in mixers]).permute(2, 0, 1)
    taps = taps.contiguous()
    windows = inputs.unfold(0, len(taps), 1)
    out = windows[..., 0] * taps[0]
    for number in range(1, len(taps)):
        out.addcmul_(windows[..., number], taps[number])
    biases = [each for each in (_convolution(mixer).bias for mixer in mixers) if each is not None]
    if biases:
        out += torch.stack(biases)[:, channels]
    activation = getattr(mixers[0], "activation", None)
    return out if activation is None else ACT2FN[activation](out)
