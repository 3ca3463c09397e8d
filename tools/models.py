"""The table of docs/guides/models.md, made from the registry of families.

python tools/models.py          # prints the page with the table as it should be
python tools/models.py --write  # writes it
"""

from __future__ import annotations

import sys
from pathlib import Path

from ragcache.models.families import FAMILIES, LEARNED, NORMED_LATER

PAGE = Path(__file__).parent.parent / "docs" / "guides" / "models.md"
BEGIN, END = "<!-- begin: python tools/models.py --write -->\n", "<!-- end -->\n"


def models_table() -> str:
    """A row for each type of model that is served, by name."""
    rows = [
        "| `model_type` | positions | a document's states move | on a GPU |",
        "|---|---|---|---|",
    ]
    for model_type, family in sorted(FAMILIES.items()):
        moves = "no" if family.positions in (LEARNED, NORMED_LATER) else "yes"
        device = "kernels" if family.kernels else "the definition"
        rows.append(f"| `{model_type}` | {family.positions} | {moves} | {device} |")
    return "\n".join(rows) + "\n"


def page_with_table(page: str) -> str:
    """The page with the table between its marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}{models_table()}{END}{after}"


def main(arguments: list[str]) -> None:
    text = page_with_table(PAGE.read_text(encoding="utf-8"))
    if "--write" in arguments:
        PAGE.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main(sys.argv[1:])
