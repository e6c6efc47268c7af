"""Paged attention in Triton: right against float64, and the same bits however it is asked.

In Triton's interpreter without a GPU, unchanged on one: `pytest -m gpu`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kernels.arguments import KernelArgumentError
from kernels.attention.reference import SPLIT
from kernels.attention.triton_plan import NARROW, plan_work, tile_heads
from kernels.testing import DEVICE, assert_close, guarded, lazy_pool, require_float8

from kernels.attention.triton_attention import QUANTIZED, attend, plan_attention, plan_on_device  # isort: skip

pytestmark = pytest.mark.gpu


@dataclass
class Cache:
    """Sequences of random keys and values in scattered blocks of a guarded pool that is NaN wherever none lies."""

    lens: list[int]
    head_dim: int = 64
    num_q_heads: int = 4
    num_kv_heads: int = 2
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    shared: int = 0  # leading tokens all sequences have in common, and in the same blocks
    magnitude: float = 1.0  # of keys and values
    seed: int = 0
    tables: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        size, dim, heads = self.block_size, self.head_dim, self.num_kv_heads
        stored = self.kv_dtype or self.dtype
        counts = [-(-n // size) for n in self.lens]
        num_blocks = sum(counts) + 3
        # one layer of three of a block-major pool: strided, with other layers' NaN on both sides
        self.guarded = guarded((num_blocks, 3, 2, heads, size, dim), stored, DEVICE)
        self.pool = self.guarded.tensor[:, 1]
        self.scales = None
        if stored in QUANTIZED:
            self.scales = guarded((num_blocks, 3, 2, heads, size), torch.float32, DEVICE).tensor[:, 1]
        self.kv: list[Tensor] = []  # [2, n, heads, dim] float64, as attention sees them
        ids = random.Random(self.seed).sample(range(num_blocks), num_blocks)
        for i, n in enumerate(self.lens):
            kv = torch.randn(2, n, heads, dim, generator=generator) * self.magnitude
            common = min(self.shared, n) // size if i else 0
            table = [*self.tables[0][:common], *(ids.pop() for _ in range(counts[i] - common))] if i else []
            self.tables.append(table or [ids.pop() for _ in range(counts[i])])
            if i:
                kv[:, : common * size] = self.kv[0][:, : common * size]
            self.kv.append(self._store(kv.to(DEVICE), self.tables[i]).cpu())
        total = sum(self.lens)
        self.q = torch.randn(total, self.num_q_heads, dim, generator=generator).to(self.dtype).to(DEVICE)

    def _store(self, kv: Tensor, table: list[int]) -> Tensor:
        n = kv.shape[1]
        stored = kv.to(self.pool.dtype)
        scale = torch.ones(kv.shape[:3], device=kv.device)
        if self.scales is not None:
            top = 127 if self.pool.dtype == torch.int8 else 448
            scale = kv.abs().amax(-1) / top
            scaled = kv / scale[..., None]
            stored = (scaled.round() if top == 127 else scaled).to(self.pool.dtype)
        for b, block in enumerate(table):
            part = slice(b * self.block_size, min((b + 1) * self.block_size, n))
            count = part.stop - part.start
            self.pool[block, :, :, :count] = stored[:, part].transpose(1, 2)
            if self.scales is not None:
                self.scales[block, :, :, :count] = scale[:, part].transpose(1, 2)
        return stored.double() * scale[..., None].double()

    def rows(self, pieces: list[tuple[int, int, int]]) -> Tensor:
        """The query rows of pieces (sequence, first, last)."""
        starts = [sum(self.lens[:i]) for i in range(len(self.lens))]
        return torch.cat([self.q[starts[i] + first : starts[i] + last] for i, first, last in pieces])

    def attend(
        self,
        pieces: list[tuple[int, int, int]],
        *,
        window: int = 0,
        on_device: bool = False,
        padding: int = 0,
        soft_cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        q = torch.cat([self.rows(pieces), self.q.new_full((padding, *self.q.shape[1:]), float("nan"))])
        cu = [0]
        for _, first, last in pieces:
            cu.append(cu[-1] + last - first)
        lens = [last for _, _, last in pieces]
        tables = [self.tables[i] for i, _, _ in pieces]
        sizes = (self.block_size, self.num_q_heads, self.num_kv_heads, self.head_dim)
        quantized = self.scales is not None
        if on_device:
            width = max(len(table) for table in tables)
            padded = torch.tensor([[*table, *[1 << 30] * (width - len(table))] for table in tables], dtype=torch.int32)
            ints = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (cu, lens))
            most = max(last - first for _, first, last in pieces)
            rest = (q.shape[0], most, max(lens), *sizes, window, quantized)
            plan = plan_on_device(*ints, padded.to(DEVICE), *rest)
        else:
            plan = plan_attention(cu, lens, tables, *sizes, DEVICE, window, quantized)
        return attend(q, self.pool, plan, self.head_dim**-0.5, soft_cap, sinks, self.scales)

    def textbook(
        self,
        pieces: list[tuple[int, int, int]],
        *,
        window: int = 0,
        soft_cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """What `attend` says, in float64 by the book."""
        group, outs = self.num_q_heads // self.num_kv_heads, []
        for piece in pieces:
            i, first, last = piece
            k, v = (x[:last].repeat_interleave(group, dim=1) for x in self.kv[i])
            scores = torch.einsum("thd,shd->hts", self.rows([piece]).cpu().double(), k) * self.head_dim**-0.5
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            position, key = torch.arange(first, last)[:, None], torch.arange(last)[None]
            hidden = key > position
            if window:
                hidden |= key <= position - window
            scores = scores.masked_fill(hidden, float("-inf"))
            if sinks is not None:
                extra = sinks.cpu().double()[:, None, None].expand(-1, last - first, 1)
                scores = torch.cat([scores, extra], dim=-1)
            outs.append(torch.einsum("hts,shd->thd", scores.softmax(-1)[..., :last], v))
        return torch.cat(outs)


DTYPES = [
    (torch.float32, None),
    (torch.float16, None),
    (torch.bfloat16, None),
    (torch.bfloat16, torch.int8),
    (torch.float16, torch.int8),
    (torch.bfloat16, torch.float8_e4m3fn),
]


CASES = [(64, *pair) for pair in DTYPES]
CASES += [(dim, torch.bfloat16, None) for dim in (80, 96, 128, 256)]
CASES += [
    (128, torch.float16, torch.int8),
    (128, torch.bfloat16, torch.float8_e4m3fn),
    (256, torch.float16, torch.int8),
]


@pytest.mark.parametrize(("head_dim", "dtype", "kv_dtype"), CASES, ids=str)
def test_like_the_textbook(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    """A row, several rows, a piece wider than an item, over odd lengths in one batch."""
    require_float8(kv_dtype)
    cache = Cache([1, 63, 100], head_dim, 4, 1, 32, dtype, kv_dtype)
    pieces = [(0, 0, 1), (1, 58, 63), (2, 65, 100)]
    # of 8-bit values even float16 rows are weighed in bfloat16
    assert_close(cache.attend(pieces), cache.textbook(pieces), torch.bfloat16 if kv_dtype else dtype)
    cache.guarded.check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_small_values_of_a_quantized_pool_keep_their_precision(dtype: torch.dtype) -> None:
    cache = Cache([130], dtype=dtype, kv_dtype=torch.int8, magnitude=5e-5)
    pieces = [(0, 129, 130)]
    assert_close(cache.attend(pieces, window=4), cache.textbook(pieces, window=4), torch.bfloat16)


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), (14, 2), (9, 3), (71, 1), (16, 1)])
def test_any_grouping_of_heads(heads: int, kv_heads: int) -> None:
    cache = Cache([70, 20], 64, heads, kv_heads)
    pieces = [(0, 69, 70), (1, 17, 20)]
    assert_close(cache.attend(pieces), cache.textbook(pieces), torch.bfloat16)


@pytest.mark.parametrize("block_size", [8, 64, 128, 1024])
def test_any_block_size(block_size: int) -> None:
    cache = Cache([130, 20], block_size=block_size)
    pieces = [(0, 90, 130), (1, 19, 20)]
    assert_close(cache.attend(pieces), cache.textbook(pieces), torch.bfloat16)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    ("window", "soft_cap", "sinks"), [(1, 0, False), (100, 0, True), (0, 5.0, False), (70, 3.0, True), (9999, 0, True)]
)
def test_window_soft_cap_and_sinks(window: int, soft_cap: float, sinks: bool, on_device: bool) -> None:
    cache = Cache([600, 90])
    some = torch.randn(4, generator=torch.Generator().manual_seed(1)).to(DEVICE) if sinks else None
    pieces = [(0, 598, 600), (1, 41, 90)]
    got = cache.attend(pieces, window=window, on_device=on_device, soft_cap=soft_cap, sinks=some)
    assert_close(got, cache.textbook(pieces, window=window, soft_cap=soft_cap, sinks=some), torch.bfloat16)


def test_blocks_before_the_window_are_not_read() -> None:
    cache = Cache([600])
    freed = (600 - 64 + 1) // 16
    cache.pool[cache.tables[0][:freed]] = float("nan")
    cache.tables[0][:freed] = [-1] * freed
    pieces = [(0, 599, 600)]
    cache.kv[0][:, : freed * 16] = 0
    assert_close(cache.attend(pieces, window=64), cache.textbook(pieces, window=64), torch.bfloat16)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "head_dim", "window"),
    [
        (torch.bfloat16, None, 128, 0),
        (torch.float16, None, 64, 0),
        (torch.bfloat16, torch.int8, 64, 0),
        (torch.bfloat16, None, 80, 70),
        pytest.param(torch.bfloat16, None, 256, 0, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_same_bits_however_it_is_asked(
    dtype: torch.dtype, kv_dtype: torch.dtype | None, head_dim: int, window: int
) -> None:
    """Prefill, chunks, verification and decode; alone and in company; planned on the host and on the device."""
    cache = Cache([590, 530], head_dim, 8, 1, 16, dtype, kv_dtype, shared=512)
    first, last = 570, 590
    whole = cache.attend([(0, first, last)], window=window)
    assert_close(whole, cache.textbook([(0, first, last)], window=window), dtype)
    for on_device, pieces in (
        (False, [(0, first, 575), (0, 575, last)]),
        (False, [(0, last - 1, last), (1, 529, 530)]),
        (True, [(1, 529, 530), (0, last - 4, last)]),
        (True, [(1, 510, 530), (0, last - 12, last), (1, 0, 1)]),
    ):
        got = cache.attend(pieces, window=window, on_device=on_device, padding=3)
        assert torch.equal(got[-3:], torch.zeros_like(got[-3:]))
        row = 0
        for i, start, end in pieces:
            if i == 0:
                assert torch.equal(got[row : row + end - start], whole[start - first : end - first]), (pieces, start)
            row += end - start


@pytest.mark.parametrize("last", [1024, 1025])
def test_rows_that_end_where_a_split_does(last: int) -> None:
    """Prefill adds a split when its last tile is done, or at the end, and never twice."""
    cache = Cache([last], num_q_heads=8, num_kv_heads=1)
    whole = cache.attend([(0, last - 16, last)])
    assert_close(whole, cache.textbook([(0, last - 16, last)]), torch.bfloat16)
    for row in (0, 14, 15):
        first = last - 16 + row
        assert torch.equal(cache.attend([(0, first, first + 1)])[0], whole[row])


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_rows_of_any_size_over_8_bits(kv_dtype: torch.dtype) -> None:
    """Each is multiplied as whole numbers of its own size; one that is not finite spoils itself alone."""
    require_float8(kv_dtype)
    cache = Cache([90], kv_dtype=kv_dtype)
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    sizes = torch.tensor([1e-30, 1e-4, 1.0, 300.0, 0.0]).to(torch.bfloat16).to(DEVICE)
    cache.q[85:] *= sizes[:, None, None]
    pieces = [(0, 85, 90)]
    for asked in ({}, {"soft_cap": 5.0, "sinks": sinks, "window": 70}):
        wanted = cache.textbook(pieces, **asked)
        got = cache.attend(pieces, **asked)
        for row in range(5):
            assert_close(got[row], wanted[row], torch.bfloat16)
    before = cache.attend(pieces)
    for bad in (float("nan"), float("inf")):
        cache.q[86, 1, 3] = bad
        after = cache.attend(pieces)
        assert after[1, 1].isnan().all()
        after[1, 1] = before[1, 1]
        assert torch.equal(after, before)


def test_a_shared_prefix_is_read_once_and_changes_no_bit() -> None:
    cache = Cache([1100, 1090, 600, 40], shared=1024)
    pieces = [(0, 1099, 1100), (1, 1086, 1090), (2, 599, 600), (3, 39, 40)]
    together = cache.attend(pieces)
    alone = torch.cat([cache.attend([piece]) for piece in pieces])
    assert torch.equal(together, alone)
    assert_close(together, cache.textbook(pieces), torch.bfloat16)
    cu, lens = [0, 1, 5, 6, 7], [1100, 1090, 600, 40]
    items = plan_work(cu, lens, cache.tables, 16, 4, 2).launches[0].items
    # splits 0 and 1 of the first two and split 0 of the third with them; then what each has alone
    assert sorted(zip(items[:, 1].tolist(), items[:, 3].tolist(), strict=True)) == sorted(
        [(6, 0), (5, 1), (1, 2), (4, 2), (1, 1), (1, 0)]
    )


@pytest.mark.parametrize(("size", "kv_dtype"), [(64, torch.bfloat16), (16, torch.bfloat16), (16, torch.int8)], ids=str)
def test_offsets_beyond_2_to_the_31(size: int, kv_dtype: torch.dtype) -> None:
    """A pool of 3 or 6 GiB of which a few blocks are touched."""
    dim, last = 128, 24575 * (64 // size)
    pool = lazy_pool((last + 1, 8, 2, 1, size, dim), kv_dtype, DEVICE)
    assert pool.stride(0) * last > 1 << 31
    table = [last, 3, *range(last - 400, last - 400 + 150 // size)]
    kv = torch.randint(-9, 10, (2, 150, 1, dim), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16) / 4
    scales = torch.full((last + 1, 2, 1, size), 0.25, device=DEVICE) if kv_dtype == torch.int8 else None
    for position in range(150):
        row = kv[:, position] * 4 if kv_dtype == torch.int8 else kv[:, position]
        pool[table[position // size], 7, :, :, position % size] = row.to(kv_dtype).to(DEVICE)
    q = torch.randn(1, 4, dim, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    plan = plan_attention([0, 1], [150], [table], size, 4, 1, dim, DEVICE, 0, kv_dtype == torch.int8)
    got = attend(q.to(DEVICE), pool[:, 7], plan, dim**-0.5, kv_scales=scales)
    k, v = kv[:, :, 0].double()
    weights = torch.softmax(q[0].double() @ k.T * dim**-0.5, -1)
    assert_close(got[0], weights @ v, torch.bfloat16)


def test_sequences_without_rows() -> None:
    cache = Cache([40, 70])
    for on_device in (False, True):
        got = cache.attend([(0, 40, 40), (1, 68, 70), (0, 0, 0)], on_device=on_device)
        assert_close(got, cache.textbook([(1, 68, 70)]), torch.bfloat16)


@pytest.mark.parametrize("heads_per_kv", [1, 3, 8, 100])
def test_every_row_meets_every_split_once(heads_per_kv: int) -> None:
    """Over random batches: no item is too large, and each row's keys are covered exactly once."""
    rng = random.Random(heads_per_kv)
    places, _ = tile_heads(heads_per_kv)
    for window in (0, 300):
        for _ in range(20):
            queries = [rng.choice([0, 1, 1, 1, 4, 30, 200]) for _ in range(rng.randint(1, 6))]
            lens = [n + rng.choice([0, 1, 511, 512, 1500]) for n in queries]
            cu = [sum(queries[:i]) for i in range(len(queries) + 1)]
            shared = rng.choice([0, 40])
            tables = [[b if b < shared else 1000 * (i + 1) + b for b in range(-(-n // 32))] for i, n in enumerate(lens)]
            work = plan_work(cu, lens, tables, 32, 2 * heads_per_kv, 2, window=window, programs=rng.choice([1, 400]))
            seen: dict[tuple[int, int], int] = {}
            for launch in work.launches:
                for first, tokens, _, split, shift, low, high in launch.items.tolist():
                    of_item = work.positions[work.rows[first : first + tokens]]
                    assert (low, high) == (of_item.min(), of_item.max())
                    assert 0 < tokens << shift <= launch.rows
                    assert 1 << shift == places
                    for token in work.rows[first : first + tokens].tolist():
                        position = int(work.positions[token])
                        begin = max(position - window + 1, 0) // SPLIT if window else 0
                        splits = range(begin, position // SPLIT + 1) if split < 0 else [split]
                        for s in splits:
                            seen[token, s] = seen.get((token, s), 0) + 1
            for token, position in enumerate(work.positions.tolist()):
                low = max(position - window + 1, 0) // SPLIT if window else 0
                assert all(seen.pop((token, s)) == 1 for s in range(low, position // SPLIT + 1))
            # what is left are splits that other rows of the item need and this one does not see
            assert all(count == 1 for count in seen.values())
            places_of = [
                int(work.partials[token]) + split
                for launch in work.launches
                for first, tokens, _, split, *_ in launch.items.tolist()
                for token in work.rows[first : first + tokens].tolist()
                if launch.split
            ]
            assert sorted(places_of) == sorted(set(places_of))
            assert all(0 <= place < work.num_partials for place in places_of)


def good() -> dict[str, object]:
    cache = Cache([70])
    plan = plan_attention([0, 1], [70], cache.tables, 16, 4, 2, 64, DEVICE)
    return {"q": cache.q[:1], "pool": cache.pool, "plan": plan, "scale": 0.125}


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("q", lambda q: q.double(), "q is torch.float64, expected torch.bfloat16"),
        ("q", lambda q: q[:, :3], r"q has shape \[1, 3, 64\], expected \[any, 4, 64\]"),
        ("q", lambda q: q[:0], r"q has shape \[0, 4, 64\], fewer rows than the plan's 1"),
        ("q", lambda q: q.repeat(1, 1, 2)[:, :, ::2], r"q of shape \[1, 4, 64\] has strides"),
        ("pool", lambda p: p.half(), "pool is torch.float16, expected torch.bfloat16"),
        ("pool", lambda p: p[:, :, :, :8], r"pool has shape .* expected \[any, 2, 2, 16, 64\]"),
        ("pool", lambda p: p[..., :32].repeat(1, 1, 1, 1, 2).transpose(3, 4).contiguous().transpose(3, 4), "strides"),
        ("pool", lambda p: p[:2], "block_tables name blocks .* outside pool of shape"),
        ("pool", lambda p: p.to(torch.int8), "pool is torch.int8, the plan is of a quantized pool: False"),
        ("scale", lambda _: 0.0, "scale is 0.0"),
    ],
)
def test_a_wrong_argument_is_named_before_the_launch(name: str, change: object, words: str) -> None:
    arguments = good()
    arguments[name] = change(arguments[name])  # type: ignore[operator]
    with pytest.raises(KernelArgumentError, match=words):
        attend(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([0, 2], [1], [[0]], 16, 4, 2, 64), "2 query rows, seq_lens 1"),
        (([0, 1], [33], [[0, 1]], 16, 4, 2, 64), r"block_tables\[0\] has 2 blocks of 16 for seq_lens 33"),
        (([0, 1], [3, 4], [[0]], 16, 4, 2, 64), "differ"),
        (([0, 1], [3], [[0]], 24, 4, 2, 64), "block_size 24 is not a power of two"),
        (([0, 1], [3], [[0]], 16, 5, 2, 64), "num_q_heads 5 is not a multiple of num_kv_heads 2"),
        (([0, 1], [3], [[0]], 16, 4, 2, 72), "head_dim is 72, expected one of 64, 80, 96, 128, 256"),
    ],
)
def test_a_wrong_plan_is_named(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(KernelArgumentError, match=words):
        plan_attention(*arguments, DEVICE)  # type: ignore[arg-type]


def test_nothing_to_do() -> None:
    plan = plan_attention([0, 0], [5], [[0]], 16, 4, 2, 64, DEVICE)
    pool = torch.zeros(1, 2, 2, 16, 64, dtype=torch.bfloat16, device=DEVICE)
    got = attend(torch.full((2, 4, 64), float("nan"), dtype=torch.bfloat16, device=DEVICE), pool, plan, 0.125)
    assert torch.equal(got, torch.zeros_like(got))
    assert NARROW == 64
