"""Integer weights, 8-bit KV and exact sums through whole tiny models, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.testing import DEVICE, INTERPRETED, require_float8

# isort: split
from kernels.dispatch import choose
from kernels.linear.quantize import GPU_QUANTS, NONE, QUANTS, Int4Weight, to_int4, to_int8
from kernels.linear.triton_weights import dequantized
from loadtest import quality
from shared.contracts.attempt import Attempt
from shared.contracts.errors import SettingsError
from shared.contracts.ids import BlockGeneration, Dispatch, Epoch, RequestId
from shared.contracts.parts import BlockRef
from shared.engine.numerics import numerics_id
from shared.engine.step_plan import ScheduledSequence
from shared.kv.device_spans import digests_of, pull_blocks, span_of, warm, zero_rest_on_device
from shared.kv.handoff_sink import PullItem
from shared.model import device_decoder
from shared.model.device_decoder import load_device_decoder
from shared.model.device_packing import packed
from shared.model.quality_gate import Configuration
from tests.device_models import BLOCK, BLOCKS, GREEDY, SIZES, TOKENS, VOCAB, Runs, llama, part, save
from tests.tiny_models import make_tiny_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered"),  # numpy's, in the interpreter
    *([] if INTERPRETED else [pytest.mark.gpu]),
]

IDS = torch.randint(3, VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
ATTEMPT = Attempt(RequestId("r-1"), Epoch(1), Dispatch(1))


ONE_LAYER = SIZES | {"num_hidden_layers": 1}


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**ONE_LAYER, num_local_experts=4, num_experts_per_tok=2))


def tied_qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**ONE_LAYER, tie_word_embeddings=True))


def with_rounded_weights(folder: Path, quant: str, to: Path) -> Path:
    """The same checkpoint, its weights those that integers stand for: of layers, and of the head with 8 bits."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"].clone())
    group = QUANTS[quant].group
    for name, weight in weights.items():
        if name == "lm_head.weight" or (name.endswith(("_proj.weight", "w1.weight", "w2.weight", "w3.weight"))):
            four = QUANTS[quant].bits == 4 and name != "lm_head.weight"
            weights[name] = to_int4(weight, group).floats() if four else to_int8(weight).floats()
    to.mkdir()
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return to


@pytest.mark.parametrize(("make", "quant"), [(mixtral, "int4"), (tied_qwen3, "int8")])
def test_integer_weights_give_the_logits_of_what_they_stand_for(
    make: Callable[[], Any], quant: str, tmp_path: Path
) -> None:
    plain = save(make, tmp_path / "plain")
    rounded = with_rounded_weights(tmp_path / "plain", quant, tmp_path / "rounded")
    judge = type(plain).from_pretrained(rounded, dtype=torch.float32).eval()
    with torch.no_grad():
        expected, unrounded = (model(torch.tensor(IDS[:16])[None]).logits[0] for model in (judge, plain))
    model = load_device_decoder(tmp_path / "plain", "float32", DEVICE.type, quant=quant)
    qkv = model.weights.layers[0].qkv
    assert qkv.data.nbytes * 8 == qkv.out_features * qkv.in_features * QUANTS[quant].bits
    runs = Runs(model)

    runs.run(part("a", IDS[:14], 0, BLOCKS[0]))
    for i in (14, 15):
        runs.run(part("a", IDS[i : i + 1], i, BLOCKS[0]))

    found = torch.stack([runs.rows["a", i] for i in range(16)])
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (found - unrounded).abs().max() > 1e-2 * expected.abs().max(), "rounding shows"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save(llama, path)
    return path


def rounds(dtype: str) -> Callable[[Tensor], Tensor]:
    """Vectors as a pool of that dtype keeps them: [..., head_dim]."""

    def of(x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True) / (127.0 if dtype == "int8" else 448.0)
        y = (x / scale).round() if dtype == "int8" else (x / scale).to(torch.float8_e4m3fn).float()
        return y * scale

    return of


