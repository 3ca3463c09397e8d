"""Triton kernels that choose tokens: the likeliest, or one drawn from shares.

A draw finds top-k, top-p and min-p by bisection, without a sort.

Shares are whole numbers up to 2**40 (`sampling.shares_of`), given as float32, which holds each of
them exactly. The bits of floats that are not negative are ordered as the floats are, so a share's
bits are its key: sixteen passes over a row find, two bits at a time, the largest key from which on
the shares reach a count or a sum. Sums are int64, as on the host, so every row draws the same token
as there. A row is one program's, and stays in the caches between the passes.
"""

import triton
import triton.language as tl

LARGEST_KEY = tl.constexpr(2**31 - 1)


@triton.jit
def _likeliest(logits, row_stride, row, vocabulary, BLOCK: tl.constexpr):
    """A row's largest logit, where it is first, and whether a logit is NaN."""
    at = tl.arange(0, BLOCK)
    largest = tl.full((), float("-inf"), tl.float32)
    found = tl.zeros((), tl.int32)
    unordered = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, vocabulary, BLOCK):
        here = logits + row.to(tl.int64) * row_stride + begin + at
        x = tl.load(here, mask=begin + at < vocabulary, other=float("-inf")).to(tl.float32)
        unordered |= (x != x).to(tl.int32)
        most, place = tl.max(x, 0, return_indices=True)
        found = tl.where(most > largest, begin + place, found)
        largest = tl.maximum(largest, most)
    return largest, found, tl.max(unordered, 0) != 0


@triton.jit
def likeliest_kernel(logits, row_stride, inputs, host, vocabulary, BLOCK: tl.constexpr):
    """The first of a row's largest logits; -1 where that is infinite or one is NaN.

    host [R], int64: in pinned memory, which the device writes over the bus. inputs [R], int64: the
    same on the device, 0 in place of -1.
    """
    row = tl.program_id(0)
    largest, found, unordered = _likeliest(logits, row_stride, row, vocabulary, BLOCK)
    token = tl.where((tl.abs(largest) < float("inf")) & (unordered == 0), found, -1).to(tl.int64)
    tl.store(host + row, token)
    tl.store(inputs + row, tl.maximum(token, 0))


@triton.jit
def pairs_kernel(logits, row_stride, pairs, vocabulary, first, BLOCK: tl.constexpr):
    """A row's largest logit, or NaN, and its token: pairs [R, 2], float64.

    first: the token of the first column.
    """
    row = tl.program_id(0)
    largest, found, unordered = _likeliest(logits, row_stride, row, vocabulary, BLOCK)
    largest = tl.where(unordered, float("nan"), largest)
    tl.store(pairs + 2 * row, largest.to(tl.float64))
    tl.store(pairs + 2 * row + 1, (first + found).to(tl.float64))


@triton.jit
def choose_kernel(pairs, inputs, host, PARTS: tl.constexpr):
    """As `likeliest_kernel`, of the pairs of a row's parts: [R, PARTS, 2], float64."""
    row = tl.program_id(0)
    largest = tl.full((), float("-inf"), tl.float64)
    found = tl.zeros((), tl.float64)
    unordered = tl.zeros((), tl.int32)
    for part in tl.static_range(PARTS):
        value = tl.load(pairs + 2 * (row * PARTS + part))
        token = tl.load(pairs + 2 * (row * PARTS + part) + 1)
        unordered |= (value != value).to(tl.int32)
        found = tl.where(value > largest, token, found)
        largest = tl.where(value > largest, value, largest)
    usable = (unordered == 0) & (tl.abs(largest) < float("inf"))
    chosen = tl.where(usable, found.to(tl.int64), -1)
    tl.store(host + row, chosen)
    tl.store(inputs + row, tl.maximum(chosen, 0))


@triton.jit
def _shares(keys):
    """The shares of keys."""
    return keys.to(tl.float32, bitcast=True).to(tl.int64)


