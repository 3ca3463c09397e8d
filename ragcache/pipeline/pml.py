"""Hand-written PML: stores and encodes schemas, and builds the prompts that import them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ragcache.db import ModuleRow, RunningJob, SchemaText, SchemaTexts
from ragcache.errors import ConfigurationError, InvalidRequest, PromptTooLong, UnknownSchema
from ragcache.models import PromptFrame
from ragcache.modes import EXACT, ISOLATED, ReuseMode
from ragcache.pipeline.answer import Citation, Timestamps
from ragcache.pipeline.chat_template import ChatTemplate
from ragcache.pipeline.module_states import portions
from ragcache.pipeline.prompt import AskedQuestion, CachedSpan, Retrieved, TokenPrompt
from ragcache.pipeline.schema_states import SchemaStates, ScopeEncoder, ScopeGroup, ScopeTokens
from ragcache_schemas import (
    Module,
    Path,
    Piece,
    Placement,
    Plan,
    Schema,
    SchemaIndex,
    Scope,
    collection_schema,
    document_module,
    module_name,
    module_names,
    parse_prompt,
    parse_schema,
    render_prompt_turns,
    render_schema_turns,
    resolve_prompt,
)


@dataclass(frozen=True, slots=True)
class LoadedSchema:
    """A stored schema, parsed, with its index after the model's chat template."""

    stored: SchemaText
    schema: Schema
    index: SchemaIndex


@dataclass(slots=True)
class PmlPipeline:
    """Stores schemas, encodes their modules, and builds prompts that import them."""

    texts: SchemaTexts
    encoder: ScopeEncoder
    template: ChatTemplate
    _loaded: dict[str, LoadedSchema] = field(default_factory=dict)

    def add(self, text: str, source: str = "<string>", placement: Placement = "schema") -> Schema:
        """Store a schema, and encode its modules and scaffolds (Prompt Cache §3.3).

        Args:
            text: The schema.
            source: A file name for error messages.
            placement: Positions of the modules.

        Raises:
            PMLError: The schema is not valid.
            PromptTooLong: A module ends outside of the model's window. Nothing was encoded.
        """
        self.template.check(text)
        schema = parse_schema(text, source=source)
        stored = SchemaText(text, placement)
        loaded = self._index(stored, schema)
        joint = [[scope_at(loaded.index, p) for p in s.modules] for s in schema.scaffolds]
        groups = []
        for scopes in (*([scope] for scope in _scopes(loaded.index.root)), *joint):
            tokens = self.encoder.tokens(scopes)
            if tokens.token_ids:
                self._check_window(schema.name, scopes[0].path, tokens)
                groups.append(tokens)
        if not self.encoder.model.causal.divides:  # prompts are answered in exact
            groups = []
        keys = [self.encoder.key(group) for group in groups]
        store = self.encoder.store
        jobs = store.jobs.within(self.texts.namespace)
        with jobs.running(f"schema {schema.name}", len(groups)) as job:
            jobs.expect(job, keys)
            for portion in portions(groups):
                with self.encoder.lease(portion, "ingest"):
                    pass
            running = RunningJob(job, jobs.session)
            store.discard(self.texts.put_schema(schema.name, stored, keys, running))
        self._loaded[schema.name] = loaded
        return schema

    def load(self, name: str) -> LoadedSchema:
        """Return a schema as it is stored now. Another process may have replaced it.

        Raises:
            UnknownSchema: There is no such schema.
        """
        stored = self.texts.get_schema(name)
        if stored is None:
            known = ", ".join(map(repr, self.texts.names())) or "none yet"
            raise UnknownSchema(
                f"there is no schema {name!r}; known: {known}. Add it with `rag.schemas.add`"
            )
        loaded = self._loaded.get(name)
        if loaded is None or loaded.stored != stored:
            loaded = self._index(stored, parse_schema(stored.text, source=name))
            self._loaded[name] = loaded
        return loaded

    def delete(self, name: str) -> None:
        """Delete a schema with the states that nothing else needs.

        Raises:
            UnknownSchema: There is no such schema.
        """
        self.encoder.store.discard(self.texts.delete_schema(name))
        self._loaded.pop(name, None)

    def build(self, text: str, mode: ReuseMode, source: str = "<string>") -> TokenPrompt:
        """Build the prompt of a PML text. Leases and computes nothing.

        Raises:
            PMLError: The prompt is not valid.
            UnknownSchema: There is no such schema.
            ConfigurationError: The mode does not suit PML prompts.
        """
        called = time.perf_counter()
        if mode not in (ISOLATED, EXACT):
            raise ConfigurationError(
                "a schema's modules are encoded at their places in the schema: use the mode "
                f"`{ISOLATED}`, or `{EXACT}` to compute everything"
            )
        self.template.check(text)
        prompt = parse_prompt(text, source=source)
        loaded = self.load(prompt.schema)
        spelled = render_prompt_turns(prompt, loaded.schema, self.template.render)
        plan = resolve_prompt(loaded.index, spelled)
        built = self.build_plan(loaded.index, plan, mode)
        times = Timestamps(called, time.perf_counter())
        return replace(built, question=replace(built.question, times=times))

    def build_plan(self, index: SchemaIndex, plan: Plan, mode: ReuseMode) -> TokenPrompt:
        """Build the prompt of a resolved plan."""
        if not mode.reads_states:
            plan = replace(plan, pieces=tuple(replace(p, cached=False) for p in plan.pieces))
        groups = self.groups(index, plan)
        group_of = {path: n for n, group in enumerate(groups) for path in group.paths}
        spans, own = place(plan.pieces, groups, group_of, self.template)
        joint = {path: group.scaffold for group in groups for path in group.paths}
        citations = [
            Citation(plan.schema, "/".join(path), "", 0.0, scaffold=joint.get(path, ""))
            for path in plan.modules
        ]
        states = SchemaStates(self.encoder, self.texts, plan.schema, tuple(groups))
        text = "".join(p.text for p in plan.pieces if p.kind == "new").strip()
        cited = zip(citations, map(group_of.get, plan.modules), strict=True)
        return TokenPrompt(
            tuple(own),
            tuple(spans),
            max(plan.length, own[-1][0] + 1),
            states if mode.reads_states else None,
            question=AskedQuestion(text, mode, "prompt"),
            retrieved=Retrieved(citations=tuple(cited)),
        )

    def groups(self, index: SchemaIndex, plan: Plan) -> list[ScopeGroup]:
        """Return the modules of a plan in the groups in which they are encoded.

        Modules of a scaffold form one group, the larger scaffold first (Prompt Cache §3.3). All
        others form a group each.
        """
        left = list(dict.fromkeys(p.path[:-1] for p in plan.pieces if p.cached))
        joint: list[tuple[Path, ...]] = []
        for scaffold in sorted(plan.scaffolds, key=lambda s: -len(s.modules)):
            members = tuple(path for path in left if path in set(scaffold.modules))
            if len(members) == len(scaffold.modules):
                joint.append(members)
                left = [path for path in left if path not in members]
        paths = [*joint, *((path,) for path in left)]
        groups = [
            ScopeGroup(group, self.encoder.tokens([scope_at(index, path) for path in group]))
            for group in paths
        ]
        return [group for group in groups if group.tokens.token_ids]

    def _check_window(self, schema: str, path: Path, tokens: ScopeTokens) -> None:
        """Raise `PromptTooLong` for a module that ends outside of the model's window."""
        end, window = tokens.position_ids[-1] + 1, self.encoder.model.causal.window
        if end > window:
            where = f"module {'/'.join(path)!r}" if path else "its own text"
            raise PromptTooLong(
                f"schema {schema!r}: {where} ends at position {end}, but the model's window holds "
                f"{window}; give it fewer or shorter modules, or, where prompts import few of "
                "them, placement='compact'"
            )

    def _index(self, stored: SchemaText, schema: Schema) -> LoadedSchema:
        placement: Placement = "compact" if stored.placement == "compact" else "schema"
        rendered = render_schema_turns(schema, self.template.render)
        index = SchemaIndex.build(rendered, self.template.count, placement)
        return LoadedSchema(stored, schema, index)