def last(seq_id: str, start: int, end: int, blocks: tuple[int, ...]) -> ScheduledSequence:
    """Tokens [start, end) of `IDS`, with logits of the last."""
    return ScheduledSequence(seq_id, start, tuple(IDS[start:end]), (blocks,), 1, GREEDY)


def a_few_steps(runs: Runs) -> Tensor:
    runs.run(last("a", 0, 15, BLOCKS[0]))
    for i in (15, 16):
        runs.run(last("a", i, i + 1, BLOCKS[0]))
    return torch.stack([runs.rows["a", i] for i in (14, 15, 16)])


@pytest.fixture(scope="module")
def plain(folder: Path) -> Tensor:
    """Logits over KV that is not rounded."""
    return a_few_steps(Runs(load_device_decoder(folder, "float32", DEVICE.type)))


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_kv_of_8_bits_gives_the_logits_of_what_it_stands_for(
    kv_dtype: str, folder: Path, plain: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_float8(kv_dtype)
    model = load_device_decoder(folder, "float32", DEVICE.type)
    store, rounded = device_decoder.rotary_store_kv, rounds(kv_dtype)

    def store_rounded(qkv: Tensor, table: Tensor, positions: Tensor, pool: Tensor, slots: Tensor, *rest: Any) -> None:
        store(qkv, table, positions, pool, slots, *rest)
        for slot in slots[slots >= 0].tolist():
            row = pool[slot // pool.shape[3], :, :, slot % pool.shape[3]]
            row.copy_(rounded(row))

    eight = Runs(model, kv_dtype=kv_dtype)
    found = a_few_steps(eight)
    with monkeypatch.context() as patch:
        patch.setattr(device_decoder, "rotary_store_kv", store_rounded)
        expected = a_few_steps(Runs(model))

    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (found - plain).abs().max() > 1e-3 * expected.abs().max(), "rounding shows"
    assert str(eight.pool.dtype) == f"torch.{kv_dtype}"
    assert eight.scales is not None
    second = BLOCKS[0][1]
    assert bool((eight.scales[second, ..., :1] > 0).all())
    assert bool(torch.isnan(eight.scales[second, ..., 1:]).all()), "scales of rows that nobody stored"

    eight.runner.zero_blocks([(0, second)])()
    zeroed = eight.data.view(len(eight.pool), -1).eq(0).all(1)
    assert zeroed.nonzero().flatten().tolist() == [second]


def hand_over(source: Runs, target: Runs, num_tokens: int) -> None:
    """Pull what `source` has of a sequence in `BLOCKS[0]` into `target`'s `BLOCKS[1]`, as workers do."""
    group, to = source.layout.groups[0], BLOCKS[1]
    valid = [min(num_tokens - first, BLOCK) for first in range(0, num_tokens, BLOCK)]
    blocks = [(0, block, 7, position) for position, block in enumerate(BLOCKS[0][: len(valid)])]
    with torch.inference_mode():
        # a worker's blocks are zeroed when they are taken; these began as NaN
        zero_rest_on_device(span_of(source.data, source.layout, *blocks[-1][:2]), group, valid[-1])
        digests = digests_of(source.data, source.layout, ATTEMPT, blocks)
        items = [
            PullItem(0, position, BlockRef(block, BlockGeneration(7), digest), count)
            for (_, block, _, position), digest, count in zip(blocks, digests, valid, strict=True)
        ]
        assert pull_blocks(source.data, source.layout, target.data, target.layout, items, [to]) == items
        own = [(0, to[position], 7, position) for position in range(len(valid))]
        assert digests_of(target.data, target.layout, ATTEMPT, own) == digests


@pytest.mark.parametrize(
    ("dtype", "quant", "kv_dtype", "prompt"),
    [("bfloat16", "none", "", 20), ("float32", "int4", "int8", 16)],
    ids=["bfloat16", "int4"],
)
def test_exact_rows_do_not_depend_on_how_they_were_run(
    dtype: str, quant: str, kv_dtype: str, prompt: int, folder: Path
) -> None:
    """Whole or in chunks, alone or batched, local or handed off: the same bits of KV and logits."""
    model = load_device_decoder(folder, dtype, DEVICE.type, quant=quant, exact=True)
    end = prompt + 2
    alone, beside, prefill, decode = (Runs(model, kv_dtype=kv_dtype) for _ in range(4))

    alone.run(last("a", 0, prompt, BLOCKS[0]))
    for i in range(prompt, end):
        alone.run(last("a", i, i + 1, BLOCKS[0]))

    beside.run(last("b", 0, 2, BLOCKS[1]), last("a", 0, 7, BLOCKS[0]))
    beside.run(last("a", 7, prompt, BLOCKS[0]), last("b", 2, 6, BLOCKS[1]))
    for i in range(prompt, end):
        c, d = (last(seq_id, i - prompt, i - prompt + 1, (block,)) for seq_id, block in (("c", 0), ("d", 4)))
        beside.run(c, last("a", i, i + 1, BLOCKS[0]), d)

    prefill.run(ScheduledSequence("a", 0, tuple(IDS[: prompt - 1]), (BLOCKS[0],), 0, None))
    hand_over(prefill, decode, prompt - 1)
    for i in range(prompt - 1, end):
        decode.run(last("a", i, i + 1, BLOCKS[1]))

    for i in range(prompt - 1, end):
        expected = alone.rows["a", i]
        assert torch.isfinite(expected).all()
        assert torch.equal(beside.rows["a", i], expected), i
        assert torch.equal(decode.rows["a", i], expected), i
    for other, table in ((beside, BLOCKS[0]), (decode, BLOCKS[1])):
        for position, (mine, its) in enumerate(zip(BLOCKS[0][:2], table, strict=False)):
            count = min(end - position * BLOCK, BLOCK)
            assert torch.equal(other.pool[its, ..., :count, :], alone.pool[mine, ..., :count, :])
            if alone.scales is not None:
                assert other.scales is not None
                assert torch.equal(other.scales[its, ..., :count], alone.scales[mine, ..., :count])


def test_digests_see_a_scale_a_tail_and_a_place(folder: Path) -> None:
    model = load_device_decoder(folder, "float32", DEVICE.type)
    runs, peer = Runs(model, kv_dtype="int8"), Runs(model, kv_dtype="int8")
    with torch.inference_mode():
        runs.data.random_(0, 256, generator=torch.Generator(DEVICE).manual_seed(0))
    block = [(0, 5, 7, 2)]

    def digest() -> bytes:
        (found,) = digests_of(runs.data, runs.layout, ATTEMPT, block)
        return found

    first = digest()
    assert digests_of(runs.data, runs.layout, ATTEMPT, [(0, 5, 8, 2), (0, 6, 7, 2), (0, 5, 7, 2)])[2] == first
    assert len({first, *digests_of(runs.data, runs.layout, ATTEMPT, [(0, 5, 8, 2), (0, 6, 7, 2)])}) == 3
    span = runs.layout.groups[0].span_bytes
    last = runs.data[6 * span - 1]  # of block 5: the highest byte of its last scale
    last ^= 1
    assert digest() != first
    last ^= 1
    assert digest() == first

    items = [
        PullItem(0, 0, BlockRef(5, BlockGeneration(7), first), 3),
        PullItem(0, 1, BlockRef(99, BlockGeneration(7), first), 16),
    ]
    with torch.inference_mode():
        arrived = pull_blocks(runs.data, runs.layout, peer.data, peer.layout, items, [(2, 4)])
    assert arrived == items[:1], "a block that the peer's pool does not have"
    assert peer.scales is not None
    assert runs.scales is not None
    assert torch.equal(peer.pool[2, ..., :3, :], runs.pool[5, ..., :3, :])
    assert torch.equal(peer.scales[2, ..., :3].view(torch.int32), runs.scales[5, ..., :3].view(torch.int32))
    assert not bool(peer.pool[2, ..., 3:, :].any())
    assert not bool(peer.scales[2, ..., 3:].any())
    untouched = peer.data.view(len(peer.pool), -1)[4]
    assert bool((untouched == 0xFF).all())
    before = runs.data.view(len(runs.pool), -1).clone()
    with torch.inference_mode():
        warm(runs.data, runs.layout)
    after = runs.data.view(len(runs.pool), -1)
    assert torch.equal(after[1:], torch.cat((before[:1], before[2:])))
    assert not bool(after[0].any())


def test_a_checkpoint_s_own_integers_are_kept() -> None:
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    kept = to_int4(weight, 32)
    halved = Int4Weight(kept.integers // 2, kept.scales, kept.minima, 32)  # no range of its own would give these
    found = dequantized(packed([halved, weight], QUANTS["int4"]))
    assert torch.allclose(found, torch.cat([halved.floats(), kept.floats()]).double(), atol=1e-6)
    eight = packed([halved, weight], QUANTS["int8"])
    assert torch.equal(eight.data, to_int8(torch.cat([halved.floats(), weight])).integers)
    assert not torch.allclose(found[:48], dequantized(packed([halved.floats()], QUANTS["int4"])), atol=1e-6)


def test_what_has_no_integers_is_told_by_name(folder: Path) -> None:
    with pytest.raises(SettingsError, match=r"'int4-g128': model\.layers\.0\..*q_proj\.weight: .*64 input") as error:
        load_device_decoder(folder, "float32", DEVICE.type, quant="int4-g128")
    assert error.value.param == "quant"
    with pytest.raises(SettingsError, match="quant 'int3' is none of none, int8"):
        load_device_decoder(folder, "float32", DEVICE.type, quant="int3")


def test_every_format_is_another_numerics_id(folder: Path) -> None:
    plain, exact = (load_device_decoder(folder, "float32", DEVICE.type, exact=exact) for exact in (False, True))
    ids = {
        numerics_id("float32", model.kernels, quant, kv_dtype)
        for model in (plain, exact)
        for quant in (NONE, QUANTS["int8"], GPU_QUANTS["w8a8"], GPU_QUANTS["fp8"])
        for kv_dtype in ("float32", "int8", "float8_e4m3fn")
    }
    assert len(ids) == 24
    assert plain.kernels == choose("triton")


def test_a_gpu_s_configurations_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over more than one window and chunk; KV of 8 bits and integer weights are farther off than bfloat16."""
    require_float8("fp8")
    folder = make_tiny_model(tmp_path, num_hidden_layers=1, head_dim=64)
    monkeypatch.setattr(quality, "load_sets", lambda _: {"code": IDS[:20]})
    monkeypatch.setattr(quality, "WINDOW", 12)
    monkeypatch.setattr(quality, "CHUNK", 8)
    wanted = [
        Configuration("triton", "float32"),
        Configuration("triton", "float32", "int8", "int8"),
        Configuration("triton", "float32", "fp8"),
    ]
    plain, eight, rows = quality.measure(folder, wanted, 1)
    assert [record.configuration for record in (plain, eight, rows)] == wanted
    assert plain.sets["code"].positions == eight.sets["code"].positions == 20
    assert plain.kl < 1e-6 < eight.kl < 0.1
    assert 1e-6 < rows.kl < 0.1
    assert "float32-fp8" in rows.numerics
    assert plain.sets["code"].top1 == 1.0
    assert "float32-int8" in eight.numerics
    assert "-kv.int8-" in eight.numerics
    assert (plain.numerics, plain.model) == (numerics_id("float32", choose("triton")), eight.model)
