"""Every host wrapper of a Triton kernel refuses what the kernel cannot take: by name, with both shapes, unlaunched.

A kernel given a wrong tensor writes where it should not, and nobody is told.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.testing import DEVICE, INTERPRETED

# isort: split
from triton.runtime.interpreter import GridExecutor
from triton.runtime.jit import JITFunction

import kernels
from kernels.activation import triton_kernel as activation
from kernels.arguments import KernelArgumentError
from kernels.attention import triton_attention as attention
from kernels.embedding import triton_kernel as embedding
from kernels.linear import triton_few_rows, triton_kernel, triton_weights
from kernels.linear.triton_weights import DeviceWeight, int4_groups, int8_channels, plain
from kernels.moe import triton_kernel as moe
from kernels.norm import triton_kernel as norm
from kernels.rotary import triton_kernel as rotary
from kernels.sampling import triton_kernel as sampling
from kernels.sampling import triton_logprobs, triton_verify
from kernels.sampling.triton_rows import Bias, Drafts, Drawn, Mask, Penalties, SamplingRows
from kernels.store_kv import triton_blocks
from kernels.store_kv import triton_kernel as store

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

VOCAB, ROWS = 64, 3
Arguments = dict[str, Any]
ALONE = dict.fromkeys(("x", "gate_up", "logits", "ids"), "device")
"""Of wrappers with one tensor: there is none it could be apart from."""


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A wrapper and arguments that it takes.

    Attributes:
        call: with the arguments by the names that messages give them.
        free: kinds of change an argument may have.
        instead: another argument that is named for one, which it has to be like.
    """

    function: Callable[..., object]
    arguments: Arguments
    call: Callable[[Arguments], object]
    free: dict[str, str] = field(default_factory=dict)
    instead: dict[str, str] = field(default_factory=dict)


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype, device=DEVICE)


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def by_name(function: Callable[..., object], arguments: Arguments, **options: Any) -> Wrapper:
    """One whose messages call its parameters by their names."""
    constants = options.pop("constants", {})
    return Wrapper(function, arguments, lambda given: function(**given, **constants), **options)


def wrappers() -> Iterator[Wrapper]:
    yield by_name(activation.gate_mul, {"gate_up": floats(2, 8)}, constants={"gate": "silu"}, free=ALONE)
    yield by_name(norm.rms_norm, {"x": floats(2, 8), "weight": floats(8)}, constants={"eps": 1e-5})
    yield by_name(
        norm.add_rms_norm,
        {"x": floats(2, 8), "residual": floats(2, 8), "weight": floats(8)},
        constants={"eps": 1e-5},
    )
    yield by_name(norm.rms_norm_heads, {"x": floats(2, 4, 8), "weight": floats(8)}, constants={"eps": 1e-5})
    yield by_name(
        embedding.embed, {"token_ids": ints(2), "source": ints(2), "samples": ints(4), "table": floats(VOCAB, 8)}
    )
    yield from linear_wrappers()
    yield from expert_wrappers()
    yield from rotary_wrappers()
    yield from block_wrappers()
    yield from attention_wrappers()
    yield from sampling_wrappers()


def linear_wrappers() -> Iterator[Wrapper]:
    weight = plain(floats(8, 32))
    yield by_name(triton_kernel.linear, {"x": floats(2, 32)}, constants={"weight": weight})
    yield by_name(triton_kernel.quantize_rows, {"x": floats(2, 32)}, constants={"dtype": torch.int8}, free=ALONE)
    yield by_name(
        triton_few_rows.few_rows_linear,
        {"x": floats(2, 32), "norm": floats(32), "residual": floats(2, 8)},
        constants={"weight": weight},
        instead={"x": "weight"},
    )


def expert_wrappers() -> Iterator[Wrapper]:
    gate_up, down = (moe.stacked([plain(floats(*shape))] * 3) for shape in ((16, 32), (32, 8)))
    yield by_name(moe.route, {"logits": floats(2, 4)}, constants={"top_k": 2}, free=ALONE)
    yield by_name(moe.sort_by_expert, {"ids": ints(2, 2)}, constants={"num_experts": 3, "block_m": 16}, free=ALONE)
    yield by_name(
        moe.experts,
        {"x": floats(2, 32), "ids": ints(2, 2), "shares": floats(2, 2)},
        constants={"gate_up": gate_up, "down": down},
        instead={"x": "gate_up"},
    )


