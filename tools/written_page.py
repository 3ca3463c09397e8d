"""Pages of the documentation with a part that a program writes, between two marks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
_END = "<!-- end -->\n"


@dataclass(frozen=True, slots=True)
class WrittenPage:
    """A page whose part between `<!-- begin: COMMAND -->` and `<!-- end -->` a program writes."""

    path: Path
    command: str
    """Command that writes the part: `python -m MODULE --write`."""
    part: Callable[[], str]
    """Makes the part."""

    @property
    def stored(self) -> str:
        """The page as it is."""
        return self.path.read_text(encoding="utf-8")

    @property
    def written(self) -> str:
        """The page as it should be."""
        begin = f"<!-- begin: {self.command} -->\n"
        before, rest = self.stored.split(begin)
        _, after = rest.split(_END)
        return f"{before}{begin}{self.part()}{_END}{after}"

    def main(self, arguments: Sequence[str]) -> None:
        """Write the page if the arguments have `--write`, or else print it as it should be."""
        if "--write" in arguments:
            self.path.write_text(self.written, encoding="utf-8")
        else:
            sys.stdout.write(self.written)
