"""Pages of the documentation that are generated from the code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

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


@pytest.mark.parametrize(
    ("page", "link", "built"),
    [
        ("start.md", "notebooks/ten-minutes.ipynb", "notebooks/ten-minutes.md"),
        ("notebooks/langchain.md", "langchain.ipynb", "langchain.ipynb"),
        ("start.md", "guides/ask.md#chat", "guides/ask.md#chat"),
    ],
)
def test_links_to_notebooks_lead_to_their_pages(page: str, link: str, built: str) -> None:
    from tools.docs_site import on_page_markdown

    shown: Any = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    assert on_page_markdown(f"Read [this]({link}).", shown) == f"Read [this]({built})."
