"""Grammars of tool calls, and the style of a chat template."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ragcache.errors import InvalidRequest
from ragcache.models import LoadedModel
from ragcache.params import GenerationParams
from ragcache.pipeline.submit import request_maker
from ragcache.structured import (
    Grammar,
    ToolCall,
    ToolStyle,
    parse_tool_calls,
    resolve_tool_choice,
    tool_call_grammar,
    tool_style,
)
from tests.ragcache.engine.stepped_engine import config_of, core_of, plain_context
from tests.ragcache.structured.byte_level_model import allows, tiny

ADD = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/small"}, "note": {"enum": ["x", "</tool_call>"]}},
    "required": ["a"],
    "$defs": {"small": {"type": "integer", "minimum": 0, "maximum": 9}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD}},
    {"name": "now"},
]
CALL = {
    ToolStyle.HERMES: '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    ToolStyle.LLAMA: '{"name": "add", "parameters": {"a": 1}}',
    ToolStyle.MISTRAL: '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]',
}
TWO = {
    ToolStyle.HERMES: CALL[ToolStyle.HERMES]
    + '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ToolStyle.LLAMA: CALL[ToolStyle.LLAMA] + '; {"name": "now", "parameters": {}}',
    ToolStyle.MISTRAL: CALL[ToolStyle.MISTRAL][:-1] + ', {"name": "now", "arguments": {}}]',
}
styles = pytest.mark.parametrize("style", list(ToolStyle))


@styles
def test_required_allows_only_calls(style: ToolStyle) -> None:
    grammar = tool_call_grammar(TOOLS, "required", style=style)
    assert allows(grammar, CALL[style])
    assert allows(grammar, TWO[style])
    assert not allows(grammar, "Hello.")
    assert not allows(grammar, "Hello. " + CALL[style])
    assert not allows(grammar, CALL[style].replace("add", "subtract"))
    assert not allows(grammar, CALL[style].replace("1", "11"))
    assert not allows(tool_call_grammar(TOOLS, "required", style=style, parallel=False), TWO[style])


@styles
def test_auto_with_a_form_allows_calls_or_the_form(style: ToolStyle) -> None:
    form = Grammar.json_schema({"type": "object", "properties": {"boat": {"type": "string"}}})
    either = tool_call_grammar(TOOLS, style=style, form=form)
    assert allows(either, CALL[style])
    assert allows(either, TWO[style])
    assert allows(either, '{"boat": "Pipit"}')
    assert not allows(either, "Hello.")
    assert not allows(either, '{"boat": 3}')
    calls = tool_call_grammar(TOOLS, "required", style=style, form=form)
    assert calls == tool_call_grammar(TOOLS, "required", style=style)
    with pytest.raises(InvalidRequest, match="not to a regex"):
        tool_call_grammar(TOOLS, style=style, form=Grammar.regex("a+"))


@styles
def test_named_tool_allows_one_call_of_it(style: ToolStyle) -> None:
    assert allows(tool_call_grammar(TOOLS, "add", style=style), CALL[style])
    assert not allows(tool_call_grammar(TOOLS, "add", style=style), TWO[style])
    assert not allows(tool_call_grammar(TOOLS, "now", style=style), CALL[style])


@styles
def test_auto_allows_text_and_calls(style: ToolStyle) -> None:
    grammar = tool_call_grammar(TOOLS, style=style)
    for text in ("Hello {you} <b>.", CALL[style], TWO[style]):
        assert allows(grammar, text)
    assert allows(grammar, "Hello. " + CALL[style]) is (style is not ToolStyle.LLAMA)
    assert not allows(grammar, CALL[style].replace("add", "subtract"))
    assert not allows(tool_call_grammar(TOOLS, style=style, parallel=False), TWO[style])


@styles
@pytest.mark.parametrize("choice", ["required", pytest.param("add", marks=pytest.mark.slow)])
def test_random_model_under_the_grammar_calls_tools(style: ToolStyle, choice: str) -> None:
    grammar = tool_call_grammar(TOOLS, choice, style=style, parallel=False)
    generation = GenerationParams(
        temperature=1.0, seed=5, n=3, grammar=grammar, skip_special_tokens=False
    )
    request = request_maker(generation, tiny(), 150, "local")(plain_context([1, 2, 3]))
    [completion] = core_of(tiny().causal, config_of(tiny().causal, 256)).run(request)
    for choice_ in completion.choices:
        text, [call] = parse_tool_calls(choice_.text, style)
        assert text == ""
        assert isinstance(call, ToolCall)
        assert call.name in (("add", "now") if choice == "required" else ("add",))
        if call.name == "add":
            assert 0 <= call.arguments["a"] <= 9


@pytest.mark.parametrize(
    ("tools", "choice", "reason"),
    [
        ([], "auto", "no tools"),
        ([{"type": "function"}], "auto", "tool 1 has no name"),
        (["add"], "auto", "tool 1 has no name"),
        ([{"name": "a"}, {"name": "a"}], "auto", "two tools are named 'a'"),
        ([{"name": "a"}], "b", "tool_choice is 'b'; it must be auto, required or one of a"),
        ([{"name": "a", "parameters": {"not": {}}}], "auto", "the parameters of tool 'a': .*not"),
        ([{"name": "a", "parameters": [1]}], "auto", "the parameters of tool 'a'"),
    ],
)
def test_invalid_tools_are_refused(tools: Any, choice: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        tool_call_grammar(tools, choice)


@pytest.mark.parametrize(
    ("wanted", "choice"),
    [
        (None, "auto"), (False, "auto"), ("auto", "auto"), ("none", "none"), (True, "required"),
        ("any", "required"), ("required", "required"), ("add", "add"),
        ({"type": "function", "function": {"name": "add"}}, "add"), ({"name": "now"}, "now"),
    ],
)  # fmt: skip
def test_resolve_tool_choice(wanted: Any, choice: str) -> None:
    assert resolve_tool_choice(wanted, TOOLS) == choice


@pytest.mark.parametrize("wanted", ["lose", {"name": "any"}, {"name": 1}, 2, ["add"]])
def test_invalid_tool_choice_is_refused(wanted: Any) -> None:
    with pytest.raises(InvalidRequest, match="tool_choice"):
        resolve_tool_choice(wanted, TOOLS)


def test_tool_choice_without_tools() -> None:
    assert {resolve_tool_choice(each, []) for each in (None, False, "auto", "none")} == {"none"}
    for wanted in ("required", "any", True, "add", {"name": "add"}):
        with pytest.raises(InvalidRequest, match="there are no tools"):
            resolve_tool_choice(wanted, [])


def test_unknown_style_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="styles: hermes, llama, mistral"):
        tool_call_grammar(TOOLS, style="smoke")
    with pytest.raises(InvalidRequest, match="'smoke' is no style"):
        parse_tool_calls("", "smoke")


HERMES = '{% if tools %}<tools>{{ tools | tojson }}</tools> <tool_call>{"name": ...{% endif %}'
LLAMA = '{% if tools %}{"name": function name, "parameters": dictionary}{% endif %}'


@pytest.mark.parametrize(
    ("template", "style"),
    [
        (HERMES, ToolStyle.HERMES),
        (LLAMA, ToolStyle.LLAMA),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", ToolStyle.MISTRAL),
        (HERMES + "<function=name><parameter=a>", None),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", None),
        ("{% if tools %}Use them.{% endif %}", None),
        ({"default": "{{ messages }}", "tool_use": HERMES}, ToolStyle.HERMES),
        ({"default": "{{ messages }}"}, None),
        (None, None),
    ],
)
def test_tool_style_of_templates(template: Any, style: ToolStyle | None) -> None:
    assert tool_style(SimpleNamespace(chat_template=template)) is style


def test_embedded_reader_has_no_tool_style(reader: LoadedModel) -> None:
    assert tool_style(reader.tokenizer) is None
    assert [style.special for style in ToolStyle] == [False, True, True]
