"""Schemas from LangChain prompt templates: a prompt says what the template's `format` says."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.example_selectors import LengthBasedExampleSelector
from langchain_core.messages import SystemMessage
from langchain_core.prompts import (
    ChatPromptTemplate,
    FewShotPromptTemplate,
    MessagesPlaceholder,
    PromptTemplate,
)

from ragcache.errors import ConfigurationError
from ragcache_connectors.langchain import TemplateSchema, template_schema
from ragcache_schemas import (
    Chat,
    Module,
    Parameter,
    SchemaIndex,
    Text,
    parse_prompt,
    parse_schema,
    resolve_prompt,
    write_prompt,
    write_schema,
)


def said(made: TemplateSchema, **values: Any) -> str:
    """The text of the prompt, through written PML and back."""
    schema = parse_schema(write_schema(made.schema))
    prompt = parse_prompt(write_prompt(made.prompt(**values)))
    assert schema == made.schema
    plan = resolve_prompt(SchemaIndex.build(schema, len), prompt)
    return "".join(piece.text for piece in plan.pieces)


def test_variables_become_parameters_and_text_stays_text() -> None:
    template = PromptTemplate.from_template("<b>{name!r:>6}</b> & {name}: {{x}} {schema}\n")
    made = template_schema(template, "greeting", {"name": 12, "schema": 3})
    assert made.schema.children == (
        Text("<b>"),
        Parameter("name", 12),
        Text("</b> & "),
        Parameter("name-2", 12),
        Text(": {x} "),
        Parameter("_schema", 3),
        Text("\n"),
    )
    values = {"name": "A<b", "schema": "s"}
    assert said(made, **values) == template.format(**values)


def test_partial_variables_are_text_if_they_are_fixed() -> None:
    template = PromptTemplate.from_template(
        "{a} {b} {c}", partial_variables={"a": "A", "b": lambda: "B"}
    )
    made = template_schema(template, "t", 5)
    assert made.schema.children == (
        Text("A "),
        Parameter("b", 5),
        Text(" "),
        Parameter("c", 5),
    )
    assert said(made, c=1) == template.format(c=1) == "A B 1"
    assert said(made, b="b", c=1) == "A b 1"


def test_messages_become_turns() -> None:
    template = ChatPromptTemplate.from_messages(
        [SystemMessage("Be brief."), ("human", "Hi, {name}."), ("ai", "Hi."), ("human", "{name}?")]
    )
    made = template_schema(template, "chat", 8)
    assert made.schema.children == (
        Chat("system", (Text("Be brief."),)),
        Chat("user", (Text("Hi, "), Parameter("name", 8), Text("."))),
        Chat("assistant", (Text("Hi."),)),
        Chat("user", (Parameter("name-2", 8), Text("?"))),
    )
    assert said(made, name="Ida") == "Be brief.Hi, Ida.Hi.Ida?"


@pytest.mark.parametrize(("prefix", "suffix"), [("Words, {tone}:", "Q: {q}"), ("", "{q}{tone}")])
def test_examples_become_modules(prefix: str, suffix: str) -> None:
    template = FewShotPromptTemplate(
        examples=[{"q": "big", "a": "small"}, {"q": "hot", "a": "cold, {tone}"}],
        example_prompt=PromptTemplate.from_template("{q} -> {a}"),
        prefix=prefix,
        suffix=suffix,
        input_variables=["q", "tone"],
        example_separator="\n--\n",
    )
    made = template_schema(template, "few", 9)
    modules = [node for node in made.schema.children if isinstance(node, Module)]
    assert modules == [
        Module("example-1", (Text("big -> small\n--\n"),)),
        Module("example-2", (Text("hot -> cold, "), Parameter("tone", 9), Text("\n--\n"))),
    ]
    assert said(made, q="wet", tone="dry") == template.format(q="wet", tone="dry")


PLAIN = PromptTemplate.from_template("{x}")
SELECTOR = LengthBasedExampleSelector(examples=[], example_prompt=PLAIN)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (PromptTemplate.from_template("{{x}}", template_format="mustache"), "write it as an f-str"),
        (
            ChatPromptTemplate.from_messages([MessagesPlaceholder("h")]),
            "Placeholder has no",
        ),
        (
            FewShotPromptTemplate(example_selector=SELECTOR, example_prompt=PLAIN, suffix=""),
            "at run",
        ),
        (PromptTemplate.from_template("{y}"), "no length for the variable 'y'"),
        (ChatPromptTemplate.from_messages([("human", [{"image_url": "{x}"}])]), "no fixed text"),
    ],
)
def test_what_has_no_fixed_text_is_refused(template: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        template_schema(template, "t", {"x": 4})


def test_values_are_checked() -> None:
    made = template_schema(PLAIN, "t", 4)
    with pytest.raises(ConfigurationError, match="'x' needs a value"):
        made.prompt()
    with pytest.raises(ConfigurationError, match="no variable 'y'"):
        made.prompt(x=1, y=2)
