"""The table of the GPU backend: targets as data, floors from a shape's bytes and operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ragcache.bench.harness import SHAPES, LlamaShape

VLLM = "0.26.0 on one H200, 22 November 2026, same shapes and lengths; not run by this bench"
"""Origin of the constants in the column of vLLM."""

ELEMENT = 2  # bytes of a bfloat16


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Speeds that the device reached in this run.

    Measured by reading its memory, copying from pinned memory, and an 8192 x 8192 x 8192 product in
    bfloat16.
    """

    read_gb_s: float
    h2d_gb_s: float
    bf16_tflops: float


@dataclass(frozen=True, slots=True)
class GpuWorkload:
    """Sizes of all parts. decode and attention: rows and shared tokens by name."""

    preamble: int = 64
    documents: int = 64
    document_tokens: int = 1024
    question: int = 64
    placed: tuple[int, ...] = (4, 16)
    runs: int = 25
    decode: tuple[tuple[str, int, int], ...] = (
        ("32x4K", 32, 4096), ("256x4K", 256, 4096), ("256x16K", 256, 16384),
    )  # fmt: skip
    decode_tokens: int = 48
    order: tuple[tuple[str, int], ...] = (("32", 32), ("256", 256))
    requests: int = 64
    each: int = 4
    new_tokens: int = 64
    serve_runs: int = 5
    attention: tuple[tuple[str, int, int], ...] = (
        ("32x4K", 32, 4096), ("32x16K", 32, 16384), ("256x4K", 256, 4096), ("256x16K", 256, 16384),
    )  # fmt: skip
    peer_runs: int = 3
    user_tokens: int = 128
    new_texts: tuple[int, ...] = (64, 256, 512, 513, 1024, 2048, 8192)
    beside: tuple[int, ...] = (8, 32, 128)
    beside_tokens: int = 384
    beside_runs: int = 30


Runs = Sequence[tuple[int, int]]
"""Runs of states: tokens, and rows that read them."""


def step_seconds(
    shape: LlamaShape, ceilings: Ceilings, rows: int, shared: Runs, own: Runs,
    *, logits: int, kv_element: float = ELEMENT,
) -> float:  # fmt: skip
    """The least time of a step: weights and states are read once, or the arithmetic takes longer.

    own: the tokens of a request before and with its rows, each of which sees those up to itself.
    logits: rows whose logits are wanted. kv_element: bytes of an element of shared states.
    """
    weights = shape.num_layers * shape.layer_weights
    flops = 2.0 * (rows * weights + logits * shape.head_weights)
    products = _slower(ceilings, ELEMENT * (weights + shape.head_weights), flops)
    return products + shape.num_layers * attention_seconds(
        shape, ceilings, shared, own, kv_element=kv_element
    )


def attention_seconds(
    shape: LlamaShape, ceilings: Ceilings, shared: Runs, own: Runs, *, kv_element: float = ELEMENT
) -> float:
    """The least time of one layer's attention."""
    nbytes = sum(tokens for tokens, _ in shared) * shape.pair_elements * kv_element
    nbytes += sum(tokens for tokens, _ in own) * shape.pair_elements * ELEMENT
    pairs = float(sum(tokens * rows for tokens, rows in shared))
    pairs += sum(tokens * rows - rows * (rows - 1) / 2 for tokens, rows in own)
    return _slower(ceilings, nbytes, 4.0 * pairs * shape.num_heads * shape.head_dim)


def _slower(ceilings: Ceilings, nbytes: float, flops: float) -> float:
    return max(nbytes / (1e9 * ceilings.read_gb_s), flops / (1e12 * ceilings.bf16_tflops))


Floor = Callable[[LlamaShape, Ceilings, GpuWorkload], float]


def _ttft_floor(documents: int) -> Floor:
    def floor(shape: LlamaShape, ceilings: Ceilings, load: GpuWorkload) -> float:
        rows = load.question
        shared = [(load.preamble, rows), *[(load.document_tokens, rows)] * documents]
        return 1e3 * step_seconds(shape, ceilings, rows, shared, [(rows, rows)], logits=1)

    return floor


