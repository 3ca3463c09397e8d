"""Steps for the kernels: random states and queries, tables made by a slow builder, and attention by
definition in float64. Memory that nobody may read holds NaN, tables' unused places huge numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from ragcache.attention.triton.plan import HeadLayout
from ragcache.attention.triton.tables import TableViews
from ragcache.states import KVStates
from ragcache.states.quantization import QuantizedStates, quantize
from tests.ragcache.attention.scenes import Seen, definition, frequencies, moved

LAYERS, LAYER, BLOCK = 2, 1, 64
ALL = 2**30
POISON = 2**29  # an index that no memory has


@dataclass(frozen=True, slots=True)
class Scheme:
    """Properties of a model's attention."""

    kv_heads: int = 2
    group: int = 2
    dim: int = 32
    rotated: int = 32
    interleaved: bool = False
    alibi: bool = False
    window: int | None = None
    softcap: float | None = None
    int8: bool = False
    sinking: bool = False
    latent: int = 0
    """Width of the latent at the end of a key."""

    @property
    def heads(self) -> HeadLayout:
        return HeadLayout.of(self.num_heads, self.kv_heads, self.dim, self.latent)

    @property
    def out_shape(self) -> tuple[int, int]:
        return self.num_heads, self.latent or self.dim

    @property
    def num_heads(self) -> int:
        return self.kv_heads * self.group

    def slopes(self) -> Tensor | None:
        if not self.alibi:
            return None
        return 0.5 ** torch.arange(1, self.num_heads + 1, dtype=torch.float32)

    def sinks(self) -> Tensor | None:
        """One that leaves nothing to the other keys, one without a share, and some between."""
        if not self.sinking:
            return None
        return torch.tensor([500.0, -500.0, *torch.linspace(-2, 4, self.num_heads - 2).tolist()])


@dataclass(frozen=True, slots=True)
class Asking:
    """One request. past: own tokens whose states are there; new: rows of the step; reads: documents
    and by how much they were moved; early: blocks of the past that are read as items."""

    past: int
    new: int
    reads: tuple[tuple[int, int], ...] = ()
    early: int = 0


@dataclass(frozen=True, slots=True)
class Read:
    """Tokens begin:end of a base, and its entries: row, delta, origin, limit."""

    base: int
    begin: int
    end: int
    entries: list[tuple[int, int, int, int]]


