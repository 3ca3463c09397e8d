"""The table and the blocks of docs/guides/clients.md, made from the clients that are tested.

python -m tests.clients.guide          # prints the page as it should be
python -m tests.clients.guide --write  # writes it
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator

from tests.clients.table import CLIENTS, Client
from tools.written_page import DOCS, WrittenPage

LANGUAGES = {
    ".py": "python",
    ".mjs": "js",
    ".json": "json",
    ".jsonl": "json",
    ".yaml": "yaml",
    ".toml": "toml",
}
"""Languages of blocks by the suffix of the file; `sh` for all others."""


def sections() -> Iterator[str]:
    """The table of all clients, then a section for each, by groups."""
    yield "\n| client | version | |\n|---|---|---|\n"
    for client in CLIENTS:
        outcome = f"does not work: {client.fails}" if client.fails else "works"
        yield f"| [{client.title}]({client.url}) | {client.package[1]} | {outcome} |\n"
    for group in dict.fromkeys(client.group for client in CLIENTS):
        yield f"\n## {group}\n"
        for client in CLIENTS:
            if client.group == group:
                yield from section(client)
    yield "\n"


def section(client: Client) -> Iterator[str]:
    """Lines of a client: its installation, and its files as blocks to copy."""
    yield f"\n### {client.title}\n\n"
    if client.fails:
        yield f"The client does not work: {client.fails}.\n\n"
    if client.note:
        yield f"{client.note}\n\n"
    install = "npm install" if client.node else "pip install"
    yield f"```sh\n{install} {shlex.join(client.requirements)}\n```\n"
    for file in client.files:
        if file != client.script:
            yield f"\n`{file.relative_to(client.script.parent)}`:\n"
        text = file.read_text(encoding="utf-8")
        yield f"\n```{LANGUAGES.get(file.suffix, 'sh')}\n{text}```\n"


PAGE = WrittenPage(
    DOCS / "guides" / "clients.md",
    "python -m tests.clients.guide --write",
    lambda: "".join(sections()),
)

if __name__ == "__main__":
    PAGE.main(sys.argv[1:])
