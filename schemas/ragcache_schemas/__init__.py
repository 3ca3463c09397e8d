"""PML, the Prompt Markup Language of Prompt Cache (§3.2 to §3.4): parse, write, lay out, resolve.

No tensors, no database, no files: text comes from the caller, and tokens are counted by a function
that the caller passes in.
"""

from .builder import collection_schema, document_module, expand
from .characters import carried_text
from .code import code_schema
from .compiler import Content, MaxTokens, PromptProgram, prompt_program, turn
from .errors import (
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
from .index import Catalogue, SchemaIndex, Scope
from .layout import CountTokens, Layout, Placement, Span, lay_out
from .lint import Finding, is_prompt, lint_prompt, lint_schema
from .names import is_name, module_name, module_names
from .parser import parse_prompt, parse_schema
from .plan import Piece, Plan
from .resolve import resolve_prompt
from .scanner import Limits
from .spelling import Render, spell_prompt, spell_schema
from .traits import TraitTable
from .tree import (
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
from .writer import write_prompt, write_schema

__all__ = [
    "Arguments",
    "Catalogue",
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
    "Limits",
    "Location",
    "MaxTokens",
    "MisplacedText",
    "MissingArgument",
    "Module",
    "PMLError",
    "PMLSyntaxError",
    "PMLWarning",
    "Parameter",
    "Path",
    "Piece",
    "Placement",
    "Plan",
    "ProgramError",
    "Prompt",
    "PromptProgram",
    "Render",
    "ReservedName",
    "Role",
    "Scaffold",
    "Schema",
    "SchemaIndex",
    "Scope",
    "Slot",
    "Span",
    "SpanTooLong",
    "Text",
    "TraitTable",
    "TurnMismatch",
    "Union",
    "UnionConflict",
    "UnknownElement",
    "UnknownName",
    "carried_text",
    "code_schema",
    "collection_schema",
    "document_module",
    "expand",
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
    "resolve_prompt",
    "spell_prompt",
    "spell_schema",
    "turn",
    "write_prompt",
    "write_schema",
]
