"""How an answer is generated: what a caller may choose for one request."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields
from typing import Any

from ragcache.engine import Context, Request, SamplingParams, TextStream
from ragcache.engine.detokenizer import check_stops
from ragcache.errors import InvalidRequest
from ragcache.models import LoadedModel
from ragcache.structured import Grammar, constraint_of


@dataclass(frozen=True, slots=True)
class Generation:
    """Options of one request. The default is one greedy answer.

    max_new_tokens: None is what the state folder was opened with; with `unbounded`, as many as the
    model's window and the engine's pool leave. stop: strings that end an answer
    and do not belong to it. n: how many answers. min_new_tokens: no stop token is chosen before.
    ignore_eos: stop tokens end nothing. timeout: in seconds, from when the request is queued.
    priority: each level counts as 10 seconds of waiting. share: whether the states of the
    question's own tokens may be shared with other requests. grammar: the form that every answer
    keeps to (extra `structured`). skip_special_tokens: whether control tokens are left out of the
    text; False where they mark tool calls (`ToolStyle.special`).
    """

    sampling: SamplingParams = SamplingParams()
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    min_new_tokens: int = 0
    ignore_eos: bool = False
    timeout: float | None = None
    priority: int = 0
    share: bool = True
    grammar: Grammar | None = None
    skip_special_tokens: bool = True
    unbounded: bool = False

    @classmethod
    def of(cls, **options: Any) -> Generation:
        """Options by their plain names, those of `SamplingParams` among them: `of(temperature=0.7,
        stop="\\n")`, and those of `Grammar`: `json_schema={...}`, `json_object=True`,
        `regex="..."`, `ebnf="..."`. None is the default. Raises `InvalidRequest` for an unknown
        name."""
        given = {name: value for name, value in options.items() if value is not None}
        grammars = [_GRAMMARS[name](given.pop(name)) for name in _GRAMMARS if name in given]
        grammars = [each for each in grammars if each is not None]
        sampling = {f.name: given.pop(f.name) for f in fields(SamplingParams) if f.name in given}
        known = [field.name for field in fields(cls) if field.name != "sampling"]
        if unknown := sorted(given.keys() - set(known)):
            sampled = (field.name for field in fields(SamplingParams))
            names = ", ".join(sorted([*known, *sampled, *_GRAMMARS]))
            raise InvalidRequest(f"unknown option {unknown[0]!r}; options: {names}")
        if "stop" in given:
            stop = given["stop"]
            given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        if len(grammars) + ("grammar" in given) > 1:
            raise InvalidRequest("an answer keeps to one grammar; several were given")
        if grammars:
            given["grammar"] = grammars[0]
        return cls(sampling=SamplingParams(**sampling), **given)

    def request(
        self, context: Context, model: LoadedModel, default_tokens: int, tenant: Hashable
    ) -> Request:
        """The engine's request. Raises `InvalidRequest`, or `MissingExtra` for a grammar."""
        grammar = self.grammar
        most = default_tokens if self.max_new_tokens is None else self.max_new_tokens
        return Request(
            context=context,
            max_new_tokens=most,
            stop_ids=model.stop_ids,
            sampling=self.sampling,
            n=self.n,
            stop=check_stops(self.stop),
            text=lambda stop: TextStream(model.tokenizer, stop, self.skip_special_tokens),
            min_new_tokens=self.min_new_tokens,
            ignore_eos=self.ignore_eos,
            tenant=tenant if self.share else None,
            priority=self.priority,
            timeout=self.timeout,
            constraint=None if grammar is None else constraint_of(grammar, model),
        )


_GRAMMARS: dict[str, Callable[[Any], Grammar | None]] = {
    "json_schema": Grammar.json_schema,
    "json_object": lambda wanted: Grammar.json_object() if wanted else None,
    "regex": Grammar.regex,
    "ebnf": Grammar.ebnf,
}

GREEDY = Generation()
"""One greedy answer: the default of every call."""
