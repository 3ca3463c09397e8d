"""Frozen sets of options (`Params`), and the base of classes that offer them (`Surface`).

An option is one field of a `Params` class: type, bounds, default, and its documentation under it. A
surface, such as a request body, the LangChain chat model or the settings, is a pydantic class whose
bases are `Surface` and the option sets that it offers. This module depends on pydantic only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import wraps
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    Generic,
    ParamSpec,
    Self,
    TypeVar,
    overload,
)

from pydantic import (
    BaseModel,
    ConfigDict,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError

from ragcache.errors import InvalidRequest, RagCacheError

P = ParamSpec("P")
OptionsT = TypeVar("OptionsT")
Owner = TypeVar("Owner")
First = TypeVar("First")
Second = TypeVar("Second")
Result = TypeVar("Result")
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

_LIKENESS = 0.8  # of an unknown option to one that it is misspelled from


class Params(BaseModel):
    """A frozen set of options.

    An option that is None counts as left out. Options that can be turned off have another value for
    that: `0`, `False` or `"none"`.

    Raises:
        InvalidRequest: An option is unknown or out of its range. Subclasses set `error`.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=()
    )
    error: ClassVar[type[RagCacheError]] = InvalidRequest
    """Error that the constructor raises in place of pydantic's `ValidationError`."""

    if not TYPE_CHECKING:  # type checkers derive the constructor from the fields

        def __init__(self, **options: Any) -> None:
            try:
                super().__init__(**options)
            except ValidationError as error:
                raise self.error(explain(error, type(self))) from None

    @model_validator(mode="before")
    @classmethod
    def _drop_none(cls, options: Any) -> Any:
        if not isinstance(options, Mapping):
            return options
        return {name: value for name, value in options.items() if value is not None}

    @classmethod
    def part_of(cls, wider: BaseModel) -> Self:
        """Return the options of this class that a wider model, such as a request body, holds."""
        names = cls.model_fields.keys() & wider.model_fields_set
        return cls(**{name: getattr(wider, name) for name in names})

    def given(self) -> dict[str, Any]:
        """Return the options that were given, by name. Leaves out defaults.

        Example:
            >>> from ragcache.params import GenerationParams
            >>> GenerationParams(n=2).given()
            {'n': 2}
        """
        return {name: value for name, value in self if name in self.model_fields_set}

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some options changed.

        Args:
            **changes: The options. None restores the default.

        Raises:
            InvalidRequest: An option is unknown or out of its range; see `Params`.

        Example:
            >>> from ragcache.params import GenerationParams
            >>> GenerationParams(n=2, temperature=0.5).replace(n=3)
            GenerationParams(temperature=0.5, n=3)
        """
        return type(self)(**self.given() | changes)

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        return self.given().items()


def with_signature(function: FunctionT, signature: inspect.Signature) -> FunctionT:
    """Set the signature of a function, which `help`, editors and Typer read, and return it."""
    function.__signature__ = signature  # type: ignore[attr-defined]  # unknown to mypy
    return function


class TakesOptions(Generic[P, OptionsT]):
    """Decorator of a method whose last parameter, `options`, is an option set.

    Callers give the options as keywords, which type checkers read from the constructor of the set,
    and `help` and editors from the signature. Type checkers take the parameters before `options`
    by position only.

    Example:
        >>> from ragcache.params import SearchParams
        >>> class Library:
        ...     @TakesOptions(SearchParams)
        ...     def find(self, query: str, options: SearchParams) -> str:
        ...         return f"{options.k} about {query}"
        >>> Library().find("kilns", k=2)
        '2 about kilns'
    """

    def __init__(self, options: Callable[P, OptionsT]) -> None:
        self._options: Callable[..., OptionsT] = options

    @overload
    def __call__(
        self, method: Callable[[Owner, First, OptionsT], Result]
    ) -> Callable[Concatenate[Owner, First, P], Result]: ...

    @overload
    def __call__(
        self, method: Callable[[Owner, First, Second, OptionsT], Result]
    ) -> Callable[Concatenate[Owner, First, Second, P], Result]: ...

    def __call__(self, method: Callable[..., Result]) -> Callable[..., Result]:
        signature = inspect.signature(method)
        *before, _ = signature.parameters.values()
        names = [each.name for each in before]

        @wraps(method)
        def called(*given: Any, **options: Any) -> Result:
            named = {name: options.pop(name) for name in names if name in options}
            return method(*given, **named, options=self._options(**options))

        keywords = inspect.signature(self._options).parameters.values()
        return with_signature(called, signature.replace(parameters=[*before, *keywords]))


class Surface(BaseModel):
    """First base of a class that offers options, such as a request body.

    The constructor raises pydantic's `ValidationError`, with the location of the field. The class
    must list `Surface` before every option set among its bases.
    """

    withheld: ClassVar[Mapping[str, str]] = {}
    """Inherited options that the class does not offer, each with a reason for the caller."""

    if not TYPE_CHECKING:
        __init__ = BaseModel.__init__  # before `Params.__init__` in the order of bases

    @model_validator(mode="before")
    @classmethod
    def _refuse_withheld(cls, options: Any) -> Any:
        given = options if isinstance(options, Mapping) else {}
        refused = [
            InitErrorDetails(
                type=PydanticCustomError(
                    "withheld", "{name} is not offered here: {why}", {"name": name, "why": why}
                ),
                loc=(name,),
                input=given[name],
            )
            for name, why in cls.withheld.items()
            if given.get(name) not in (None, cls.model_fields[name].default)
        ]
        if refused:
            raise ValidationError.from_exception_data(cls.__name__, refused)
        return options

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return the JSON schema: required fields first, none withheld, null for options left out.

        An option with a default also takes null, which leaves it out.
        """
        schema = handler(core)
        resolved = handler.resolve_ref_schema(schema)
        required, properties = resolved.get("required", ()), resolved.get("properties", {})
        for name, field in cls.model_fields.items():
            if field.is_required() or field.default is None:
                continue
            each = properties[name]
            outer = {
                key: each.pop(key) for key in ("title", "description", "default") if key in each
            }
            properties[name] = {"anyOf": [*each.get("anyOf", [each]), {"type": "null"}], **outer}
        shown = [name for name in properties if name not in cls.withheld]
        resolved["properties"] = {
            name: properties[name] for name in sorted(shown, key=lambda name: name not in required)
        }
        return schema


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """Describe the first error in one sentence: the option, its value, and its allowed values."""
    errors = error.errors(include_url=False)
    misspelled = (each for each in errors if each["type"] == "extra_forbidden")
    first = next(misspelled, errors[0])  # it also explains why another option is missing
    name, kind, message = ".".join(map(str, first["loc"])), first["type"], first["msg"]
    known = ", ".join(model.model_fields)
    if kind == "extra_forbidden":
        near = "".join(get_close_matches(name, model.model_fields, 1, _LIKENESS))
        return f"unknown option {name!r}{near and f', like {near!r}'}; options: {known}"
    if kind == "missing":
        return f"the option {name!r} is missing; options: {known}"
    if kind in ("value_error", "withheld"):
        text = message.removeprefix("Value error, ")
        return text if not name or text.startswith(name) else f"{name}: {text}"
    field = model.model_fields.get(str(first["loc"][0]))
    takes = message.replace("Input should", "it must")
    if field is not None and kind.startswith(("greater_than", "less_than")):
        takes = f"it must be {bounds(field)}"
    return f"{name} is {first['input']!r:.80}; {takes}"


def bounds(field: FieldInfo) -> str:
    """Describe the bounds of a number, such as `from 0 to 100`. Empty if it has no bounds."""
    low, high, above = None, None, False
    for each in field.metadata:
        low = getattr(each, "ge", getattr(each, "gt", low))
        high = getattr(each, "le", high)
        above = above or hasattr(each, "gt")
    if low is None:
        return "" if high is None else f"at most {high}"
    if high is None:
        return f"above {low}" if above else f"at least {low}"
    return f"above {low} and at most {high}" if above else f"from {low} to {high}"
