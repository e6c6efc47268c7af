"""Mixture of experts: the reference by hand, the kernels against it in Triton's interpreter or on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.testing import DEVICE, INTERPRETED, assert_close, require_float8

# isort: split
from kernels import moe
from kernels.activation.triton_kernel import gate_mul
from kernels.arguments import KernelArgumentError
from kernels.linear.triton_kernel import MAX_FEATURES, linear
from kernels.linear.triton_weights import DeviceWeight, dequantized, fp8_channels, int4_groups, int8_channels, plain
from kernels.moe.triton_kernel import experts, route, sort_by_expert, stacked

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, in the interpreter
    *([] if INTERPRETED else [pytest.mark.gpu]),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def test_the_reference_by_hand() -> None:
    ids, shares = moe.route(torch.tensor([[0.0, 2.0, 2.0, 1.0]]).double(), 2)
    assert ids.tolist() == [[1, 2]]
    assert shares.tolist() == [[0.5, 0.5]]
    gate_up = torch.tensor([[[0.0], [0.0]], [[1.0], [2.0]], [[-1.0], [1.0]]]).double()
    down = torch.tensor([[[9.0]], [[1.0]], [[10.0]]]).double()
    x = torch.tensor([[1.0]]).double()
    y = moe.experts(x, gate_up, down, torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([[0.25, 0.75]]).double())
    one = torch.tensor(1.0).double()
    assert y.item() == pytest.approx(0.25 * 2 * (one * one.sigmoid()).item() - 0.75 * 10 * (-one).sigmoid().item())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_experts", "top_k", "renormalize"), [(8, 2, True), (5, 5, False), (128, 8, True), (60, 4, False), (1, 1, True)]
)
def test_routing(num_experts: int, top_k: int, renormalize: bool, dtype: torch.dtype) -> None:
    logits = randn(7, num_experts, dtype=dtype) * 2
    logits[1] = 0.5  # all alike: the lowest ids
    ids, shares = route(logits, top_k, renormalize)
    wanted_ids, wanted = moe.route(logits.cpu().double(), top_k, renormalize)
    assert ids.tolist() == wanted_ids.tolist()
    assert_close(shares, wanted, torch.float32)


def test_a_broken_row_names_experts_that_exist() -> None:
    logits = torch.full((3, 6), torch.nan, device=DEVICE)
    logits[1], logits[2, 0] = -torch.inf, torch.inf
    ids, _ = route(logits, 3)
    assert all(len(set(row)) == 3 and min(row) >= 0 and max(row) < 6 for row in ids.tolist())


@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(1, 4, 2), (37, 5, 2), (300, 3, 3), (600, 64, 2)])
def test_pairs_are_sorted_by_expert(num_tokens: int, num_experts: int, top_k: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.rand(num_tokens, num_experts, generator=generator).argsort(-1)[:, :top_k].to(torch.int32)
    ids[ids == 1] = 0  # an expert nobody chose
    result = sort_by_expert(ids.to(DEVICE).contiguous(), num_experts, 16)
    pairs, flat = ids.numel(), ids.flatten().tolist()
    seen = []
    for block, expert in zip(result.order.view(-1, 16).tolist(), result.expert_of_block.tolist(), strict=True):
        if expert == num_experts:
            continue
        real = [pair for pair in block if pair < pairs]
        assert real
        assert all(pair == pairs for pair in block[len(real) :])
        assert {flat[pair] for pair in real} == {expert}
        seen += real
    assert seen == sorted(range(pairs), key=lambda pair: (flat[pair], pair))


def parts(
    kind: str, num_experts: int, out_features: int, in_features: int, dtype: torch.dtype, seed: int
) -> list[DeviceWeight]:
    weights = randn(num_experts, out_features, in_features, seed=seed) * in_features**-0.5
    make: dict[str, Callable[[Tensor], DeviceWeight]] = {
        "plain": lambda w: plain(w.to(dtype)),
        "int8": int8_channels,
        "int4": lambda w: int4_groups(w, 32),
        "w8a8": lambda w: int8_channels(w, "w8a8"),
        "fp8": fp8_channels,
    }
    return [make[kind](weight) for weight in weights]


def made(kind: str, num_experts: int, out_features: int, in_features: int, dtype: torch.dtype, seed: int):
    each = parts(kind, num_experts, out_features, in_features, dtype, seed)
    return stacked(each), torch.stack([dequantized(part) for part in each]).cpu()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["plain", "int8", "int4"])
def test_experts(kind: str, dtype: torch.dtype) -> None:
    hidden, width, num_experts, top_k = 96, 64, 5, 2
    gate_up, wide_up = made(kind, num_experts, 2 * width, hidden, dtype, 1)
    down, wide_down = made(kind, num_experts, hidden, width, dtype, 2)
    x = randn(11, hidden, dtype=dtype, seed=3)
    ids, shares = route(randn(11, num_experts, seed=4), top_k)
    wanted = moe.experts(x.cpu().double(), wide_up, wide_down, ids.cpu(), shares.cpu().double(), "gelu_tanh")
    assert_close(experts(x, gate_up, down, ids, shares, "gelu_tanh"), wanted, dtype)


@pytest.mark.parametrize("kind", ["w8a8", "fp8"])
def test_experts_over_rows_of_8_bits_multiply_as_a_layer_alone_does(kind: str) -> None:
    require_float8(kind)
    hidden, width, num_experts, top_k = 160, 96, 3, 2
    ups = parts(kind, num_experts, 2 * width, hidden, torch.bfloat16, 1)
    downs = parts(kind, num_experts, hidden, width, torch.bfloat16, 2)
    x = randn(5, hidden, dtype=torch.bfloat16, seed=3)
    x[2] = 0.0
    ids, shares = route(randn(5, num_experts, seed=4), top_k)
    wanted = torch.zeros(5, hidden, dtype=torch.float64, device=DEVICE)
    for token in range(5):
        for expert, share in zip(ids[token].tolist(), shares[token].double(), strict=True):
            inner = gate_mul(linear(x[token : token + 1], ups[expert]), "silu")
            wanted[token] += share * linear(inner, downs[expert])[0].double()
    assert_close(experts(x, stacked(ups), stacked(downs), ids, shares), wanted, torch.bfloat16)


@pytest.mark.parametrize("kind", ["plain"] if INTERPRETED else ["plain", "int8", "int4", "w8a8", "fp8"])
def test_a_token_does_not_depend_on_the_others(kind: str) -> None:
    """Over blocks of every size."""
    require_float8(kind)
    hidden, width, num_experts, num_tokens = (64, 32, 2, 140) if INTERPRETED else (1024, 768, 8, 1400)
    gate_up, _ = made(kind, num_experts, 2 * width, hidden, torch.bfloat16, 1)
    down, _ = made(kind, num_experts, hidden, width, torch.bfloat16, 2)
    x = randn(num_tokens, hidden, dtype=torch.bfloat16, seed=3)
    ids, shares = route(randn(num_tokens, num_experts, seed=4), 2)
    whole = experts(x, gate_up, down, ids, shares)
    for count in (1, 20, num_tokens // 2):
        rows = slice(num_tokens - count, num_tokens)
        alone = experts(x[rows].clone(), gate_up, down, ids[rows].clone(), shares[rows].clone())
        assert torch.equal(alone, whole[rows]), count


def called(gate_up: DeviceWeight, down: DeviceWeight) -> Tensor:
    """Two tokens, each of one expert."""
    ids = torch.zeros(2, 1, dtype=torch.int32, device=DEVICE)
    return experts(randn(2, gate_up.in_features), gate_up, down, ids, randn(2, 1))


UP, DOWN = (stacked([plain(randn(*shape))] * 3) for shape in ((8, 64), (64, 4)))
WIDE = MAX_FEATURES + 1


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: route(randn(2, 4), 5), r"top_k is 5 of 4 experts"),
        (lambda: sort_by_expert(torch.zeros(2, 2, dtype=torch.int64), 4, 16), r"ids is torch.int64"),
        (lambda: stacked([plain(randn(8, 64)), plain(randn(8, 32))]), r"\[8, 32\] and plain \[8, 64\]"),
        (lambda: stacked([plain(randn(8, 64), randn(8))]), r"an expert of plain has a bias"),
        (lambda: called(UP, stacked([plain(randn(64, 5))] * 3)), r"down is \[64, 5\], expected \[64, 4\]"),
        (lambda: called(UP, replace(DOWN, data=DOWN.data.half())), r"down is torch\.float16, expected torch\.float32"),
        (lambda: called(replace(UP, bias=randn(8)), DOWN), "gate_up has a bias, expected none"),
        (lambda: called(UP, replace(DOWN, permutation=torch.arange(4, device=DEVICE))), "down has a permutation"),
        (
            lambda: called(stacked([int8_channels(randn(8, WIDE), "w8a8")]), stacked([plain(randn(WIDE, 4))])),
            f"gate_up has {WIDE} input features, expected at most {MAX_FEATURES}",
        ),
        (
            lambda: called(stacked([plain(randn(2 * WIDE, 1))]), stacked([int8_channels(randn(1, WIDE), "w8a8")])),
            f"down has {WIDE} input features, expected at most {MAX_FEATURES}",
        ),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], object], told: str) -> None:
    with pytest.raises(KernelArgumentError, match=told):
        call()
