"""What caching a corpus takes and brings: sizes in every tier, break-even of loading, advice."""

from __future__ import annotations

import math
import shutil
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ragcache.config import parse_bytes, parse_optional_bytes
from ragcache.db import Catalog
from ragcache.documents import load_sources, split_document
from ragcache.documents.source import DocumentSource
from ragcache.errors import ConfigurationError, NoDocuments
from ragcache.models import LanguageModel, LoadedModel, prompt_frame
from ragcache.planning.measure import SampleTimes, choose_sample, measure_sample
from ragcache.states import KVStates
from ragcache.states.quantization import KV_DTYPES, check_kv_dtype
from ragcache.store import DeviceTier, DiskTier, HostTier, Tier

Progress = Callable[[int, int], None]

SAMPLE = 6  # modules that are encoded for the times
_ROWS = 500  # modules whose token ids are read at once
_SPARE = 0.75  # of the machine's memory that a host tier should take at most


@dataclass(frozen=True, slots=True)
class Corpus:
    """documents: how many. modules: the token ids of each."""

    documents: int
    modules: tuple[Sequence[int], ...]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.modules))


def corpus_of_sources(
    model: LoadedModel,
    sources: Iterable[DocumentSource] | DocumentSource,
    module_tokens: int,
    progress: Progress = lambda *_: None,
) -> Corpus:
    """Documents, split as ingestion splits them. Raises `DocumentError`."""
    documents = load_sources(sources).documents
    modules: list[array[int]] = []
    for number, document in enumerate(documents, start=1):
        parts = split_document(document, module_tokens, model.encode_untrusted)
        modules += [array("i", ids) for _, ids in parts]
        progress(number, len(documents))
    return Corpus(len(documents), tuple(modules))


def corpus_of_collection(
    model: LoadedModel,
    catalogue: Catalog,
    collection: str,
    progress: Progress = lambda *_: None,
) -> Corpus:
    """A stored collection, in this model's tokens. Raises `UnknownCollection`."""
    rows = catalogue.modules(collection)
    modules: list[array[int]] = []
    for start in range(0, len(rows), _ROWS):
        part = rows[start : start + _ROWS]
        known = catalogue.token_ids([row.id for row in part])
        modules += [
            array("i", known.get(row.id) or model.encode_untrusted(row.text)) for row in part
        ]
        progress(len(modules), len(rows))
    return Corpus(len({row.document for row in rows}), tuple(modules))


@dataclass(frozen=True, slots=True)
class TierSize:
    """A corpus in one tier. nbytes: as the tier would allocate them, at most. budget_bytes: None
    for no limit. share: of the corpus that fits, 0 to 1."""

    tier: str
    kv_dtype: str
    nbytes: int
    budget_bytes: int | None

    @property
    def share(self) -> float:
        if self.budget_bytes is None or self.nbytes <= self.budget_bytes:
            return 1.0
        return self.budget_bytes / self.nbytes


def shape_of(model: LanguageModel, tokens: int) -> KVStates:
    """States of so many tokens that take no memory."""
    size = (model.num_layers, model.num_kv_heads, tokens, model.head_dim)
    empty = torch.empty(size, dtype=model.dtype, device="meta")
    return KVStates(empty, empty, 0)


def bytes_per_token(model: LanguageModel) -> dict[str, int]:
    """Bytes of one more token of a module, by `kv_dtype`; scales included."""
    elements = model.num_layers * model.num_kv_heads * model.head_dim
    eight = 2 * elements + model.num_layers * model.num_kv_heads * torch.float32.itemsize
    return {kind: model.bytes_per_token if kind == "model" else eight for kind in KV_DTYPES}


def tier_sizes(
    model: LanguageModel, lengths: Sequence[int], budgets: dict[str, int | None]
) -> tuple[TierSize, ...]:
    """Modules of these lengths in every tier that has a budget, in every way of keeping them."""
    counted = Counter(lengths)
    sizes = []
    for tier in _tiers(model):
        if tier.name in budgets:
            nbytes = sum(n * tier.size_of(shape_of(model, tokens)) for tokens, n in counted.items())
            sizes.append(TierSize(tier.name, tier.kv_dtype, nbytes, budgets[tier.name]))
    return tuple(sizes)


def _tiers(model: LanguageModel) -> list[Tier]:
    """Empty tiers, for their arithmetic: memory is pinned where the model runs on a GPU."""
    kinds = [check_kv_dtype(kind) for kind in KV_DTYPES]
    pinned = model.device.type == "cuda"
    return [
        DeviceTier(0, "cpu"),
        *(HostTier(0, kv_dtype=kind, pinned=pinned) for kind in kinds),
        *(DiskTier(Path(), kv_dtype=kind) for kind in kinds),
    ]


