"""Modes of reuse: how a question reads the kept states of its documents.

Each kind of mode is one row of `KINDS`, with its name, its encoding, its number and its help text.
All other modules ask a `ReuseMode` for its properties and never compare names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from ragcache.errors import ConfigurationError

if TYPE_CHECKING:
    from pydantic_core import CoreSchema

Compose = Literal["order", "both"]
"""How documents compose in recurrent layers: in the order of the prompt, or as the mean of the
states behind this order and behind its reverse."""

COMPOSITIONS: Final[tuple[Compose, ...]] = ("order", "both")
"""All ways in which documents compose."""

Encoding = Literal["rooted", "primed", "isolated"]
"""How the states of a module are encoded."""

AFTER_PREAMBLE: Final = "rooted"
"""The encoding in which a module's tokens see the preamble of the prompts."""

AFTER_OTHER_TEXT: Final = "primed"
"""The encoding in which a module's tokens see the preamble and a priming text, which prompts do not
contain."""

WITHOUT_CONTEXT: Final = "isolated"
"""The encoding in which a module's tokens see only their own module."""


@dataclass(frozen=True, slots=True)
class ModeKind:
    """One kind of reuse."""

    name: str
    """The mode's name, in front of the colon."""
    encoding: Encoding | None
    """How the states of a prompt's first module are encoded. A mode without an encoding reads
    none."""
    help: str
    """A sentence for users."""
    most: int = 0
    """Largest number after the colon: of tokens at the front of each later module that are computed
    in context. 0 for kinds without a number."""
    most_measured: int = 0
    """Largest number whose distance from `exact` is measured."""
    later_encoding: Encoding | None = None
    """How the states of further modules are encoded. Defaults to `encoding`."""

    @property
    def spelling(self) -> str:
        """The form that users write, such as `primed[:N]`."""
        return f"{self.name}[:N]" if self.most else self.name

    @property
    def pattern(self) -> str:
        """Regular expression of the mode's texts."""
        digits = len(str(self.most)) - 1
        return f"{self.name}(:[1-9][0-9]{{0,{digits}}})?" if self.most else self.name


_MOST_TOKENS, _MOST_MEASURED = 999_999, 32
_ROOTED = ModeKind(
    "rooted",
    AFTER_PREAMBLE,
    "States that were encoded after the preamble; with N, the first N tokens of modules after the "
    "first are computed in context.",
    _MOST_TOKENS,
    _MOST_MEASURED,
)
_PRIMED = ModeKind(
    "primed",
    AFTER_PREAMBLE,
    "As rooted, but modules after the first have states that were encoded behind other text.",
    _MOST_TOKENS,
    _MOST_MEASURED,
    AFTER_OTHER_TEXT,
)
_ISOLATED = ModeKind("isolated", WITHOUT_CONTEXT, "States that were encoded without any context.")
_EXACT = ModeKind("exact", None, "No states: an ordinary prefill.")

KINDS = {kind.name: kind for kind in (_ROOTED, _PRIMED, _ISOLATED, _EXACT)}
"""All kinds of reuse by name, in the order in which users read about them."""


@dataclass(frozen=True, slots=True)
class ReuseMode:
    """A kind of reuse with its number, such as `primed:16`.

    Pydantic models may have fields of this type. They are validated by `parse` and serialized as
    the text.

    Example:
        >>> ReuseMode.parse("primed:16").amount
        16
    """

    kind: ModeKind
    amount: int = 0
    """The number after the colon: of tokens at the front of each module after the first that are
    computed in context."""

    @classmethod
    def parse(cls, text: str | ReuseMode) -> ReuseMode:
        """Parse a mode as users write it. A `ReuseMode` is returned unchanged.

        Raises:
            ConfigurationError: The kind is unknown, or its number is out of bounds.
        """
        if isinstance(text, ReuseMode):
            return text
        name, colon, number = str(text).partition(":")
        kind = KINDS.get(name)
        if kind is None or (colon and not kind.most):
            raise ConfigurationError(f"unknown mode {text!r:.80}; modes: {spellings()}")
        if not colon:
            return cls(kind)
        if not (number.isascii() and number.isdigit() and number[0] != "0" and len(number) < 10):
            raise ConfigurationError(
                f"mode is {text!r:.80}; write {kind.spelling}, such as {name}:16"
            )
        if int(number) > kind.most:
            raise ConfigurationError(f"mode is {text!r:.80}; it takes 1 to {kind.most} tokens")
        return cls(kind, int(number))

    def __str__(self) -> str:
        return f"{self.kind.name}:{self.amount}" if self.amount else self.kind.name

    @property
    def encoding(self) -> Encoding | None:
        """How the states of a prompt's first module are encoded, if the mode reads states."""
        return self.kind.encoding

    def encoding_at(self, place: int) -> Encoding | None:
        """Return how the states of a prompt's module number `place` are encoded, from 0."""
        return self.kind.later_encoding or self.encoding if place else self.encoding

    @property
    def encodings(self) -> tuple[Encoding, ...]:
        """All encodings of the states that this mode reads."""
        both = self.encoding, self.kind.later_encoding
        return tuple(dict.fromkeys(each for each in both if each is not None))

    @property
    def reads_states(self) -> bool:
        """Whether kept states are read. False for `exact`, which computes every token."""
        return self.kind.encoding is not None

    @property
    def reads_parts(self) -> bool:
        """Whether parts of modules are read, and their other tokens computed."""
        return bool(self.amount)

    def leading_tokens(self, size: int, *, follows_preamble: bool = False) -> int:
        """Return the number of tokens at the front of a module that are computed instead of read.

        The tokens see what comes before them in the prompt (EPIC's LegoLink, Hu et al., 2024).

        Args:
            size: Number of tokens of the module.
            follows_preamble: Whether the module comes right after the preamble. States that were
                encoded there are then exact already.
        """
        if not self.reads_states:
            return size
        if follows_preamble and self.encoding == AFTER_PREAMBLE:
            return 0
        return min(self.amount, size)

    @property
    def measured(self) -> ReuseMode:
        """The mode that the gate measures in place of this one.

        Numbers are rounded down to a power of two, so that few modes have to be measured.
        """
        if not self.amount:
            return self
        power = 1 << (self.amount.bit_length() - 1)
        return ReuseMode(self.kind, min(power, self.kind.most_measured))

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, __: Any) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.to_string_ser_schema()
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, _: Any, __: Any) -> dict[str, Any]:
        pattern = "|".join(kind.pattern for kind in KINDS.values())
        return {"type": "string", "pattern": f"^({pattern})$", "description": describe_kinds()}


def spellings() -> str:
    """Return the forms of all modes as users write them, separated by commas."""
    return ", ".join(kind.spelling for kind in KINDS.values())


def describe_kinds() -> str:
    """Return a paragraph for users that describes every kind of mode."""
    return " ".join(f"`{kind.spelling}`: {kind.help}" for kind in KINDS.values())


ROOTED, ISOLATED, EXACT = ReuseMode(_ROOTED), ReuseMode(_ISOLATED), ReuseMode(_EXACT)
PRIMED = ReuseMode(_PRIMED)

GATED = (
    ROOTED,
    PRIMED,
    ReuseMode(_ROOTED, 16),
    ReuseMode(_PRIMED, 16),
    ISOLATED,
)
"""Modes that the gate measures by default."""
