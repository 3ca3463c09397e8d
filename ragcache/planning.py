"""Planning of a cache: the size of a corpus in every tier, and when loading is worthwhile.

`make_plan` computes sizes for the whole corpus, and measures encoding and loading on a sample of
its modules. `break_even_tokens` is the length above which a module is loaded sooner than computed.
`advise` puts the plan into sentences.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import statistics
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ragcache.config import parse_bytes, parse_optional_bytes
from ragcache.db import Catalog
from ragcache.documents import SkippedFile, load_sources, split_document
from ragcache.documents.source import DocumentSource
from ragcache.engine import EncodeJob, LLMEngine, Segment, encode
from ragcache.errors import ConfigurationError, NoDocuments, StoreError
from ragcache.models import CausalLM, LoadedModel, prompt_frame
from ragcache.pipeline.chat_template import resolve_instruction
from ragcache.pipeline.gate_measurement import GateResult, measure_int8
from ragcache.states import KVKey, KVStates
from ragcache.states.quantization import KV_DTYPES, check_kv_dtype
from ragcache.store import DeviceTier, DiskTier, HostTier, Tier
from ragcache.store.tiers.base import named_os_error

Progress = Callable[[int, int], None]

SAMPLE = 6
"""Number of modules that are encoded to measure times."""

_ROWS = 500  # modules read at once
_SHARES = (8, 4, 2, 1)  # fractions of the longest module that are measured
_RUNS, _MAX_SECONDS = 3, 4.0  # repetitions of a measurement, within this time
_DROPPED = 1.25  # minimum ratio of a cold read to a read from the page cache


@dataclass(frozen=True, slots=True)
class Corpus:
    """The documents to plan for, as token ids."""

    documents: int
    """Number of documents."""
    modules: tuple[Sequence[int], ...]
    """Token ids of each module."""
    skipped: tuple[SkippedFile, ...] = ()
    """Files that an ingestion would skip, each with the reason."""
    omitted: Mapping[str, Sequence[str]] = field(default_factory=dict, hash=False)
    """Descriptions of content that the documents omit, such as scanned pages, by id."""

    @property
    def tokens(self) -> int:
        return sum(map(len, self.modules))


def corpus_of_sources(
    model: LoadedModel,
    sources: Iterable[DocumentSource] | DocumentSource,
    module_tokens: int,
    progress: Progress = lambda *_: None,
) -> Corpus:
    """Return the corpus of documents, split as in ingestion. Raises `DocumentError`."""
    loaded = load_sources(sources)
    documents = loaded.documents
    modules: list[array[int]] = []
    for number, document in enumerate(documents, start=1):
        parts = split_document(document, module_tokens, model.encode_untrusted)
        modules += [array("i", each.token_ids) for each in parts]
        progress(number, len(documents))
    return Corpus(len(documents), tuple(modules), tuple(loaded.skipped), loaded.omitted)


def corpus_of_collection(
    model: LoadedModel, catalog: Catalog, collection: str, progress: Progress = lambda *_: None
) -> Corpus:
    """Return the corpus of a stored collection, in tokens of the model.

    Raises `UnknownCollection`.
    """
    rows = catalog.modules(collection)
    modules: list[array[int]] = []
    for start in range(0, len(rows), _ROWS):
        part = rows[start : start + _ROWS]
        known = catalog.token_ids([row.id for row in part])
        ids = (known.get(row.id) or model.encode_untrusted(row.text) for row in part)
        modules += [array("i", each) for each in ids]
        progress(len(modules), len(rows))
    return Corpus(len({row.document for row in rows}), tuple(modules))


@dataclass(frozen=True, slots=True)
class TierSize:
    """The size of a corpus in one tier."""

    tier: str
    kv_dtype: str
    nbytes: int
    """Upper bound of the bytes that the tier allocates."""
    budget_bytes: int | None
    """Budget of the tier. Unset without a limit."""

    @property
    def share(self) -> float:
        """Share of the corpus that fits, 0 to 1."""
        if self.budget_bytes is None or self.nbytes <= self.budget_bytes:
            return 1.0
        return self.budget_bytes / self.nbytes


def shape_of(model: CausalLM, tokens: int) -> KVStates:
    """Return states of `tokens` tokens on the meta device: a shape without memory."""
    keys, values = (
        each.to(model.states_dtype) for each in model.new_states(tokens, torch.device("meta"))
    )
    return KVStates(keys, values, 0, recurrent=model.map_shape)


def bytes_per_token(model: CausalLM) -> dict[str, int]:
    """Return the bytes of a token by `kv_dtype`, scales included."""
    heads = model.num_layers * model.num_kv_heads
    eight = heads * (model.head_dim + model.value_dim + torch.float32.itemsize)
    return {kind: model.bytes_per_token if kind == "model" else eight for kind in KV_DTYPES}


def tier_sizes(
    model: CausalLM, lengths: Sequence[int], budgets: dict[str, int | None]
) -> tuple[TierSize, ...]:
    """Return the sizes of modules of these lengths in each tier with a budget, by `kv_dtype`."""
    kinds = [check_kv_dtype(kind) for kind in KV_DTYPES]
    pinned = model.device.type == "cuda"
    empty: list[Tier] = [
        DeviceTier(0, "cpu"),
        *(HostTier(0, kv_dtype=kind, pinned=pinned) for kind in kinds),
        *(DiskTier(Path(), kv_dtype=kind) for kind in kinds),
    ]
    counted = [(shape_of(model, tokens), n) for tokens, n in Counter(lengths).items()]
    return tuple(
        TierSize(
            tier.name,
            tier.kv_dtype,
            sum(n * tier.size_of(states) for states, n in counted),
            budgets[tier.name],
        )
        for tier in empty
        if tier.name in budgets
    )


def break_even_tokens(
    tokens: Sequence[int], compute_s: Sequence[float], load_s: Sequence[float]
) -> float | None:
    """Return the length in tokens above which a module is loaded faster than computed.

    Returns the shortest length if loading is always faster, or None when it is slower at the
    longest length.

    Args:
        tokens: Measured lengths, ascending. The gain of loading is interpolated between them.
        compute_s: Seconds to compute a module of each length.
        load_s: Seconds to load a module of each length.

    Example:
        >>> break_even_tokens([10, 20], compute_s=[1.0, 2.0], load_s=[1.5, 1.5])
        15.0
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


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes of each tier."""

    host_bytes: int
    device_bytes: int | None = None
    """Budget of the device tier. Without one, the plan has no device tier."""
    disk_bytes: int | None = None
    """Budget of the disk tier. Defaults to the free space of the disk."""

    @classmethod
    def parse(
        cls, host: int | str, device: int | str | None = None, disk: int | str | None = None
    ) -> Budgets:
        """Parse sizes such as `8GiB`. Raises `ConfigurationError`."""
        return cls(parse_bytes(host), *map(parse_optional_bytes, (device, disk)))

    def limits(self, folder: Path) -> dict[str, int | None]:
        """Return the bytes of each tier to plan. `folder` is on the disk."""
        disk = shutil.disk_usage(folder).free if self.disk_bytes is None else self.disk_bytes
        device = {} if self.device_bytes is None else {"device": self.device_bytes}
        return {"host": self.host_bytes, "disk": disk, **device}


@dataclass(frozen=True, slots=True)
class Cut:
    """Measurements of the first `tokens` tokens of a module."""

    tokens: int
    compute_s: float
    """Seconds to encode them after the preamble."""
    nbytes: dict[str, int]
    """Bytes of their blob by `kv_dtype`."""
    load_s: dict[str, float]
    """Seconds to load, restore and copy the blob to the model's device, by `kv_dtype`."""


