"""Validation of trees beyond their shape: names, scopes, scaffolds.

A *scope* is the schema or a module. Unions and turns are transparent: the names of all modules and
slots that a prompt could import next to each other differ. Parameters have names of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ragcache_schemas.errors import (
    DuplicateName,
    InvalidAttribute,
    InvalidName,
    LimitExceeded,
    PMLError,
    UnionConflict,
    UnknownName,
)
from ragcache_schemas.text import is_name, name_problem, title_problem
from ragcache_schemas.tree import (
    Arguments,
    Chat,
    Import,
    Module,
    Node,
    Parameter,
    Path,
    Prompt,
    Scaffold,
    Schema,
    Slot,
    Union,
)

_DEPTH = 200  # limit of trees that programs build; texts have `ScanLimits`


def schema_problems(schema: Schema) -> Iterator[PMLError]:
    """Yield every problem of `schema`, without stopping at the first."""
    if problem := title_problem(schema.name, "schema", schema.location, "schema"):
        yield problem
    scopes: list[tuple[int, Iterable[Node]]] = [(1, schema.children)]
    while scopes:
        depth, children = scopes.pop()
        modules: dict[str, Node] = {}
        parameters: dict[str, Node] = {}
        for node, _ in scope_members(children):
            if isinstance(node, Parameter):
                yield from _parameter_problems(node, parameters)
            elif isinstance(node, Module | Slot):
                yield from _module_problems(node, modules)
        inner = [m.children for m in modules.values() if isinstance(m, Module)]
        if inner and depth >= _DEPTH:
            yield LimitExceeded(f"modules are nested more than {_DEPTH} deep", schema.location)
            return
        scopes.extend((depth + 1, children) for children in reversed(inner))
    yield from _scaffold_problems(schema)


def validate_schema(schema: Schema) -> Schema:
    """Return `schema` itself, or raise its first problem, a `PMLError`."""
    for problem in schema_problems(schema):
        raise problem
    return schema


def scope_members(children: Iterable[Node]) -> Iterator[tuple[Node, Union | None]]:
    """Yield the nodes of one scope in order, each with the union that it belongs to, if any."""
    for node in children:
        if isinstance(node, Union):
            for member in node.members:
                yield member, node
        elif isinstance(node, Chat):
            yield from scope_members(node.children)
        else:
            yield node, None


def _parameter_problems(node: Parameter, seen: dict[str, Node]) -> Iterator[PMLError]:
    if problem := name_problem(node.name, "parameter", node.location, "param"):
        yield problem
    elif node.name in seen:
        yield _duplicate("parameter", node.name, node, seen[node.name])
    seen.setdefault(node.name, node)
    if node.length < 1:
        problem_text = f"the parameter {node.name!r} has length {node.length}"
        yield InvalidAttribute(problem_text, node.location, "param", "give 1 token or more")


def _module_problems(node: Module | Slot, seen: dict[str, Node]) -> Iterator[PMLError]:
    if isinstance(node, Slot):
        name = node.scope
        if not is_name(name):
            expected = 'a slot is called by letters and digits, as in slot="1"'
            problem_text = f"{node.name!r} cannot be the name of a slot"
            yield InvalidName(problem_text, node.location, "union", expected)
        if problem := title_problem(node.collection, "collection", node.location, "union"):
            yield problem
    else:
        name = node.name
        if problem := name_problem(name, "module", node.location, "module"):
            yield problem
    if name in seen:
        yield _duplicate("module", name, node, seen[name])
    seen.setdefault(name, node)


def _duplicate(what: str, name: str, node: Node, first: Node) -> DuplicateName:
    where = f" (first at {first.location})" if first.location else ""
    element = "param" if what == "parameter" else "module"
    expected = "give each its own name; a module may reuse the names of another module's content"
    return DuplicateName(f"a second {what} {name!r}{where}", node.location, element, expected)


def _scaffold_problems(schema: Schema) -> Iterator[PMLError]:
    scopes: dict[Path, dict[str, tuple[Node, Union | None]]] = {}
    for scaffold in schema.scaffolds:
        if not scaffold.modules:
            problem = "a scaffold of no modules"
            expected = 'name them from the schema down, as in modules="plan plan/miami"'
            yield InvalidAttribute(problem, scaffold.location, "scaffold", expected)
        yield from _one_scaffold(schema, scaffold, scopes)


def _one_scaffold(
    schema: Schema, scaffold: Scaffold, scopes: dict[Path, dict[str, tuple[Node, Union | None]]]
) -> Iterator[PMLError]:
    where, chosen, seen = scaffold.location, dict[int, str](), set[Path]()
    for path in scaffold.modules:
        written = "/".join(path)
        if path in seen:
            problem = f"the scaffold names {written!r} twice"
            yield DuplicateName(problem, where, "scaffold", "name it once")
        seen.add(path)
        children: Iterable[Node] = schema.children
        for depth, name in enumerate(path):
            scope = path[:depth]
            if scope not in scopes:
                scopes[scope] = _named(children)
            node, union = scopes[scope].get(name, (None, None))
            if not isinstance(node, Module):
                known = ", ".join(list(scopes[scope])[:8]) or "none"
                expected = f"the modules there are: {known}"
                yield UnknownName(f"no module {written!r}", where, "scaffold", expected)
                break
            if union is not None and chosen.setdefault(id(union), name) != name:
                problem = f"{chosen[id(union)]!r} and {name!r} are members of one union"
                expected = "a prompt holds at most one of them, so no scaffold can hold both"
                yield UnionConflict(problem, where, "scaffold", expected)
            children = node.children


def _named(children: Iterable[Node]) -> dict[str, tuple[Node, Union | None]]:
    return {n.name: (n, union) for n, union in scope_members(children) if isinstance(n, Module)}


def prompt_problems(prompt: Prompt) -> Iterator[PMLError]:
    """Yield every problem of `prompt` that shows without its schema."""
    if problem := title_problem(prompt.schema, "schema", prompt.location, "prompt"):
        yield problem
    yield from _argument_problems(prompt.arguments, prompt)
    level: list[Node] = list(prompt.children)
    for _ in range(_DEPTH):
        inner: list[Node] = []
        for node in level:
            if isinstance(node, Import):
                if problem := name_problem(node.name, "module", node.location, node.name):
                    yield problem
                yield from _argument_problems(node.arguments, node)
            if isinstance(node, Import | Chat):
                inner += node.children
        level = inner
        if not level:
            return
    yield LimitExceeded(f"imports are nested more than {_DEPTH} deep", prompt.location)


def _argument_problems(arguments: Arguments, node: Import | Prompt) -> Iterator[PMLError]:
    element = node.name if isinstance(node, Import) else "prompt"
    seen: set[str] = set()
    for name, _ in arguments:
        if problem := name_problem(name, "parameter", node.location, element):
            yield problem
        if name in seen:
            problem_text = f"the argument {name!r} is given twice"
            yield DuplicateName(problem_text, node.location, element, "give it once")
        seen.add(name)