def rotary_wrappers() -> Iterator[Wrapper]:
    turned = {"qkv": floats(2, 4, 64), "table": floats(16, 2, 64), "positions": ints(2)}
    normed = {"q_weight": floats(64), "k_weight": floats(64)}

    def call(function: Callable[..., object], given: Arguments) -> object:
        given = dict(given)
        heads = rotary.HeadNorm(given.pop("q_weight"), given.pop("k_weight"), 1e-6)
        return function(**given, num_q_heads=2, norm=heads)

    yield Wrapper(rotary.rotary, turned | normed, lambda given: call(rotary.rotary, given))
    pool = {"pool": ints(2, 2, 1, 16, 64, dtype=torch.int8), "slots": ints(2), "kv_scales": floats(2, 2, 1, 16)}
    yield Wrapper(rotary.rotary_store_kv, turned | normed | pool, lambda given: call(rotary.rotary_store_kv, given))
    kv = {"kv": floats(2, 2, 1, 64)}
    yield by_name(store.store_kv, kv | pool)


def block_wrappers() -> Iterator[Wrapper]:
    pool, ids, spans = floats(4, 8), ints(2, dtype=torch.int64), floats(2, 8)
    same = {"pool": "spans"}
    yield by_name(triton_blocks.gather_blocks, {"pool": pool, "ids": ids, "spans": spans}, instead=same)
    yield by_name(triton_blocks.scatter_blocks, {"pool": pool, "ids": ids, "spans": spans}, instead=same)
    moved = {"source": pool, "source_ids": ids, "target": floats(3, 8), "target_ids": ids}
    yield by_name(triton_blocks.move_blocks, moved, instead={"source": "target"})
    # spans of bytes: whatever they are of
    for function in (triton_blocks.zero_blocks, triton_blocks.digest_blocks):
        yield by_name(function, {"pool": pool, "ids": ids}, free={"pool": "dtype shape"})


def attention_wrappers() -> Iterator[Wrapper]:
    on_device = {"cu_seqlens_q": ints(3), "seq_lens": ints(2), "block_tables": ints(2, 4)}
    sizes = {"num_rows": 2, "max_queries": 1, "max_len": 64, "block_size": 16, "num_q_heads": 2, "num_kv_heads": 1}
    yield by_name(attention.plan_on_device, on_device, constants=sizes | {"head_dim": 64}, instead={"seq_lens": "cu_"})
    plan = attention.plan_attention([0, 1], [5], [[1]], 16, 2, 1, 64, DEVICE, quantized=True)
    given = {
        "q": floats(1, 2, 64),
        "pool": ints(2, 2, 1, 16, 64, dtype=torch.int8),
        "sinks": floats(2),
        "kv_scales": floats(2, 2, 1, 16),
    }
    yield by_name(attention.attend, given, constants={"plan": plan, "scale": 0.125})


def sampling_rows(given: Arguments) -> SamplingRows:
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
    counted = ("repetition", "presence", "frequency", "penalty lines", "counts", "prompts")
    return SamplingRows(
        *(given[name] for name in names),
        penalties=Penalties(*(given[name] for name in counted)),
        bias=Bias(given["bias lines"], given["bias ids"], given["bias values"]),
        mask=Mask(given["mask lines"], given["mask bits"]),
        drafts=Drafts(given["draft tokens"], given["draft firsts"]) if "draft tokens" in given else None,
        scored=given["scored"],
    )