def break_even_tokens(
    tokens: Sequence[int], compute_s: Sequence[float], load_s: Sequence[float]
) -> float | None:
    """The length of a module from which on loading is quicker, in tokens.

    tokens: lengths that were measured, ascending, with the seconds of either way. Between two of
    them the difference of the ways is taken as linear. None where loading is slower at the longest;
    the shortest where loading is quicker at all.
    """
    gains = [compute - load for compute, load in zip(compute_s, load_s, strict=True)]
    if not gains or gains[-1] <= 0:
        return None
    for at in range(len(gains) - 1, 0, -1):
        below, above = gains[at - 1], gains[at]
        if below <= 0:
            share = -below / (above - below)
            return tokens[at - 1] + share * (tokens[at] - tokens[at - 1])
    return float(tokens[0])


def break_even_bandwidth(nbytes: int, compute_s: float) -> float:
    """Bytes a second below which a module of `nbytes` is computed sooner than loaded."""
    return nbytes / compute_s


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes of each tier. device_bytes: None without such a tier. disk_bytes: None for what is
    free on the disk."""

    host_bytes: int
    device_bytes: int | None = None
    disk_bytes: int | None = None

    @classmethod
    def parse(
        cls, host: int | str, device: int | str | None = None, disk: int | str | None = None
    ) -> Budgets:
        """From sizes such as `8GiB`. Raises `ConfigurationError`."""
        return cls(parse_bytes(host), *map(parse_optional_bytes, (device, disk)))


@dataclass(frozen=True, slots=True)
class CachePlan:
    """bytes_per_token, break_even_tokens: by `kv_dtype`. tokens: of all modules, without the
    preamble's. encode_s: extrapolated from the sample by tokens. break_even_bandwidth: bytes a
    second that loading a module as the model computed it must reach."""

    model: str
    dtype: str
    bytes_per_token: dict[str, int]
    documents: int
    modules: int
    tokens: int
    longest: int
    preamble_tokens: int
    tiers: tuple[TierSize, ...]
    measured: SampleTimes
    encode_s: float
    break_even_tokens: dict[str, float | None]
    break_even_bandwidth: float

    def size(self, tier: str, kv_dtype: str) -> TierSize | None:
        """The corpus in a tier; None where the plan has no such tier."""
        found = (t for t in self.tiers if (t.tier, t.kv_dtype) == (tier, kv_dtype))
        return next(found, None)

    def facts(self) -> dict[str, Any]:
        """All of it for a program: what was measured, and what is extrapolated, under its name."""
        plain = asdict(self)
        plain["tiers"] = [asdict(size) | {"share": size.share} for size in self.tiers]
        plain["measured"]["tokens_per_second"] = self.measured.tokens_per_second
        plain["extrapolated"] = {"encode_s": plain.pop("encode_s")}
        return plain


def make_plan(
    model: LoadedModel, corpus: Corpus, budgets: Budgets, folder: Path, *, sample: int = SAMPLE,
    progress: Callable[[str], None] = lambda _: None,
) -> CachePlan:  # fmt: skip
    """Measures a sample of a corpus and draws the plan of all of it.

    folder: where the states would be kept; it may not exist yet. Raises `NoDocuments`,
    `ConfigurationError`, `StoreFull` or `StoreUnwritable`.
    """
    lengths = [len(ids) for ids in corpus.modules]
    if not any(lengths):
        raise NoDocuments("the corpus holds no text; there is nothing to plan")
    preamble = model.encode(prompt_frame(model.tokenizer).preamble)
    _check_window(max(lengths) + len(preamble), model.causal.window)
    place = _existing(folder)
    chosen = [corpus.modules[n] for n in choose_sample(lengths, sample)]
    measured = measure_sample(model.causal, preamble, chosen, place, progress)
    cuts = measured.cuts
    tokens, computing = [cut.tokens for cut in cuts], [cut.compute_s for cut in cuts]
    return CachePlan(
        model=model.name,
        dtype=str(model.causal.dtype).removeprefix("torch."),
        bytes_per_token=bytes_per_token(model.causal),
        documents=corpus.documents,
        modules=len(lengths),
        tokens=corpus.tokens,
        longest=max(lengths),
        preamble_tokens=len(preamble),
        tiers=tier_sizes(model.causal, [len(preamble), *lengths], _limits(budgets, place)),
        measured=measured,
        encode_s=corpus.tokens / measured.tokens_per_second,
        break_even_tokens={
            kind: break_even_tokens(tokens, computing, [cut.load_s[kind] for cut in cuts])
            for kind in KV_DTYPES
        },
        break_even_bandwidth=break_even_bandwidth(cuts[-1].nbytes["model"], cuts[-1].compute_s),
    )


def _existing(folder: Path) -> Path:
    """The folder, or the nearest above it that exists."""
    folder = folder.absolute()
    return next(each for each in (folder, *folder.parents) if each.is_dir())


def _limits(budgets: Budgets, folder: Path) -> dict[str, int | None]:
    disk = budgets.disk_bytes
    limits: dict[str, int | None] = {
        "host": budgets.host_bytes,
        "disk": shutil.disk_usage(folder).free if disk is None else disk,
    }
    if budgets.device_bytes is not None:
        limits["device"] = budgets.device_bytes
    return limits


def _check_window(tokens: int, window: int) -> None:
    if tokens >= window:
        raise ConfigurationError(
            f"preamble and longest module take {tokens} tokens, but the model's window holds "
            f"{window}; give a smaller module_tokens"
        )


def advise(plan: CachePlan, memory_bytes: int | None = None) -> list[str]:
    """Sentences, the most important first. memory_bytes: the machine's, None where unknown."""
    return [*_whether(plan), *_length(plan), *_host(plan, memory_bytes), *_disk(plan), *_time(plan)]


