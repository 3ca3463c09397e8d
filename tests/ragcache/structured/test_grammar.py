"""Grammars as values, their compilers, and answers of a random model under a grammar."""

from __future__ import annotations

import gc
import json
import re
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from ragcache.engine import LLMEngine, Request, RequestOutput
from ragcache.engine.constraint import penalties, penalty_table
from ragcache.errors import InvalidRequest, PromptTooLong
from ragcache.models import LoadedModel
from ragcache.params import GenerationParams
from ragcache.pipeline.submit import request_maker
from ragcache.structured import Grammar, compile_constraint
from ragcache.structured import grammar as grammar_module
from ragcache.structured.grammar import grammar_compiler
from tests.conftest import scaled
from tests.ragcache.engine.stepped_engine import (
    Answer,
    assert_all_blocks_free,
    config_of,
    core_of,
    plain_context,
)
from tests.ragcache.structured.byte_level_model import SPECIAL, TEXTS, allows, tiny, tokenizer
from tests.tiny_models import VOCABULARY, random_tokens


def test_equal_texts_are_equal_grammars() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"const": "é"}}}
    made = Grammar.json_schema(schema)
    assert made == Grammar.json_schema(json.dumps(schema))
    assert len({made, Grammar.json_schema(schema), Grammar.regex("a"), Grammar.ebnf("a")}) == 3
    assert made.text.index('"b"') < made.text.index('"a"')  # answers keep the schema's order
    assert json.loads(Grammar.json_object().text) == {"type": "object"}


@pytest.mark.parametrize("schema", ["{", "[]", "3", {"type": {1, 2}}, {"enum": [object()]}])
def test_invalid_json_schema_is_refused(schema: object) -> None:
    with pytest.raises(InvalidRequest, match="JSON schema"):
        Grammar.json_schema(schema)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "  ", None])
def test_empty_grammar_is_refused(text: str) -> None:
    for make in (Grammar.regex, Grammar.ebnf):
        with pytest.raises(InvalidRequest, match="needs a text"):
            make(text)


def test_response_format_becomes_a_grammar() -> None:
    schema = {"type": "object", "properties": {"a": {"const": None}}}
    described = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    assert Grammar.response_format(described) == Grammar.json_schema(schema)
    assert Grammar.response_format({"type": "json_object"}) == Grammar.json_object()
    assert Grammar.response_format(None) is Grammar.response_format({"type": "text"}) is None


