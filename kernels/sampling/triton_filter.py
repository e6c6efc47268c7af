"""Which tokens of a row survive top-k, top-p and min-p, found without a sort.

Everything is said in distances d = max - scaled >= 0, whose float32 bits rise with d as integers. A row's survivors are
the tokens whose bits are below a limit, and of those at the limit the ones up to an id: two numbers a row. They are
found by bisection over the 31 bits, on the few candidates that a histogram of d leaves. Three launches: histograms of
all splits of all rows, the candidates gathered, the limits found.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling import GREEDY_BELOW

INFINITE: tl.constexpr = tl.constexpr(0x7F800000)
"""The bits of an infinite distance: a masked token's."""
GREEDY: tl.constexpr = tl.constexpr(GREEDY_BELOW)
BINS: tl.constexpr = tl.constexpr(256)
BINS_PER_UNIT: tl.constexpr = tl.constexpr(8.0)
CANDIDATES = 16384
"""Above so many, bisection reads the row itself."""


@triton.jit
def row_filters(temperature_ptr, top_k_ptr, top_p_ptr, i_r, vocab_size):
    """Whether a row's tokens are counted (top-k) and weighed (top-p): 0 or 1 each. Integers, as Triton's interpreter
    does not broadcast the truth of floats."""
    drawn = (tl.load(temperature_ptr + i_r) >= GREEDY).to(tl.int32)
    k = tl.load(top_k_ptr + i_r)
    by_count = ((k > 0) & (k < vocab_size)).to(tl.int32) * drawn
    return by_count, (tl.load(top_p_ptr + i_r) < 1.0).to(tl.int32) * drawn


@triton.jit
def row_best(part_max_ptr, i_r, num_splits, SPLITS: tl.constexpr):
    """A row's largest scaled logit; 0 for a row with nothing allowed, where every distance is infinite."""
    o_s = tl.arange(0, SPLITS)
    best = tl.max(tl.load(part_max_ptr + i_r * num_splits + o_s, mask=o_s < num_splits, other=float("-inf")), axis=0)
    return tl.where(best == float("-inf"), 0.0, best)


@triton.jit
def histogram_kernel(
    scaled_ptr,  # [num_rows, vocab_size] float32, logits over temperature
    part_max_ptr,  # [num_rows, num_splits] float32
    temperature_ptr,  # [num_rows] float32
    top_k_ptr,  # [num_rows] int32
    top_p_ptr,  # [num_rows] float64
    histogram_ptr,  # [num_rows, num_splits, BINS] int32, written for rows with top-k or top-p
    vocab_size,
    SPLITS: tl.constexpr,  # power of two >= num_splits
    BLOCK: tl.constexpr,
):
    """How far the tokens of a split are. Grid: (num_rows, num_splits)."""
    i_r, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_splits = tl.num_programs(1)
    by_count, by_mass = row_filters(temperature_ptr, top_k_ptr, top_p_ptr, i_r, vocab_size)
    if by_count + by_mass == 0:
        return
    best = row_best(part_max_ptr, i_r, num_splits, SPLITS)
    o_v = i_s * BLOCK + tl.arange(0, BLOCK)
    b_scaled = tl.load(scaled_ptr + i_r * vocab_size + o_v, mask=o_v < vocab_size, other=float("-inf"))
    # the last bin counts what is behind the row's end too; nobody asks how many it holds
    counts = tl.histogram(_bin(b_scaled, best), BINS)
    tl.store(histogram_ptr + (i_r * num_splits + i_s) * BINS + tl.arange(0, BINS), counts)


