"""Grammars of answers, compiled for a model's vocabulary and enforced while decoding.

A `Grammar` is plain text in one of four languages. `compile_constraint` compiles it with
llguidance, and the engine takes a mask from its `GrammarConstraint` before each token. Compilation
runs in the caller's thread, and other threads go on meanwhile. llguidance's limits bound its time.
A grammar that they do not bound is compiled in a process of its own first, which ends after
`CHECK_SECONDS`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ragcache.engine import MakeConstraint
from ragcache.engine.detokenizer import token_to_bytes
from ragcache.errors import InvalidRequest
from ragcache.models import LoadedModel
from ragcache.params import GenerationParams
from ragcache.structured.satisfiable import is_finite_gbnf, is_satisfiable

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Kind = Literal["json_schema", "regex", "ebnf", "lark"]

LONGEST = 2**18
"""Maximum characters of a grammar. An enum of 10,500 strings has 251,000: it compiles in 73 ms."""

LIMITS: Mapping[str, Any] = {"max_lexer_states": 50_000, "verbose_errors": False}
"""Limits that differ from the defaults of llguidance's `LLParserLimits`. A state takes 1 to 2
KB."""

CHECK_SECONDS = 2.0
"""Maximum seconds of the compilation, in a process, of a grammar that joins many parts."""

NO_TEXT = "no text satisfies it"
"""Reason to refuse a grammar without any text."""

_JOINED = re.compile(r'"(pattern|patternProperties|format|allOf|anyOf|oneOf)":')
_FEW = 8  # joined parts that are compiled in milliseconds, however they are joined
_CHECK_SCRIPT = """
import json, sys
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
source, limits = json.load(sys.stdin)
limits = LLParserLimits(**limits)
matcher = LLMatcher(LLTokenizer("byte"), source, log_level=0, limits=limits)
if not matcher.is_error():
    matcher.compute_bitmask()
print(json.dumps(matcher.get_error()))
"""

_ANY_OBJECT = '{"type": "object"}'
_JSON: Any = {  # `llguidance.JsonCompileOptions`, a class of its type stubs
    "whitespace_flexible": False,  # otherwise a model may write white space forever
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
}


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form of an answer's text, from its first character to its last.

    Equal grammars are compiled once for each model.

    Raises:
        InvalidRequest: The text is empty, or longer than `LONGEST` characters.
    """

    kind: Kind
    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text.strip():
            raise InvalidRequest(f"a grammar of kind {self.kind} needs a text")
        if len(self.text) > LONGEST:
            raise InvalidRequest(
                f"the {self.kind} has {len(self.text)} characters; a grammar has at most {LONGEST}"
            )

    @classmethod
    def of(cls, params: GenerationParams) -> Grammar | None:
        """Return the grammar of the generation parameters, or None to allow any text.

        Raises:
            InvalidRequest: The grammar is empty, too long, or one that decoding cannot enforce.
        """
        if params.json_schema is not None:
            return cls.json_schema(params.json_schema)
        if params.json_object:
            return cls.json_object()
        if params.regex is not None:
            return cls.regex(params.regex)
        if params.choice is not None:
            return cls.choice(params.choice)
        if params.ebnf is not None:
            return cls.ebnf(params.ebnf)
        if params.grammar is None or isinstance(params.grammar, Grammar):
            return params.grammar
        raise InvalidRequest(f"grammar is {params.grammar!r:.80}; give a `Grammar`")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """Return the grammar of a JSON schema, written on one line.

        Properties come in the schema's order; others are allowed only by `additionalProperties`.

        Raises:
            InvalidRequest: It is no JSON schema, or has a keyword that decoding cannot enforce.

        Example:
            >>> Grammar.json_schema({"type": "integer"})
            Grammar(kind='json_schema', text='{"type": "integer"}')
        """
        try:  # JSON values, without tuples and with strings for keys
            parsed = json.loads(schema if isinstance(schema, str) else json.dumps(schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"the JSON schema is not JSON: {error}") from error
        if not isinstance(parsed, dict):
            raise InvalidRequest(f"a JSON schema is an object, not {type(parsed).__name__}")
        made = cls("json_schema", json.dumps(parsed, ensure_ascii=False))
        if not is_satisfiable(parsed):
            raise _refused(made, NO_TEXT)
        check_grammar(made)
        return made

    @classmethod
    def json_object(cls) -> Grammar:
        """Return the grammar of any JSON object, on one line."""
        return cls("json_schema", _ANY_OBJECT)

    @classmethod
    def response_format(cls, wanted: Mapping[str, Any] | None) -> Grammar | None:
        """Return the grammar of OpenAI's `response_format`, or None to allow any text.

        Raises:
            InvalidRequest: The type is unknown, or the schema is missing.
        """
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
        """Return the grammar of a text that the whole pattern matches.

        Patterns have classes, groups, alternatives and repetition, but no look-around and no back
        references.
        """
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """Return the grammar of a text that is one of several.

        Example:
            >>> Grammar.choice(["yes", "no", "n/a"])
            Grammar(kind='regex', text='yes|no|n/a')
        """
        return cls("regex", "|".join(map(re.escape, texts)))

    @classmethod
    def ebnf(cls, text: str) -> Grammar:
        """Return the grammar of the rule `root`, in GBNF, the notation of llama.cpp."""
        return cls("ebnf", text)

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Return the grammar of the rule `start`, in llguidance's variant of Lark."""
        return cls("lark", text)

    @property
    def source(self) -> str:
        """The grammar in llguidance's notation. Raises `InvalidRequest`."""
        from llguidance import LLMatcher
        from llguidance.gbnf_to_lark import gbnf_to_lark

        try:
            if self.kind == "json_schema":
                schema = _closed(json.loads(self.text))
                return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON)
            if self.kind == "regex":
                return LLMatcher.grammar_from_regex(self.text)
            if self.kind == "lark":
                return LLMatcher.grammar_from_lark(self.text)
            lark, is_finite = gbnf_to_lark(self.text), is_finite_gbnf(self.text)
        except Exception as error:  # `gbnf_to_lark` raises `Exception` itself
            raise _refused(self, str(error)) from error
        if not is_finite:
            raise _refused(self, NO_TEXT)
        return LLMatcher.grammar_from_lark(lark)


