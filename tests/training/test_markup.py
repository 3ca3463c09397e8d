"""Files in several formats become the blocks that a reader would read."""

from __future__ import annotations

import json

import pytest
from markup import CONVERTERS, markdown

MARKDOWN = """---
title: Leave
---
# Annual *leave*

You get **25 days** a year, see [the rules](https://example.org/rules "Rules").
They start in `April`.

```python
secret = 1
```

* Ask your manager.
* Fill in <b>Form 4</b>.

| a | b |
|---|---|
"""

RST = """Leave
=====

You get *25 days* a year, see :ref:`the rules <rules>`::

    secret = 1

.. note::
   Hidden words.

They start in ``April``.
"""

HTML = """<html><head><style>p {}</style></head><body><h2>Leave</h2><div><p>You get <b>25 days</b>
a year.</p><pre>secret</pre><ul><li>Ask your manager.</li></ul></div></body></html>"""

CNXML = """<document xmlns="http://cnx.rice.edu/cnxml"><title>Leave</title><content><section>
<para id="1">You get 25 days<note/> a year.</para><exercise><para>Secret?</para></exercise>
</section></content></document>"""

BOOK = """Produced by nobody

*** START OF THIS PROJECT GUTENBERG EBOOK LEAVE ***

You get 25
days a _year_.

*** END OF THIS PROJECT GUTENBERG EBOOK ***
secret
"""


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (
            "markdown",
            MARKDOWN,
            [
                "# Annual leave",
                "You get 25 days a year, see the rules. They start in April.",
                "Ask your manager.",
                "Fill in Form 4.",
            ],
        ),
        ("rst", RST, ["# Leave", "You get 25 days a year, see the rules:", "They start in April."]),
        ("xml", HTML, ["# Leave", "You get 25 days a year.", "Ask your manager."]),
        ("xml", CNXML, ["# Leave", "You get 25 days a year."]),
        ("book", BOOK, ["You get 25 days a year."]),
        (
            "facts",
            json.dumps({"Leave": {"Days": {"text": "25 <b>days</b>"}}}),
            ["# Leave", "Days: 25 days"],
        ),
    ],
)
def test_formats_become_readable_blocks(form: str, text: str, expected: list[str]) -> None:
    assert CONVERTERS[form](text) == expected


def test_wrapped_chinese_is_joined_without_a_space() -> None:
    assert markdown("年假共有\n二十五天。\n") == ["年假共有二十五天。"]
