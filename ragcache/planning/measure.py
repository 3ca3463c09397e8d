"""Times on a sample of a corpus: encoding it, and computing and loading modules by length."""

from __future__ import annotations

import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ragcache.engine import EncodeJob, Segment, encode
from ragcache.errors import StoreError
from ragcache.models import LanguageModel
from ragcache.states import KVKey, KVStates
from ragcache.states.quantization import KV_DTYPES, check_kv_dtype, restored
from ragcache.store import DiskTier, HostTier
from ragcache.store.tiers.base import named_os_error

_SHARES = (8, 4, 2, 1)  # the longest module of the sample is cut to these parts of it
_RUNS, _PATIENCE = 3, 4.0  # how often something is timed, and the seconds after which no more
_DROPPED = 1.25  # times as slow as from the page cache: what came from a disk


@dataclass(frozen=True, slots=True)
class Cut:
    """The first `tokens` of a module. compute_s: to encode them after the preamble. nbytes and
    load_s, by `kv_dtype`: their blob, and to load it, restore it and bring it to the device of the
    model."""

    tokens: int
    compute_s: float
    nbytes: dict[str, int]
    load_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class SampleTimes:
    """modules, tokens, encode_s: of the sample, encoded in one portion. cold: whether loading was
    timed from the disk and not from the system's page cache."""

    modules: int
    tokens: int
    encode_s: float
    cuts: tuple[Cut, ...]
    cold: bool

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.encode_s


def choose_sample(lengths: Sequence[int], count: int) -> list[int]:
    """Indices of `count` modules, evenly over their order by length."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    count = min(count, len(order))
    return [order[(2 * n + 1) * len(order) // (2 * count)] for n in range(count)]


def measure_sample(
    model: LanguageModel, preamble: Sequence[int], sample: Sequence[Sequence[int]], folder: Path,
    progress: Callable[[str], None],
) -> SampleTimes:  # fmt: skip
    """Times the modules of a sample. folder: on the disk to measure; a subfolder is made and
    removed. Raises `StoreFull` or `StoreUnwritable`."""
    progress("encoding the preamble")
    [root] = encode(model, [EncodeJob(preamble)])
    longest = max(sample, key=len)
    median_seconds(model, lambda: _encoded(model, root, [longest[:16]]))  # kernels are made ready
    progress(f"encoding {len(sample)} modules of the corpus")
    encode_s = median_seconds(model, lambda: _encoded(model, root, sample))
    lengths = sorted({max(1, len(longest) // share) for share in _SHARES})
    try:
        with tempfile.TemporaryDirectory(prefix="ragcache-plan-", dir=folder) as place:
            disk = _Disk(Path(place), model, 2 * len(longest))
            cuts, cold = [], []
            for tokens in lengths:
                progress(f"computing and loading a module of {tokens} tokens")
                cut, dropped = _cut(model, root, longest[:tokens], disk)
                cuts.append(cut)
                cold.append(dropped)
    except StoreError:
        raise
    except OSError as error:
        raise named_os_error(error, folder) from error
    return SampleTimes(len(sample), sum(map(len, sample)), encode_s, tuple(cuts), cold[-1])


class _Disk:
    """Tiers under a folder, one for each way of keeping states, and memory to load them into."""

    def __init__(self, folder: Path, model: LanguageModel, tokens: int) -> None:
        kinds = [check_kv_dtype(kind) for kind in KV_DTYPES]
        self.tiers = {kind: DiskTier(folder / kind, kv_dtype=kind) for kind in kinds}
        pinned = model.device.type == "cuda"
        self.model = model
        self.host = HostTier(tokens * model.bytes_per_token + 2**20, pinned=pinned)

    def load_seconds(self, kind: str, key: KVKey, prepare: Callable[[Path], None]) -> float:
        tier, times = self.tiers[check_kv_dtype(kind)], []
        for _ in range(_RUNS):
            prepare(tier.path(key))
            begin = time.perf_counter()
            states = restored(tier.load(key, self.host.allocate))
            states.keys.to(self.model.device), states.values.to(self.model.device)
            times.append(time.perf_counter() - begin)
        return statistics.median(times)


def _cut(
    model: LanguageModel, root: KVStates, tokens: Sequence[int], disk: _Disk
) -> tuple[Cut, bool]:
    compute_s = median_seconds(model, lambda: _encoded(model, root, [tokens]))
    [states] = _encoded(model, root, [tokens])
    key = KVKey(hashlib.sha256(str(len(tokens)).encode()).hexdigest())
    nbytes = {kind: tier.put(key, states) for kind, tier in disk.tiers.items()}
    load_s = {str(kind): disk.load_seconds(kind, key, drop_pages) for kind in disk.tiers}
    warm = disk.load_seconds("model", key, fill_pages)
    cut = Cut(len(tokens), compute_s, {str(kind): n for kind, n in nbytes.items()}, load_s)
    return cut, load_s["model"] > _DROPPED * warm


def _encoded(
    model: LanguageModel, root: KVStates, modules: Sequence[Sequence[int]]
) -> list[KVStates]:
    jobs = [EncodeJob(list(ids), root.length, Segment(root, 0)) for ids in modules]
    return list(encode(model, jobs))


def median_seconds(model: LanguageModel, run: Callable[[], object]) -> float:
    """Seconds at the median of three runs; of fewer where they take long."""
    times: list[float] = []
    while len(times) < _RUNS and sum(times) < _PATIENCE:
        begin = time.perf_counter()
        run()
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def drop_pages(path: Path) -> None:
    """Drops a file from the system's page cache, where the system and the file system do that."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fill_pages(path: Path) -> None:
    """Reads a file into the page cache."""
    with path.open("rb") as file:
        file.read()
