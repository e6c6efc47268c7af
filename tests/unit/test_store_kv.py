from __future__ import annotations

import pytest
import torch

from kernels.store_kv import plan_store, store_kv


def test_each_token_lands_in_its_slot_and_minus_one_nowhere() -> None:
    pool = torch.full((4, 3, 2, 2, 16, 8), float("nan"))
    view = pool[:, 1]  # a layer of a block-major pool: strided
    kv = torch.randn(5, 2, 2, 8)
    slots = [17, -1, 0, 63, -1]
    store_kv(kv, view, plan_store(slots, 16))
    for row, slot in enumerate(slots):
        if slot >= 0:
            assert torch.equal(view[slot // 16, :, :, slot % 16], kv[row])
    assert int((~pool.isnan()).sum()) == 3 * 2 * 2 * 8


def test_all_rows_from_a_strided_view() -> None:
    pool = torch.zeros(2, 2, 3, 16, 8)
    qkv = torch.randn(4, 10, 8)
    kv = qkv[:, 4:].view(4, 2, 3, 8)
    store_kv(kv, pool, plan_store([3, 2, 1, 31], 16))
    assert torch.equal(pool[1, :, :, 15], kv[3])
    assert torch.equal(pool[0, :, :, 2], kv[1])


def test_nothing_to_store() -> None:
    pool = torch.zeros(1, 2, 1, 16, 8)
    store_kv(torch.ones(2, 2, 1, 8), pool, plan_store([-1, -1], 16))
    assert not pool.any()


def test_a_slot_outside_the_pool_is_refused() -> None:
    with pytest.raises(AssertionError):
        store_kv(torch.ones(1, 2, 1, 8), torch.zeros(1, 2, 1, 16, 8), plan_store([16], 16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_pool_of_halves_takes_the_largest_for_what_is_larger(dtype: torch.dtype) -> None:
    values = [1.5, -0.0, 65504.0, 1e6, -1e30, float("nan"), float("inf"), float("-inf")]
    pool = torch.zeros(1, 2, 1, 16, 8, dtype=torch.float16)
    store_kv(torch.tensor(values, dtype=dtype).expand(1, 2, 1, 8), pool, plan_store([3], 16))
    expected = torch.tensor([1.5, -0.0, 65504.0, 65504.0, -65504.0, *[float("nan")] * 3], dtype=torch.float16)
    for found in pool[0, :, 0, 3]:
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        assert bool(found[1].signbit())
