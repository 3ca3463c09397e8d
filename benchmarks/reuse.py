"""Answers of the modes of reuse compared with answers of `exact`, on any model and device.

    python benchmarks/reuse.py prepare MODEL PROMPTS --data DATA
    python benchmarks/reuse.py measure MODEL PROMPTS ROWS --device cuda
    python benchmarks/reuse.py report MODEL PROMPTS ROWS --json FILE

`prepare` retrieves modules and tokenizes. `measure` needs neither the data nor the retrieval, so
that it runs on a bare machine with a GPU. `report` marks the answers and prints Markdown.

In `primed:16+similar`, modules in later places have the states of a collection whose modules are
primed by similar ones, the set being the collection. In `primed:16+near`, the similar module is one
of the documents that the question is asked over, which may be the module's own.
"""

from __future__ import annotations

import gzip
import json
import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from torch import Tensor

from ragcache.db import CollectionVersion, ModuleRow
from ragcache.documents.split import split_text
from ragcache.engine import EncodeJob, EngineConfig, LLMEngine, Request, Segment
from ragcache.engine.batch import ScheduledChunk
from ragcache.engine.contiguous_kv import ContiguousKV
from ragcache.engine.runner import RaggedModelRunner
from ragcache.evaluation import Dataset, Question
from ragcache.models import LoadedModel, load_model, prompt_frame
from ragcache.modes import AFTER_OTHER_TEXT, EXACT, ReuseMode
from ragcache.pipeline.ask import lay_out
from ragcache.pipeline.companions import MOST_TOKENS, most_similar
from ragcache.pipeline.module_states import Companion, Surroundings
from ragcache.pipeline.prompt import ModuleGroup, PromptLayout, TokenPrompt, build_context
from ragcache.retrieval import BM25Index
from ragcache.retrieval.indexes import CollectionIndex
from ragcache.states import KVKey, KVStates

MODES = "rooted,primed,primed:16,primed:64"
SETS: dict[str, tuple[str, Literal["all", "own"]]] = {
    "MuSiQue": ("musique_s.json", "own"),
    "QMSum": ("qmsum.val.jsonl", "own"),
    "COVID-QA": ("covid_qa.json", "own"),
    "XQuAD, English": ("xquad.en.json", "all"),
    "XQuAD, Chinese": ("xquad.zh.json", "all"),
    "CMRC 2018": ("cmrc2018.trial.json", "all"),
    "QED": ("qed.jsonl", "all"),
}
MAIN = 4, 384
"""Number and size of the modules that are measured first."""
SHORT = 8
"""Tokens of the beginnings of answers that are compared in addition."""
MARKS = "f1", "exact_match", "contains"
AT_ONCE = 4
"""Questions whose states are in memory together."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class ReusePrompt:
    """A question with its modules, in tokens, and its accepted answers."""

    set: str
    k: int
    module_tokens: int
    number: int
    modules: list[list[int]]
    question: list[int]
    answers: list[str]
    similar: list[list[list[int]]] = field(default_factory=list)
    """For each module, the three most similar ones of the documents that the question is asked
    over."""
    companions: list[list[int]] = field(default_factory=list)
    """For each module, the tokens of its companion in a collection of all documents of the set."""

    @property
    def setting(self) -> tuple[int, int]:
        return self.k, self.module_tokens

    def behind(self, number: int, priming: str) -> Companion | None:
        """Return what a module is encoded behind in place of the priming text, if anything."""
        if priming == "similar":
            tokens = self.companions[number]
        else:
            tokens = self.similar[number][0] if priming and self.similar[number] else []
        return Companion(-1, tuple(tokens)) if tokens else None


@dataclass(frozen=True, slots=True)
class MeasuredMode:
    """A mode, and what modules in later places are encoded behind in it."""

    mode: ReuseMode
    priming: str = ""
    """`similar`, `near`, or empty for the built-in text."""

    @classmethod
    def parse(cls, text: str) -> MeasuredMode:
        """Parse a mode such as `primed:16+similar`."""
        name, plus, priming = text.partition("+")
        if plus and priming not in ("similar", "near"):
            raise ValueError(f"{text!r}: write {name}+similar or {name}+near")
        return cls(ReuseMode.parse(name), priming)

    def __str__(self) -> str:
        return f"{self.mode}+{self.priming}" if self.priming else str(self.mode)

    def place(self, groups: Sequence[ModuleGroup], prompt: ReusePrompt) -> list[ModuleGroup]:
        """Return the modules of a prompt with what they are encoded behind."""
        return [
            replace(each, behind=prompt.behind(each.modules[0], self.priming))
            if each.encoding == AFTER_OTHER_TEXT
            else each
            for each in groups
        ]


def read_prompts(file: Path) -> list[ReusePrompt]:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [ReusePrompt(**json.loads(line)) for line in lines]


def batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Yield the items in order, at most `size` at a time."""
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]


