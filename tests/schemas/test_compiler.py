"""Prompt programs compiled to PML (Prompt Cache, §3.2.4)."""

from __future__ import annotations

import os
import subprocess
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import pytest

import ragcache_schemas as pml
from tests.schemas.pml_trees import count_words

COMPANY = "Tide & <Sons>"


class Season(Enum):
    DRY = 1
    WET = 2


@pml.prompt_program
def weather(season: Season, month: Annotated[str, pml.MaxTokens(3)]) -> pml.Content:
    yield f"In {month}, "
    match season:
        case Season.DRY:
            yield "it is dry."
        case Season.WET:
            yield "it rains."


@pml.prompt_program(name="travel")
def trip(
    days: Annotated[str, pml.MaxTokens(5, scaffold="three days")],
    place: str,
    *,
    season: Season = Season.DRY,
    month: str = "May",
    cheap: bool = False,
    first: bool = True,
) -> pml.Content:
    """This says what the function is for, and is no text of the prompt."""
    yield f"""
        Plan a trip of {days!s:>3} for {COMPANY}.
          It has 100% sun & <b>fun</b>.
    """
    if cheap:
        yield "Mind the price.\n"
    match place:
        case "miami" | "florida":
            yield f"Miami has beaches. {weather(season, month=month)}"
        case "rome":
            yield "Rome is old.\n"
        case _:
            yield f"Stay {days}. "
            yield weather(season, month)
    if first:
        yield "It is the first trip."
    else:
        yield "It is not the first trip."
    yield " Seats: " + ("window" if len(place) > 4 else "aisle") + "."


@pml.prompt_program
def chat(topic: Annotated[str, pml.MaxTokens(6)], formal: bool) -> pml.Content:
    with pml.turn("system"):
        yield "You teach."
        if formal:
            yield " Be formal."
    with pml.turn("user"):
        yield f"Tell me about {topic.upper()}."


def said(prompt: pml.Prompt, schema: pml.Schema) -> str:
    """The text that a prompt comes to."""
    plan = pml.resolve_prompt(pml.SchemaIndex.build(schema, count_words), prompt)
    return "".join(piece.text for piece in plan.pieces)


def branches(**texts: str) -> tuple[pml.Module, ...]:
    """Modules by name; underscores stand for dashes."""
    return tuple(
        pml.Module(name.replace("_", "-"), (pml.Text(text),)) for name, text in texts.items()
    )


def test_every_construct_has_its_element_3_2_4() -> None:
    before, ending = trip.schema.children[:4], trip.schema.children[5:]
    miami, rome, other = trip.schema.children[4].members
    assert before == (
        pml.Text("Plan a trip of "),
        pml.Parameter("days", 5, "three days"),
        pml.Text(" for Tide & <Sons>.\n  It has 100% sun & <b>fun</b>.\n"),
        *branches(cheap="Mind the price.\n"),
    )
    nested = pml.Module("weather", weather.schema.children)
    assert miami == pml.Module("miami-florida", (pml.Text("Miami has beaches. "), nested))
    assert (rome,) == branches(rome="Rome is old.\n")
    assert other.name == "else-place"
    assert other.children[:3] == (
        pml.Text("Stay "),
        pml.Parameter("days", 5, "three days"),
        pml.Text(". "),
    )
    assert ending == (
        pml.Union(branches(first="It is the first trip.", not_first="It is not the first trip.")),
        pml.Text(" Seats: "),
        pml.Union(branches(len_place_4="window", not_len_place_4="aisle")),
        pml.Text("."),
    )


def test_call_makes_a_prompt() -> None:
    prompt = trip("9", "florida", season=Season.WET, month="June", first=False)
    inner = pml.Import("weather", {"month": "June"}, (pml.Import("WET"),))
    imports = (
        pml.Import("miami-florida", (), (inner,)),
        pml.Import("not-first"),
        pml.Import("len-place-4"),
    )
    assert prompt == pml.Prompt("travel", imports, {"days": "  9"})
    assert said(prompt, trip.schema) == (
        "Plan a trip of   9 for Tide & <Sons>.\n  It has 100% sun & <b>fun</b>.\n"
        "Miami has beaches. In June, it rains.It is not the first trip. Seats: window."
    )


