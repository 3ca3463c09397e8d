"""PML prompts: resolve, lease, place, submit."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from ragcache.engine import Request
from ragcache.errors import ConfigurationError, UnknownSchema
from ragcache.pipeline.answer import Marks, Ready, Source
from ragcache.pipeline.asked import Asked
from ragcache.pipeline.generation import Generation
from ragcache.pipeline.module_states import ScopeEncoder, ScopeTokens, portions
from ragcache.pipeline.placing import Owner, Placed, place
from ragcache.pipeline.submitting import Submitter
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


@dataclass(slots=True)
class PromptRunner:
    """Keeps schemas, encodes their modules, and submits prompts over them."""

    texts: SchemaTexts
    encoder: ScopeEncoder
    template: TemplateText
    submitter: Submitter
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
        jobs = store.jobs.within(self.texts.namespace)
        with jobs.running(f"schema {schema.name}", len(groups)) as job:
            jobs.expect(job, keys)
            for portion in portions(groups):
                with self.encoder.lease(portion, "ingest"):
                    pass
            store.discard(self.texts.put(schema.name, SchemaText(text, placement), keys, job))
        self._schemas[schema.name] = loaded
        return schema

    def start(
        self, text: str, mode: str, generation: Generation, source: str = "<string>"
    ) -> Asked:
        """Resolves, leases and submits a prompt. Raises `PMLError`, `UnknownSchema`,
        `InvalidRequest` or `PromptTooLong` before anything is computed."""
        called = time.perf_counter()
        if mode not in ("isolated", "exact"):
            raise ConfigurationError(
                "a schema's modules are encoded at their places in the schema: use the mode "
                "`isolated`, or `exact` to compute everything"
            )
        self.template.check(text)
        prompt = parse_prompt(text, source=source)
        loaded = self.load(prompt.schema)
        spelled = spell_prompt(prompt, loaded.schema, self.template.render)
        plan = resolve_prompt(loaded.index, spelled)
        if mode == "exact":
            pieces = tuple(replace(piece, cached=False) for piece in plan.pieces)
            plan = replace(plan, pieces=pieces)
        draft = self._draft(plan, generation, reuse=mode != "exact")
        resolved = time.perf_counter()
        if mode == "exact":
            placed = place(plan.pieces, {}, self.template, plan.length)
            ready = _ready(plan, placed, mode, None, None, (called, resolved))
            return self.submitter.submit(draft, placed.context, ready, None)
        groups = self.groups(loaded.index, plan)
        with ExitStack() as undo:
            lease = self.encoder.lease([tokens for _, tokens in groups])
            undo.callback(lease.release)
            made = [key for key in lease.keys if lease.source[key] == "encoded"]
            if made:
                self.texts.own(plan.schema, made)
            owners = {
                path: Owner(tokens, states, lease.source[key], key)
                for (paths, tokens), states, key in zip(
                    groups, lease.states, lease.keys, strict=True
                )
                for path in paths
            }
            placed = place(plan.pieces, owners, self.template, plan.length)
            ready = _ready(plan, placed, mode, owners, lease, (called, resolved))
            asked = self.submitter.submit(draft, placed.context, ready, lease)
            undo.pop_all()
        return asked

    def _draft(self, plan: Plan, generation: Generation, *, reuse: bool) -> Request:
        """One token is computed in any case, so that there is something to continue from."""
        own = max(1, plan.computed_tokens)
        documents = plan.computed_tokens + plan.cached_tokens - own
        return self.submitter.draft(own, documents, generation, end=plan.length, reuse=reuse)

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
        groups = [
            (group, self.encoder.tokens([scope_at(index, path) for path in group]))
            for group in paths
        ]
        return [(group, tokens) for group, tokens in groups if tokens.token_ids]

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

    def delete(self, name: str) -> None:
        """Deletes a schema with the states that nothing else needs. Raises `UnknownSchema`."""
        self.encoder.store.discard(self.texts.delete(name))
        self._schemas.pop(name, None)

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


def _ready(
    plan: Plan,
    placed: Placed,
    mode: str,
    owners: Mapping[Path, Owner] | None,
    lease: Lease | None,
    times: tuple[float, float],
) -> Ready:
    return Ready(
        question="".join(p.text for p in plan.pieces if p.kind == "new").strip(),
        sources=tuple(
            Source(plan.schema, "/".join(path), "", 0.0, _tier(path, owners))
            for path in plan.modules
        ),
        mode=mode,
        prompt_tokens=placed.context.prompt_tokens,
        cached_tokens=placed.cached_tokens,
        bytes_moved=dict(lease.moved) if lease is not None else {},
        marks=Marks(*times, time.perf_counter()),
        created_tokens=placed.created_tokens,
        kind="prompt",
        collection=plan.schema,
        tokens=placed.tokens,
    )