@pytest.mark.parametrize(
    "wanted", ["json_object", {}, {"type": "xml"}, {"type": "json_schema", "json_schema": {}}]
)
def test_invalid_response_format_is_refused(wanted: object) -> None:
    with pytest.raises(InvalidRequest, match="response_format"):
        Grammar.response_format(wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar.regex("[a"), "^the regex cannot be compiled: .*unclosed character class$"),
        (Grammar.regex("(?=a)b"), "look-around"),
        (Grammar.regex("(" * 9999), "regex"),
        (Grammar.ebnf("root ::= x"), "^the ebnf cannot be compiled: .*'x' not found"),
        (Grammar.ebnf('top ::= "a"'), "root"),
        (Grammar.ebnf("root ::= root"), "no text satisfies it"),
    ],
)
def test_grammar_that_does_not_compile_is_refused(grammar: Grammar, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        compile_constraint(grammar, tiny())
    assert len(str(caught.value)) < 400


def test_a_grammar_has_a_largest_size() -> None:
    strings = [f"string number {number}" for number in range(60_000)]
    with pytest.raises(InvalidRequest, match=r"the json_schema has .* at most 262144"):
        Grammar.json_schema({"enum": strings})
    grammar = Grammar.json_schema({"enum": strings[:1000]})
    assert allows(grammar, '"string number 999"')
    assert not allows(grammar, '"string number 1000"')


NAMES = {"type": "object", "patternProperties": {f"^{n:04}.*x{n:04}": {} for n in range(800)}}
PATTERNS = [f".*{n:010}.*" for n in range(40)]
JOINED = {"allOf": [{"type": "string", "pattern": pattern} for pattern in PATTERNS]}
ENDLESS: dict[str, Callable[[], Grammar]] = {
    "pattern properties": lambda: Grammar.json_schema(NAMES),
    "schemas": lambda: Grammar.json_schema(JOINED),
    "patterns": lambda: Grammar.lark("start: A\nA: " + " & ".join(f"/{p}/" for p in PATTERNS)),
    "schemas in Lark": lambda: Grammar.lark(f"start: %json {json.dumps(JOINED)}"),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_compilation_ends_in_bounded_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """llguidance alone would take minutes."""
    monkeypatch.setattr(grammar_module, "CHECK_SECONDS", 0.1)
    with pytest.raises(InvalidRequest, match=r"takes more than 0\.1 s"):
        compile_constraint(ENDLESS[name](), tiny())


def test_an_intersection_is_enforced() -> None:
    grammar = Grammar.lark("start: A\nA: /a+b*/ & /.{3}/ & ~/aaa/")
    texts = ("aab", "abb", "aaa", "ab")
    assert [allows(grammar, text) for text in texts] == [True, True, False, False]
    with pytest.raises(InvalidRequest, match="the lark cannot be compiled"):
        compile_constraint(Grammar.lark("start: A\nA: /a/ & /b/"), tiny())


def test_a_schema_of_many_parts_is_checked_like_others() -> None:
    names = {f"^{n}_": {"type": "integer"} for n in range(12)}
    grammar = Grammar.json_schema({"type": "object", "patternProperties": names})
    assert allows(grammar, '{"7_a": 1}')
    assert not allows(grammar, '{"a": 1}')
    with pytest.raises(InvalidRequest, match="look-around"):
        Grammar.json_schema({"anyOf": [{"type": "string", "pattern": "(?!a)b"}] * 12})


@pytest.mark.parametrize("pattern", ["((a{1,500}){1,500}){1,500}", "(.{1000}){1000}", "(x+x+)+y"])
def test_patterns_of_repetitions_compile_within_limits(pattern: str) -> None:
    constraint = compile_constraint(Grammar.regex(pattern), tiny())()
    for _ in range(20):
        mask = constraint.mask()
        constraint.accept(allowed(mask)[0])


EXPRESSION = st.recursive(
    st.sampled_from("abcé"),
    lambda inner: (
        st.tuples(inner, inner).map(lambda both: f"({both[0]}|{both[1]})")
        | st.tuples(inner, inner).map("".join)
        | inner.map(lambda one: f"({one})*")
        | inner.map(lambda one: f"({one}){{1,2}}")
    ),
    max_leaves=6,
)


@settings(max_examples=scaled(200, quick=0.1))
@given(pattern=EXPRESSION, data=st.data())
def test_masks_allow_what_the_text_can_go_on_with(pattern: str, data: st.DataObject) -> None:
    """All of it, but where the text is certain: there it is spelled as the model spells it."""
    vocabulary = {
        token: text for token in range(len(tokenizer()))
        if "\ufffd" not in (text := tokenizer().decode([token])) and text
        and token not in tokenizer().all_special_ids
    }  # fmt: skip
    constraint, text = compile_constraint(Grammar.regex(pattern), tiny())(), ""
    for _ in range(data.draw(st.integers(1, 5))):
        if constraint.finished:
            break
        mask = constraint.mask()
        tokens = set(allowed(mask))
        goes_on = partial(regex.fullmatch, pattern, partial=True)
        can = {token for token, more in vocabulary.items() if goes_on(text + more)}
        said = tokens & vocabulary.keys()
        assert said <= can
        assert said == can or len(tokens) == 1
        assert bool(tokens & tiny().stop_ids) == bool(regex.fullmatch(pattern, text))
        chosen = data.draw(st.sampled_from(sorted(said or {-1})))
        if chosen < 0:
            break
        constraint.accept(chosen)
        text += vocabulary[chosen]


def allowed(mask: Tensor) -> list[int]:
    """The tokens of a packed mask."""
    return (penalties(mask[None], penalty_table(mask.device))[0] == 0).nonzero().flatten().tolist()


def test_model_has_one_compiler_until_it_is_dropped() -> None:
    model = LoadedModel("other", tiny().causal, tokenizer())
    made = weakref.ref(grammar_compiler(model))
    assert grammar_compiler(model) is made()
    assert grammar_compiler(tiny()) is not made()
    del model
    gc.collect()
    assert made() is None


def test_threads_compile_concurrently() -> None:
    grammars = [Grammar.regex(f"[a-c]{{{n}}}") for n in range(1, 9)] * 4
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda grammar: compile_constraint(grammar, tiny()), grammars))
    for grammar, make in zip(grammars, made, strict=True):
        constraint, a = make(), tokenizer().convert_tokens_to_ids("a")
        for _ in range(int(grammar.text[6:-1])):
            assert not constraint.finished
            constraint.accept(a)
        assert constraint.finished


