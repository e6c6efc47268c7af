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
def _begun(m, tile, SPLIT_TILES: tl.constexpr):
    """`m` before `tile`: where a split begins, one that takes nothing over of l and o.

    To set those to zero in a branch would keep the compiler from running the products side by side.
    """
    return tl.where(tile % SPLIT_TILES == 0, float("-inf"), m)


@triton.jit
def _ended(o):
    """`o`, asked for where it stands: Triton 3.7 does not see that a branch reads it, and the compiler behind it would
    run product after product to make up for that."""
    return o.to(tl.int32, bitcast=True).to(tl.float32, bitcast=True)


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
        o_k = tl.arange(0, KEY_TILE)
        is_read = o_k <= last - tile * KEY_TILE
        if WINDOWED:
            is_read = is_read & (o_k > lowest - window - tile * KEY_TILE)
        key = tile * KEY_TILE + o_k
    else:
        key = tile * KEY_TILE
        is_read = key <= last
    return tl.load(table_ptr + (key >> block_shift), mask=is_read, other=0)


@triton.jit
def _times(block, stride):
    """Where blocks begin, int64: passes 2**31 on a large pool. Neither is negative; told so, it is one instruction."""
    if stride.dtype == tl.int32:
        stride = stride.to(tl.uint32, bitcast=True)
    return block.to(tl.uint32, bitcast=True).to(tl.int64) * stride.to(tl.int64)


