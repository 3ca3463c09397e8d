"""Text and tool calls separated in every style, however the text is cut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache.structured import (
    InvalidToolCall,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    ToolCallParser,
    ToolStyle,
    parse_tool_calls,
)

MARKERS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]")
# Pieces of which awkward texts are made.
PIECES = (
    *MARKERS,
    *("<tool", "_call>", "[TOOL", "<|py", "</tool_call", "{", "}", "[", "]", ",", ";", ":", '"'),
    *("\\", " ", "\n", "a", "é☕", "3", '"name"', '"arguments"', '"parameters"', '"f"', "NaN"),
    '{"name": "f", "arguments": {"a": "}"}}',
    '{"name": "f", "parameters": {}}',
    '{"arguments": {"a": [1, {}]}, "name": "g"}',
    '{"name": "f", "arguments": "{}"}',
    '{"name": "f", "arguments": 3}',
)
awkward = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(MARKERS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
calls = st.builds(
    ToolCall, st.text(min_size=1, max_size=8), st.dictionaries(st.text(max_size=6), values)
)
styles = st.sampled_from(ToolStyle)


def written(style: ToolStyle, made: Sequence[ToolCall]) -> str:
    key = "parameters" if style is ToolStyle.LLAMA else "arguments"
    objects = [json.dumps({"name": call.name, key: call.arguments}) for call in made]
    if style is ToolStyle.HERMES:
        return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
    return "; ".join(objects) if style is ToolStyle.LLAMA else f"[TOOL_CALLS][{', '.join(objects)}]"


def cut(text: str, places: Sequence[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[begin:end] for begin, end in pairwise(edges)]


def streamed(
    style: ToolStyle, pieces: Sequence[str], tools: Sequence[str] = ()
) -> tuple[str, dict[int, str], ToolCallParser]:
    """The text, the arguments of each call as its deltas told them, and the stream at its end."""
    stream = ToolCallParser(style, tools)
    deltas = [delta for piece in pieces for delta in stream.feed(piece)] + stream.finish()
    arguments: dict[int, str] = {}
    for delta in deltas:
        if isinstance(delta, ToolCallDelta):
            assert (delta.name is not None) is (delta.index not in arguments)
            arguments[delta.index] = arguments.get(delta.index, "") + delta.arguments
    return "".join(d.text for d in deltas if isinstance(d, TextDelta)), arguments, stream


@given(styles, st.lists(calls, min_size=1, max_size=3), st.lists(st.integers(0), max_size=6))
def test_written_calls_are_parsed_back(
    style: ToolStyle, made: list[ToolCall], places: list[int]
) -> None:
    before = "" if style is ToolStyle.LLAMA else "Let me see. "
    text, arguments, stream = streamed(style, cut(before + written(style, made), places))
    assert (text, stream.calls) == (before, made)
    assert [json.loads(arguments[n]) for n in range(len(made))] == [c.arguments for c in made]


@given(styles, awkward, st.lists(st.integers(0), max_size=8))
def test_result_does_not_depend_on_chunking(style: ToolStyle, text: str, places: list[int]) -> None:
    said, arguments, stream = streamed(style, cut(text, places))
    assert (said, stream.calls) == parse_tool_calls(text, style)
    for index, call in enumerate(stream.calls):
        if isinstance(call, ToolCall) and isinstance(json.loads(arguments[index]), dict):
            assert json.loads(arguments[index]) == call.arguments


@given(styles, awkward, st.sampled_from([(), ("f", "g")]))
def test_one_character_at_a_time(style: ToolStyle, text: str, tools: tuple[str, ...]) -> None:
    said, _, stream = streamed(style, list(text), tools)
    assert (said, stream.calls) == parse_tool_calls(text, style, tools)


@given(styles, st.text(st.sampled_from("ab <|[]{}\n_tool"), max_size=30))
def test_text_without_calls_is_unchanged(style: ToolStyle, text: str) -> None:
    assert parse_tool_calls(text, style) == (text, [])


@given(awkward)
def test_every_opened_call_is_reported(text: str) -> None:
    _, found = parse_tool_calls("<tool_call>" + text.replace("<tool_call>", ""), "hermes")
    assert found


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("hermes", 'Wait.<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>'),
        ("mistral", 'Wait.[TOOL_CALLS][{"name": "f", "arguments": {"a": "[TOOL_CALLS]"}}]'),
        ("mistral", 'Wait.[TOOL_CALLS]f[CALL_ID]x9[ARGS]{"a": "[TOOL_CALLS]"}'),
        ("llama", '<|python_tag|>{"name": "f", "parameters": {"a": "<|python_tag|>"}}'),
    ],
)
def test_no_part_of_a_marker_is_emitted(style: str, text: str) -> None:
    stream, told = ToolCallParser(style), ""
    for character in text:
        for delta in stream.feed(character):
            told += delta.text if isinstance(delta, TextDelta) else ""
            assert told in "Wait."
    assert stream.finish() == []
    [call] = stream.calls
    assert isinstance(call, ToolCall)
    assert call.name == "f"


def test_arguments_are_streamed() -> None:
    stream = ToolCallParser("hermes")
    assert stream.feed('<tool_call>{"name": "f", "arg') == [ToolCallDelta(0, "f", "")]
    assert stream.feed('uments": {"a"') == [ToolCallDelta(0, None, '{"a"')]
    assert stream.feed(": 1}") == [ToolCallDelta(0, None, ": 1}")]
    assert stream.calls == []
    assert stream.feed("}</tool_call>") == []
    assert stream.calls == [ToolCall("f", {"a": 1})]
    assert stream.feed("\n Done.") == [TextDelta("Done.")]
    assert stream.finish() == []


H, M = "<tool_call>", "[TOOL_CALLS]"
BROKEN = [
    ("hermes", H, None, "", "a JSON object"),
    ("hermes", H + "f(1)</tool_call>", None, "f(1)", "a JSON object"),
    ("hermes", H + '{"name": "f", "argu', "f", '{"name": "f", "argu', "does not end"),
    ("hermes", H + '{"name": "f"} x</tool_call>', "f", '{"name": "f"} x', "follows"),
    ("hermes", H + '{"name": 3, "arguments": {}}', None, None, "no name"),
    ("hermes", H + '{"name": "f", "arguments": [1]}', "f", None, "no JSON object"),
    ("hermes", H + '{"name": "f", "arguments": {"a": NaN}}', "f", None, "NaN"),
    ("hermes", H + '{"name": "f", "arguments": {a: 1}}', "f", None, "double quotes"),
    ("hermes", H + '{"name": "f", "arguments": {}, "parameters": {}}', "f", None, "one object"),
    ("llama", '{"name": "f", "parameters": {"a"', "f", None, "does not end"),
    ("mistral", M, None, "", "a JSON object"),
    ("mistral", M + "f", None, "f", "a JSON object"),
    ("mistral", M + '[{"name": "f", "arguments": {"a": 1', "f", None, "does not end"),
    ("mistral", M + "f{a}", "f", "f{a}", "double quotes"),
    ("mistral", M + "{}", None, "{}", "no name"),
]


@pytest.mark.parametrize(("style", "text", "name", "raw", "error"), BROKEN)
def test_malformed_call_is_reported(
    style: str, text: str, name: str | None, raw: str | None, error: str
) -> None:
    said, [call] = parse_tool_calls(text, style)
    assert said == ""
    assert isinstance(call, InvalidToolCall)
    assert call.name == name
    assert error in call.error
    assert raw is None or call.text == raw
    assert call.text in text


def test_broken_call_leaves_others_intact() -> None:
    fine = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    unclosed = '<tool_call>{"name": "g", "arguments": {"a": "1}}</tool_call>'
    unmarked = '<tool_call>{"name": "h", "arguments": {}}\n'
    text, found = parse_tool_calls(f"One. {fine}{unclosed}\n{unmarked}{fine} Two.", "hermes")
    assert text == "One. Two."
    assert [type(each).__name__ + str(each.name) for each in found] == [
        *("ToolCallf", "InvalidToolCallg", "ToolCallh", "ToolCallf")
    ]


BARE = '{"name": "f", "arguments": {"a": 1}}'
SWAPPED = '{"parameters": {"b": "}```"}, "name": "g"}'
OFFERED = ("f", "g")
F, G = ToolCall("f", {"a": 1}), ToolCall("g", {"b": "}```"})
UNTAGGED = [
    (BARE, [F]),
    (f" \n{BARE}\n ", [F]),
    (SWAPPED, [G]),
    (f"```json\n{BARE}\n```\n", [F]),
    (f"```\n{SWAPPED}```", [G]),
    (f"[{BARE}, {SWAPPED}]", [F, G]),
    (f"```json\n[\n{BARE}\n]\n```", [F]),
    ('{"id": "1", "type": "function", "name": "f", "arguments": "{\\"a\\": 1}"}', [F]),
]
NO_CALL = [
    '{"name": "other", "arguments": {}}',
    '{"name": "f"}',
    '{"name": "f", "arguments": [1]}',
    '{"name": "f", "arguments": {}, "more": 1}',
    '{"name": "f", "arguments": {}',
    f"{BARE} Done.",
    f"Sure: {BARE}",
    f"```python\n{BARE}\n```",
    f"```json\n{BARE}",
    f"```json\n{BARE}\n```\nDone.",
    f"[{BARE}, 3]",
    f"[{BARE}",
    "[]",
    "",
    "{",
    "``",
    "```json",
]


@pytest.mark.parametrize("style", [None, ToolStyle.HERMES, ToolStyle.MISTRAL])
@pytest.mark.parametrize(("text", "expected"), UNTAGGED)
def test_call_without_its_markers_is_a_call(
    style: ToolStyle | None, text: str, expected: list[ToolCall]
) -> None:
    assert parse_tool_calls(text, style, OFFERED) == ("", expected)
    stream = ToolCallParser(style, OFFERED)
    deltas = [delta for character in text for delta in stream.feed(character)] + stream.finish()
    assert all(isinstance(delta, ToolCallDelta) for delta in deltas)
    assert stream.calls == expected
    assert parse_tool_calls(text, style)[1] == [], "a tool that is not offered is no call"


@pytest.mark.parametrize("style", [None, ToolStyle.HERMES])
@pytest.mark.parametrize("text", NO_CALL)
def test_text_that_is_no_bare_call_stays_text(style: ToolStyle | None, text: str) -> None:
    assert parse_tool_calls(text, style, OFFERED) == (text, [])
    stream = ToolCallParser(style, OFFERED)
    deltas = [delta for character in text for delta in stream.feed(character)] + stream.finish()
    assert "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)) == text


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ('{"name": "other"', '{"name": "other'),
        ('{"title":', '{"title'),
        ("```py", "```"),
        ("[3", "["),
        ("Hello", ""),
        (f"{BARE} D", f"{BARE} "),
    ],
)
def test_text_is_held_only_while_it_can_be_a_call(text: str, held: str) -> None:
    stream = ToolCallParser(None, OFFERED)
    assert stream.feed(held) == []
    assert stream.feed(text.removeprefix(held)) == [TextDelta(text)]


def test_llama_streams_the_arguments_of_its_own_notation() -> None:
    stream = ToolCallParser("llama", OFFERED)
    assert stream.feed('{"name": "f", "parameters": {"a"') == [ToolCallDelta(0, "f", '{"a"')]
    assert parse_tool_calls(f"```json\n{BARE}\n```", "llama", OFFERED) == ("", [F])


def test_json_that_is_no_call_is_text() -> None:
    for text in ('{"answer": 3}', '{"name": "Ada", "age": 36}', ' <|python_tag|>print("x")', "{"):
        assert parse_tool_calls(text, "llama") == (text, [])


def test_calls_in_notations_of_real_templates() -> None:
    add = ToolCall("add", {"a": 1})
    assert parse_tool_calls('[TOOL_CALLS] add{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 1}', "mistral") == (
        "",
        [add, add],
    )
    typed = '{"type": "function", "name": "add", "parameters": {"a": 1}}'
    assert parse_tool_calls(f"\n{typed}\n{typed} Done.", "llama") == ("Done.", [add, add])
    assert parse_tool_calls('<tool_call>{"name": "now"}</tool_call>', "hermes") == (
        "",
        [ToolCall("now", {})],
    )
    quoted = json.dumps({"name": "add", "arguments": '{"a": 1}'})
    assert parse_tool_calls(f"<tool_call>{quoted}", "hermes") == ("", [add])
