"""Named errors of the PML language.

The message of a `PMLError` says what went wrong, where (source, line and column, counted from 1)
and how to fix it. A `PMLWarning` marks text that is accepted, though PML should be written
otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ragcache_schemas.tree import Location


class _Located:
    """Base of errors and warnings with a place in a file."""

    location: Location | None

    @property
    def source(self) -> str:
        """Name of the file, or "<string>"."""
        return self.location.source if self.location else "<string>"

    @property
    def line(self) -> int | None:
        """Line, counted from 1."""
        return self.location.line if self.location else None

    @property
    def column(self) -> int | None:
        """Column in characters, counted from 1."""
        return self.location.column if self.location else None


class PMLError(_Located, ValueError):
    """An error of a schema or a prompt.

    Args:
        problem: The problem, as a phrase.
        location: Place of the problem. Trees that a program built have no places, so that `line`
            and `column` are None.
        element: Name of the element with the problem.
        expected: Advice on what to write instead.
    """

    def __init__(
        self,
        problem: str,
        location: Location | None = None,
        element: str | None = None,
        expected: str | None = None,
    ) -> None:
        super().__init__(problem, location, element, expected)
        self.problem = problem
        self.location = location
        self.element = element
        self.expected = expected

    def __str__(self) -> str:
        where = f"{self.location}: " if self.location else ""
        advice = f"; {self.expected}" if self.expected else ""
        return f"{where}{self.problem}{advice}"


class PMLSyntaxError(PMLError):
    """Not well-formed XML, or text that XML cannot carry."""


class ForbiddenMarkup(PMLSyntaxError):
    """A DTD, an entity or a processing instruction: PML has none of them."""


class LimitExceeded(PMLError):
    """Larger, deeper or with more elements than `ScanLimits` allows."""


class UnknownElement(PMLError):
    """An element that PML does not have, or that is in the wrong place."""


class MisplacedText(PMLError):
    """Text in a place where none is allowed, such as directly inside a union."""


class InvalidAttribute(PMLError):
    """An attribute that is missing, unknown or malformed."""


class InvalidName(PMLError):
    """A name that is no XML name, so that a prompt cannot import it as an element."""


class ReservedName(InvalidName):
    """A name that PML reserves."""


class DuplicateName(PMLError):
    """A name given twice in one scope."""


class UnknownName(PMLError):
    """No module, parameter, schema or union member has this name."""


class UnionConflict(PMLError):
    """Two members of one union. A prompt may hold one of them."""


class MissingArgument(PMLError):
    """A parameter of an imported module without its argument."""


class SpanTooLong(PMLError):
    """A text has more tokens than its parameter holds."""


class TurnMismatch(PMLError):
    """Turns that the model's chat template cannot write, or that do not fit together."""


class ProgramError(PMLError):
    """A prompt program that cannot become a schema."""


class PMLWarning(_Located, UserWarning):
    """PML that is accepted, though it should be written otherwise."""

    def __init__(self, problem: str, location: Location | None = None) -> None:
        super().__init__(problem, location)
        self.problem = problem
        self.location = location

    def __str__(self) -> str:
        return f"{self.location}: {self.problem}" if self.location else self.problem
