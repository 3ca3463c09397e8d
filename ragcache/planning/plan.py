"""The plan of a corpus: what is known, what was measured, what follows from it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ragcache.config import parse_bytes, parse_optional_bytes
from ragcache.errors import ConfigurationError, NoDocuments
from ragcache.models import LoadedModel, prompt_frame
from ragcache.planning.break_even import break_even_bandwidth, break_even_tokens
from ragcache.planning.corpus import Corpus
from ragcache.planning.measuring import Measured, measure, spread
from ragcache.planning.sizes import TierSize, bytes_per_token, tier_sizes
from ragcache.states.quantization import KV_DTYPES

SAMPLE = 6


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
class Plan:
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
    measured: Measured
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
) -> Plan:  # fmt: skip
    """Measures a sample of a corpus and draws the plan of all of it.

    folder: where the states would be kept; it may not exist yet. Raises `NoDocuments`,
    `ConfigurationError`, `StoreFull` or `StoreUnwritable`.
    """
    lengths = [len(ids) for ids in corpus.modules]
    if not any(lengths):
        raise NoDocuments("the corpus holds no text; there is nothing to plan")
    preamble = model.encode(prompt_frame(model.tokenizer).preamble)
    _check_window(max(lengths) + len(preamble), model.causal.window)
    place = existing(folder)
    chosen = [corpus.modules[n] for n in spread(lengths, sample)]
    measured = measure(model.causal, preamble, chosen, place, progress)
    cuts = measured.cuts
    tokens, computing = [cut.tokens for cut in cuts], [cut.compute_s for cut in cuts]
    return Plan(
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


def existing(folder: Path) -> Path:
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
