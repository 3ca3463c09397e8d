"""The last layer computes the states of all rows, and its output of the rows that are wanted.

Nothing reads the output of the last layer but the head. A prompt wants the logits of its last row,
and the encoding of a module none at all, so that most of the layer would be computed for nothing.
Its forward is therefore called twice: up to the attention over all rows, which writes their states,
and again over the wanted rows, whose attention is known (docs/internals/adr/0116).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ragcache.attention import AttentionBackend, AttentionMetadata
from ragcache.attention.triton.operator import OperatorMetadata, attend
from ragcache.models.hf_patch import SegmentCache, step_in_context


class Attended(Exception):  # it reports no error
    """Ends a layer behind its attention.

    Attributes:
        out: Attention of the wanted rows, [R, Hq, D], or None if no row is wanted.
    """

    def __init__(self, out: Tensor | None) -> None:
        super().__init__("the layer has attended")
        self.out = out


class LastLayer:
    """Stands in place of the last layer's forward. It computes the whole layer where the cache of
    the step names no rows. Both calls are eager: compiled forwards are for steps of operators."""

    def __init__(self, layer: nn.Module) -> None:
        self.forward: Callable[..., Any] = layer.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache = next(
            (each for each in (*args, *kwargs.values()) if isinstance(each, SegmentCache)), None
        )
        if cache is None or cache.rows is None:
            return self.forward(*args, **kwargs)
        rows, hidden = cache.rows, args[0] if args else kwargs["hidden_states"]
        first = _FirstPass(cache.metadata, cache.backend, rows)
        try:
            self._call(first, args, kwargs)
        except Attended as attended:
            if attended.out is None:
                raise
            out = attended.out
        else:
            raise RuntimeError("the last layer of this model does not attend")
        count = hidden.shape[1]
        args = tuple(_wanted(each, count, rows) for each in args)
        kwargs = {name: _wanted(each, count, rows) for name, each in kwargs.items()}
        return self._call(_SecondPass(out, first.softcap), args, kwargs)

    def _call(
        self, step: _FirstPass | _SecondPass, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Calls the layer with another step, which is metadata and backend at once."""
        cache: Any = SegmentCache(step, step)  # type: ignore[arg-type]
        args = tuple(cache if isinstance(each, SegmentCache) else each for each in args)
        kwargs = {
            name: cache if isinstance(each, SegmentCache) else each for name, each in kwargs.items()
        }
        for name in ("attention_metadata", "backend"):
            if name in kwargs:
                kwargs[name] = step
        with step_in_context(step, step):  # type: ignore[arg-type]
            return self.forward(*args, **kwargs)


def divide_layer(layer: nn.Module) -> None:
    """Let a model's last layer compute its output of some rows, in place, also if it was compiled
    since. A second call changes nothing."""
    if not isinstance(layer.forward, LastLayer):
        layer.forward = LastLayer(layer)


class _FirstPass:
    """A step that writes the states of all rows, and ends the layer where it has attended."""

    def __init__(
        self,
        metadata: AttentionMetadata | OperatorMetadata,
        backend: AttentionBackend,
        rows: Tensor,
    ) -> None:
        self.metadata, self.backend, self.rows = metadata, backend, rows
        self.softcap = metadata.softcap

    def write_states(self, layer: int, key: Tensor, value: Tensor) -> None:
        """See `AttentionMetadata.write_states`."""
        self.metadata.write_states(layer, key, value)

    def of_layer(self, layer: int) -> tuple[_FirstPass, int]:
        """See `AttentionMetadata.of_layer`."""
        return self, layer

    def attend(self, _: Any, layer: int, *states: Tensor, **options: Any) -> Tensor:
        """See `AttentionBackend.attend`. Raises `Attended`."""
        if isinstance(self.metadata, OperatorMetadata):
            raise Attended(self._attend_through_operator(layer, *states, **options))
        if not len(self.rows):
            raise Attended(None)
        metadata, layer = self.metadata.of_layer(layer)
        raise Attended(self.backend.attend(metadata, layer, *states, **options)[self.rows])

    def _attend_through_operator(
        self, layer: int, *states: Tensor, scale: float, sinks: Tensor | None = None
    ) -> Tensor | None:
        """Attends in any case: the operator writes the states."""
        assert isinstance(self.metadata, OperatorMetadata)
        number, handle = torch.tensor(layer, device="cpu"), self.metadata.handle
        out: Tensor = attend(*(each[None] for each in states), number, scale, handle, sinks)
        return out[0, self.rows] if len(self.rows) else None


class _SecondPass:
    """A step over the wanted rows, whose states are written and whose attention is known."""

    def __init__(self, out: Tensor, softcap: float | None) -> None:
        self.out, self.softcap = out, softcap

    def write_states(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Does nothing."""

    def of_layer(self, layer: int) -> tuple[_SecondPass, int]:
        """See `AttentionMetadata.of_layer`."""
        return self, layer

    def attend(self, *_: Any, **__: Any) -> Tensor:
        """See `AttentionBackend.attend`."""
        return self.out


def _wanted(value: Any, count: int, rows: Tensor) -> Any:
    """The wanted rows of an argument of the layer, if its shape is [1, `count`, ...], as of the
    residual stream, positions and their angles. Other arguments stay whole."""
    if isinstance(value, tuple):
        return tuple(_wanted(each, count, rows) for each in value)
    if isinstance(value, Tensor) and value.dim() > 1 and value.shape[:2] == (1, count):
        return value[:, rows]
    return value
