"""The store: reading states from disk, first tokens by tier, and the cost of the ledger.

python benchmarks/tiers.py --json FILE
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from harness import (
    BenchDTypeOption,
    JsonFile,
    LlamaShape,
    Progress,
    PromptSetting,
    describe_machine,
    dtypes_of,
    made_up_key,
    plain_table,
    print_figures,
    run_benchmark,
    seconds,
    shaped_causal,
)
from rich.table import Table
from sqlalchemy import insert, select, text

from ragcache.db import Catalog, Database, Ledger, NewDocument, NewModule
from ragcache.db.state_rows import StateMetadata, StateRow
from ragcache.db.summaries import sum_up
from ragcache.db.tables import StateTable
from ragcache.engine import EncodeJob, Request, assemble_context, complete, encode
from ragcache.models import CausalLM
from ragcache.planning import (
    break_even_tokens,
    drop_pages,
    encode_modules,
    format_bandwidth,
    format_seconds,
    median_seconds,
)
from ragcache.states import KVKey, KVStates
from ragcache.states.quantization import StoredStates
from ragcache.store import DiskTier, HostTier, KVStore, LeaseRequest, RemoteTier, Tier
from ragcache_api.cli.console import console, format_break_even, format_bytes

_WARM = 64  # modules in memory that requests use
_A_REQUEST = 4
_A_DOCUMENT = 100


@dataclass(frozen=True, slots=True)
class ByTierSetting(PromptSetting):
    """The prompt, its repetitions from each tier, the lengths for the break-even, and the dtype
    that the model computes in."""

    runs: int = 5
    dtype: str = "auto"
    lengths: tuple[int, ...] = (16, 64, 256, 1024)


@dataclass(frozen=True, slots=True)
class TiersSetting:
    """folder: a place for temporary blobs; None for the system's temporary folder. blobs: modules
    of `module_tokens` that are read from disk. entries: modules of the ledger."""

    shape: LlamaShape = LlamaShape()
    module_tokens: int = 1024
    blobs: int = 16
    disk_runs: int = 9
    by_tier: ByTierSetting = ByTierSetting()
    entries: int = 100_000
    folder: Path | None = None


def bench_tiers(
    setting: TiersSetting | None = None, progress: Progress = lambda _: None
) -> dict[str, Any]:
    """Runs all parts and returns their figures with details.

    disk_bandwidth_share: states read from disk into the host tier and verified, against reading the
    same bytes plainly, with a cold page cache where the system drops it.
    ttft_by_tier: seconds to the first token with the modules in each tier, and `computed`.
    ledger_ms_p50: the ledger's part of a request, with as many modules as entries; open_s: opening
    such a store.
    """
    setting = setting or TiersSetting()
    shape = setting.shape
    module = (shape.num_layers, shape.num_kv_heads, setting.module_tokens, shape.head_dim)
    parts: tuple[Callable[[Path], dict[str, Any]], ...] = (
        lambda folder: bench_disk(folder, setting.blobs, module, setting.disk_runs),
        lambda folder: bench_by_tier(folder, shape, setting.by_tier, progress),
        lambda folder: bench_ledger(folder, setting.entries),
    )
    result: dict[str, Any] = {}
    for name, part in zip(("disk", "tiers", "ledger"), parts, strict=True):
        progress(f"measuring: {name}")
        with tempfile.TemporaryDirectory(prefix="ragcache-bench-", dir=setting.folder) as folder:
            result |= part(Path(folder))
    return result | {"setting": asdict(setting), "machine": describe_machine()}


def bench_disk(
    folder: Path, blobs: int, shape: tuple[int, int, int, int], runs: int
) -> dict[str, Any]:
    """disk: medians in bytes a second over `blobs` modules of [L, Hkv, S, D] in bfloat16.

    plain: a loop of reads into one buffer. mapped: verified where the page cache has them. host:
    loaded into memory of the host tier, and verified there. Once with the files in the page cache
    (`warm`) and once after the system was asked to drop them (`cold`; `dropped` tells whether it
    did, since some file systems do not). disk_bandwidth_share: that of `host`, cold if dropped.
    """
    tier = DiskTier(folder)
    keys = [made_up_key(number) for number in range(blobs)]
    torch.manual_seed(0)
    for key in keys:
        keys_and_values = torch.randn(2, *shape).bfloat16()
        tier.put(key, KVStates(keys_and_values[0], keys_and_values[1], 0))
    host = HostTier(4 * 2 * 2 * torch.Size(shape).numel() + 2**20)
    nbytes = sum(tier.path(key).stat().st_size for key in keys)
    ways: dict[str, Callable[[KVKey], object]] = {
        "plain": _read_plainly(tier),
        "mapped": tier.get,
        "host": lambda key: tier.load(key, host.allocate),
    }
    warm = _bandwidths(_disk_seconds(ways, tier, keys, runs, cold=False), nbytes)
    cold = _bandwidths(_disk_seconds(ways, tier, keys, runs, cold=True), nbytes)
    dropped = cold["plain"] < 0.8 * warm["plain"]
    return {
        "disk_bandwidth_share": (cold if dropped else warm)["host_share"],
        "disk": {"nbytes": nbytes, "warm": warm, "cold": cold, "dropped": dropped},
    }


def _bandwidths(times: dict[str, list[float]], nbytes: int) -> dict[str, float]:
    """Bandwidths, and their shares of the plain one: medians over rounds."""
    speeds = {way: nbytes / statistics.median(seconds) for way, seconds in times.items()}
    for way in ("mapped", "host"):
        pairs = zip(times["plain"], times[way], strict=True)
        speeds[f"{way}_share"] = statistics.median(plain / seconds for plain, seconds in pairs)
    return speeds


def _read_plainly(tier: DiskTier) -> Callable[[KVKey], object]:
    buffer = bytearray(1 << 20)

    def read(key: KVKey) -> None:
        with tier.path(key).open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    return read


def _disk_seconds(
    ways: dict[str, Callable[[KVKey], object]],
    tier: DiskTier, keys: list[KVKey], runs: int, *, cold: bool,
) -> dict[str, list[float]]:  # fmt: skip
    """Seconds of the ways in turn, so that other load affects all of them; each is equally often
    first, because disks have caches."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    names, prepare = list(ways), drop_pages if cold else Path.read_bytes
    for run in range(runs * len(ways)):
        way = names[(run + run // len(ways)) % len(ways)]
        for key in keys:
            prepare(tier.path(key))
        begin = time.perf_counter()
        for key in keys:
            ways[way](key)
        times[way].append(time.perf_counter() - begin)
    return times


def bench_by_tier(
    folder: Path, shape: LlamaShape, setting: ByTierSetting, progress: Progress
) -> dict[str, Any]:
    """ttft_by_tier: median seconds from the request to its first token, states leased from each
    tier, and `computed` with nothing cached, once. by_tier: the part of it that makes states ready,
    and for each length the seconds of computing one module and of making it ready, with the length
    from which on that is quicker and the bandwidth below which it never is.

    `remote` is `file://` on the same disk, and stands for the
    work of the protocol, not for a network. Files are dropped from the page cache before each run,
    where the system does that.
    """
    progress("building the model")
    model = shaped_causal(shape, setting.dtype)
    preamble, modules, question = setting.draw(shape)
    progress("encoding the modules")
    [root] = encode(model, [EncodeJob(preamble)])
    root_key = made_up_key("root")
    prompt = {made_up_key(f"module {n}"): tokens for n, tokens in enumerate(modules)}
    cuts = {made_up_key(f"cut {n}"): modules[0][:n] for n in setting.lengths}
    states = {root_key: root}
    for key, tokens in (prompt | cuts).items():
        [states[key]] = encode_modules(model, root, [tokens])
    progress("computing modules of several lengths")
    computing = {
        key: median_seconds(model, partial(encode_modules, model, root, [tokens]))
        for key, tokens in cuts.items()
    }
    bench = _FilledTiers(model, _store(folder, states), setting.runs)
    try:
        progress("first tokens from each tier")
        order = [root_key, *reversed(prompt)]
        _first_token(model, [states[key] for key in order], question)  # warm-up
        times = {tier: bench.time_lease(tier, order, question) for tier in bench.tiers}
        assert len(bench.tokens) == 1, "every tier holds the same states"
        whole = [*preamble, *(t for key in order[1:] for t in prompt[key]), *question]
        progress("the first token with nothing cached (tens of seconds on a processor)")
        computed = seconds(lambda: _first_token(model, (), whole))
        progress("modules of several lengths from each tier")
        rows = [
            {"tokens": len(tokens), "nbytes": states[key].nbytes, "computed": computing[key]}
            | {tier: bench.time_lease(tier, [key])[0] for tier in bench.tiers}
            | {"break_even_bandwidth": states[key].nbytes / computing[key]}
            for key, tokens in cuts.items()
        ]
    finally:
        bench.close()
    compute_s = list(computing.values())
    even = {
        tier: break_even_tokens(setting.lengths, compute_s, [row[tier] for row in rows])
        for tier in bench.tiers
    }
    ready = {tier: leased for tier, (leased, _) in times.items()}
    ttft = {tier: first for tier, (_, first) in times.items()} | {"computed": computed}
    details = {"dtypes": dtypes_of(model), "runs": setting.runs, "ready_s": ready}
    details |= {"lengths": rows, "break_even_tokens": even}
    return {"ttft_by_tier": ttft, "by_tier": details}


class _FilledTiers:
    """A store with the same states in every tier. tokens: all first tokens so far."""

    def __init__(self, model: CausalLM, store: KVStore, runs: int) -> None:
        self.model, self.store, self.runs = model, store, runs
        self.tiers = [index.name for index in store.memory.every]
        self.tokens: set[int] = set()

    def time_lease(
        self, tier: str, keys: Sequence[KVKey], question: Sequence[int] = ()
    ) -> tuple[float, float]:
        """Median seconds to states leased from a tier, and to the first token of a question."""
        pairs = []
        for _ in range(self.runs):
            self._only_from(tier, keys)
            begin = time.perf_counter()
            with self.store.lease(keys) as lease:
                leased = time.perf_counter() - begin
                if question:
                    self.tokens.add(_first_token(self.model, lease.states, question))
                pairs.append((leased, time.perf_counter() - begin))
                assert set(lease.source.values()) == {tier}, lease.source
        ready, first = map(statistics.median, zip(*pairs, strict=True))
        return ready, first

    def close(self) -> None:
        self.store.close()
        self.store.ledger.database.close()

    def _only_from(self, tier: str, keys: Sequence[KVKey]) -> None:
        """Evicts states from the tiers above one, and its files from the page cache."""
        for above in self.tiers[: self.tiers.index(tier)]:
            self.store.evict(keys, above)
        shared = next((s for s in self.store.persistent.indexes if s.name == tier), None)
        if shared is not None:
            files: Any = shared.tier
            for key in keys:
                drop_pages(Path(files.path(key)))


def _store(folder: Path, states: dict[KVKey, KVStates]) -> KVStore:
    """A store without background threads, which would copy remote states to the disk meanwhile."""
    room = 2 * sum(each.nbytes for each in states.values()) + 2**24
    remote = RemoteTier.open(f"file://{folder / 'remote'}")
    database = Database.open(folder / "ledger.sqlite")
    shared: list[Tier] = [DiskTier(folder / "states"), remote]
    store = KVStore(Ledger(database), [HostTier(room)], shared)
    store.ledger.begin()
    for key, each in states.items():
        store.put_states(key, each)
    return store


def _first_token(model: CausalLM, states: Sequence[StoredStates], own: Sequence[int]) -> int:
    context = assemble_context(states, own, window=model.window, max_tokens=1)
    [completion] = complete(model, [Request(context, 1)])
    return completion.token_ids[0]


def bench_ledger(folder: Path, modules: int = 100_000, requests: int = 1000) -> dict[str, float]:
    """ledger_ms_p50: milliseconds of a request that the ledger takes: the collection's version,
    token ids and a lease of four modules in memory. open_s: seconds to open a store of so many
    modules.

    The blobs are small, and most of them empty: what is measured is bookkeeping.
    """
    fill_ledger(folder, modules)
    began = time.perf_counter()
    database = Database.open(folder / "ledger.sqlite")
    store = KVStore.open(folder, database, 1 << 30)
    opened = time.perf_counter() - began
    try:
        times = _ledger_requests(store, Catalog(database, "tokenizer", None), requests)
    finally:
        store.close()
        database.close()
    return {"ledger_ms_p50": 1000 * statistics.median(times), "open_s": opened}


def _ledger_requests(store: KVStore, catalog: Catalog, requests: int) -> list[float]:
    rows = catalog.modules("bench")[:_WARM]
    keys = [made_up_key(number) for number in range(_WARM)]
    for _ in range(2):  # the second use admits
        store.fetch(keys).release()
    times = []
    for number in range(requests):
        chosen = [(7 * number + i) % _WARM for i in range(_A_REQUEST)]
        began = time.perf_counter()
        catalog.version("bench")
        catalog.token_ids([rows[i].id for i in chosen])
        with store.fetch([keys[i] for i in chosen]):
            times.append(time.perf_counter() - began)
    return times


def fill_ledger(folder: Path, modules: int, ledger: str | None = None) -> None:
    """Creates a state folder with so many modules in the collection `bench`.

    `ledger` is the URL of an empty database that keeps the rows instead of the folder's file.
    """
    database = Database.open(ledger or folder / "ledger.sqlite")
    store = KVStore.open(folder, database, 1 << 30)
    documents = [
        NewDocument(f"d{first}", "", "", [
            NewModule(f"m{n}", "text", [1, 2, 3], made_up_key(n))
            for n in range(first, min(first + _A_DOCUMENT, modules))
        ])
        for first in range(0, modules, _A_DOCUMENT)
    ]  # fmt: skip
    Catalog(database, "tokenizer", None).replace_documents("bench", documents)
    states = KVStates(torch.zeros(1, 1, 3, 8), torch.zeros(1, 1, 3, 8), 0)
    for number in range(_WARM):
        store.put_states(made_up_key(number), states, LeaseRequest("ingest", "rooted"))
    facts = StateMetadata(3, "rooted", made_up_key(-1), "model")
    rows = []
    for number in range(_WARM, modules):
        key = made_up_key(number)
        row = StateRow(key, "disk", 4096, 0, number, False, math.inf, "model", facts)
        rows.append(row.values(""))
        path = store.disk.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    with database.transaction() as session:
        session.execute(insert(StateTable), rows)
        sum_up(session, [row["key"] for row in rows])
    store.close()
    database.close()


def vary_states(folder: Path, ledger: str | None = None) -> None:
    """Give the states of `fill_ledger` different sizes and numbers of uses."""
    vary = text(
        "UPDATE states SET nbytes = 4096 + n * 7919 % 10007, hits = n * 5501 % 9973, "
        "used_at = n * 3571 % 9967, pinned = n % 1000 = 0 "
        "FROM (SELECT key AS k, row_number() OVER (ORDER BY key) AS n FROM states) AS numbered "
        "WHERE key = k"
    )
    with (
        closing(Database.open(ledger or folder / "ledger.sqlite")) as database,
        database.transaction() as rows,
    ):
        rows.execute(vary)
        sum_up(rows, rows.scalars(select(StateTable.key)))


def _disk_table(result: dict[str, Any]) -> Table:
    disk = result["disk"]
    table = plain_table("from disk", "page cache cold", "of plain", "warm", "of plain")
    for way in ("plain", "mapped", "host"):
        cells = []
        for state in ("cold", "warm"):
            share = disk[state].get(f"{way}_share")
            cells.append(f"{disk[state][way] / 1e9:.2f} GB/s")
            cells.append("" if share is None else f"{100 * share:.0f}%")
        table.add_row(way, *cells)
    return table


def _first_token_table(result: dict[str, Any]) -> Table:
    ttft, ready = result["ttft_by_tier"], result["by_tier"]["ready_s"]
    table = plain_table("modules in", "ready in", "first token in", "sooner than computed")
    for tier, first in ttft.items():
        states = format_seconds(ready[tier]) if tier in ready else ""
        sooner = f"{ttft['computed'] / first:.1f}x" if tier in ready else ""
        table.add_row(tier if tier in ready else "no tier", states, format_seconds(first), sooner)
    return table


def _break_even_table(result: dict[str, Any]) -> Table:
    details = result["by_tier"]
    even = details["break_even_tokens"]
    table = plain_table("a module of", "bytes", "computed", *even, "break-even")
    for row in details["lengths"]:
        times = [format_seconds(row[way]) for way in ("computed", *even)]
        speed = format_bandwidth(row["break_even_bandwidth"])
        table.add_row(f"{row['tokens']} tokens", format_bytes(row["nbytes"]), *times, speed)
    shortest = details["lengths"][0]["tokens"]
    lengths = [format_break_even(tokens, shortest) for tokens in even.values()]
    table.add_row("quicker", "", "", *lengths, "", style="dim")
    return table


def _ledger_sentence(result: dict[str, Any]) -> str:
    return (
        f"a store of {result['setting']['entries']:,} modules opens in {result['open_s']:.1f} s; "
        f"its ledger takes {result['ledger_ms_p50']:.2f} ms of a request"
    )


def main(
    entries: Annotated[int, typer.Option(min=1, help="Modules in the ledger.")] = 100_000,
    blobs: Annotated[int, typer.Option(min=1, help="Modules of 1,024 tokens on disk.")] = 16,
    folder: Annotated[Path | None, typer.Option(help="A folder on the disk to measure.")] = None,
    dtype: BenchDTypeOption = "auto",
    json_file: JsonFile = None,
) -> None:
    """The store: disk to ready states, first tokens by tier, the ledger."""
    by_tier = ByTierSetting(dtype=dtype)
    setting = TiersSetting(blobs=blobs, entries=entries, folder=folder, by_tier=by_tier)
    result = run_benchmark(lambda progress: bench_tiers(setting, progress))
    parts = (_disk_table, _first_token_table, _break_even_table, _ledger_sentence)
    print_figures([part(result) for part in parts], result, json_file)
    if not result["disk"]["dropped"]:
        console.print("[dim]the system did not drop its page cache: cold is warm here[/]")


if __name__ == "__main__":
    typer.run(main)