def lark_json(schema: dict[str, Any]) -> str:
    """Return a JSON schema as an expression of a rule of `Grammar.lark`, on one line."""
    return f"%json {json.dumps({**_closed(schema), 'x-guidance': _JSON}, ensure_ascii=False)}"


# Keywords whose value is an object of schemas, a list of schemas, or one schema.
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")
_JOINING = frozenset(("$ref", "anyOf", "oneOf", "allOf"))


def _closed(schema: Any) -> Any:
    """Return the schema with `additionalProperties` false by default.

    Objects that join several schemas or set it themselves are unchanged.
    """
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for key in made.keys() & _MAPS:
        if isinstance(made[key], dict):
            made[key] = {name: _closed(each) for name, each in made[key].items()}
    for key in made.keys() & _LISTS:
        if isinstance(made[key], list):
            made[key] = [_closed(each) for each in made[key]]
    for key in made.keys() & _SINGLE:
        made[key] = _closed(made[key])
    if made.keys() & {"properties", "patternProperties"} and not made.keys() & _JOINING:
        made.setdefault("additionalProperties", False)
    return made


def check_grammar(grammar: Grammar) -> None:
    """Check that a model can be constrained to a grammar.

    Raises:
        InvalidRequest: It cannot, or the check takes more than `CHECK_SECONDS`.
    """
    from llguidance import LLMatcher, LLParserLimits

    if _is_unbounded(grammar):
        _check_in_process(grammar)
    elif reason := LLMatcher.validate_grammar(grammar.source, limits=LLParserLimits(**LIMITS)):
        raise _refused(grammar, reason)


def _is_unbounded(grammar: Grammar) -> bool:
    """Return whether llguidance may compare or intersect parts of a grammar without a limit.

    Regular expressions and GBNF have no intersections.
    """
    text = grammar.text
    if grammar.kind in ("regex", "ebnf"):
        return False
    if grammar.kind == "lark" and "&" in text:
        return True
    joined = len(_JOINED.findall(text))
    if '"patternProperties"' in text:
        joined += text.count('":')
    return joined > _FEW


@lru_cache(256)
def _check_in_process(grammar: Grammar) -> None:
    """Compile a grammar in a process, which can be ended, for a vocabulary of bytes.

    20 intersected patterns take minutes; the process takes 0.1 to 0.2 s to start. Grammars that
    pass are remembered.

    Raises:
        InvalidRequest: The grammar cannot be compiled, or not within `CHECK_SECONDS`.
    """
    try:
        checked = subprocess.run(
            [sys.executable, "-c", _CHECK_SCRIPT],
            input=json.dumps([grammar.source, LIMITS]).encode(),
            capture_output=True,
            check=True,
            timeout=CHECK_SECONDS,
        )
        reason = json.loads(checked.stdout)
    except subprocess.TimeoutExpired:
        reason = f"it takes more than {CHECK_SECONDS:g} s; give fewer or simpler patterns"
    except (OSError, subprocess.CalledProcessError) as error:
        reason = f"the process that checks it has failed: {error}"
    if reason:
        raise _refused(grammar, reason)


# The lines of a message that repeat the grammar.
_QUOTED = re.compile(r"^\s*(\d+ \||\^).*\n?|^at \d+\(\d+\): ", re.MULTILINE)


def _refused(grammar: Grammar, reason: str) -> InvalidRequest:
    if reason.startswith("NoExtension"):
        reason = NO_TEXT
    reason = " ".join(_QUOTED.sub("", reason).split())
    kind = grammar.kind.replace("json_schema", "JSON schema")
    return InvalidRequest(f"the {kind} cannot be compiled: {reason:.300}")


