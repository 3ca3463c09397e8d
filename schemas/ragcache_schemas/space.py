r"""What white space in PML text means.

A *flow* is the text between two tags of modules, unions or turns; a parameter is part of the flow
that it stands in, like a word. White space that only lays out the file is not text:

1. a flow of white space alone is no text at all;
2. a flow that begins with a line break loses its leading blank lines and the indentation that all
   its lines share; one that begins on the line of the tag keeps all of it, since code might;
3. white space at the end of a flow that holds a line break becomes one line break;
4. everything else stays as it is written.

CDATA and character references are only ways to write text: the same rule holds for them. Under
`xml:space="preserve"` (and until a nested `xml:space="default"`) every character counts.
"""

from __future__ import annotations

__all__ = ["PARAMETER", "WHITE", "tidy"]

WHITE = " \t\n"
PARAMETER = "\0"  # stands for a parameter in a flow; XML text cannot hold it


def tidy(flow: str) -> str:
    """`flow` without the white space that only lays out the file. Idempotent."""
    core = flow.strip(WHITE)
    if not core:
        return ""
    head = flow[: len(flow) - len(flow.lstrip(WHITE))]
    tail = flow[len(flow.rstrip(WHITE)) :]
    if "\n" in tail:
        tail = "\n"
    if "\n" not in head:
        return head + core + tail
    return _dedent(head.rpartition("\n")[2] + core) + tail


def _dedent(text: str) -> str:
    lines = text.split("\n")
    indents = [line[: len(line) - len(line.lstrip(" \t"))] for line in lines if line.strip(WHITE)]
    low, high = min(indents), max(indents)  # what these two share at the start, all share
    shared = 0
    while shared < len(low) and low[shared] == high[shared]:
        shared += 1
    if not shared:
        return text
    return "\n".join(line[shared:] if line.strip(WHITE) else "" for line in lines)
