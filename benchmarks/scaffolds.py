"""What scaffolds that are found from retrieval would save, within a budget of bytes.

A scaffold is made of modules that were retrieved together `after` times: of a whole selection, of
every pair of neighbors in it, or of every run. Those of a question are read the longest first, and
encoded when they are first read.

python benchmarks/scaffolds.py --json FILE
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from recomputation import (
    AskedQuestion,
    QuestionSet,
    handbook,
    over_documents,
    retrieve,
    splitter,
)

from ragcache.bench.harness import Progress, describe_machine
from ragcache.evaluation import load_dataset
from ragcache.models import LoadedModel, load_model
from ragcache_api.cli.console import plain_table
from ragcache_api.cli.measure import JsonFile, print_figures, run_benchmark

FINDERS = ("selections", "selections, replaced", "pairs, replaced", "runs, replaced")
"""What becomes a scaffold. Replaced: where the budget is full, by one that was retrieved more
often; else first come, first kept."""

Selection = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScaffoldSetting:
    """budgets: bytes of scaffolds over those of all modules. exponents: of Zipf's law, by which
    `draws` questions are drawn; 0 asks each once."""

    k: int = 4
    module_tokens: int = 384
    after: int = 2
    budgets: tuple[float, ...] = (0.1, 0.25, 1.0)
    exponents: tuple[float, ...] = (0.0, 0.7, 1.0)
    draws: int = 2000


def simulate(
    trace: Sequence[Selection], lengths: Sequence[int], finder: str, after: int, budget: float
) -> dict[str, float]:
    """lengths: tokens of each module; budget: in tokens.

    encoded: tokens that were encoded for scaffolds over all module tokens of the prompts; seen: the
    share of modules, but the first of a prompt, whose states saw the module before them; kept:
    tokens of scaffolds at the end.
    """
    counts: Counter[Selection] = Counter()
    known: dict[Selection, bool] = {}  # whether it was encoded
    size: Callable[[Selection], int] = lambda run: sum(lengths[at] for at in run)  # noqa: E731
    encoded = read = later = seen = used = 0
    for selection in trace:
        found = list(_candidates(selection, finder))
        counts.update(found)
        for run in sorted(found, key=len, reverse=True):
            if run in known or counts[run] < after:
                continue
            while "replaced" in finder and known and used + size(run) > budget:
                rarest = min(known, key=counts.__getitem__)
                if counts[rarest] >= counts[run]:
                    break
                used -= size(rarest)
                del known[rarest]
            if used + size(run) <= budget:
                known[run], used = False, used + size(run)
        for run in _longest(selection, known):
            if len(run) > 1 and not known[run]:
                known[run] = True
                encoded += size(run)
            seen += len(run) - 1
        read += size(selection)
        later += len(selection) - 1
    return {"encoded": encoded / read, "seen": seen / later, "kept": used}


def _candidates(selection: Selection, finder: str) -> Iterator[Selection]:
    count = len(selection)
    if count < 2:
        return
    longest = 2 if finder.startswith("pairs") else count
    shortest = count if finder.startswith("selections") else 2
    for length in range(shortest, longest + 1):
        yield from (selection[at : at + length] for at in range(count - length + 1))


def _longest(selection: Selection, known: dict[Selection, bool]) -> Iterator[Selection]:
    """The selection in runs, from the front the longest one that is known."""
    while selection:
        lengths = range(len(selection), 1, -1)
        length = next((n for n in lengths if selection[:n] in known), 1)
        yield selection[:length]
        selection = selection[length:]


def bench_scaffolds(
    model: LoadedModel, sets: dict[str, QuestionSet], setting: ScaffoldSetting,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Rows of `simulate`, whose `kept` is over all modules' tokens here, by set, exponent, budget
    and finder."""
    rows = []
    for name, read in sets.items():
        progress(f"{name}: retrieving")
        selections, lengths = _selections(
            model, read(splitter(model, setting.module_tokens)), setting
        )
        order = random.Random(0).sample(selections, len(selections))
        for exponent in setting.exponents:
            weights = [rank**-exponent for rank in range(1, len(order) + 1)]
            trace = random.Random(1).choices(order, weights, k=setting.draws)
            for budget in setting.budgets:
                limit = budget * sum(lengths)
                for finder in FINDERS:
                    found = simulate(
                        trace if exponent else order, lengths, finder, setting.after, limit
                    )
                    found["kept"] /= sum(lengths)
                    rows.append({"set": name, "exponent": exponent, "budget": budget,
                                 "finder": finder, **found})  # fmt: skip
    return {"rows": rows, "setting": asdict(setting)}


def _selections(
    model: LoadedModel, asked: Sequence[AskedQuestion], setting: ScaffoldSetting
) -> tuple[list[Selection], list[int]]:
    """The modules of each question, numbered over all collections, and their lengths."""
    first: dict[tuple[str, ...], int] = {}
    lengths: list[int] = []
    selections = []
    for each in asked:
        if each.texts not in first:
            first[each.texts] = len(lengths)
            lengths += [len(model.encode_untrusted(text)) for text in each.texts]
        found = retrieve(each.question, each.texts, setting.k)
        selections.append(tuple(first[each.texts] + at for at in found))
    return selections, lengths


def main(
    data: Annotated[Path | None, typer.Option(help="A folder with qmsum.val.jsonl.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Scaffolds found from what is retrieved together: what is encoded, and what it is worth."""
    sets: dict[str, QuestionSet] = {"handbook": handbook}
    if data is not None:
        sets["QMSum"] = partial(over_documents, load_dataset(data / "qmsum.val.jsonl"))
    setting, model = ScaffoldSetting(), load_model()
    result = run_benchmark(lambda progress: bench_scaffolds(model, sets, setting, progress))
    result |= {"machine": describe_machine()}
    table = plain_table("set", "Zipf", "budget", "of", "encoded", "saw the one before", left=1)
    for row in result["rows"]:
        shares = (f"{100 * row[key]:.1f}%" for key in ("encoded", "seen"))
        asked = f"{row['exponent']}" if row["exponent"] else "each once"
        table.add_row(row["set"], asked, f"{100 * row['budget']:.0f}%", row["finder"], *shares)
    print_figures([table], result, json_file)


if __name__ == "__main__":
    typer.run(main)
