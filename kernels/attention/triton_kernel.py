"""Paged attention in Triton: one kernel for decode, verification, chunks and prefill, and one that joins splits.

Knows tiles and splits of one layer; knows nothing about how work is chosen (triton_plan.py) or checked
(triton_attention.py). The order of every sum is that of README.md and depends on a row's own position alone.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _join(top, total, acc, m, l, o, scale):
    """Add one split (m, l, o) to the splits before it; one in which a row sees nothing changes no bit of that row."""
    new_top = tl.maximum(top, m)
    finite = tl.where(new_top == float("-inf"), 0.0, new_top)
    old, new = tl.exp2((top - finite) * scale), tl.exp2((m - finite) * scale)
    # fma spelled out: which product the compiler would fuse is its own choice, and the two callers must agree
    total = tl.fma(total, old, l * new)
    acc = tl.fma(acc, old[:, None], o * new[:, None])
    return new_top, total, acc


@triton.jit
def _rows(item, slot, rows_ptr, head_tiles, group, ROWS: tl.constexpr, CACHE: tl.constexpr):
    """[ROWS] token and query head of an item's rows, and which of them there are.

    Asked twice with two cache modifiers: else the compiler holds the first answer in registers over the loops.
    """
    o_r = tl.arange(0, ROWS)
    # of the item, though all have the same: what depends on it would otherwise stay in registers for all items
    head_shift = tl.load(item + 4, cache_modifier=CACHE)
    in_group = (slot % head_tiles << head_shift) + (o_r & ((1 << head_shift) - 1))
    m_r = (o_r >> head_shift < tl.load(item + 1, cache_modifier=CACHE)) & (in_group < group)
    token = tl.load(rows_ptr + tl.load(item) + (o_r >> head_shift), mask=m_r, other=0, cache_modifier=CACHE)
    return token, slot // head_tiles * group + in_group, m_r


@triton.jit
def _blocks(
    tile, last, lowest, table_ptr, block_shift, window,
    WINDOWED: tl.constexpr, SMALL_BLOCKS: tl.constexpr, KEY_TILE: tl.constexpr,
):  # fmt: skip
    """Block ids of a tile's keys, [64], or one where a block holds whole tiles; 0 where no row sees the key."""
    if SMALL_BLOCKS:
        key = tile * KEY_TILE + tl.arange(0, KEY_TILE)
        is_read = key <= last
        if WINDOWED:
            is_read = is_read & (key > lowest - window)
    else:
        key = tile * KEY_TILE
        is_read = key <= last
    return tl.load(table_ptr + (key >> block_shift), mask=is_read, other=0)


