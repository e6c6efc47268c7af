"""Paged attention: right against the textbook, and the same bits however it is asked."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels.attention import attention, plan_attention

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 32
SCALE = HEAD_DIM**-0.5
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Cache:
    """A pool of NaN with one sequence's random keys and values stored in scattered blocks."""

    def __init__(self, seq_len: int, dtype: torch.dtype, block_size: int = 32, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        num_blocks = -(-seq_len // block_size)
        self.block_size = block_size
        self.pool = torch.full((2 * num_blocks + 3, 2, KV_HEADS, block_size, HEAD_DIM), float("nan")).to(dtype)
        self.table = random.Random(seed).sample(range(len(self.pool)), num_blocks)
        self.k, self.v = torch.randn(2, seq_len, KV_HEADS, HEAD_DIM, generator=generator).to(dtype)
        self.q = torch.randn(seq_len, HEADS, HEAD_DIM, generator=generator).to(dtype)
        for position in range(seq_len):
            block = self.table[position // block_size]
            self.pool[block, 0, :, position % block_size] = self.k[position]
            self.pool[block, 1, :, position % block_size] = self.v[position]

    def attend(self, first: int, last: int) -> Tensor:
        plan = plan_attention([0, last - first], [last], [self.table], self.block_size, HEADS, KV_HEADS)
        return attention(self.q[first:last], self.pool, plan, SCALE)


def textbook(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """[T, H, D], [S, KV, D] twice → [T, H, D] in float64."""
    k, v = (x.double().repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q.double(), k) * SCALE
    future = torch.arange(len(k))[None] > start + torch.arange(len(q))[:, None]
    return torch.einsum("hts,shd->thd", scores.masked_fill(future, float("-inf")).softmax(-1), v)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 1e-2), (torch.float64, 1e-13)], ids=str
)
@pytest.mark.parametrize("seq_len", [1, 2, 31, 32, 33, 63, 64, 65, 200, 511, 512, 513, 700])
def test_matches_the_textbook(seq_len: int, dtype: torch.dtype, tolerance: float) -> None:
    cache = Cache(seq_len, dtype)
    expected = textbook(cache.q, cache.k, cache.v, 0)
    torch.testing.assert_close(cache.attend(0, seq_len).double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_any_chunking_gives_the_same_bits(dtype: torch.dtype, threads: int) -> None:
    cache = Cache(1100, dtype)
    whole = cache.attend(0, 1100)
    torch.set_num_threads(threads)
    chunkings = [[1, 1099], [64] * 17 + [12], [15, 16, 17, 1052], [512, 512, 76], [130] * 8 + [60], [700, 1, 2, 397]]
    for chunks in chunkings:
        ends = list(itertools.accumulate(chunks))
        parts = [cache.attend(end - chunk, end) for chunk, end in zip(chunks, ends, strict=True)]
        assert torch.equal(torch.cat(parts), whole), chunks
    for position in (*range(0, 1100, 37), 1099):
        assert torch.equal(cache.attend(position, position + 1)[0], whole[position]), position


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_neighbours_change_nothing(dtype: torch.dtype) -> None:
    cache = Cache(900, dtype)
    other = Cache(900, dtype, seed=1)
    pool = torch.cat((cache.pool, other.pool))
    other_table = [block + len(cache.pool) for block in other.table]
    # (first row, rows): decodes, pieces and verification rows, all in one step
    mine = [(0, 1), (40, 1), (63, 2), (255, 1), (300, 3), (511, 1), (512, 1), (640, 200), (899, 1)]
    rows, cu_seqlens_q, seq_lens, tables = [], [0], [], []
    for i, (first, count) in enumerate(mine):
        rows += [cache.q[first : first + count], other.q[i * 90 : i * 90 + i + 1]]
        cu_seqlens_q += [cu_seqlens_q[-1] + count, cu_seqlens_q[-1] + count + i + 1]
        seq_lens += [first + count, i * 90 + i + 1]
        tables += [cache.table, other_table]
    plan = plan_attention(cu_seqlens_q, seq_lens, tables, 32, HEADS, KV_HEADS)
    padded = torch.cat((*rows, torch.full((5, HEADS, HEAD_DIM), float("nan"), dtype=dtype)))
    result = attention(padded, pool, plan, SCALE)
    for i, (first, count) in enumerate(mine):
        begin = cu_seqlens_q[2 * i]
        assert torch.equal(result[begin : begin + count], cache.attend(first, first + count)), (first, count)
    assert not result[-5:].any()


@pytest.mark.parametrize("block_size", [1, 16, 64, 128])
def test_block_size_does_not_enter_the_result(block_size: int) -> None:
    expected = Cache(600, torch.float32).attend(0, 600)
    assert torch.equal(Cache(600, torch.float32, block_size).attend(0, 600), expected)


def test_later_tokens_of_the_sequence_do_not_reach_an_earlier_step() -> None:
    cache = Cache(600, torch.float32)
    expected = cache.attend(100, 130)
    for block in cache.table[5:]:
        cache.pool[block] = float("inf")
    assert torch.equal(cache.attend(100, 130), expected)


def test_very_unequal_scores() -> None:
    cache = Cache(300, torch.float32)
    cache.q *= 100
    torch.testing.assert_close(cache.attend(0, 300).double(), textbook(cache.q, cache.k, cache.v, 0), rtol=0, atol=2e-4)


def test_a_block_table_that_is_too_short_is_refused() -> None:
    with pytest.raises(AssertionError):
        plan_attention([0, 1], [33], [[0]], 32, HEADS, KV_HEADS)
