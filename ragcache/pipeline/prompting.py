"""PML prompts: resolve, lease, place, run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ragcache.config import Mode, Settings
from ragcache.engine import Request, check_window, generate
from ragcache.errors import ConfigurationError, UnknownSchema
from ragcache.pipeline.answer import Answer, Reuse, Source, Timings
from ragcache.pipeline.placing import Owner, Placed, place
from ragcache.pipeline.portions import portions
from ragcache.pipeline.scope_states import ScopeEncoder, ScopeTokens
from ragcache.pipeline.template_text import TemplateText
from ragcache.store import Lease, SchemaText, SchemaTexts
from ragcache_schemas import (
    Path,
    Placement,
    Plan,
    Schema,
    SchemaIndex,
    Scope,
    parse_prompt,
    parse_schema,
    resolve_prompt,
    spell_prompt,
    spell_schema,
)


@dataclass(frozen=True, slots=True)
class LoadedSchema:
    """A schema as its author wrote it, and the index of it in the words of the model's template."""

    schema: Schema
    index: SchemaIndex


@dataclass(frozen=True, slots=True)
class _Marks:
    """`time.perf_counter` readings, in seconds."""

    called: float
    resolved: float


@dataclass(slots=True)
class PromptRunner:
    """Keeps schemas, encodes their modules, and answers prompts over them."""

    texts: SchemaTexts
    encoder: ScopeEncoder
    template: TemplateText
    settings: Settings
    _schemas: dict[str, LoadedSchema] = field(default_factory=dict)

    def add(self, text: str, source: str = "<string>", placement: Placement = "schema") -> Schema:
        """Stores a schema and encodes all its modules (§3.3). Raises `PMLError`."""
        self.template.check(text)
        schema = parse_schema(text, source=source)
        loaded = self._index(schema, placement)
        groups = [self.encoder.tokens([scope]) for scope in _scopes(loaded.index.root)]
        groups = [group for group in groups if group.token_ids]
        keys = [self.encoder.key(group) for group in groups]
        store = self.encoder.store
        with store.jobs.running(f"schema {schema.name}", len(groups)) as job:
            store.jobs.expect(job, keys)
            for portion in portions(groups):
                with self.encoder.lease(portion, "ingest"):
                    pass
            store.discard(self.texts.put(schema.name, SchemaText(text, placement), keys, job))
        self._schemas[schema.name] = loaded
        return schema

    def answer(self, text: str, mode: Mode, source: str = "<string>") -> Answer:
        """Answers a prompt. Raises `PMLError`, `UnknownSchema` or `PromptTooLong`."""
        called = time.perf_counter()
        if mode == "rooted":
            raise ConfigurationError(
                "a schema's modules are encoded at their places in the schema: use the mode "
                "`isolated`, or `exact` to compute everything"
            )
        self.template.check(text)
        prompt = parse_prompt(text, source=source)
        loaded = self.load(prompt.schema)
        spelled = spell_prompt(prompt, loaded.schema, self.template.render)
        plan = resolve_prompt(loaded.index, spelled)
        check_window(
            plan.cached_tokens,
            plan.computed_tokens,
            window=self.encoder.model.causal.window,
            max_new_tokens=self.settings.max_new_tokens,
        )
        resolved = time.perf_counter()
        if mode == "exact":
            everything = [replace(piece, cached=False) for piece in plan.pieces]
            placed = place(everything, {}, self.template, plan.length)
            return self._run(plan, placed, mode, None, _Marks(called, resolved))
        groups = self.groups(loaded.index, plan)
        with self.encoder.lease([tokens for _, tokens in groups]) as lease:
            made = [key for key in lease.keys if lease.source[key] == "encoded"]
            if made:
                self.texts.own(plan.schema, made)
            owners = {
                path: Owner(tokens, states, lease.source[key])
                for (paths, tokens), states, key in zip(
                    groups, lease.states, lease.keys, strict=True
                )
                for path in paths
            }
            placed = place(plan.pieces, owners, self.template, plan.length)
            return self._run(plan, placed, mode, owners, _Marks(called, resolved), lease)

    def _run(
        self,
        plan: Plan,
        placed: Placed,
        mode: Mode,
        owners: Mapping[Path, Owner] | None,
        marks: _Marks,
        lease: Lease | None = None,
    ) -> Answer:
        assembled = time.perf_counter()
        model = self.encoder.model
        request = Request(placed.context, self.settings.max_new_tokens, model.stop_ids)
        [completion] = generate(model.causal, [request])
        prompt_tokens = placed.context.prompt_tokens
        return Answer(
            question="".join(p.text for p in plan.pieces if p.kind == "new").strip(),
            text=model.decode(list(completion.token_ids)).strip(),
            sources=tuple(
                Source(plan.schema, "/".join(path), "", 0.0, _tier(path, owners))
                for path in plan.modules
            ),
            mode=mode,
            finish_reason=completion.finish_reason,
            reuse=Reuse(
                prompt_tokens,
                placed.cached_tokens,
                prompt_tokens - placed.cached_tokens,
                dict(lease.moved) if lease is not None else {},
            ),
            timings=Timings(
                retrieve=marks.resolved - marks.called,
                assemble=assembled - marks.resolved,
                first_token=completion.first_token_at - marks.called,
                total=completion.finished_at - marks.called,
            ),
        )

    def groups(self, index: SchemaIndex, plan: Plan) -> list[tuple[tuple[Path, ...], ScopeTokens]]:
        """The modules of a plan as they are encoded: together where a scaffold says so (§3.3),
        the larger scaffold first, else one by one."""
        left = list(dict.fromkeys(p.path[:-1] for p in plan.pieces if p.cached))
        together: list[tuple[Path, ...]] = []
        for scaffold in sorted(plan.scaffolds, key=lambda s: -len(s.modules)):
            members = tuple(path for path in left if path in set(scaffold.modules))
            if len(members) == len(scaffold.modules):
                together.append(members)
                left = [path for path in left if path not in members]
        paths = [*together, *((path,) for path in left)]
        return [
            (group, self.encoder.tokens([scope_at(index, path) for path in group]))
            for group in paths
        ]

    def load(self, name: str) -> LoadedSchema:
        """The schema of a name. Raises `UnknownSchema`."""
        if name not in self._schemas:
            stored = self.texts.get(name)
            if stored is None:
                known = ", ".join(map(repr, self.texts.names())) or "none yet"
                raise UnknownSchema(
                    f"there is no schema {name!r}; known: {known}. Add it with `rag.add_schema`"
                )
            schema = parse_schema(stored.text, source=name)
            placement: Placement = "compact" if stored.placement == "compact" else "schema"
            self._schemas[name] = self._index(schema, placement)
        return self._schemas[name]

    def _index(self, schema: Schema, placement: Placement) -> LoadedSchema:
        spelled = spell_schema(schema, self.template.render)
        return LoadedSchema(schema, SchemaIndex.of(spelled, self.template.count, placement))


def _scopes(scope: Scope) -> Iterator[Scope]:
    yield scope
    for child in scope.children.values():
        yield from _scopes(child)


def scope_at(index: SchemaIndex, path: Path) -> Scope:
    """The module at a path of the schema; the schema itself at the empty path."""
    scope = index.root
    for name in path:
        scope = scope.children[name]
    return scope


def _tier(path: Path, owners: Mapping[Path, Owner] | None) -> str:
    if owners is None or path not in owners:
        return "computed"
    return owners[path].source
