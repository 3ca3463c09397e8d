"""PML prompts give the logits of a reference built by hand: one ordinary forward pass over all
tokens with explicit positions and an explicit mask (Prompt Cache §3.3 and §3.4)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from ragcache import RagCache
from ragcache.db import Database, SchemaText, SchemaTexts
from ragcache.engine import EngineConfig, LLMEngine
from ragcache.errors import ConfigurationError, InvalidRequest, PromptTooLong
from ragcache.models import LoadedModel
from ragcache.modes import EXACT, ISOLATED, ROOTED, ReuseMode
from ragcache.params import OpenConfig
from ragcache.pipeline import Answer, ChatTemplate, members
from ragcache.pipeline.answer import DeferredReleases
from ragcache.pipeline.pml import PmlPipeline, SchemaStates, scope_at
from ragcache.pipeline.prompt import build_context
from ragcache.pipeline.schema_states import ScopeEncoder
from ragcache.pipeline.submit import Submitter
from ragcache.store import KVStore
from ragcache_schemas import Plan, PMLWarning, parse_prompt, render_prompt_turns, resolve_prompt
from tests.conftest import REPOSITORY
from tests.ragcache.pipeline.conftest import last_logits
from tests.tiny_models import tiny_model

SCHEMA = """
<schema name="trip">
  You plan trips.
  <module name="plan">A journey of <param name="days" len="6"/> with <param name="who" len="5"
    scaffold="two friends"/> by train.<module name="food">Vegetarian food.</module> Leave early.
  </module>
  <union>
    <module name="miami">Miami has a long beach and warm water.</module>
    <module name="oslo">Oslo has a fjord, a palace and cold winters.</module>
  </union>
  <module name="style">Answer in one line.</module>
  <scaffold modules="miami style"/>
</schema>
"""

PROMPTS = {
    "imports and a question": '<prompt schema="trip"><oslo/><style/>What is there to see?</prompt>',
    "arguments": '<prompt schema="trip"><plan days="three days" who="my aunt"/><oslo/>Go?</prompt>',
    "a shorter argument": '<prompt schema="trip"><plan days="two" who=""/><oslo/>Then?</prompt>',
    "nested imports": '<prompt schema="trip"><plan days="ten" who="us"><food/></plan>Why?</prompt>',
    "text between modules": '<prompt schema="trip"><oslo/>Also in March.<style/>Well?</prompt>',
    "a scaffold": '<prompt schema="trip"><miami/><style/>What is there to see?</prompt>',
}


@dataclass(frozen=True)
class Bench:
    """A tiny random model behind the embedded reader's tokenizer, and the same without a patch."""

    runner: PmlPipeline
    submitter: Submitter
    plain: Any

    def answer(self, prompt: str, mode: ReuseMode = ISOLATED) -> Answer:
        [pending] = self.submitter.run([self.runner.build(prompt, mode)])
        return pending.result()


@pytest.fixture
def bench(tmp_path: Path, model: LoadedModel) -> Iterator[Bench]:
    plain = tiny_model("llama", vocab_size=len(model.tokenizer))
    database = Database.open(tmp_path / "ledger.sqlite")
    template = ChatTemplate(model)
    store = KVStore.open(tmp_path, database, 2**26)
    with LLMEngine(model.causal, EngineConfig(pool_bytes=2**22)) as engine:
        scopes = ScopeEncoder(model, store, engine.encode, template)
        submitter = Submitter(model, engine, DeferredReleases(), OpenConfig(max_tokens=4))
        runner = PmlPipeline(SchemaTexts(database), scopes, template)
        runner.add(SCHEMA)
        yield Bench(runner, submitter, plain)
    database.close()


def plan_of(runner: PmlPipeline, prompt: str) -> Plan:
    loaded = runner.load("trip")
    spelled = render_prompt_turns(parse_prompt(prompt), loaded.schema, runner.template.render)
    return resolve_prompt(loaded.index, spelled)


def cached_logits(runner: PmlPipeline, plan: Plan) -> Tensor:
    prompt = runner.build_plan(runner.load(plan.schema).index, plan, ISOLATED)
    assert prompt.states is not None
    with prompt.states.lease() as lease:
        context = build_context(prompt, lease.keys, lease.states)
        return last_logits(runner.encoder.model.causal, [context])[0]


