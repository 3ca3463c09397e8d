"""Parses PML (Prompt Cache, §3.2): schemas and prompts, from text to tree.

The work is split so that every problem has an exact place and nothing unsafe is built:
`scanner` finds the tags and applies the limits, `turns` balances chat tags, lxml parses with
entities, DTD and network off, the readers build the tree, and `checks` looks at its names.
"""

from __future__ import annotations

import warnings

from .checks import prompt_problems, schema_problems
from .document import Report, Warn, load
from .errors import PMLError, PMLWarning
from .prompt_reader import PromptReader
from .scanner import Limits
from .schema_reader import SchemaReader
from .tree import Prompt, Schema

__all__ = ["parse_prompt", "parse_schema", "read_prompt", "read_schema"]


def parse_schema(
    text: str | bytes, *, source: str = "<string>", limits: Limits | None = None
) -> Schema:
    """The schema in `text`. Raises the first PMLError; warns (PMLWarning) of unbalanced turns."""
    return read_schema(text, source, limits or Limits(), _raise, _warn)


def parse_prompt(
    text: str | bytes, *, source: str = "<string>", limits: Limits | None = None
) -> Prompt:
    """The prompt in `text`. Raises the first PMLError; warns (PMLWarning) of unbalanced turns."""
    return read_prompt(text, source, limits or Limits(), _raise, _warn)


def read_schema(
    text: str | bytes, source: str, limits: Limits, report: Report, warn: Warn
) -> Schema:
    """As `parse_schema`, with each problem given to `report`, which may return."""
    schema = SchemaReader(load(text, source, limits, warn), report, warn).schema()
    for problem in schema_problems(schema):
        report(problem)
    return schema


def read_prompt(
    text: str | bytes, source: str, limits: Limits, report: Report, warn: Warn
) -> Prompt:
    """As `parse_prompt`, with each problem given to `report`, which may return."""
    prompt = PromptReader(load(text, source, limits, warn), report, warn).prompt()
    for problem in prompt_problems(prompt):
        report(problem)
    return prompt


def _raise(problem: PMLError) -> None:
    raise problem


def _warn(warning: PMLWarning) -> None:
    warnings.warn(warning, stacklevel=5)
