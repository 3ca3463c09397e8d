"""The form of an answer, as a value: named by whoever asks, compiled where it is used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ragcache.errors import InvalidRequest
from ragcache.structured.json_schema import check_schema

Kind = Literal["json_schema", "regex", "ebnf", "structural_tag"]

_ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer's text must be, from its first character to its last.

    Making one needs no extra; using one needs `structured`. Equal texts are equal grammars, of
    which each model compiles one. text: in the language of `kind`.
    """

    kind: Kind
    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text.strip():
            raise InvalidRequest(f"a grammar of kind {self.kind} needs a text")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """JSON that a schema allows, on one line.

        Properties come in the schema's order, and none that it does not name unless it says
        `additionalProperties`. Raises `InvalidRequest` for what is no schema, and for a keyword
        that decoding cannot hold to.
        """
        parsed = _parsed(schema)
        check_schema(parsed)
        return cls("json_schema", json.dumps(parsed, ensure_ascii=False))

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object, on one line."""
        return cls("json_schema", _ANY_OBJECT)

    @classmethod
    def response_format(cls, wanted: Mapping[str, Any] | None) -> Grammar | None:
        """OpenAI's `response_format`; None where any text will do. Raises `InvalidRequest`."""
        if wanted is None:
            return None
        kind = wanted.get("type") if isinstance(wanted, Mapping) else None
        if kind == "text":
            return None
        if kind == "json_object":
            return cls.json_object()
        if kind != "json_schema":
            raise InvalidRequest(
                f"response_format is of type {kind!r:.80}; types: json_schema, json_object, text"
            )
        described = wanted.get("json_schema")
        schema = described.get("schema") if isinstance(described, Mapping) else None
        if schema is None:
            raise InvalidRequest("response_format holds no json_schema.schema")
        return cls.json_schema(schema)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """A text that the whole pattern matches: classes, groups, alternatives and repetition, no
        look-around and no back references."""
        return cls("regex", pattern)

    @classmethod
    def ebnf(cls, text: str) -> Grammar:
        """A text of the rule `root`, in GBNF, the notation of llama.cpp."""
        return cls("ebnf", text)


def _parsed(schema: Mapping[str, Any] | str) -> object:
    """The schema as JSON has it: no tuples, no keys that are not strings."""
    try:
        return json.loads(schema if isinstance(schema, str) else json.dumps(schema))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"the JSON schema is not JSON: {error}") from error