@app.command()
def prepare(
    model: str,
    prompts: Path,
    data: Annotated[Path, typer.Option()],
    settings: Annotated[str, typer.Option(help="k:module_tokens:questions of a set")] = (
        "4:384:300,8:384:100,2:384:100,4:128:100,2:128:100,8:128:100"
    ),
    similar: Annotated[
        int, typer.Option(help="Questions of a set whose modules have similar ones beside them.")
    ] = 0,
) -> None:
    """Retrieve modules by BM25, without a threshold, and tokenize."""
    from quality import load_set
    from transformers import AutoTokenizer

    from ragcache.models.tokenizer import PromptTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    spelled, frame = PromptTokenizer(tokenizer), prompt_frame(tokenizer)
    before, after = (
        tokenizer.encode(text, add_special_tokens=False)
        for text in (frame.question, frame.epilogue)
    )

    count = 0
    with gzip.open(prompts, "wt", encoding="utf-8") as out:
        for name, (file, over) in SETS.items():
            dataset = load_set(data / file, over)
            split: dict[int, SetModules] = {}
            for k, tokens, most in (map(int, s.split(":")) for s in settings.split(",")):
                modules_of = split.setdefault(tokens, SetModules(dataset, spelled.encode, tokens))
                for number, (each, texts) in enumerate(modules_of.drawn(k, most)):
                    question = [*before, *spelled.encode(each.question.strip()), *after]
                    modules = [spelled.encode(text) for text in texts]
                    made = ReusePrompt(
                        name, k, tokens, number, modules, question, list(each.answers)
                    )
                    if number < similar and made.setting == MAIN:
                        made.similar.extend(
                            [spelled.encode(t) for t in modules_of.like(text, each.own)]
                            for text in texts
                        )
                        made.companions.extend(
                            spelled.encode(modules_of.companion(text))[:MOST_TOKENS]
                            for text in texts
                        )
                    out.write(json.dumps(asdict(made)) + "\n")
                    count += 1
    print(f"{count} prompts")


class SetModules:
    """The questions of a set, and the modules that BM25 finds for them."""

    def __init__(self, dataset: Dataset, encode: Callable[[str], list[int]], tokens: int) -> None:
        self.questions = dataset.questions
        self._split = partial(split_text, limit=tokens, count_tokens=lambda text: len(encode(text)))
        self._documents = {each.id: each.text for each in dataset.documents}
        self._texts: dict[str, list[str]] = {}
        self._indexed: tuple[tuple[str, ...], list[str], BM25Index] | None = None

    def drawn(self, k: int, most: int) -> Iterator[tuple[Question, list[str]]]:
        """Yield questions in a random order, each with k modules. Skips questions with fewer."""
        order = random.Random(0).sample(self.questions, len(self.questions))
        found = ((each, self.find(each.question, each.own, k)) for each in order)
        return islice((pair for pair in found if len(pair[1]) == k), most)

    def find(self, query: str, documents: tuple[str, ...], count: int) -> list[str]:
        """Return the best texts among documents, or among all if none is named."""
        chosen = documents or tuple(self._documents)
        if self._indexed is None or self._indexed[0] != chosen:
            texts = [text for each in chosen for text in self._texts_of(each)]
            self._indexed = chosen, texts, BM25Index(dict(enumerate(texts)))
        _, texts, index = self._indexed
        return [texts[number] for number, _ in index.search(query, count)]

    def _texts_of(self, document: str) -> list[str]:
        if document not in self._texts:
            self._texts[document] = self._split(self._documents[document])
        return self._texts[document]

    def like(self, text: str, documents: tuple[str, ...]) -> list[str]:
        """Return the three texts that are most similar to one."""
        return [each for each in self.find(text, documents, 6) if each != text][:3]

    def companion(self, text: str) -> str:
        """Return the text that a collection of all documents encodes a module behind, or none."""
        found = most_similar(self._collection, self._numbers[text])
        return "" if found is None else found.text

    @cached_property
    def _collection(self) -> CollectionIndex:
        modules = [(name, text) for name in self._documents for text in self._texts_of(name)]
        rows = {
            number: ModuleRow(number, str(number), name, "", text)
            for number, (name, text) in enumerate(modules)
        }
        words = BM25Index({number: row.text for number, row in rows.items()})
        return CollectionIndex(CollectionVersion(0, 0, similar=True), rows, words)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {row.text: number for number, row in self._collection.modules.items()}


