"""Position spans (Prompt Cache, §3.3)."""

from __future__ import annotations

import pytest
from hypothesis import given

import ragcache_schemas as pml
from tests.schemas.pml_trees import count_words, schemas


def spans(layout: pml.Layout) -> dict[str, tuple[int, int]]:
    return {"/".join(span.path): (span.start, span.length) for span in layout.spans}


def words(number: int) -> pml.Text:
    return pml.Text("word " * number)


def test_spans_of_unions_parameters_and_nested_modules_3_3() -> None:
    plan = pml.Module("plan", (words(1), pml.Parameter("days", 5), pml.Module("kids", (words(1),))))
    union = pml.Union((pml.Module("a", (words(3),)), plan))
    layout = pml.lay_out(
        pml.Schema("s", (words(2), union, pml.Module("d", (words(1),)), words(1))), count_words
    )
    assert spans(layout) == {
        "#0": (0, 2),
        "|0": (2, 7),  # as long as its largest member
        "a": (2, 3),
        "a/#0": (2, 3),
        "plan": (2, 7),
        "plan/#0": (2, 1),
        "plan/@days": (3, 5),  # as many as its length, whatever the argument
        "plan/kids": (8, 1),
        "plan/kids/#0": (8, 1),
        "d": (9, 1),
        "d/#0": (9, 1),
        "#1": (10, 1),
    }
    assert layout.length == 11
    assert layout["plan/kids"] == layout["plan", "kids"] == pml.PositionSpan(("plan", "kids"), 8, 1)


def test_scaffold_text_that_exceeds_its_parameter_warns() -> None:
    def schema(text: str) -> pml.Schema:
        return pml.Schema("s", (pml.Parameter("p", 3, text),))

    assert pml.lay_out(schema("one two"), count_words).length == 3
    with pytest.warns(pml.PMLWarning, match=r"4 tokens long, .* holds 3: .*len=\"4\""):
        assert pml.lay_out(schema("one two three four"), count_words).length == 3


def test_turns_do_not_show_in_paths_and_slots_take_no_positions() -> None:
    turn = pml.Chat("user", (words(1), pml.Module("m", (words(1),))))
    schema = pml.Schema("s", (words(2), turn, pml.Slot("1", "c"), words(1)))
    assert spans(pml.lay_out(schema, count_words)) == {
        "#0": (0, 2), "#1": (2, 1), "m": (3, 1), "m/#0": (3, 1), "slot-1": (4, 0), "#2": (4, 1),
    }  # fmt: skip


def test_compact_placement_gives_optional_modules_no_room() -> None:
    union = pml.Union((pml.Module("b", (words(5),)), pml.Module("c", (words(7),))))
    module = pml.Module("a", (words(3), pml.Module("n", (words(2),)), words(1)))
    layout = pml.lay_out(
        pml.Schema("s", (words(2), module, union, words(4))), count_words, "compact"
    )
    found = spans(layout)
    assert {found[name][0] for name in ("a", "b", "c", "#1")} == {2}
    assert found["a"] == (2, 4)
    assert found["a/n"] == (5, 2)
    assert found["a/#1"] == (5, 1)
    assert layout.length == 6
    assert layout.placement == "compact"


def test_tokens_are_counted_once_for_each_run_of_text() -> None:
    asked: list[str] = []

    def count(text: str) -> int:
        asked.append(text)
        return 1

    module = pml.Module("m", (pml.Text("c"), pml.Parameter("p", 2, "x")))
    pml.lay_out(pml.Schema("s", (pml.Text("a"), pml.Text("b"), module, pml.Text("d"))), count)
    assert asked == ["ab", "c", "x", "d"]


def enough(text: str) -> int:
    return min(len(text), 5)  # so that every scaffold fits with a parameter of 5 or more


def widened(node: object) -> object:
    """The same tree with parameters that hold any scaffold."""
    match node:
        case pml.Parameter():
            return pml.Parameter(node.name, node.length + 5, node.scaffold)
        case pml.Module():
            return pml.Module(node.name, tuple(map(widened, node.children)))
        case pml.Union():
            return pml.Union(tuple(map(widened, node.members)))
        case pml.Chat():
            return pml.Chat(node.role, tuple(map(widened, node.children)))
        case _:
            return node


def check(
    nodes: tuple[object, ...], path: pml.Path, layout: pml.Layout, low: int, high: int
) -> int:
    """Check that siblings follow each other and union members share their start; return the end."""
    for node in nodes:
        match node:
            case pml.Module():
                span = layout[(*path, node.name)]
                assert span.start == low
                assert check(node.children, span.path, layout, low, span.end) == span.end
                low = span.end
            case pml.Union():
                ends = [check((member,), path, layout, low, high) for member in node.members]
                low = max(ends, default=low)
            case pml.Chat():
                low = check(node.children, path, layout, low, high)
            case pml.Text():
                low += enough(node.text)
            case pml.Parameter():
                own = (*path, "@" + node.name)
                assert layout[own] == pml.PositionSpan(own, low, node.length)
                low += node.length
    assert low <= high
    return low


@given(schemas())
def test_spans_never_overlap_except_in_unions(schema: pml.Schema) -> None:
    schema = pml.Schema(schema.name, tuple(map(widened, schema.children)))
    layout = pml.lay_out(schema, enough)
    assert check(schema.children, (), layout, 0, layout.length) == layout.length
    assert all(0 <= span.start <= span.end <= layout.length for span in layout.spans)
    assert len({span.path for span in layout.spans}) == len(layout.spans)
    compact = pml.lay_out(schema, enough, "compact")
    assert [span.path for span in compact.spans] == [span.path for span in layout.spans]
    assert all(c.start <= f.start for c, f in zip(compact.spans, layout.spans, strict=True))