def test_tokens_are_spelled_as_in_the_vocabulary(reader: LoadedModel) -> None:
    for model, text in ((tiny(), " ".join(TEXTS)), (reader, "Naïve – 12 € ☕\n{}")):
        ids = model.encode(text) if model is reader else tokenizer().encode(text)
        ll_tokenizer = grammar_compiler(model).tokenizer
        assert ll_tokenizer.vocab_size == model.causal.logits_width
        assert ll_tokenizer.decode_bytes(ids) == text.encode()


def test_control_tokens_are_in_no_answer_except_tool_markers() -> None:
    hidden, marker = (tokenizer().convert_tokens_to_ids(each) for each in SPECIAL[1:])
    mask = compile_constraint(Grammar.regex(r"(.|\n)*"), tiny())().mask()
    assert hidden not in allowed(mask)
    assert {*tiny().stop_ids, marker} < {*allowed(mask)}
    assert len(mask) == VOCABULARY // 32
    assert max(allowed(mask)) < len(tokenizer())
    constraint = compile_constraint(Grammar.regex(r"(.|\n)*"), tiny())()
    with pytest.raises(ValueError, match="does not allow token 319"):
        constraint.accept(VOCABULARY - 1)


def test_byte_fallback_tokens_spell_bytes() -> None:
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "é"]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    slow = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    model = LoadedModel("fallback", tiny().causal, slow)
    constraint = compile_constraint(Grammar.regex("( a|\n)(é|ü)"), model)()
    for token in (" a", "\n"):
        assert vocabulary["▁a" if token == " a" else "<0x0A>"] in allowed(constraint.mask())
    constraint.accept(vocabulary["▁a"])
    assert {vocabulary["é"], vocabulary["<0xC3>"]} == {*allowed(constraint.mask())}


def test_model_without_a_stop_token_is_refused() -> None:
    causal = tiny().causal
    endless = PreTrainedTokenizerFast(tokenizer_object=tokenizer().backend_tokenizer)
    model = LoadedModel("endless", causal, endless)
    if not model.stop_ids:
        with pytest.raises(InvalidRequest, match="no token that ends an answer"):
            compile_constraint(Grammar.regex("a"), model)


class Boss(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=4)