def place(
    pieces: Sequence[Piece],
    groups: Sequence[ScopeGroup],
    group_of: Mapping[Path, int],
    template: ChatTemplate,
) -> tuple[list[CachedSpan], list[tuple[int, int]]]:
    """Return the spans to read, and the tokens to compute as (position, token), in order.

    A cached piece becomes a span: a run of its module's states. All other pieces are computed
    together, and each token sees the tokens at earlier positions. A prompt that consists of imports
    computes its last token, so that the answer has a token to follow.
    """
    spans: list[CachedSpan] = []
    own: list[tuple[int, int]] = []
    for piece in pieces:
        if not piece.cached:
            own += enumerate(template.encode(piece.text), piece.start)
        elif piece.length:
            number = group_of[piece.path[:-1]]
            tokens = groups[number].tokens
            begin, end = tokens.runs[piece.path]
            offset = tokens.position_ids[begin] - tokens.start
            spans.append(CachedSpan(number, begin, end, piece.start, offset))
    if not own:
        if not spans:
            raise InvalidRequest("the prompt has no text; import a module or write a question")
        last = max(spans, key=lambda span: span.start + span.length)
        spans[spans.index(last)] = last.shortened()
        token = groups[last.group].tokens.token_ids[last.end - 1]
        own.append((last.start + last.length - 1, token))
    return [span for span in spans if span.length], sorted(own, key=lambda item: item[0])


def scope_at(index: SchemaIndex, path: Path) -> Scope:
    """Return the module at a path of the schema. The empty path is the schema itself."""
    scope = index.root
    for name in path:
        scope = scope.children[name]
    return scope


def _scopes(scope: Scope) -> Iterator[Scope]:
    yield scope
    for child in scope.children.values():
        yield from _scopes(child)


def generated_schema(collection: str, frame: PromptFrame, slots: int) -> Schema:
    """Return the union schema of a collection, whose slots take `members`."""
    return collection_schema(
        module_name(collection),
        frame.preamble,
        slots,
        collection,
        question_lead=frame.question,
        epilogue=frame.epilogue,
    )


def members(modules: Sequence[ModuleRow]) -> list[Module]:
    """Return the documents of a collection as PML modules, with their parts nested in them."""
    by_document: dict[str, list[str]] = {}
    for module in modules:
        by_document.setdefault(module.document, []).append(module.text)
    names = module_names(by_document)
    return [document_module(names[name], texts) for name, texts in by_document.items()]
