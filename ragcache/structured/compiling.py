"""Grammars compiled for a model's vocabulary."""

from __future__ import annotations

import json
import re
import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ragcache.errors import InvalidRequest, MissingExtra
from ragcache.models import LoadedModel
from ragcache.structured.grammar import Grammar
from ragcache.structured.schema_rules import schema_rules
from ragcache.structured.vocabulary import token_bytes

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarCompiler

KEPT_BYTES = 2**26
"""Compiled grammars that each model keeps, the least recently used going first."""

THREADS = 2
"""Of one compilation, beside the model's own."""

# The place in the compiler's source, which tells a caller nothing.
_ORIGIN = re.compile(
    r"^\[[\d:]+\] \S+: |Check failed: .*? is false: |Invalid structural tag error: "
)


class Compiler:
    """Compiles grammars for one model, for any number of threads.

    stop_ids: the tokens that end an answer; a grammar allows them where it is complete.
    """

    def __init__(self, model: LoadedModel) -> None:
        xgrammar = _library()
        vocabulary = token_bytes(model)
        self.width = len(vocabulary)
        self.stop_ids = sorted(each for each in model.stop_ids if each < self.width)
        info = xgrammar.TokenizerInfo(
            vocabulary,
            xgrammar.VocabType.RAW,
            vocab_size=self.width,
            stop_token_ids=self.stop_ids,
        )
        self._compiler: GrammarCompiler = xgrammar.GrammarCompiler(
            info, max_threads=THREADS, cache_limit_bytes=KEPT_BYTES
        )

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compiles it, or finds it compiled. Raises `InvalidRequest`."""
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


_compilers: WeakKeyDictionary[LoadedModel, Compiler] = WeakKeyDictionary()
_lock = threading.Lock()


def compiler_of(model: LoadedModel) -> Compiler:
    """The model's compiler, made at the first call and dropped with the model. Raises
    `MissingExtra`."""
    with _lock:
        compiler = _compilers.get(model)
        if compiler is None:
            compiler = _compilers[model] = Compiler(model)
        return compiler


def _library() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise MissingExtra(
            "constrained decoding needs xgrammar: pip install 'ragcache[structured]'"
        ) from error
    return xgrammar
