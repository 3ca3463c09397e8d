"""Tools as LangChain binds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from langchain_core.utils.function_calling import convert_to_openai_tool

from ragcache.errors import InvalidRequest, UnsupportedModel

if TYPE_CHECKING:
    from ragcache.structured import Grammar, ToolStyle

Tool = Mapping[str, Any]


def described(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Functions, classes, tools and schemas as JSON descriptions of functions. Raises
    `InvalidRequest`."""
    try:
        return [convert_to_openai_tool(tool) for tool in tools]
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"a tool cannot be described: {error}") from error


def call_grammar(
    tools: Sequence[Tool], choice: str, style: ToolStyle | None, parallel: bool,
    strict: bool = False, form: Grammar | None = None,
) -> Grammar | None:  # fmt: skip
    """What holds the answer's calls to the tools; form: what the answer is where it calls none.

    None where the model may choose and the extra `structured` is missing, or the arguments of a
    tool are beyond what decoding can hold to: then it calls as it was trained to, unless `strict`
    or a form asks for more. Raises `InvalidRequest`, or `UnsupportedModel` for a template without
    tools.
    """
    from ragcache.structured import tool_call_grammar

    if style is None:
        raise UnsupportedModel(
            "this model's chat template takes no tools whose calls can be read; ask without "
            "`bind_tools`, or use a model that was trained with them (Qwen, Llama 3, Mistral)"
        )
    if choice != "auto" or strict or form is not None:
        return tool_call_grammar(tools, choice, style=style, parallel=parallel, form=form)
    if find_spec("xgrammar") is None:
        return None
    try:
        return tool_call_grammar(tools, style=style, parallel=parallel)
    except InvalidRequest:
        return None
