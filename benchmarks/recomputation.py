"""Value of computing some module tokens again in context, and of the choice of tokens.

Modules that were encoded apart do not see each other. `linked:N` computes the first tokens of each
again; `blend:R` those whose values deviate most on the first layers (CacheBlend, Yao et al., 2024,
§4). Both are given the same number of tokens, beside random ones, those that deviate most over all
layers (which nobody knows beforehand), and scaffolds, which compute nothing again.

python benchmarks/recomputation.py --json FILE --plot FILE
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, lru_cache, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from harness import (
    JsonFile,
    LlamaShape,
    PlotFile,
    Progress,
    describe_machine,
    new_figure,
    plain_table,
    print_figures,
    run_benchmark,
)
from quality import handbook_set, load_set
from torch import Tensor

from ragcache.documents.split import split_text
from ragcache.engine import EncodeJob, Segment, encode
from ragcache.engine.batch import ScheduledChunk
from ragcache.engine.kv_cache import ContiguousKV
from ragcache.engine.runner import ModelRunner, runner_for
from ragcache.evaluation import Dataset, exact_match, f1
from ragcache.models import LoadedModel, load_model, prompt_frame, wrap_causal
from ragcache.pipeline.blend import choose_runs
from ragcache.retrieval import BM25Index
from ragcache.states import KVStates

CHOICES = ("linked", "blend", "blend of tokens", "oracle", "random", "blend of isolated")
"""Which tokens are computed again: the first of each module; those whose values deviate most where
the first layer's attention has changed them, in runs, as mode `blend:R` does, or one by one; those
whose states deviate most over all layers; any. The last is as CacheBlend has it, one by one and of
modules that were encoded without the preamble."""


@dataclass(frozen=True, slots=True)
class RecomputationSetting:
    """k: modules of a prompt, each of `module_tokens` at most; shares: of all module tokens that
    are computed again; questions: of a set, evenly spread; answer_tokens: the most of an answer."""

    k: int = 4
    module_tokens: int = 192
    shares: tuple[float, ...] = (0.05, 0.15, 0.3)
    questions: int = 12
    answer_tokens: int = 16
    choices: tuple[str, ...] = CHOICES


@dataclass(frozen=True, slots=True)
class ComparedQuestion:
    """A question, its accepted answers, and texts among which BM25 finds its modules."""

    question: str
    answers: tuple[str, ...]
    texts: tuple[str, ...]


Split = Callable[[str], list[str]]
QuestionSet = Callable[[Split], list[ComparedQuestion]]


def over_documents(dataset: Dataset, split: Split) -> list[ComparedQuestion]:
    """Questions over the modules of their own documents, or else of all."""
    parts = {each.id: tuple(split(each.text)) for each in dataset.documents}

    @cache
    def texts(documents: tuple[str, ...]) -> tuple[str, ...]:
        return sum((parts[each] for each in documents), ())

    return [
        ComparedQuestion(each.question, each.answers, texts(each.own or tuple(parts)))
        for each in dataset.questions
    ]


@dataclass(frozen=True, slots=True)
class RecomputedPrompt:
    """A prompt in tokens: the preamble, the modules, the question."""

    preamble: tuple[int, ...]
    modules: tuple[tuple[int, ...], ...]
    question: tuple[int, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        return sum(self.modules, self.preamble) + self.question

    @property
    def bounds(self) -> list[int]:
        """First token of each module, and the end of the last module."""
        return list(accumulate(map(len, self.modules), initial=len(self.preamble)))


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """A way to the states of a prompt. states: of all tokens but the question, at their places.
    chosen: the places of module tokens that are computed again, ascending."""

    name: str
    share: float
    states: KVStates
    chosen: tuple[int, ...] = ()


@dataclass(slots=True)
class Outcome:
    """Result of one prompt: logits of the first token, and the answer."""

    logits: Tensor
    token_ids: list[int] = field(default_factory=list)


class VariantReader:
    """Computes the states and answers of one prompt in all variants."""

    def __init__(self, model: LoadedModel, setting: RecomputationSetting) -> None:
        self.model, self.setting = model, setting
        self.runner: ModelRunner = runner_for(model.causal)

    def read(self, prompt: RecomputedPrompt, seed: int) -> dict[tuple[str, float], Outcome]:
        """The outcome by name and share of each variant; `exact` computed everything."""
        variants = list(self._variants(prompt, seed))
        variants = [self._computed(prompt, each) for each in variants]
        outcomes = self._answers(prompt, variants)
        return {(v.name, v.share): o for v, o in zip(variants, outcomes, strict=True)}

    def _variants(self, prompt: RecomputedPrompt, seed: int) -> Iterator[Variant]:
        count = len(prompt.modules)
        exact = self._encoded(prompt, [(0, count)])
        rooted = self._encoded(prompt, [(n, n + 1) for n in range(count)])
        yield Variant("exact", 1, exact)
        yield Variant("rooted", 0, rooted)
        pairs = [(n, min(n + 2, count)) for n in range(0, count, 2)]
        yield Variant("scaffolds of two", 0, self._encoded(prompt, pairs))
        apart = {"blend of isolated": rooted}
        if "blend of isolated" in self.setting.choices:
            runs = [(n, n + 1) for n in range(count)]
            apart["blend of isolated"] = self._encoded(prompt, runs, isolated=True)
            yield Variant("isolated", 0, apart["blend of isolated"])
        bounds = prompt.bounds
        for share in self.setting.shares:
            tokens = round(share * (bounds[-1] - bounds[0]))
            for choice in self.setting.choices:
                states = apart.get(choice, rooted)
                chosen = choose_tokens(choice, tokens, bounds, exact, states, seed)
                yield Variant(choice, share, states, tuple(chosen))

    def _encoded(
        self, prompt: RecomputedPrompt, runs: Sequence[tuple[int, int]], *, isolated: bool = False
    ) -> KVStates:
        """States of the preamble and the modules, those of each run encoded together after the
        preamble or without it, at the places that they have in the prompt."""
        causal, bounds, first = self.model.causal, prompt.bounds, len(prompt.preamble)
        [root] = encode(causal, [EncodeJob(prompt.preamble)])
        jobs = []
        for begin, end in runs:
            start = bounds[
                begin
            ]  # the preamble is read right before the run: as if that followed it
            tokens = prompt.token_ids[start : bounds[end]]
            before = None if isolated else Segment(root, start - first)
            jobs.append(EncodeJob(tokens, start, before))
        found = [root, *encode(causal, jobs)]
        keys, values = (
            torch.cat([s.keys for s in found], 2),
            torch.cat([s.values for s in found], 2),
        )
        return KVStates(keys, values, 0)

    def _computed(self, prompt: RecomputedPrompt, variant: Variant) -> Variant:
        """The variant with the states of its chosen tokens computed over all others."""
        if not variant.chosen:
            return variant
        causal, chosen, states = self.model.causal, variant.chosen, variant.states
        edges = [-1, *chosen, states.length]
        segments = tuple(
            Segment(states.part(a + 1, b, a + 1), a + 1) for a, b in pairwise(edges) if a + 1 < b
        )
        private = ContiguousKV.allocate(causal, len(chosen))
        tokens = [prompt.token_ids[at] for at in chosen]
        chunk = ScheduledChunk(segments, private, tokens, chosen, wants_logits=False)
        self.runner.prepare_batch([chunk])()
        keys, values, here = states.keys.clone(), states.values.clone(), torch.tensor(chosen)
        keys[:, :, here], values[:, :, here] = private.keys, private.values
        return Variant(variant.name, variant.share, KVStates(keys, values, 0), chosen)

    def _answers(self, prompt: RecomputedPrompt, variants: Sequence[Variant]) -> list[Outcome]:
        """Greedy answers of all variants, in one batch."""
        limit, begin = self.setting.answer_tokens, prompt.bounds[-1]
        question = prompt.question
        rooms = [ContiguousKV.allocate(self.model.causal, len(question) + limit) for _ in variants]
        segments = [(Segment(variant.states, 0),) for variant in variants]
        positions = range(begin, begin + len(question))
        parts = zip(segments, rooms, strict=True)
        logits = self._logits([ScheduledChunk(s, r, question, positions) for s, r in parts])
        for room in rooms:
            room.advance(positions)
        outcomes = [Outcome(row) for row in logits]
        tokens = logits.argmax(-1).tolist()
        running = set(range(len(variants)))
        for position in range(positions.stop, positions.stop + limit):
            running -= {at for at in running if tokens[at] in self.model.stop_ids}
            for at in running:
                outcomes[at].token_ids.append(tokens[at])
            if not running or position == positions.stop + limit - 1:
                break
            order = sorted(running)
            chunks = [
                ScheduledChunk(segments[at], rooms[at], [tokens[at]], [position]) for at in order
            ]
            for at, row in zip(order, self._logits(chunks), strict=True):
                rooms[at].advance([position])
                tokens[at] = int(row.argmax())
        return outcomes

    def _logits(self, chunks: Sequence[ScheduledChunk]) -> Tensor:
        return self.runner.prepare_batch(chunks)().double()


def choose_tokens(
    choice: str, count: int, bounds: Sequence[int], exact: KVStates, states: KVStates, seed: int = 0
) -> list[int]:
    """The places of `count` module tokens to compute again, ascending; those of the first module
    are exact already, unless it is isolated. bounds: where modules begin, and the end."""
    later = range(bounds[choice != "blend of isolated"], bounds[-1])
    count = min(count, len(later))
    if choice == "random":
        return sorted(random.Random(seed).sample(later, count))
    if choice == "linked":
        places = [
            (at - begin, at) for begin, end in pairwise(bounds[1:]) for at in range(begin, end)
        ]
        return sorted(at for _, at in sorted(places)[:count])
    layers = slice(None) if choice == "oracle" else slice(1, 2)
    deviation = _deviations(exact, states, layers)
    if choice == "blend":
        modules = [deviation[begin:end] for begin, end in pairwise(bounds[1:])]
        runs = zip(bounds[1:], choose_runs(modules, count), strict=False)
        return [at + n for at, own in runs for begin, end in own for n in range(begin, end)]
    best = deviation[later.start : later.stop].topk(count).indices + later.start
    return sorted(best.tolist())


def _deviations(exact: KVStates, other: KVStates, layers: slice) -> Tensor:
    """Squared distances [S] of values, in shares of each layer's; over all layers of keys too."""
    kinds = [(exact.values, other.values)]
    if layers == slice(None):
        kinds.append((exact.keys, other.keys))
    total = torch.zeros(exact.length)
    for one, two in kinds:
        away = (one[layers].float() - two[layers].float()).square().sum((1, 3))  # [L, S]
        total += (away / away.sum(1, keepdim=True).clamp_min(1e-30)).sum(0)
    return total


