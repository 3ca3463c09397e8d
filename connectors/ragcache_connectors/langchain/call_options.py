"""Options of one call, converted from LangChain's and OpenAI's names, and facts about its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ragcache.errors import InvalidRequest
from ragcache.modes import ReuseMode
from ragcache.params import SearchParams
from ragcache_connectors.langchain.structured import call_grammar

if TYPE_CHECKING:
    from ragcache import GenerationParams, RagCache
    from ragcache.engine import SampledToken
    from ragcache.models import LoadedModel
    from ragcache.structured import Grammar, ToolStyle

SEARCH = ("collection", *SearchParams.model_fields)
"""Options of the search for documents."""

# Options that LangChain or OpenAI name differently.
_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop_sequences": "stop",
}
# Options that LangChain passes on for its own use.
_IGNORED = ("stream", "ls_structured_output_format", "structured_output_format")


@dataclass(frozen=True)
class ModelInfo:
    """Facts about the model of an open `RagCache`. Created for each call."""

    rag: RagCache
    """The open `RagCache`."""

    @property
    def model(self) -> LoadedModel:
        return self.rag.internals.shared.model

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def identity(self) -> dict[str, Any]:
        """Parameters that distinguish this model, its defaults and the texts that it recognizes."""
        namespace = self.rag.internals
        return {
            "fingerprint": self.model.causal.fingerprint,
            "state": namespace.shared.database.name,
            "namespace": namespace.name,
            "max_tokens": namespace.shared.config.max_tokens,
            "instruction": namespace.shared.instruction,  # the states of documents have read it
        }

    @cached_property
    def style(self) -> ToolStyle | None:
        """How the model writes tool calls, if its template takes tools."""
        from ragcache.structured import tool_style

        return tool_style(self.model.tokenizer)

    def count_tokens(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None = None
    ) -> int:
        """Count the tokens of a conversation's prompt."""
        from ragcache.pipeline import ChatTemplate

        template = ChatTemplate(self.model)
        return template.count(template.render_chat(messages, tools))

    def logprobs(self, chosen: Sequence[SampledToken]) -> dict[str, Any]:
        """Return log-probabilities in OpenAI's form, as LangChain's other chat models do."""
        from ragcache.engine import LogprobFormat

        return LogprobFormat(self.model.tokenizer).chat(chosen)


@dataclass(frozen=True, slots=True)
class CallOptions:
    """All options of a call, without its messages."""

    generation: GenerationParams
    """Options of generation."""
    mode: ReuseMode
    """How states of modules are reused."""
    recognize: bool
    """Whether texts of ingested modules are recognized in the prompt."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Tools that the model may call."""
    style: ToolStyle | None = None
    """Notation of tool calls in the answer, if the model has one and there are tools."""
    offered: tuple[str, ...] = ()
    """Names of the tools that a call without markers may name."""
    logprobs: bool = False
    """Whether log-probabilities are reported."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """Variables of the chat template."""
    search: Mapping[str, Any] = field(default_factory=dict)
    """The given options of the search for documents. Empty if nothing is searched."""

    @property
    def chat_arguments(self) -> dict[str, Any]:
        """The keyword arguments of `RagCache.chat`."""
        names = ("mode", "recognize", "tools", "generation", "chat_template_kwargs")
        return {name: getattr(self, name) for name in names} | {**self.search}

    @classmethod
    def resolve(
        cls,
        defaults: Mapping[str, Any],
        stop: Sequence[str] | None,
        given: Mapping[str, Any],
        info: ModelInfo,
    ) -> CallOptions:
        """Combine the options of a call with the chat model's own.

        Args:
            defaults: Options of the chat model.
            stop: Stop strings of the call.
            given: Options of the call. They replace defaults.
            info: The model.

        Raises:
            InvalidRequest: An option is unknown or invalid.
            UnsupportedModel: A call is required, and the model's chat template takes no tools.
        """
        from ragcache import GenerationParams
        from ragcache.structured import Grammar, tool_names

        options = _renamed(defaults) | _renamed(given)
        if stop is not None:
            options["stop"] = stop
        wanted = options.pop("model", None)
        if wanted is not None and str(wanted) != info.name:
            raise InvalidRequest(
                f"the model {wanted!r:.80} is not open here; {info.name!r} is. Make another "
                "ChatRagCache with its own state folder"
            )
        mode = options.pop("mode", None)
        if mode is not None:
            mode = ReuseMode.parse(mode)
        recognize = options.pop("recognize", True)
        variables = options.pop("chat_template_kwargs", None)
        search = {name: options.pop(name) for name in SEARCH if name in options}
        logprobs = _logprobs(options)
        form = Grammar.response_format(options.pop("response_format", None))
        tools, style, grammar = _tools(options, info, form)
        offered = () if form is not None else tool_names(tools or ())
        if style is not None and style.special:
            options["skip_special_tokens"] = False
        if grammar := grammar or form:
            options["grammar"] = grammar
        generation = GenerationParams(**options)
        if style is None:
            tools = None  # the model answers in text
        return cls(generation, mode, recognize, tools, style, offered, logprobs, variables, search)


def _renamed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by the engine's names, without None values."""
    given = {k: v for k, v in options.items() if v is not None and k not in _IGNORED}
    return {_NAMES.get(name, name): value for name, value in given.items()}


def _logprobs(options: dict[str, Any]) -> bool:
    """Replace OpenAI's `logprobs` and `top_logprobs` by the engine's one number."""
    wanted, most = options.pop("logprobs", None), options.pop("top_logprobs", None)
    if wanted is None and most is not None:
        wanted = True
    if wanted is None or wanted is False:
        return False
    options["logprobs"] = (most or 0) if wanted is True else wanted
    return True


def _tools(
    options: dict[str, Any], info: ModelInfo, form: Grammar | None
) -> tuple[list[dict[str, Any]] | None, ToolStyle | None, Grammar | None]:
    from ragcache.structured import resolve_tool_choice

    tools, strict = options.pop("tools", None), bool(options.pop("strict", False))
    wanted, parallel = options.pop("tool_choice", None), options.pop("parallel_tool_calls", True)
    choice = resolve_tool_choice(wanted, tools or ())
    if choice == "none":
        return None, None, None
    grammar = call_grammar(tools, choice, info.style, parallel, strict, form)
    return list(tools), info.style, grammar
