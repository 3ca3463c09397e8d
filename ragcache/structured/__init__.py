"""Structured output: grammars that constrain decoding, and the tool calls of chat models."""

from ragcache.structured.grammar import Grammar, compile_constraint
from ragcache.structured.tool_calls import (
    InvalidToolCall,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    ToolCallParser,
    parse_tool_calls,
)
from ragcache.structured.tools import (
    ToolStyle,
    resolve_tool_choice,
    tool_call_grammar,
    tool_names,
    tool_style,
)

__all__ = [
    "Grammar",
    "InvalidToolCall",
    "TextDelta",
    "ToolCall",
    "ToolCallDelta",
    "ToolCallParser",
    "ToolStyle",
    "compile_constraint",
    "parse_tool_calls",
    "resolve_tool_choice",
    "tool_call_grammar",
    "tool_names",
    "tool_style",
]
