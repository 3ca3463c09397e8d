"""Pages of the documentation that are generated from the code."""

from __future__ import annotations

import pytest

pytest.importorskip("mkdocs", reason="the site's tools are not installed")


def test_reference_tells_fields_by_dialect() -> None:
    from tools.docs_site import rest_page

    page = rest_page()
    messages = page.partition("### /v1/messages\n")[2].partition("\n## ")[0]
    served = next(line for line in messages.splitlines() if line.endswith("| served | |"))
    assert "`system`" in served
    assert "`stop_sequences`" in served
    assert "| `container` | refused | the service runs no code |" in messages
    assert "| `metadata` | ignored | a client's own record |" in messages
    chats = page.partition("### /v1/chat/completions\n")[2].partition("\n### ")[0]
    assert "`priority`" not in chats, "the service withholds it"
