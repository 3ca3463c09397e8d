"""Triton kernels over latents: partial results, and the tail of a decode step.

A state is one key for all query heads, the rotary part of R dimensions and a latent of C behind it
(DeepSeek-V2 §2.1.2). The latent is also the value, so that each token is loaded once for both
products. Partial results and sums are as wide as the latent.

The tables, and the rules that keep loads asynchronous, are described in `kernels`. HKV counts parts
of the query heads here, G heads each, which all read the one key.

Constants: D = R + C dimensions of a key, RP and CP the next powers of two of R and C.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ragcache.attention.triton.kernels import (
    FIELDS,
    LN2,
    LOG2E,
    LOWEST,
    _block_number,
    _load_query,
)


@triton.jit(do_not_specialize=["layer"])
def latent_partial_kernel(
    query,
    query_head_stride,
    query_row_stride,
    out,
    lse,
    counts,
    bases,
    scales,
    items,
    entry_row,
    entry_delta,
    entry_limit,
    cos,
    sin,
    layer,
    scale,
    HKV: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    C: tl.constexpr,
    CP: tl.constexpr,
    ALIGN: tl.constexpr,
    ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    QUANTIZED: tl.constexpr,
    ALIGN8: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Attention of every entry over its item's tokens: out [E, Hq, C], lse [E, Hq].

    A persistent grid, as of `partial_kernel`. QUANTIZED: some bases may be int8, scaled per
    channel.
    """
    total = tl.load(counts) * HKV
    if QUANTIZED:
        total += tl.load(counts + 1) * HKV
    line = tl.arange(0, BM)
    e = line // G
    g = line % G
    c = tl.arange(0, CP)
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
        # every row sees the tokens up to `full`, some rows those up to `high`
        high = tl.maximum(tl.minimum(length, tl.max(limit, 0)), 0)
        full = tl.maximum(tl.minimum(high, tl.min(limit, 0)), 0) // BN * BN
        start = tl.load(bases + base * 4 + 2) * layer + begin.to(tl.int64) * (R + C)
        quantized = False
        key_scales = cos
        if QUANTIZED:
            quantized = tl.load(item + 5) != 0
            key_scales = tl.load(scales + base * 6).to(tl.pointer_type(tl.float32))
            key_scales += tl.load(scales + base * 6 + 2) * layer
        if DEPENDENT:  # tables and segments are older than the grid before; queries come from it
            gdc_wait()
            gdc_launch_dependents()
        at = query + row.to(tl.int64) * query_row_stride + (head * G + g) * query_head_stride
        q_turned = _load_query(
            at,
            entry_delta + entry,
            cos,
            sin,
            key_scales,
            quantized,
            BM,
            R,
            RP,
            ROTATED,
            INTERLEAVED,
            QUANTIZED,
        )
        q_latent = _load_query(
            at + R,
            entry_delta + entry,
            cos,
            sin,
            key_scales + R,
            quantized,
            BM,
            C,
            CP,
            0,
            False,
            QUANTIZED,
        )
        keys = tl.load(bases + base * 4)
        if quantized:
            k8 = tl.multiple_of(keys.to(tl.pointer_type(tl.int8)) + start, ALIGN8)
            acc, top, weight = _attend_latents(
                q_turned, q_latent, k8, full, high, limit, scale, R, RP, C, CP, BM, BN, STAGES
            )
            acc *= tl.load(key_scales + R + c, mask=c < C, other=0.0)[None, :]
        else:
            k = tl.multiple_of(keys.to(query.dtype) + start, ALIGN)
            acc, top, weight = _attend_latents(
                q_turned, q_latent, k, full, high, limit, scale, R, RP, C, CP, BM, BN, STAGES
            )
        seen = weight > 0
        weight = tl.where(seen, weight, 1.0)
        acc = acc / weight[:, None]
        total_lse = tl.where(seen, (top + tl.math.log2(weight)) * LN2, float("-inf"))
        place = (entry.to(tl.int64) * HKV + head) * G + g
        stored = live[:, None]
        if C != CP:
            stored = stored & (c < C)[None, :]
        tl.store(out + place[:, None] * C + c[None, :], acc.to(out.dtype.element_ty), mask=stored)
        tl.store(lse + place, total_lse, mask=live)
    if DEPENDENT:
        gdc_wait()


