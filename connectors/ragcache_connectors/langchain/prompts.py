"""Schemas from LangChain prompt templates.

Text becomes anonymous text, which every prompt shares; a variable becomes a parameter of a given
length; the messages of a chat become turns; examples of a few-shot template become modules.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.prompts import (
    AIMessagePromptTemplate,
    BasePromptTemplate,
    ChatPromptTemplate,
    FewShotPromptTemplate,
    HumanMessagePromptTemplate,
    PromptTemplate,
    SystemMessagePromptTemplate,
)

from ragcache.errors import ConfigurationError
from ragcache_schemas import (
    Chat,
    Import,
    Module,
    Parameter,
    Prompt,
    Role,
    Schema,
    SchemaIndex,
    Text,
    sanitize_text,
)

_MESSAGES: dict[type, Role] = {
    SystemMessagePromptTemplate: "system",
    HumanMessagePromptTemplate: "user",
    AIMessagePromptTemplate: "assistant",
}
_TYPES: dict[str, Role] = {"system": "system", "human": "user", "ai": "assistant"}


@dataclass(frozen=True, slots=True)
class _Placeholder:
    """A use of a variable: as the parameter `name` of the scope `path`, with a format."""

    path: tuple[str, ...]
    name: str
    variable: str
    form: str  # "{!r:>8}"


@dataclass(frozen=True, slots=True)
class TemplateSchema:
    """A template's schema, and prompts over it.

    Example:
        >>> from langchain_core.prompts import PromptTemplate
        >>> made = template_schema(PromptTemplate.from_template("Hello, {name}."), "hello", 8)
        >>> made.prompt(name="Ida").arguments
        (('name', 'Ida'),)
    """

    schema: Schema
    placeholders: tuple[_Placeholder, ...]
    defaults: Mapping[str, Any]

    def prompt(self, **values: Any) -> Prompt:
        """The prompt for these values, which the template's `format` takes too.

        Raises:
            ConfigurationError: for a value that is missing or unknown.
        """
        known = {use.variable for use in self.placeholders}
        current = {**self.defaults, **values}
        given = {name: value() if callable(value) else value for name, value in current.items()}
        if unknown := sorted(values.keys() - known):
            raise ConfigurationError(f"the template has no variable {unknown[0]!r} to give")
        if missing := sorted(known - given.keys()):
            raise ConfigurationError(f"the template's variable {missing[0]!r} needs a value")

        def arguments(path: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
            return tuple(
                (use.name, sanitize_text(use.form.format(given[use.variable])))
                for use in self.placeholders
                if use.path == path
            )

        modules = [node.name for node in self.schema.children if isinstance(node, Module)]
        imports = tuple(Import(name, arguments((name,))) for name in modules)
        return Prompt(self.schema.name, imports, arguments(()))


def template_schema(
    template: BasePromptTemplate[Any], name: str, lengths: Mapping[str, int] | int
) -> TemplateSchema:
    """The schema of a LangChain template in f-string format.

    Partial variables with a fixed value become text.

    Args:
        template: a prompt, few-shot or chat template.
        name: of the schema.
        lengths: the most tokens of each variable, or one number for all.

    Raises:
        ConfigurationError: for parts without fixed text (message placeholders, example selectors,
            images).
        PMLError: for an invalid name.
    """
    reader = _TemplateReader(lengths, template.partial_variables)
    schema = Schema(name, tuple(reader.nodes(template)))
    SchemaIndex.build(schema, len)  # its names are checked here
    defaults = {k: v for k, v in template.partial_variables.items() if not isinstance(v, str)}
    return TemplateSchema(schema, tuple(reader.placeholders), defaults)


class _TemplateReader:
    def __init__(self, lengths: Mapping[str, int] | int, partial: Mapping[str, Any]) -> None:
        self.lengths, self.partial = lengths, partial
        self.placeholders: list[_Placeholder] = []

    def nodes(self, template: BasePromptTemplate[Any]) -> Sequence[Any]:
        match template:
            case PromptTemplate():
                _check_format(template.template_format)
                return self.text(template.template)
            case FewShotPromptTemplate():
                return self.few_shot(template)
            case ChatPromptTemplate():
                return [self.message(message) for message in template.messages]
        kinds = "PromptTemplate, FewShotPromptTemplate or ChatPromptTemplate"
        raise ConfigurationError(f"a {type(template).__name__} has no fixed text; give a {kinds}")

    def few_shot(self, template: FewShotPromptTemplate) -> list[Any]:
        """Prefix, a module for each example, suffix: the text of the template's own `format`."""
        _check_format(template.template_format)
        if template.examples is None:
            raise ConfigurationError(
                "an example selector picks examples at run time; give `examples`, and import those "
                "that are wanted"
            )
        variables = template.example_prompt.input_variables
        examples = [
            template.example_prompt.format(**{key: example[key] for key in variables})
            for example in template.examples
        ]
        pieces = [template.prefix, *examples, template.suffix]
        last = max((number for number, piece in enumerate(pieces) if piece), default=0)
        nodes: list[Any] = []
        for number, piece in enumerate(pieces):
            text = piece + template.example_separator if piece and number < last else piece
            if number in (0, len(pieces) - 1):
                nodes += self.text(text)
            else:
                example = f"example-{number}"
                nodes.append(Module(example, tuple(self.text(text, (example,)))))
        return nodes

    def message(self, message: Any) -> Chat:
        """A message as a turn."""
        if isinstance(message, BaseMessage) and message.type in _TYPES:
            if isinstance(message.content, str):
                return Chat(_TYPES[message.type], (Text(sanitize_text(message.content)),))
        elif isinstance(getattr(message, "prompt", None), PromptTemplate) and (
            role := _MESSAGES.get(type(message))
        ):
            return Chat(role, tuple(self.nodes(message.prompt)))
        raise ConfigurationError(
            f"a {type(message).__name__} has no fixed text; leave it out of the template, and "
            "write its turns into the prompt"
        )

    def text(self, template: str, path: tuple[str, ...] = ()) -> list[Any]:
        """An f-string template as text and parameters."""
        nodes: list[Any] = []
        for literal, variable, spec, conversion in string.Formatter().parse(template):
            nodes.append(Text(sanitize_text(literal)))
            if variable is None:
                continue
            if not variable.isidentifier() or "{" in (spec or ""):
                shown = f"{{{variable}}}" if not spec else f"{{{variable}:{spec}}}"
                raise ConfigurationError(f"{shown} in the template: write a plain variable")
            form = f"{{{'!' + conversion if conversion else ''}{':' + spec if spec else ''}}}"
            fixed = self.partial.get(variable)
            if isinstance(fixed, str):
                nodes.append(Text(sanitize_text(form.format(fixed))))
            else:
                nodes.append(self.parameter(variable, form, path))
        return nodes

    def parameter(self, variable: str, form: str, path: tuple[str, ...]) -> Parameter:
        """A parameter; the second use of a variable is "name-2"."""
        length = self.lengths if isinstance(self.lengths, int) else self.lengths.get(variable)
        if length is None:
            raise ConfigurationError(
                f"no length for the variable {variable!r}; give lengths={{{variable!r}: 64}}"
            )
        uses = [(use.path, use.variable) for use in self.placeholders].count((path, variable))
        base = f"_{variable}" if variable == "schema" or variable.startswith("xml") else variable
        name = f"{base}-{uses + 1}" if uses else base
        self.placeholders.append(_Placeholder(path, name, variable, form))
        return Parameter(name, length)


def _check_format(template_format: str) -> None:
    if template_format != "f-string":
        raise ConfigurationError(
            f"a template in {template_format} format can compute its text; write it as an f-string"
        )
