"""Figures of the prose in docstrings and docs, with the limits that `make check` enforces.

Docstrings name their subject. A *pronoun construction* leaves the noun somewhere else: "those of",
"that of", "what is …", "None is …". The limits stand in `LIMITS`; the script exits with 1 above one
of them and names each place.

Example:
    $ python tools/prose.py ragcache/engine    # one package, with the place of every finding
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PACKAGES = ("ragcache", "schemas", "connectors", "api")
SCRIPTS = ("benchmarks", "examples", "tests", "tools", "training")
"""Folders whose docstrings need a subject; their other figures count against no limit."""
SUBJECTLESS = ("Those", "That", "Of", "What", "Where", "Has")
"""First words of a docstring that leave out its subject."""

_AFTER_WHAT = "is are was were has have had it they he one a an the this its each every no nothing"
_AFTER_THOSE = "of that which who with without in on at from for not whose where before after"
PRONOUN_CONSTRUCTIONS = tuple(
    re.compile(pattern)
    for pattern in (
        rf"\b[Tt]hose (?:{_AFTER_THOSE.replace(' ', '|')})\b",
        r"\b[Tt]hat of\b",
        rf"\b[Ww]hat (?:{_AFTER_WHAT.replace(' ', '|')})\b",
        r"\bNone (?:is|are|lets|has|where|means|for|of)\b",
    )
)

LIMITS = {
    "pronoun constructions per 1,000 words": 0.5,
    "docstrings without a subject": 0,
    "classes with fields in a run-on docstring": 0,
    "`# fmt: skip`": 20,
    "words of the longest paragraph in docs": 90,
    "lines of README": 120,
    "longest test name": 60,
}


@dataclass(slots=True)
class Findings:
    """Counts over some files, and a line for each place that counts against a limit."""

    words: int = 0
    """Words in docstrings."""
    pronouns: list[str] = field(default_factory=list)
    subjectless: list[str] = field(default_factory=list)
    run_on: list[str] = field(default_factory=list)
    skips: list[str] = field(default_factory=list)

    @property
    def per_thousand(self) -> float:
        """Pronoun constructions per 1,000 words of docstrings."""
        return 1000 * len(self.pronouns) / self.words if self.words else 0.0

    def add(self, path: Path) -> None:
        """Count what one source file holds."""
        text = path.read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(), 1):
            if "# fmt: skip" in line:
                self.skips.append(f"{path}:{number}")
        for node, docstring in _docstrings(ast.parse(text, str(path))):
            place = f"{path}:{getattr(node, 'lineno', 1)}"
            self.words += len(docstring.split())
            if docstring.split(maxsplit=1)[0].rstrip(".,:") in SUBJECTLESS:
                self.subjectless.append(f"{place}: {docstring.splitlines()[0]}")
            for construction in PRONOUN_CONSTRUCTIONS:
                found = construction.finditer(docstring)
                self.pronouns += [f"{place}: {_around(docstring, each)}" for each in found]
            fields = _fields_named(node, docstring) if isinstance(node, ast.ClassDef) else []
            if fields:
                self.run_on.append(f"{place}: {', '.join(fields)}")


def _docstrings(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Yield every docstring with its node; a string under a field belongs to its class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if docstring := ast.get_docstring(node):
                yield node, docstring
            for statement in node.body[1:]:
                value = statement.value if isinstance(statement, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield value, value.value


def _fields_named(node: ast.ClassDef, docstring: str) -> list[str]:
    """Names of annotated fields that the docstring of their class describes."""
    names = [
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    ]
    prose = docstring.partition("Example:")[0]
    return [name for name in names if re.search(rf"(?<![\w`.]){name}: ", prose)]


def _around(text: str, match: re.Match[str]) -> str:
    return " ".join(text[max(0, match.start() - 30) : match.end() + 30].split())


def find(paths: Sequence[Path]) -> Findings:
    """Findings over files, and over all Python files below folders."""
    findings = Findings()
    for path in paths:
        for each in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            findings.add(each)
    return findings


def packages(root: Path) -> list[Path]:
    """Folders that are judged on their own: every package of the source and its subpackages."""
    tops = [root / name for name in PACKAGES]
    return [each.parent for top in tops for each in sorted(top.rglob("__init__.py"))]


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs and list items of Markdown, without tables, code and headings."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[*-]|\d+\.) )", prose):
        if block.strip() and block.lstrip()[0] not in "#|<":
            yield block.strip()


def longest_paragraph(root: Path) -> tuple[int, str]:
    """Words of the longest paragraph of README and docs outside ADRs, and its place."""
    files = [root / "README.md", *(root / "docs").rglob("*.md")]
    found = [
        (len(paragraph.split()), f"{file.relative_to(root)}: {paragraph[:60]}")
        for file in files
        if "adr" not in file.parts
        for paragraph in paragraphs(file.read_text(encoding="utf-8"))
    ]
    return max(found, default=(0, ""))


def longest_test_name(root: Path) -> tuple[int, str]:
    """Characters of the longest name of a test function, and the name with its file."""
    found = [
        (len(name), f"{path.relative_to(root)}: {name}")
        for path in (root / "tests").rglob("*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))
    ]
    return max(found, default=(0, ""))


def measure(root: Path) -> dict[str, tuple[float, list[str]]]:
    """Value of each row of `LIMITS` over a whole tree, with the places behind it."""
    whole = find([root / name for name in PACKAGES])
    subjectless = find([root / name for name in (*PACKAGES, *SCRIPTS)]).subjectless
    rates = {folder: find(sorted(folder.glob("*.py"))) for folder in packages(root)}
    worst = max(rates, key=lambda folder: rates[folder].per_thousand)
    paragraph, test_name = longest_paragraph(root), longest_test_name(root)
    readme = len((root / "README.md").read_text(encoding="utf-8").splitlines())
    values: tuple[tuple[float, list[str]], ...] = (
        (rates[worst].per_thousand, [f"worst: {worst}", *rates[worst].pronouns]),
        (len(subjectless), subjectless),
        (len(whole.run_on), whole.run_on),
        (len(whole.skips), whole.skips),
        (paragraph[0], [paragraph[1]]),
        (readme, []),
        (test_name[0], [test_name[1]]),
    )
    return dict(zip(LIMITS, values, strict=True))


def report(root: Path) -> int:
    """Print every row, the places of the rows above their limit, and return the exit code."""
    above = 0
    for name, (value, places) in measure(root).items():
        limit = LIMITS[name]
        print(f"{name:44}{value:>8,.1f}  at most {limit:g}")
        if value > limit:
            above += 1
            print(*(f"    {place}" for place in places), sep="\n")
    return int(above > 0)


def main(arguments: list[str] | None = None) -> int:
    """Judge the whole tree, or list the findings of some files and folders."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, help="files and folders to list")
    options = parser.parse_args(arguments)
    if not options.paths:
        return report(Path())
    found = find(options.paths)
    print(f"{found.words:,} words, {found.per_thousand:.2f} pronoun constructions per 1,000")
    for places in (found.pronouns, found.subjectless, found.run_on, found.skips):
        print(*places, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
