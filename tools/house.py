"""Figures of the source tree, and two rules: no import circles, no class name defined twice.

Tokens are counted without line ends, indents and comments, so that they do not depend on layout.

Circles between modules and circles between the packages and modules of one package are found. The
scripts in `benchmarks/` keep the rules, and count in no figure.

`from package import name` imports the submodule of that name, if there is one, and else the
package's `__init__`. Circles are strongly connected modules over all imports, also those in
functions and under `TYPE_CHECKING`. A module with one importer is one that at most one other module
of the source imports. Packages (their `__init__`) are not counted, nor are modules that only a
package imports: those are what it offers. Classes named `_X` are private to their module.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import sys
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOTS = {"ragcache": ".", "schemas": "schemas", "connectors": "connectors", "api": "api"}
SCRIPTS = "benchmarks"
MODES = frozenset({"rooted", "primed", "isolated", "exact"})
TIERS = "ragcache.store.tiers"
_LAYOUT = (
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.COMMENT,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


class SourceFile:
    """A source file: its lines, classes and imports."""

    def __init__(self, name: str, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        nodes = list(ast.walk(ast.parse(text, str(path))))
        self.name, self.is_package = name, path.name == "__init__.py"
        self.lines = len(text.splitlines())
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        self.tokens = sum(token.type not in _LAYOUT for token in tokens)
        self.spells_modes = any(_spells_mode(node) for node in nodes)
        self.class_checks = [name for node in nodes for name in _checked_classes(node)]
        self.imports = [each for node in nodes for each in self._imports(node)]
        statements = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        self.import_lines = sum((n.end_lineno or n.lineno) - n.lineno + 1 for n in statements)
        self.classes = [n.name for n in nodes if isinstance(n, ast.ClassDef) and n.name[0] != "_"]
        self.methods = {n.name: _public_methods(n) for n in nodes if isinstance(n, ast.ClassDef)}

    def _imports(self, node: ast.AST) -> Iterator[tuple[str, str]]:
        """The module that is named, and the name taken from it or ""."""
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            parts = self.name.split(".")
            above = parts[: len(parts) - node.level + self.is_package] if node.level else []
            source = ".".join(filter(None, [*above, node.module]))
            yield from ((source, alias.name) for alias in node.names)


class Tree:
    """All modules under a root, by name."""

    def __init__(self, root: Path) -> None:
        self.modules = dict[str, SourceFile]()
        for folder, base in {**ROOTS, SCRIPTS: SCRIPTS}.items():
            for path in sorted((root / folder).rglob("*.py")):
                parts = path.relative_to(root / base).with_suffix("").parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                self.modules[name] = SourceFile(name, path)
        scripts = (root / SCRIPTS).rglob("*.py")
        self.scripts = {path.relative_to(root / SCRIPTS).stem for path in scripts}

    def target(self, source: str, name: str) -> str:
        """The module that an import names; "" outside the tree."""
        submodule = f"{source}.{name}"
        return submodule if submodule in self.modules else source if source in self.modules else ""

    def graph(self) -> dict[str, set[str]]:
        """The modules that each module imports."""
        return {
            name: {self.target(*each) for each in module.imports} - {"", name}
            for name, module in self.modules.items()
        }

    def sections(self) -> dict[str, str]:
        """Modules that at most one other imports, and that one or ""."""
        importers: dict[str, list[str]] = {name: [] for name in self.modules}
        for name, targets in self.graph().items():
            for target in targets if name not in self.scripts else ():
                importers[target].append(name)
        found = {name: "".join(by) for name, by in importers.items() if len(by) < 2}
        packages = {name for name, module in self.modules.items() if module.is_package}
        left_out = packages | self.scripts
        return {n: by for n, by in found.items() if n not in left_out and by not in packages}

    def circles(self) -> list[list[str]]:
        """Circles of modules, and circles of the members of each package."""
        graph = self.graph()
        rings = _rings(graph)
        for package in (name for name, module in self.modules.items() if module.is_package):
            rings |= _rings(self._members(graph, package))
        return sorted(sorted(ring) for ring in rings)

    def _members(self, graph: Mapping[str, set[str]], package: str) -> dict[str, set[str]]:
        """The packages and modules in a package, with imports between all that they hold."""
        depth = package.count(".") + 2
        members: dict[str, set[str]] = {}
        for name, targets in graph.items():
            if name.startswith(f"{package}."):
                member = ".".join(name.split(".")[:depth])
                inside = (each for each in targets if each.startswith(f"{package}."))
                found = {".".join(each.split(".")[:depth]) for each in inside}
                members.setdefault(member, set()).update(found - {member})
        return members


def _public_methods(node: ast.ClassDef) -> int:
    """Number of a class's public methods and properties, without inherited ones."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    return sum(isinstance(each, functions) and each.name[0] != "_" for each in node.body)