class Person(BaseModel):
    """Everything in it has an end, so that random tokens come to one."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(min_length=1, max_length=6)
    age: int = Field(ge=0, le=150)
    kind: Literal["a", "b", "naïve ☕"]
    active: bool
    boss: Boss | None
    tags: list[Literal["x", "y"]] = Field(max_length=2)


PERSON = Grammar.json_schema(Person.model_json_schema())
LONGEST = 160


def asked(seed: int, grammar: Grammar = PERSON, tokens: int = LONGEST, **changes: Any) -> Request:
    generation = GenerationParams(
        temperature=1.0, seed=seed, max_tokens=tokens, grammar=grammar, **changes
    )
    prompt = [token % 256 for token in random_tokens(5 + seed % 7, seed=seed)]
    return request_maker(generation, tiny(), tokens, "local")(plain_context(prompt))


def check_person(completion: RequestOutput) -> None:
    for choice in completion.choices:
        assert choice.finish_reason == "stop"
        Person.model_validate_json(choice.text, strict=True)
        assert "\n" not in choice.text


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
def test_answers_fit_the_json_schema(seed: int) -> None:
    core = core_of(tiny().causal, config_of(tiny().causal, blocks=256))
    [completion] = core.run(asked(seed, n=3))
    check_person(completion)
    assert len({choice.text for choice in completion.choices}) > 1
    assert_all_blocks_free(core)


@pytest.mark.slow
def test_batched_and_preempted_answers_equal_single_ones() -> None:
    causal = tiny().causal
    alone = [core_of(causal, config_of(causal, 256)).run(asked(n, n=3))[0] for n in range(3)]
    core = core_of(causal, config_of(causal, blocks=60, step_tokens=16))
    handles: list[Answer] = []
    for seed in range(3):
        handles.append(core.submit(asked(seed, n=3)))
        free = GenerationParams(temperature=1.0, max_tokens=40)
        core.submit(
            request_maker(free, tiny(), 40, "local")(plain_context(random_tokens(30, seed=seed)))
        )
        leaves = core.submit(asked(90 + seed))
        for _ in range(12):
            core.step()
        leaves.cancel()
    core.drain()
    assert core.stats.preempted > 0
    for handle, single in zip(handles, alone, strict=True):
        check_person(handle.result(0))
        assert handle.result(0).choices == single.choices
    assert_all_blocks_free(core)


def test_greedy_answer_is_deterministic() -> None:
    generation = GenerationParams(grammar=Grammar.regex("(ab|cd)+x"), max_tokens=30)
    request = request_maker(generation, tiny(), 30, "local")(plain_context([1, 2, 3]))
    [first], [second] = (core_of(tiny().causal).run(request)[0].choices for _ in range(2))
    assert first == second
    assert re.fullmatch("((ab|cd)+x?|(ab|cd)*[ac]|(ab|cd)+x)", first.text)


@pytest.mark.parametrize(
    ("grammar", "form"),
    [
        (Grammar.regex("[a-c]{3}-[0-9]{2}"), "[a-c]{3}-[0-9]{2}"),
        (Grammar.ebnf('root ::= "yes" | "no" tail\ntail ::= " " [a-z] [a-z]'), "yes|no [a-z]{2}"),
        (Grammar.regex("(é|☕){2}"), "(é|☕){2}"),
        (Grammar.choice(["a b", "R&D", "[x-y]{2}\n", "☕.*"]), r"a b|R&D|\[x-y\]\{2\}\n|☕\.\*"),
    ],
)
def test_answers_fit_regex_choice_and_ebnf(grammar: Grammar, form: str) -> None:
    requests = [asked(seed, grammar, n=2) for seed in range(4)]
    for completion in core_of(tiny().causal).run(*requests):
        for choice in completion.choices:
            assert re.fullmatch(form, choice.text), choice.text
            assert (choice.finish_reason, choice.stopped_by) == ("stop", None)


@pytest.mark.slow
def test_open_ended_grammar_ends_with_a_stop_token() -> None:
    request = asked(3, Grammar.regex("[a-z]*"), tokens=200, n=4, min_tokens=2)
    [completion] = core_of(tiny().causal, config_of(tiny().causal, 512)).run(request)
    ended = [choice for choice in completion.choices if choice.finish_reason == "stop"]
    assert ended
    for choice in completion.choices:
        assert re.fullmatch("[a-z]*", choice.text)
        assert len(choice.token_ids) >= 2
    assert {choice.stopped_by for choice in ended} == set(tiny().stop_ids)


def test_an_answer_that_is_cut_is_the_beginning_of_one() -> None:
    [completion] = core_of(tiny().causal).run(asked(1, tokens=7))
    [choice] = completion.choices
    assert choice.finish_reason == "length"
    assert choice.text.startswith('{"name": "')
    with pytest.raises(json.JSONDecodeError):
        json.loads(choice.text)


def test_grammar_ends_an_answer_without_stop_tokens() -> None:
    grammar = Grammar.regex("[ab]{4}")
    make = compile_constraint(grammar, tiny())
    request = Request(plain_context([1, 2]), 20, constraint=make)
    [completion] = core_of(tiny().causal).run(request)
    assert re.fullmatch("[ab]{4}", tokenizer().decode(completion.token_ids))
    assert completion.finish_reason == "stop"


def test_concurrent_requests_with_one_grammar(reader: Any) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"]}
    generation = GenerationParams(json_schema=schema, temperature=1.0, seed=1, n=2)
    prompt = reader.encode("How many boats?")
    with LLMEngine(reader.causal) as engine:
        handles = [
            engine.submit_request(
                request_maker(generation, reader, 30, None)(plain_context(prompt))
            )
            for _ in range(3)
        ]
        answers = [json.loads(c.text) for h in handles for c in h.result(60).choices]
    assert len(answers) == 6
    assert all(answer["n"] in (1, 2, 3) for answer in answers)


def test_grammar_errors_come_before_queueing() -> None:
    with pytest.raises(InvalidRequest, match="the regex cannot be compiled"):
        asked(1, Grammar.regex("[a"))
    with pytest.raises(PromptTooLong):
        core_of(tiny().causal).submit(asked(1, tokens=9999))
