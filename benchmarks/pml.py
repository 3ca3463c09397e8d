"""The language at size: parsing and laying out a large schema, and resolving prompts against it.

python benchmarks/pml.py --json FILE
"""

from __future__ import annotations

import random
import statistics
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import typer
from harness import (
    JsonFile,
    Progress,
    describe_machine,
    plain_table,
    print_figures,
    run_benchmark,
    seconds,
)

from ragcache_schemas import (
    Import,
    Module,
    Parameter,
    Prompt,
    Schema,
    SchemaIndex,
    Text,
    Union,
    parse_prompt,
    parse_schema,
    resolve_prompt,
    write_prompt,
    write_schema,
)


@dataclass(frozen=True, slots=True)
class PmlSetting:
    """The schema: modules in unions of `union`, each of about `module_characters`."""

    modules: int = 10_000
    module_characters: int = 500
    union: int = 10
    imports: int = 8
    parse_runs: int = 3
    resolve_runs: int = 200


def bench_pml(
    setting: PmlSetting | None = None, progress: Progress = lambda _: None
) -> dict[str, Any]:
    """Times the language alone: tokens are counted as a quarter of the characters.

    parse_layout_s: seconds from the text of the schema to its index, laid out; the median.
    resolve_ms: milliseconds from a parsed prompt to its plan; the median over different prompts,
    and `resolve_worst_ms` the longest. `parse_layout_half_s` is half the modules, for linearity.
    """
    setting = setting or PmlSetting()
    progress("writing the schema")
    text = write_schema(_schema(setting, setting.modules))
    half = write_schema(_schema(setting, setting.modules // 2))
    progress("parsing and laying out")
    whole_s = [seconds(lambda: _index(text)) for _ in range(setting.parse_runs)]
    half_s = [seconds(lambda: _index(half)) for _ in range(setting.parse_runs)]
    progress("resolving prompts")
    index = _index(text)
    rng = random.Random(2)
    prompts = [_prompt(setting, rng) for _ in range(setting.resolve_runs)]
    resolve_ms: list[float] = []
    parse_ms: list[float] = []
    for prompt in prompts:
        parse_ms.append(1000 * seconds(partial(parse_prompt, prompt)))
        resolve_ms.append(1000 * seconds(partial(resolve_prompt, index, parse_prompt(prompt))))
    return {
        "parse_layout_s": statistics.median(whole_s),
        "resolve_ms": statistics.median(resolve_ms),
        "resolve_worst_ms": max(resolve_ms),
        "parse_prompt_ms": statistics.median(parse_ms),
        "parse_layout_half_s": statistics.median(half_s),
        "characters": len(text),
        "runs": {"parse_layout_s": whole_s, "parse_layout_half_s": half_s},
        "setting": asdict(setting),
        "machine": describe_machine(),
    }


def _index(text: str) -> SchemaIndex:
    return SchemaIndex.build(parse_schema(text), _count)


def _count(text: str) -> int:
    return (len(text) + 3) // 4


def _schema(setting: PmlSetting, modules: int) -> Schema:
    """Unions of modules, one module in ten with a parameter, with a line of text before each."""
    rng = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyzé中"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(500)]
    words += ["<", "a<b", "&&", "a & b"] * 3
    nodes: list[Text | Union] = []
    for first in range(0, modules, setting.union):
        nodes.append(Text(f"Part {first}:\n"))
        members = []
        for number in range(first, min(first + setting.union, modules)):
            text = " ".join(rng.choices(words, k=setting.module_characters))
            text = text[: setting.module_characters].strip() + "\n"
            asked = (Parameter("value", 8),) if number % 10 == 0 else ()
            members.append(Module(f"m{number}", (Text(text), *asked)))
        nodes.append(Union(tuple(members)))
    return Schema("large", tuple(nodes))


def _prompt(setting: PmlSetting, rng: random.Random) -> str:
    """Imports from different unions, and a question."""
    unions = sorted(rng.sample(range(setting.modules // setting.union), setting.imports))
    imports = []
    for union in unions:
        number = union * setting.union + rng.randrange(setting.union)
        imports.append(Import(f"m{number}", (("value", "eight"),) if number % 10 == 0 else ()))
    return write_prompt(Prompt("large", (*imports, Text("What does it say?"))))


def main(
    modules: Annotated[int, typer.Option(min=200, help="Modules of 500 characters.")] = 10_000,
    json_file: JsonFile = None,
) -> None:
    """Parsing and laying out a large schema, resolving prompts against it."""
    result = run_benchmark(lambda progress: bench_pml(PmlSetting(modules=modules), progress))
    table = plain_table(f"{modules:,} modules, {result['characters']:,} characters", "time")
    for name, time in (
        ("schema: parse and lay out", f"{result['parse_layout_s']:.2f} s"),
        ("half of it", f"{result['parse_layout_half_s']:.2f} s"),
        ("prompt: parse", f"{result['parse_prompt_ms']:.2f} ms"),
        ("prompt: resolve", f"{result['resolve_ms']:.2f} ms"),
        ("the slowest of them", f"{result['resolve_worst_ms']:.2f} ms"),
    ):
        table.add_row(name, time)
    print_figures([table], result, json_file)


if __name__ == "__main__":
    typer.run(main)