@triton.jit
def _tile(
    q, m, l, o, tile, block, position, lowest, last, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
    block_stride, scale_stride, block_shift, window, scale, cap_scale,
    HEAD_DIM: tl.constexpr, HEAD_PADDED: tl.constexpr,
    MASKED: tl.constexpr, QUANTIZED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    SMALL_BLOCKS: tl.constexpr, KEY_TILE: tl.constexpr,
):  # fmt: skip
    """One key tile of 64 for the rows of a work item: online softmax within the split."""
    o_d = tl.arange(0, HEAD_PADDED)
    key = tile * KEY_TILE + tl.arange(0, KEY_TILE)  # [64]
    m_d = o_d < HEAD_DIM
    # what no row sees is not read: past the end lies anybody's data, before the window nobody's
    m_k = key <= last
    if WINDOWED:
        m_k = m_k & (key > lowest - window)
    # int64: block * block_stride passes 2**31 on a large pool
    if SMALL_BLOCKS:
        offset = key & ((1 << block_shift) - 1)
        at = (block.to(tl.int64) * block_stride + offset * HEAD_DIM)[:, None] + o_d[None, :]  # [64, HEAD_PADDED]
    else:
        offset = (tile * KEY_TILE & ((1 << block_shift) - 1)) + tl.arange(0, KEY_TILE)
        start = block.to(tl.int64) * block_stride + (tile * KEY_TILE & ((1 << block_shift) - 1)) * HEAD_DIM
        k_ptr += start
        v_ptr += start
        at = tl.arange(0, KEY_TILE)[:, None] * HEAD_DIM + o_d[None, :]
    if MASKED:
        b_k = tl.load(k_ptr + at, mask=m_k[:, None] & m_d[None, :], other=0.0)
    elif HEAD_DIM == HEAD_PADDED:
        b_k = tl.load(k_ptr + at)
    else:
        b_k = tl.load(k_ptr + at, mask=m_d[None, :], other=0.0)
    if QUANTIZED:
        b_k = b_k.to(tl.float32)
    s = tl.dot(q, tl.trans(b_k.to(q.dtype)), input_precision="ieee")  # [ROWS, 64]
    if QUANTIZED:
        scale_at = block.to(tl.int64) * scale_stride + offset
        if MASKED:
            b_ks = tl.load(k_scale_ptr + scale_at, mask=m_k, other=0.0)
            b_vs = tl.load(v_scale_ptr + scale_at, mask=m_k, other=0.0)
        else:
            b_ks = tl.load(k_scale_ptr + scale_at)
            b_vs = tl.load(v_scale_ptr + scale_at)
        s = s * b_ks[None, :]
    if CAPPED:
        s = 1.0 - 2.0 / (tl.exp2(s * cap_scale) + 1.0)  # tanh
    if MASKED:
        ahead = tl.arange(0, KEY_TILE)[None, :] - (position - tile * KEY_TILE)[:, None]  # [ROWS, 64] of the row
        visible = ahead <= 0
        if WINDOWED:
            visible = visible & (ahead > -window)
        s = tl.where(visible, s, float("-inf"))
    new_m = tl.maximum(m, tl.max(s, 1))
    finite = tl.where(new_m == float("-inf"), 0.0, new_m)
    p = tl.exp2(tl.fma(s, scale, (0.0 - finite * scale)[:, None]))
    old = tl.exp2((m - finite) * scale)
    l = tl.fma(l, old, tl.sum(p, 1))
    o = o * old[:, None]
    if QUANTIZED:
        p = p * b_vs[None, :]
    if MASKED:
        b_v = tl.load(v_ptr + at, mask=m_k[:, None] & m_d[None, :], other=0.0)
    elif HEAD_DIM == HEAD_PADDED:
        b_v = tl.load(v_ptr + at)
    else:
        b_v = tl.load(v_ptr + at, mask=m_d[None, :], other=0.0)
    if QUANTIZED:
        b_v = b_v.to(tl.float32)
    if QUANTIZED and q.dtype == tl.float16:
        # a weight times the scale of small values is below what float16 holds
        o = tl.dot(p.to(tl.bfloat16), b_v.to(tl.bfloat16), o)
    else:
        o = tl.dot(p.to(q.dtype), b_v.to(q.dtype), o, input_precision="ieee")
    return new_m, l, o