@torch.no_grad()
def reference_logits(bench: Bench, plan: Plan) -> Tensor:
    """Every module with its placeholders, then the computed tokens, in one masked forward pass."""
    tokens: list[int] = []
    positions: list[int] = []
    owner: list[int] = []  # which group a token was encoded in; -1 computed
    starts: list[int | None] = []  # where the run that holds it starts; None for placeholders
    runner = bench.runner
    placed = {piece.path: piece.start for piece in plan.pieces}
    groups = runner.groups(runner.load("trip").index, plan)
    for number, group in enumerate(each.tokens for each in groups):
        path, (begin, _) = next(iter(group.runs.items()))
        moved = placed[path] - group.position_ids[begin]
        tokens += group.token_ids
        positions += [position + moved for position in group.position_ids]
        owner += [number] * len(group.token_ids)
        run_of: list[int | None] = [None] * len(group.token_ids)
        for begin, end in group.runs.values():
            run_of[begin:end] = [group.position_ids[begin] + moved] * (end - begin)
        starts += run_of
    computed = sorted(
        (piece.start + i, token)
        for piece in plan.pieces
        if not piece.cached
        for i, token in enumerate(runner.template.encode(piece.text))
    )
    tokens += [token for _, token in computed]
    positions += [position for position, _ in computed]
    owner += [-1] * len(computed)
    starts += [-1] * len(computed)
    size = len(tokens)
    sees = torch.zeros(size, size, dtype=torch.bool)
    for q in range(size):
        for k in range(size):
            if owner[q] >= 0 or owner[k] < 0:
                sees[q, k] = owner[q] == owner[k] and k <= q
            else:
                start = starts[k]
                sees[q, k] = start is not None and start <= positions[q]
    mask = torch.where(sees, 0.0, torch.finfo(torch.float32).min)[None, None]
    logits: Tensor = bench.plain(
        torch.tensor([tokens]), attention_mask=mask, position_ids=torch.tensor([positions])
    ).logits
    return logits[0, -1]


@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_equals_the_reference_built_by_hand(bench: Bench, name: str) -> None:
    plan = plan_of(bench.runner, PROMPTS[name])
    torch.testing.assert_close(
        cached_logits(bench.runner, plan), reference_logits(bench, plan), rtol=1e-4, atol=1e-5
    )


def test_a_compact_placement_equals_the_reference(bench: Bench) -> None:
    """Modules that stand together leave no gap for what was not imported: they are moved."""
    bench.runner.add(SCHEMA, placement="compact")
    for name in ("imports and a question", "text between modules"):
        plan = plan_of(bench.runner, PROMPTS[name])
        assert any(piece.start != piece.canonical for piece in plan.pieces)
        ends = [0, *(piece.end for piece in plan.pieces)]
        assert ends[:-1] == [piece.start for piece in plan.pieces]
        torch.testing.assert_close(
            cached_logits(bench.runner, plan), reference_logits(bench, plan), rtol=1e-4, atol=1e-5
        )


def test_scaffolds_are_encoded_with_their_schema_and_cited(bench: Bench) -> None:
    answer = bench.answer(PROMPTS["a scaffold"])
    assert {source.tier for source in answer.sources} == {"host"}, "nothing is encoded again"
    assert {source.scaffold for source in answer.sources} == {"miami style"}
    alone = bench.answer(PROMPTS["nested imports"])
    assert {source.scaffold for source in alone.sources} == {""}


def test_a_long_scaffold_text_loads_with_a_warning(bench: Bench) -> None:
    """A schema of the reference implementation: what does not fit is not encoded."""
    text = """<schema name="long"><module name="ring">Ring <parameter name="whom" length="2"
        scaffold="the duty officer of the harbour at night"/> first.</module></schema>"""
    with pytest.warns(PMLWarning, match="holds 2: the rest of it is not encoded"):
        bench.runner.add(text)
    answer = bench.answer('<prompt schema="long"><ring whom="Tom"/>Who?</prompt>')
    assert answer.reuse.cached_tokens > 0


