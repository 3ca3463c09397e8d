"""Triton kernels of recurrent layers: a convolution and a recurrence over the rows of a step.

The rows of a request are a *chain*: consecutive rows that continue one state. States are in slots
of a pool. A chain reads the slot before its first row, and the state behind a row is written to the
row's slot `keep`, if it has one. No slot is read and written in the same step. Programs therefore
need no order, and a step that fails leaves the states from which it started.

chain, int32 [chains, 4]: first row, row behind the last, slot of the state before (-1: none), 0.
row_chain, int32 [rows]: chain of a row, -1 for padding. keep, int32 [rows]: slot, or -1.
"""

import triton
import triton.language as tl

TINY = tl.constexpr(1e-6)  # in the norms of queries and keys, as in transformers
CHAIN = tl.constexpr(4)  # fields of a chain
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def convolve_kernel(
    inputs,
    channel_stride,
    row_stride,
    weight,
    bias,
    out,
    out_stride,
    windows,
    slot_stride,
    chain,
    row_chain,
    keep,
    channels,
    KERNEL: tl.constexpr,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The causal convolution of one row: inputs [channels, T], weight [channels, KERNEL], out
    [T, channels].

    windows [slots, channels, KERNEL]: the last inputs, the latest of them last. A chain without a
    state begins with zeros. A row with a slot writes its own window there.
    """
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < channels
    number = tl.load(row_chain + row)
    if number < 0:
        tl.store(out + row.to(tl.int64) * out_stride + at, tl.zeros((BLOCK,), tl.float32), inside)
    else:
        first = tl.load(chain + CHAIN * number)
        before = tl.load(chain + CHAIN * number + 2)
        behind = tl.load(keep + row)
        total = tl.zeros((BLOCK,), tl.float32)
        if BIAS:
            total += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
        old = windows + before.to(tl.int64) * slot_stride + at * KERNEL
        new = windows + behind.to(tl.int64) * slot_stride + at * KERNEL
        for tap in tl.static_range(KERNEL):
            token = row - (KERNEL - 1 - tap)
            seen = token >= first
            own = tl.load(
                inputs + at * channel_stride + token.to(tl.int64) * row_stride,
                mask=inside & seen,
                other=0.0,
            )
            kept = tl.load(
                old + KERNEL + token - first,
                mask=inside & (token < first) & (before >= 0) & (token - first >= -KERNEL),
                other=0.0,
            )
            found = tl.where(seen, own.to(tl.float32), kept.to(tl.float32))
            total += found * tl.load(weight + at * KERNEL + tap, mask=inside, other=0.0).to(
                tl.float32
            )
            tl.store(new + tap, found.to(windows.dtype.element_ty), mask=inside & (behind >= 0))
        if SILU:
            total = total / (1 + tl.exp(-total))
        tl.store(
            out + row.to(tl.int64) * out_stride + at, total.to(out.dtype.element_ty), mask=inside
        )


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), which is not rounded to zero where exp(x) is small."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1 + e
    small = u == 1
    found = tl.where(small, e, tl.log(u) * (e / tl.where(small, 1.0, u - 1)))
    return tl.where(x > 20.0, x, found)


@triton.jit
def recur_kernel(
    query, query_row, query_head, key, key_row, key_head, value, value_row, value_head,
    decay, decay_row, decay_head, step, step_row, step_head, out,
    states, slot_stride, head_stride, chain, chains, keep, heads, scale, rate, offset,
    GROUP: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
    KEY_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr,
    DELTA: tl.constexpr, CHANNELS: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """The recurrence of some chains, one head and a block of BV values, token by token, in float32:

        S <- exp(g) S,  v <- b (v - k^T S) or b v,  S <- S + k v^T,  out = scale q^T S

    query, key [T, Hk, DK], value [T, H, DV], decay g [T, H] or [T, H, DK], step b [T, H];
    out [T, H, DV] float32. states [slots, H, ...] float32, where element (k, v) of a head is at
    k KEY_STRIDE + v VALUE_STRIDE. A key serves GROUP heads. DELTA: the delta rule, for which
    queries and keys get length one. GATES: decay and step are projections, from which the gates
    follow by rate [H] and offset [H]: g = -exp(rate) softplus(decay + offset), b = sigmoid(step).
    """
    number, head = tl.program_id(0), tl.program_id(1)
    fall, shift = 0.0, 0.0
    if GATES:
        fall = -tl.exp(tl.load(rate + head).to(tl.float32))
        shift = tl.load(offset + head).to(tl.float32)
    first = tl.load(chain + CHAIN * number)
    end = tl.load(chain + CHAIN * number + 1)
    while first < end:  # chains behind the last one have no rows, and need no program
        before = tl.load(chain + CHAIN * number + 2)
        keys = tl.arange(0, DKP)
        values = tl.program_id(2) * BV + tl.arange(0, BV)
        in_keys, in_values = keys < DK, values < DV
        place = head * head_stride + keys[:, None] * KEY_STRIDE + values[None, :] * VALUE_STRIDE
        inside = in_keys[:, None] & in_values[None, :]
        state = tl.load(
            states + before.to(tl.int64) * slot_stride + place,
            mask=inside & (before >= 0),
            other=0.0,
        )
        of_query = query + (head // GROUP) * query_head + keys
        of_key = key + (head // GROUP) * key_head + keys
        of_value = value + head * value_head + values
        of_step, of_decay = step + head * step_head, decay + head * decay_head
        at = first.to(tl.int64)
        k = tl.load(of_key + at * key_row, mask=in_keys, other=0.0)
        q = tl.load(of_query + at * query_row, mask=in_keys, other=0.0)
        v = tl.load(of_value + at * value_row, mask=in_values, other=0.0)
        b = tl.load(of_step + at * step_row)
        if CHANNELS:
            g = tl.load(of_decay + at * decay_row + keys, mask=in_keys, other=0.0)
        else:
            g = tl.load(of_decay + at * decay_row)
        for token in range(end - first):
            at = (first + token).to(tl.int64)
            k_now, q_now, v_now = k.to(tl.float32), q.to(tl.float32), v.to(tl.float32)
            b_now, g_now = b.to(tl.float32), g.to(tl.float32)
            if GATES:
                b_now = 1 / (1 + tl.exp(-b_now))
                g_now = fall * _softplus(g_now + shift)
            kept = tl.exp(g_now)
            behind = tl.load(keep + at)
            # the inputs of the next token arrive while this one is computed
            ahead = tl.minimum(at + 1, end - 1)
            k = tl.load(of_key + ahead * key_row, mask=in_keys, other=0.0)
            q = tl.load(of_query + ahead * query_row, mask=in_keys, other=0.0)
            v = tl.load(of_value + ahead * value_row, mask=in_values, other=0.0)
            b = tl.load(of_step + ahead * step_row)
            if CHANNELS:
                g = tl.load(of_decay + ahead * decay_row + keys, mask=in_keys, other=0.0)
            else:
                g = tl.load(of_decay + ahead * decay_row)
            if DELTA:
                k_now *= tl.rsqrt(tl.sum(k_now * k_now, 0) + TINY)
                q_now *= tl.rsqrt(tl.sum(q_now * q_now, 0) + TINY)
            if CHANNELS:
                state *= kept[:, None]
            else:
                state *= kept
            if DELTA:
                v_now -= tl.sum(state * k_now[:, None], 0)
            state += k_now[:, None] * (v_now * b_now)[None, :]
            found = tl.sum(state * q_now[:, None], 0) * scale
            tl.store(out + (at * heads + head) * DV + values, found, mask=in_values)
            if behind >= 0:
                tl.store(states + behind.to(tl.int64) * slot_stride + place, state, mask=inside)
        number += tl.num_programs(0)
        first = tl.load(chain + CHAIN * number, mask=number < chains, other=0)
        end = tl.load(chain + CHAIN * number + 1, mask=number < chains, other=0)


@triton.jit
def gated_norm_kernel(
    rows,
    gate,
    gate_row,
    gate_head,
    weight,
    out,
    heads,
    eps,
    DV: tl.constexpr,
    DVP: tl.constexpr,
    HEADS: tl.constexpr,
):
    """rows [T, H, DV] with a mean square of one, times weight [DV] and silu(gate) [T, H, DV]; out
    [T, H, DV]. A row and HEADS heads a program."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = tl.arange(0, DVP)
    inside = (head < heads)[:, None] & (at < DV)[None, :]
    place = (row * heads + head)[:, None] * DV + at[None, :]
    of_gate = gate + row * gate_row + head[:, None] * gate_head + at[None, :]
    x = tl.load(rows + place, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(of_gate, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + at, mask=at < DV, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 1) / DV + eps)[:, None]
    found = x * w[None, :] * (g / (1 + tl.exp(-g)))
    tl.store(out + place, found.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _at_seam(
    tail,
    first,
    weight,
    bias,
    at,
    inside,
    has_tail,
    TOKEN: tl.constexpr,
    KERNEL: tl.constexpr,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The convolution of some channels at a document's first token number TOKEN. tail [channels,
    KERNEL]: inputs before the document. first [channels, KERNEL - 1]: of its first tokens."""
    total = tl.zeros((BLOCK,), tl.float32)
    if BIAS:
        total += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(KERNEL):
        if TOKEN + tap < KERNEL - 1:
            there = inside & has_tail
            seen = tl.load(tail + at * KERNEL + TOKEN + tap + 1, mask=there, other=0.0)
        else:
            own = TOKEN + tap - KERNEL + 1
            seen = tl.load(first + at * (KERNEL - 1) + own, mask=inside, other=0.0)
        taps = tl.load(weight + at * KERNEL + tap, mask=inside, other=0.0)
        total += seen.to(tl.float32) * taps.to(tl.float32)
    if SILU:
        total = total / (1 + tl.exp(-total))
    return total


@triton.jit
def _dot(matrix, state):
    if INTERPRETED:  # which multiplies the bits of bfloat16
        return tl.dot(matrix.to(tl.float32), state.to(tl.float32))
    return tl.dot(matrix, state)


@triton.jit
def _times(matrix, state, NARROW: tl.constexpr):
    """matrix @ state in float32. A matrix in bfloat16 is multiplied by three parts of the state,
    which together have its 24 bits, so that every product is exact."""
    if NARROW:
        high = state.to(tl.bfloat16)
        rest = state - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        return _dot(matrix, high) + (_dot(matrix, middle) + _dot(matrix, low))
    return tl.dot(matrix.to(tl.float32), state, input_precision="tf32x3")


@triton.jit(do_not_specialize=["documents", "before", "into"])
def compose_kernel(
    places,
    documents,
    states,
    windows,
    before,
    into,
    weight,
    bias,
    maps,
    floats,
    channels,
    heads,
    key_at,
    value_at,
    head_size,
    ORDERS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DKP: tl.constexpr,
    DV: tl.constexpr,
    BV: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    DELTA: tl.constexpr,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    NARROW: tl.constexpr,
    LAST: tl.constexpr,
):
    """The states behind documents, of one layer, head and block of BV values: the mean over ORDERS
    orders. Each program also copies LAST of the last inputs of the first order's last document.

    places, int64 [ORDERS, documents, 6]: addresses of the documents' transition, increment, first,
    last, decays and steps (`RecurrentStates`), the first four of the dtype of `maps`, the others
    of `floats`. states, float32 [slots, R, H, ...], and windows [slots, R, channels, KERNEL] are
    read in the slot `before` (-1: none) and written in the slot `into`. weight [R, channels,
    KERNEL], bias [R, channels]. Keys of the convolution begin at channel key_at, values at
    value_at. See `recur_kernel` for the other arguments.
    """
    layer, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    layers = tl.num_programs(0).to(tl.int64)
    state = states + before * layers * heads * head_size
    out = states + into * layers * heads * head_size
    has_before = before >= 0
    keys = tl.arange(0, DKP)
    values = tl.program_id(2) * BV + tl.arange(0, BV)
    in_keys, in_values = keys < DK, values < DV
    inside = in_keys[:, None] & in_values[None, :]
    place = (layer * heads + head) * head_size
    place += keys[:, None] * KEY_STRIDE + values[None, :] * VALUE_STRIDE
    of_keys = layer * channels + key_at + (head // GROUP) * DK + keys
    of_values = layer * channels + value_at + head * DV + values
    begin = tl.load(state + place, mask=inside & has_before, other=0.0)
    mean = tl.zeros((DKP, BV), tl.float32)
    element = tl.pointer_type(maps.dtype.element_ty)
    number = tl.pointer_type(floats.dtype.element_ty)
    for order in tl.static_range(ORDERS):
        now = begin
        tail = windows + before * layers * channels * KERNEL
        has_tail = has_before
        for document in range(documents):
            entry = places + (order * documents + document) * 6
            transition = tl.multiple_of(tl.load(entry).to(element), 16)
            increment = tl.multiple_of(tl.load(entry + 1).to(element), 16)
            first = tl.load(entry + 2).to(element)
            decays = tl.load(entry + 4).to(number)
            steps = tl.load(entry + 5).to(number)
            for token in tl.static_range(KERNEL - 1):
                k = _at_seam(
                    tail,
                    first,
                    weight,
                    bias,
                    of_keys,
                    in_keys,
                    has_tail,
                    token,
                    KERNEL,
                    SILU,
                    BIAS,
                    DKP,
                )
                v = _at_seam(
                    tail,
                    first,
                    weight,
                    bias,
                    of_values,
                    in_values,
                    has_tail,
                    token,
                    KERNEL,
                    SILU,
                    BIAS,
                    BV,
                )
                at = (layer * heads + head) * (KERNEL - 1) + token
                b = tl.load(steps + at)
                if DELTA:
                    k *= tl.rsqrt(tl.sum(k * k, 0) + TINY)
                if CHANNELS:
                    kept = tl.load(decays + at * DK + keys, mask=in_keys, other=0.0)
                    now *= tl.exp(kept)[:, None]
                else:
                    now *= tl.exp(tl.load(decays + at))
                if DELTA:
                    v -= tl.sum(now * k[:, None], 0)
                now += k[:, None] * (v * b)[None, :]
            added = tl.load(increment + place, mask=inside, other=0.0).to(tl.float32)
            if DELTA:
                square = (layer * heads + head) * DK * DK + keys[:, None] * DK + keys[None, :]
                both = in_keys[:, None] & in_keys[None, :]
                matrix = tl.load(transition + square, mask=both, other=0.0)
                now = _times(matrix, now, NARROW) + added
            else:
                now = now * tl.load(transition + layer * heads + head).to(tl.float32) + added
            tail = tl.load(entry + 3).to(element)
            has_tail = document >= 0
        mean += now
        if order == 0:
            share = (head * tl.num_programs(2) + tl.program_id(2)) * LAST + tl.arange(0, LAST)
            of_layer = share < channels * KERNEL
            share += layer * channels * KERNEL
            last = tl.load(tail + share, mask=of_layer)
            tl.store(windows + into * layers * channels * KERNEL + share, last, mask=of_layer)
    tl.store(out + place, mean / ORDERS, mask=inside)