@dataclass(frozen=True, slots=True, eq=False)
class ReadVariant:
    """A prompt in one mode, with the states that it reads."""

    mode: str
    prompt: TokenPrompt
    states: list[KVStates]

    def segments(self) -> tuple[Segment, ...]:
        return build_context(self.prompt, [KVKey("")] * len(self.states), self.states).segments


class ReuseReader:
    """Computes answers in all modes, and their divergence from `exact`."""

    def __init__(
        self, model: LoadedModel, engine: LLMEngine, modes: Sequence[MeasuredMode]
    ) -> None:
        self.model, self.engine, self.modes = model, engine, modes
        self.runner = RaggedModelRunner(model.causal)
        self.preamble = tuple(model.encode(prompt_frame(model.tokenizer).preamble))
        self.surroundings = Surroundings(model, self.preamble)
        [self.root] = self._encoded([EncodeJob(self.preamble)])
        self._seen: dict[tuple[int, ...], Segment] = {self.preamble: Segment(self.root, 0)}

    def _encoded(self, jobs: Sequence[EncodeJob]) -> list[KVStates]:
        states = list(self.engine.encode(jobs))
        if self.model.causal.device.type == "cuda":
            torch.cuda.synchronize()
        return states

    def variants(self, prompt: ReusePrompt) -> list[ReadVariant]:
        """Return the prompt in `exact` and in all modes, with states encoded."""
        starts = list(accumulate(map(len, prompt.modules), initial=len(self.preamble)))
        groups = [ModuleGroup((n,), tuple(ids), starts[n]) for n, ids in enumerate(prompt.modules)]
        tokens = (*self.preamble, *chain(*prompt.modules))
        whole = PromptLayout(tokens)
        whole.read(0, 0, len(tokens))
        whole.compute(prompt.question)
        prompts, placed = {}, {}
        for mode in self.modes:
            layout = PromptLayout(self.preamble)
            lay_out(layout, groups, prompt.question, mode.mode)
            prompts[mode], placed[mode] = layout.prompt(), mode.place(layout.groups[1:], prompt)
        wanted = list(dict.fromkeys(chain(*placed.values())))
        [exact] = self._encoded([EncodeJob(tokens)])
        kept = dict(zip(wanted, self._encoded(self._jobs(wanted)), strict=True))
        found = [ReadVariant(str(EXACT), whole.prompt(), [exact])]
        for mode, read in placed.items():
            states = [self.root, *(kept[group] for group in read)]
            found.append(ReadVariant(str(mode), prompts[mode], states))
        return found

    def _jobs(self, groups: Sequence[ModuleGroup]) -> list[EncodeJob]:
        """Return the jobs of modules. Encodes what they see, and keeps it if others see it too."""
        movable = self.model.causal.scheme.movable
        places = [
            self.surroundings.place(
                len(group.token_ids),
                group.encoding,
                None if movable else group.start,
                group.behind and group.behind.token_ids,
            )
            for group in groups
        ]
        unknown = list(dict.fromkeys(before for before, _ in places if before not in self._seen))
        encoded = self._encoded([EncodeJob(before) for before in unknown])
        roots = dict(zip(unknown, (Segment(states, 0) for states in encoded), strict=True))
        roots |= self._seen
        for group, (before, _) in zip(groups, places, strict=True):
            if group.behind is None:
                self._seen[before] = roots[before]
        return [
            EncodeJob(group.token_ids, at, roots[before])
            for group, (before, at) in zip(groups, places, strict=True)
        ]

    def answers(self, variants: Sequence[ReadVariant], tokens: int) -> list[tuple[int, ...]]:
        """Return the greedy answers of prompts, through the engine."""
        handles = [
            self.engine.submit_request(
                Request(
                    build_context(each.prompt, [KVKey("")] * len(each.states), each.states),
                    tokens,
                    stop_ids=self.model.stop_ids,
                )
            )
            for each in variants
        ]
        return [handle.result().choices[0].token_ids for handle in handles]

    def seconds(self, variants: Sequence[ReadVariant]) -> list[float]:
        """Return the time to the first token of each prompt, over resident states."""
        found = []
        for each in variants:
            begin = time.perf_counter()
            self.answers([each], 1)
            found.append(time.perf_counter() - begin)
        return found

    @torch.inference_mode()
    def forced(self, variants: Sequence[ReadVariant], answer: Sequence[int]) -> Tensor:
        """Return log-probabilities [variants, T, V] at each place of an answer of T tokens.

        The answer includes the stop token, if it ended by one.
        """
        chunks = []
        for each in variants:
            positions, ids = zip(*each.prompt.computed_tokens, strict=True)
            ids = (*ids, *answer[:-1])
            positions = (*positions, *range(each.prompt.end, each.prompt.end + len(answer) - 1))
            private = ContiguousKV.allocate(self.model.causal, len(ids))
            scored = (len(ids) - len(answer), len(ids) - 1)
            chunks.append(ScheduledChunk(each.segments(), private, ids, positions, scored=scored))
        logits = self.runner.prepare_batch(chunks)()
        return logits.float().log_softmax(-1).view(len(variants), len(answer), -1)


