"""store_kv and whole blocks in Triton. In its interpreter without a GPU, unchanged on one: `pytest -m gpu`."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from kernels.arguments import KernelArgumentError
from kernels.store_kv import plan_store
from kernels.store_kv import store_kv as store_kv_reference
from kernels.store_kv.digest import span_sums
from kernels.testing import DEVICE, guarded, guarded_like, lazy_pool, require_float8

from kernels.store_kv.triton_blocks import digest_blocks, gather_blocks, move_blocks, scatter_blocks, zero_blocks  # isort: skip
from kernels.store_kv.triton_kernel import store_kv  # isort: skip

pytestmark = pytest.mark.gpu


def new_rows(num_tokens: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """K and V as a projection leaves them: behind the query heads, strided."""
    generator = torch.Generator().manual_seed(num_tokens)
    qkv = torch.randn(num_tokens, 3 + 2 * num_kv_heads, head_dim, generator=generator).to(dtype).to(DEVICE)
    return qkv[:, 3:].view(num_tokens, 2, num_kv_heads, head_dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_kv_heads", "head_dim", "block_size"), [(1, 64, 16), (3, 80, 8), (8, 128, 64)])
def test_like_the_reference(num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    slots = [17, -1, 0, 4 * block_size - 1, -1, 5]
    kv = new_rows(len(slots), num_kv_heads, head_dim, dtype)
    pool = guarded((4, 3, 2, num_kv_heads, block_size, head_dim), dtype, DEVICE)
    wanted = pool.tensor.cpu().clone()
    store_kv(kv, pool.tensor[:, 1], torch.tensor(slots, device=DEVICE))
    store_kv_reference(kv.cpu(), wanted[:, 1], plan_store(slots, block_size))
    assert torch.equal(pool.tensor.cpu().view(torch.uint8), wanted.view(torch.uint8))
    pool.check()


@pytest.mark.parametrize("pool_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_quantized_row_is_within_half_a_step(dtype: torch.dtype, pool_dtype: torch.dtype) -> None:
    require_float8(pool_dtype)
    kv = new_rows(3, 2, 80, dtype)
    kv[1] = 0
    pool = guarded((2, 2, 2, 16, 80), pool_dtype, DEVICE)
    scales = guarded((2, 2, 2, 16), torch.float32, DEVICE)
    store_kv(kv, pool.tensor, torch.tensor([3, 20, -1], dtype=torch.int32, device=DEVICE), scales.tensor)
    for row, slot in ((0, 3), (1, 20)):
        where = (slot // 16, slice(None), slice(None), slot % 16)
        scale = scales.tensor[where].cpu()
        wanted = kv[row].cpu().float()
        got = pool.tensor[where].cpu().float() * scale[..., None]
        # int8: half of a step everywhere; e4m3: half of 2**-3 of the value, or of the smallest step
        allowed = 0.5 * scale[..., None] if pool_dtype == torch.int8 else wanted.abs() / 16 + scale[..., None] * 2**-10
        assert bool(((got - wanted).abs() <= allowed * 1.0001).all())
        top = 127 if pool_dtype == torch.int8 else 448
        expected = torch.where(wanted.abs().amax(-1) > 0, wanted.abs().amax(-1) / top, torch.ones(()))
        assert torch.allclose(scale, expected, rtol=1e-6)
    assert int((~scales.tensor.isnan()).sum()) == 2 * 2 * 2
    pool.check()
    scales.check()


def test_a_slot_beyond_2_to_the_31_elements() -> None:
    pool = lazy_pool((24576, 8, 2, 1, 64, 128), torch.bfloat16, DEVICE)
    kv = new_rows(1, 1, 128, torch.bfloat16)
    store_kv(kv, pool[:, 7], torch.tensor([24575 * 64 + 63], device=DEVICE))
    assert torch.equal(pool[24575, 7, :, :, 63], kv[0])


def test_blocks_beyond_2_to_the_31_words() -> None:
    """Copied out, in and across, digested and zeroed, in a pool of 12 GiB of which a few pages are touched."""
    pool = lazy_pool((3 << 20, 1024), torch.int32, DEVICE)
    assert pool.numel() > 1 << 31
    far, near = (3 << 20) - 1, 5
    spans = torch.randint(1, 1 << 30, (2, 1024), generator=torch.Generator().manual_seed(0)).int().to(DEVICE)
    ids, last = torch.tensor([far, near], device=DEVICE), torch.tensor([far], device=DEVICE)
    scatter_blocks(spans, ids, pool)
    assert torch.equal(pool[far], spans[0])
    assert torch.equal(pool[near], spans[1])
    back = torch.zeros_like(spans)
    gather_blocks(pool, ids, back)
    assert torch.equal(back, spans)
    assert torch.equal(digest_blocks(pool, ids), digest_blocks(spans, torch.tensor([0, 1], device=DEVICE)))
    move_blocks(pool, last, back, last * 0 + 1)
    assert torch.equal(back[1], spans[0])
    move_blocks(spans, last * 0 + 1, pool, last)
    assert torch.equal(pool[far], spans[1])
    zero_blocks(pool, last)
    assert int(pool[far].count_nonzero()) == 0
    assert torch.equal(pool[near], spans[1])


@pytest.mark.parametrize("shape", [(5, 3, 2, 2, 16, 8), (5, 4), (4, 2, 2, 5, 16, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_blocks_go_out_and_come_back(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    source = guarded_like(values.to(DEVICE))
    ids = random.Random(0).sample(range(shape[0]), 3)
    there = torch.tensor(ids, device=DEVICE)
    spans = guarded((3, *shape[1:]), dtype, DEVICE)
    gather_blocks(source.tensor, there, spans.tensor)
    assert torch.equal(spans.tensor.cpu(), values[ids])
    target = guarded_like(torch.zeros(shape, dtype=dtype, device=DEVICE))
    scatter_blocks(spans.tensor, there, target.tensor)
    kept = torch.zeros(shape, dtype=dtype)
    kept[ids] = values[ids]
    assert torch.equal(target.tensor.cpu(), kept)
    moved = guarded_like(torch.zeros(shape, dtype=dtype, device=DEVICE))
    move_blocks(source.tensor, there, moved.tensor, there.flip(0))
    crossed = torch.zeros(shape, dtype=dtype)
    crossed[ids[::-1]] = values[ids]
    assert torch.equal(moved.tensor.cpu(), crossed)
    zero_blocks(source.tensor, there[:2])
    values[ids[:2]] = 0
    assert torch.equal(source.tensor.cpu(), values)
    for guard in (source, spans, target, moved):
        guard.check()


def test_the_digest_is_the_one_written_down() -> None:
    """And it sees a bit, a place and a swap."""
    generator = torch.Generator().manual_seed(0)
    pool = torch.randint(-(1 << 31), 1 << 31, (4, 2, 5000), dtype=torch.int64, generator=generator).to(torch.int32)
    pool = pool.to(DEVICE)
    ids = torch.tensor([3, 0], device=DEVICE)
    got = digest_blocks(pool, ids).cpu()
    for row, block in enumerate((3, 0)):
        told = tuple(int(x) & ((1 << 64) - 1) for x in got[row])
        assert told == span_sums(pool[block].cpu().numpy().tobytes())
    assert span_sums(b"") == (0, 0)
    assert span_sums(bytes(4)) == (0xE9E0033E3BADAF36, 0xDFC7A99951F24649)
    pool[0, 1, 4999] ^= 1
    assert not torch.equal(digest_blocks(pool, ids).cpu()[1], got[1])
    pool[0, 1, 4999] ^= 1
    pool[0, 0, :2] = pool[0, 0, :2].flip(0)
    assert not torch.equal(digest_blocks(pool, ids).cpu()[1], got[1])


def test_no_blocks() -> None:
    pool = torch.ones(2, 8, device=DEVICE)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    gather_blocks(pool, none, pool[:0])
    scatter_blocks(pool[:0], none, pool)
    move_blocks(pool, none, pool, none)
    zero_blocks(pool, none)
    assert digest_blocks(pool, none).shape == (0, 2)
    assert bool((pool == 1).all())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pool": torch.zeros(2, 2, 2, 16, 32)}, r"pool has shape .* expected \[any, 2, 2, any, 64\]"),
        ({"pool": torch.zeros(2, 2, 2, 16, 64).half()}, "pool is torch.float16, expected torch.float32"),
        ({"slots": torch.zeros(2, dtype=torch.int32)}, r"slots has shape \[2\], expected \[3\]"),
        ({"slots": torch.zeros(3)}, "slots is torch.float32, expected torch.int32 or torch.int64"),
        ({"kv_scales": torch.zeros(2, 2, 2, 16)}, "kv_scales go with a pool of int8 or e4m3"),
        ({"pool": torch.zeros(2, 2, 2, 16, 64, dtype=torch.int8)}, "kv_scales go with a pool of int8 or e4m3"),
    ],
)
def test_a_wrong_argument_is_named_before_the_launch(change: dict[str, Tensor], words: str) -> None:
    arguments = {
        "kv": torch.zeros(3, 2, 2, 64),
        "pool": torch.zeros(2, 2, 2, 16, 64),
        "slots": torch.zeros(3, dtype=torch.int32),
    }
    arguments = {name: value.to(DEVICE) for name, value in (arguments | change).items()}
    with pytest.raises(KernelArgumentError, match=words):
        store_kv(**arguments)


def test_wrong_blocks_are_named() -> None:
    pool, ids = torch.zeros(3, 4, device=DEVICE), torch.tensor([0], device=DEVICE)
    with pytest.raises(KernelArgumentError, match=r"spans has shape \[1, 5\], expected \[1, 4\]"):
        gather_blocks(pool, ids, torch.zeros(1, 5, device=DEVICE))
    with pytest.raises(KernelArgumentError, match=r"ids is torch.int32, expected torch.int64"):
        zero_blocks(pool, ids.int())
    with pytest.raises(KernelArgumentError, match=r"target has shape \[2, 5\], expected \[any, 4\]"):
        move_blocks(pool, ids, torch.zeros(2, 5, device=DEVICE), ids)
    with pytest.raises(KernelArgumentError, match=r"target_ids has shape \[2\], expected \[1\]"):
        move_blocks(pool, ids, pool, ids.repeat(2))
    with pytest.raises(KernelArgumentError, match=r"pool of shape .* expected contiguous"):
        zero_blocks(pool[:, :2], ids)
    with pytest.raises(KernelArgumentError, match="blocks of 3 bytes"):
        digest_blocks(torch.zeros(2, 3, dtype=torch.int8, device=DEVICE), ids)