@triton.jit
def gather_kernel(
    scaled_ptr,  # [num_rows, vocab_size] float32
    part_max_ptr,  # [num_rows, num_splits] float32
    part_mass_ptr,  # [num_rows, num_splits] float64, sum of exp(scaled - part_max), for rows with top-p
    temperature_ptr, top_k_ptr, top_p_ptr,  # as histogram_kernel
    histogram_ptr,  # [num_rows, num_splits, BINS] int32
    value_ptr,  # [num_rows, candidates] float32, written: candidates' scaled logits
    id_ptr,  # [num_rows, candidates] int32, written: their ids, ascending
    mass_ptr,  # [num_rows] float64, written: sum of exp(-d)
    found_ptr,  # [num_rows, 2] int32, written: how many candidates there are, room or not; their last bin
    vocab_size,
    candidates,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The tokens that may survive. Grid: (num_rows, num_splits)."""
    i_r, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_splits = tl.num_programs(1)
    by_count, by_mass = row_filters(temperature_ptr, top_k_ptr, top_p_ptr, i_r, vocab_size)
    if by_count + by_mass == 0:
        return
    best = row_best(part_max_ptr, i_r, num_splits, SPLITS)
    o_s, o_b = tl.arange(0, SPLITS), tl.arange(0, BINS)
    m_s = o_s < num_splits
    b_max = tl.load(part_max_ptr + i_r * num_splits + o_s, mask=m_s, other=float("-inf"))  # [SPLITS]
    b_mass = tl.load(part_mass_ptr + i_r * num_splits + o_s, mask=m_s & (by_mass > 0), other=0.0)  # [SPLITS]
    mass = tl.sum(b_mass * tl.exp(b_max.to(tl.float64) - best.to(tl.float64)), axis=0)
    p_counts = histogram_ptr + (i_r * num_splits + o_s)[:, None] * BINS + o_b[None, :]
    b_counts = tl.load(p_counts, mask=m_s[:, None], other=0)  # [SPLITS, BINS]
    top_p, k = tl.load(top_p_ptr + i_r), tl.load(top_k_ptr + i_r)
    last_bin = _last_bin(tl.sum(b_counts, axis=0), mass, k, top_p, by_count)
    o_v = i_s * BLOCK + tl.arange(0, BLOCK)
    m_v = o_v < vocab_size
    b_scaled = tl.load(scaled_ptr + i_r * vocab_size + o_v, mask=m_v, other=float("-inf"))
    near = m_v & (_bin(b_scaled, best) <= last_bin)
    # what stands behind the row's end is in the last bin of the last split: it moves nobody
    held = tl.sum(tl.where(o_b[None, :] <= last_bin, b_counts, 0), axis=1)  # [SPLITS]
    first = tl.sum(tl.where(o_s < i_s, held, 0), axis=0)
    o_c = first + tl.cumsum(near.to(tl.int32), axis=0) - 1
    m_c = near & (o_c < candidates)
    tl.store(value_ptr + i_r * candidates + o_c, b_scaled, mask=m_c)
    tl.store(id_ptr + i_r * candidates + o_c, o_v, mask=m_c)
    if i_s == num_splits - 1:
        tl.store(mass_ptr + i_r, mass)
        tl.store(found_ptr + 2 * i_r, first + tl.sum(near.to(tl.int32), axis=0))
        tl.store(found_ptr + 2 * i_r + 1, last_bin)


@triton.jit
def limit_kernel(
    scaled_ptr,  # [num_rows, vocab_size] float32
    part_max_ptr,  # [num_rows, num_splits] float32
    temperature_ptr, top_k_ptr, top_p_ptr,  # as histogram_kernel
    min_p_ptr,  # [num_rows] float64
    value_ptr, id_ptr,  # [num_rows, candidates], as gather_kernel
    mass_ptr,  # [num_rows] float64
    found_ptr,  # [num_rows, 2] int32
    max_ptr,  # [num_rows] float32, written: the row's largest scaled logit
    limit_ptr,  # [num_rows, 2] int32, written: bits of the limit, last id that survives at the limit
    vocab_size,
    num_splits,
    candidates,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (num_rows,)."""
    i_r = tl.program_id(0).to(tl.int64)
    best = row_best(part_max_ptr, i_r, num_splits, SPLITS)
    tl.store(max_ptr + i_r, best)
    by_count, by_mass = row_filters(temperature_ptr, top_k_ptr, top_p_ptr, i_r, vocab_size)
    limit = tl.full([], INFINITE, tl.int32)
    last_id = vocab_size
    if by_count + by_mass > 0:
        row_ptr = scaled_ptr + i_r * vocab_size
        value_ptr += i_r * candidates
        id_ptr += i_r * candidates
        mass = tl.load(mass_ptr + i_r)
        found = tl.load(found_ptr + 2 * i_r)
        gathered = (found <= candidates).to(tl.int32)
        count = tl.where(gathered > 0, found, vocab_size)
        if by_count > 0:
            k = tl.load(top_k_ptr + i_r)
            # the k-th token lies in the last bin
            near = (tl.load(found_ptr + 2 * i_r + 1).to(tl.float32) / BINS_PER_UNIT).to(tl.int32, bitcast=True)
            limit, before = _smallest(
                row_ptr, value_ptr, id_ptr, gathered, count, best, limit, last_id, k.to(tl.float64), near, BLOCK, False
            )
            rank = k - before.to(tl.int32)
            last_id = _nth_at(row_ptr, value_ptr, id_ptr, gathered, count, best, limit, rank, BLOCK)
            mass, _, _ = _within(row_ptr, value_ptr, id_ptr, gathered, count, best, limit, last_id, limit, BLOCK, True)
        if by_mass > 0:
            target = tl.load(top_p_ptr + i_r) * mass
            low, before = _smallest(
                row_ptr, value_ptr, id_ptr, gathered, count, best, limit, last_id, target, limit * 0, BLOCK, True
            )
            each = tl.exp(-low.to(tl.float32, bitcast=True).to(tl.float64))
            rank = tl.ceil(tl.minimum((target - before) / each, 2147483647.0)).to(tl.int32)
            tied = _nth_at(row_ptr, value_ptr, id_ptr, gathered, count, best, low, tl.maximum(rank, 1), BLOCK)
            last_id = tl.where(low == limit, tl.minimum(last_id, tied), tied)
            limit = low
    min_p = tl.load(min_p_ptr + i_r)
    if min_p > 0.0:
        furthest = tl.maximum(0.0 - tl.log(min_p), 0.0)
        rounded = furthest.to(tl.float32)
        bits = rounded.to(tl.int32, bitcast=True) - (rounded.to(tl.float64) > furthest).to(tl.int32)
        last_id = tl.where(bits < limit, vocab_size, last_id)
        limit = tl.minimum(limit, bits)
    tl.store(limit_ptr + 2 * i_r, limit)
    tl.store(limit_ptr + 2 * i_r + 1, last_id)


@triton.jit
def distance_bits(b_scaled, best):
    """The bits of best - scaled, at most INFINITE: [BLOCK] int32."""
    bits = (best - b_scaled).to(tl.int32, bitcast=True)
    return tl.minimum(bits, INFINITE)


@triton.jit
def _bin(b_scaled, best):
    """Equal bins of distance; the last has no end."""
    return tl.minimum((best - b_scaled) * BINS_PER_UNIT, BINS - 1.0).to(tl.int32)


@triton.jit
def _last_bin(counts, mass, k, top_p, by_count):
    """The first bin up to which all survivors lie: k tokens do, or less than 1 - top_p of the mass does not."""
    o_b = tl.arange(0, BINS)
    enough = tl.cumsum(counts, axis=0) >= k
    # an upper bound of what the bins behind hold: each token as if at its bin's near end
    most = counts.to(tl.float64) * tl.exp(-(o_b.to(tl.float64) / BINS_PER_UNIT))
    behind = tl.cumsum(most, axis=0, reverse=True) - most
    light = behind <= (1.0 - top_p - 1e-9) * mass
    ends = tl.where(by_count > 0, enough.to(tl.int32), light.to(tl.int32)) > 0
    return tl.min(tl.where(ends, o_b, BINS - 1), axis=0)


@triton.jit
def _values(row_ptr, value_ptr, gathered, o_c, m_c):
    """Scaled logits of candidates, or of the row itself."""
    b_gathered = tl.load(value_ptr + o_c, mask=m_c & (gathered > 0), other=float("-inf"))
    b_row = tl.load(row_ptr + o_c, mask=m_c & (gathered == 0), other=float("-inf"))
    return tl.maximum(b_gathered, b_row)


@triton.jit
def _ids(id_ptr, gathered, o_c, m_c):
    b_gathered = tl.load(id_ptr + o_c, mask=m_c & (gathered > 0), other=0)
    return tl.where(gathered > 0, b_gathered, o_c)


@triton.jit
def _smallest(
    row_ptr, value_ptr, id_ptr, gathered, count, best, limit, last_id, target, low, BLOCK: tl.constexpr,
    BY_MASS: tl.constexpr,
):  # fmt: skip
    """The smallest limit from `low` on that holds at least `target` of what is within (limit, last_id), and how much
    lies before it."""
    high = limit
    while low < high:
        middle = low + (high - low) // 2
        held, nearest, next_one = _within(
            row_ptr, value_ptr, id_ptr, gathered, count, best, limit, last_id, middle, BLOCK, BY_MASS
        )
        # limits between two tokens are all alike
        if held >= target:
            high = tl.maximum(nearest, low)
        else:
            low = tl.minimum(next_one, high)
    before, _, _ = _within(row_ptr, value_ptr, id_ptr, gathered, count, best, limit, last_id, low - 1, BLOCK, BY_MASS)
    return low, before


@triton.jit
def _within(
    row_ptr, value_ptr, id_ptr, gathered, count, best, limit, last_id, middle, BLOCK: tl.constexpr,
    BY_MASS: tl.constexpr,
):  # fmt: skip
    """Of the candidates within (limit, last_id): how many, or the sum of exp(-d), at most `middle` away; the furthest
    of those and the nearest of the others."""
    held = tl.zeros([BLOCK], dtype=tl.float64)
    nearest = tl.zeros([BLOCK], dtype=tl.int32)
    next_one = tl.full([BLOCK], INFINITE, dtype=tl.int32)
    for start in range(0, count, BLOCK):
        o_c = start + tl.arange(0, BLOCK)
        m_c = o_c < count
        b_scaled = _values(row_ptr, value_ptr, gathered, o_c, m_c)
        bits = distance_bits(b_scaled, best)
        kept = m_c & ((bits < limit) | ((bits == limit) & (_ids(id_ptr, gathered, o_c, m_c) <= last_id)))
        inside = kept & (bits <= middle)
        if BY_MASS:
            held += tl.where(inside, tl.exp((b_scaled - best).to(tl.float64)), 0.0)
        else:
            held += tl.where(inside, 1.0, 0.0)
        nearest = tl.maximum(nearest, tl.where(inside, bits, 0))
        next_one = tl.minimum(next_one, tl.where(kept & (bits > middle), bits, INFINITE))
    return tl.sum(held, axis=0), tl.max(nearest, axis=0), tl.min(next_one, axis=0)


@triton.jit
def _nth_at(row_ptr, value_ptr, id_ptr, gathered, count, best, limit, n, BLOCK: tl.constexpr):
    """The id of the n-th candidate exactly at a limit; of the last there if there are fewer, -1 if there is none."""
    seen = 0
    last_id = -1
    for start in range(0, count, BLOCK):
        o_c = start + tl.arange(0, BLOCK)
        m_c = o_c < count
        at = m_c & (distance_bits(_values(row_ptr, value_ptr, gathered, o_c, m_c), best) == limit)
        rank = seen + tl.cumsum(at.to(tl.int32), axis=0)
        ids = _ids(id_ptr, gathered, o_c, m_c)
        last_id = tl.maximum(last_id, tl.max(tl.where(at & (rank <= n), ids, -1), axis=0))
        seen += tl.sum(at.to(tl.int32), axis=0)
    return last_id
