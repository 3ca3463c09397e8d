"""How an answer is generated: what a caller may choose for one request."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields
from typing import Any

from ragcache.engine import Context, Request, Sampling, TextStream
from ragcache.engine.stop import check_stops
from ragcache.errors import InvalidRequest
from ragcache.models import LoadedModel


@dataclass(frozen=True, slots=True)
class Generation:
    """Options of one request. The default is one greedy answer.

    max_new_tokens: None is what the state folder was opened with. stop: strings that end an answer
    and do not belong to it. n: how many answers. min_new_tokens: no stop token is chosen before.
    ignore_eos: stop tokens end nothing. timeout: in seconds, from when the request is queued.
    priority: each level counts as 10 seconds of waiting. share: whether the states of the
    question's own tokens may be shared with other requests.
    """

    sampling: Sampling = Sampling()
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    min_new_tokens: int = 0
    ignore_eos: bool = False
    timeout: float | None = None
    priority: int = 0
    share: bool = True

    @classmethod
    def of(cls, **options: Any) -> Generation:
        """Options by their plain names, those of `Sampling` among them: `of(temperature=0.7,
        stop="\\n")`. None is the default. Raises `InvalidRequest` for an unknown name."""
        given = {name: value for name, value in options.items() if value is not None}
        sampling = {f.name: given.pop(f.name) for f in fields(Sampling) if f.name in given}
        known = [field.name for field in fields(cls) if field.name != "sampling"]
        if unknown := sorted(given.keys() - set(known)):
            names = ", ".join(sorted([*known, *(field.name for field in fields(Sampling))]))
            raise InvalidRequest(f"unknown option {unknown[0]!r}; options: {names}")
        if "stop" in given:
            stop = given["stop"]
            given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        return cls(sampling=Sampling(**sampling), **given)

    def request(
        self, context: Context, model: LoadedModel, default_tokens: int, tenant: Hashable
    ) -> Request:
        """The engine's request. Raises `InvalidRequest`."""
        most = default_tokens if self.max_new_tokens is None else self.max_new_tokens
        return Request(
            context=context,
            max_new_tokens=most,
            stop_ids=model.stop_ids,
            sampling=self.sampling,
            n=self.n,
            stop=check_stops(self.stop),
            text=lambda stop: TextStream(model.tokenizer, stop),
            min_new_tokens=self.min_new_tokens,
            ignore_eos=self.ignore_eos,
            tenant=tenant if self.share else None,
            priority=self.priority,
            timeout=self.timeout,
        )


GREEDY = Generation()
"""One greedy answer: the default of every call."""