@triton.jit
def _whole_numbers(b_q, IS_INT8: tl.constexpr):
    """Query rows for keys of 8 bits: integers of 15 bits as upper and lower bytes, or float16 (twice); and [ROWS] what
    they are multiplied by, a power of two, NaN of a row that is not finite. So no key is converted, or by one step."""
    BITS: tl.constexpr = 13 if IS_INT8 else 14  # the largest of a row is at least 2**BITS
    b_q = b_q.to(tl.float32)
    largest = tl.max(tl.where(b_q == b_q, tl.abs(b_q), float("inf")), 1)
    exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 64), 190)
    unit = ((exponent - BITS) << 23).to(tl.float32, bitcast=True)
    b_q = b_q * ((254 + BITS - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    if IS_INT8:
        whole = tl.where(b_q == b_q, b_q + 12582912.0 - 12582912.0, 0.0).to(tl.int32)
        upper = (whole + 128) >> 8
        b_high = upper.to(tl.int8)
        b_low = (whole - (upper << 8)).to(tl.int8)
    else:
        b_high = b_q.to(tl.float16)
        b_low = b_high
    return b_high, b_low, unit + largest * 0.0


@triton.jit
def _tile(
    q, q_low, m, l, o, tile, block, position, lowest, last, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
    block_stride, scale_stride, block_shift, window, scale, cap_scale,
    HEAD_DIM: tl.constexpr, HEAD_PADDED: tl.constexpr,
    MASKED: tl.constexpr, QUANTIZED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    SMALL_BLOCKS: tl.constexpr, KEY_TILE: tl.constexpr,
):  # fmt: skip
    """One key tile of 64 for the rows of a work item: online softmax within the split."""
    HELD: tl.constexpr = HEAD_DIM == HEAD_PADDED and HEAD_DIM <= 128
    o_d = tl.arange(0, HEAD_PADDED)
    key = tile * KEY_TILE + tl.arange(0, KEY_TILE)  # [64]
    m_d = o_d < HEAD_DIM
    # what no row sees is not read: past the end lies anybody's data, before the window nobody's
    m_k = key <= last
    if WINDOWED:
        m_k = m_k & (key > lowest - window)
    start = _times(block, block_stride)
    if SMALL_BLOCKS:
        # a tile begins where a block does, so this is the same for all; held in registers where there are enough
        offset = (tl.arange(0, KEY_TILE) if HELD else key) & ((1 << block_shift) - 1)
        at = start[:, None] + (offset[:, None] * HEAD_DIM + o_d[None, :])  # [64, HEAD_PADDED]
    else:
        within = tile * KEY_TILE & ((1 << block_shift) - 1)
        offset = within + tl.arange(0, KEY_TILE)
        k_ptr += start + within * HEAD_DIM
        v_ptr += start + within * HEAD_DIM
        at = tl.arange(0, KEY_TILE)[:, None] * HEAD_DIM + o_d[None, :]
    if MASKED:
        b_k = tl.load(k_ptr + at, mask=m_k[:, None] & m_d[None, :], other=0.0)
    elif HEAD_DIM == HEAD_PADDED:
        b_k = tl.load(k_ptr + at)
    else:
        b_k = tl.load(k_ptr + at, mask=m_d[None, :], other=0.0)
    if not QUANTIZED:
        s = tl.dot(q, tl.trans(b_k), input_precision="ieee")  # [ROWS, 64]
    elif q.dtype == tl.int8:
        b_kt = tl.trans(b_k)
        s = tl.dot(q_low, b_kt, tl.dot(q, b_kt) << 8, out_dtype=tl.int32).to(tl.float32)
    else:
        s = tl.dot(q, tl.trans(b_k.to(tl.float32).to(q.dtype)), input_precision="ieee")
    if QUANTIZED:
        scale_at = _times(block, scale_stride) + offset
        if MASKED:
            b_ks = tl.load(k_scale_ptr + scale_at, mask=m_k, other=0.0)
            b_vs = tl.load(v_scale_ptr + scale_at, mask=m_k, other=0.0)
        else:
            b_ks = tl.load(k_scale_ptr + scale_at)
            b_vs = tl.load(v_scale_ptr + scale_at)
        s = s * b_ks[None, :]
        scale_r = scale[:, None]
        cap_r = cap_scale[:, None]
    else:
        scale_r = scale
        cap_r = cap_scale
    if CAPPED:
        s = 1.0 - 2.0 / (tl.exp2(s * cap_r) + 1.0)  # tanh
    if MASKED:
        ahead = tl.arange(0, KEY_TILE)[None, :] - (position - tile * KEY_TILE)[:, None]  # [ROWS, 64] of the row
        visible = ahead <= 0
        if WINDOWED:
            visible = visible & (ahead > -window)
        s = tl.where(visible, s, float("-inf"))
    new_m = tl.maximum(m, tl.max(s, 1))
    finite = tl.where(new_m == float("-inf"), 0.0, new_m)
    p = tl.exp2(tl.fma(s, scale_r, (0.0 - finite * scale)[:, None]))
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
    if not QUANTIZED:
        o = tl.dot(p.to(q.dtype), b_v, o, input_precision="ieee")
    elif q.dtype == tl.float32:
        o = tl.dot(p, b_v.to(tl.float32), o, input_precision="ieee")
    else:
        # a weight times the scale of small values is below what float16 holds
        o = tl.dot(p.to(tl.bfloat16), b_v.to(tl.float32).to(tl.bfloat16), o)
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
        if QUANTIZED:
            b_low, unit = b_q, tl.full([ROWS], 1.0, tl.float32)
            if q_ptr.dtype.element_ty != tl.float32:
                b_q, b_low, unit = _whole_numbers(b_q, pool_ptr.dtype.element_ty == tl.int8)
            cap_r = cap_scale * unit
            if CAPPED:
                unit = unit * 0.0 + 1.0  # capped scores are of one size
            scale_r = scale * unit
        else:
            b_low, unit, scale_r, cap_r = b_q, 1.0, scale, cap_scale
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
            if not SPLIT:
                m = _begun(m, tile, SPLIT_TILES)
            after = _blocks(tile + 1, last, lowest, table_ptr, block_shift, window, WINDOWED, SMALL_BLOCKS, KEY_TILE)
            m, l, o = _tile(
                b_q, b_low, m, l, o, tile, block, position, lowest, last, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
                block_stride, scale_stride, block_shift, window, scale_r, cap_r,
                HEAD_DIM, HEAD_PADDED, False, QUANTIZED, WINDOWED, CAPPED, SMALL_BLOCKS, KEY_TILE,
            )  # fmt: skip
            block = after
            if not SPLIT:
                o = _ended(o)
                if tile % SPLIT_TILES == SPLIT_TILES - 1:
                    top, total, acc = _join(top, total, acc, m * unit, l, o, scale)
        for tile in range(clear, end):
            if not SPLIT:
                m = _begun(m, tile, SPLIT_TILES)
            after = _blocks(tile + 1, last, lowest, table_ptr, block_shift, window, WINDOWED, SMALL_BLOCKS, KEY_TILE)
            m, l, o = _tile(
                b_q, b_low, m, l, o, tile, block, position, lowest, last, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
                block_stride, scale_stride, block_shift, window, scale_r, cap_r,
                HEAD_DIM, HEAD_PADDED, True, QUANTIZED, WINDOWED, CAPPED, SMALL_BLOCKS, KEY_TILE,
            )  # fmt: skip
            block = after
            if not SPLIT:
                o = _ended(o)
                if tile % SPLIT_TILES == SPLIT_TILES - 1:
                    top, total, acc = _join(top, total, acc, m * unit, l, o, scale)
        token, q_head, m_r = _rows(item, work % slots, rows_ptr, head_tiles, group, ROWS, ".cg")
        if SPLIT:
            partial = tl.load(partial_ptr + token, mask=m_r, other=0) + tl.load(item + 3)
            at = partial.to(tl.int64) * num_q_heads + q_head  # [ROWS]
            tl.store(part_ml_ptr + at, m * unit, mask=m_r)
            tl.store(part_ml_ptr + num_partials * num_q_heads + at, l, mask=m_r)
            tl.store(part_o_ptr + at[:, None] * HEAD_DIM + o_d[None, :], o, mask=m_r[:, None] & m_d[None, :])
        else:
            m = _begun(m, end, SPLIT_TILES)
            top, total, acc = _join(top, total, acc, m * unit, l, o, scale)
            result = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
            out_at = out_ptr + ((token.to(tl.int64) * num_q_heads + q_head) * HEAD_DIM)[:, None] + o_d[None, :]
            tl.store(out_at, result, mask=m_r[:, None] & m_d[None, :])


@triton.jit
def _partial(part_o_ptr, part_ml_ptr, at, m_h, m_d, o_d, num_partials, num_q_heads, HEAD_DIM: tl.constexpr):
    """One split of [HEADS] heads, whose places are `at`; nothing where there is none."""
    m = tl.load(part_ml_ptr + at, mask=m_h, other=float("-inf"))
    l = tl.load(part_ml_ptr + num_partials * num_q_heads + at, mask=m_h, other=0.0)
    o = tl.load(part_o_ptr + at[:, None] * HEAD_DIM + o_d[None, :], mask=m_h[:, None] & m_d[None, :], other=0.0)
    return m, l, o


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
    AHEAD: tl.constexpr,  # splits read before the first of them is joined, of many
    FEW: tl.constexpr = 4,  # of those that are left
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
    many = first + (end - first) // AHEAD * AHEAD
    for begin in range(first, many, AHEAD):
        for i in tl.static_range(AHEAD):
            at = (partial + begin + i).to(tl.int64) * num_q_heads + head  # [HEADS]
            m, l, o = _partial(part_o_ptr, part_ml_ptr, at, m_h, m_d, o_d, num_partials, num_q_heads, HEAD_DIM)
            top, total, acc = _join(top, total, acc, m, l, o, scale)
    for begin in range(many, end, FEW):
        for i in tl.static_range(FEW):
            at = (partial + begin + i).to(tl.int64) * num_q_heads + head  # [HEADS]
            m_s = m_h & (begin + i < end)
            m, l, o = _partial(part_o_ptr, part_ml_ptr, at, m_s, m_d, o_d, num_partials, num_q_heads, HEAD_DIM)
            top, total, acc = _join(top, total, acc, m, l, o, scale)
    result = tl.where(position < 0, 0.0, acc / total[:, None]).to(out_ptr.dtype.element_ty)
    out_at = out_ptr + ((token * num_q_heads + head) * HEAD_DIM)[:, None] + o_d[None, :]
    tl.store(out_at, result, mask=m_h[:, None] & m_d[None, :])