def test_branch_not_taken_and_wildcard_case() -> None:
    prompt = trip("two", "oslo", cheap=True)
    imports = [node.name for node in prompt.children if isinstance(node, pml.Import)]
    assert imports == ["cheap", "else-place", "first", "not-len-place-4"]
    assert said(prompt, trip.schema).endswith(
        "Mind the price.\nStay two. In May, it is dry.It is the first trip. Seats: aisle."
    )
    assert weather("neither", "May").children == ()


def test_turns() -> None:
    system, user = chat.schema.children
    assert system == pml.Chat(
        "system", (pml.Text("You teach."), pml.Module("formal", (pml.Text(" Be formal."),)))
    )
    assert isinstance(user, pml.Chat)
    assert user.children[1] == pml.Parameter("topic", 6)
    prompt = chat("tides", formal=True)
    assert prompt.arguments == (("topic", "TIDES"),)
    assert said(prompt, chat.schema) == "You teach. Be formal.Tell me about TIDES."


@pytest.mark.slow
def test_names_are_stable_across_runs() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from tests.schemas.test_compiler import pml, trip\n"
        "print(pml.write_schema(trip.schema))"
    )
    root = str(Path(__file__).resolve().parents[2])
    written = {
        subprocess.run(
            [sys.executable, "-c", code, root],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert written == {pml.write_schema(trip.schema) + "\n"}


def test_repeated_arguments_and_calls_get_numbered_names() -> None:
    @pml.prompt_program
    def part(text: Annotated[str, pml.MaxTokens(2)]) -> pml.Content:
        yield f"[{text}]"

    @pml.prompt_program
    def whole(
        a: Annotated[str, pml.MaxTokens(2)], b: Annotated[str, pml.MaxTokens(2)]
    ) -> pml.Content:
        yield f"{a} {a} {b}" + part(b) + part(text=a)

    prompt = whole("x", "y")
    assert prompt.arguments == (("a", "x"), ("a-2", "x"), ("b", "y"))
    assert said(prompt, whole.schema) == "x x y[y][x]"


def test_spread_arguments_and_defaults() -> None:
    @pml.prompt_program
    def part(*words: str, end: Annotated[str, pml.MaxTokens(2)] = "!") -> pml.Content:
        if len(words) > 1:
            yield "many"
        yield end

    @pml.prompt_program
    def whole(words: tuple[str, ...], options: dict[str, Any]) -> pml.Content:
        yield part(*words, **options)

    assert said(whole(("a", "b"), {}), whole.schema) == "many!"
    assert said(whole(("a",), {"end": "?"}), whole.schema) == "?"


def test_elif_guards_singletons_and_negations() -> None:
    @pml.prompt_program
    def program(n: int, flag: bool | None) -> pml.Content:
        if n > 9:
            yield "large"
        elif n > 5:
            yield "middle"
        else:
            yield "small"
        if not flag:
            yield ", off"
        else:
            yield ", on"
        match flag:
            case True if n > 7:
                yield ", sure"
            case None:
                yield ", unknown"
        match n:
            case 1:
                yield ", one"
        match n + 1:
            case 1:
                pass
            case 2 | 3:
                yield ", few"

    names = [m.name for u in program.schema.children for m in getattr(u, "members", [u])]
    assert names == [
        *("n-9", "n-5", "else-n-9", "not-flag", "flag", "True-if-n-7", "None"),
        *("_1", "n-1-_1", "_2-3"),
    ]
    assert said(program(6, None), program.schema) == "middle, off, unknown"
    assert said(program(8, True), program.schema) == "middle, on, sure"
    assert said(program(1, False), program.schema) == "small, off, one, few"
    assert said(program(0, True), program.schema) == "small, on"


def test_only_triple_quoted_text_follows_the_white_space_rule() -> None:
    @pml.prompt_program
    def program(x: Annotated[str, pml.MaxTokens(2)]) -> pml.Content:
        yield "\n  kept  \n\n"
        yield f"""
            {x} first
              second {weather(Season.DRY, x)}

        """

    expected = "\n  kept  \n\nX first\n  second In X, it is dry."
    assert said(program("X"), program.schema) == expected


def failing(body: str, tmp_path: Path) -> pml.ProgramError:
    """The error of a program with this body, in a file."""
    lines = (
        "from typing import Annotated",
        "from ragcache_schemas import MaxTokens, prompt_program, turn",
        "@prompt_program",
        "def inner(a): yield 'x'",
        "@prompt_program",
        "def outer(n, x: Annotated[str, MaxTokens(4)], y: Annotated[str, MaxTokens(4)]):",
        f"    {body}",
    )
    file = tmp_path / "program.py"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    names: dict[str, Any] = {}
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), names)
    with pytest.raises(pml.ProgramError) as caught:
        _ = names["outer"].schema
    assert str(caught.value).startswith(f"{file}:")
    return caught.value


