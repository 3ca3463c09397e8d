"""Ideas for modes of reuse, compared in plain torch before they are built.

    python benchmarks/reuse_variants.py texts MODEL TEXTS
    python benchmarks/reuse_variants.py measure MODEL.gguf PROMPTS TEXTS ROWS --device cuda
    python benchmarks/reuse.py report MODEL PROMPTS ROWS

Every variant of a prompt is a complete cache of keys and values, in which row n holds position n.
Some rows come from states that were encoded elsewhere and moved, the others are computed together
with the question. Nothing of ragcache is imported by `measure`, which reads prompts of
`reuse.py prepare` and writes rows for `reuse.py report`.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from plain_model import Cache, PlainModel
from reuse_fit import StateFit
from reuse_ideas import VARIANTS, ReuseVariant
from reuse_prompts import KEYS, MAIN, TokenizedPrompt, batches, key_of, read_prompts, schedule
from torch import Tensor

RUN = 8
"""Tokens that are chosen together."""
CHINESE = """# 阅览室

阅览室上午九点开门,下午六点关门,星期三开到晚上八点。靠窗的座位不能预订。书包须存放在入口旁边的柜子里,每次收\
硬币一枚。地图和报纸只能在室内阅读,其他图书可以借四个星期,六月到八月可以借八个星期。艾莲娜在服务台回答问题。

# 陶罐的制作

陶工先切开陶土,打出里面的空气,再把一块泥放在转盘中央。她用湿手把泥打开,拉起罐壁,做好罐口。陶罐在没有风的架子\
上晾六天,然后用大约九百度的火烧制,上釉以后再用更高的温度烧一次。每十二个陶罐中有一个会开裂,多半是因为晾得太快。

# 水表报告

第三季度共抄表四百一十二块,总数为四百三十八块,比去年多六块。有九户没有开门,两块水表停走。平均用水三十一立方米,\
虽然夏天干燥,仍比去年同期少百分之四。委员会建议三月更换最旧的水表,并停止邮寄读数。费用估计为七千二百元。