def bench_recomputation(
    model: LoadedModel, sets: dict[str, QuestionSet], setting: RecomputationSetting,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Means over the questions; see `summarize`. cost: see `cost_of`; kl: of the first token's
    distribution from that of `exact`, in nats; agrees: whether the likeliest first token is the
    same; same_answer: whether the whole answer is."""
    frame = prompt_frame(model.tokenizer, model.instruction)
    reader = VariantReader(model, setting)
    preamble = tuple(model.encode(frame.preamble))
    before, after = model.encode(frame.question), model.encode(frame.epilogue)
    split, layers = splitter(model.encode_untrusted, setting.module_tokens), model.causal.num_layers
    rows: list[dict[str, Any]] = []
    for name, read in sets.items():
        asked = read(split)
        asked = asked[:: max(1, len(asked) // setting.questions)][: setting.questions]
        for number, each in enumerate(asked):
            progress(f"{name}: question {number + 1} of {len(asked)}")
            texts = [each.texts[at] for at in retrieve(each.question, each.texts, setting.k)]
            modules = [tuple(model.encode_untrusted(text)) for text in texts]
            question = (*before, *model.encode_untrusted(each.question), *after)
            prompt = RecomputedPrompt(preamble, tuple(modules), question)
            if len(modules) < 2:
                continue
            outcomes = reader.read(prompt, number)
            exact = outcomes["exact", 1]
            for (variant, share), outcome in outcomes.items():
                text = model.decode(outcome.token_ids).strip()
                rows.append({
                    "model": model.name, "set": name, "question": number, "variant": variant,
                    "share": share, "cost": cost_of(variant, share, layers),
                    "kl": _kl(exact.logits, outcome.logits),
                    "agrees": bool(outcome.logits.argmax() == exact.logits.argmax()),
                    "same_answer": outcome.token_ids == exact.token_ids,
                    "exact_match": exact_match(text, each.answers),
                    "f1": f1(text, each.answers),
                })  # fmt: skip
    return {"means": summarize(rows), "setting": asdict(setting)}


def splitter(encode: Callable[[str], Sequence[int]], tokens: int) -> Split:
    """Splits texts into modules of so many tokens at most."""
    return partial(split_text, limit=tokens, count_tokens=lambda text: len(encode(text)))


@lru_cache
def _index(texts: tuple[str, ...]) -> BM25Index:
    return BM25Index(dict(enumerate(texts)))


def retrieve(question: str, texts: tuple[str, ...], k: int) -> list[int]:
    """The numbers of the `k` best texts by BM25, the best first."""
    return [number for number, _ in _index(texts).search(question, k)]


def _kl(expected: Tensor, given: Tensor) -> float:
    p, q = expected.log_softmax(-1), given.log_softmax(-1)
    return float((p.exp() * (p - q)).sum())


def cost_of(variant: str, share: float, layers: int) -> float:
    """Return the computed share of the modules' tokens in all layers.

    CacheBlend first computes the first layer for all tokens, to see whose values it changes.
    """
    return (1 + share * (layers - 1)) / layers if variant.startswith("blend") else share


def summarize(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means by model, set, variant and share. less_linked: the mean difference of the KL divergence
    to that of `linked` at the same cost (between two measured ones: interpolated), with a 95 %
    interval from 2,000 bootstrap samples of questions."""
    by: dict[tuple[str, str, str, float], list[dict[str, Any]]] = {}
    for row in rows:
        by.setdefault((row["model"], row["set"], row["variant"], row["share"]), []).append(row)
    found = []
    for (model, name, variant, share), own in by.items():
        cost = own[0]["cost"]
        curves = _linked(row for row in rows if (row["model"], row["set"]) == (model, name))
        less = np.array([row["kl"] - np.interp(cost, *curves[row["question"]]) for row in own])
        draws = np.random.default_rng(0).integers(0, len(less), (2000, len(less)))
        low, high = np.quantile(less[draws].mean(1), [0.025, 0.975])
        means = {
            key: statistics.fmean(row[key] for row in own)
            for key in ("kl", "agrees", "same_answer", "exact_match", "f1")
        }
        found.append({
            "model": model, "set": name, "variant": variant, "share": share, "cost": cost,
            "questions": len(own), **means,
            "less_linked": [float(less.mean()), float(low), float(high)],
        })  # fmt: skip
    return found


def _linked(rows: Iterable[dict[str, Any]]) -> dict[int, tuple[list[float], list[float]]]:
    """By question, costs and KL divergences of `rooted`, `linked` and `exact`, ascending."""
    points: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        if row["variant"] in ("rooted", "linked", "exact"):
            points.setdefault(row["question"], []).append((row["cost"], row["kl"]))
    ordered = {question: sorted(found) for question, found in points.items()}
    return {q: ([x for x, _ in found], [y for _, y in found]) for q, found in ordered.items()}


def random_model(like: LoadedModel, seed: int = 0) -> LoadedModel:
    """A Llama of eight layers with large random weights, behind another model's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    shape = LlamaShape(8, 256, 8, 2, 704, len(like.tokenizer), 4096)
    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads, max_position_embeddings=shape.window,
        initializer_range=2 * shape.hidden**-0.5, eos_token_id=None,
    )  # fmt: skip
    return LoadedModel("random", wrap_causal(LlamaForCausalLM(config).eval()), like.tokenizer)


def plot_recomputation(means: Sequence[dict[str, Any]], file: Path) -> None:
    """KL divergence to `exact` against what is computed of the modules, a panel a model and set."""
    panels = list(dict.fromkeys((row["model"], row["set"]) for row in means))
    figure, columns = new_figure(len(panels))
    for axes, panel in zip(columns, panels, strict=True):
        own = [row for row in means if (row["model"], row["set"]) == panel]
        start = next(row["kl"] for row in own if row["variant"] == "rooted")
        for choice in ("linked", "blend", "blend of tokens", "oracle", "random"):
            curve = [(row["cost"], row["kl"]) for row in own if row["variant"] == choice]
            if curve:
                free = [(0.0, start)] * (not choice.startswith("blend"))
                costs, divergences = zip(*free, *curve, strict=True)
                axes.plot([100 * cost for cost in costs], divergences, "o-", label=choice)
        pairs = next(row["kl"] for row in own if row["variant"] == "scaffolds of two")
        axes.plot([0], [pairs], "s", color="black", label="scaffolds of two")
        axes.set_title(", ".join(panel))
        axes.set_xlabel("computed of the modules, %")
        axes.set_ylabel("KL divergence to exact, nats")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
    figure.savefig(file)


def main(
    model: Annotated[
        str | None, typer.Option(help="A model, or `random`; by default the embedded reader.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="A folder with musique_s.json and qmsum.val.jsonl.")
    ] = None,
    only: Annotated[str | None, typer.Option(help="One of the sets: its name.")] = None,
    questions: Annotated[int, typer.Option(min=2, help="Questions of each set.")] = 12,
    module_tokens: Annotated[int, typer.Option(min=32, help="The most of a module.")] = 192,
    choices: Annotated[str, typer.Option(help="Which tokens.")] = ",".join(CHOICES),
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Quality against the share of module tokens that are computed again in context."""
    setting = RecomputationSetting(
        questions=questions, module_tokens=module_tokens, choices=tuple(choices.split(","))
    )
    name = None if model == "random" else model
    loaded = load_model(name, dtype="float32", states_dtype="float32")
    if model == "random":
        loaded = random_model(loaded)
    sets: dict[str, QuestionSet] = {"handbook": partial(over_documents, handbook_set())}
    if data is not None:
        sets["MuSiQue"] = partial(over_documents, load_set(data / "musique_s.json", "own"))
        sets["QMSum"] = partial(over_documents, load_set(data / "qmsum.val.jsonl", "own"))
    sets = {name: read for name, read in sets.items() if only in (None, name)}
    result = run_benchmark(lambda progress: bench_recomputation(loaded, sets, setting, progress))
    result |= {"machine": describe_machine()}
    heads = "again", "cost", "KL", "less linked", "agrees", "EM", "F1"
    table = plain_table("set", "variant", *heads, left=2)
    for row in result["means"]:
        mean, low, high = row["less_linked"]
        shares = (f"{100 * row[key]:.1f}%" for key in ("agrees", "exact_match", "f1"))
        table.add_row(
            row["set"], row["variant"], f"{100 * row['share']:.0f}%", f"{100 * row['cost']:.0f}%",
            f"{row['kl']:.4f}", f"{mean:+.4f} ({low:+.4f} to {high:+.4f})", *shares,
        )  # fmt: skip
    print_figures([table], result, json_file)
    if plot is not None:
        plot_recomputation(result["means"], plot)


if __name__ == "__main__":
    typer.run(main)
