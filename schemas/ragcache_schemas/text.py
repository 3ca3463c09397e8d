"""The text of PML: white space, the characters that XML carries, and names.

White space. A *flow* is the text between two tags of modules, unions or turns; a parameter is part
of its flow, like a word. White space that only lays out the file is dropped:

1. a flow of white space has no text;
2. a flow that begins with a line break loses its leading blank lines and the indentation that all
   its lines share; one that begins on the line of the tag keeps all of it, since code might;
3. white space at the end of a flow that holds a line break becomes one line break;
4. everything else is kept as written.

CDATA and character references are only ways to write text: the same rule holds for them. Under
`xml:space="preserve"` (and until a nested `xml:space="default"`) every character counts.

Names. A prompt imports a module as an element and gives an argument as an attribute, so both names
are XML names without a colon: letters of any script, digits, dots, dashes and underscores, not
beginning with a digit, dot or dash. Schemas and collections are only ever named in attributes.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable

from ragcache_schemas.errors import InvalidName, PMLError, ReservedName
from ragcache_schemas.tree import Location

WHITE = " \t\n"
PARAMETER = "\0"  # marks a parameter in a flow; XML text cannot hold it


def tidy(flow: str) -> str:
    """Return `flow` without the white space that only lays out the file. Idempotent."""
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
    low, high = min(indents), max(indents)  # all indents share the common start of these two
    shared = 0
    while shared < len(low) and low[shared] == high[shared]:
        shared += 1
    if not shared:
        return text
    return "\n".join(line[shared:] if line.strip(WHITE) else "" for line in lines)


NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_BREAKS = re.compile("\n?[\v\f]+\n?")


def sanitize_text(text: str) -> str:
    """Remove the characters that XML, and so PML, cannot carry.

    A form feed or vertical tab becomes a line break, unless it is next to one. A lone surrogate
    becomes U+FFFD. Other control characters, which are invisible to readers, are removed.

    Example:
        >>> sanitize_text("page one\\fpage two")
        'page one\\npage two'
    """
    if NOT_XML.search(text) is None:
        return text
    text = _BREAKS.sub("\n", text)
    return NOT_XML.sub(lambda found: "\ufffd" if "\ud800" <= found[0] <= "\udfff" else "", text)


ROLES = ("system", "user", "assistant")
RESERVED = frozenset(
    {"schema", "prompt", "module", "union", "scaffold", "param", "parameter", *ROLES}
)

# XML 1.0, fifth edition, productions 4 and 4a, without the colon.
_START = (
    r"A-Z_a-z\u00C0-\u00D6\u00D8-\u00F6\u00F8-\u02FF\u0370-\u037D\u037F-\u1FFF\u200C\u200D"
    r"\u2070-\u218F\u2C00-\u2FEF\u3001-\uD7FF\uF900-\uFDCF\uFDF0-\uFFFD\U00010000-\U000EFFFF"
)
_MORE = _START + r"\-.0-9\u00B7\u0300-\u036F\u203F\u2040"
_NAME = re.compile(f"[{_START}][{_MORE}]*")
_NOT_IN_NAME = re.compile(f"[^{_MORE}]+")
_TITLE = re.compile(r"\S(?:[^\x00-\x1f\x7f\ud800-\udfff\ufffe\uffff]*\S)?")


def is_name(name: str) -> bool:
    """Whether a prompt can use `name` as the name of an element or an attribute."""
    return _NAME.fullmatch(name) is not None


def name_problem(
    name: str, what: str, location: Location | None = None, element: str | None = None
) -> PMLError | None:
    """Return the error of naming a `what` ("module" or "parameter") `name`, if any."""
    if not is_name(name):
        return InvalidName(
            f"{name!r} cannot be the name of a {what}",
            location,
            element,
            "a name is made of letters, digits, '.', '-' and '_', and begins with a letter or '_'",
        )
    if name[:3].lower() == "xml":
        reason = "names beginning with 'xml' belong to XML"
    elif what == "module" and name in RESERVED:
        reason = f"<{name}> already means something in PML"
    elif what == "parameter" and name == "schema":
        reason = "a prompt names its schema in that attribute"
    else:
        return None
    return ReservedName(f"the {what} name {name!r} is reserved", location, element, reason)


def title_problem(
    title: str, what: str, location: Location | None = None, element: str | None = None
) -> PMLError | None:
    """Return the error of naming a `what` (schema, collection, slot) `title`, if any."""
    if _TITLE.fullmatch(title):
        return None
    expected = "give one line of text without white space around it"
    return InvalidName(f"{title!r} cannot be the name of a {what}", location, element, expected)


def module_name(text: str) -> str:
    """Make a valid module name from a file name or a title, the same on every run.

    Different texts may give the same name. `module_names` makes unique ones.

    Example:
        >>> module_name("docs/leave policy.md")
        'docs-leave-policy.md'
    """
    name = _NOT_IN_NAME.sub("-", text).strip("-") or "document"
    if not is_name(name):
        name = "_" + name
    return name if name_problem(name, "module") is None else "_" + name


def module_names(texts: Iterable[str]) -> dict[str, str]:
    """Make a unique module name for each of `texts`, by `module_name` where possible.

    If several texts have the same name, the text equal to it keeps it, and each of the others gets
    a suffix made from itself. The order of `texts` therefore does not matter.
    """
    plain = {text: module_name(text) for text in texts}
    shared = {name for name, count in Counter(plain.values()).items() if count > 1}
    return {
        text: name if name == text or name not in shared else f"{name}-{_suffix(text)}"
        for text, name in plain.items()
    }


def _suffix(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
