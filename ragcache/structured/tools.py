"""Tools of chat models: styles of templates, `tool_choice`, and grammars of tool calls."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any

from ragcache.errors import InvalidRequest
from ragcache.structured.grammar import Grammar, lark_json


class ToolStyle(StrEnum):
    """The notation in which a model writes tool calls."""

    HERMES = "hermes"
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen)."""
    LLAMA = "llama"
    """The whole answer is `{"name": ..., "parameters": {...}}` (Llama 3.x)."""
    MISTRAL = "mistral"
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name[ARGS]{...}`."""

    @property
    def special(self) -> bool:
        """Whether its markers may be control tokens.

        Answers then need `GenerationParams(skip_special_tokens=False)`.
        """
        return self is not ToolStyle.HERMES


def tool_style(tokenizer: Any) -> ToolStyle | None:
    """Return the style of a tokenizer's chat template.

    A template that takes no tools, or writes calls in an unknown notation, has none.
    """
    templates = getattr(tokenizer, "chat_template", None)
    if isinstance(templates, Mapping):
        templates = templates.get("tool_use", templates.get("default"))
    if not isinstance(templates, str) or "tools" not in templates:
        return None
    if "[TOOL_CALLS]" in templates:
        return ToolStyle.MISTRAL
    if "<tool_call>" in templates:
        # Qwen3-Coder and others put XML between the same markers
        return None if "<function=" in templates or "<arg_key>" in templates else ToolStyle.HERMES
    if '"parameters"' in templates and ("<|python_tag|>" in templates or '{"name"' in templates):
        return ToolStyle.LLAMA
    return None


def resolve_tool_choice(wanted: object, tools: Sequence[Mapping[str, Any]]) -> str:
    """Normalize a `tool_choice` to `auto`, `none`, `required` or the name of a tool.

    Args:
        wanted: One of these words, `any`, a boolean, None, the name of a tool, or `{"type":
            "function", "function": {"name": ...}}`.
        tools: The tools. Without any, the result is `none`.

    Raises:
        InvalidRequest: The choice is unknown, or asks for a call without tools.
    """
    words: dict[object, str] = {None: "auto", False: "auto", True: "required", "any": "required"}
    words |= {word: word for word in ("auto", "none", "required")}
    if isinstance(wanted, Mapping):
        function = wanted.get("function", wanted)
        wanted = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(wanted, str):
            raise InvalidRequest("tool_choice names no function")
        words = {}  # a tool may have the name of a keyword
    if wanted is not None and not isinstance(wanted, str | bool):
        raise InvalidRequest(f"tool_choice is {wanted!r:.80}; give auto, any, none or a name")
    choice = words.get(wanted)
    if not tools:
        if choice in ("auto", "none"):
            return "none"
        raise InvalidRequest(f"tool_choice is {wanted!r:.80}, and there are no tools")
    return choice or _named(str(wanted), [_name_of(tool) for tool in tools])


def _named(name: str, names: Collection[object]) -> str:
    if name not in names:
        known = ", ".join(map(str, names))
        raise InvalidRequest(
            f"tool_choice is {name!r:.80}; it must be auto, required or one of {known}"
        )
    return name


def tool_names(tools: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the names of tools, as `ToolCallParser` takes them."""
    return tuple(name for name in map(_name_of, tools) if isinstance(name, str))


def _name_of(tool: object) -> object:
    """Return the name of a tool's function, if it has one."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    return function.get("name") if isinstance(function, Mapping) else None


def tool_call_grammar(
    tools: Sequence[Mapping[str, Any]],
    choice: str = "auto",
    *,
    style: ToolStyle | str = ToolStyle.HERMES,
    parallel: bool = True,
    form: Grammar | None = None,
) -> Grammar:
    """Make a grammar in which every call names a tool and its arguments fit the tool's schema.

    Args:
        tools: `{"type": "function", "function": {"name", "parameters", ...}}`, or the inner
            function.
        choice: "auto" allows text, calls, or both (llama: one of them), "required" only calls, the
            name of a tool one call of it.
        style: Notation of the calls.
        parallel: Whether several calls are allowed.
        form: Grammar of a JSON schema. With "auto", the answer is then calls or such JSON.

    Raises:
        InvalidRequest: A tool, the choice or the style cannot be used.
    """
    style, functions = known_style(style), _functions(tools)
    if choice not in ("auto", "required"):
        functions, parallel = {choice: functions[_named(choice, functions)]}, False
    marker, rules = _calls(
        style, functions, parallel=parallel, in_json=choice == "auto" and form is not None
    )
    if choice != "auto":
        start = "calls"
    elif form is not None:
        start = f"calls | {_form(form)}"
    elif style is ToolStyle.LLAMA:
        start, rules = "calls | OTHER", [*rules, f"OTHER: {_ANY} & ~{_NAMED}"]
    else:
        many = style is ToolStyle.HERMES and parallel
        start = "(before tail)* TEXT" if many else "TEXT | before tail"
        # a lazy rule ends at the first marker: a call has to follow
        rules += [f"TEXT: {_ANY}", f"before[lazy]: TEXT {_quoted(marker)}"]
    return Grammar.lark("\n".join([f"start: {start}", *rules]))


_ANY, _NAMED = r"/(.|\n)*/", r'/(.|\n)*\{"name"(.|\n)*/'


def _calls(
    style: ToolStyle, functions: Mapping[str, Any], *, parallel: bool, in_json: bool
) -> tuple[str, list[str]]:
    """Return the marker of calls, and the rules `calls` and `tail` (the text after it).

    `in_json` says whether the answer may also be other JSON.
    """
    marker, ending, key, separator = _NOTATION[style]
    once = style is ToolStyle.HERMES  # otherwise one marker precedes all calls
    first = _quoted(marker) if marker else ""
    more = f"({_quoted(separator)} {first if once else ''} call)*" if parallel else ""
    if style is ToolStyle.MISTRAL:
        rules = [f"calls: {first} tail", f'tail: "[" call {more} "]"']
    else:
        rules = [f"calls: {first} call {more}", "tail: call"]
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(functions))))
    for number, (name, schema) in enumerate(functions.items()):
        head = ["{", '"name"', ": ", _quoted(name), ", ", f'"{key}"', ": "]
        # in pieces next to a form's JSON, which may begin alike; whole next to text
        head = head if in_json else ["".join(head)]
        begin = " ".join(map(_quoted, ["\n", *head] if once else head))
        arguments = f"{begin} arguments_{number} {_quoted('}' + ending)}"
        rules += [f"call_{number}: {arguments}", f"arguments_{number}: {lark_json(schema)}"]
    return marker, rules


# The marker before calls, the text after each, the key of its arguments, and the separator.
_NOTATION = {
    ToolStyle.HERMES: ("<tool_call>", "\n</tool_call>", "arguments", "\n"),
    ToolStyle.LLAMA: ("", "", "parameters", "; "),
    ToolStyle.MISTRAL: ("[TOOL_CALLS]", "", "arguments", ", "),
}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _form(form: Grammar) -> str:
    if form.kind != "json_schema":
        raise InvalidRequest(f"beside calls an answer keeps to a JSON schema, not to a {form.kind}")
    return lark_json(json.loads(form.text))


def known_style(style: str) -> ToolStyle:
    """Return the style of this name. Raises `InvalidRequest`."""
    try:
        return ToolStyle(style)
    except ValueError:
        known = ", ".join(ToolStyle)
        raise InvalidRequest(f"{style!r:.80} is no style of tool calls; styles: {known}") from None


def _functions(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the schema of every tool's arguments by the tool's name."""
    functions: dict[str, Any] = {}
    for number, tool in enumerate(tools, start=1):
        name = _name_of(tool)
        if not isinstance(name, str) or not name:
            raise InvalidRequest(f"tool {number} has no name")
        if name in functions:
            raise InvalidRequest(f"two tools are named {name!r}")
        schema = tool.get("function", tool).get("parameters")
        schema = schema or {"type": "object", "properties": {}}
        try:
            Grammar.json_schema(schema)
        except InvalidRequest as error:
            raise InvalidRequest(f"the parameters of tool {name!r}: {error}") from error
        functions[name] = schema
    if not functions:
        raise InvalidRequest("there are no tools to call")
    return functions