@triton.jit(do_not_specialize=["table_stride", "num_partials", "group", "head_tiles", "window"])
def attend_kernel(
    q_ptr,  # [num_tokens, num_q_heads, head_dim], rows contiguous
    pool_ptr,  # one layer's view [num_blocks, 2, num_kv_heads, block_size, head_dim], tiles contiguous
    scales_ptr,  # [num_blocks, 2, num_kv_heads, block_size] float32; unused without QUANTIZED
    out_ptr,  # [num_tokens, num_q_heads, head_dim], contiguous
    part_o_ptr,  # [num_partials, num_q_heads, head_dim] float32; unused without SPLIT
    part_ml_ptr,  # [2, num_partials, num_q_heads] float32
    sinks_ptr,  # [num_q_heads] float32; unused without SINKS
    position_ptr,  # [num_tokens] int32, absolute
    partial_ptr,  # [num_tokens] int32, where a token's split 0 lies in the partials
    rows_ptr,  # int32 token indices, item by item
    # [num_items, 7] int32: first in rows, tokens, table row, split, log2 of places for heads, lowest and last position
    items_ptr,
    count_ptr,  # [1] int32, num_items
    tables_ptr,  # [num_seqs, table_stride] int32 block ids
    q_stride, q_head_stride, block_stride, kv_stride, head_stride,
    scale_stride, scale_kv_stride, scale_head_stride, table_stride, num_partials,
    group, head_tiles, num_kv_heads, block_shift, window, scale, cap_scale,
    HEAD_DIM: tl.constexpr, HEAD_PADDED: tl.constexpr, ROWS: tl.constexpr,
    SPLIT: tl.constexpr,  # items are single splits, whose results go to the partials
    QUANTIZED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    SMALL_BLOCKS: tl.constexpr,  # of fewer than 64 tokens
    KEY_TILE: tl.constexpr = 64, SPLIT_TILES: tl.constexpr = 8,
):  # fmt: skip
    """Rows of a work item are its tokens times the query heads of one KV head. Grid: (any,), programs take turns."""
    o_d = tl.arange(0, HEAD_PADDED)
    m_d = o_d < HEAD_DIM
    slots = num_kv_heads * head_tiles
    num_q_heads = num_kv_heads * group
    for work in range(tl.program_id(0), tl.load(count_ptr) * slots, tl.num_programs(0)):
        item = items_ptr + (work // slots) * 7
        kv_head = (work % slots) // head_tiles
        token, q_head, m_r = _rows(item, work % slots, rows_ptr, head_tiles, group, ROWS, ".ca")
        position = tl.load(position_ptr + token, mask=m_r, other=-1)  # [ROWS]; -1 sees nothing
        lowest, last = tl.load(item + 5), tl.load(item + 6)
        q_at = q_ptr + (token.to(tl.int64) * q_stride + q_head * q_head_stride)[:, None] + o_d[None, :]
        b_q = tl.load(q_at, mask=m_r[:, None] & m_d[None, :], other=0.0)  # [ROWS, HEAD_PADDED]
        k_ptr = pool_ptr + kv_head.to(tl.int64) * head_stride
        k_scale_ptr = scales_ptr + kv_head.to(tl.int64) * scale_head_stride
        v_ptr, v_scale_ptr = k_ptr + kv_stride, k_scale_ptr + scale_kv_stride
        table_ptr = tables_ptr + tl.load(item + 2).to(tl.int64) * table_stride

        first = 0
        end = last // KEY_TILE + 1
        if WINDOWED:
            first = tl.maximum(lowest - window + 1, 0) // KEY_TILE
        if SPLIT:
            begin = tl.load(item + 3) * SPLIT_TILES
            first = tl.maximum(first, begin)
            end = tl.minimum(end, begin + SPLIT_TILES)
        clear = first  # the tiles [first, clear) are wholly visible to every row
        if not WINDOWED:
            clear = tl.maximum(first, tl.minimum((lowest + 1) // KEY_TILE, end))

        m = tl.full([ROWS], float("-inf"), tl.float32)
        l = tl.zeros([ROWS], tl.float32)
        o = tl.zeros([ROWS, HEAD_PADDED], tl.float32)
        top = m
        if SINKS:
            top = tl.load(sinks_ptr + q_head, mask=m_r, other=0.0) * (1.4426950408889634 / scale)
        total = tl.where(top == float("-inf"), 0.0, 1.0)
        acc = tl.zeros([ROWS, HEAD_PADDED], tl.float32)
        # block ids are read a tile ahead: read where they are used, they would hold up the keys behind them
        block = _blocks(first, last, lowest, table_ptr, block_shift, window, WINDOWED, SMALL_BLOCKS, KEY_TILE)
        for tile in range(first, clear):
            after = _blocks(tile + 1, last, lowest, table_ptr, block_shift, window, WINDOWED, SMALL_BLOCKS, KEY_TILE)
            m, l, o = _tile(
                b_q, m, l, o, tile, block, position, lowest, last, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
                block_stride, scale_stride, block_shift, window, scale, cap_scale,
                HEAD_DIM, HEAD_PADDED, False, QUANTIZED, WINDOWED, CAPPED, SMALL_BLOCKS, KEY_TILE,
            )  # fmt: skip
            block = after
            if not SPLIT:  # noqa: SIM102, a constexpr: the branch below does not exist in the other kernel
                if tile % SPLIT_TILES == SPLIT_TILES - 1:
                    top, total, acc = _join(top, total, acc, m, l, o, scale)
                    m = tl.full([ROWS], float("-inf"), tl.float32)
                    l = tl.zeros([ROWS], tl.float32)
                    o = tl.zeros([ROWS, HEAD_PADDED], tl.float32)
        for tile in range(clear, end):
            after = _blocks(tile + 1, last, lowest, table_ptr, block_shift, window, WINDOWED, SMALL_BLOCKS, KEY_TILE)
            m, l, o = _tile(
                b_q, m, l, o, tile, block, position, lowest, last, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
                block_stride, scale_stride, block_shift, window, scale, cap_scale,
                HEAD_DIM, HEAD_PADDED, True, QUANTIZED, WINDOWED, CAPPED, SMALL_BLOCKS, KEY_TILE,
            )  # fmt: skip
            block = after
            if not SPLIT:  # noqa: SIM102
                if tile % SPLIT_TILES == SPLIT_TILES - 1:
                    top, total, acc = _join(top, total, acc, m, l, o, scale)
                    m = tl.full([ROWS], float("-inf"), tl.float32)
                    l = tl.zeros([ROWS], tl.float32)
                    o = tl.zeros([ROWS, HEAD_PADDED], tl.float32)
        token, q_head, m_r = _rows(item, work % slots, rows_ptr, head_tiles, group, ROWS, ".cg")
        if SPLIT:
            partial = tl.load(partial_ptr + token, mask=m_r, other=0) + tl.load(item + 3)
            at = partial.to(tl.int64) * num_q_heads + q_head  # [ROWS]
            tl.store(part_ml_ptr + at, m, mask=m_r)
            tl.store(part_ml_ptr + num_partials * num_q_heads + at, l, mask=m_r)
            tl.store(part_o_ptr + at[:, None] * HEAD_DIM + o_d[None, :], o, mask=m_r[:, None] & m_d[None, :])
        else:
            top, total, acc = _join(top, total, acc, m, l, o, scale)
            result = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
            out_at = out_ptr + ((token.to(tl.int64) * num_q_heads + q_head) * HEAD_DIM)[:, None] + o_d[None, :]
            tl.store(out_at, result, mask=m_r[:, None] & m_d[None, :])


@triton.jit(do_not_specialize=["num_partials", "num_q_heads", "window"])
def join_kernel(
    out_ptr,  # [num_tokens, num_q_heads, head_dim], contiguous
    part_o_ptr,  # [num_partials, num_q_heads, head_dim] float32
    part_ml_ptr,  # [2, num_partials, num_q_heads] float32
    sinks_ptr,  # [num_q_heads] float32; unused without SINKS
    position_ptr, partial_ptr,  # [num_tokens] int32, as above; position -1 is padding, whose result is zero
    rows_ptr,  # int32 token indices
    num_partials, num_q_heads, window, scale,
    HEAD_DIM: tl.constexpr, HEAD_PADDED: tl.constexpr, WINDOWED: tl.constexpr, SINKS: tl.constexpr,
    HEADS: tl.constexpr,  # query heads of a program, a power of two
    AHEAD: tl.constexpr,  # splits read before the first of them is joined
    SPLIT_KEYS: tl.constexpr = 512,
):  # fmt: skip
    """Join the splits of rows in ascending order. Grid: (tokens, num_q_heads / HEADS rounded up)."""
    token = tl.load(rows_ptr + tl.program_id(0)).to(tl.int64)
    position = tl.load(position_ptr + token)
    partial = tl.load(partial_ptr + token)
    if partial <= -(1 << 30):  # computed whole
        return
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)  # [HEADS]
    m_h = head < num_q_heads
    o_d = tl.arange(0, HEAD_PADDED)
    m_d = o_d < HEAD_DIM
    first = 0
    if WINDOWED:
        first = tl.maximum(position - window + 1, 0) // SPLIT_KEYS
    end = (position + SPLIT_KEYS) // SPLIT_KEYS  # 0 for padding
    top = tl.full([HEADS], float("-inf"), tl.float32)
    if SINKS:
        top = tl.load(sinks_ptr + head, mask=m_h, other=0.0) * (1.4426950408889634 / scale)
    total = tl.where(top == float("-inf"), 0.0, 1.0)
    acc = tl.zeros([HEADS, HEAD_PADDED], tl.float32)
    for begin in range(first, end, AHEAD):
        for i in tl.static_range(AHEAD):
            at = (partial + begin + i).to(tl.int64) * num_q_heads + head  # [HEADS]
            m_s = m_h & (begin + i < end)
            m = tl.load(part_ml_ptr + at, mask=m_s, other=float("-inf"))
            l = tl.load(part_ml_ptr + num_partials * num_q_heads + at, mask=m_s, other=0.0)
            o_at = part_o_ptr + at[:, None] * HEAD_DIM + o_d[None, :]
            o = tl.load(o_at, mask=m_s[:, None] & m_d[None, :], other=0.0)
            top, total, acc = _join(top, total, acc, m, l, o, scale)
    result = tl.where(position < 0, 0.0, acc / total[:, None]).to(out_ptr.dtype.element_ty)
    out_at = out_ptr + ((token * num_q_heads + head) * HEAD_DIM)[:, None] + o_d[None, :]
    tl.store(out_at, result, mask=m_h[:, None] & m_d[None, :])


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
