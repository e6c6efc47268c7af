"""A step's list of attention work, written on the device: what triton_plan.py does where lengths are known on the host.

Knows lengths; knows no keys and values.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=[
        "num_seqs", "num_rows", "narrow_most", "narrow_tokens", "wide_tokens", "head_shift", "window",
    ]
)  # fmt: skip
def plan_kernel(
    cu_ptr,  # [num_seqs + 1] int32 running sum of query rows
    seq_lens_ptr,  # [num_seqs] int32
    position_ptr, partial_ptr, rows_ptr,  # [num_rows] int32, written
    narrow_ptr, wide_ptr,  # [any, 7] int32 items, as above, written up to their counts
    count_ptr,  # [2] int32, written: narrow items, wide items
    num_seqs, num_rows, narrow_most, narrow_tokens, wide_tokens, head_shift, window,
    WINDOWED: tl.constexpr, BLOCK: tl.constexpr, SPLIT_KEYS: tl.constexpr = 512,
):  # fmt: skip
    """List a step's work: sequences of few rows by splits, the others by pieces. Grid: (num_seqs,), in any order."""
    seq = tl.program_id(0)
    o_b = tl.arange(0, BLOCK)
    narrow, wide, partial = 0, 0, 0  # items and partials of the sequences before
    for start in range(0, seq, BLOCK):
        m_b = start + o_b < seq
        b_q = tl.load(cu_ptr + start + o_b + 1, mask=m_b, other=0) - tl.load(cu_ptr + start + o_b, mask=m_b, other=0)
        b_len = tl.load(seq_lens_ptr + start + o_b, mask=m_b, other=0)
        b_splits = _splits_end(b_len, SPLIT_KEYS) - _splits_first(b_len, b_q, window, WINDOWED, SPLIT_KEYS)
        b_splits = tl.where((b_q > 0) & (b_q <= narrow_most), b_splits, 0)
        narrow += tl.sum(b_splits * ((b_q + narrow_tokens - 1) // narrow_tokens), 0)
        partial += tl.sum(b_splits * b_q, 0)
        wide += tl.sum(tl.where(b_q > narrow_most, (b_q + wide_tokens - 1) // wide_tokens, 0), 0)
    row = tl.load(cu_ptr + seq)
    queries = tl.load(cu_ptr + seq + 1) - row
    length = tl.load(seq_lens_ptr + seq)
    first = _splits_first(length, queries, window, WINDOWED, SPLIT_KEYS)
    splits, pieces = 0, 0
    if queries > narrow_most:
        pieces = tl.cdiv(queries, wide_tokens)
    elif queries > 0:
        splits = _splits_end(length, SPLIT_KEYS) - first
    for start in range(0, queries, BLOCK):
        i = start + o_b
        tl.store(position_ptr + row + i, length - queries + i, mask=i < queries)
        tl.store(rows_ptr + row + i, row + i, mask=i < queries)
        # far below any place: not in the partials
        at = tl.where(splits > 0, partial + i * splits - first, -(1 << 30))
        tl.store(partial_ptr + row + i, at, mask=i < queries)
    items = splits * tl.cdiv(queries, narrow_tokens)
    for start in range(0, items, BLOCK):
        i = start + o_b
        piece = i // splits * narrow_tokens
        at = narrow_ptr + (narrow + i) * 7
        tl.store(at, row + piece, mask=i < items)
        tl.store(at + 1, tl.minimum(queries - piece, narrow_tokens), mask=i < items)
        tl.store(at + 2, seq, mask=i < items)
        tl.store(at + 3, first + i % splits, mask=i < items)
        tl.store(at + 4, head_shift, mask=i < items)
        tl.store(at + 5, length - queries + piece, mask=i < items)
        tl.store(at + 6, length - queries + tl.minimum(piece + narrow_tokens, queries) - 1, mask=i < items)
    for start in range(0, pieces, BLOCK):
        i = start + o_b
        piece = (pieces - 1 - i) * wide_tokens  # the longest first
        at = wide_ptr + (wide + i) * 7
        tl.store(at, row + piece, mask=i < pieces)
        tl.store(at + 1, tl.minimum(queries - piece, wide_tokens), mask=i < pieces)
        tl.store(at + 2, seq, mask=i < pieces)
        tl.store(at + 3, -1, mask=i < pieces)
        tl.store(at + 4, head_shift, mask=i < pieces)
        tl.store(at + 5, length - queries + piece, mask=i < pieces)
        tl.store(at + 6, length - queries + tl.minimum(piece + wide_tokens, queries) - 1, mask=i < pieces)
    if seq == num_seqs - 1:
        tl.store(count_ptr, narrow + items)
        tl.store(count_ptr + 1, wide + pieces)
        for start in range(row + queries, num_rows, BLOCK):
            m_b = start + o_b < num_rows
            tl.store(position_ptr + start + o_b, -1, mask=m_b)
            tl.store(rows_ptr + start + o_b, start + o_b, mask=m_b)
            tl.store(partial_ptr + start + o_b, 0, mask=m_b)


@triton.jit
def _splits_first(length, queries, window, WINDOWED: tl.constexpr, SPLIT_KEYS: tl.constexpr):
    first = length * 0
    if WINDOWED:
        first = tl.maximum(length - queries - window + 1, 0) // (SPLIT_KEYS)
    return first


@triton.jit
def _splits_end(length, SPLIT_KEYS: tl.constexpr):
    return (length + SPLIT_KEYS - 1) // (SPLIT_KEYS)
