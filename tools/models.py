"""The table of docs/guides/models.md, made from the registry of families.

python -m tools.models          # prints the page with the table as it should be
python -m tools.models --write  # writes it
"""

from __future__ import annotations

import sys

from ragcache.models.families import FAMILIES, LEARNED, NORMED_LATER
from tools.written_page import DOCS, WrittenPage


def models_table() -> str:
    """A row for each type of model that is served, by name."""
    rows = [
        "| `model_type` | positions | a document's states move | on a GPU |",
        "|---|---|---|---|",
    ]
    for model_type, family in sorted(FAMILIES.items()):
        moves = "no" if family.positions in (LEARNED, NORMED_LATER) else "yes"
        device = "kernels" if family.kernels else "the definition"
        if family.recurrent:
            moves = "composes"
        positions = f"{family.positions}; {family.recurrent}".removesuffix("; ")
        rows.append(f"| `{model_type}` | {positions} | {moves} | {device} |")
    return "\n".join(rows) + "\n"


PAGE = WrittenPage(DOCS / "guides" / "models.md", "python -m tools.models --write", models_table)

if __name__ == "__main__":
    PAGE.main(sys.argv[1:])