def _decode_floor(name: str) -> Floor:
    def floor(shape: LlamaShape, ceilings: Ceilings, load: GpuWorkload) -> float:
        rows, tokens = _sizes(load.decode, name)
        own = [(load.question + load.decode_tokens // 2, 1)] * rows
        return 1e3 * step_seconds(shape, ceilings, rows, [(tokens, rows)], own, logits=rows)

    return floor


def _attention_floor(name: str) -> Floor:
    def floor(shape: LlamaShape, ceilings: Ceilings, load: GpuWorkload) -> float:
        rows, tokens = _sizes(load.attention, name)
        own = [(load.question, 1)] * rows
        return 1e6 * attention_seconds(shape, ceilings, [(tokens, rows)], own)

    return floor


def _serve_floor(kv_element: float) -> Floor:
    def floor(shape: LlamaShape, ceilings: Ceilings, load: GpuWorkload) -> float:
        """All questions in one step, then decoding. As many documents are read as a random draw
        names on average."""
        share = 1 - (1 - load.each / load.documents) ** load.requests
        used = round(share * load.documents)

        def seconds(rows: int, own: int) -> float:
            """Return the seconds of a step: `rows` rows a request over `own` tokens of its own."""
            readers = load.requests * load.each * rows // used
            shared = [(load.preamble, load.requests * rows)]
            shared += [(load.document_tokens, readers)] * used
            return step_seconds(
                shape, ceilings, load.requests * rows, shared, [(own, rows)] * load.requests,
                logits=load.requests, kv_element=kv_element,
            )  # fmt: skip

        steps = load.new_tokens - 1
        return seconds(load.question, load.question) + steps * seconds(
            1, load.question + steps // 2
        )

    return floor


def _encode_floor(shape: LlamaShape, ceilings: Ceilings, load: GpuWorkload) -> float:
    rows = load.documents * load.document_tokens
    own = [(load.document_tokens, load.document_tokens)] * load.documents
    return step_seconds(shape, ceilings, rows, [(load.preamble, rows)], own, logits=0)


def _sizes(named: Sequence[tuple[str, int, int]], name: str) -> tuple[int, int]:
    [sizes] = [(rows, tokens) for each, rows, tokens in named if each == name]
    return sizes


def _is(value: float) -> Floor:
    return lambda _shape, _ceilings, _load: value


@dataclass(frozen=True, slots=True)
class Target:
    """A row of the table. path: of the figure within the results of a shape; must, goal and vllm:
    for 7B and for 8B; peer: path of Hugging Face's figure."""

    name: str
    part: str
    title: str
    unit: str
    path: tuple[str, ...]
    must: tuple[float | None, float | None]
    goal: tuple[float | None, float | None]
    floor: Floor | None
    vllm: tuple[str, str] = ("", "")
    peer: tuple[str, ...] = ()

    def of(self, values: tuple[Any, Any], shape: str) -> Any:
        """The value for a shape; None for a shape that has no targets."""
        return dict(zip(SHAPES, values, strict=True)).get(shape)


def _ttft(
    count: int, must: tuple[float, float], goal: tuple[float, float], vllm: tuple[str, str]
) -> Target:
    return Target(
        f"ttft_{count}", "ttft", f"TTFT {count} x 1,024, any order", "ms",
        ("ttft", str(count), "ms"), must, goal, _ttft_floor(count), vllm,
        ("hf", str(count), "prefill_ms"),
    )  # fmt: skip


def _decode(
    name: str, must: tuple[float, float], goal: tuple[float, float], vllm: tuple[str, str]
) -> Target:
    title = f"decode step {name.replace('x', ' x ')}"
    path = ("decode", name, "step_ms")
    return Target(
        f"decode_{name}", "decode", title, "ms", path, must, goal, _decode_floor(name), vllm
    )


def _attention(
    name: str, must: tuple[float, float], goal: tuple[float, float], vllm: tuple[str, str]
) -> Target:
    title = f"attention a layer, {name.replace('x', ' x ')}"
    path = ("attention", name, "us")
    return Target(
        f"attention_{name}", "attention", title, "us", path, must, goal, _attention_floor(name),
        vllm,
    )  # fmt: skip


def _order(rows: str) -> tuple[Target, Target]:
    """Return the targets of the engine's steps and of attention alone."""
    must, goal = (1.15, 1.15), (1.05, 1.05)
    title, no = f"any order against one segment, {rows} rows", ("not possible", "not possible")
    return (
        Target(
            f"order_{rows}", "order", title, "x", ("order", rows, "ratio"), must, goal, _is(1.0), no
        ),
        Target(
            f"order_attention_{rows}", "attention", f"{title}, attention alone", "x",
            ("attention", f"{rows}x4K", "orders_ratio"), must, goal, _is(1.0), no,
        ),
    )  # fmt: skip


NONE = (None, None)
TARGETS: tuple[Target, ...] = (
    _ttft(4, (6.5, 6.8), (5.4, 5.6), ("hit 10.3, new order 97", "hit 11.4, new order 103")),
    _ttft(16, (8.5, 8.0), (7.3, 7.0), ("hit 15.5, new order 469", "hit 18.2, new order 494")),
    Target(
        "tiers", "tiers", "TTFT 4 x 1,024 from pinned host, over the copy alone", "ms",
        ("tiers", "over_copy_ms"), (1.5, 1.5), (0.7, 0.7), _is(0.0),
    ),
    _decode("32x4K", (6.0, 6.0), (5.2, 5.2), ("9.1", "7.6")),
    _decode("256x4K", (13.0, 11.5), (11.0, 9.8), ("15.7", "12.5")),
    _decode("256x16K", (18.0, 15.5), (15.0, 13.0), ("18.1", "14.4")),
    Target(
        "serve", "serve", "64 requests x 4 of 64 documents, random order, ingested", "s",
        ("serve", "model", "total_s"), (1.15, 0.75), (0.93, 0.57), _serve_floor(ELEMENT),
        ("8.4, all cached 8.0", "6.8, all cached 0.95"),
    ),
    Target(
        "serve_int8", "serve", "the same with int8 states", "s",
        ("serve", "int8", "total_s"), NONE, (0.8, None), _serve_floor(1.0),
    ),
    Target(
        "encode", "encode", "encoding 64 x 1,024", "s", ("encode", "seconds"), (1.9, 1.9),
        (1.45, 1.45), _encode_floor, ("1.5", "1.5"),
    ),
    _attention("32x4K", (42.0, 25.0), (34.0, 20.0), ("71", "36")),
    _attention("32x16K", (90.0, 42.0), (79.0, 35.0), ("120", "52")),
    *_order("32"),
    *_order("256"),
    Target(
        "http", "http", "TTFT over POST /v1/chat/completions, over the engine", "ms",
        ("http", "over_engine_ms"), (3.0, 3.0), (1.5, 1.5), _is(0.0),
    ),
)  # fmt: skip
"""The rows, in the order of the table."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A row for one shape with what was measured; None where it was not. missed: the must is."""

    name: str
    shape: str
    title: str
    unit: str
    value: float | None
    must: float | None
    goal: float | None
    floor: float | None
    hf: float | None
    vllm: str
    missed: bool
    reason: str = ""


def figures_of(document: Mapping[str, Any]) -> list[Figure]:
    """The rows of a run's document, of the parts and shapes that it ran. A row without a figure
    has missed its must, unless the part says why it does not apply."""
    known = document.get("ceilings") or {}
    ceilings = Ceilings(**known) if known else None
    sizes: dict[str, Any] = {
        key: tuple(map(_frozen, value)) if isinstance(value, list) else value
        for key, value in document["workload"].items()
    }
    load = GpuWorkload(**sizes)
    return [
        _figure(target, shape, document, ceilings, load)
        for target in TARGETS
        if target.part in document["parts"]
        for shape in document["shapes"]
    ]


def _figure(
    target: Target, shape: str, document: Mapping[str, Any], ceilings: Ceilings | None,
    load: GpuWorkload,
) -> Figure:  # fmt: skip
    results = document["results"].get(shape, {})
    value, must = _at(results, target.path), target.of(target.must, shape)
    floor = None
    if target.floor is not None and ceilings is not None:
        floor = target.floor(LlamaShape(**document["shapes"][shape]), ceilings, load)
    missed = must is not None and (value is None or value > must)
    reason = "" if value is not None else _reason(document, results, target, shape)
    return Figure(
        target.name, shape, target.title, target.unit, value, must,
        target.of(target.goal, shape), floor, _at(results, target.peer) if target.peer else None,
        target.of(target.vllm, shape) or "", missed, reason,
    )  # fmt: skip


def _reason(
    document: Mapping[str, Any], results: Mapping[str, Any], target: Target, shape: str
) -> str:
    part = results.get(target.part) or {}
    inner = part.get(target.path[1])
    said = (inner if isinstance(inner, Mapping) else part).get("skipped")
    error = document["errors"].get(f"{shape} {target.part}")
    return str(error or said or "not measured").splitlines()[0]


def _at(results: Any, path: Sequence[str]) -> float | None:
    for key in path:
        if not isinstance(results, Mapping) or key not in results:
            return None
        results = results[key]
    return None if results is None else float(results)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def missed(document: Mapping[str, Any]) -> list[Figure]:
    """The rows whose must is missed."""
    return [figure for figure in figures_of(document) if figure.missed]


HEADINGS = (
    "", "measured", "must", "to must", "goal", "to goal", "floor", "of floor", "Hugging Face",
    "vLLM",
)  # fmt: skip


def cells_of(figure: Figure) -> tuple[str, ...]:
    """The text of a row. A gap is what is left to the limit: positive where it holds."""
    name = f"{figure.shape} {figure.title}"
    if figure.value is None:
        value, share = figure.reason[:60], ""
    else:
        value = f"{_number(figure.value)} {figure.unit}"
        share = f"{figure.value / figure.floor:.2f}x" if figure.floor else ""
    hf = "" if figure.hf is None else _number(figure.hf)
    return (
        name, value, _number(figure.must), _gap(figure, figure.must), _number(figure.goal),
        _gap(figure, figure.goal), _number(figure.floor), share, hf, figure.vllm,
    )  # fmt: skip


def _gap(figure: Figure, limit: float | None) -> str:
    if limit is None or figure.value is None:
        return "MISSED" if limit is not None and limit == figure.must else ""
    gap = limit - figure.value
    sign = "" if gap >= 0 else " MISSED" if limit == figure.must else " short"
    return f"{gap:+.2f}{sign}"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f}"


def render_text(document: Mapping[str, Any]) -> str:
    """The table for a terminal, followed by its remarks."""
    rows = [HEADINGS, *(cells_of(figure) for figure in figures_of(document))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = [
        "  ".join(
            cell.ljust(width) if not column or column == len(HEADINGS) - 1 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, "", *remarks(document)])


def render_markdown(document: Mapping[str, Any]) -> str:
    """The table for a page of the documentation."""
    lines = [f"| {' | '.join(HEADINGS)} |", f"|{' --- |' * len(HEADINGS)}"]
    lines += [f"| {' | '.join(cells_of(figure))} |" for figure in figures_of(document)]
    return "\n".join([*lines, "", *(f"* {line}" for line in remarks(document))]) + "\n"


def remarks(document: Mapping[str, Any]) -> list[str]:
    """Sentences below the table."""
    ceilings, machine = document.get("ceilings") or {}, document["machine"]
    said = [f"{machine['gpu'] or machine['processor']}, torch {machine['torch']}, "
            f"transformers {machine['transformers']}, {machine['date']}"]  # fmt: skip
    if ceilings:
        said.append(
            f"reached in this run: read {ceilings['read_gb_s']:.0f} GB/s, "
            f"host to device {ceilings['h2d_gb_s']:.1f} GB/s, "
            f"bfloat16 product {ceilings['bf16_tflops']:.0f} TFLOP/s; floors are of these"
        )
    said.append("Hugging Face: ordinary prefill of the same prompt, cuDNN's attention off")
    said.append(f"vLLM: {VLLM}")
    said += [f"{name}: {why}" for name, why in document.get("peers", {}).items()]
    said += [
        line for shape, found in document["results"].items() for line in _details(shape, found)
    ]
    seconds = document.get("seconds", {})
    said.append(f"took {sum(seconds.values()):.0f} s: " + ", ".join(
        f"{part} {each:.1f}" for part, each in seconds.items()))  # fmt: skip
    said += [
        f"FAILED {part}: {error.splitlines()[0]}" for part, error in document["errors"].items()
    ]
    return said


def _details(shape: str, found: Mapping[str, Any]) -> list[str]:
    said = []
    for count, each in (found.get("hf") or {}).items():
        said.append(
            f"{shape} Hugging Face {count} documents: prefill {each['prefill_ms']:.1f} ms, "
            f"states concatenated in a DynamicCache {each['concat_ms']:.1f} ms"
        )
    if "encode" in found and "seconds" in found["encode"]:
        encode = found["encode"]
        said.append(f"{shape} encoding: {encode['tokens_s']:.0f} tokens/s, "
                    f"{100 * encode['share_of_product']:.0f} % of the product rate")  # fmt: skip
    total = _at(found, ("serve", "model", "total_s"))
    encoded = _at(found, ("encode", "seconds"))
    if total is not None and encoded is not None:
        said.append(
            f"{shape} requests and the encoding of their documents: {total + encoded:.2f} s"
        )
    for name, each in (found.get("decode") or {}).items():
        idle = each.get("idle_share")
        said.append(f"{shape} decode {name}: host {each['host_ms']:.2f} ms a step, device idle "
                    f"{'not counted' if idle is None else f'{100 * idle:.0f} %'}")  # fmt: skip
    for name, each in (found.get("attention") or {}).items():
        if "flashinfer_us" in each:
            said.append(f"{shape} attention {name}: FlashInfer {each['flashinfer_us']:.0f} us")
    for name, each in (found.get("profile") or {}).items():
        if name == "skipped":
            continue
        kernels = ", ".join(f"{k['name'][:40]} {k['us']:.0f} us" for k in each["kernels"][:8])
        said.append(
            f"{shape} {name}, device busy {100 * (each['busy_share'] or 0):.0f} %: {kernels}"
        )
    return said


def rows_of(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The table for the JSON file."""
    return [asdict(figure) for figure in figures_of(document)]