@triton.jit
def _attend_latents(
    q_turned,
    q_latent,
    keys,
    full,
    high,
    limit,
    scale,
    R: tl.constexpr,
    RP: tl.constexpr,
    C: tl.constexpr,
    CP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Online softmax over the tokens up to high: sum of weighted latents, highest score, weight."""
    top = tl.full([BM], LOWEST, tl.float32)
    weight = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, CP], tl.float32)
    for masked in tl.static_range(2):  # the tokens that every row sees, then the others
        end = high if masked else full
        for n in tl.range(full * masked, end, BN, num_stages=STAGES):
            acc, top, weight = _attend_block(
                acc,
                top,
                weight,
                q_turned,
                q_latent,
                keys,
                n,
                high,
                limit,
                scale,
                R,
                RP,
                C,
                CP,
                masked,
                BN,
            )
    return acc, top, weight


@triton.jit
def _attend_block(
    acc,
    top,
    weight,
    q_turned,
    q_latent,
    keys,
    n,
    high,
    limit,
    scale,
    R: tl.constexpr,
    RP: tl.constexpr,
    C: tl.constexpr,
    CP: tl.constexpr,
    MASKED: tl.constexpr,
    BN: tl.constexpr,
):
    """One block of BN tokens. MASKED: not every row sees all of them."""
    j = n + tl.arange(0, BN)
    turned, latents = _load_latents(keys, j[:, None] * (R + C), j < high, R, RP, C, CP, MASKED)
    turned, latents = turned.to(q_turned.dtype), latents.to(q_latent.dtype)
    s = tl.dot(q_turned, tl.trans(turned), input_precision="ieee")
    s = tl.dot(q_latent, tl.trans(latents), s, input_precision="ieee")
    if MASKED:
        seen = (j[None, :] < limit[:, None]) & (j < high)[None, :]
        s = tl.where(seen, s, float("-inf"))
    factor = scale * LOG2E
    highest = tl.maximum(top, tl.max(s, 1) * factor)
    p = tl.math.exp2(s * factor - highest[:, None])
    shrink = tl.math.exp2(top - highest)
    weight = weight * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(latents.dtype), latents, acc * shrink[:, None], input_precision="ieee")
    return acc, highest, weight


@triton.jit
def _load_latents(
    keys,
    at,
    inside,
    R: tl.constexpr,
    RP: tl.constexpr,
    C: tl.constexpr,
    CP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The rotary parts [BN, RP] and the latents [BN, CP] of tokens, `at` from `keys`. MASKED: loads
    those `inside` only, zeros for others."""
    r = tl.arange(0, RP)[None, :]
    c = tl.arange(0, CP)[None, :]
    if MASKED:
        turned = tl.load(keys + at + r, mask=inside[:, None] & (r < R), other=0)
        latents = tl.load(keys + at + R + c, mask=inside[:, None] & (c < C), other=0)
    elif R != RP or C != CP:
        turned = tl.load(keys + at + r, mask=r < R, other=0)
        latents = tl.load(keys + at + R + c, mask=c < C, other=0)
    else:
        turned = tl.load(keys + at + r)
        latents = tl.load(keys + at + R + c)
    return turned, latents


@triton.jit(do_not_specialize=["layer"])
def latent_tail_kernel(
    query,
    query_head_stride,
    query_row_stride,
    key,
    key_row_stride,
    out,
    lse,
    bases,
    tail_length,
    pages,
    pages_stride,
    layer,
    scale,
    HKV: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    C: tl.constexpr,
    CP: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    LINES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A decode step's row over its own last tokens, one row and part of the heads a program.

    Writes the row's new key into its block, and attends to it and to the `tail_length` keys before
    it: out [T, Hq, C], lse [T, Hq]. `merge_kernel` adds the results of the row's entries. LINES:
    rows of a product, a power of two of 16 at least.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    row = tl.program_id(0)
    head = tl.program_id(1)
    length = tl.load(tail_length + row)
    live = length >= 0
    length = tl.maximum(length, 0)
    numbers = pages + row.to(tl.int64) * pages_stride
    keys = tl.load(bases).to(query.dtype) + tl.load(bases + 2) * layer
    keys = tl.multiple_of(keys, ALIGN)
    r = tl.arange(0, RP)
    c = tl.arange(0, CP)
    at_row = row.to(tl.int64)
    new = key + at_row * key_row_stride
    new_turned = tl.load(new + r, mask=r < R, other=0.0)
    new_latent = tl.load(new + R + c, mask=c < C, other=0.0)
    block = _block_number(numbers + length // BLOCK).to(tl.int64)
    slot = (block * BLOCK + length % BLOCK) * (R + C)
    written = live & (head == 0)
    tl.store(keys + slot + r, new_turned, mask=r < tl.where(written, R, 0))
    tl.store(keys + slot + R + c, new_latent, mask=c < tl.where(written, C, 0))
    line = tl.arange(0, LINES)
    g = tl.where(line < G, line, 0)
    at = query + at_row * query_row_stride + (head * G + g) * query_head_stride
    q_turned = tl.load(at[:, None] + r[None, :], mask=(r < R)[None, :], other=0.0)
    q_latent = tl.load(at[:, None] + R + c[None, :], mask=(c < C)[None, :], other=0.0)
    factor = scale * LOG2E
    product = tl.sum(q_turned.to(tl.float32) * new_turned.to(tl.float32)[None, :], 1)
    product += tl.sum(q_latent.to(tl.float32) * new_latent.to(tl.float32)[None, :], 1)
    top = product * factor
    weight = tl.full([LINES], 1.0, tl.float32)
    acc = tl.zeros([LINES, CP], tl.float32) + new_latent.to(tl.float32)[None, :]
    j = tl.arange(0, BN)
    for n in tl.range(0, length, BN, num_stages=STAGES):
        block = _block_number(numbers + n // BLOCK).to(tl.int64)
        spread = (block * BLOCK + n % BLOCK) * (R + C) + j[:, None] * (R + C)
        seen = n + j < length
        turned, latents = _load_latents(keys, spread, seen, R, RP, C, CP, True)
        s = tl.dot(q_turned, tl.trans(turned), input_precision="ieee")
        s = tl.dot(q_latent, tl.trans(latents), s, input_precision="ieee") * factor
        s = tl.where(seen[None, :], s, float("-inf"))
        highest = tl.maximum(top, tl.max(s, 1))
        p = tl.math.exp2(s - highest[:, None])
        shrink = tl.math.exp2(top - highest)
        acc = tl.dot(p.to(latents.dtype), latents, acc * shrink[:, None], input_precision="ieee")
        weight = weight * shrink + tl.sum(p, 1)
        top = highest
    place = at_row * (HKV * G) + head * G + line
    stored = (line < G)[:, None] & (c < C)[None, :]
    acc = tl.where(live, acc / weight[:, None], 0.0)
    total = tl.where(live, (top + tl.math.log2(weight)) * LN2, float("-inf"))
    tl.store(out + place[:, None] * C + c[None, :], acc.to(out.dtype.element_ty), mask=stored)
    tl.store(lse + place, total, mask=line < G)
    if DEPENDENT:  # those who wait for this grid wait for the one before, too
        gdc_wait()