@dataclass(frozen=True, slots=True)
class SampleTimes:
    """Measurements of a sample of modules."""

    modules: int
    tokens: int
    encode_s: float
    """Seconds to encode all modules in one call."""
    cuts: tuple[Cut, ...]
    cold: bool
    """Whether loading was measured from the disk, and not from the system's page cache."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.encode_s


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The plan of a corpus."""

    model: str
    dtype: str
    bytes_per_token: dict[str, int]
    """Bytes of a token by `kv_dtype`."""
    documents: int
    modules: int
    tokens: int
    """Tokens of all modules, without the preamble."""
    longest: int
    """Tokens of the longest module."""
    preamble_tokens: int
    tiers: tuple[TierSize, ...]
    measured: SampleTimes
    encode_s: float
    """Seconds to encode the corpus, extrapolated from the sample by tokens."""
    break_even_tokens: dict[str, float | None]
    """Length above which a module is loaded faster than computed, by `kv_dtype`."""
    break_even_bandwidth: float
    """Bytes per second below which a module in the model's dtype is computed faster than loaded."""
    int8: GateResult | None = None
    """Distance of answers over states in eight bits from `exact`. None if it was not measured."""
    map_bytes: int = 0
    """Bytes that each module keeps of the recurrent layers, in addition to its tokens."""
    module_limit: int = 0
    """Most tokens of a module by default on this model."""
    states_per_module: int = 1
    """Most states of a module in the model's default mode, of which `tiers` and `encode_s` count
    one."""

    def sizes(self, tier: str) -> dict[str, TierSize]:
        """Return the sizes of the corpus in a tier of the plan by `kv_dtype`."""
        return {size.kv_dtype: size for size in self.tiers if size.tier == tier}

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values, with measured and extrapolated figures apart."""
        plain = asdict(self)
        plain["tiers"] = [asdict(size) | {"share": size.share} for size in self.tiers]
        plain["measured"]["tokens_per_second"] = self.measured.tokens_per_second
        plain["int8"] = self.int8 and asdict(self.int8) | {"passes": self.int8.passes}
        plain["extrapolated"] = {"encode_s": plain.pop("encode_s")}
        return plain


def make_plan(
    model: LoadedModel,
    corpus: Corpus,
    budgets: Budgets,
    folder: Path,
    *,
    sample: int = SAMPLE,
    instruction: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> CachePlan:
    """Plan the caching of a corpus.

    Args:
        model: The model.
        corpus: The corpus.
        budgets: Bytes of each tier.
        folder: Future state folder, which need not exist. Loading is measured on its disk.
        sample: Number of modules to measure.
        instruction: Text before the documents, as in `RagCache.open`.
        progress: Called with a description of each step.

    Raises:
        NoDocuments: The corpus holds no text.
        ConfigurationError: The instruction cannot be used, or a module does not fit the model's
            window.
        StoreFull: The disk is full.
        StoreUnwritable: The disk cannot be written.
    """
    lengths = [len(ids) for ids in corpus.modules]
    if not any(lengths):
        raise NoDocuments("the corpus holds no text; there is nothing to plan")
    preamble = _preamble(model, instruction, max(lengths))
    place = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())
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
        tiers=tier_sizes(model.causal, [len(preamble), *lengths], budgets.limits(place)),
        measured=measured,
        encode_s=corpus.tokens / measured.tokens_per_second,
        break_even_tokens={
            kind: break_even_tokens(tokens, computing, [cut.load_s[kind] for cut in cuts])
            for kind in KV_DTYPES
        },
        break_even_bandwidth=cuts[-1].nbytes["model"] / cuts[-1].compute_s,
        int8=_measure_int8(model, progress),
        map_bytes=model.causal.map_bytes,
        module_limit=model.causal.module_limit(),
        states_per_module=len(model.default_mode.encodings),
    )


def _preamble(model: LoadedModel, instruction: str | None, longest: int) -> list[int]:
    """Return the preamble's tokens. Raises `ConfigurationError` if the longest module, of `longest`
    tokens, does not fit behind it."""
    before_documents = resolve_instruction(model, instruction)
    preamble = model.encode(prompt_frame(model.tokenizer, before_documents).preamble)
    needed, window = longest + len(preamble), model.causal.window
    if needed >= window:
        raise ConfigurationError(
            f"preamble and longest module take {needed} tokens, but the model's window holds "
            f"{window}; give a smaller module_tokens"
        )
    return preamble


def _measure_int8(model: LoadedModel, progress: Callable[[str], None]) -> GateResult | None:
    progress("measuring answers over states in eight bits")
    with LLMEngine(model.causal) as engine:
        return measure_int8(model, engine)


def choose_sample(lengths: Sequence[int], count: int) -> list[int]:
    """Return indices of `count` modules, evenly spaced in the order of their lengths."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    count = min(count, len(order))
    return [order[(2 * n + 1) * len(order) // (2 * count)] for n in range(count)]


def measure_sample(
    model: CausalLM,
    preamble: Sequence[int],
    sample: Sequence[Sequence[int]],
    folder: Path,
    progress: Callable[[str], None],
) -> SampleTimes:
    """Measure encoding and loading of a sample, in a temporary folder on the disk of `folder`.

    Raises `StoreFull` or `StoreUnwritable`.
    """
    progress("encoding the preamble")
    [root] = encode(model, [EncodeJob(preamble)])
    longest = max(sample, key=len)
    median_seconds(model, lambda: encode_modules(model, root, [longest[:16]]))  # warm-up
    progress(f"encoding {len(sample)} modules of the corpus")
    encode_s = median_seconds(model, lambda: encode_modules(model, root, sample))
    lengths = sorted({max(1, len(longest) // share) for share in _SHARES})
    host_bytes = 2 * model.module_bytes(len(longest)) + 2**20
    host = HostTier(host_bytes, pinned=model.device.type == "cuda")
    cuts: list[Cut] = []
    try:
        with tempfile.TemporaryDirectory(prefix="ragcache-plan-", dir=folder) as place:
            disks = {k: DiskTier(Path(place) / k, kv_dtype=check_kv_dtype(k)) for k in KV_DTYPES}
            for tokens in lengths:
                progress(f"computing and loading a module of {tokens} tokens")
                cut, cold = _measure_cut(model, root, longest[:tokens], disks, host)
                cuts.append(cut)
    except StoreError:
        raise
    except OSError as error:
        raise named_os_error(error, folder) from error
    return SampleTimes(len(sample), sum(map(len, sample)), encode_s, tuple(cuts), cold)


def _measure_cut(
    model: CausalLM,
    root: KVStates,
    tokens: Sequence[int],
    disks: dict[str, DiskTier],
    host: HostTier,
) -> tuple[Cut, bool]:
    """Measure a module. Also returns whether it was loaded from the disk itself.

    The page cache could have held it instead.
    """
    compute_s = median_seconds(model, lambda: encode_modules(model, root, [tokens]))
    [states] = encode_modules(model, root, [tokens])
    key = KVKey(hashlib.sha256(str(len(tokens)).encode()).hexdigest())

    def load_seconds(disk: DiskTier, prepare: Callable[[Path], object]) -> float:
        times = []
        for _ in range(_RUNS):
            prepare(disk.path(key))
            begin = time.perf_counter()
            loaded = disk.load(key, host.allocate).restore()
            loaded.keys.to(model.device), loaded.values.to(model.device)
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    nbytes = {kind: disk.put(key, states) for kind, disk in disks.items()}
    load_s = {kind: load_seconds(disk, drop_pages) for kind, disk in disks.items()}
    warm = load_seconds(disks["model"], Path.read_bytes)
    return Cut(len(tokens), compute_s, nbytes, load_s), load_s["model"] > _DROPPED * warm


def encode_modules(
    model: CausalLM, root: KVStates, modules: Sequence[Sequence[int]]
) -> list[KVStates]:
    """Return the states of modules, each encoded after the preamble's states."""
    jobs = [EncodeJob(list(ids), root.length, Segment(root, 0)) for ids in modules]
    return list(encode(model, jobs))


def median_seconds(model: CausalLM, run: Callable[[], object]) -> float:
    """Return the median seconds of three runs, or of fewer if they take long."""
    times: list[float] = []
    while len(times) < _RUNS and sum(times) < _MAX_SECONDS:
        begin = time.perf_counter()
        run()
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def drop_pages(path: Path) -> None:
    """Drop a file from the page cache, if the operating system and the file system support it."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def advise(plan: CachePlan) -> list[str]:
    """Return advice in sentences: whether caching pays, for which modules, at which cost."""
    longest, advice = plan.measured.cuts[-1], []
    load, compute = longest.load_s["model"], longest.compute_s
    module, loaded, computed = longest.tokens, format_seconds(load), format_seconds(compute)
    source = "from this disk" if plan.measured.cold else "from the page cache of this disk"
    if load < compute:
        uses = max(2, math.ceil(compute / (compute - load)))
        advice.append(
            f"Caching pays: a module of {module} tokens is loaded {source} in {loaded} and "
            f"computed in {computed}, {compute / load:.1f} times as long. A module that is used "
            f"{uses} times has earned its encoding."
        )
    else:
        advice.append(
            f"Caching on this disk does not pay: a module of {module} tokens is loaded in {loaded} "
            f"and computed in {computed}. Loading must reach "
            f"{format_bandwidth(plan.break_even_bandwidth)}; keep what is used in memory, by "
            "host_bytes, or take a quicker disk."
        )
    tokens, shortest = plan.break_even_tokens["model"], plan.measured.cuts[0].tokens
    if tokens is not None and tokens > shortest:
        advice.append(
            f"Modules of less than about {tokens:.0f} tokens are computed sooner than loaded: "
            "leave module_tokens well above it."
        )
    advice += [*_advise_length(plan), *_advise_int8(plan)]
    advice.append(
        f"Ingestion will encode for about {format_seconds(plan.encode_s)}, once: "
        f"{plan.measured.tokens_per_second:,.0f} tokens a second, as {plan.measured.modules} of "
        f"{plan.modules:,} modules took."
    )
    if plan.states_per_module > 1:
        advice.append(
            f"A module that is read first in some prompts and later in others keeps "
            f"{plan.states_per_module} states in this model's mode: bytes and encoding are at most "
            f"{plan.states_per_module} times these. Questions encode the further states when they "
            "first need them, and `ragcache warm` does so ahead."
        )
    return advice


def _advise_length(plan: CachePlan) -> list[str]:
    """Say from which length on modules of a hybrid model are worth their maps, and propose longer
    ones where they are shorter."""
    if not plan.map_bytes:
        return []
    tokens = -(-plan.map_bytes // plan.bytes_per_token["model"])
    average = plan.tokens / plan.modules
    advice = (
        f"Each module keeps {plan.map_bytes / 2**20:,.1f} MiB of the recurrent layers, whatever "
        f"its length: as much as keys and values of {tokens:,} tokens, where modules have "
        f"{average:,.0f} on average."
    )
    if average >= tokens:
        return [f"{advice} Modules of this length are worth their maps."]
    longer = min(tokens, plan.module_limit)
    if average < longer:
        advice += f" Longer modules take less in all: raise module_tokens to {longer:,}."
    return [advice]


def _advise_int8(plan: CachePlan) -> list[str]:
    """Return the proposal of states in eight bits, if answers over them are near enough."""
    sizes = plan.sizes("disk")
    if plan.int8 is None or sizes.keys() < {"model", "int8"}:
        return []
    share = sizes["int8"].nbytes / sizes["model"].nbytes
    distance = (
        f"first tokens are then {plan.int8.kl_divergence:.2f} nats from exact, where "
        f"{plan.int8.limit:.2f} are the limit"
    )
    if plan.int8.passes:
        return [f"kv_dtype=int8 takes {share:.0%} of the disk, and serves: {distance}."]
    return [f"kv_dtype=int8 would be refused: {distance}."]


def format_seconds(seconds: float) -> str:
    """Return a time in a readable unit."""
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} µs"
    if seconds < 1:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def format_bandwidth(bytes_per_second: float) -> str:
    """Return a bandwidth in megabytes per second."""
    rate = bytes_per_second / 1e6
    return f"{rate:,.0f} MB/s" if rate >= 10 else f"{rate:.2g} MB/s"