class ModelGrammarCompiler:
    """Compiles grammars for one model. Thread-safe.

    A grammar allows the model's stop tokens where it is complete.
    """

    KEPT = 32
    """Number of compiled grammars in the cache, which evicts the least recently used."""

    def __init__(self, model: LoadedModel) -> None:
        from llguidance import LLParserLimits

        self.tokenizer: LLTokenizer = _Vocabulary(model).ll_tokenizer()
        """llguidance's view of the model's vocabulary, as wide as its logits."""
        self._limits = LLParserLimits(**LIMITS)
        self.compile_grammar = lru_cache(self.KEPT)(self._compile)
        """Compiles a grammar, or takes it from the cache. Copy the result before advancing it.
        Raises `InvalidRequest`."""

    def _compile(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher

        if _is_unbounded(grammar):
            _check_in_process(grammar)
        made = LLMatcher(self.tokenizer, grammar.source, log_level=0, limits=self._limits)
        if not made.is_error():
            made.compute_bitmask()  # finds empty grammars, and saves the engine work
        if made.is_error():
            raise _refused(grammar, made.get_error())
        return made


T = TypeVar("T")


def once_per_model(make: Callable[[LoadedModel], T]) -> Callable[[LoadedModel], T]:
    """Make an object for a model on first use, and keep it as long as the model. Thread-safe."""
    kept: WeakKeyDictionary[LoadedModel, T] = WeakKeyDictionary()
    lock = threading.Lock()

    def made_for(model: LoadedModel) -> T:
        with lock:
            if model not in kept:
                kept[model] = make(model)
            return kept[model]

    return made_for


grammar_compiler = once_per_model(ModelGrammarCompiler)
"""Returns the compiler of a model."""


def compile_constraint(grammar: Grammar, model: LoadedModel) -> MakeConstraint:
    """Compile a grammar for a model's vocabulary.

    Returns:
        A function that makes a constraint for each answer (`engine.Request.constraint`).

    Raises:
        InvalidRequest: The grammar cannot be compiled.
    """
    compiler = grammar_compiler(model)
    compiled = compiler.compile_grammar(grammar)
    words = -(-compiler.tokenizer.vocab_size // 32)
    return lambda: GrammarConstraint(compiled.deep_copy(), words)


class GrammarConstraint:
    """The state of one answer in its grammar."""

    def __init__(self, matcher: LLMatcher, words: int) -> None:
        """Begin an answer. A mask has `words` words of 32 tokens each."""
        self._matcher = matcher
        self._mask = torch.zeros(words, dtype=torch.int32, device="cpu")

    def mask(self) -> Tensor:
        """See `Constraint.mask`. Raises `ValueError` if the grammar exceeds its limits."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.data_ptr(), self._mask.nbytes)
        if self._matcher.is_error():
            raise ValueError(self._matcher.get_error())
        return self._mask

    def accept(self, token: int) -> None:
        """See `Constraint.accept`. Raises `ValueError` for a token that the grammar refuses."""
        if not self._matcher.consume_token(token):
            raise ValueError(f"the grammar does not allow token {token} here")

    @property
    def finished(self) -> bool:
        """See `Constraint.finished`."""
        return self._matcher.is_stopped()


TOOL_MARKERS = frozenset(("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"))
"""Control tokens that a grammar may use. The text of all others is hidden from callers."""


class _Vocabulary:
    """A model's vocabulary, as llguidance expects it.

    llguidance calls it for the tokens of text that the grammar leaves no choice about.
    """

    bos_token_id = None

    def __init__(self, model: LoadedModel) -> None:
        tokenizer = getattr(model.tokenizer, "hugging_face", model.tokenizer)
        self._tokenizer, width = tokenizer, model.causal.logits_width
        self.stop_ids = sorted(each for each in model.stop_ids if each < width)
        if not self.stop_ids:
            raise InvalidRequest(
                "this model cannot be constrained: it has no token that ends an answer"
            )
        self.eos_token_id = self.stop_ids[0]
        spell, hidden = token_to_bytes(tokenizer), {*model.stop_ids}
        for number, added in tokenizer.added_tokens_decoder.items():
            if added.special and added.content not in TOOL_MARKERS:
                hidden.add(number)
        self.tokens = [b""] * width
        """Bytes of every row of the logits. Empty for control tokens and for rows beyond the
        tokenizer, which no grammar may use."""
        for token, number in tokenizer.get_vocab().items():
            if number < width and number not in hidden:
                self.tokens[number] = spell(token)

    def ll_tokenizer(self) -> LLTokenizer:
        """Return llguidance's tokenizer of this vocabulary."""
        from llguidance import LLTokenizer
        from llguidance._tokenizer import TokenizerWrapper

        made = LLTokenizer(TokenizerWrapper(self), eos_token=list(self.stop_ids))
        self._greedy = made.greedy_tokenize
        return made

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the tokens of a text as the model spells it, or else the longest tokens.

        Some tokenizers add a space, so that their spelling cannot be used.
        """
        raw = text if isinstance(text, bytes) else text.encode()
        ids: list[int] = self._tokenizer.encode(raw.decode(), add_special_tokens=False)
        if b"".join(self.tokens[each] for each in ids) == raw:
            return ids
        return self._greedy(raw.decode())
