"""Chat turns rendered with the model's own template (Prompt Cache, §3.2.3).

The template is a function from messages to text, as tokenizers have it. It is called once for the
whole conversation, with marks in place of the contents, and the text between the marks is put
around the turns. This works for every template that keeps contents whole and in order. Llama 2, for
example, writes the system turn inside the first user turn:

    <s>[INST] <<SYS>>\n ¹ \n<</SYS>>\n\n ² [/INST] ³ </s>

The text between two turns goes before the second one. An empty turn (`<system/>`) is no message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from ragcache_schemas.errors import TurnMismatch
from ragcache_schemas.tree import (
    Chat,
    Import,
    Module,
    Node,
    Prompt,
    Role,
    Schema,
    Text,
    Union,
)


class Render(Protocol):
    """A chat template.

    Returns the text of messages, and with `generate` the start of the answer.
    """

    def __call__(self, messages: Sequence[tuple[Role, str]], *, generate: bool) -> str: ...


def render_schema_turns(schema: Schema, render: Render) -> Schema:
    """Replace the turns of a schema by the template's text.

    A turn that the schema leaves open gets no text after it. The prompt continues it.

    Raises:
        TurnMismatch: The template cannot write these turns.
    """
    turns = list(_turns(schema.children))
    if not turns:
        return schema
    opens, close = _schema_text(turns, render)
    return replace(schema, children=_rendered(schema.children, turns, opens, close))


def render_prompt_turns(prompt: Prompt, schema: Schema, render: Render) -> Prompt:
    """Replace the turns of a prompt by the template's text, as a continuation of the schema's.

    After a closed user turn, the template's start of the answer follows, whether the prompt or the
    schema closes the turn.

    Args:
        prompt: The prompt.
        schema: Its schema, with its turns not yet rendered.
        render: The chat template.

    Raises:
        TurnMismatch: The template cannot write these turns, or they do not follow the schema's.
    """
    before, turns = list(_turns(schema.children)), list(_turns(prompt.children))
    if not turns:
        return _answered(prompt, before, render)
    goes_on = _goes_on(before, turns[0])
    messages = [turn.role for turn in before + turns[goes_on:]]
    last = turns[-1]
    text = _marked(messages, render, last, generate=last.closes and last.role != "assistant")
    opens = text[len(before) : -1]
    if before and not goes_on:
        already = _schema_text(before, render)[1]
        if not opens[0].startswith(already):
            raise _mismatch(turns[0], "goes on differently after the turns of the schema")
        opens[0] = opens[0][len(already) :]
    opens = [""] * goes_on + opens
    close = text[-1] if last.closes else ""
    return replace(prompt, children=_rendered(prompt.children, turns, opens, close))


def _answered(prompt: Prompt, before: Sequence[Chat], render: Render) -> Prompt:
    """Add the start of the answer to a prompt without turns, after the turns `before`."""
    if not before or not before[-1].closes or before[-1].role != "user":
        return prompt
    last, already = before[-1], _schema_text(before, render)[1]
    text = _marked([turn.role for turn in before], render, last, generate=True)[-1]
    if not text.startswith(already):
        raise _mismatch(last, "begins the answer differently after the turns of the schema")
    start = Text(text[len(already) :], location=last.location)
    return replace(prompt, children=(*prompt.children, start))


def _goes_on(before: Sequence[Chat], turn: Chat) -> bool:
    """Whether `turn` continues the turn that the schema left open."""
    if turn.opens:
        return False
    if before and not before[-1].closes and before[-1].role == turn.role:
        return True
    raise TurnMismatch(
        f"</{turn.role}> ends a turn that the schema has not left open",
        turn.location,
        turn.role,
        f'write <{turn.role}>...</{turn.role}>, or end the schema with <{turn.role} closes="no">',
    )


def _schema_text(turns: Sequence[Chat], render: Render) -> tuple[list[str], str]:
    """Return the text before each turn of a schema, and the text after the last one."""
    last, roles = turns[-1], [turn.role for turn in turns]
    # One more turn, since some templates write the system turn only inside a user turn.
    follower: Role = "assistant" if last.role == "user" else "user"
    followed = _marked([*roles, follower], render, last)
    if not last.closes:
        return followed[:-2], ""
    try:
        ended = _marked(roles, render, last)
    except TurnMismatch:
        return followed[:-2], ""
    fits = ended[:-1] == followed[:-2] and followed[-2].startswith(ended[-1])
    return followed[:-2], ended[-1] if fits else ""


def _marked(
    roles: Sequence[Role], render: Render, turn: Chat, *, generate: bool = False
) -> list[str]:
    """Return the template's text around the contents of messages with these roles."""
    marks = [f"\ue000{number}\ue001" for number in range(len(roles))]
    try:
        text = render(list(zip(roles, marks, strict=True)), generate=generate)
    except Exception as error:  # templates raise any type
        raise _mismatch(turn, f"refuses the turns {', '.join(roles)}: {error}") from error
    parts: list[str] = []
    for role, mark in zip(roles, marks, strict=True):
        before, found, text = text.partition(mark)
        if not found or mark in text:
            raise _mismatch(turn, f"does not write the <{role}> turn once and in its place")
        parts.append(before)
    return [*parts, text]


def _mismatch(turn: Chat, problem: str) -> TurnMismatch:
    expected = "change the turns, or write the template's text yourself"
    return TurnMismatch(f"the chat template {problem}", turn.location, turn.role, expected)


def _turns(nodes: Sequence[Node]) -> Iterator[Chat]:
    """Yield the turns that have content, in the order of the text."""
    for node in nodes:
        if isinstance(node, Chat) and node.children:
            yield node
        elif isinstance(node, Module | Import):
            yield from _turns(node.children)
        elif isinstance(node, Union):
            for turn in _turns(node.members):
                expected = "put the turn around the union"
                problem = f"<{turn.role}> inside a member of a union"
                raise TurnMismatch(problem, turn.location, turn.role, expected)


def _rendered(
    nodes: Sequence[Node], turns: Sequence[Chat], opens: Sequence[str], close: str
) -> tuple[Any, ...]:
    """Replace the turns of `nodes` by text, in the order of `_turns`."""
    around = iter(zip(opens, [""] * (len(turns) - 1) + [close], strict=True))

    def replaced(node: Node) -> Iterator[Node]:
        match node:
            case Chat():
                if node.children:
                    before, after = next(around)
                    yield Text(before, location=node.location)
                    yield from node.children
                    yield Text(after, location=node.location)
            case Module() | Import():
                inner: Any = tuple(new for child in node.children for new in replaced(child))
                yield replace(node, children=inner)
            case _:
                yield node

    return tuple(new for node in nodes for new in replaced(node))
