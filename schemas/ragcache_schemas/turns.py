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
    balancing = _Balancing()
    for tag in tags:
        if not balancing.stack and tag is not tags[0] and tag.kind != "end":
            problem = f"<{tag.name}> after the end of <{tags[0].name}>"
            expected = "a text holds one schema or one prompt"
            raise PMLSyntaxError(problem, tag.location, tag.name, expected)
        if tag.kind == "end":
            balancing.end(tag)
        else:
            balancing.start(tag)
    if balancing.stack:
        raise _never_closed(balancing.stack[-1].tag)
    return sorted(balancing.edits, key=lambda edit: edit.offset), balancing.warnings


class _Balancing:
    def __init__(self) -> None:
        self.stack: list[_Open] = []
        self.edits: list[Edit] = []
        self.warnings: list[PMLWarning] = []

    def start(self, tag: Tag) -> None:
        turn = tag.name in ROLES
        if turn and self._in_turn():
            self._close_turn(tag.start)
        if tag.kind == "start":
            self.stack.append(_Open(tag, tag.end))
        elif turn:
            self._move_anchor(tag.end)

    def end(self, tag: Tag) -> None:
        turn = tag.name in ROLES
        if self._in_turn() and not turn:
            self._close_turn(tag.start)
        if self.stack and self.stack[-1].tag.name == tag.name:
            self.stack.pop()
            if turn:
                self._move_anchor(tag.end)
        elif turn and self.stack and not any(one.tag.name in ROLES for one in self.stack):
            self._open_turn(tag)
        else:
            raise _mismatch(tag, self.stack)

    def _in_turn(self) -> bool:
        return bool(self.stack) and self.stack[-1].tag.name in ROLES

    def _move_anchor(self, offset: int) -> None:
        if self.stack:
            self.stack[-1].anchor = offset

    def _open_turn(self, tag: Tag) -> None:
        self.edits.append(Edit(self.stack[-1].anchor, f'<{tag.name} opens="no">'))
        self._move_anchor(tag.end)
        problem = f'</{tag.name}> was never opened; write <{tag.name} opens="no">...</{tag.name}>'
        self.warnings.append(PMLWarning(problem, tag.location))

    def _close_turn(self, offset: int) -> None:
        tag = self.stack.pop().tag
        self.edits.append(Edit(tag.end - 1, ' closes="no"'))
        self.edits.append(Edit(offset, f"</{tag.name}>"))
        self._move_anchor(offset)
        problem = f'<{tag.name}> is never closed; write <{tag.name} closes="no">...</{tag.name}>'
        self.warnings.append(PMLWarning(problem, tag.location))


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