def _rings(graph: Mapping[str, set[str]]) -> set[frozenset[str]]:
    ahead = {name: _reachable(graph, name) for name in graph}  # itself only on a circle
    return {frozenset(o for o in ahead[n] if n in ahead[o]) for n in graph if n in ahead[n]}


def _reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    found, waiting = set[str](), [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting.extend(new)
    return found


def _spells_mode(node: ast.AST) -> bool:
    """Whether a node is a text that is a mode, such as `primed:16`."""
    value = node.value if isinstance(node, ast.Constant) else None
    return isinstance(value, str) and value.partition(":")[0] in MODES and " " not in value


def _checked_classes(node: ast.AST) -> list[str]:
    """Names of the classes that an `isinstance` asks for."""
    if not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance"):
        return []
    return [each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)]


def _tier_checks(modules: Sequence[SourceFile]) -> int:
    """Number of checks on the class of a tier outside the package of tiers."""
    tiers = {name for each in modules if each.name.startswith(TIERS) for name in each.classes}
    outside = (each for each in modules if not each.name.startswith(TIERS))
    return sum(name in tiers for each in outside for name in each.class_checks)


def measure(root: Path) -> dict[str, Any]:
    """All figures of the tree under `root`; `circles` and `doubled_classes` should be empty."""
    tree = Tree(root)
    modules = [each for name, each in tree.modules.items() if name not in tree.scripts]
    lines = [module.lines for module in modules]
    homes = dict[str, list[str]]()
    everywhere = tree.modules.values()
    for name, home in sorted((name, each.name) for each in everywhere for name in each.classes):
        homes.setdefault(name, []).append(home)
    return {
        "files": len(lines),
        "lines": sum(lines),
        "tokens": sum(module.tokens for module in modules),
        "median_lines": sorted(lines)[len(lines) // 2],
        "import_share": sum(module.import_lines for module in modules) / sum(lines),
        "rag_cache_methods": sum(module.methods.get("RagCache", 0) for module in modules),
        "tier_checks": _tier_checks(modules),
        "mode_files": [module.name for module in modules if module.spells_modes],
        "test_files": len(list((root / "tests").rglob("*.py"))),
        "one_importer": sorted(tree.sections()),
        "circles": tree.circles(),
        "doubled_classes": {name: at for name, at in homes.items() if len(at) > 1},
    }


def in_words(house: dict[str, Any]) -> str:
    short = {n: len(v) if isinstance(v, list | dict) else round(v, 3) for n, v in house.items()}
    lines = [f"{name.replace('_', ' '):18}{figure:>8,}" for name, figure in short.items()]
    lines += [f"circle: {' <-> '.join(circle)}" for circle in house["circles"]]
    lines += [f"class {name}: {', '.join(at)}" for name, at in house["doubled_classes"].items()]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Prints the figures; 1 where a rule is broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("root", nargs="?", type=Path, default=Path())
    parser.add_argument("--json", action="store_true", help="print everything, as JSON")
    options = parser.parse_args(arguments)
    house = measure(options.root)
    print(json.dumps(house, indent=2) if options.json else in_words(house))
    return int(bool(house["circles"] or house["doubled_classes"]))


if __name__ == "__main__":
    sys.exit(main())