def test_one_scaffold_over_everything_equals_the_plain_prompt(bench: Bench) -> None:
    schema = (
        '<schema name="all"><module name="a">One boat is red.</module>'
        '<module name="b">Another boat is blue.</module><scaffold modules="a b"/></schema>'
    )
    bench.runner.add(schema)
    loaded = bench.runner.load("all")
    prompt = parse_prompt('<prompt schema="all"><a/><b/>Which one?</prompt>')
    plan = resolve_prompt(loaded.index, prompt)
    [group] = bench.runner.groups(loaded.index, plan)
    assert group.paths == (("a",), ("b",))
    logits = cached_logits(bench.runner, plan)
    ids = [t for p in plan.pieces for t in bench.runner.template.encode(p.text)]
    with torch.no_grad():
        plain = bench.plain(torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(logits, plain, rtol=1e-4, atol=1e-5)


def test_a_placeholder_fills_its_parameter_and_is_never_read(bench: Bench) -> None:
    """§3.3: the argument's tokens take over positions of the placeholder's."""
    runner = bench.runner
    plan = plan_of(runner, PROMPTS["a shorter argument"])
    scope = scope_at(runner.load("trip").index, ("plan",))
    tokens = runner.encoder.tokens([scope])
    read = {i for begin, end in tokens.runs.values() for i in range(begin, end)}
    assert len(tokens.token_ids) - len(read) == 6 + 5
    argument = next(p for p in plan.pieces if p.path[-1] == "@days")
    placeholder = scope.parameters["days"][1]
    assert argument.start == placeholder.start
    assert argument.length < placeholder.reserved


def test_a_schema_beyond_the_window_is_refused_unencoded(bench: Bench) -> None:
    modules = "".join(f'<module name="m{n}">{"far away " * 60}</module>' for n in range(12))
    text = f'<schema name="long">Read.{modules}</schema>'
    with pytest.raises(PromptTooLong, match=r"schema 'long': module 'm\d+' ends at position \d+"):
        bench.runner.add(text)
    assert "long" not in bench.runner.texts.names()
    assert bench.runner.add(text, placement="compact").name == "long"


def test_a_prompt_of_imports_alone_computes_its_last_token(bench: Bench) -> None:
    prompt = '<prompt schema="trip"><oslo/></prompt>'
    answer = bench.answer(prompt)
    assert answer.reuse.computed_tokens == 1
    assert answer.reuse.cached_tokens == answer.reuse.prompt_tokens - 1


def test_documents_with_similar_names_get_their_own_modules() -> None:
    rows: list[Any] = [
        SimpleNamespace(document=document, text=text)
        for document, text in (("a/b.md", "1"), ("a-b.md", "2"), ("a/b.md", "3"))
    ]
    first, second = members(rows)
    assert second.name == "a-b.md"
    assert first.name.startswith("a-b.md-")
    assert [len(first.children), len(second.children)] == [2, 1]
    assert members(rows) == members(rows)


# The pure builder: no store and no engine takes part.


def stored(name: str, text: str) -> SchemaTexts:
    """The texts of one schema, without a database."""
    texts = {name: SchemaText(text, "schema")}
    return cast("SchemaTexts", SimpleNamespace(get_schema=texts.get))


@pytest.fixture
def pipeline(reader: LoadedModel) -> PmlPipeline:
    none, template = cast("Any", None), ChatTemplate(reader)
    scopes = ScopeEncoder(reader, none, none, template)
    return PmlPipeline(stored("trip", SCHEMA), scopes, template)


@pytest.mark.parametrize("name", PROMPTS)
def test_every_token_is_read_or_computed_once(pipeline: PmlPipeline, name: str) -> None:
    prompt = pipeline.build(PROMPTS[name], ISOLATED)
    exact = pipeline.build(PROMPTS[name], EXACT)
    assert isinstance(prompt.states, SchemaStates)
    tokens = list(prompt.computed_tokens)
    for span in prompt.spans:
        group = prompt.states.groups[span.group].tokens
        tokens += enumerate(group.token_ids[span.begin : span.end], span.start)
        assert span.offset == group.position_ids[span.begin] - group.start
    assert sorted(tokens) == sorted(exact.computed_tokens)
    places = [at for at, _ in prompt.computed_tokens]
    assert places == sorted(places)
    assert (exact.states, exact.spans, exact.cacheable) == (None, (), False)
    assert prompt.end == exact.end > places[-1]
    assert (prompt.question.kind, prompt.cacheable) == ("prompt", True)
    cited = [replace(each, scaffold="") for each, _ in prompt.retrieved.citations]
    assert cited == [each for each, _ in exact.retrieved.citations]
    assert {group for _, group in exact.retrieved.citations} == {None}
    for each, number in prompt.retrieved.citations:
        assert number is not None
        assert tuple(each.module.split("/")) in prompt.states.groups[number].paths


def test_a_schema_that_another_process_changes_is_read_anew(pipeline: PmlPipeline) -> None:
    first = pipeline.load("trip")
    assert pipeline.load("trip") is first
    pipeline.texts = stored("trip", SCHEMA.replace("Oslo", "Bergen"))
    assert "Bergen" in str(pipeline.load("trip").schema)


def test_prompts_that_cannot_be_built_are_refused(pipeline: PmlPipeline) -> None:
    with pytest.raises(ConfigurationError, match="encoded at their places in the schema"):
        pipeline.build(PROMPTS["arguments"], ROOTED)
    pipeline.texts = stored("none", '<schema name="none"/>')
    with pytest.raises(InvalidRequest, match="the prompt has no text"):
        pipeline.build('<prompt schema="none"/>', ISOLATED)


# The example schemas of the reference implementation load unchanged, and prompts over them run.

REFERENCE_FOLDER = Path(os.environ.get("RAGCACHE_DATA", REPOSITORY / "../shared/data")) / "pml"
REFERENCE_PROMPTS = {
    "code_generation_bookstore.xml": (
        '<prompt schema="code-generation-bookstore"><book.py/><user.py/><store.py/>'
        "<user>Write a main function that lends a book.</user></prompt>"
    ),
    "parameterized_prompts.xml": (
        '<prompt schema="travel"><travel-plan duration="nine days"><overseas><tokyo/></overseas>'
        "</travel-plan><user>Make a plan.</user></prompt>"
    ),
    "personalization-education.xml": (
        '<prompt schema="personalization-education"><middle-school/><beginner/>'
        "<never-studied/><visual/><essay/><high-intrinsic-motivation/>"
        "<user>Explain rain.</user></prompt>"
    ),
}

needs_reference_schemas = pytest.mark.skipif(
    not REFERENCE_FOLDER.is_dir(), reason=f"no reference schemas in {REFERENCE_FOLDER}"
)


@pytest.fixture
def rag(tmp_path: Path) -> Iterator[RagCache]:
    with RagCache.open(tmp_path / "state", max_tokens=4) as opened:
        yield opened


@needs_reference_schemas
@pytest.mark.parametrize("name", REFERENCE_PROMPTS)
@pytest.mark.slow
def test_a_reference_schema_loads_and_a_prompt_over_it_runs(rag: RagCache, name: str) -> None:
    path = REFERENCE_FOLDER / name
    schema = rag.schemas.add(path.read_text(encoding="utf-8"), source=str(path))
    assert f'schema="{schema.name}"' in REFERENCE_PROMPTS[name]
    encoded = rag.stats().encoded
    answer = rag.prompt(REFERENCE_PROMPTS[name])
    assert rag.stats().encoded == encoded, "everything was encoded when the schema was added"
    assert answer.reuse.cached_tokens > 0.75 * answer.reuse.prompt_tokens
    exact = rag.prompt(REFERENCE_PROMPTS[name], mode="exact")
    assert exact.reuse.prompt_tokens == answer.reuse.prompt_tokens
    assert exact.reuse.cached_tokens == 0


@needs_reference_schemas
@pytest.mark.slow
def test_a_stored_schema_is_not_encoded_by_the_next_process(tmp_path: Path) -> None:
    name = "code_generation_bookstore.xml"
    with RagCache.open(tmp_path / "state", max_tokens=4) as rag:
        rag.schemas.add((REFERENCE_FOLDER / name).read_text(encoding="utf-8"))
        first = rag.prompt(REFERENCE_PROMPTS[name])
    with RagCache.open(tmp_path / "state", max_tokens=4) as rag:
        second = rag.prompt(REFERENCE_PROMPTS[name])
        assert rag.stats().encoded == 0
    assert second.text == first.text
    assert {source.tier for source in second.sources} == {"disk"}
