"""Grammars of answers: as values, compiled for a model's vocabulary, and held to while decoding.

A `Grammar` is plain text in one of four languages. `compile_constraint` compiles it with the
model's one compiler, and the engine takes a mask from its `GrammarConstraint` before each token.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ragcache.engine import MakeConstraint
from ragcache.engine.constraint import pack
from ragcache.errors import InvalidRequest, MissingExtra
from ragcache.models import LoadedModel
from ragcache.structured.json_schema import check_json_schema, schema_rules

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarCompiler, GrammarMatcher


Kind = Literal["json_schema", "regex", "ebnf", "structural_tag"]

_ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form of an answer's text, from its first character to its last.

    Making one needs no extra; using one needs `structured`. Equal grammars are compiled once for
    each model. Raises `InvalidRequest` for an empty text.
    """

    kind: Kind
    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text.strip():
            raise InvalidRequest(f"a grammar of kind {self.kind} needs a text")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """JSON that a schema allows, on one line.

        Properties come in the schema's order; others are allowed only by `additionalProperties`.

        Raises:
            InvalidRequest: It is no JSON schema, or has a keyword that decoding cannot enforce.

        Example:
            >>> Grammar.json_schema({"type": "integer"})
            Grammar(kind='json_schema', text='{"type": "integer"}')
        """
        parsed = _parsed(schema)
        check_json_schema(parsed)
        return cls("json_schema", json.dumps(parsed, ensure_ascii=False))

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object, on one line."""
        return cls("json_schema", _ANY_OBJECT)

    @classmethod
    def response_format(cls, wanted: Mapping[str, Any] | None) -> Grammar | None:
        """The grammar of OpenAI's `response_format`; None if any text is allowed. Raises
        `InvalidRequest` for an unknown type or a missing schema."""
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
        """A text that the whole pattern matches. Patterns have classes, groups, alternatives and
        repetition, but no look-around and no back references."""
        return cls("regex", pattern)

    @classmethod
    def ebnf(cls, text: str) -> Grammar:
        """A text of the rule `root`, in GBNF, the notation of llama.cpp."""
        return cls("ebnf", text)


def _parsed(schema: Mapping[str, Any] | str) -> object:
    """The schema as JSON values, without tuples and with strings for keys."""
    try:
        return json.loads(schema if isinstance(schema, str) else json.dumps(schema))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"the JSON schema is not JSON: {error}") from error


KEPT_BYTES = 2**26
"""The size of the compiled grammars that each model keeps (least recently used evicted)."""

THREADS = 2  # of one compilation

# Places in the compiler's source, of no use to a caller.
_ORIGIN = re.compile(
    r"^\[[\d:]+\] \S+: |Check failed: .*? is false: |Invalid structural tag error: "
)


class ModelGrammarCompiler:
    """Compiles grammars for one model; thread-safe. A grammar allows the tokens `stop_ids`, which
    end an answer, where it is complete."""

    def __init__(self, model: LoadedModel) -> None:
        xgrammar = _library()
        vocabulary = token_bytes(model)
        self.width = len(vocabulary)
        self.stop_ids = sorted(each for each in model.stop_ids if each < self.width)
        info = xgrammar.TokenizerInfo(
            vocabulary, xgrammar.VocabType.RAW, vocab_size=self.width, stop_token_ids=self.stop_ids
        )
        self._compiler: GrammarCompiler = xgrammar.GrammarCompiler(
            info, max_threads=THREADS, cache_limit_bytes=KEPT_BYTES
        )

    def compile_grammar(self, grammar: Grammar) -> CompiledGrammar:
        """Compiles a grammar, or takes it from the cache. Raises `InvalidRequest`."""
        try:
            return self._compile(grammar)
        except (RuntimeError, ValueError, TypeError) as error:
            reason = _ORIGIN.sub("", str(error)).strip(" :\n") or "it is too large"
            raise InvalidRequest(f"the {grammar.kind} cannot be compiled: {reason}") from error

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        compiler, text = self._compiler, grammar.text
        if grammar.kind == "json_schema":
            return compiler.compile_grammar(schema_rules(json.loads(text)))
        if grammar.kind == "regex":
            return compiler.compile_regex(text)
        if grammar.kind == "ebnf":
            return compiler.compile_grammar(text)
        return compiler.compile_structural_tag(json.dumps(_with_rules(json.loads(text))))


def _with_rules(described: Any) -> Any:
    """A structural tag in which every JSON schema is replaced by its rules."""
    if isinstance(described, list):
        return [_with_rules(each) for each in described]
    if not isinstance(described, dict):
        return described
    if described.get("type") == "json_schema":
        return {"type": "grammar", "grammar": schema_rules(described["json_schema"])}
    return {key: _with_rules(each) for key, each in described.items()}


_compilers: WeakKeyDictionary[LoadedModel, ModelGrammarCompiler] = WeakKeyDictionary()
_lock = threading.Lock()


def grammar_compiler(model: LoadedModel) -> ModelGrammarCompiler:
    """The model's compiler, made at first use and dropped with it. Raises `MissingExtra`."""
    with _lock:
        compiler = _compilers.get(model)
        if compiler is None:
            compiler = _compilers[model] = ModelGrammarCompiler(model)
        return compiler


