"""Prompts resolved against their schema (Prompt Cache, §3.4), slots, and speed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ragcache_schemas as pml
from tests.schemas.pml_trees import count_words, schemas

CITIES = """<schema name="cities">You plan trips.
  <module name="plan">Plan a trip of <param name="days" len="4"/>. Be brief.
    <module name="kids">With children.</module>
  </module>
  <union>
    <module name="miami">Miami has beaches.</module>
    <module name="paris">Paris has museums and many small cafés.</module>
  </union>
  Now answer.
  <module name="tone">Kindly.</module>
  <scaffold modules="plan miami"/>
</schema>"""
INDEX = pml.SchemaIndex.build(pml.parse_schema(CITIES), count_words)


def resolved(body: str, index: pml.SchemaIndex = INDEX, arguments: str = "") -> pml.Plan:
    prompt = f'<prompt schema="{index.schema.name}"{arguments}>{body}</prompt>'
    return pml.resolve_prompt(index, pml.parse_prompt(prompt, source="p.xml"))


def places(plan: pml.Plan) -> list[tuple[str, int, int]]:
    return [("/".join(piece.path), piece.start, piece.end) for piece in plan.pieces]


def test_imports_take_the_positions_of_the_layout_3_4() -> None:
    plan = resolved('<plan days="3 days"/><miami/>')
    layout = INDEX.layout
    assert plan.modules == (("plan",), ("miami",))
    for piece in plan.pieces:
        span = layout[piece.path]
        assert piece.start == piece.canonical == span.start
        assert (piece.reserved if piece.kind == "argument" else piece.length) == span.length
    assert [piece.cached for piece in plan.pieces] == [True, True, False, True, True, True]
    assert plan.length == layout["#1"].end


def test_anonymous_text_is_always_included_3_2_1() -> None:
    plan = resolved("")
    assert [piece.text for piece in plan.pieces] == ["You plan trips.\n", "Now answer.\n"]
    assert plan.cached_tokens == 5
    assert plan.computed_tokens == 0


def test_arguments_take_over_their_parameters_positions() -> None:
    piece = resolved('<plan days="3 days"/>').pieces[2]
    span = INDEX.layout["plan/@days"]
    assert (piece.kind, piece.text, piece.length, piece.reserved) == ("argument", "3 days", 2, 4)
    assert (piece.start, piece.end) == (span.start, span.start + 2)  # a shorter one leaves a gap
    assert not piece.cached
    assert resolved('<plan days=""/>').pieces[2].length == 0


@pytest.mark.parametrize(
    ("body", "text", "after"),
    [
        ('<plan days="3 days"/>Highlight surf. <paris/>', "Highlight surf. ", "plan/#1"),
        ("Hello. <paris/>", "Hello. ", "#0"),
        ("<miami/>Where to?", "Where to?", "#1"),
        ('<plan days="3">before<kids/>after</plan><miami/>', "before", "plan/#1"),
        ('<plan days="3">before<kids/>after</plan><miami/>', "after", "plan/kids"),
    ],
)
def test_new_text_starts_at_the_end_of_what_is_before_it_3_4(
    body: str, text: str, after: str
) -> None:
    plan = resolved(body)
    [new] = [piece for piece in plan.pieces if piece.text == text]
    assert (new.kind, new.start) == ("new", INDEX.layout[after].end)
    assert new.end == new.start + count_words(text)
    assert new.location is not None
    assert new.location.column == 26 + body.index(text) - 1
    assert plan.length >= new.end


def test_the_order_of_imports_does_not_move_modules() -> None:
    plan = resolved("<miami/>x<tone/>")
    other = resolved("<tone/>x<miami/>")
    assert plan.modules == other.modules
    assert other.pieces[-1].kind == "new"  # after `tone`, which it follows in the prompt


def test_new_text_without_room_is_reported_as_crowded() -> None:
    plan = resolved('<plan days="3"><kids/>one two three</plan><miami/>')
    assert [piece.text for piece in plan.crowded] == ["one two three"]
    assert plan.crowded[0] in plan.pieces
    assert resolved('<plan days="3"><kids/></plan>one two three<tone/>').crowded == ()


def test_scaffolds_apply_when_all_their_modules_are_imported_3_3() -> None:
    assert resolved('<plan days="3"/><miami/>').scaffolds == INDEX.schema.scaffolds
    assert resolved('<plan days="3"/><paris/>').scaffolds == ()


def test_pieces_keep_their_turn_and_say_what_is_cached() -> None:
    schema = pml.parse_schema(
        '<schema name="s"><system>S</system>'
        '<user>U<module name="m" cache="false">M</module></user></schema>'
    )
    plan = resolved("<m/><user>Q</user>", pml.SchemaIndex.build(schema, count_words))
    assert [(p.text, p.role, p.cached) for p in plan.pieces] == [
        ("S", "system", True), ("U", "user", True), ("M", "user", False), ("Q", "user", False),
    ]  # fmt: skip


def test_compact_leaves_no_gaps() -> None:
    index = pml.SchemaIndex.build(pml.parse_schema(CITIES), count_words, "compact")
    plan = resolved('<plan days="3 days">also this<kids/></plan>and<paris/>Go!', index)
    position = 0
    for piece in plan.pieces:
        assert piece.start == position
        position = piece.end
    assert plan.length == position
    assert plan.crowded == ()
    paris = next(piece for piece in plan.pieces if piece.path == ("paris", "#0"))
    assert paris.canonical == index.layout["paris"].start == 3
    assert paris.start > 3


# Errors, with their place in the prompt ("¦")


@pytest.mark.parametrize(
    ("marked", "error", "match", "element"),
    [
        ("¦<rome/>", pml.UnknownName, "the schema has no module 'rome'", "rome"),
        ("a\n¦<pariss/>", pml.UnknownName, "did you mean 'paris'", "pariss"),
        (
            "<plan days=''>¦<miami/></plan>",
            pml.UnknownName,
            "'plan' has no module 'miami'",
            "miami",
        ),
        ("<miami/>¦<paris/>", pml.UnionConflict, "'miami' and 'paris'", "paris"),
        ("<user><miami/></user>¦<paris/>", pml.UnionConflict, "one union", "paris"),
        ("<tone/>¦<tone/>", pml.DuplicateName, "twice", "tone"),
        ("¦<plan/>", pml.MissingArgument, "needs an argument for 'days'", "plan"),
        ("¦<plan days='3' months='1'/>", pml.UnknownName, "no parameter 'months'", "plan"),
        ("¦<tone x='3'/>", pml.UnknownName, "there are none", "tone"),
        ("¦<plan days='a b c d e'/>", pml.SpanTooLong, "5 tokens long, the parameter 4", "plan"),
    ],
)
def test_errors(marked: str, error: type, match: str, element: str) -> None:
    before, _, after = marked.partition("¦")
    with pytest.raises(pml.PMLError, match=match) as caught:
        resolved(before + after)
    found = caught.value
    assert type(found) is error
    assert found.element == element
    column = len(before) + 25 if "\n" not in before else 1
    assert (found.source, found.line, found.column) == ("p.xml", before.count("\n") + 1, column)


def test_other_schemas_are_refused() -> None:
    with pytest.raises(pml.DuplicateName):
        pml.SchemaIndex.build(pml.Schema("s", (pml.Module("a"), pml.Module("a"))), count_words)
    with pytest.raises(
        pml.UnknownName, match="for the schema 'other'; this schema is called 'cities'"
    ):
        pml.resolve_prompt(INDEX, pml.Prompt("other"))


# Properties


def fitting(text: str) -> int:
    return min(len(text), 1)


@st.composite
def schemas_with_prompts(draw: st.DrawFn) -> tuple[pml.Schema, pml.Prompt]:
    schema = draw(schemas())

    def level(children: tuple[object, ...]) -> tuple[dict[str, str], tuple[object, ...]]:
        arguments: dict[str, str] = {}
        imports: list[object] = []

        def choose(nodes: tuple[object, ...]) -> None:
            for node in nodes:
                match node:
                    case pml.Parameter():
                        arguments[node.name] = draw(st.text(max_size=3))
                    case pml.Chat():
                        choose(node.children)
                    case pml.Module() if draw(st.booleans()):
                        imports.append(pml.Import(node.name, *level(node.children)))
                    case pml.Union() if node.members and draw(st.booleans()):
                        choose((draw(st.sampled_from(node.members)),))
                    case pml.Slot() if draw(st.booleans()):
                        imports.append(pml.Import(node.scope))

        choose(children)
        imports = draw(st.permutations(imports))
        mixed: list[object] = []
        for node in [*imports, None]:
            if draw(st.booleans()):
                mixed.append(pml.Text(draw(st.text(min_size=1, max_size=3))))
            if node is not None:
                mixed.append(node)
        return arguments, tuple(mixed)

    arguments, nodes = level(schema.children)
    return schema, pml.Prompt(schema.name, nodes, arguments)


def texts(nodes: tuple[object, ...]) -> list[str]:
    out: list[str] = []
    for node in nodes:
        if isinstance(node, pml.Text):
            out.append(node.text)
        elif isinstance(node, pml.Import):
            out += texts(node.children)
    return out


@given(schemas_with_prompts())
def test_resolved_positions_lie_within_the_layout(pair: tuple[pml.Schema, pml.Prompt]) -> None:
    schema, prompt = pair
    index = pml.SchemaIndex.build(schema, fitting)
    plan = pml.resolve_prompt(index, prompt)
    end = 0
    for piece in plan.pieces:
        if piece.kind == "new":
            assert piece.start >= end or piece.length == 0
        else:
            span = index.layout[piece.path]
            assert span.start == piece.start == piece.canonical
            assert piece.end <= span.end <= index.layout.length
        end = max(end, piece.end)
    assert plan.length == end
    new = [piece.text for piece in plan.pieces if piece.kind == "new"]
    assert sorted(new) == sorted(texts(prompt.children))  # none is dropped
    compact = pml.resolve_prompt(pml.SchemaIndex.build(schema, fitting, "compact"), prompt)
    assert [piece.path for piece in compact.pieces] == [piece.path for piece in plan.pieces]
    assert compact.length == sum(piece.length for piece in compact.pieces)


# Slots


CHUNKS = pml.document_module("d", ["a b c", "d e"]).children
DOCUMENTS = {f"d{n}": pml.Module(f"d{n}", (pml.Text("t"), *CHUNKS)) for n in range(9)}
HANDBOOK = pml.collection_schema("h", "You are.", 3, "c", epilogue="Answer:")
BY_SLOT = "<slot-1><d3><c2/></d3></slot-1><slot-2><d1><c1/></d1></slot-2>"


def document(collection: str, name: str) -> pml.Module | None:
    return DOCUMENTS.get(name) if collection == "c" else None


def handbook() -> pml.SchemaIndex:
    return pml.SchemaIndex.build(HANDBOOK, count_words, "compact", lookup=document)


def test_slots_import_looked_up_modules() -> None:
    plan = resolved(BY_SLOT, handbook(), ' question="what is it"')
    assert places(plan) == [
        ("#0", 0, 2),
        ("slot-1/d3/#0", 2, 3),
        ("slot-1/d3/c2/#0", 3, 5),
        ("slot-2/d1/#0", 5, 6),
        ("slot-2/d1/c1/#0", 6, 9),
        ("@question", 9, 12),
        ("#1", 12, 13),
    ]
    assert plan.pieces[1].canonical == plan.pieces[3].canonical == 2
    assert plan.computed_tokens == 3


@pytest.mark.parametrize("body", [BY_SLOT, "<slot-1><d1/></slot-1><slot-2><d1/></slot-2>"])
def test_expanded_schema_resolves_the_same_prompts(body: str) -> None:
    written = pml.expand_slots(HANDBOOK, {"c": list(DOCUMENTS.values())})
    index = pml.SchemaIndex.build(written, count_words, "compact")
    one = resolved(body, handbook(), ' question="q"')
    other = resolved(body, index, ' question="q"')
    assert one.pieces == other.pieces


@pytest.mark.parametrize(
    ("body", "error", "match"),
    [
        ("<slot-1><d1/><d2/></slot-1>", pml.UnionConflict, "'d1' and 'd2'"),
        ("<slot-1><d1/><d1/></slot-1>", pml.DuplicateName, "twice"),
        ("<slot-1><nope/></slot-1>", pml.UnknownName, "collection 'c' has no module 'nope'"),
        ("<slot-9/>", pml.UnknownName, "did you mean 'slot-"),
    ],
)
def test_errors_in_slots(body: str, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        resolved(body, handbook(), ' question=""')


def test_slots_need_a_lookup_and_the_compact_placement() -> None:
    with pytest.raises(pml.UnknownName, match="without a lookup"):
        resolved(
            "<slot-1><d1/></slot-1>", pml.SchemaIndex.build(HANDBOOK, count_words), ' question=""'
        )
    tight = pml.SchemaIndex.build(HANDBOOK, count_words, lookup=document)
    with pytest.raises(pml.SpanTooLong, match="slots take no fixed positions"):
        resolved(BY_SLOT, tight, ' question=""')


# The reference files, and speed


REFERENCE_PROMPTS = {
    "travel": """<prompt schema="travel"><travel-plan duration="3 days"><overseas><maldives/>
        </overseas></travel-plan><user>Create a travel plan</user></prompt>""",
    "code-generation-bookstore": """<prompt schema="code-generation-bookstore"><database.py/>
        <user.py/><user>Create a main entry</user></prompt>""",
    "personalization-education": """<prompt schema="personalization-education"><middle-school/>
        <beginner/><user>Teach me</user></prompt>""",
}


def test_reference_schemas_resolve_prompts(reference_files: list[Path]) -> None:
    for file in reference_files:
        schema = pml.parse_schema(file.read_bytes(), source=file.name)
        for placement in ("schema", "compact"):
            index = pml.SchemaIndex.build(schema, count_words, placement)
            plan = pml.resolve_prompt(index, pml.parse_prompt(REFERENCE_PROMPTS[schema.name]))
            assert plan.cached_tokens > 5 * plan.computed_tokens
            assert plan.pieces[-1].kind == "new"


def lines_run(work: Callable[[], object]) -> int:
    """How many lines of Python some work runs: its time on a machine that nothing else uses."""
    counted = 0

    def count(frame: FrameType, event: str, argument: object) -> object:
        nonlocal counted
        counted += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(before)
    return counted


@pytest.mark.slow
def test_resolving_against_ten_thousand_modules_is_fast() -> None:
    """The anonymous text between modules is all in the plan, at a few lines of Python each."""
    modules = "".join(
        f'and <module name="m{n}">some words <param name="p" len="4"/></module>'
        for n in range(10_000)
    )
    index = pml.SchemaIndex.build(
        pml.parse_schema(f'<schema name="s">{modules}</schema>'), count_words
    )
    imports = "".join(f'<m{n} p="a b"/>new text' for n in range(0, 10_000, 1_000))
    prompt = pml.parse_prompt(f'<prompt schema="s">{imports}</prompt>')
    assert len(pml.resolve_prompt(index, prompt).pieces) == 10_030
    assert lines_run(lambda: pml.resolve_prompt(index, prompt)) < 40_000
