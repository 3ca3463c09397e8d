"""PML, the Prompt Markup Language of Prompt Cache (§3.2 to §3.4).

Parses, writes, lays out and resolves PML. Uses no tensors, database or files: the caller passes
text and a function that counts tokens.
"""

from ragcache_schemas.builder import collection_schema, document_module, expand_slots
from ragcache_schemas.chat_template import Render, render_prompt_turns, render_schema_turns
from ragcache_schemas.errors import (
    DuplicateName,
    ForbiddenMarkup,
    InvalidAttribute,
    InvalidName,
    LimitExceeded,
    MisplacedText,
    MissingArgument,
    PMLError,
    PMLSyntaxError,
    PMLWarning,
    ProgramError,
    ReservedName,
    SpanTooLong,
    TurnMismatch,
    UnionConflict,
    UnknownElement,
    UnknownName,
)
from ragcache_schemas.layout import CountTokens, Layout, Placement, PositionSpan, lay_out
from ragcache_schemas.lint import Finding, is_prompt, lint_prompt, lint_schema
from ragcache_schemas.parser import parse_prompt, parse_schema
from ragcache_schemas.program import Content, PromptProgram, prompt_program
from ragcache_schemas.program_steps import MaxTokens, turn
from ragcache_schemas.resolve import ModuleLookup, Piece, Plan, SchemaIndex, Scope, resolve_prompt
from ragcache_schemas.scanner import ScanLimits
from ragcache_schemas.text import is_name, module_name, module_names, sanitize_text
from ragcache_schemas.tree import (
    Arguments,
    Chat,
    Import,
    Location,
    Module,
    Parameter,
    Path,
    Prompt,
    Role,
    Scaffold,
    Schema,
    Slot,
    Text,
    Union,
)
from ragcache_schemas.writer import write_prompt, write_schema

__all__ = [
    "Arguments",
    "Chat",
    "Content",
    "CountTokens",
    "DuplicateName",
    "Finding",
    "ForbiddenMarkup",
    "Import",
    "InvalidAttribute",
    "InvalidName",
    "Layout",
    "LimitExceeded",
    "Location",
    "MaxTokens",
    "MisplacedText",
    "MissingArgument",
    "Module",
    "ModuleLookup",
    "PMLError",
    "PMLSyntaxError",
    "PMLWarning",
    "Parameter",
    "Path",
    "Piece",
    "Placement",
    "Plan",
    "PositionSpan",
    "ProgramError",
    "Prompt",
    "PromptProgram",
    "Render",
    "ReservedName",
    "Role",
    "Scaffold",
    "ScanLimits",
    "Schema",
    "SchemaIndex",
    "Scope",
    "Slot",
    "SpanTooLong",
    "Text",
    "TurnMismatch",
    "Union",
    "UnionConflict",
    "UnknownElement",
    "UnknownName",
    "collection_schema",
    "document_module",
    "expand_slots",
    "is_name",
    "is_prompt",
    "lay_out",
    "lint_prompt",
    "lint_schema",
    "module_name",
    "module_names",
    "parse_prompt",
    "parse_schema",
    "prompt_program",
    "render_prompt_turns",
    "render_schema_turns",
    "resolve_prompt",
    "sanitize_text",
    "turn",
    "write_prompt",
    "write_schema",
]