def _library() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise MissingExtra(
            "constrained decoding needs xgrammar: pip install 'ragcache[structured]'"
        ) from error
    return xgrammar


def compile_constraint(grammar: Grammar, model: LoadedModel) -> MakeConstraint:
    """Compiles a grammar for a model's vocabulary; the result makes a constraint for each answer
    (`engine.Request.constraint`). Raises `InvalidRequest` or `MissingExtra`."""
    compiler = grammar_compiler(model)
    compiled = compiler.compile_grammar(grammar)
    stops = torch.zeros(1, compiler.width, dtype=torch.bool, device="cpu")
    stops[0, compiler.stop_ids] = True
    [packed] = pack(stops)
    return lambda: GrammarConstraint(compiled, packed)


class GrammarConstraint:
    """The state of one answer in its grammar. stops: the stop tokens as a mask, int32 [W]."""

    def __init__(self, compiled: CompiledGrammar, stops: Tensor) -> None:
        from xgrammar import GrammarMatcher

        self._matcher: GrammarMatcher = GrammarMatcher(compiled)
        self._others = ~stops
        self._mask = torch.empty((1, len(stops)), dtype=torch.int32, device="cpu")
        self._filled = False
        self.finished = False

    def mask(self) -> Tensor | None:
        """See `Constraint.mask`."""
        if not self._filled:
            self._fill()
        return self._mask[0]

    def accept(self, token: int) -> None:
        """See `Constraint.accept`. Raises `ValueError` for a token that the grammar refuses."""
        if not self._matcher.accept_token(token):
            raise ValueError(f"the grammar does not allow token {token} here")
        self._filled = False
        if self._matcher.is_completed():
            self._fill()
            self.finished = not bool((self._mask[0] & self._others).any())

    def _fill(self) -> None:
        self._matcher.fill_next_token_bitmask(self._mask)
        self._filled = True


TOOL_MARKERS = frozenset(("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"))
"""The control tokens that a grammar may use; the text of all others is hidden from callers."""


def token_bytes(model: LoadedModel) -> list[bytes]:
    """The bytes of every row of the model's logits: b"" for control tokens and for rows beyond the
    tokenizer, which no grammar may use. Raises `InvalidRequest` for an unknown tokenizer."""
    from xgrammar import TokenizerInfo

    tokenizer = getattr(model.tokenizer, "hugging_face", model.tokenizer)
    width = logits_width(model)
    try:
        info = TokenizerInfo.from_huggingface(tokenizer, vocab_size=width, stop_token_ids=[0])
    except Exception as error:
        raise InvalidRequest(
            f"this model's tokenizer, {type(tokenizer).__name__}, cannot be constrained: {error}"
        ) from error
    decoded = [bytes(token) for token in info.decoded_vocab]
    decoded += [b""] * (width - len(decoded))
    for token_id, added in getattr(tokenizer, "added_tokens_decoder", {}).items():
        if token_id < width:
            hidden = added.special and added.content not in TOOL_MARKERS
            decoded[token_id] = b"" if hidden else added.content.encode()
    return decoded


def logits_width(model: LoadedModel) -> int:
    """V of the model's logits; it may exceed the number of the tokenizer's tokens."""
    hugging_face = model.causal.model
    head = hugging_face.get_output_embeddings()
    if head is not None:
        return int(head.weight.shape[0])
    return int(hugging_face.config.get_text_config().vocab_size)
