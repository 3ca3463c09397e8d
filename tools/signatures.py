"""Compares the public interface in Python with the signatures of a release.

The public interface is everything that `docs/reference/python.md` names, and the exported names of
the connectors and of the language PML. griffe reads it without importing it, writes it as one stub
file, and finds what programs of an earlier release would miss: names, parameters, fields, defaults.

Example:
    $ python tools/signatures.py                          # each frozen release; 1 if one is broken
    $ python tools/signatures.py --write signatures.pyi   # freezes this tree
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import griffe

_HOMES = (".", "schemas", "connectors", "api")
_EXPORTING = (
    "ragcache_schemas",
    *(f"ragcache_connectors.{name}" for name in ("langchain", "llama_index", "haystack")),
)
_FROZEN = "tests/compatibility/*/signatures.pyi"
_COLOR = re.compile(r"\x1b\[\d+m")
_UNLISTED = ("model_config", "withheld")
_ANNOTATED = re.compile(r"^Annotated\[(.+?), (?:[A-Z]\w*\(|\w+$).*\]$", re.DOTALL)


def public_objects(root: Path) -> Iterator[griffe.Object]:
    """Yield the public classes and functions of a source tree.

    Raises:
        KeyError: The reference names something that is not there.
    """
    reference = (root / "docs/reference/python.md").read_text(encoding="utf-8")
    loader = griffe.GriffeLoader(search_paths=[str(root / each) for each in _HOMES])
    for path in (*re.findall(r"^::: (\S+)$", reference, re.MULTILINE), *_EXPORTING):
        if path.partition(".")[0] not in loader.modules_collection:
            loader.load(path.partition(".")[0])
            loader.resolve_aliases(implicit=True, external=False)
        found = _target(loader.modules_collection[path])
        yield from _exported(found) if found.is_module else [found]


def _exported(module: griffe.Object) -> Iterator[griffe.Object]:
    """Yield classes and functions: of `__all__`, or else all public ones that a module defines."""
    for name, member in module.members.items():
        if name in module.exports if module.exports else not member.is_alias:
            each = _target(member)
            if (each.is_class or each.is_function) and not name.startswith("_"):
                yield each


def _target(member: griffe.Object | griffe.Alias) -> griffe.Object:
    return member.final_target if isinstance(member, griffe.Alias) else member


def write_stub(root: Path) -> str:
    """Return the public interface of a source tree as a stub file, sorted by name."""
    found = {each.name: each for each in public_objects(root)}
    blocks = ["\n".join(_lines(found[name])) for name in sorted(found)]
    return "\n".join(blocks) + "\n"


def _lines(each: griffe.Object) -> Iterator[str]:
    """Yield the lines of a class with inherited members, of a function or of a field."""
    if isinstance(each, griffe.Class):
        yield f"class {each.name}:"
        members = [
            f"    {line}"
            for name, member in sorted(each.all_members.items())
            if name == "__init__" or (not name.startswith("_") and name not in _UNLISTED)
            for line in _lines(_target(member))
        ]
        yield from members or ["    ..."]
    elif isinstance(each, griffe.Function):
        yield from (f"@{kind}" for kind in ("classmethod", "staticmethod") if kind in each.labels)
        yield f"def {each.name}{_parameters(each)}: ..."
    elif isinstance(each, griffe.Attribute):
        if each.annotation is None:  # made by a call, as `RagCache.open` is
            yield f"{each.name}: object"
            return
        value = "" if each.value is None else f" = {each.value}"
        yield f"{each.name}: {_plain(str(each.annotation))}{value}"


def _plain(annotation: str) -> str:
    """Leave out the checks and descriptions of a field."""
    return _ANNOTATED.sub(r"\1", annotation)


def _parameters(function: griffe.Function) -> str:
    """Return parameters and result, with the `self` or `cls` that griffe leaves out."""
    text = function.signature(name="f")[1:]
    first = next((each.name for each in function.parameters), "")
    if first not in ("self", "cls"):
        return text
    return f"({first}{'' if text[1] == ')' else ', '}{text[1:]}"


def breakages(frozen: str, now: str) -> list[str]:
    """Return in words what a program of a frozen interface would miss."""
    old, new = (griffe.visit("api", Path("api.pyi"), text) for text in (frozen, now))
    explained = [
        each.explain(style=griffe.ExplanationStyle.ONE_LINE).partition(": ")[2]
        for each in griffe.find_breaking_changes(old, new)
    ]
    return [*(_COLOR.sub("", line) for line in explained), *_changed_defaults(old, new)]


def _changed_defaults(old: griffe.Module, new: griffe.Module) -> Iterator[str]:
    """Yield the fields with another default, which griffe does not compare."""
    for name, each in old.classes.items():
        now = new.classes.get(name)
        for field, attribute in each.attributes.items():
            other = None if now is None else now.attributes.get(field)
            if other is not None and str(attribute.value) != str(other.value):
                yield f"{name}.{field}: default was changed: {attribute.value} -> {other.value}"


def main(arguments: list[str] | None = None) -> int:
    """Compare, or write. Returns 1 if a release is broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, default=Path())
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the stub file")
    options = parser.parse_args(arguments)
    now = write_stub(options.root)
    if options.write is not None:
        options.write.write_text(now, encoding="utf-8")
        return 0
    broken = False
    for file in sorted(options.root.glob(_FROZEN)):
        for line in breakages(file.read_text(encoding="utf-8"), now):
            print(f"{file.parent.name}: {line}")
            broken = True
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
