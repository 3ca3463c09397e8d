"""What one call asks for: options by LangChain's names, turned into the engine's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ragcache.errors import InvalidRequest
from ragcache_connectors.langchain.structured import call_grammar

if TYPE_CHECKING:
    from ragcache import Generation
    from ragcache.structured import Grammar, ToolStyle
    from ragcache_connectors.langchain.model_info import Served


# LangChain's and OpenAI's names for what the engine calls otherwise.
_NAMES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "stop_sequences": "stop",
}
# What LangChain hands on for itself, or for models that are elsewhere.
_NOT_OURS = ("stream", "ls_structured_output_format", "structured_output_format")


@dataclass(frozen=True, slots=True)
class Call:
    """Everything but the messages. style: how tool calls are read; None where none may come.
    logprobs: whether they were asked for."""

    generation: Generation
    mode: str
    recognize: bool
    tools: Sequence[Mapping[str, Any]] | None = None
    style: ToolStyle | None = None
    logprobs: bool = False
    chat: dict[str, Any] = field(init=False)
    """The keyword arguments of `RagCache.chat`."""

    def __post_init__(self) -> None:
        chat = {
            "mode": self.mode,
            "recognize": self.recognize,
            "tools": self.tools,
            "generation": self.generation,
        }
        object.__setattr__(self, "chat", chat)

    @classmethod
    def of(
        cls, fields: Mapping[str, Any], stop: Sequence[str] | None, given: Mapping[str, Any],
        served: Served,
    ) -> Call:  # fmt: skip
        """fields: the model's own options; stop, given: those of the call, which come first.
        Raises `InvalidRequest`, `UnsupportedModel`."""
        from ragcache.structured import Grammar

        options = _renamed(fields) | _renamed(given)
        if stop is not None:
            options["stop"] = stop
        _check_model(options.pop("model", None), served.name)
        mode, recognize = options.pop("mode"), options.pop("recognize")
        logprobs = _logprobs(options)
        form = Grammar.response_format(options.pop("response_format", None))
        tools, style, grammar = _tools(options, served, form)
        return cls(_generation(options, grammar or form, style), mode, recognize, tools, style,
                   logprobs)  # fmt: skip


def _renamed(options: Mapping[str, Any]) -> dict[str, Any]:
    """By the engine's names, without those that are not set."""
    return {
        _NAMES.get(name, name): value
        for name, value in options.items()
        if value is not None and name not in _NOT_OURS
    }


def _check_model(wanted: object, served: str) -> None:
    if wanted is not None and str(wanted) != served:
        raise InvalidRequest(
            f"the model {wanted!r:.80} is not open here; {served!r} is. Make another ChatRagCache "
            "with its own state folder"
        )


def _logprobs(options: dict[str, Any]) -> bool:
    """OpenAI's pair `logprobs`, `top_logprobs` as the engine's one number."""
    wanted, most = options.pop("logprobs", None), options.pop("top_logprobs", None)
    if wanted is None and most is not None:
        wanted = True
    if wanted is None or wanted is False:
        return False
    options["logprobs"] = (most or 0) if wanted is True else wanted
    return True


def _tools(
    options: dict[str, Any], served: Served, form: Grammar | None
) -> tuple[list[dict[str, Any]] | None, ToolStyle | None, Grammar | None]:
    from ragcache.structured import resolve_tool_choice

    tools, strict = options.pop("tools", None), bool(options.pop("strict", False))
    wanted, parallel = options.pop("tool_choice", None), options.pop("parallel_tool_calls", True)
    choice = resolve_tool_choice(wanted, tools or ())
    if choice == "none":
        return None, None, None
    grammar = call_grammar(tools, choice, served.style, parallel, strict, form)
    return list(tools), served.style, grammar


def _generation(
    options: dict[str, Any], grammar: Grammar | None, style: ToolStyle | None
) -> Generation:
    from ragcache import Generation

    if style is not None and style.special:
        options["skip_special_tokens"] = False
    if grammar is not None:
        options["grammar"] = grammar
    return Generation.of(**options)
