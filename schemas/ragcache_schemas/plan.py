"""What a prompt comes to (Prompt Cache, §3.4): which text stands where, and what is reused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from .layout import Placement
from .tree import Location, Path, Role, Scaffold

__all__ = ["Piece", "PieceKind", "Plan"]

PieceKind: TypeAlias = Literal["module", "argument", "new"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of text and the positions of its tokens: `length` of them from `start` on.

    A piece of a "module" has its states in the store (if `cached`), encoded with the module at
    `path[:-1]` from the position `canonical` on; `start - canonical` is how far they move. An
    "argument" and "new" text are computed. An argument's tokens take over the first positions of
    the `reserved` ones of its parameter; the placeholder's states never take part (§3.3).
    """

    kind: PieceKind
    path: Path
    text: str
    start: int
    length: int
    canonical: int
    role: Role | None = None
    cached: bool = False
    reserved: int = 0
    location: Location | None = field(default=None, compare=False, repr=False, kw_only=True)

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Plan:
    """A prompt resolved against its schema.

    `modules` are the imported modules and `pieces` everything in the prompt, anonymous text of the
    schema included, both in the order of the positions. `scaffolds` are those whose modules are
    all imported: their states override the single ones (§3.3). `length` is the first position
    after the prompt.

    `crowded` are new texts with more tokens than there are free positions before the next module:
    they share positions with it. The paper assumes gaps there; a parameter makes one, and the
    placement "compact" never crowds.
    """

    schema: str
    placement: Placement
    modules: tuple[Path, ...]
    pieces: tuple[Piece, ...]
    scaffolds: tuple[Scaffold, ...]
    length: int
    crowded: tuple[Piece, ...] = ()

    @property
    def cached_tokens(self) -> int:
        """Tokens whose states are reused."""
        return sum(piece.length for piece in self.pieces if piece.cached)

    @property
    def computed_tokens(self) -> int:
        """Tokens whose states are computed for this prompt."""
        return sum(piece.length for piece in self.pieces if not piece.cached)