def sampling_wrappers() -> Iterator[Wrapper]:
    double, long = torch.float64, torch.int64
    rows: Arguments = {
        "logits": floats(ROWS, VOCAB),
        "temperature": floats(ROWS),
        "top_k": ints(ROWS),
        "top_p": floats(ROWS, dtype=double),
        "min_p": floats(ROWS, dtype=double),
        "seed": ints(ROWS, dtype=long),
        "position": ints(ROWS, dtype=long),
        "repetition": floats(ROWS),
        "presence": floats(ROWS),
        "frequency": floats(ROWS),
        "penalty lines": ints(ROWS),
        "counts": ints(2, VOCAB),
        "prompts": ints(2, VOCAB // 32),
        "bias lines": ints(ROWS),
        "bias ids": ints(2, 4),
        "bias values": floats(2, 4),
        "mask lines": ints(ROWS),
        "mask bits": ints(2, VOCAB // 32),
        "scored": ints(ROWS),
    }
    out = {name: floats(ROWS) for name in ("out.logprobs", "out.log_sums")}
    out |= {name: ints(ROWS) for name in ("out.tokens", "out.finite")}
    drafted = {"draft tokens": ints(ROWS), "draft firsts": ints(ROWS)}
    parts = ("out.tokens", "out.finite", "out.logprobs", "out.log_sums")
    like = {"bias ids": "bias values", "counts": "prompts"}

    def draw(given: Arguments) -> object:
        drawn = Drawn(*(given[name] for name in parts))
        return sampling.sample(given["logits"], sampling_rows(given), drawn)

    yield Wrapper(sampling.sample, rows | drafted | out, draw, instead=like | {"logits": "temperature"})

    def verify(given: Arguments) -> object:
        return triton_verify.verify(given["logits"], sampling_rows(given), given["drafts"], given["cu_rows"])

    guessed = {"drafts": ints(ROWS), "cu_rows": torch.tensor([0, 1, ROWS], dtype=torch.int32, device=DEVICE)}
    yield Wrapper(triton_verify.verify, rows | guessed, verify, instead=like | {"logits": "temperature"})

    def accept(given: Arguments) -> object:
        said = Penalties(floats(ROWS), floats(ROWS), floats(ROWS), given["penalty lines"], given["counts"], ints(2, 2))
        return triton_verify.accept(given["tokens"], given["drafts"], given["cu_rows"], said)

    accepted = {"tokens": ints(ROWS), "penalty lines": ints(ROWS), "counts": ints(2, VOCAB)}
    yield Wrapper(triton_verify.accept, guessed | accepted, accept, instead={"tokens": "drafts"})

    def top(given: Arguments) -> object:
        out = triton_logprobs.Top(given["out.ids"], given["out.logprobs"])
        return triton_logprobs.top_logprobs(given["logits"], given["log_sums"], 2, given["wanted"], out)

    told = {"log_sums": floats(ROWS), "wanted": ints(ROWS), "out.ids": ints(ROWS, 2), "out.logprobs": floats(ROWS, 2)}
    yield Wrapper(
        triton_logprobs.top_logprobs, {"logits": floats(ROWS, VOCAB)} | told, top, instead={"logits": "log_sums"}
    )


def spoiled(tensor: Tensor) -> dict[str, Tensor]:
    """What a wrapper may be given instead, by what is wrong with it."""
    apart = torch.zeros(*tensor.shape, 2, device=DEVICE).to(tensor.dtype)[..., 0]
    return {
        "dtype": tensor.to(torch.int16),
        "shape": tensor[None],
        "stride": apart,
        "device": torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"),
    }


ALL = list(wrappers())


def name_of(wrapper: Wrapper) -> str:
    return f"{wrapper.function.__module__.split('.')[1]}.{wrapper.function.__name__}"


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: object, **__: object) -> None:
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr(GridExecutor, "__call__", launch)
    monkeypatch.setattr(JITFunction, "run", launch)


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("wrapper", ALL, ids=name_of)
def test_a_wrong_tensor_is_refused_by_name_before_a_launch(wrapper: Wrapper) -> None:
    for name, tensor in wrapper.arguments.items():
        for wrong, instead in spoiled(tensor).items():
            if wrong in wrapper.free.get(name, ""):
                continue
            with pytest.raises(KernelArgumentError) as error:
                wrapper.call(wrapper.arguments | {name: instead})
            told = str(error.value)
            if wrong == "device":  # of two, either may be the one that is elsewhere
                assert " is on " in told, (name, wrong, told)
                continue
            assert name in told or wrapper.instead.get(name, name) in told, (name, wrong, told)
            if wrong == "shape":
                assert "has shape [" in told, (name, told)
                assert "expected [" in told, (name, told)


@pytest.mark.parametrize("wrapper", ALL, ids=name_of)
def test_what_is_right_is_taken(wrapper: Wrapper, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would hold of a wrapper that refuses everything."""
    launched: list[object] = []
    monkeypatch.setattr(GridExecutor, "__call__", lambda self, *_, **__: launched.append(self))
    monkeypatch.setattr(JITFunction, "run", lambda self, *_, **__: launched.append(self))
    wrapper.call(wrapper.arguments)
    assert launched


NOT_LAUNCHED_BY_TENSORS = {
    "silu_mul",  # is gate_mul
    "launch_shape", "whole_zeros", "check_float8", "check_alone", "stacked", "empty_drawn", "empty_top",
    "check_rows_of", "check_drawn",
    *(name for name, _ in inspect.getmembers(triton_weights, inspect.isfunction)),
}  # fmt: skip


def test_every_wrapper_is_in_the_table() -> None:
    known = {wrapper.function for wrapper in ALL}
    for module in pkgutil.walk_packages(kernels.__path__, "kernels."):
        if module.name.rpartition(".")[2].startswith("triton_") and not module.name.startswith("kernels.triton"):
            for name, function in inspect.getmembers(importlib.import_module(module.name), inspect.isfunction):
                own = function.__module__ == module.name and not name.startswith("_")
                if own and name not in NOT_LAUNCHED_BY_TENSORS and "Tensor" in str(inspect.signature(function)):
                    assert function in known, f"{module.name}.{name}"


def test_a_weight_whose_parts_do_not_fit_is_none() -> None:
    eight, four = int8_channels(floats(8, 32)), int4_groups(floats(8, 64), 32)
    assert eight.scales is not None
    for told, make in {
        r"data of weight has shape \[8, 32\], expected \[8, 31\]": lambda: DeviceWeight("plain", floats(8, 32), 31, 8),
        r"data of weight is torch\.float32, expected torch\.int8": lambda: DeviceWeight(
            "int8", floats(8, 32), 32, 8, scales=floats(8)
        ),
        r"scales of weight has shape \[7\], expected \[8\]": lambda: DeviceWeight(
            "int8", eight.data, 32, 8, scales=floats(7)
        ),
        r"data of weight has shape \[2, 8, 16\], expected \[1, 8, 32\]": lambda: DeviceWeight(
            "int4", four.data, 64, 8, 64, scales=floats(1, 8)
        ),
        "weight is int8: scales are for all": lambda: DeviceWeight("int8", eight.data, 32, 8),
        r"permutation of weight is torch\.int32": lambda: DeviceWeight(
            "plain", floats(8, 32), 32, 8, permutation=ints(32)
        ),
        r"data of weight of shape \[8, 32\] has strides": lambda: DeviceWeight("plain", floats(32, 8).T, 32, 8),
    }.items():
        with pytest.raises(KernelArgumentError, match=told):
            make()


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            lambda: attention.plan_attention([0, 1], [5], [[1]], 16, 2, 1, 48, DEVICE),
            "head_dim is 48, expected one of 64, 80",
        ),
        (lambda: attention.plan_attention([0, 1], [5], [[1]], 12, 2, 1, 64, DEVICE), "block_size 12 is not a power"),
        (
            lambda: attention.plan_attention([0, 1], [17], [[1]], 16, 2, 1, 64, DEVICE),
            r"block_tables\[0\] has 1 blocks",
        ),
        (
            lambda: attention.attend(
                floats(1, 2, 64),
                floats(2, 2, 1, 16, 64),
                attention.plan_attention([0, 1], [5], [[2]], 16, 2, 1, 64, DEVICE),
                0.125,
            ),
            r"block_tables name blocks 2 to 2, outside pool of shape \[2, 2, 1, 16, 64\]",
        ),
        (
            lambda: attention.attend(
                floats(1, 2, 64),
                floats(2, 2, 1, 8, 64),
                attention.plan_attention([0, 1], [5], [[1]], 16, 2, 1, 64, DEVICE),
                0.125,
            ),
            r"pool has shape \[2, 2, 1, 8, 64\], expected \[any, 2, 1, 16, 64\]",
        ),
        (
            lambda: rotary.rotary(floats(2, 4, 48), floats(16, 2, 48), ints(2), 2),
            "head_dim of qkv is 48, expected one of",
        ),
        (
            lambda: rotary.rotary_store_kv(
                floats(2, 4, 64), floats(16, 2, 64), ints(2), floats(2, 2, 1, 12, 64), ints(2), 2
            ),
            "block size of pool is 12, expected one of",
        ),
        (lambda: triton_blocks.zero_blocks(floats(4), ints(1, dtype=torch.int64)), r"pool has shape \[4\]"),
        (
            lambda: triton_kernel.linear(floats(2, 32), moe.stacked([plain(floats(8, 32))] * 2)),
            r"weight has shape \[2, 8, 32\], of experts",
        ),
        (
            lambda: moe.experts(floats(2, 32), plain(floats(16, 32)), plain(floats(32, 8)), ints(2, 2), floats(2, 2)),
            r"gate_up has shape \[16, 32\], expected weights of experts",
        ),
    ],
)
def test_sizes_that_no_kernel_has_are_refused(call: Callable[[], object], told: str) -> None:
    with pytest.raises(KernelArgumentError, match=told):
        call()
