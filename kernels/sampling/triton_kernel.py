"""Sampling on the device, as `kernels.sampling.sample` defines it: the same tokens from the same logits.

No launch waits for the host: adjust (penalties, bias, mask, temperature), filter (`triton_filter`), draw, choose. A row
is cut into splits of a fixed size, so that a small batch fills the device too; what splits leave is put together in
order, so that a row depends on nothing but itself. What a row does not ask for costs it the look at a number: captured
steps launch the same kernels whatever their rows want.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling.noise import NOISE_MAX, NOISE_MIN
from kernels.sampling.triton_filter import (
    BINS,
    CANDIDATES,
    GREEDY,
    distance_bits,
    gather_kernel,
    histogram_kernel,
    limit_kernel,
)
from kernels.sampling.triton_noise import gumbel_noise, noise_words, rough_noise
from kernels.sampling.triton_rows import Drawn, SamplingRows, check_drawn, check_rows_of, empty_drawn

SPLIT = 4096
"""Tokens of a split."""
_LIMIT_BLOCK = 2048
_MAX_GAP: tl.constexpr = tl.constexpr(NOISE_MAX - NOISE_MIN)
_NO_ID: tl.constexpr = tl.constexpr(0x7FFFFFFF)
_LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)
_ROUGH: tl.constexpr = tl.constexpr(1e-3)
"""Further behind by rough noise, a token is behind by exact noise."""


@triton.jit
def adjust_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    scaled_ptr,  # [num_rows, vocab_size] float32, written
    part_max_ptr,  # [num_rows, num_splits] float32, written
    part_id_ptr,  # [num_rows, num_splits] int32, written: the lowest id at part_max
    part_mass_ptr,  # [num_rows, num_splits] float64, written where top-p is on: sum of exp(scaled - part_max)
    raw_ptr,  # [num_rows, num_splits, 2] float32, written: largest logit as given, sum of exp(logit - it)
    broken_ptr,  # [num_rows, num_splits] int32, written: 1 where a logit is no number or infinite, given or adjusted
    temperature_ptr,  # [num_rows] float32
    top_p_ptr,  # [num_rows] float64
    repetition_ptr, presence_ptr, frequency_ptr,  # [num_rows] float32, with HAS_PENALTIES
    penalty_line_ptr,  # [num_rows] int32
    counts_ptr,  # [num_lines, vocab_size] int32
    prompts_ptr,  # [num_lines, mask_words] int32
    draft_ptr, first_ptr,  # [num_rows] int32, with HAS_DRAFTS
    bias_line_ptr,  # [num_rows] int32, with HAS_BIAS
    bias_ids_ptr,  # [num_lines, num_biases] int32, ascending
    bias_values_ptr,  # [num_lines, num_biases] float32
    mask_line_ptr,  # [num_rows] int32, with HAS_MASK
    mask_ptr,  # [num_lines, mask_words] int32
    vocab_size,
    mask_words,
    num_biases,
    BLOCK: tl.constexpr,
    BIASES: tl.constexpr,  # power of two >= num_biases
    HAS_PENALTIES: tl.constexpr,
    HAS_DRAFTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Grid: (num_rows, num_splits)."""
    i_r, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_v = i_s * BLOCK + tl.arange(0, BLOCK)
    m_v = o_v < vocab_size
    b_x = tl.load(logits_ptr + i_r * vocab_size + o_v, mask=m_v, other=float("-inf")).to(tl.float32)  # [BLOCK]
    broken = _broken(b_x)
    # not a number is never drawn
    b_x = tl.where(b_x == b_x, tl.minimum(b_x, _LARGEST), float("-inf"))
    i_part = i_r * tl.num_programs(1) + i_s
    top = tl.max(b_x, axis=0)
    tl.store(raw_ptr + 2 * i_part, top)
    shifted = b_x - tl.where(top == float("-inf"), 0.0, top)
    tl.store(raw_ptr + 2 * i_part + 1, tl.sum(tl.exp(shifted), axis=0))
    if HAS_PENALTIES:
        line = tl.load(penalty_line_ptr + i_r).to(tl.int64)
        if line >= 0:
            b_count = tl.load(counts_ptr + line * vocab_size + o_v, mask=m_v, other=0)
            if HAS_DRAFTS:
                for i in range(tl.load(first_ptr + i_r), tl.program_id(0)):
                    b_count += (o_v == tl.load(draft_ptr + i)).to(tl.int32)
            b_word = tl.load(prompts_ptr + line * mask_words + o_v // 32, mask=m_v, other=0)
            seen = (b_count > 0) | (((b_word >> (o_v % 32)) & 1) > 0)
            by = tl.load(repetition_ptr + i_r)
            b_x = tl.where(seen, tl.where(b_x > 0, tl.div_rn(b_x, by), b_x * by), b_x)
            b_x -= tl.load(frequency_ptr + i_r) * b_count.to(tl.float32)
            b_x -= tl.where(b_count > 0, tl.load(presence_ptr + i_r), 0.0)
    if HAS_BIAS:
        line = tl.load(bias_line_ptr + i_r).to(tl.int64)
        if line >= 0:
            o_b = tl.arange(0, BIASES)
            b_id = tl.load(bias_ids_ptr + line * num_biases + o_b, mask=o_b < num_biases, other=_NO_ID)  # [BIASES]
            before = tl.sum((b_id < i_s * BLOCK).to(tl.int32), axis=0)
            end = tl.sum((b_id < tl.minimum((i_s + 1) * BLOCK, vocab_size)).to(tl.int32), axis=0)
            for i in range(before, end):
                hit = o_v == tl.load(bias_ids_ptr + line * num_biases + i)
                b_x += tl.where(hit, tl.load(bias_values_ptr + line * num_biases + i), 0.0)
    if HAS_MASK:
        line = tl.load(mask_line_ptr + i_r).to(tl.int64)
        if line >= 0:
            b_word = tl.load(mask_ptr + line * mask_words + o_v // 32, mask=m_v, other=0)
            b_x = tl.where(((b_word >> (o_v % 32)) & 1) > 0, b_x, float("-inf"))
    tl.store(broken_ptr + i_part, broken | _broken(b_x))
    temperature = tl.load(temperature_ptr + i_r)
    b_x = tl.div_rn(b_x, tl.where(temperature < GREEDY, 1.0, temperature))
    # a small temperature can take a difference of logits past float32
    b_x = tl.minimum(b_x, _LARGEST)
    tl.store(scaled_ptr + i_r * vocab_size + o_v, b_x, mask=m_v)
    best, best_id = _best(b_x, o_v, m_v)
    tl.store(part_max_ptr + i_part, best)
    tl.store(part_id_ptr + i_part, best_id)
    if tl.load(top_p_ptr + i_r) < 1.0:
        away = (b_x - tl.where(best == float("-inf"), 0.0, best)).to(tl.float64)
        tl.store(part_mass_ptr + i_part, tl.sum(tl.exp(away), axis=0))


@triton.jit
def _broken(b_x):
    """1 where a value is no number, or plus infinity."""
    return tl.max(((b_x != b_x) | (b_x == float("inf"))).to(tl.int32), axis=0)


@triton.jit
def _best(b_x, o_v, m_v):
    """The largest value and the lowest id that has it."""
    best = tl.max(tl.where(m_v, b_x, float("-inf")), axis=0)
    return best, tl.min(tl.where(m_v & (b_x == best), o_v, _NO_ID), axis=0)


@triton.jit
def draw_kernel(
    scaled_ptr,  # [num_rows, vocab_size] float32
    max_ptr,  # [num_rows] float32
    limit_ptr,  # [num_rows, 2] int32
    temperature_ptr,  # [num_rows] float32
    seed_ptr,  # [num_rows] int64
    position_ptr,  # [num_rows] int64
    score_ptr,  # [num_rows, num_splits] float32, written but for greedy rows
    score_id_ptr,  # [num_rows, num_splits] int32, written
    vocab_size,
    BLOCK: tl.constexpr,
):
    """The best of a split's survivors with noise. Grid: (num_rows, num_splits)."""
    i_r, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(temperature_ptr + i_r) < GREEDY:
        return
    o_v = i_s * BLOCK + tl.arange(0, BLOCK)
    m_v = o_v < vocab_size
    b_x = tl.load(scaled_ptr + i_r * vocab_size + o_v, mask=m_v, other=float("-inf"))  # [BLOCK]
    best = tl.load(max_ptr + i_r)
    bits = distance_bits(b_x, best)
    limit, last_id = tl.load(limit_ptr + 2 * i_r), tl.load(limit_ptr + 2 * i_r + 1)
    kept = m_v & ((bits < limit) | ((bits == limit) & (o_v <= last_id)))
    # no noise brings back a token further behind
    kept = kept & (best - b_x <= _MAX_GAP)
    score, score_id = float("-inf"), 0x7FFFFFFF
    if tl.max(kept.to(tl.int32), axis=0) > 0:
        words = noise_words(tl.load(seed_ptr + i_r), tl.load(position_ptr + i_r), i_s * BLOCK, BLOCK)
        b_rough = tl.where(kept, b_x - best + rough_noise(words), float("-inf"))
        near = b_rough >= tl.max(b_rough, axis=0) - _ROUGH
        # nearly always one token is so far ahead that only its noise is wanted to the last bit
        if tl.sum(near.to(tl.int32), axis=0) == 1:
            word = tl.sum(tl.where(near, words.to(tl.int64), 0), axis=0)
            score = tl.max(tl.where(near, b_x - best, float("-inf")), axis=0) + gumbel_noise(word)
            score_id = tl.max(tl.where(near, o_v, 0), axis=0)
        else:
            score, score_id = _best(b_x - best + gumbel_noise(words), o_v, kept)
    i_part = i_r * tl.num_programs(1) + i_s
    tl.store(score_ptr + i_part, score)
    tl.store(score_id_ptr + i_part, score_id)


@triton.jit
def choose_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    part_max_ptr, part_id_ptr,  # [num_rows, num_splits], of greedy rows
    score_ptr, score_id_ptr,  # [num_rows, num_splits], of the others
    raw_ptr,  # [num_rows, num_splits, 2] float32
    broken_ptr,  # [num_rows, num_splits] int32
    temperature_ptr,  # [num_rows] float32
    scored_ptr,  # [num_rows] int32, with HAS_SCORED
    penalty_line_ptr,  # [num_rows] int32, with COUNTS
    counts_ptr,  # [num_lines, vocab_size] int32, written
    token_ptr,  # [num_rows] int32, written
    finite_ptr,  # [num_rows] int32, written
    logprob_ptr,  # [num_rows] float32, written
    log_sum_ptr,  # [num_rows] float32, written
    vocab_size,
    num_splits,
    SPLITS: tl.constexpr,  # power of two >= num_splits
    HAS_SCORED: tl.constexpr,
    COUNTS: tl.constexpr,
):  # fmt: skip
    """Grid: (num_rows,)."""
    i_r = tl.program_id(0).to(tl.int64)
    o_s = tl.arange(0, SPLITS)
    m_s = o_s < num_splits
    o_part = i_r * num_splits + o_s
    # an integer: Triton's interpreter does not broadcast the truth of floats
    greedy = (tl.load(temperature_ptr + i_r) < GREEDY).to(tl.int32)
    b_score = tl.load(part_max_ptr + o_part, mask=m_s & (greedy > 0), other=float("-inf"))
    b_id = tl.load(part_id_ptr + o_part, mask=m_s & (greedy > 0), other=0x7FFFFFFF)
    if greedy == 0:
        b_score = tl.load(score_ptr + o_part, mask=m_s, other=float("-inf"))
        b_id = tl.load(score_id_ptr + o_part, mask=m_s, other=0x7FFFFFFF)
    best = tl.max(b_score, axis=0)
    token = tl.min(tl.where(m_s & (b_score == best), b_id, _NO_ID), axis=0)
    # a row with nothing to draw from
    token = tl.where(token < vocab_size, token, 0)
    broken = tl.max(tl.load(broken_ptr + o_part, mask=m_s, other=0), axis=0)
    tl.store(token_ptr + i_r, token)
    tl.store(finite_ptr + i_r, tl.where((best > float("-inf")) & (broken == 0), 1, 0))
    if COUNTS:
        line = tl.load(penalty_line_ptr + i_r).to(tl.int64)
        tl.atomic_add(counts_ptr + line * vocab_size + token, 1, mask=line >= 0)
    b_top = tl.load(raw_ptr + 2 * o_part, mask=m_s, other=float("-inf"))  # [SPLITS]
    b_sum = tl.load(raw_ptr + 2 * o_part + 1, mask=m_s, other=0.0)  # [SPLITS]
    top = tl.max(b_top, axis=0)
    log_sum = top + tl.log(tl.sum(b_sum * tl.exp(b_top - top), axis=0))
    told = token
    if HAS_SCORED:
        scored = tl.load(scored_ptr + i_r)
        told = tl.where(scored >= 0, scored, token)
    logit = tl.load(logits_ptr + i_r * vocab_size + told).to(tl.float32)
    tl.store(logprob_ptr + i_r, logit - log_sum)
    tl.store(log_sum_ptr + i_r, log_sum)


def sample(logits: Tensor, rows: SamplingRows, out: Drawn | None = None) -> Drawn:
    """One token per row, with its log-probability.

    Order: repetition, frequency and presence penalties, bias, grammar mask; then as `kernels.sampling.sample`:
    temperature, top-k, top-p, min-p (at least that share of the best token's probability), the draw.

    Args:
        logits: [num_rows, vocab_size] float32, bfloat16 or float16, contiguous. NaN is never drawn.
        out: written, where given, and returned.

    Raises:
        KernelArgumentError: a tensor is not as described.
    """
    check_rows_of(logits, rows)
    num_rows, vocab_size = logits.shape
    splits = triton.cdiv(vocab_size, SPLIT)
    device = logits.device
    if out is None:
        out = empty_drawn(num_rows, device)
    check_drawn(out, logits)
    if num_rows == 0:
        return out

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    scaled, part_max, score = empty(num_rows, vocab_size), empty(num_rows, splits), empty(num_rows, splits)
    part_id, score_id, broken = (empty(num_rows, splits, dtype=torch.int32) for _ in range(3))
    part_mass, raw = empty(num_rows, splits, dtype=torch.float64), empty(num_rows, splits, 2)
    best, limit = empty(num_rows), empty(num_rows, 2, dtype=torch.int32)
    room = min(vocab_size, CANDIDATES)
    penalties, bias, mask, drafts, scored = rows.penalties, rows.bias, rows.mask, rows.drafts, rows.scored
    num_biases = bias.ids.shape[1] if bias else 0
    adjust_kernel[(num_rows, splits)](
        logits_ptr=logits,
        scaled_ptr=scaled,
        part_max_ptr=part_max,
        part_id_ptr=part_id,
        part_mass_ptr=part_mass,
        raw_ptr=raw,
        broken_ptr=broken,
        temperature_ptr=rows.temperature,
        top_p_ptr=rows.top_p,
        repetition_ptr=penalties.repetition if penalties else raw,
        presence_ptr=penalties.presence if penalties else raw,
        frequency_ptr=penalties.frequency if penalties else raw,
        penalty_line_ptr=penalties.lines if penalties else part_id,
        counts_ptr=penalties.counts if penalties else part_id,
        prompts_ptr=penalties.prompts if penalties else part_id,
        draft_ptr=drafts.tokens if drafts else part_id,
        first_ptr=drafts.firsts if drafts else part_id,
        bias_line_ptr=bias.lines if bias else part_id,
        bias_ids_ptr=bias.ids if bias else part_id,
        bias_values_ptr=bias.values if bias else raw,
        mask_line_ptr=mask.lines if mask else part_id,
        mask_ptr=mask.bits if mask else part_id,
        vocab_size=vocab_size,
        mask_words=triton.cdiv(vocab_size, 32),
        num_biases=num_biases,
        BLOCK=SPLIT,
        BIASES=triton.next_power_of_2(max(num_biases, 1)),
        HAS_PENALTIES=penalties is not None,
        HAS_DRAFTS=drafts is not None,
        HAS_BIAS=bias is not None,
        HAS_MASK=mask is not None,
        num_warps=8,
        # numpy rounds a product before it is taken off
        enable_fp_fusion=False,
    )
    filters = {
        "scaled_ptr": scaled,
        "part_max_ptr": part_max,
        "temperature_ptr": rows.temperature,
        "top_k_ptr": rows.top_k,
        "top_p_ptr": rows.top_p,
        "vocab_size": vocab_size,
        "SPLITS": triton.next_power_of_2(splits),
        "num_warps": 8,
    }
    gathered = {
        "value_ptr": empty(num_rows, room),
        "id_ptr": empty(num_rows, room, dtype=torch.int32),
        "mass_ptr": empty(num_rows, dtype=torch.float64),
        "found_ptr": empty(num_rows, 2, dtype=torch.int32),
        "candidates": room,
    }
    histogram = empty(num_rows, splits, BINS.value, dtype=torch.int32)
    histogram_kernel[(num_rows, splits)](**filters, histogram_ptr=histogram, BLOCK=SPLIT)
    gather_kernel[(num_rows, splits)](
        **filters, **gathered, part_mass_ptr=part_mass, histogram_ptr=histogram, BLOCK=SPLIT
    )
    limit_kernel[(num_rows,)](
        **filters,
        **gathered,
        min_p_ptr=rows.min_p,
        max_ptr=best,
        limit_ptr=limit,
        num_splits=splits,
        BLOCK=_LIMIT_BLOCK,
    )
    draw_kernel[(num_rows, splits)](
        scaled_ptr=scaled,
        max_ptr=best,
        limit_ptr=limit,
        temperature_ptr=rows.temperature,
        seed_ptr=rows.seed,
        position_ptr=rows.position,
        score_ptr=score,
        score_id_ptr=score_id,
        vocab_size=vocab_size,
        BLOCK=SPLIT,
        num_warps=8,
    )
    choose_kernel[(num_rows,)](
        logits_ptr=logits,
        part_max_ptr=part_max,
        part_id_ptr=part_id,
        score_ptr=score,
        score_id_ptr=score_id,
        raw_ptr=raw,
        broken_ptr=broken,
        temperature_ptr=rows.temperature,
        scored_ptr=part_id if scored is None else scored,
        penalty_line_ptr=penalties.lines if penalties else part_id,
        counts_ptr=penalties.counts if penalties else part_id,
        token_ptr=out.tokens,
        finite_ptr=out.finite,
        logprob_ptr=out.logprobs,
        log_sum_ptr=out.log_sums,
        vocab_size=vocab_size,
        num_splits=splits,
        SPLITS=triton.next_power_of_2(splits),
        HAS_SCORED=scored is not None,
        COUNTS=penalties is not None and drafts is None,
        num_warps=1,
    )
    return out