@triton.jit
def _largest_key(row, vocabulary, floor, target, SUMS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key from which on the tokens of a row reach the target: their number, or with
    SUMS the sum of their shares. Keys below the floor count for nothing."""
    at = tl.arange(0, BLOCK)
    found = tl.zeros((), tl.int64)
    for digit in range(16):
        step = tl.full((), 1, tl.int64) << (30 - 2 * digit)
        first = tl.maximum(tl.minimum(found + step, LARGEST_KEY), floor).to(tl.int32)
        second = tl.maximum(tl.minimum(found + 2 * step, LARGEST_KEY), floor).to(tl.int32)
        third = tl.maximum(tl.minimum(found + 3 * step, LARGEST_KEY), floor).to(tl.int32)
        from_first = tl.zeros((BLOCK,), tl.int64)
        from_second = tl.zeros((BLOCK,), tl.int64)
        from_third = tl.zeros((BLOCK,), tl.int64)
        for begin in range(0, vocabulary, BLOCK):
            keys = tl.load(row + begin + at, mask=begin + at < vocabulary, other=0)
            counted = _shares(keys) if SUMS else tl.full((BLOCK,), 1, tl.int64)
            from_first += tl.where(keys >= first, counted, 0)
            from_second += tl.where(keys >= second, counted, 0)
            from_third += tl.where(keys >= third, counted, 0)
        found += tl.where(tl.sum(from_first).to(tl.float64) >= target, step, 0)
        found += tl.where(tl.sum(from_second).to(tl.float64) >= target, step, 0)
        found += tl.where(tl.sum(from_third).to(tl.float64) >= target, step, 0)
    return tl.maximum(found, floor)


@triton.jit
def _sum_from(row, vocabulary, least, BLOCK: tl.constexpr):
    """The sum of a row's shares that are at least so large."""
    at = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.int64)
    for begin in range(0, vocabulary, BLOCK):
        keys = tl.load(row + begin + at, mask=begin + at < vocabulary, other=0)
        shares = _shares(keys)
        sums += tl.where(shares >= least, shares, 0)
    return tl.sum(sums)


@triton.jit
def _largest(row, vocabulary, BLOCK: tl.constexpr):
    """The largest key of a row."""
    at = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, vocabulary, BLOCK):
        keys = tl.load(row + begin + at, mask=begin + at < vocabulary, other=0)
        largest = tl.maximum(largest, keys)
    return tl.max(largest)


@triton.jit
def draw_kernel(keys, top_k, top_p, min_p, uniforms, tokens, vocabulary, BLOCK: tl.constexpr):
    """Draws a token for each row.

    keys: int32 [R, vocabulary], the bits of float32 shares. top_k: int64; top_p, min_p, uniforms:
    float64; tokens: int64; all [R].
    """
    program = tl.program_id(0)
    row = keys + program.to(tl.int64) * vocabulary
    k = tl.load(top_k + program)
    p = tl.load(top_p + program)
    fraction = tl.load(min_p + program)
    floor = tl.zeros((), tl.int64)
    if (k > 0) & (k <= vocabulary):
        floor = _largest_key(row, vocabulary, floor, k.to(tl.float64), False, BLOCK)
    if p < 1:
        kept = _sum_from(row, vocabulary, _shares(floor.to(tl.int32)), BLOCK)
        floor = _largest_key(row, vocabulary, floor, p * kept.to(tl.float64), True, BLOCK)
    least = _shares(floor.to(tl.int32))
    if fraction > 0:
        largest = _shares(_largest(row, vocabulary, BLOCK))
        least = tl.maximum(least, tl.ceil(fraction * largest.to(tl.float64)).to(tl.int64))
    total = _sum_from(row, vocabulary, least, BLOCK)
    wanted = (tl.load(uniforms + program) * total.to(tl.float64)).to(tl.int64)
    # the first token up to which the shares exceed what is wanted
    at = tl.arange(0, BLOCK)
    before = tl.zeros((), tl.int64)
    place = tl.zeros((), tl.int64)  # where its block begins
    until = tl.zeros((), tl.int64)  # the shares before that
    for begin in range(0, vocabulary, BLOCK):
        block = tl.load(row + begin + at, mask=begin + at < vocabulary, other=0)
        shares = _shares(block)
        here = tl.sum(tl.where(shares >= least, shares, 0))
        inside = (before <= wanted) & (wanted < before + here)
        place = tl.where(inside, begin, place)
        until = tl.where(inside, before, until)
        before += here
    block = tl.load(row + place + at, mask=place + at < vocabulary, other=0)
    shares = _shares(block)
    sums = until + tl.cumsum(tl.where(shares >= least, shares, 0))
    token = place + tl.sum((sums <= wanted).to(tl.int64))
    tl.store(tokens + program, tl.minimum(token, vocabulary - 1))
