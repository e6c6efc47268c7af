"""Norm, rotary with store, and activation kernels, in Triton's interpreter or on a GPU, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.testing import DEVICE, INTERPRETED, assert_close, guarded_like, lazy_pool, require_float8

# isort: split
from kernels.activation.triton_kernel import gate_mul
from kernels.arguments import KernelArgumentError
from kernels.norm.triton_kernel import add_rms_norm, rms_norm, rms_norm_heads
from kernels.rotary import frequencies, rotary_table
from kernels.rotary.triton_kernel import HeadNorm, rotary, rotary_store_kv

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered"),  # numpy's, in the interpreter
    *([] if INTERPRETED else [pytest.mark.gpu]),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def normed(x: Tensor, weight: Tensor, offset: float = 0.0) -> Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * (weight.double() + offset)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("hidden", "offset"), [(16, 0.0), (63, 1.0), (576, 0.0), (2305, 1.0)])
def test_norm_is_its_definition(hidden: int, offset: float, dtype: torch.dtype) -> None:
    x = guarded_like(randn(5, hidden, dtype=dtype))
    weight = guarded_like(randn(hidden, dtype=dtype, seed=1))
    assert_close(rms_norm(x.tensor, weight.tensor, EPS, offset), normed(x.tensor, weight.tensor, offset), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("residual_dtype", [None, torch.float32], ids=["same", "float32"])
def test_the_sum_stays_in_the_residual_and_is_what_is_normalized(
    dtype: torch.dtype, residual_dtype: torch.dtype | None
) -> None:
    x, weight = randn(7, 129, dtype=dtype), randn(129, dtype=dtype, seed=1)
    before = randn(7, 129, dtype=residual_dtype or dtype, seed=2)
    residual = guarded_like(before)
    y = add_rms_norm(x, residual.tensor, weight, EPS)
    residual.check()
    assert_close(residual.tensor, before.double() + x.double(), residual_dtype or dtype)
    assert_close(y, normed(residual.tensor, weight), dtype)


def test_rows_of_a_norm_do_not_depend_on_their_company() -> None:
    x, weight = randn(9, 576, dtype=torch.bfloat16), randn(576, dtype=torch.bfloat16, seed=1)
    whole = rms_norm(x, weight, EPS)
    assert all(torch.equal(rms_norm(x[i : i + 1], weight, EPS), whole[i : i + 1]) for i in range(9))


def test_heads_are_normalized_in_place_in_a_view() -> None:
    qkv = guarded_like(randn(3, 6, 80, dtype=torch.float32))
    before, weight = qkv.tensor.clone(), randn(80, dtype=torch.float32, seed=1)
    rms_norm_heads(qkv.tensor[:, 1:4], weight, EPS)
    qkv.check()
    assert_close(qkv.tensor[:, 1:4], normed(before[:, 1:4], weight), torch.float32)
    assert torch.equal(qkv.tensor[:, [0, 4, 5]], before[:, [0, 4, 5]])


def rotated(x: Tensor, rows: Tensor) -> Tensor:
    """Float64; rows [num_tokens, 2, head_dim]."""
    x, rows = x.double(), rows.double()
    half = x.shape[-1] // 2
    return x * rows[:, :1] + torch.cat((x[..., half:], x[..., :half]), -1) * rows[:, 1:]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("head_dim", "num_q", "num_kv", "with_norm"),
    [(64, 9, 3, False), (80, 4, 1, True), (96, 2, 2, False), (128, 5, 1, True), (256, 3, 3, True)],
)
def test_rotary_and_store(head_dim: int, num_q: int, num_kv: int, with_norm: bool, dtype: torch.dtype) -> None:
    num_tokens, block_size, num_blocks = 5, 16, 4
    table = rotary_table(frequencies.plain(head_dim, 1e4), 700, torch.float32).to(DEVICE)
    positions = torch.tensor([0, 3, 699, 3, 512], device=DEVICE)
    slots = torch.tensor([17, -1, 0, 63, 40], device=DEVICE)
    wide = guarded_like(randn(num_tokens, num_q + 2 * num_kv + 1, head_dim, dtype=dtype))
    qkv = wide.tensor[:, : num_q + 2 * num_kv]  # rows with a gap between them
    before = wide.tensor.clone()
    spans = guarded_like(torch.full((num_blocks, 2, 2, num_kv, block_size, head_dim), 7.0, dtype=dtype, device=DEVICE))
    weights = randn(2, head_dim, dtype=dtype, seed=3)
    norm = HeadNorm(weights[0], weights[1], EPS, 1.0) if with_norm else None
    rotary_store_kv(qkv, table, positions, spans.tensor[:, 1], slots, num_q, norm)
    wide.check()
    spans.check()

    q, k, v = before[:, :num_q], before[:, num_q : num_q + num_kv], before[:, num_q + num_kv : num_q + 2 * num_kv]
    if with_norm:
        q, k = normed(q, weights[0], 1.0), normed(k, weights[1], 1.0)
    rows = table[positions]
    assert_close(qkv[:, :num_q], rotated(q, rows), dtype)
    assert torch.equal(wide.tensor[:, num_q:], before[:, num_q:])
    expected = torch.full(spans.tensor.shape, 7.0, dtype=torch.float64, device=DEVICE)
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // block_size, 1, 0, :, slot % block_size] = rotated(k, rows)[i]
            expected[slot // block_size, 1, 1, :, slot % block_size] = v[i].double()
    assert_close(spans.tensor, expected, dtype)
    assert torch.equal(spans.tensor[:, 0], torch.full_like(spans.tensor[:, 0], 7.0))


@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, torch.int8], ids=str)
def test_a_slot_beyond_2_to_the_31_elements(pool_dtype: torch.dtype) -> None:
    """As in a small pool, in one of 3 or 6 GiB of which a block is touched."""
    table = rotary_table(frequencies.plain(128, 1e4), 9, torch.float32).to(DEVICE)
    positions, rows = torch.tensor([8], device=DEVICE), randn(1, 4, 128, dtype=torch.bfloat16)
    stored = []
    for blocks in (24576, 1):
        pool = lazy_pool((blocks, 8, 2, 1, 64, 128), pool_dtype, DEVICE)
        scales = torch.zeros(blocks, 2, 1, 64, device=DEVICE) if pool_dtype == torch.int8 else None
        slot = torch.tensor([blocks * 64 - 1], device=DEVICE)
        rotary_store_kv(rows.clone(), table, positions, pool[:, 7], slot, 2, kv_scales=scales)
        stored.append((pool[-1, 7, :, 0, 63], scales if scales is None else scales[-1, :, 0, 63]))
    (far, far_scale), (near, near_scale) = stored
    assert int(near.count_nonzero()) > 0
    assert torch.equal(far, near)
    assert far_scale is None or torch.equal(far_scale, near_scale)


@pytest.mark.parametrize("pool_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_an_8_bit_pool_gets_a_scale_a_row(pool_dtype: torch.dtype) -> None:
    require_float8(pool_dtype)
    head_dim, num_q, num_kv, block_size = 80, 2, 2, 16
    table = rotary_table(frequencies.plain(head_dim, 1e4), 9, torch.float32).to(DEVICE)
    positions, slots = torch.tensor([0, 8, 3], device=DEVICE), torch.tensor([33, -1, 0], device=DEVICE)
    qkv = randn(3, num_q + 2 * num_kv, head_dim, dtype=torch.bfloat16)
    qkv[2, -1] = 0.0
    before = qkv.clone()
    spans = guarded_like(torch.zeros(3, 2, 2, num_kv, block_size, head_dim, device=DEVICE).to(pool_dtype))
    scales = guarded_like(torch.full((3, 2, 2, num_kv, block_size), 7.0, device=DEVICE))
    rotary_store_kv(qkv, table, positions, spans.tensor[:, 1], slots, num_q, kv_scales=scales.tensor[:, 1])
    spans.check()
    scales.check()
    largest = 127.0 if pool_dtype == torch.int8 else 448.0
    rows = rotated(before, table[positions])
    assert_close(qkv[:, :num_q], rows[:, :num_q], torch.bfloat16)
    for i, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        block, offset = divmod(slot, block_size)
        stored, row_scales = spans.tensor[block, 1, :, :, offset].double(), scales.tensor[block, 1, :, :, offset]
        wanted = torch.stack((rows[i, num_q : num_q + num_kv], before[i, num_q + num_kv :].double()))
        assert_close(stored * row_scales.double()[..., None], wanted, pool_dtype)
        tops = wanted.abs().amax(-1)
        assert_close(row_scales, torch.where(tops > 0, tops / largest, 1.0), torch.float32)
    assert int((scales.tensor != 7.0).sum()) == 2 * 2 * num_kv
    qkv[0, num_q + 1, 5] = torch.nan
    rotary_store_kv(qkv, table, positions, spans.tensor[:, 1], slots, num_q, kv_scales=scales.tensor[:, 1])
    assert scales.tensor.isnan().sum() == 1
    assert scales.tensor[2, 1, 0, 1, 1].isnan()


def test_rotary_alone_leaves_values_be() -> None:
    qkv = randn(3, 6, 64, dtype=torch.float32)
    before = qkv.clone()
    table = rotary_table(frequencies.llama3(64, 5e5, 8.0, 8192, 1.0, 4.0), 40, torch.float32).to(DEVICE)
    positions = torch.tensor([39, 0, 7], dtype=torch.int32, device=DEVICE)
    rotary(qkv, table, positions, 2)
    assert_close(qkv[:, :4], rotated(before[:, :4], table[positions.long()]), torch.float32)
    assert torch.equal(qkv[:, 4:], before[:, 4:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 100, 1025])
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
def test_gated_activation(gate: str, width: int, dtype: torch.dtype) -> None:
    gate_up = guarded_like(randn(3, 2 * width, dtype=dtype) * 4)
    gates, ups = gate_up.tensor.double().split(width, dim=1)
    if gate == "silu":
        expected = torch.nn.functional.silu(gates) * ups
    else:
        expected = torch.nn.functional.gelu(gates, approximate="tanh") * ups
    assert_close(gate_mul(gate_up.tensor, gate), expected, dtype)  # type: ignore[arg-type]


def test_gates_far_out_are_finite() -> None:
    ends = torch.tensor([[-1e30, -200.0, 200.0, 1e4, 1, 1, 1, 1]], device=DEVICE)
    assert gate_mul(ends, "silu").tolist() == [[0.0, 0.0, 200.0, 1e4]]
    assert gate_mul(ends, "gelu_tanh").tolist() == [[0.0, 0.0, 200.0, 1e4]]


def _rotary(**changes: Tensor) -> Callable[[], None]:
    given = {
        "qkv": torch.zeros(2, 4, 64, device=DEVICE),
        "table": torch.zeros(8, 2, 64, device=DEVICE),
        "positions": torch.zeros(2, dtype=torch.int64, device=DEVICE),
        "pool": torch.zeros(3, 2, 1, 16, 64, device=DEVICE),
        "slots": torch.zeros(2, dtype=torch.int64, device=DEVICE),
    } | changes
    return lambda: rotary_store_kv(**given, num_q_heads=2)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: rms_norm(torch.ones(2, 8, device=DEVICE), torch.ones(7, device=DEVICE), EPS), r"weight.*\[7\].*\[8\]"),
        (lambda: rms_norm(torch.ones(2, 8).double(), torch.ones(8), EPS), r"x is torch.float64, expected"),
        (lambda: rms_norm(torch.ones(8, 2, device=DEVICE).T, torch.ones(8, device=DEVICE), EPS), r"x .*strides"),
        (
            lambda: add_rms_norm(torch.ones(2, 8), torch.ones(3, 8), torch.ones(8), EPS),
            r"residual has shape \[3, 8\], expected \[2, 8\]",
        ),
        (lambda: gate_mul(torch.ones(2, 7), "silu"), r"gate_up has shape \[2, 7\]"),
        (lambda: gate_mul(torch.ones(2, 8), "relu"), r"gate is 'relu'"),  # type: ignore[arg-type]
        (_rotary(qkv=torch.zeros(2, 4, 65)), r"head_dim of qkv is 65"),
        (_rotary(qkv=torch.zeros(2, 5, 64)), r"qkv has shape \[2, 5, 64\]"),
        (_rotary(qkv=torch.zeros(4, 2, 64).transpose(0, 1)), r"qkv .*strides"),
        (_rotary(pool=torch.zeros(3, 2, 2, 16, 64, device=DEVICE)), r"pool.*\[any, 2, 1, any, 64\]"),
        (_rotary(pool=torch.zeros(3, 2, 1, 7, 64, device=DEVICE)), r"block size of pool is 7"),
        (_rotary(pool=torch.zeros(3, 2, 1, 16, 64, dtype=torch.int8, device=DEVICE)), r"kv_scales go with"),
        (_rotary(kv_scales=torch.zeros(3, 2, 1, 16, device=DEVICE)), r"kv_scales go with"),
        (_rotary(slots=torch.zeros(3, dtype=torch.int64, device=DEVICE)), r"slots has shape \[3\], expected \[2\]"),
        (_rotary(positions=torch.zeros(2, device=DEVICE)), r"positions is torch.float32"),
        (_rotary(table=torch.zeros(8, 2, 64, device=DEVICE).double()), r"table is torch.float64"),
    ],
)
def test_wrong_arguments_are_named_before_the_launch(call: Callable[[], None], told: str) -> None:
    with pytest.raises(KernelArgumentError, match=told):
        call()