@dataclass(slots=True)
class Step:
    """A step with its inputs, and the attention expected."""

    scheme: Scheme
    kind: str
    dtype: torch.dtype
    device: str
    query: Tensor
    key: Tensor
    value: Tensor
    pool: tuple[Tensor, Tensor]
    documents: list[KVStates | QuantizedStates]
    reads: list[Read]
    position_ids: list[int]
    slots: list[int]
    tails: list[int]
    pages: list[list[int]]
    expected: Tensor
    alive: list[Any] = field(default_factory=list)

    @property
    def scale(self) -> float:
        return float(self.scheme.dim**-0.5)

    @property
    def rows(self) -> int:
        return self.query.shape[1]

    def tables(self, block_rows: int, piece: int = 80, spare: int = 3) -> TableViews:
        """The slow builder: one loop over runs, cuts, blocks of entries and entries."""
        items: list[list[int]] = []
        entries: list[tuple[int, int, int, int]] = []
        together = block_rows // self.scheme.heads.group
        quantized = [isinstance(each, QuantizedStates) for each in [None, *self.documents]]
        for read in sorted(self.reads, key=lambda read: quantized[read.base]):
            for begin in range(read.begin, read.end, piece):
                end = min(read.end, begin + piece)
                for at in range(0, len(read.entries), together):
                    some = read.entries[at : at + together]
                    numbers = [read.base, begin, end, len(entries), len(some)]
                    items.append([*numbers, int(quantized[read.base]), 0, 0])
                    entries += some
        plain = sum(not item[5] for item in items)
        of_row = [[n for n, e in enumerate(entries) if e[0] == row] for row in range(self.rows)]
        row_ptr = [0]
        for found in of_row:
            row_ptr.append(row_ptr[-1] + len(found))
        columns = list(zip(*entries, strict=True)) if entries else [()] * 4
        poison = [POISON] * spare
        bases, scales = self._bases()
        made = {
            "counts": [plain, len(items) - plain, *[0] * 14],
            "bases": bases,
            "scales": scales,
            "items": [*items, [POISON] * 8],
            **{
                name: [*column, *poison]
                for name, column in zip(
                    ("entry_row", "entry_delta", "entry_origin", "entry_limit"),
                    columns, strict=True,
                )
            },
            "row_ptr": row_ptr,
            "row_entries": [*(n for found in of_row for n in found), *poison],
            "chain": [[0] * 4],
            "row_chain": [-1],
            "keep": [-1],
            "position_ids": self.position_ids,
            "token_ids": [0],
            "logit_rows": [0],
            "write_base": [0] * self.rows,
            "write_slot": self.slots,
            "tail_length": self.tails,
            "pages": self.pages,
        }  # fmt: skip
        wide = ("bases", "scales", "position_ids", "token_ids", "logit_rows")
        dtypes = {name: torch.int64 if name in wide else torch.int32 for name in made}
        return TableViews(
            **{
                each.name: torch.tensor(
                    made[each.name], dtype=dtypes[each.name], device=self.device
                )
                for each in fields(TableViews)
            }
        )

    def _bases(self) -> tuple[list[list[int]], list[list[int]]]:
        bases, scales = [], []
        for keys, kept in [self.pool, *((d.keys, d.values) for d in self.documents)]:
            values = keys if self.scheme.latent else kept
            assert keys.stride() == values.stride()
            bases.append([keys.data_ptr(), values.data_ptr(), keys.stride(0), keys.stride(1)])
        for each in [None, *self.documents]:
            row = [0] * 6
            if isinstance(each, QuantizedStates):
                k, v = each.key_scales, each.value_scales
                row = [k.data_ptr(), v.data_ptr(), *k.stride()[:2], *v.stride()[:2]]
            scales.append(row)
        return bases, scales


def make_step(
    scheme: Scheme, kind: str, documents: Sequence[int], requests: Sequence[Asking], *,
    dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0, padding: int = 2,
) -> Step:  # fmt: skip
    """documents: their lengths. The position of a request's own tokens is behind its documents."""
    return _Making(scheme, kind, dtype, device, seed).step(documents, requests, padding)


