"""Characters that XML cannot carry, and so PML cannot."""

from __future__ import annotations

import re

__all__ = ["NOT_XML", "carried_text"]

NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_BREAKS = re.compile("\n?[\v\f]+\n?")


def carried_text(text: str) -> str:
    """`text` as PML can carry it; a text that it can carry stays as it is.

    A form feed or vertical tab becomes a line break, unless one stands beside it. Lone surrogates
    become U+FFFD. All other control characters, which no reader would see, go.
    """
    if NOT_XML.search(text) is None:
        return text
    text = _BREAKS.sub("\n", text)
    return NOT_XML.sub(lambda found: "\ufffd" if "\ud800" <= found[0] <= "\udfff" else "", text)