"""


def _short(number: Tensor) -> float:
    return float(f"{float(number):.5g}")


def _mixed(states: Sequence[Cache], weights: Sequence[float]) -> Cache:
    """Return the weighted sum of states of one module."""
    pairs = list(zip(states, weights, strict=True))
    keys = sum(weight * each.keys for each, weight in pairs)
    values = sum(weight * each.values for each, weight in pairs)
    assert isinstance(keys, Tensor)
    assert isinstance(values, Tensor)
    return Cache(keys, values)


class VariantComparison:
    """Compares variants over the prompts of a batch, which have one number of modules."""

    def __init__(
        self,
        model: PlainModel,
        texts: dict[str, Any],
        prompts: Sequence[TokenizedPrompt],
        tokens: int,
        fit: StateFit | None = None,
    ) -> None:
        self.model, self.prompts, self.tokens, self.fit = model, prompts, tokens, fit
        self.texts, self.preamble = texts, texts["preamble"]
        self.stops = set(texts["stop_ids"])
        self.starts = [each.starts(len(self.preamble)) for each in prompts]
        self.length = max(
            s[-1] + len(p.question) for s, p in zip(self.starts, prompts, strict=True)
        ) + tokens  # fmt: skip
        self.places = [(n, m) for n, p in enumerate(prompts) for m in range(1, len(p.modules))]
        self.later = [prompts[n].modules[m] for n, m in self.places]
        self._states: dict[str, list[Cache]] = {}
        self._exact()

    @cached_property
    def reordered(self) -> Cache:
        """States of the prompts with modules 2..k in reverse order."""
        return self._dense([[p.modules[0], *p.modules[:0:-1]] for p in self.prompts])[0]

    def _tensor(self, lists: Sequence[Sequence[int]]) -> Tensor:
        """Return lists of one length or of several, padded with their last number."""
        most = max(map(len, lists))
        padded = [[*each, *[each[-1]] * (most - len(each))] for each in lists]
        return torch.tensor(padded, device=self.model.device)

    @cached_property
    def halved(self) -> Cache:
        """States of the prompts, computed with products in bfloat16."""
        with self._products_in_half(True):
            return self._dense([p.modules for p in self.prompts])[0]

    @contextmanager
    def _products_in_half(self, wanted: bool) -> Iterator[None]:
        self.model.halved = wanted
        try:
            yield
        finally:
            self.model.halved = False

    def _exact(self) -> None:
        self.exact, hidden = self._dense([p.modules for p in self.prompts])
        last = [s[-1] + len(p.question) - 1 for s, p in zip(self.starts, self.prompts, strict=True)]
        first = self.model.logits(hidden[range(len(last)), last]).argmax(-1)
        self.answers = self.generated(first, last, self.exact)

    def _dense(self, modules: Sequence[Sequence[list[int]]]) -> tuple[Cache, Tensor]:
        """Compute the prompts with these modules. Return their states and final states."""
        whole = [
            [*self.preamble, *(t for module in own for t in module), *p.question]
            for own, p in zip(modules, self.prompts, strict=True)
        ]
        cache = self.model.cache(len(whole), self.length)
        rows = [list(range(len(each))) for each in whole]
        return cache, self.model.forward(self._tensor(whole), self._tensor(rows), cache)

    def generated(self, first: Tensor, last: Sequence[int], cache: Cache, **kept: Any) -> Any:
        """Return greedy answers with their stop tokens. `first`: the first token of each."""
        model, tokens = self.model, [first]
        at = torch.tensor(last, device=model.device)
        for step in range(1, self.tokens):
            hidden = model.forward(tokens[-1][:, None], (at + step)[:, None], cache, **kept)
            tokens.append(model.logits(hidden[:, 0]).argmax(-1))
        return [self._until_stop(each) for each in torch.stack(tokens, 1).tolist()]

    def _until_stop(self, tokens: list[int]) -> list[int]:
        end = next((n for n, token in enumerate(tokens) if token in self.stops), len(tokens))
        return tokens[: end + 1]

    def states(self, name: str) -> list[Cache]:
        """Return the states of modules 2..k of all prompts, [L, Hkv, S, D] from position 0 on."""
        if name not in self._states:
            self._states[name] = self._made(name)
        return self._states[name]

    def _made(self, name: str) -> list[Cache]:
        texts = self.texts
        prefix: dict[str, Callable[[], list[Any]]] = {
            "rooted": lambda: [],
            "primed": lambda: texts["priming"], "Chinese": lambda: texts["chinese"][:300],
            "600": lambda: texts["long"][:600], "900": lambda: texts["long"][:900],
            "other": lambda: texts["other"],
        }  # fmt: skip
        if name in prefix:
            return self._encoded([*self.preamble, *prefix[name]()])
        if name == "own":
            return self._encoded_behind([self.prompts[n].own for n, _ in self.places])
        if name == "before":
            return self._encoded_behind([self.prompts[n].modules[m - 1] for n, m in self.places])
        if name in ("similar", "3 similar"):  # the most similar one last
            most = 1 if name == "similar" else 3
            found = [self.prompts[n].similar[m][:most][::-1] for n, m in self.places]
            return self._encoded_behind([[t for text in each for t in text] for each in found])
        if name in ("shifted", "fitted"):
            assert self.fit is not None
            weights = self.fit.weights(linear=name == "fitted")
            return [self.fit.corrected(each, weights) for each in self.states("primed")]
        if name == "neighbors":  # the same modules in another order
            orders = [
                [t for module in self.prompts[n].modules[:m][::-1] for t in module]
                for n, m in self.places
            ]
            return self._encoded_behind(orders)
        if name == "by place":
            by = {1: self.states("primed"), 2: self.states("600")}
            last = self.states("900")
            return [by.get(m, last)[at] for at, (_, m) in enumerate(self.places)]
        if name == "beyond":
            pairs = zip(self.states("primed"), self.states("rooted"), strict=True)
            return [_mixed([one, other], [1.25, -0.25]) for one, other in pairs]
        parts = {"mean2": ("primed", "other"), "mean4": ("primed", "other", "900", "own")}[name]
        many = zip(*(self.states(each) for each in parts), strict=True)
        return [_mixed(each, [1 / len(parts)] * len(parts)) for each in many]

    def _encoded(self, prefix: Sequence[int]) -> list[Cache]:
        """Return the states of the later modules, encoded behind one prefix."""
        model = self.model
        one = model.cache(1, len(prefix))
        model.forward(
            self._tensor([prefix]), torch.arange(len(prefix), device=model.device)[None], one
        )
        many = model.cache(len(self.later), len(prefix) + max(map(len, self.later)))
        many.keys[..., : len(prefix), :] = one.keys
        many.values[..., : len(prefix), :] = one.values
        rows = [list(range(len(prefix), len(prefix) + len(m))) for m in self.later]
        model.forward(self._tensor(self.later), self._tensor(rows), many)
        return [self._part(many, n, len(prefix), len(m)) for n, m in enumerate(self.later)]

    def _encoded_behind(self, before: Sequence[Sequence[int]]) -> list[Cache]:
        """Return the states of the later modules, each encoded behind tokens of its own."""
        model = self.model
        starts = [len(self.preamble) + len(each) for each in before]
        whole = [
            [*self.preamble, *each, *module]
            for each, module in zip(before, self.later, strict=True)
        ]
        found = []
        for begin in range(0, len(whole), 8):
            part = whole[begin : begin + 8]
            cache = model.cache(len(part), max(map(len, part)))
            rows = [list(range(len(each))) for each in part]
            model.forward(self._tensor(part), self._tensor(rows), cache)
            for n in range(len(part)):
                at = begin + n
                found.append(self._part(cache, n, starts[at], len(self.later[at])))
        return found

    def _part(self, cache: Cache, n: int, begin: int, length: int) -> Cache:
        keys = cache.keys[:, n, :, begin : begin + length]
        values = cache.values[:, n, :, begin : begin + length].clone()
        return Cache(self.model.turned(keys, -begin), values)

    def teach(self, fit: StateFit) -> None:
        """Show primed states and exact ones."""
        for (n, m), states in zip(self.places, self.states("primed"), strict=True):
            begin, end = self.starts[n][m], self.starts[n][m + 1]
            fit.add(states, self._part(self.exact, n, begin, end - begin))

    def read(self, variant: ReuseVariant, cache: Cache, at: int) -> None:
        """Write the kept states of a variant of all prompts into rows `at` and following."""
        here = slice(at, at + len(self.prompts))
        source = self.reordered if variant.states == "reordered" else self.exact
        source = self.halved if variant.halved else source
        cache.keys[:, here] = source.keys
        cache.values[:, here] = source.values
        if variant.states not in ("exact", "reordered"):
            kept = zip(self.places, self.states(variant.states), strict=True)
            for (n, m), states in kept:
                begin, end = self.starts[n][m], self.starts[n][m + 1]
                cache.keys[:, at + n, :, begin:end] = self.model.turned(states.keys, begin)
                cache.values[:, at + n, :, begin:end] = states.values
        if variant.drift:
            self._drift(variant, cache, at)
        if variant.rounded:
            for each in (cache.keys, cache.values):
                each[:, here] = each[:, here].bfloat16().float()

    def _drift(self, variant: ReuseVariant, cache: Cache, at: int) -> None:
        """Move the states of each module by the mean deviation of its first tokens in context."""
        model, count = self.model, len(self.prompts)
        own = [self.computed(variant, n) for n in range(count)]
        computed = model.cache(count, self.length)
        for one, other in ((computed.keys, cache.keys), (computed.values, cache.values)):
            one.copy_(other[:, at : at + count])
        whole = [
            [*self.preamble, *(t for module in p.modules for t in module)] for p in self.prompts
        ]
        tokens = [[whole[n][p] for p in own[n]] for n in range(count)]
        model.forward(self._tensor(tokens), self._tensor(own), computed)
        for n, starts in enumerate(self.starts):
            for begin, end in pairwise(starts[1:]):
                first = len([p for p in own[n] if begin <= p < end])
                kept, found = slice(begin, end), slice(begin, begin + first)
                for name in ("keys", "values") if "keys" in variant.drifting else ("values",):
                    states, other = getattr(cache, name)[:, at + n], getattr(computed, name)[:, n]
                    turn = name == "keys"
                    old = model.unrotated(states[:, :, kept], begin) if turn else states[:, :, kept]
                    new = model.unrotated(other[:, :, found], begin) if turn else other[:, :, found]
                    shift = (new - old[:, :, :first])[:, :, first // 2 :].mean(2, keepdim=True)
                    moved = old + variant.drift * shift
                    states[:, :, kept] = model.rotated(moved, begin) if turn else moved

    def computed(self, variant: ReuseVariant, n: int) -> list[int]:
        """Return the positions of module tokens that are computed in prompt `n`."""
        starts, modules = self.starts[n], self.prompts[n].modules
        found: set[int] = set()
        total = sum(map(len, modules))
        share = round(total * variant.share / 100 / max(1, len(modules) - 1))
        for m, module in enumerate(modules):
            if m and (first := share or variant.first[min(m, len(variant.first)) - 1]):
                found |= set(range(starts[m], starts[m] + min(first, len(module))))
            if variant.last and m < len(modules) - 1:
                found |= set(range(starts[m + 1] - min(variant.last, len(module)), starts[m + 1]))
        if variant.chosen:
            found |= self._chosen(variant, n, found)
        return sorted(found)

    def _chosen(self, variant: ReuseVariant, n: int, known: set[int]) -> set[int]:
        """Return positions of the runs with the largest mean worth."""
        worth = self._worth(variant.chosen, variant.states)[n]
        starts = self.starts[n]
        total = starts[-1] - starts[0]
        runs = []
        for begin, end in pairwise(starts):
            for first in range(begin, end, RUN):
                own = range(first, min(first + RUN, end))
                if not known.intersection(own):
                    runs.append((sum(worth[p] for p in own) / len(own), own))
        left, found = total * variant.percent / 100, set[int]()
        for _, own in sorted(runs, key=lambda run: -run[0]):
            if left <= 0:
                break
            found |= set(own)
            left -= len(own)
        return found

    def _worth(self, chosen: str, states: str) -> list[list[float]]:
        """Return the worth of computing each position of each prompt."""
        name = f"worth {chosen} {states}"
        if name not in self._states:
            make = self._attention if chosen == "question" else self._deviation
            self._states[name] = make(chosen, states)  # type: ignore[assignment]
        return self._states[name]  # type: ignore[return-value]

    def _attention(self, _: str, states: str) -> list[list[float]]:
        """The attention of the question over kept states, to modules 2..k alone."""
        drawn = self._drawn(states)
        for n, starts in enumerate(self.starts):
            drawn[n, : starts[1]] = 0
        return drawn.tolist()

    def _drawn(self, states: str) -> Tensor:
        """Return the attention [B, N] of the question over kept states, to each position."""
        cache = self.model.cache(len(self.prompts), self.length)
        self.read(ReuseVariant(states), cache, 0)
        drawn = torch.zeros(len(self.prompts), self.length, device=self.model.device)
        tokens = self._tensor([p.question for p in self.prompts])
        rows = [
            list(range(s[-1], s[-1] + len(p.question)))
            for s, p in zip(self.starts, self.prompts, strict=True)
        ]
        self.model.forward(tokens, self._tensor(rows), cache, drawn=drawn)
        return drawn

    def masses(self) -> dict[str, list[float]]:
        """Return the share of the questions' attention that modules 2..k draw, by states."""
        found = {}
        for states in ("exact", "rooted", "primed", "before"):
            shares = self._drawn(states)
            shares /= shares.sum(1, keepdim=True)
            found[states] = [
                float(own[starts[1] : starts[-1]].sum())
                for own, starts in zip(shares, self.starts, strict=True)
            ]
        return found

    def _deviation(self, chosen: str, states: str) -> list[list[float]]:
        """Squared distance of values from exact ones: of the second layer, or of all layers."""
        cache = self.model.cache(len(self.prompts), self.length)
        self.read(ReuseVariant(states), cache, 0)
        layers = slice(1, 2) if chosen == "layer" else slice(None)
        one, other = cache.values[layers], self.exact.values[layers]
        size = other.square().mean((1, 2, 3, 4), keepdim=True)
        return ((one - other).square() / size).sum((0, 2, 4)).tolist()

    def compare(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the figures of each variant, by prompt. The first variant is `exact`."""
        found: list[dict[str, Any]] = [{} for _ in self.prompts]
        reference: list[Tensor] = []
        for halved in (False, True):
            group = [name for name in names if VARIANTS[name].halved == halved]
            for begin in range(0, len(group), 12):
                some = group[begin : begin + 12]
                results = self._forced([VARIANTS[name] for name in some])
                for name, own in zip(some, results, strict=True):
                    for n, each in enumerate(own):
                        logs = each.pop("logs")
                        if name == "exact":
                            reference.append(logs)
                        found[n][name] = each | self._figures(logs, reference[n], n)
        return found

    def _figures(self, logs: Tensor, reference: Tensor, n: int) -> dict[str, Any]:
        kl = (reference.double().exp() * (reference.double() - logs.double())).sum(-1)
        likeliest = logs.argmax(-1).tolist()
        answer = self.answers[n]
        pairs = zip(likeliest, answer, strict=True)
        equal = next((at for at, (one, other) in enumerate(pairs) if one != other), len(answer))
        best = logs[: equal + 1].topk(2).values
        return {
            "kl": _short(kl.mean()), "first_kl": _short(kl[0]), "same": equal == len(answer),
            "equal": equal, "length": len(answer),
            "margin": _short((best[:, 0] - best[:, 1]).min()), "seconds": None,
        }  # fmt: skip

    def _forced(self, variants: Sequence[ReuseVariant]) -> list[list[Any]]:
        """Compute the question and exact's answer in variants, then their own answers."""
        model, count = self.model, len(self.prompts)
        cache = model.cache(count * len(variants), self.length)
        extra: dict[str, Tensor] = {}
        if any(v.bias for v in variants):
            extra["bias"] = torch.zeros(len(cache.keys[0]), self.length, device=model.device)
        if any(v.scale != 1 for v in variants):
            extra["scale"] = torch.ones(len(cache.keys[0]), self.length, device=model.device)
        found, begins = [], []
        with self._products_in_half(variants[0].halved):
            for v, variant in enumerate(variants):
                here = slice(v * count, (v + 1) * count)
                self.read(variant, cache, here.start)
                part = Cache(cache.keys[:, here], cache.values[:, here])
                given = {name: each[here] for name, each in extra.items()}
                found.append(self._scored(variant, part, given))
                begins += [each["logs"][0].argmax() for each in found[-1]]
            last = [
                s[-1] + len(p.question) - 1 for s, p in zip(self.starts, self.prompts, strict=True)
            ]
            answers = self.generated(torch.stack(begins), last * len(variants), cache, **extra)
        for b, answer in enumerate(answers):
            found[b // count][b % count]["answer"] = self._without_stop(answer)
        return found

    def _scored(
        self, variant: ReuseVariant, cache: Cache, extra: dict[str, Tensor]
    ) -> list[dict[str, Any]]:
        """Compute the question and exact's answer of each prompt in a variant."""
        tokens, rows, costs = [], [], []
        for n, prompt in enumerate(self.prompts):
            first, begin, end = (self.starts[n][at] for at in (0, 1, -1))
            own = self.computed(variant, n)
            if "bias" in extra:  # computed tokens have none
                extra["bias"][n, begin:end] = variant.bias
                extra["bias"][n, own] = 0
            if "scale" in extra:
                extra["scale"][n, begin:end] = variant.scale
                extra["scale"][n, own] = 1
            whole = [t for module in prompt.modules for t in module]
            asked = [*prompt.question, *self.answers[n][:-1]]
            tokens.append([*(whole[p - first] for p in own), *asked])
            rows.append([*own, *range(end, end + len(asked))])
            costs.append(len(own))
        hidden = self.model.forward(self._tensor(tokens), self._tensor(rows), cache, **extra)
        sizes = [len(answer) for answer in self.answers]
        ends = [hidden[n, len(t) - sizes[n] : len(t)] for n, t in enumerate(tokens)]
        logs = torch.split(self.model.logits(torch.cat(ends)).log_softmax(-1), sizes)
        return [{"logs": log, "computed": cost} for log, cost in zip(logs, costs, strict=True)]

    def _without_stop(self, tokens: list[int]) -> list[int]:
        return [token for token in tokens if token not in self.stops]


# Commands ------------------------------------------------------------------------------------


@torch.inference_mode()
def measure(options: argparse.Namespace) -> None:
    began = time.perf_counter()
    if options.tf32:
        torch.set_float32_matmul_precision("high")
    model = PlainModel.read(options.model, options.device)
    texts = json.loads(options.texts.read_text(encoding="utf-8"))
    prompts = read_prompts(options.prompts)
    print(f"ready after {time.perf_counter() - began:.0f} s", flush=True)
    parts = options.parts.split(",")
    known = set(map(tuple, json.loads(options.known.read_text()))) if options.known else set()
    done, fit, masses = 0, None, defaultdict[str, list[float]](list)
    with options.rows.open("a", encoding="utf-8") as out:
        for names, part in schedule(prompts, parts, options.full, known):
            if "fitted" in names:
                fit = fitted(model, texts, prompts, options.batch_tokens)
            for batch in batches(part, options.batch_tokens):
                if time.perf_counter() - began > options.limit:
                    print(f"{done} prompts, stopped", flush=True)
                    return
                try:
                    compared = VariantComparison(model, texts, batch, options.answer_tokens, fit)
                    if not names:
                        for states, shares in compared.masses().items():
                            masses[states] += shares
                        continue
                    found = compared.compare(names)
                except Exception:
                    traceback.print_exc()
                    if model.device != "cpu":
                        torch.cuda.empty_cache()
                    continue
                for prompt, modes in zip(batch, found, strict=True):
                    row = dict(zip(KEYS, key_of(prompt.row), strict=True))
                    row |= {"documents": sum(map(len, prompt.modules)), "modes": modes}
                    out.write(json.dumps(row) + "\n")
                out.flush()
                done += len(batch)
            print(f"{len(names)} variants: {done} prompts, {time.perf_counter() - began:.0f} s")
            if not names:
                means = {states: round(fmean(shares), 4) for states, shares in masses.items()}
                print(f"attention to modules 2..k: {means}", flush=True)


def fitted(
    model: PlainModel, texts: dict[str, Any], prompts: Sequence[TokenizedPrompt], tokens: int
) -> StateFit:
    """Fit the correction of primed states to the last four prompts of each set."""
    main: dict[str, list[TokenizedPrompt]] = {}
    for prompt in prompts:
        if prompt.setting == MAIN:
            main.setdefault(prompt.row["set"], []).append(prompt)
    chosen = [p for own in main.values() for p in own[-4:]]
    fit = StateFit(model)
    for part in batches(chosen, tokens):
        VariantComparison(model, texts, part, 1).teach(fit)
    return fit


def texts(options: argparse.Namespace) -> None:
    """Tokenize the texts that all prompts share."""
    from transformers import AutoTokenizer

    from ragcache.models import prompt_frame
    from ragcache.models.tokenizer import PromptTokenizer
    from ragcache.pipeline.module_states import PRIMING_TEXT

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    plain = PromptTokenizer(tokenizer)
    handbook = Path(__file__).parent.parent / "examples" / "handbook"
    pages = [each.read_text(encoding="utf-8") for each in sorted(handbook.glob("*.md"))]
    long = [token for page in pages for token in plain.encode(page)]
    found = {
        "preamble": tokenizer.encode(prompt_frame(tokenizer).preamble, add_special_tokens=False),
        "priming": plain.encode(PRIMING_TEXT), "chinese": plain.encode(CHINESE),
        "long": [*plain.encode(PRIMING_TEXT), *long][:900], "other": long[1000:1300],
        "stop_ids": sorted({tokenizer.eos_token_id, *options.stop}),
    }  # fmt: skip
    print({name: len(each) for name, each in found.items()})
    options.out.write_text(json.dumps(found), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("measure")
    for name in ("model", "prompts", "texts", "rows"):
        one.add_argument(name, type=Path)
    one.add_argument("--device", default="cpu")
    one.add_argument("--batch-tokens", type=int, default=2**13)
    one.add_argument("--full", type=int, default=40, help="Prompts of a set with all variants.")
    one.add_argument(
        "--parts",
        default="all,core",
        help="Of all, later, masses, wide, core, other settings and at most 5, in order.",
    )
    one.add_argument("--known", type=Path, help="JSON list of keys that are measured already.")
    one.add_argument("--answer-tokens", type=int, default=24)
    one.add_argument("--limit", type=float, default=1e9, help="Seconds.")
    one.add_argument("--tf32", action="store_true")
    one.set_defaults(run=measure)
    other = commands.add_parser("texts")
    other.add_argument("model")
    other.add_argument("out", type=Path)
    other.add_argument("--stop", type=int, nargs="*", default=[])
    other.set_defaults(run=texts)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