def _whether(plan: CachePlan) -> Iterator[str]:
    longest = plan.measured.cuts[-1]
    load, compute = longest.load_s["model"], longest.compute_s
    module = f"a module of {longest.tokens} tokens"
    loaded, computed = format_seconds(load), format_seconds(compute)
    source = "from this disk" if plan.measured.cold else "from the page cache of this disk"
    if load < compute:
        uses = max(2, math.ceil(compute / (compute - load)))
        yield (
            f"Caching pays: {module} is loaded {source} in {loaded} and computed in {computed}, "
            f"{compute / load:.1f} times as long. A module that is used {uses} times has earned "
            "its encoding."
        )
        return
    yield (
        f"Caching on this disk does not pay: {module} is loaded in {loaded} and computed in "
        f"{computed}. Loading must reach {format_bandwidth(plan.break_even_bandwidth)}; keep "
        "what is used in memory, by host_bytes, or take a quicker disk."
    )


def _length(plan: CachePlan) -> Iterator[str]:
    tokens, shortest = plan.break_even_tokens["model"], plan.measured.cuts[0].tokens
    if tokens is not None and tokens > shortest:
        yield (
            f"Modules of less than about {tokens:.0f} tokens are computed sooner than loaded: "
            "leave module_tokens well above it."
        )


def _host(plan: CachePlan, memory_bytes: int | None) -> Iterator[str]:
    plain, eight = plan.size("host", "model"), plan.size("host", "int8")
    assert plain is not None
    assert eight is not None
    if plain.share == 1.0:
        yield "Leave kv_dtype at model: host_bytes holds the whole corpus as the model computed it."
        return
    if eight.share == 1.0:
        yield (
            "Take kv_dtype int8: host_bytes holds the whole corpus in eight bits, and "
            f"{format_share(plain.share)} of it otherwise. fp8 takes as many bytes and errs more."
        )
    else:
        yield (
            f"host_bytes holds {format_share(plain.share)} of the corpus, "
            f"{format_share(eight.share)} with kv_dtype int8; the rest is "
            "loaded when it is asked for."
        )
    whole = format_budget(plain.nbytes)
    if memory_bytes is None or plain.nbytes <= _SPARE * memory_bytes:
        yield f"host_bytes {whole} would hold all of it as the model computed it."
    else:
        yield (
            f"All of it would take host_bytes {whole}, and this machine has "
            f"{memory_bytes / 2**30:.1f} GiB of memory."
        )


def _disk(plan: CachePlan) -> Iterator[str]:
    plain, eight = plan.size("disk", "model"), plan.size("disk", "int8")
    assert plain is not None
    assert eight is not None
    if plain.share == 1.0:
        return
    kept = f"The disk holds {format_share(plain.share)} of the corpus"
    if eight.share == 1.0:
        yield f"{kept}, and all of it with kv_dtype int8."
    else:
        yield (
            f"{kept}, {format_share(eight.share)} with kv_dtype int8: give it a larger disk, or a "
            "remote tier, or what is used least is encoded again and again."
        )


def _time(plan: CachePlan) -> Iterator[str]:
    yield (
        f"Ingestion will encode for about {format_seconds(plan.encode_s)}, once: "
        f"{plan.measured.tokens_per_second:,.0f} tokens a second, as {plan.measured.modules} of "
        f"{plan.modules:,} modules took."
    )


def format_seconds(seconds: float) -> str:
    """A time in the unit that reads best."""
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} µs"
    if seconds < 1:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def format_bandwidth(bytes_per_second: float) -> str:
    """Megabytes a second."""
    rate = bytes_per_second / 1e6
    return f"{rate:,.0f} MB/s" if rate >= 10 else f"{rate:.2g} MB/s"


def format_share(share: float) -> str:
    """A share of one, to a whole hundredth unless it is smaller."""
    return f"{100 * share:.0f}%" if share >= 0.01 or share == 0 else f"{100 * share:.2f}%"


def format_budget(nbytes: int) -> str:
    """Bytes as settings spell them, rounded up."""
    unit, size = ("GiB", 2**30) if nbytes >= 2**30 else ("MiB", 2**20)
    return f"{math.ceil(10 * nbytes / size) / 10:g}{unit}"
