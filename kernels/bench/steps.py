"""What stands between products in a step: norms, rotary with store, activation, sampling, experts; 8B shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from kernels.activation.triton_kernel import silu_mul
from kernels.bench import peers
from kernels.bench.row import Case
from kernels.embedding.triton_kernel import embed
from kernels.linear.triton_weights import DeviceWeight, plain
from kernels.moe.triton_kernel import experts, route, stacked
from kernels.norm.triton_kernel import add_rms_norm, rms_norm_heads
from kernels.rotary.triton_kernel import rotary_store_kv
from kernels.sampling.triton_kernel import sample
from kernels.sampling.triton_logprobs import top_logprobs
from kernels.sampling.triton_rows import MAX_BIASES, NO_BIAS, Bias, Mask, Penalties, SamplingRows
from kernels.sampling.triton_verify import verify

HIDDEN, WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4096, 14336, 32, 8, 128, 128256
Call = Callable[[], object]
_BF16 = torch.bfloat16


def cases() -> Iterator[Case]:
    # fewer rows than these stay in the cache, and their time is that of a launch
    for rows in (1, 256, 16384):
        yield _embedding(rows)
        yield _norm(rows)
        yield _norm_heads(rows)
        yield _activation(rows)
        yield _rotary(rows)
    for rows in (1, 64, 256):
        for name, (temperature, top_k, top_p, min_p) in SAMPLINGS.items():
            yield _sample(rows, name, temperature, top_k, top_p, min_p)
        for asked in sorted({0, min(8, rows), rows}):
            yield _adjusted(rows, asked)
        yield _top(rows)
    yield _verify(64, 4)
    for tokens in (1, 64, 4096):
        yield _experts(tokens)


SAMPLINGS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (1.0, 0, 1.0, 0.0),
    "top-k 50": (1.0, 50, 1.0, 0.0),
    "top-p 0.9": (1.0, 0, 0.9, 0.0),
    "top-k 50, top-p 0.9": (1.0, 50, 0.9, 0.0),
    "min-p 0.05": (1.0, 0, 1.0, 0.05),
}


def _norm(rows: int) -> Case:
    def make() -> tuple[Call, dict[str, Call]]:
        x, residual, weight = (
            torch.randn(*shape, dtype=_BF16, device="cuda") for shape in 2 * [(rows, HIDDEN)] + [(HIDDEN,)]
        )
        torch_way = lambda: F.rms_norm(residual.add_(x), (HIDDEN,), weight, 1e-5)  # noqa: E731
        return lambda: add_rms_norm(x, residual, weight, 1e-5), {"torch": torch_way}

    return Case("residual and norm", f"rows {rows}", 4 * 2 * rows * HIDDEN, 0, make)


def _norm_heads(rows: int) -> Case:
    """In place, over the query and key heads of a row that values follow."""
    heads = HEADS + KV_HEADS

    def make() -> tuple[Call, dict[str, Call]]:
        qkv = torch.randn(rows, heads + KV_HEADS, HEAD_DIM, dtype=_BF16, device="cuda")
        weight = torch.randn(HEAD_DIM, dtype=_BF16, device="cuda")
        torch_way = lambda: qkv[:, :heads].copy_(F.rms_norm(qkv[:, :heads], (HEAD_DIM,), weight, 1e-5))  # noqa: E731
        return lambda: rms_norm_heads(qkv[:, :heads], weight, 1e-5), {"torch": torch_way}

    return Case("norm of heads", f"rows {rows}", 2 * 2 * rows * heads * HEAD_DIM, 0, make)


def _embedding(rows: int) -> Case:
    def make() -> tuple[Call, dict[str, Call]]:
        table = torch.randn(VOCAB, HIDDEN, dtype=_BF16, device="cuda")
        ids = torch.randint(0, VOCAB, (rows,), dtype=torch.int32, device="cuda")
        source = torch.full_like(ids, -1)
        torch_way = lambda: F.embedding(ids, table)  # noqa: E731
        return lambda: embed(ids, source, ids, table, 1.0), {"torch": torch_way}

    return Case("embedding", f"rows {rows}", 2 * 2 * rows * HIDDEN, 0, make)


def _activation(rows: int) -> Case:
    def make() -> tuple[Call, dict[str, Call]]:
        gate_up = torch.randn(rows, 2 * WIDTH, dtype=_BF16, device="cuda")
        torch_way = lambda: F.silu(gate_up[:, :WIDTH]) * gate_up[:, WIDTH:]  # noqa: E731
        return lambda: silu_mul(gate_up), {"torch": torch_way}

    return Case("gated activation", f"rows {rows}", 3 * 2 * rows * WIDTH, 0, make)


def _rotary(rows: int) -> Case:
    heads = HEADS + 2 * KV_HEADS

    def make() -> tuple[Call, dict[str, Call]]:
        qkv = torch.randn(rows, heads, HEAD_DIM, dtype=_BF16, device="cuda")
        table = torch.randn(rows, 2, HEAD_DIM, device="cuda")
        index = torch.arange(rows, device="cuda")
        pool = torch.empty(-(-rows // 16), 2, KV_HEADS, 16, HEAD_DIM, dtype=_BF16, device="cuda")
        torch_way = lambda: peers.rotary_store(qkv, table, index, pool, index, HEADS)  # noqa: E731
        return lambda: rotary_store_kv(qkv, table, index, pool, index, HEADS), {"torch": torch_way}

    moved = rows * (2 * 2 * heads * HEAD_DIM + 2 * 4 * HEAD_DIM)
    return Case("rotary and store", f"rows {rows}", moved, 0, make)


def _sample(rows: int, name: str, temperature: float, top_k: int, top_p: float, min_p: float) -> Case:
    def make() -> tuple[Call, dict[str, Call]]:
        logits = torch.randn(rows, VOCAB, device="cuda") * 3

        def column(value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((rows,), value, dtype=dtype, device="cuda")

        index = torch.arange(rows, device="cuda")
        how = SamplingRows(
            column(temperature, torch.float32),
            column(top_k, torch.int32),
            column(top_p, torch.float64),
            column(min_p, torch.float64),
            index,
            index,
        )
        torch_way = lambda: peers.sample(logits, temperature, top_k, top_p, min_p)  # noqa: E731
        return lambda: sample(logits, how), {"torch": torch_way}

    return Case("sampling", f"rows {rows} {name}", 4 * rows * VOCAB, 0, make)


def _verify(sequences: int, each: int) -> Case:
    """Greedy rows of drafts; all of them are right for nobody."""
    rows = sequences * each

    def make() -> tuple[Call, dict[str, Call]]:
        logits = torch.randn(rows, VOCAB, device="cuda")
        zeros = torch.zeros(rows, device="cuda")
        index = torch.arange(rows, device="cuda")
        how = SamplingRows(zeros, zeros.int(), zeros.double() + 1, zeros.double(), index, index)
        cu_rows = torch.arange(0, rows + 1, each, dtype=torch.int32, device="cuda")
        drafts = zeros.int()
        torch_way = lambda: (logits.argmax(-1).view(sequences, each) == drafts.view(sequences, each)).cumprod(-1)  # noqa: E731
        return lambda: verify(logits, how, drafts, cu_rows), {"torch": torch_way}

    return Case("verification", f"sequences {sequences} rows {each}", 4 * rows * VOCAB, 0, make)


def _adjusted(rows: int, asked: int) -> Case:
    """As a worker launches it: some of the rows with penalties, 300 biases and a grammar's mask."""

    def make() -> tuple[Call, dict[str, Call]]:
        logits = torch.randn(rows, VOCAB, dtype=_BF16, device="cuda") * 3
        ones, index = torch.ones(rows, device="cuda"), torch.arange(rows, device="cuda")
        lines = torch.where(index < asked, index, -1).int()
        words = torch.full((rows, VOCAB // 32), 0x55555555, dtype=torch.int32, device="cuda")
        ids = torch.full((rows, MAX_BIASES), NO_BIAS, dtype=torch.int32, device="cuda")
        ids[:, :300] = torch.arange(0, 300 * 400, 400, device="cuda")
        counts = torch.zeros(rows, VOCAB, dtype=torch.int32, device="cuda")
        how = SamplingRows(
            temperature=ones,
            top_k=torch.full((rows,), 50, dtype=torch.int32, device="cuda"),
            top_p=ones.double() * 0.9,
            min_p=ones.double() * 0,
            seed=index,
            position=index,
            penalties=Penalties(ones * 1.1, ones * 0.5, ones * 0.5, lines, counts, words),
            bias=Bias(lines, ids, torch.ones_like(ids, dtype=torch.float32)),
            mask=Mask(lines, words),
            scored=torch.full_like(lines, -1),
        )
        penalties, mask = how.penalties, how.mask
        assert penalties is not None
        assert mask is not None
        few = Bias(lines, ids[:, :300], torch.ones_like(ids[:, :300], dtype=torch.float32))

        def torch_way() -> None:
            tokens = peers.sample(peers.adjusted(logits, asked, penalties, few, mask), 1.0, 50, 0.9, 0.0)
            counts[:asked].scatter_add_(1, tokens[:asked, None], torch.ones_like(counts[:asked, :1]))

        return lambda: sample(logits, how), {"torch": torch_way}

    return Case("sampling", f"rows {rows} adjusted {asked}", 2 * rows * VOCAB, 0, make)


def _top(rows: int) -> Case:
    def make() -> tuple[Call, dict[str, Call]]:
        logits = torch.randn(rows, VOCAB, device="cuda")
        sums = logits.logsumexp(-1)
        return lambda: top_logprobs(logits, sums, 20), {"torch": lambda: torch.topk(logits, 20)}

    return Case("top log-probabilities", f"rows {rows} top 20", 4 * rows * VOCAB, 0, make)


def _experts(tokens: int, num_experts: int = 8, top_k: int = 2) -> Case:
    """Mixtral's shape."""

    def make() -> tuple[Call, dict[str, Call]]:
        def weights(out_features: int, in_features: int) -> DeviceWeight:
            return plain(torch.randn(out_features, in_features, dtype=_BF16, device="cuda") * in_features**-0.5)

        up = stacked([weights(2 * WIDTH, HIDDEN) for _ in range(num_experts)])
        down = stacked([weights(HIDDEN, WIDTH) for _ in range(num_experts)])
        x = torch.randn(tokens, HIDDEN, dtype=_BF16, device="cuda")
        router = torch.randn(tokens, num_experts, device="cuda")

        def call() -> object:
            ids, shares = route(router, top_k)
            return experts(x, up, down, ids, shares)

        torch_way = lambda: peers.experts(x, up.data, down.data, router, top_k)  # noqa: E731
        grouped = lambda: peers.grouped_experts(x, up.data, down.data, router, top_k)  # noqa: E731
        every: dict[str, Call] = {"torch, all experts": torch_way} if tokens < 1000 else {}
        return call, {"torch, grouped": grouped} | every

    used = min(num_experts, tokens * top_k)
    matrix = 3 * HIDDEN * WIDTH
    return Case("experts", f"tokens {tokens}", 2 * used * matrix, 2.0 * tokens * top_k * matrix, make)