class _Making:
    def __init__(
        self, scheme: Scheme, kind: str, dtype: torch.dtype, device: str, seed: int
    ) -> None:
        self.scheme, self.kind, self.dtype, self.device = scheme, kind, dtype, device
        self.generator = torch.Generator("cpu").manual_seed(seed)

    def normal(self, *sizes: int) -> Tensor:
        drawn = torch.randn(*sizes, self.scheme.dim, generator=self.generator, device="cpu")
        return drawn.to(self.dtype)

    def step(self, documents: Sequence[int], requests: Sequence[Asking], padding: int) -> Step:
        scheme = self.scheme
        rows = sum(each.new for each in requests)
        total = rows + padding
        merged = self.normal(total, scheme.num_heads + 2 * scheme.kv_heads)  # as one projection
        merged[rows:] = torch.nan
        query = merged[:, : scheme.num_heads].transpose(0, 1)
        key = merged[:, scheme.num_heads : -scheme.kv_heads].transpose(0, 1)
        value = self.values_of(key, merged[:, -scheme.kv_heads :].transpose(0, 1))
        states = [self.document(n) for n in documents]
        wide = [[side.to(self.device) for side in self.exact(each)] for each in states]
        seen: list[list[Seen]] = []
        reads = [Read(1 + n, 3, 3 + length, []) for n, length in enumerate(documents)]
        needed = [-(-(each.past + each.new) // BLOCK) for each in requests]
        numbers = torch.randperm(sum(needed) + 1, generator=self.generator, device="cpu").tolist()
        sizes = (LAYERS, scheme.kv_heads, BLOCK * len(numbers), scheme.dim)
        pool = (
            torch.full(sizes, torch.nan, dtype=self.dtype),
            self.kept(torch.full(sizes, torch.nan, dtype=self.dtype)),
        )
        positions, slots, tails = [0] * total, [-1] * total, [-1] * total
        pages = [[POISON] * (max(needed, default=0) + 1) for _ in range(total)]
        row = 0
        for request, count in zip(requests, needed, strict=True):
            blocks, numbers = numbers[:count], numbers[count:]
            places = [block * BLOCK + i for block in blocks for i in range(BLOCK)]
            past = places[: request.past]
            for side in pool:
                drawn = self.normal(LAYERS, scheme.kv_heads, request.past)
                side[:, :, past] = drawn[..., : side.shape[-1]]
            before = sum(documents[n] for n, _ in request.reads) + 5
            origins = [11 * n + delta for n, delta in request.reads]  # of the bases' token 0
            cached = [
                Seen(
                    moved(wide[n][0], delta, scheme.rotated, interleaved=scheme.interleaved),
                    wide[n][1],
                    torch.arange(origin + 3, origin + 3 + documents[n], device=self.device),
                )
                for (n, delta), origin in zip(request.reads, origins, strict=True)
            ]  # fmt: skip
            old = [side[LAYER][:, past].double() for side in pool]
            old[1] = self.values_of(*old)
            new = [side[:, row : row + request.new].double() for side in (key, value)]
            own = torch.arange(before, before + request.past + request.new)
            written = Seen(
                *(torch.cat(pair, 1).to(self.device) for pair in zip(old, new, strict=True)),
                own.to(self.device),
            )
            for i in range(request.new):
                at = row + i
                position = before + request.past + i
                positions[at], slots[at] = position, places[request.past + i]
                for (n, delta), origin in zip(request.reads, origins, strict=True):
                    reads[n].entries.append((at, delta, origin, ALL))
                seen.append([*cached, written.until(request.past + i + 1)])
            early = count if self.kind == "mixed" else request.early
            for i, block in enumerate(blocks[:early]):
                begin, end = block * BLOCK, min(BLOCK, request.past + request.new - i * BLOCK)
                entries = []
                for r in range(request.new):
                    limit = request.past + r + 1 - i * BLOCK
                    hidden = begin + limit if self.kind == "mixed" else ALL
                    entries.append((row + r, 0, before + i * BLOCK - begin, hidden))
                reads.append(Read(0, begin, begin + end, entries))
            if self.kind == "decode":
                tails[row] = request.past - BLOCK * request.early
                pages[row][: count - request.early] = blocks[request.early :]
            row += request.new
        queries = query.double().to(self.device)
        expected = torch.zeros(total, *scheme.out_shape, dtype=torch.float64)
        for at, found in enumerate(seen):
            expected[at] = definition(
                queries[:, at], found, scheme.dim**-0.5, scheme.slopes(), positions[at],
                window=scheme.window, softcap=scheme.softcap, sinks=scheme.sinks(),
            )  # fmt: skip
        projected = merged.to(self.device)
        key = projected[:, scheme.num_heads : -scheme.kv_heads].transpose(0, 1)
        return Step(
            scheme, self.kind, self.dtype, self.device,
            projected[:, : scheme.num_heads].transpose(0, 1),
            key,
            self.values_of(key, projected[:, -scheme.kv_heads :].transpose(0, 1)),
            (pool[0].to(self.device), pool[1].to(self.device)),
            [self.on_device(each) for each in states],
            [read for read in reads if read.entries],
            positions, slots, tails, pages, expected,
        )  # fmt: skip

    def document(self, length: int) -> KVStates | QuantizedStates:
        """States of a document, tokens 3 to 3 + length; NaN around them."""
        inner = KVStates(
            self.normal(LAYERS, self.scheme.kv_heads, length),
            self.kept(self.normal(LAYERS, self.scheme.kv_heads, length)),
            0,
        )
        if self.scheme.int8 and length % 2:  # the others stay
            found = quantize(inner, "int8")
            assert isinstance(found, QuantizedStates)
            return QuantizedStates(
                self.around(found.keys, 99), self.around(found.values, 99), found.key_scales,
                self.around(found.value_scales, torch.nan), 0, found.dtype,
            )  # fmt: skip
        return KVStates(self.around(inner.keys, torch.nan), self.around(inner.values, torch.nan), 0)

    def around(self, inner: Tensor, filler: float) -> Tensor:
        layers, heads, tokens, dim = inner.shape
        outer = torch.full((layers, heads, tokens + 8, dim), filler, dtype=inner.dtype)
        outer[:, :, 3 : 3 + tokens] = inner
        return outer

    def exact(self, states: KVStates | QuantizedStates) -> tuple[Tensor, Tensor]:
        plain = states
        if isinstance(states, QuantizedStates):
            plain = states.restore(torch.float64)
        keys, values = (side[LAYER, :, 3:-5].double() for side in (plain.keys, plain.values))
        return keys, self.values_of(keys, values)

    def kept(self, values: Tensor) -> Tensor:
        """Values as they are kept: of no width where keys hold latents."""
        return values[..., :0] if self.scheme.latent else values

    def values_of(self, keys: Tensor, values: Tensor) -> Tensor:
        """The latents at the ends of keys, or the values."""
        return keys[..., -self.scheme.latent :] if self.scheme.latent else values

    def on_device(self, states: KVStates | QuantizedStates) -> KVStates | QuantizedStates:
        tensors = {each.name: getattr(states, each.name) for each in fields(states)}
        moved = {n: t.to(self.device) if isinstance(t, Tensor) else t for n, t in tensors.items()}
        return type(states)(**moved)


def make_kernels(step: Step, max_entries: int = 400, **options: Any) -> Any:
    """The kernels of the step's scheme, their partial results poisoned."""
    from ragcache.attention.triton.latent_launch import LatentKernels
    from ragcache.attention.triton.launch import RotationTables, TritonKernels

    scheme, rotation, slopes = step.scheme, None, step.scheme.slopes()
    if scheme.rotated:
        angles = torch.arange(1024).double()[:, None] * frequencies(scheme.rotated)
        cos, sin = (t.float().to(step.device) for t in (angles.cos(), angles.sin()))
        rotation = RotationTables(cos, sin, scheme.interleaved)
    kernels = (LatentKernels if scheme.latent else TritonKernels)(
        scheme.heads, step.dtype, step.device, rotation,
        None if slopes is None else slopes.to(step.device),
        max_entries=max_entries, windows=(None, scheme.window) if scheme.window else (),
        softcap=scheme.softcap, quantized=scheme.int8, **options,
    )  # fmt: skip
    kernels.out.fill_(torch.nan)
    kernels.lse.fill_(torch.nan)
    return kernels


def attend(step: Step, kernels: Any, tables: TableViews) -> Tensor:
    """[T, Hq, D] of the step, in memory that held NaN."""
    shape = step.rows, *step.scheme.out_shape
    out = torch.full(shape, torch.nan, dtype=step.dtype, device=step.device)
    sinks = step.scheme.sinks()
    kernels.attend(
        tables, step.kind, step.rows, LAYER, step.query, step.key, step.value, step.scale, out,
        sinks=None if sinks is None else sinks.to(step.device, step.dtype),
    )  # fmt: skip
    return out


def error(step: Step, found: Tensor) -> float:
    """Relative, of all rows; infinite where anything is not finite or padding is not zero."""
    exact = found.double().cpu()
    padding = exact[[slot < 0 for slot in step.slots]]
    if not exact.isfinite().all() or padding.any():
        return float("inf")
    return float((exact - step.expected).norm() / step.expected.norm())


def written_as_given(step: Step, before: tuple[Tensor, Tensor]) -> bool:
    """Whether the pool differs from before by the new keys and values alone, to the bit."""
    rows = [row for row, slot in enumerate(step.slots) if slot >= 0]
    places = [step.slots[row] for row in rows]
    for side, new, old in zip(step.pool, (step.key, step.value), before, strict=True):
        if not side.numel():
            continue
        wanted = old.clone()
        wanted[LAYER][:, places] = new[:, rows]
        if not torch.equal(wanted.nan_to_num(7), side.nan_to_num(7)):
            return False
    return True
