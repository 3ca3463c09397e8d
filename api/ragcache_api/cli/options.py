"""Option sets as options of commands.

A command takes whole option sets: `def ask(question: str, params: GenerationParams) -> None`.
`expand_options` gives it one option for each field, with the field's first sentence as its help.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from ragcache.errors import ConfigurationError
from ragcache.params import GenerationParams, KeyParams, Params, SearchParams
from ragcache.params.base import bounds, with_signature
from ragcache_api.service_options import ServiceOptions


@dataclass(frozen=True)
class Withhold:
    """Options that a command leaves out."""

    reasons: Mapping[str, str]
    """Reason for each option that is left out."""

    def offered(self, model: type[Params]) -> list[str]:
        """Return the names of the other options."""
        return [name for name in model.model_fields if name not in self.reasons]


@dataclass(frozen=True)
class Offer:
    """The only options that a command takes from a large set, such as the settings."""

    names: tuple[str, ...]

    def offered(self, model: type[Params]) -> list[str]:
        """Return the names of the options, in the order of the set."""
        return [name for name in model.model_fields if name in self.names]


ONE_ANSWER = Withhold(
    {
        "max_new_tokens": "give --max-tokens",
        "n": "a command prints one answer",
        "logprobs": "a command prints text",
        "first_logprobs": "a command prints text",
        "prompt_logprobs": "a command prints text",
        "timeout": "Ctrl-C ends the command",
        "priority": "one question has no queue",
        "share": "one question has no other to share with",
        "skip_special_tokens": "a command calls no tools",
        "grammar": "it has no text form; give --json-schema, --json-object, --regex or --ebnf",
    }
)
"""Options of `GenerationParams` that commands with one answer lack."""

WITHOUT_DOCUMENTS = Withhold(
    {
        **ONE_ANSWER.reasons,
        **dict.fromkeys(
            ("extractive", "citations", "confidence", "min_confidence", "refusal"),
            "a PML prompt reads a schema",
        ),
    }
)
"""Options of `GenerationParams` that `ragcache prompt` lacks."""

FLAGS = {"k": ("-k", "--k"), "filters": ("--filter",)}
PANELS: dict[type[Params], str] = {
    GenerationParams: "Answer",
    SearchParams: "Search",
    ServiceOptions: "Folder and model",
    KeyParams: "Key",
}
LEDGER = Offer(("ledger", "state"))
"""Options of commands that read or change the ledger only."""
STORE = Offer((*LEDGER.names, "remote"))
"""Options of commands that read or change stored states."""
ENCODING = Offer(("model", "dtype", "instruction", "state"))
"""Options of commands that encode stored documents."""
TRAVELING = Offer((*ENCODING.names, "embedding"))
"""Options of commands that export and import collections."""
INGESTING = Offer((*ENCODING.names, "embedding", "module_tokens", "ocr"))
"""Options of commands that store documents."""
ASKING = Offer((*ENCODING.names, "embedding", "reranker", "force_modes"))
"""Options of commands that answer questions."""


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for each field of its parameters that are option sets."""
    signature = inspect.signature(command, eval_str=True)
    plain: list[inspect.Parameter] = []
    added: list[inspect.Parameter] = []
    sets: dict[str, tuple[type[Params], list[str]]] = {}
    for parameter in signature.parameters.values():
        found = _option_set(parameter.annotation)
        if found is None:
            plain.append(parameter)
            continue
        sets[parameter.name] = found
        added += [_option(found[0], name) for name in found[1]]

    @wraps(command)
    def expanded(**given: Any) -> None:
        built = {}
        for parameter, (model, names) in sets.items():
            options = {name: given.pop(name) for name in names}
            built[parameter] = model(
                **{name: value for name, value in options.items() if value not in (None, [], ())}
            )
        command(**given, **built)

    parameters = sorted([*plain, *added], key=lambda each: each.kind)
    expanded.__annotations__ = {each.name: each.annotation for each in parameters}
    return with_signature(expanded, signature.replace(parameters=parameters))


def _option_set(annotation: Any) -> tuple[type[Params], list[str]] | None:
    """Return the option set of a parameter, and the names of the options that it offers."""
    base, *notes = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    if not (isinstance(base, type) and issubclass(base, Params)):
        return None
    [note] = notes or [Withhold({})]
    return base, note.offered(base)


def _option(model: type[Params], name: str) -> inspect.Parameter:
    """Create a parameter of a command. Values stay text, so that the option set checks them."""
    field, flags = model.model_fields[name], FLAGS.get(name, (f"--{name.replace('_', '-')}",))
    is_union = isinstance(field.annotation, UnionType) or get_origin(field.annotation) is Union
    kinds = get_args(field.annotation) if is_union else (field.annotation,)
    kinds = tuple(each for each in kinds if each is not type(None))
    shapes = [_shape(each) for each in kinds]
    more: dict[str, Any] = {"help": _help(model, name, field), "rich_help_panel": PANELS[model]}
    kind: Any = str
    if shapes == [bool]:
        kind = bool
        flags = flags if field.default is False else (f"{flags[0]}/--no-{flags[0][2:]}",)
    elif shapes == [Literal]:
        more["metavar"] = "|".join(get_args(kinds[0]))
    elif Mapping in shapes:
        more |= {"parser": _json_object(flags[-1]), "metavar": "JSON"}
    elif Sequence in shapes:
        kind = list[str]
    elif str not in shapes:
        more["metavar"] = getattr(shapes[0], "__name__", "value").upper()
    annotation = Annotated[kind | None, typer.Option(*flags, show_default=False, **more)]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _shape(kind: Any) -> Any:
    """Return the class of a type, such as `int` of `Annotated[int, Field(ge=1)]`."""
    origin = get_origin(kind)
    return _shape(get_args(kind)[0]) if origin is Annotated else origin or kind


def _help(model: type[Params], name: str, field: FieldInfo) -> str:
    """Return the first sentence of a field, with its bounds, default and environment variable."""
    sentence = re.split(r"(?<=\.)\s", field.description or "")[0].replace("`", "")
    default = "" if field.default in (None, (), False) else f"default {field.default}"
    range_ = "" if re.search(r"\d{10}", bounds(field)) else bounds(field)
    variable = f"RAGCACHE_{name.upper()}" if issubclass(model, ServiceOptions) else ""
    facts = ", ".join(filter(None, [range_, default, variable]))
    return f"{sentence} ({facts})" if facts else sentence


def _json_object(flag: str) -> Callable[[str], dict[str, Any]]:
    """Return a parser of JSON objects, which raises `ConfigurationError`."""

    def parse(text: str) -> dict[str, Any]:
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ConfigurationError(f"{flag} is no JSON ({error}): {text}") from error
        if not isinstance(given, dict):
            raise ConfigurationError(
                f'{flag} takes a JSON object such as {{"year": {{"$gte": 2020}}}}, not {text}'
            )
        return given

    return parse
