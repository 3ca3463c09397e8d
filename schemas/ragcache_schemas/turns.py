"""Balances chat tags, which the reference implementation's generators leave unbalanced.

There the tags are replaced as plain text, so a schema may end inside a turn and the prompt go on
in it: `<schema><user>...</schema>` with `<prompt>...</user><assistant>Answer:</prompt>`. Such turns
are completed here and marked `closes="no"` or `opens="no"`, which is also how to write them in
well-formed PML.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import PMLSyntaxError, PMLWarning
from .names import ROLES
from .scanner import CDATA_ADVICE, Edit, Tag

__all__ = ["apply", "balance"]


@dataclass(slots=True)
class _Open:
    tag: Tag
    anchor: int  # where a turn that is closed here without being opened would begin


def balance(tags: list[Tag]) -> tuple[list[Edit], list[PMLWarning]]:
    """The edits that complete unbalanced turns, in order, with a warning for each.

    Raises PMLSyntaxError for any other tag that does not match.
    """
    stack: list[_Open] = []
    edits: list[Edit] = []
    warnings: list[PMLWarning] = []

    def close_turn(at: int) -> None:
        turn = stack.pop().tag
        edits.append(Edit(turn.end - 1, ' closes="no"'))
        edits.append(Edit(at, f"</{turn.name}>"))
        problem = f'<{turn.name}> is never closed; write <{turn.name} closes="no">...</{turn.name}>'
        warnings.append(PMLWarning(problem, turn.location))
        if stack:
            stack[-1].anchor = at

    for tag in tags:
        if not stack and tag is not tags[0] and tag.kind != "end":
            problem = f"<{tag.name}> after the end of <{tags[0].name}>"
            expected = "a text holds one schema or one prompt"
            raise PMLSyntaxError(problem, tag.location, tag.name, expected)
        if tag.kind != "end":
            if tag.name in ROLES and stack and stack[-1].tag.name in ROLES:
                close_turn(tag.start)
            if tag.kind == "start":
                stack.append(_Open(tag, tag.end))
            elif tag.name in ROLES and stack:
                stack[-1].anchor = tag.end
            continue
        if stack and stack[-1].tag.name in ROLES and tag.name not in ROLES:
            close_turn(tag.start)
        if stack and stack[-1].tag.name == tag.name:
            stack.pop()
            if stack and tag.name in ROLES:
                stack[-1].anchor = tag.end
        elif tag.name in ROLES and stack and not any(o.tag.name in ROLES for o in stack):
            edits.append(Edit(stack[-1].anchor, f'<{tag.name} opens="no">'))
            stack[-1].anchor = tag.end
            problem = f'</{tag.name}> was never opened; write <{tag.name} opens="no">...'
            warnings.append(PMLWarning(problem, tag.location))
        else:
            raise _mismatch(tag, stack)
    if stack:
        raise _never_closed(stack[-1].tag)
    return sorted(edits, key=lambda edit: edit.offset), warnings


def apply(text: str, edits: list[Edit]) -> str:
    """`text` with the edits made."""
    parts: list[str] = []
    done = 0
    for edit in edits:
        parts += text[done : edit.offset], edit.insert
        done = edit.offset
    return "".join(parts) + text[done:]


def _mismatch(tag: Tag, stack: list[_Open]) -> PMLSyntaxError:
    if not stack:
        problem = f"</{tag.name}> closes nothing"
        return PMLSyntaxError(problem, tag.location, tag.name, "remove it")
    opened = stack[-1].tag
    where = f"line {opened.location.line}, column {opened.location.column}"
    problem = f"</{tag.name}> where </{opened.name}> is due, which was opened at {where}"
    expected = f"close <{opened.name}> first; in text, {CDATA_ADVICE}"
    return PMLSyntaxError(problem, tag.location, opened.name, expected)


def _never_closed(tag: Tag) -> PMLSyntaxError:
    expected = f"add </{tag.name}>; in text, {CDATA_ADVICE}"
    return PMLSyntaxError(f"<{tag.name}> is never closed", tag.location, tag.name, expected)