def measured(
    reader: ReuseReader, prompts: Sequence[ReusePrompt], tokens: int, stop: int, timed: bool
) -> Iterator[dict[str, Any]]:
    """Yield a row for each prompt."""
    variants = [reader.variants(prompt) for prompt in prompts]
    flat = reader.answers(list(chain(*variants)), tokens)
    answered = batches(flat, len(variants[0]))
    for prompt, own, given in zip(prompts, variants, answered, strict=True):
        exact = [*given[0]] + [stop] * (len(given[0]) < tokens)
        logprobs = reader.forced(own, exact)
        reference = logprobs[0].double()
        row: dict[str, Any] = {
            "set": prompt.set, "k": prompt.k, "module_tokens": prompt.module_tokens,
            "number": prompt.number, "documents": sum(map(len, prompt.modules)), "modes": {},
        }  # fmt: skip
        times = reader.seconds(own) if timed else [None] * len(own)
        for each, ids, logs, seconds in zip(own, given, logprobs, times, strict=True):
            kl = (reference.exp() * (reference - logs.double())).sum(-1)
            row["modes"][each.mode] = {
                "kl": float(kl.mean()), "first_kl": float(kl[0]),
                "same": logs.argmax(-1).tolist() == exact,
                "answer": list(ids),
                "computed": len(each.prompt.computed_tokens) - len(prompt.question),
                "seconds": seconds,
            }  # fmt: skip
        yield row


@app.command()
def measure(
    model: str,
    prompts: Path,
    rows: Path,
    device: str = "cpu",
    dtype: str = "float32",
    modes: str = MODES,
    answer_tokens: int = 24,
    limit: Annotated[float, typer.Option(help="Seconds after which no question begins.")] = 1e9,
    most: Annotated[int, typer.Option(help="Most questions of a set and setting.")] = 10**6,
    timed: Annotated[int, typer.Option(help="Questions whose times are taken.")] = 0,
    only: Annotated[str, typer.Option(help="k:module_tokens, with commas; all by default.")] = "",
) -> None:
    """Answer the prompts in all modes, and write a line of JSON for each."""
    began = time.perf_counter()
    loaded = load_model(model, device=device, dtype=dtype, states_dtype=dtype)
    served = loaded
    if device == "cuda":  # the engine prepares its model for its kernels
        served = load_model(model, device=device, dtype=dtype, states_dtype=dtype)
        loaded.causal.kernels = False
    limits = EngineConfig.for_device(loaded.causal.device, running=64)
    wanted = [
        each
        for each in read_prompts(prompts)
        if each.number < most and (not only or "{}:{}".format(*each.setting) in only.split(","))
    ]
    with LLMEngine(served.causal, limits) as engine, rows.open("a", encoding="utf-8") as out:
        reader = ReuseReader(loaded, engine, [MeasuredMode.parse(m) for m in modes.split(",")])
        done, stop = 0, min(loaded.stop_ids)
        print(f"ready after {time.perf_counter() - began:.0f} s", flush=True)
        wanted.sort(key=lambda each: (each.setting != MAIN, each.setting, each.number))
        for part in batches(wanted, AT_ONCE):
            if time.perf_counter() - began > limit:
                break
            for row in measured(reader, part, answer_tokens, stop, done < timed):
                out.write(json.dumps(row) + "\n")
                done += 1
            out.flush()
        print(f"{done} of {len(wanted)} prompts in {time.perf_counter() - began:.0f} s", flush=True)


def _same_first(answer: dict[str, Any], tokens: int) -> bool:
    """Tell whether an answer begins as the answer of `exact` does, as far as rows tell it."""
    return bool(answer["same"]) or answer.get("equal", 0) >= tokens


