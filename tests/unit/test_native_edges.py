"""The C kernels at the ends of what they take: long contexts, small and large blocks, more threads than work."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.native.abi import GroupStruct
from kernels.native.model import GroupPlan, NativeModel
from shared.engine.native_check import NativeCheck
from shared.model.config import parse_config
from tests.native import ALL_LEVELS, library_at, put_token, team_of, token_at
from tests.native_models import Cache, Shared, guarded_pool, make_model, make_plan, operands, rand
from tests.unit.test_model_config import PLAIN

BEST = ALL_LEVELS[0]
KV = [None, torch.int8, torch.float16]
FORMATS = pytest.mark.parametrize("kv", KV, ids=["elements", "int8", "float16"])


@FORMATS
@pytest.mark.parametrize("block_size", [16, 1024])
def test_one_token_after_a_long_context(kv: torch.dtype | None, block_size: int) -> None:
    """256 splits of 512 keys and some: one block again and again, and ten keys of another; against float64."""
    length = (1 << 17) + 10
    model = make_model(team_of(BEST, 2), torch.float32, (3, 1, 16), length)
    kept = kv or torch.float32
    guarded = guarded_pool(model, 2, block_size, kept)
    keys, values = (rand(seed, block_size + 10, 1, 16) for seed in (1, 2))
    places = [divmod(i, block_size) for i in range(block_size + 10)]
    for place, k, v in zip(places, keys, values, strict=True):
        put_token(guarded.tensor, *place, k, v)
    whole = length // block_size
    q = rand(3, 1, 3, 16).to(operands(model, kept))
    got = model.attention(q, make_plan(model, guarded.tensor, [(length - 1, 1)], [[0] * whole + [1]]))[0].double()
    guarded.check()
    stored = zip(*(token_at(guarded.tensor, *place) for place in places), strict=True)
    k, v = (torch.stack(part)[:, 0].double() for part in stored)
    times = torch.tensor([whole if block == 0 else 1 for block, _ in places])
    weights = ((q[0].double() @ k.T) * model.shape.scale).exp() * times
    torch.testing.assert_close(got, weights @ v / weights.sum(1, keepdim=True), rtol=0, atol=5e-4)


@FORMATS
def test_blocks_larger_than_a_split_are_shared(kv: torch.dtype | None) -> None:
    prefixes = [(0, 0, 2100), (2048, 0, 2060), (1024, 1, 1040), (1024, 0, 1025)]
    shared = Shared(make_model(team_of(BEST, 1), torch.bfloat16, (7, 1, 64), 2200), prefixes, 1024, kv=kv)
    steps = [(i, rows) for i in range(len(prefixes)) for rows in (1, 8)]
    alone = [shared.attend([step])[0] for step in steps]
    other = make_model(team_of(BEST, 3), torch.bfloat16, (7, 1, 64), 2200)
    for step, result, wanted in zip(steps, shared.attend(steps, other), alone, strict=True):
        assert torch.equal(result, wanted), step


@FORMATS
def test_more_threads_than_work(kv: torch.dtype | None) -> None:
    cache = Cache(make_model(team_of(BEST, 1), torch.bfloat16, (4, 1, 32)), 40, kv=kv)
    many = make_model(team_of(BEST, 64), torch.bfloat16, (4, 1, 32))
    for first, last in ((0, 40), (39, 40), (0, 1)):
        assert torch.equal(cache.attend(first, last, many), cache.attend(first, last)), (first, last)


@FORMATS
def test_a_step_without_logits_leaves_the_same_keys_and_values(kv: torch.dtype | None) -> None:
    model, pools = _small_model(kv)
    for pool, wanted in zip(pools, ((), range(40)), strict=True):
        _step(model, pool, torch.arange(40), wanted)
    after = [_step(model, pool, torch.tensor([40]), [0]) for pool in pools]
    assert torch.equal(*after)
    assert bool(after[0].isfinite().all())


@FORMATS
def test_logits_of_few_rows_are_those_of_all(kv: torch.dtype | None) -> None:
    """The last layer attends for the pieces of a prompt with such rows only: here they begin at 0 and 48."""
    model, (pool, other) = _small_model(kv)
    positions = torch.arange(60)
    every = _step(model, pool, positions, range(60))
    assert bool(every.isfinite().all())
    for wanted in ([59], [3], [0, 50], [47, 48], [20, 21, 46]):
        assert torch.equal(_step(model, other, positions, wanted), every[wanted]), wanted


def _small_model(kv: torch.dtype | None) -> tuple[NativeModel, list[Tensor]]:
    config = parse_config(
        PLAIN | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}, Path("config.json")
    )
    kept = "" if kv is None else str(kv).removeprefix("torch.")
    check = NativeCheck(config, torch.bfloat16, library_at(BEST), kv_dtype=kept)
    return check._models[0], [check._pool(), check._pool()]


@pytest.mark.parametrize(
    ("what", "words"), [("num_logits", "a row of logits"), ("table_starts", "a block table")], ids=["logits", "tables"]
)
def test_counts_and_beginnings_below_zero_are_refused(what: str, words: str) -> None:
    """What Python never makes: the library looks at it all the same."""
    cache = Cache(make_model(team_of(BEST, 1), torch.bfloat16, (4, 1, 32)), 40)
    plan = make_plan(cache.model, cache.pool, [(39, 1)], [cache.table])
    if what == "num_logits":
        plan.struct.num_logits = -1
    else:
        group = ctypes.cast(plan.struct.groups, ctypes.POINTER(GroupStruct)).contents
        ctypes.cast(group.table_starts, ctypes.POINTER(ctypes.c_int64))[0] = -1
    with pytest.raises(ValueError, match=words):
        cache.model.attention(cache.q[39:], plan)


def _step(model: NativeModel, pool: Tensor, positions: Tensor, wanted: Sequence[int]) -> Tensor:
    end, count = int(positions[-1]) + 1, len(positions)
    group = GroupPlan([[1, 0]], [(1 - p // 32) * 32 + p % 32 for p in positions.tolist()])
    rows = torch.tensor(wanted, dtype=torch.int64)
    return model.step(positions % 7, positions, [0, count], [end], rows, [group], [pool])
