"""Triton kernels of a step's attention: write, partial, merge, the tail of a decode step, and the
upload of its tables.

Addresses are data: a table of bases holds where keys and values [L, Hkv, S, D] are, items and
entries say which rows read which tokens (`tables.TableViews`), so that a captured graph serves any
segments. Rows and heads that read the same key head are rows of one product (Hydragen §3.2). The
query, already turned to its own position, is turned back by an entry's delta in float32; softmax is
computed online in base 2 (FlashAttention-2 §3.1); partial results carry the natural logarithm of
their denominator.

Three things keep the loads of keys and values asynchronous, and are easily lost: items are runs of
consecutive tokens, the hint of alignment is on the pointer (not on the integer that it was made
from), and the numbers of blocks in the tail are loaded in a way that the pipeliner does not see.

Constants of all kernels: HKV key heads, G query heads of each, D dimensions, DP the next power of
two, ALIGN the bytes that all rows of states are aligned to. DEPENDENT: the grid may start before
the one before it ends (programmatic dependent launch); it waits before it reads what others wrote.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # below any score; minus infinity would make NaN of an empty row
FIELDS = tl.constexpr(8)  # of an item
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def upload_kernel(host, tables, WORDS: tl.constexpr, LINES: tl.constexpr):
    """Copies the lines wanted of each section from pinned memory, LINES of them a program.

    host, tables: int32, lines of WORDS. They begin with the first line of every section, and the
    number of its lines to copy.
    """
    section = tl.program_id(0)
    first = tl.load(host + 2 * section)
    lines = tl.load(host + 2 * section + 1)
    at = tl.program_id(1) * (LINES * WORDS) + tl.arange(0, LINES * WORDS)
    inside = at < lines * WORDS
    at += first * WORDS
    tl.store(tables + at, tl.load(host + at, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["layer"])
def write_kernel(
    key, key_head_stride, key_row_stride, value, value_head_stride, value_row_stride,
    bases, write_base, write_slot, layer,
    HKV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ALIGN: tl.constexpr,
    HEADS: tl.constexpr, VALUES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Copies a row's new keys and values, [Hkv, T, D], to its slot; HEADS of them a program.

    VALUES: not only keys.
    """
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    slot = tl.load(write_slot + row)
    if slot >= 0:
        base = bases + tl.load(write_base + row) * 4
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        d = tl.arange(0, DP)
        inside = (head < HKV)[:, None] & (d < D)[None, :]
        start = tl.load(base + 2) * layer + slot.to(tl.int64) * D
        at = (head * tl.load(base + 3))[:, None] + d[None, :]
        keys = tl.multiple_of(tl.load(base).to(key.dtype) + start, ALIGN)
        k = key + row.to(tl.int64) * key_row_stride + head[:, None] * key_head_stride + d[None, :]
        tl.store(keys + at, tl.load(k, mask=inside), mask=inside)
        if VALUES:
            values = tl.multiple_of(tl.load(base + 1).to(value.dtype) + start, ALIGN)
            v = value + row.to(tl.int64) * value_row_stride
            v += head[:, None] * value_head_stride + d[None, :]
            tl.store(values + at, tl.load(v, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["layer", "window"])
def partial_kernel(
    query, query_head_stride, query_row_stride, out, lse,
    counts, bases, scales, items, entry_row, entry_delta, entry_limit, entry_origin, position_ids,
    cos, sin, slopes, layer, window, scale,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ALIGN: tl.constexpr,
    ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, ALIBI: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, QUANTIZED: tl.constexpr, ALIGN8: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Attention of every entry over its item's tokens: out [E, Hq, D], lse [E, Hq].

    A persistent grid walks items * HKV pieces of work. ROTATED: the rotated width R, 0 for
    none. WINDOW: keys at positions up to position - window are hidden. SOFTCAP: of scores, 0 for
    none. QUANTIZED: some bases may be int8, scaled per head and channel (keys) and per head and
    token (values); their strides are counted in int8 elements, ALIGN8 is their alignment.
    """
    total = tl.load(counts) * HKV
    if QUANTIZED:
        total += tl.load(counts + 1) * HKV
    line = tl.arange(0, BM)
    e = line // G
    g = line % G
    d = tl.arange(0, DP)
    for work in range(tl.program_id(0), total, tl.num_programs(0)):
        head = work % HKV
        item = items + (work // HKV) * FIELDS
        base = tl.load(item)
        begin = tl.load(item + 1)
        length = tl.load(item + 2) - begin
        live = e < tl.load(item + 4)
        entry = tl.load(item + 3) + tl.where(live, e, 0)
        row = tl.load(entry_row + entry)
        limit = tl.load(entry_limit + entry) - begin
        # every row sees the keys from `ramp` to `full`, some rows those from `low` to `high`
        high = tl.maximum(tl.minimum(length, tl.max(limit, 0)), 0)
        full = tl.maximum(tl.minimum(high, tl.min(limit, 0)), 0) // BN * BN
        low = 0
        ramp = 0
        first = limit
        distance = 0.0
        slope = 0.0
        if WINDOW or ALIBI:
            position = tl.load(position_ids + row).to(tl.int32)
            away = tl.load(entry_origin + entry) + begin - position
            if WINDOW:
                first = 1 - window - away
                low = tl.minimum(tl.maximum(tl.min(first, 0), 0), high) // BN * BN
                full = tl.maximum(full, low)
                ramp = tl.maximum(tl.max(first, 0) + BN - 1, 0) // BN * BN
                ramp = tl.minimum(tl.maximum(ramp, low), full)
            if ALIBI:
                distance = away.to(tl.float32)
                slope = tl.load(slopes + head * G + g) * LOG2E
        start = tl.load(bases + base * 4 + 2) * layer + tl.load(bases + base * 4 + 3) * head
        start += begin.to(tl.int64) * D
        quantized = False
        key_scales = cos
        value_scales = cos
        if QUANTIZED:
            quantized = tl.load(item + 5) != 0
            at = scales + base * 6
            key_scales = tl.load(at).to(tl.pointer_type(tl.float32))
            key_scales += tl.load(at + 2) * layer + tl.load(at + 3) * head
            value_scales = tl.load(at + 1).to(tl.pointer_type(tl.float32))
            value_scales += tl.load(at + 4) * layer + tl.load(at + 5) * head + begin
        if DEPENDENT:  # tables and segments are older than the grid before; queries come from it
            gdc_wait()
            gdc_launch_dependents()
        q = _load_query(
            query + row.to(tl.int64) * query_row_stride + (head * G + g) * query_head_stride,
            entry_delta + entry, cos, sin, key_scales, quantized,
            BM, D, DP, ROTATED, INTERLEAVED, QUANTIZED,
        )  # fmt: skip
        keys = tl.load(bases + base * 4)
        values = tl.load(bases + base * 4 + 1)
        if quantized:
            k8 = tl.multiple_of(keys.to(tl.pointer_type(tl.int8)) + start, ALIGN8)
            v8 = tl.multiple_of(values.to(tl.pointer_type(tl.int8)) + start, ALIGN8)
            acc, top, weight = _attend_run(
                q, k8, v8, value_scales, low, ramp, full, high, first, limit, slope, distance,
                scale, D, DP, ALIBI, WINDOW, SOFTCAP, True, BM, BN, STAGES,
            )  # fmt: skip
        else:
            k = tl.multiple_of(keys.to(query.dtype) + start, ALIGN)
            v = tl.multiple_of(values.to(query.dtype) + start, ALIGN)
            acc, top, weight = _attend_run(
                q, k, v, value_scales, low, ramp, full, high, first, limit, slope, distance, scale,
                D, DP, ALIBI, WINDOW, SOFTCAP, False, BM, BN, STAGES,
            )  # fmt: skip
        seen = weight > 0
        weight = tl.where(seen, weight, 1.0)
        acc = acc / weight[:, None]
        total_lse = tl.where(seen, (top + tl.math.log2(weight)) * LN2, float("-inf"))
        place = (entry.to(tl.int64) * HKV + head) * G + g
        stored = live[:, None]
        if D != DP:
            stored = stored & (d < D)[None, :]
        tl.store(out + place[:, None] * D + d[None, :], acc.to(out.dtype.element_ty), mask=stored)
        tl.store(lse + place, total_lse, mask=live)
    if DEPENDENT:
        gdc_wait()


@triton.jit
def _load_query(
    at, delta_at, cos, sin, key_scales, quantized,
    BM: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """Rows [BM, DP] of the query at the pointers `at`, turned by -delta, times the key scales."""
    dtype: tl.constexpr = at.dtype.element_ty
    HALF: tl.constexpr = ROTATED // 2
    d = tl.arange(0, DP)
    if ROTATED > 0:
        delta = tl.load(delta_at)
        angle = tl.abs(delta)[:, None] * HALF
        sign = tl.where(delta < 0, -1.0, 1.0)[:, None]
    if ROTATED == DP and not INTERLEAVED:  # each half of the query and each angle is loaded once
        h = tl.arange(0, HALF)
        x = tl.load(at[:, None] + h[None, :]).to(tl.float32)
        y = tl.load(at[:, None] + (h + HALF)[None, :]).to(tl.float32)
        c = tl.load(cos + angle + h[None, :])
        s = tl.load(sin + angle + h[None, :]) * sign
        left = x * c + y * s
        right = y * c - x * s
        if QUANTIZED:
            scaled = h < tl.where(quantized, HALF, 0)
            left *= tl.load(key_scales + h, mask=scaled, other=1.0)[None, :]
            right *= tl.load(key_scales + h + HALF, mask=scaled, other=1.0)[None, :]
        q = tl.join(left.to(dtype), right.to(dtype)).permute(0, 2, 1).reshape(BM, DP)
    else:
        q = tl.load(at[:, None] + d[None, :], mask=(d < D)[None, :], other=0.0)
        if ROTATED > 0 and INTERLEAVED:
            pair = tl.arange(0, DP // 2)
            turned = (pair < HALF)[None, :]
            c = tl.load(cos + angle + pair[None, :], mask=turned, other=1.0)
            s = tl.load(sin + angle + pair[None, :], mask=turned, other=0.0) * sign
            x, y = q.to(tl.float32).reshape(BM, DP // 2, 2).split()
            q = tl.join(x * c + y * s, y * c - x * s).reshape(BM, DP)
        elif ROTATED > 0:
            turned = (d < ROTATED)[None, :]
            partner = tl.where(d < HALF, d + HALF, d - HALF)
            c = tl.load(cos + angle + (d % HALF)[None, :], mask=turned, other=1.0)
            s = tl.load(sin + angle + (d % HALF)[None, :], mask=turned, other=0.0) * sign
            other = tl.load(at[:, None] + partner[None, :], mask=turned, other=0.0).to(tl.float32)
            q = q.to(tl.float32) * c + other * s * tl.where(d < HALF, 1.0, -1.0)[None, :]
        if QUANTIZED:
            scaled = d < tl.where(quantized, D, 0)
            q = q.to(tl.float32) * tl.load(key_scales + d, mask=scaled, other=1.0)[None, :]
        q = q.to(dtype)
    return q


@triton.jit
def _attend_run(
    q, keys, values, value_scales, low, ramp, full, high, first, limit, slope, distance, scale,
    D: tl.constexpr, DP: tl.constexpr, ALIBI: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, INT8: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Online softmax over the tokens low to high: sum of weighted values, highest score, weight."""
    top = tl.full([BM], LOWEST, tl.float32)
    weight = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    if WINDOW:
        for n in tl.range(low, ramp, BN, num_stages=STAGES):
            acc, top, weight = _attend_block(
                acc, top, weight, q, keys, values, value_scales, n, high, first, limit, slope,
                distance, scale, D, DP, ALIBI, WINDOW, SOFTCAP, INT8, True, BN,
            )  # fmt: skip
    for n in tl.range(ramp, full, BN, num_stages=STAGES):
        acc, top, weight = _attend_block(
            acc, top, weight, q, keys, values, value_scales, n, high, first, limit, slope,
            distance, scale, D, DP, ALIBI, WINDOW, SOFTCAP, INT8, False, BN,
        )  # fmt: skip
    for n in tl.range(full, high, BN, num_stages=STAGES):
        acc, top, weight = _attend_block(
            acc, top, weight, q, keys, values, value_scales, n, high, first, limit, slope,
            distance, scale, D, DP, ALIBI, WINDOW, SOFTCAP, INT8, True, BN,
        )  # fmt: skip
    if INT8:  # the weights took the largest value of each token, not its scale
        acc *= 1 / 127
    return acc, top, weight


@triton.jit
def _attend_block(
    acc, top, weight, q, keys, values, value_scales, n, high, first, limit, slope, distance, scale,
    D: tl.constexpr, DP: tl.constexpr, ALIBI: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, INT8: tl.constexpr, MASKED: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One block of BN keys. MASKED: not every row sees all of them."""
    j = n + tl.arange(0, BN)
    d = tl.arange(0, DP)
    at = j[:, None] * D + d[None, :]
    if MASKED:
        inside = (j < high)[:, None]
        if D != DP:
            inside = inside & (d < D)[None, :]
        k = tl.load(keys + at, mask=inside, other=0)
        v = tl.load(values + at, mask=inside, other=0)
    elif D != DP:
        k = tl.load(keys + at, mask=(d < D)[None, :], other=0)
        v = tl.load(values + at, mask=(d < D)[None, :], other=0)
    else:
        k = tl.load(keys + at)
        v = tl.load(values + at)
    s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    factor = scale * LOG2E
    if SOFTCAP > 0 or ALIBI:
        s = _base2(s, scale, SOFTCAP)
        factor = 1.0
    if ALIBI:
        s += slope[:, None] * (distance[:, None] + j.to(tl.float32)[None, :])
    if MASKED:
        seen = (j[None, :] < limit[:, None]) & (j < high)[None, :]
        if WINDOW:
            seen = seen & (j[None, :] >= first[:, None])
        s = tl.where(seen, s, float("-inf"))
    highest = tl.maximum(top, tl.max(s, 1) * factor)
    p = tl.math.exp2(s * factor - highest[:, None])
    shrink = tl.math.exp2(top - highest)
    weight = weight * shrink + tl.sum(p, 1)
    if INT8:  # times 127: a token's largest value, which the model's dtype holds
        token = tl.load(value_scales + j, mask=j < high, other=0.0) * 127
        p = p * token[None, :]
    acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * shrink[:, None], input_precision="ieee")
    return acc, highest, weight


@triton.jit
def _base2(s, scale, SOFTCAP: tl.constexpr):
    """Products as scores in base 2: times scale, and capped: cap * tanh(score / cap)."""
    if SOFTCAP > 0:
        bound: tl.constexpr = SOFTCAP * LOG2E
        grown = tl.math.exp2(s * (scale * (2 / SOFTCAP) * LOG2E))
        s = bound - 2 * bound / (grown + 1)
    else:
        s = s * (scale * LOG2E)
    return s


@triton.jit(do_not_specialize=["first"])
def merge_kernel(
    out, lse, row_ptr, row_entries, tail_out, tail_lse, sinks, merged, first,
    HQ: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TAIL: tl.constexpr, SINKS: tl.constexpr,
    ENTRIES: tl.constexpr, HEADS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Sums the partial results of each row's entries, from the row `first` on: merged [T, Hq, D],
    zeros for a row of none.

    TAIL: each of these rows has one more, tail_out [rows, Hq, D] and tail_lse [rows, Hq]. SINKS:
    sinks [Hq] are scores of one more key per head, whose value is zero.
    """
    row = tl.program_id(0) + first
    head = tl.program_id(1) * HEADS
    begin = tl.load(row_ptr + row)
    end = tl.load(row_ptr + row + 1)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    top = tl.full([HEADS], LOWEST, tl.float32)
    weight = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, DP], tl.float32)
    h = head + tl.arange(0, HEADS)
    d = tl.arange(0, DP)
    place = row.to(tl.int64) * HQ + h
    inside = (h < HQ)[:, None] & (d < D)[None, :]
    if TAIL:
        own = tl.program_id(0).to(tl.int64) * HQ + h
        score = tl.load(tail_lse + own, mask=h < HQ, other=float("-inf")) * LOG2E
        top = tl.maximum(score, top)
        weight = tl.math.exp2(score - top)
        acc = tl.load(tail_out + own[:, None] * D + d[None, :], mask=inside, other=0.0)
        acc = acc.to(tl.float32) * weight[:, None]
    acc, top, weight = _add_partials(
        acc, top, weight, out, lse, row_entries, begin, end, head, HQ,
        HQ, D, DP, ENTRIES, HEADS, HQ % HEADS == 0,
    )  # fmt: skip
    if SINKS:
        weight += _sink_weight(tl.load(sinks + h, mask=h < HQ, other=0.0), top)
    acc = acc / tl.where(weight > 0, weight, 1.0)[:, None]
    tl.store(merged + place[:, None] * D + d[None, :], acc.to(merged.dtype.element_ty), mask=inside)


@triton.jit
def _sink_weight(sink, top):
    """Share of an attention sink in a denominator. Infinite where the sink leaves nothing else."""
    return tl.math.exp2(sink.to(tl.float32) * LOG2E - top)


@triton.jit
def _add_partials(
    acc, top, weight, out, lse, row_entries, begin, end, head, last,
    HQ: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    ENTRIES: tl.constexpr, HEADS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Adds results of row_entries[begin:end] to those of the heads from `head` up to `last`.

    acc: [HEADS, DP]. WHOLE: there are HEADS of them.
    """
    h = head + tl.arange(0, HEADS)
    d = tl.arange(0, DP)
    for i in range(begin, end, ENTRIES):
        j = i + tl.arange(0, ENTRIES)
        entry = tl.load(row_entries + j, mask=j < end, other=0).to(tl.int64)
        inside = (j < end)[:, None]
        if not WHOLE:
            inside = inside & (h < last)[None, :]
        at = entry[:, None] * HQ + h[None, :]
        score = tl.load(lse + at, mask=inside, other=float("-inf")) * LOG2E
        loaded = inside[:, :, None]
        if D != DP:
            loaded = loaded & (d < D)[None, None, :]
        o = tl.load(out + at[:, :, None] * D + d[None, None, :], mask=loaded, other=0.0)
        highest = tl.maximum(top, tl.max(score, 0))
        share = tl.math.exp2(score - highest[None, :])
        shrink = tl.math.exp2(top - highest)
        acc = acc * shrink[:, None] + tl.sum(o.to(tl.float32) * share[:, :, None], 0)
        weight = weight * shrink + tl.sum(share, 0)
        top = highest
    return acc, top, weight


@triton.jit
def _add_partials_of_head(
    acc, top, weight, out, lse, row_entries, begin, end, head,
    HQ: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """`_add_partials` of one head, acc [DP]: without a dimension for it no layout is converted."""
    d = tl.arange(0, DP)
    for i in range(begin, end, ENTRIES):
        j = i + tl.arange(0, ENTRIES)
        entry = tl.load(row_entries + j, mask=j < end, other=0).to(tl.int64)
        score = tl.load(lse + entry * HQ + head, mask=j < end, other=float("-inf")) * LOG2E
        loaded = (j < end)[:, None]
        if D != DP:
            loaded = loaded & (d < D)[None, :]
        at = (entry * HQ + head)[:, None] * D + d[None, :]
        o = tl.load(out + at, mask=loaded, other=0.0).to(tl.float32)
        highest = tl.maximum(top, tl.max(score, 0))
        share = tl.math.exp2(score - highest)
        shrink = tl.math.exp2(top - highest)
        acc = acc * shrink + tl.sum(o * share[:, None], 0)
        weight = weight * shrink + tl.sum(share, 0)
        top = highest
    return acc, top, weight


@triton.jit(do_not_specialize=["layer", "window"])
def tail_kernel(
    query, query_head_stride, query_row_stride, key, key_head_stride, key_row_stride,
    value, value_head_stride, value_row_stride, out, lse, merged,
    bases, row_ptr, row_entries, tail_length, pages, pages_stride, slopes, sinks, layer, window,
    scale,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ALIGN: tl.constexpr,
    ALIBI: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    BLOCK: tl.constexpr, BN: tl.constexpr, ENTRIES: tl.constexpr, GP: tl.constexpr,
    LINES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The rest of a decode step, one row and key head a program.

    Writes the row's new key and value into its block, attends to it and to the `tail_length` keys
    before it in the row's own blocks, adds the partial results of its entries, and writes
    merged [T, Hq, D]: zeros for a padding row. BLOCK: tokens of a block; GP: G as a power of two;
    LINES: rows of a product, 16 or more; SINKS: see `merge_kernel`.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    length = tl.load(tail_length + row)
    live = length >= 0
    length = tl.maximum(length, 0)
    begin = tl.load(row_ptr + row)
    end = tl.load(row_ptr + row + 1)
    numbers = pages + row.to(tl.int64) * pages_stride
    start = tl.load(bases + 2) * layer + tl.load(bases + 3) * head
    keys = tl.multiple_of(tl.load(bases).to(query.dtype) + start, ALIGN)
    values = tl.multiple_of(tl.load(bases + 1).to(query.dtype) + start, ALIGN)
    d = tl.arange(0, DP)
    inside = d < D
    at_row = row.to(tl.int64)
    key_at = key + at_row * key_row_stride + head * key_head_stride + d
    value_at = value + at_row * value_row_stride + head * value_head_stride + d
    new_key = tl.load(key_at, mask=inside, other=0.0)
    new_value = tl.load(value_at, mask=inside, other=0.0)
    block = _block_number(numbers + length // BLOCK)
    slot = (block.to(tl.int64) * BLOCK + length % BLOCK) * D
    stored = d < tl.where(live, D, 0)
    tl.store(keys + slot + d, new_key, mask=stored)
    tl.store(values + slot + d, new_value, mask=stored)
    first = 0
    if WINDOW:
        first = tl.maximum(length - window + 1, 0)
    j = tl.arange(0, BN)
    spread = j[:, None] * D + d[None, :]
    at = query + at_row * query_row_stride
    if G == 1:
        q = tl.load(at + head * query_head_stride + d, mask=inside, other=0.0).to(tl.float32)
        top = _base2(tl.sum(q * new_key.to(tl.float32), 0), scale, SOFTCAP)
        weight = top * 0.0 + 1.0
        acc = new_value.to(tl.float32)
        slope = 0.0
        if ALIBI:
            slope = tl.load(slopes + head) * LOG2E
        for n in range(first // BN * BN, length, BN):
            slot = (_block_number(numbers + n // BLOCK).to(tl.int64) * BLOCK + n % BLOCK) * D
            seen = n + j < length
            if WINDOW:
                seen = seen & (n + j >= first)
            loaded = seen[:, None]
            if D != DP:
                loaded = loaded & inside[None, :]
            k = tl.load(keys + (slot + spread), mask=loaded, other=0.0)
            v = tl.load(values + (slot + spread), mask=loaded, other=0.0)
            s = _base2(tl.sum(k.to(tl.float32) * q[None, :], 1), scale, SOFTCAP)
            if ALIBI:
                s += slope * (n + j - length).to(tl.float32)
            s = tl.where(seen, s, float("-inf"))
            highest = tl.maximum(top, tl.max(s, 0))
            p = tl.math.exp2(s - highest)
            shrink = tl.math.exp2(top - highest)
            acc = acc * shrink + tl.sum(p[:, None] * v.to(tl.float32), 0)
            weight = weight * shrink + tl.sum(p, 0)
            top = highest
        if DEPENDENT:  # all above is older than the grid before, the partial results are its
            gdc_wait()
            gdc_launch_dependents()
        acc, top, weight = _add_partials_of_head(
            acc, top, weight, out, lse, row_entries, begin, end, head, HKV, D, DP, ENTRIES
        )
        if SINKS:
            weight += _sink_weight(tl.load(sinks + head), top)
        acc = tl.where(live, acc / weight, 0.0)
        place = merged + (at_row * HKV + head) * D + d
        tl.store(place, acc.to(merged.dtype.element_ty), mask=inside)
    else:
        line = tl.arange(0, LINES)
        g = tl.where(line < G, line, 0)
        at += (head * G + g) * query_head_stride
        q = tl.load(at[:, None] + d[None, :], mask=inside[None, :], other=0.0)
        product = tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], 1)
        top = _base2(product, scale, SOFTCAP)
        weight = tl.full([LINES], 1.0, tl.float32)
        acc = tl.zeros([LINES, DP], tl.float32) + new_value.to(tl.float32)[None, :]
        slope = weight
        if ALIBI:
            slope = tl.load(slopes + head * G + g) * LOG2E
        for n in range(first // BN * BN, length, BN):
            slot = (_block_number(numbers + n // BLOCK).to(tl.int64) * BLOCK + n % BLOCK) * D
            seen = n + j < length
            if WINDOW:
                seen = seen & (n + j >= first)
            loaded = seen[:, None]
            if D != DP:
                loaded = loaded & inside[None, :]
            k = tl.load(keys + (slot + spread), mask=loaded, other=0.0)
            v = tl.load(values + (slot + spread), mask=loaded, other=0.0)
            s = _base2(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, SOFTCAP)
            if ALIBI:
                s += slope[:, None] * (n + j - length).to(tl.float32)[None, :]
            s = tl.where(seen[None, :], s, float("-inf"))
            highest = tl.maximum(top, tl.max(s, 1))
            p = tl.math.exp2(s - highest[:, None])
            shrink = tl.math.exp2(top - highest)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
            weight = weight * shrink + tl.sum(p, 1)
            top = highest
        # the first GP of the lines: the group's heads
        chosen = tl.arange(0, LINES // GP) == 0
        top = tl.sum(tl.where(chosen[:, None], top.reshape(LINES // GP, GP), 0.0), 0)
        weight = tl.sum(tl.where(chosen[:, None], weight.reshape(LINES // GP, GP), 0.0), 0)
        acc = acc.reshape(LINES // GP, GP, DP)
        acc = tl.sum(tl.where(chosen[:, None, None], acc, 0.0), 0)
        if DEPENDENT:
            gdc_wait()
            gdc_launch_dependents()
        last = head * G + G
        acc, top, weight = _add_partials(
            acc, top, weight, out, lse, row_entries, begin, end, head * G, last,
            HKV * G, D, DP, ENTRIES, GP, G == GP,
        )  # fmt: skip
        h = head * G + tl.arange(0, GP)
        if SINKS:
            weight += _sink_weight(tl.load(sinks + h, mask=h < last, other=0.0), top)
        acc = tl.where(live, acc / weight[:, None], 0.0)
        place = merged + (at_row * (HKV * G) + h)[:, None] * D + d[None, :]
        stored = (h < last)[:, None] & inside[None, :]
        tl.store(place, acc.to(merged.dtype.element_ty), mask=stored)


@triton.jit
def _block_number(at):
    """A number that the pipeliner does not see: an indirect load takes stages from the others."""
    if INTERPRETED:
        number = tl.load(at)
    else:
        number = tl.inline_asm_elementwise(
            "ld.global.b32 $0, [$1];", "=r,l", [at], dtype=tl.int32, is_pure=True, pack=1
        )
    return number
