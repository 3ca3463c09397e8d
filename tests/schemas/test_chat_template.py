"""Chat turns rendered by a model's template (Prompt Cache, §3.2.3)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import pytest

import ragcache_schemas as pml

Messages = Sequence[tuple[pml.Role, str]]


def chatml(messages: Messages, *, generate: bool) -> str:
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
    return text + "<|im_start|>assistant\n" * generate


def llama2(messages: Messages, *, generate: bool) -> str:
    """As Llama 2's own: the system turn stands in the first user turn, roles must alternate."""
    system, text = "", ""
    if messages and messages[0][0] == "system":
        system, messages = f"<<SYS>>\n{messages[0][1].strip()}\n<</SYS>>\n\n", messages[1:]
    for number, (role, content) in enumerate(messages):
        if role != ("user", "assistant")[number % 2]:
            raise ValueError("Conversation roles must alternate")
        if role == "user":
            text += f"<s>[INST] {system if number == 0 else ''}{content.strip()} [/INST]"
        else:
            text += f" {content.strip()} </s>"
    return text


TEMPLATES = [chatml, llama2]
SCHEMA = (
    '<schema name="s"><system>Be brief.</system><user>Read<module name="m">this</module></user>'
    "<assistant>I did.</assistant></schema>"
)
TURNS: list[tuple[pml.Role, str]] = [
    ("system", "Be brief."),
    ("user", "Readthis"),
    ("assistant", "I did."),
]


def flat(nodes: Sequence[object]) -> str:
    """The text of everything, imported or not."""
    out = ""
    for node in nodes:
        if isinstance(node, pml.Text):
            out += node.text
        elif isinstance(node, pml.Module | pml.Import):
            out += flat(node.children)
    return out


def spelled(schema: str, prompt: str, render: pml.Render) -> str:
    """Schema and prompt together."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pml.PMLWarning)
        tree, question = pml.parse_schema(schema), pml.parse_prompt(prompt)
    before = flat(pml.render_schema_turns(tree, render).children)
    return before + flat(pml.render_prompt_turns(question, tree, render).children)


@pytest.mark.parametrize("render", TEMPLATES)
@pytest.mark.parametrize(
    ("schema", "before", "prompt", "after"),
    [
        (SCHEMA, TURNS, "<m/><user>Why?</user>", [("user", "Why?")]),
        (SCHEMA, TURNS, "<user>A</user><assistant>B</assistant><user>C</user>",
         [("user", "A"), ("assistant", "B"), ("user", "C")]),
        ('<schema name="s"><system>Be brief.</system></schema>', TURNS[:1], "<user>Hi</user>",
         [("user", "Hi")]),
    ],
)  # fmt: skip
def test_turns_are_rendered_like_the_whole_conversation(
    render: pml.Render, schema: str, before: Messages, prompt: str, after: Messages
) -> None:
    expected = render([*before, *after], generate=True)
    assert spelled(schema, f'<prompt schema="s">{prompt}</prompt>', render) == expected


@pytest.mark.parametrize("render", TEMPLATES)
def test_unbalanced_turns_of_the_reference_implementation(render: pml.Render) -> None:
    schema = '<schema name="s"><system/><user><module name="m">Read this.</module></schema>'
    prompt = "<prompt schema='s'><m/>Why?</user><assistant>Answer:</prompt>"
    whole = render([("user", "Read this.Why?"), ("assistant", "Answer:")], generate=False)
    assert spelled(schema, prompt, render) == whole[: whole.index("Answer:") + len("Answer:")]


@pytest.mark.parametrize("render", TEMPLATES)
def test_last_user_turn_of_a_prompt_may_stay_open(render: pml.Render) -> None:
    whole = spelled(SCHEMA, '<prompt schema="s"><user closes="no">Why</user></prompt>', render)
    assert whole.endswith("Why")


def test_turns_inside_modules() -> None:
    schema = pml.parse_schema(
        '<schema name="s"><module name="a"><system>S</system></module><user>U</user></schema>'
    )
    assert pml.render_schema_turns(schema, chatml).children == (
        pml.Module("a", (pml.Text("<|im_start|>system\nS"),)),
        pml.Text("<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"),
    )


def test_trees_without_turns_do_not_change() -> None:
    schema, prompt = pml.Schema("s", (pml.Text("x"),)), pml.Prompt("s", (pml.Text("y"),))
    assert pml.render_schema_turns(schema, chatml) is schema
    assert pml.render_prompt_turns(prompt, schema, chatml) is prompt


@pytest.mark.parametrize(
    ("schema", "prompt", "match"),
    [
        ("<user>U</user>", "Why</user>", "has not left open"),
        ("", "Why</user>", "has not left open"),
        ("<user>U</user>", "<user>V</user>", "refuses the turns user, user: .*alternate"),
    ],
)
def test_mismatched_turns_are_refused(schema: str, prompt: str, match: str) -> None:
    with pytest.raises(pml.TurnMismatch, match=match) as caught:
        spelled(
            f'<schema name="s">{schema}</schema>', f'<prompt schema="s">{prompt}</prompt>', llama2
        )
    assert caught.value.element == "user"
    assert caught.value.line == 1


def test_template_that_drops_turns_is_refused() -> None:
    def no_system(messages: Messages, *, generate: bool) -> str:
        return chatml([m for m in messages if m[0] != "system"], generate=generate)

    with pytest.raises(pml.TurnMismatch, match="does not write the <system> turn"):
        pml.render_schema_turns(pml.parse_schema(SCHEMA), no_system)


def test_turn_inside_a_union_member_is_refused() -> None:
    schema = pml.parse_schema(
        '<schema name="s"><union><module name="m"><user>U</user></module></union></schema>'
    )
    with pytest.raises(pml.TurnMismatch, match="put the turn around the union"):
        pml.render_schema_turns(schema, chatml)


@pytest.mark.parametrize("render", TEMPLATES)
def test_the_answer_starts_after_the_schemas_user_turn(render: pml.Render) -> None:
    schema = '<schema name="s"><system>S</system><user>Read</user></schema>'
    whole: list[tuple[pml.Role, str]] = [("system", "S"), ("user", "Read")]
    assert spelled(schema, '<prompt schema="s"/>', render) == render(whole, generate=True)
    for ending in ('<user closes="no">Q</user>', "<user>Q</user><assistant>A</assistant>"):
        left = f'<schema name="s">{ending}</schema>'
        prompt = pml.parse_prompt('<prompt schema="s">more</prompt>')
        assert pml.render_prompt_turns(prompt, pml.parse_schema(left), render) == prompt
