"""The index of a schema: slots and their catalogue, the reference files, speed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from pml_trees import count_words

from ragcache_schemas import (
    DuplicateName,
    Module,
    Plan,
    Schema,
    SchemaIndex,
    SpanTooLong,
    UnionConflict,
    UnknownName,
    collection_schema,
    document_module,
    expand,
    parse_prompt,
    parse_schema,
    resolve_prompt,
)


def resolved(body: str, index: SchemaIndex, arguments: str) -> Plan:
    prompt = f'<prompt schema="{index.schema.name}"{arguments}>{body}</prompt>'
    return resolve_prompt(index, parse_prompt(prompt))


def places(plan: Plan) -> list[tuple[str, int, int]]:
    return [("/".join(piece.path), piece.start, piece.end) for piece in plan.pieces]


def test_an_index_is_only_built_of_a_valid_schema() -> None:
    with pytest.raises(DuplicateName):
        SchemaIndex.of(Schema("s", (Module("a"), Module("a"))), count_words)


# Slots


DOCUMENTS = {f"d{n}": document_module(f"d{n}", ["a b c", "d e"], heading="t") for n in range(9)}
HANDBOOK = collection_schema("h", "You are.", 3, "c", epilogue="Answer:")
BY_SLOT = "<slot-1><d3><c2/></d3></slot-1><slot-2><d1><c1/></d1></slot-2>"


def document(collection: str, name: str) -> Module | None:
    return DOCUMENTS.get(name) if collection == "c" else None


def handbook() -> SchemaIndex:
    return SchemaIndex.of(HANDBOOK, count_words, "compact", catalogue=document)


def test_slots_draw_on_the_catalogue() -> None:
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


def test_a_prompt_fits_the_written_form_as_well() -> None:
    written = expand(HANDBOOK, {"c": list(DOCUMENTS.values())})
    index = SchemaIndex.of(written, count_words, "compact")
    one = resolved(BY_SLOT, handbook(), ' question="q"')
    other = resolved(BY_SLOT, index, ' question="q"')
    assert one.pieces == other.pieces


def test_one_document_may_stand_in_two_slots() -> None:
    resolved("<slot-1><d1/></slot-1><slot-2><d1/></slot-2>", handbook(), ' question=""')


@pytest.mark.parametrize(
    ("body", "error", "match"),
    [
        ("<slot-1><d1/><d2/></slot-1>", UnionConflict, "'d1' and 'd2'"),
        ("<slot-1><d1/><d1/></slot-1>", DuplicateName, "twice"),
        ("<slot-1><nope/></slot-1>", UnknownName, "collection 'c' has no module 'nope'"),
        ("<slot-9/>", UnknownName, "did you mean 'slot-"),
    ],
)
def test_errors_in_slots(body: str, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        resolved(body, handbook(), ' question=""')


def test_slots_need_a_catalogue_and_room() -> None:
    with pytest.raises(UnknownName, match="without a catalogue"):
        resolved("<slot-1><d1/></slot-1>", SchemaIndex.of(HANDBOOK, count_words), ' question=""')
    fixed = SchemaIndex.of(
        HANDBOOK,
        count_words,
        catalogue=document,
        slot_length=lambda _: 6,
    )
    plan = resolved(BY_SLOT, fixed, ' question=""')
    assert ("slot-2/d1/#0", 8, 9) in places(plan)
    tight = SchemaIndex.of(HANDBOOK, count_words, catalogue=document)
    with pytest.raises(SpanTooLong, match="is 6 tokens long, its slot 0"):
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


def test_prompts_over_the_reference_files(reference_files: list[Path]) -> None:
    for file in reference_files:
        schema = parse_schema(file.read_bytes(), source=file.name)
        for placement in ("schema", "compact"):
            index = SchemaIndex.of(schema, count_words, placement)
            plan = resolve_prompt(index, parse_prompt(REFERENCE_PROMPTS[schema.name]))
            assert plan.cached_tokens > 5 * plan.computed_tokens
            assert plan.pieces[-1].kind == "new"


def test_resolving_against_ten_thousand_modules() -> None:
    modules = "".join(
        f'and <module name="m{n}">some words <param name="p" len="4"/></module>'
        for n in range(10_000)
    )
    index = SchemaIndex.of(parse_schema(f'<schema name="s">{modules}</schema>'), count_words)
    imports = "".join(f'<m{n} p="a b"/>new text' for n in range(0, 10_000, 1_000))
    prompt = parse_prompt(f'<prompt schema="s">{imports}</prompt>')
    times = []
    for _ in range(5):
        start = time.perf_counter()
        plan = resolve_prompt(index, prompt)
        times.append(time.perf_counter() - start)
    assert len(plan.pieces) == 10_030
    assert min(times) < 0.002