def summarize(every: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of each mode over the rows with marks that have it."""
    from ragcache.evaluation.metrics import bootstrap_interval, paired_bootstrap

    found = {}
    for mode in dict.fromkeys(chain(*(row["modes"] for row in every))):
        rows = [row for row in every if mode in row["modes"]]
        own = [row["modes"][mode] for row in rows]
        rooted, exact = ([row["modes"][name] for row in rows] for name in ("rooted", "exact"))
        kl, base = ([max(each["kl"], 1e-9) for each in many] for many in (own, rooted))
        logs = [math.log(one / other) for one, other in zip(kl, base, strict=True)]
        interval = bootstrap_interval(logs)
        figures: dict[str, Any] = {
            "questions": len(rows),
            "computed": sum(e["computed"] for e in own) / sum(row["documents"] for row in rows),
            "kl": statistics.fmean(kl), "kl_median": statistics.median(kl),
            "ratio": [math.exp(x) for x in (statistics.fmean(logs), interval.low, interval.high)],
            "same": statistics.fmean(each["same"] for each in own),
            "same_short": statistics.fmean(_same_first(each, SHORT) for each in own),
            "over_twice_rooted": statistics.fmean(a > 2 * b for a, b in zip(kl, base, strict=True)),
        }  # fmt: skip
        if timed := [e["seconds"] for e in own if e["seconds"] is not None]:
            figures["seconds"] = statistics.median(timed)
            figures["seconds_over_rooted"] = statistics.median(
                one["seconds"] / other["seconds"]
                for one, other in zip(own, rooted, strict=True)
                if one["seconds"] is not None
            )
        for mark in MARKS:
            marks, reference = ([100.0 * e[mark] for e in many] for many in (own, exact))
            between, _ = paired_bootstrap(marks, reference)
            figures[mark] = statistics.fmean(marks)
            figures[f"{mark}_over_exact"] = [
                statistics.fmean(marks) - statistics.fmean(reference), between.low, between.high
            ]  # fmt: skip
        found[mode] = figures
    return found


@app.command()
def report(model: str, prompts: Path, rows: Path, json_file: Path | None = None) -> None:
    """Mark the answers, and print the figures of each setting as Markdown."""
    from transformers import AutoTokenizer

    from ragcache.evaluation.metrics import exact_match, f1, normalize

    tokenizer = AutoTokenizer.from_pretrained(model)
    known = {(p.set, p.k, p.module_tokens, p.number): p for p in read_prompts(prompts)}
    groups, merged = defaultdict(list), dict[tuple[Any, ...], dict[str, Any]]()
    for row in map(json.loads, rows.read_text(encoding="utf-8").splitlines()):
        key = row["set"], row["k"], row["module_tokens"], row["number"]
        merged.setdefault(key, row)["modes"] |= row["modes"]
    for row in merged.values():
        accepted = known[row["set"], row["k"], row["module_tokens"], row["number"]].answers
        for each in row["modes"].values():
            text = tokenizer.decode(each["answer"], skip_special_tokens=True)
            words = normalize(text)
            each["exact_match"], each["f1"] = exact_match(text, accepted), f1(text, accepted)
            each["contains"] = any(normalize(a) in words for a in accepted if normalize(a))
        groups[f"k={row['k']}, {row['module_tokens']} tokens"].append(row)
        if (row["k"], row["module_tokens"]) == MAIN:
            groups[row["set"]].append(row)
    result = {name: summarize(own) for name, own in groups.items()}
    for name, modes in result.items():
        print(f"\n{name}, {modes['exact']['questions']} questions\n")
        print(
            "| mode | n | computed | KL mean, median | ratio | same | same, short | over 2x "
            "| F1 - exact | EM | contains | first token |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|---|---|")
        for mode, each in modes.items():
            ratio, f, e, c = (
                "{:.2f} ({:.2f} to {:.2f})".format(*each[key])
                for key in ("ratio", *(f"{mark}_over_exact" for mark in MARKS))
            )
            timed = each.get("seconds_over_rooted")
            print(
                f"| `{mode}` | {each['questions']} | {each['computed']:.1%} "
                f"| {each['kl']:.3f}, {each['kl_median']:.3f} | "
                f"{ratio} | {each['same']:.0%} | "
                f"{each['same_short']:.0%} | "
                f"{each['over_twice_rooted']:.1%} | {f} | {e} | {c} | "
                f"{'' if timed is None else format(timed, '.2f')} |"
            )
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app()