@pytest.mark.parametrize(
    ("body", "column", "problem", "expected"),
    [
        ("for i in range(n): yield 'x'", 5, "a loop", "write its rounds out"),
        ("while n: yield 'x'", 5, "a loop", "write its rounds out"),
        ("yield 'é'; return", 16, "return", "under `if`"),
        ("z = n; yield 'x'", 5, "an assignment", "before the call"),
        ("f'{x}'; yield 'x'", 5, "a string on its own", 'yield "..."'),
        ("inner(n); yield 'x'", 5, "not used", "`yield` before it"),
        ("yield f'{n}'", 11, "'n' is text of unknown length", "n: Annotated[str, MaxTokens(12)]"),
        ("yield f'{x + y}'", 11, "'x + y' is made of several", "its own braces"),
        ("yield missing", 11, "'missing' cannot be evaluated", "a value that is known"),
        ("yield None", 11, "'None' is a NoneType", "yield text"),
        ("yield", 5, "`yield`", "yield a text"),
        ("yield from inner(n)", 5, "`yield from", "yield a text"),
        ("yield outer(n, x, y)", 11, "'outer' calls itself", "write each level out"),
        ("yield inner(n, n)", 11, "too many positional arguments", "its signature is (a)"),
        ("yield '\\0'", 11, "U+0000", "sanitize_text"),
        ("pass", 1, "yields nothing", "yield its text"),
        ("with open('x') as f: yield 'x'", 5, "with open", 'with turn("system")'),
        ("with turn('system'), turn('user'): yield 'x'", 5, "With", "use yield text"),
        ("with turn('robot'): yield 'x'", 5, "with turn", 'with turn("system")'),
        ("import os; yield 'x'", 5, "Import", "use yield text"),
        ("(yield 'x') if n else 2", 5, "Expr", "use yield text"),
        ("match n:\n        case [a, b]: yield 'x'", 14, "'[a, b]'", "match literals"),
        ("yield late(n)\n@prompt_program\ndef late(a):\n    a = 1", 5, "in 'late': an assig", ""),
    ],
)
def test_errors_name_place_and_remedy(
    body: str, column: int, problem: str, expected: str, tmp_path: Path
) -> None:
    error = failing(body, tmp_path)
    written = body.count("\n")  # the error is in the last line of the body, or the program's first
    assert (error.line, error.column) in {(7 + written, column), (6, column)}
    assert problem in error.problem
    assert error.expected is not None
    assert expected in error.expected


def test_functions_without_source_and_lambdas() -> None:
    names: dict[str, Any] = {"prompt_program": pml.prompt_program}
    exec("@prompt_program\ndef p():\n    yield 'x'", names)
    with pytest.raises(pml.ProgramError, match="the source of 'p' is not at hand"):
        _ = names["p"].schema
    with pytest.raises(pml.ProgramError, match="is no plain function"):
        _ = pml.prompt_program(lambda: iter(["x"])).schema


def test_invalid_lengths_and_reserved_names_are_refused() -> None:
    with pytest.raises(pml.InvalidAttribute, match="1 token or more"):
        pml.MaxTokens(0)

    @pml.prompt_program
    def program(schema: Annotated[str, pml.MaxTokens(2)]) -> pml.Content:
        yield schema

    with pytest.raises(ValueError, match=r"test_compiler\.py:\d+:15: .*'schema' is reserved"):
        _ = program.schema
