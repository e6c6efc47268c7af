"""The decoder against transformers, in float64 and float32, on a tiny model and on the default one.

transformers' Llama norm casts to float32 even in a float64 model; the float64 reference leaves that one cast out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.contracts.errors import SettingsError
from shared.contracts.ids import WorkerId
from shared.engine.model_runner import ModelRunner
from shared.engine.step_plan import StepPlan
from shared.kv.layout import PoolLayout
from shared.kv.pool import create_pool
from shared.model.config import layer_groups
from shared.model.decoder import DTYPES, Model, load_decoder
from shared.model.folder import weight_files
from tests.native import require_native
from tests.tiny_models import GREEDY, make_tiny_model, random_tokens, sequence

LENGTHS = (1, 15, 16, 17, 200)
MODEL_LENGTHS = [
    pytest.param((*LENGTHS, 600), id="600"),  # over the 512 of a split
    pytest.param((*LENGTHS, 1000), marks=pytest.mark.long, id="1000"),
]
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "untied": {"tie_word_embeddings": False, "num_key_value_heads": 1, "head_dim": 32},
    "multi-head": {
        "num_key_value_heads": 4,
        "num_hidden_layers": 2,
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
    },
    "bfloat16 file": {"dtype": torch.bfloat16, "num_hidden_layers": 2},
    "shards": {"shards": "200KB", "tie_word_embeddings": False},
    "biases": {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 2},
    "linear": {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
    "dynamic": {"max_position_embeddings": 40, "rope_parameters": {"rope_type": "dynamic", "factor": 6.0}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "yarn": {
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
}
"""Those with scaled rotary embeddings have an original context below the longest prompt."""


@pytest.fixture(scope="module", params=VARIANTS)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), **VARIANTS[request.param])


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["torch", "native"])
def kernels(request: pytest.FixtureRequest) -> str:
    if request.param == "native":
        require_native()
    return str(request.param)


@contextmanager
def plain_norm() -> Iterator[None]:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    original = LlamaRMSNorm.forward
    LlamaRMSNorm.forward = forward
    try:
        yield
    finally:
        LlamaRMSNorm.forward = original


@lru_cache(maxsize=3)
def reference_model(folder: Path, dtype: str) -> Any:
    """transformers' own model; kept, since several checks of a folder in turn use the same."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype], attn_implementation="sdpa").eval()


def reference_logits(model: Any, token_ids: list[int]) -> Tensor:
    """[len(token_ids), vocab_size]; with dynamic scaling one token a call once the original context is full."""
    whole = len(token_ids)
    if model.config.rope_parameters["rope_type"] == "dynamic":
        # below the limit, which also brings the frequencies of an earlier call back
        whole = min(whole, model.config.max_position_embeddings - 1)
    parts: list[Tensor] = []
    with torch.no_grad():
        cache = None
        for call in (token_ids[:whole], *([token] for token in token_ids[whole:])):
            output = model(torch.tensor([call]), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            parts.append(output.logits[0])
    return torch.cat(parts)


@lru_cache(maxsize=2)
def their_logits(folder: Path, dtype: str, lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
    """transformers' logits of each length's random tokens, in float64 the exact ones; computed once for all checks."""
    with plain_norm() if dtype == "float64" else nullcontext():
        model = reference_model(folder, dtype)
        return tuple(reference_logits(model, random_tokens(n, model.config.vocab_size, seed=n)) for n in lengths)


@pytest.fixture(scope="module", autouse=True)
def _forget_references() -> Iterator[None]:
    yield
    their_logits.cache_clear()
    reference_model.cache_clear()


def our_logits(model: Model, dtype: str, token_ids: list[int], folder: Path, chunks: tuple[int, ...] = ()) -> Tensor:
    """[len(token_ids), vocab_size], over a pool of NaN, computed as one step or in steps of so many tokens."""
    rows: dict[int, Tensor] = {}
    num_blocks = -(-len(token_ids) // 32)
    layout = PoolLayout(layer_groups(model.config, 32, dtype, tile_layout=model.kernels.tile_layout), (num_blocks + 1,))
    with create_pool(folder, WorkerId("decode-test"), layout) as pool:
        pool.views()[0].fill_(float("nan"))
        runner = ModelRunner(model, pool, lambda _, position, row: rows.__setitem__(position, row.clone()))
        blocks = list(range(num_blocks, 0, -1))
        start = 0
        for step, size in enumerate(chunks or (len(token_ids),), start=1):
            part = token_ids[start : start + size]
            planned = sequence("a", part, blocks, start=start, num_logits=size, sampling=None)
            runner.run(StepPlan(step, (planned,)))
            start += size
    return torch.stack([rows[i] for i in range(len(token_ids))])


def check_float64(folder: Path, lengths: tuple[int, ...], tmp_path: Path) -> None:
    model = load_decoder(folder, "float64")
    for length, expected in zip(lengths, their_logits(folder, "float64", lengths), strict=True):
        token_ids = random_tokens(length, model.config.vocab_size, seed=length)
        error = (our_logits(model, "float64", token_ids, tmp_path) - expected).abs().max().item()
        print(f"float64, {length} tokens: max error {error:.2g}")
        assert error <= 1e-9


def check_float32(folder: Path, lengths: tuple[int, ...], tmp_path: Path, kernels: str) -> None:
    exact, reference = (their_logits(folder, dtype, lengths) for dtype in ("float64", "float32"))
    model = load_decoder(folder, "float32", kernels)
    ours, theirs = [], []
    for length, right, near in zip(lengths, exact, reference, strict=True):
        token_ids = random_tokens(length, model.config.vocab_size, seed=length)
        ours.append((our_logits(model, "float32", token_ids, tmp_path) - right).abs().max().item())
        theirs.append((near - right).abs().max().item())
        print(f"float32, {length} tokens: max error {ours[-1]:.2g}, transformers {theirs[-1]:.2g}")
    # over all lengths: the largest error of a single row is a matter of luck on both sides
    assert max(ours) <= 2 * max(theirs)
    assert max(ours) <= 3e-4


def check_bfloat16(folder: Path, lengths: tuple[int, ...], tmp_path: Path) -> None:
    """Native kernels keep more bits than transformers does in bfloat16, and never fewer than it by much."""
    exact, reference = (their_logits(folder, dtype, lengths) for dtype in ("float64", "bfloat16"))
    model = load_decoder(folder, "bfloat16", "native")
    prompts = [random_tokens(length, model.config.vocab_size, seed=length) for length in lengths]
    ours = [
        (our_logits(model, "bfloat16", p, tmp_path) - e).norm() / e.norm() for p, e in zip(prompts, exact, strict=True)
    ]
    theirs = [(r - e).norm() / e.norm() for r, e in zip(reference, exact, strict=True)]
    print(f"bfloat16: relative errors {[f'{x:.3g}' for x in ours]}, transformers {[f'{x:.3g}' for x in theirs]}")
    assert max(ours) <= 1.1 * max(theirs)


def check_greedy(folder: Path, prompts: list[list[int]], num_tokens: int, tmp_path: Path) -> None:
    """Equal to transformers' greedy tokens up to the first position that float64 calls a near-tie."""
    reference = reference_model(folder, "float32")
    model = load_decoder(folder, "float32")
    near_ties = 0
    for prompt in prompts:
        theirs = reference.generate(
            torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0].tolist()
        ours = greedy_tokens(model, prompt, num_tokens, tmp_path)
        if ours == theirs:
            continue
        at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
        with plain_norm():
            exact = reference_model(folder, "float64")
            best, second = reference_logits(exact, theirs[:at])[-1].topk(2).values.tolist()
        assert best - second < 1e-3, f"differs at {at}, where the gap is {best - second}"
        near_ties += 1
    print(f"greedy: {len(prompts)} prompts, {near_ties} ended at a near-tie")


def greedy_tokens(model: Model, prompt: list[int], num_tokens: int, folder: Path) -> list[int]:
    num_blocks = -(-(len(prompt) + num_tokens) // 32)
    layout = PoolLayout(layer_groups(model.config, 32, "float32", tile_layout=model.kernels.tile_layout), (num_blocks,))
    token_ids = list(prompt)
    with create_pool(folder, WorkerId("decode-test"), layout) as pool:
        runner = ModelRunner(model, pool)
        start = 0
        for step in range(num_tokens):
            planned = sequence("a", token_ids[start:], list(range(num_blocks)), start=start, sampling=GREEDY)
            start = len(token_ids)
            token_ids += runner.run(StepPlan(step + 1, (planned,))).sampled[0]
    return token_ids


def test_a_small_limit_makes_several_files(tmp_path: Path) -> None:
    assert len(weight_files(make_tiny_model(tmp_path, **VARIANTS["shards"]))) > 2


def test_float64_equals_transformers(tiny: Path, tmp_path: Path) -> None:
    check_float64(tiny, LENGTHS, tmp_path)


def test_float32_is_as_near_as_transformers(tiny: Path, tmp_path: Path, kernels: str) -> None:
    check_float32(tiny, LENGTHS, tmp_path, kernels)


def test_native_bfloat16_is_as_near_as_transformers(tiny: Path, tmp_path: Path) -> None:
    require_native()
    check_bfloat16(tiny, LENGTHS, tmp_path)


def test_greedy_tokens_equal_transformers(tiny: Path, tmp_path: Path) -> None:
    check_greedy(tiny, [random_tokens(n, 320, seed=n) for n in (1, 33)], 24, tmp_path)


@pytest.mark.parametrize("stored", [torch.float64, torch.float16], ids=str)
def test_native_reads_every_dtype_of_a_checkpoint(tmp_path: Path, stored: torch.dtype) -> None:
    require_native()
    folder = make_tiny_model(tmp_path / "tiny", dtype=stored, num_hidden_layers=2)
    check_float32(folder, (17, 40), tmp_path, "native")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_change_no_bit(tiny: Path, tmp_path: Path, dtype: str, kernels: str) -> None:
    """Of scaled rotary embeddings and of biases too: a row depends on its position and its tokens alone."""
    model = load_decoder(tiny, dtype, kernels, threads=2)
    token_ids = random_tokens(150, model.config.vocab_size, seed=3)
    whole = our_logits(model, dtype, token_ids, tmp_path)
    for chunks in ((1, 149), (39, 1, 24, 86), (64,) + (1,) * 86):
        assert torch.equal(our_logits(model, dtype, token_ids, tmp_path, chunks), whole)


def test_a_model_without_its_head_refuses_to_make_logits(tiny: Path, tmp_path: Path, kernels: str) -> None:
    token_ids = random_tokens(20, 100, seed=3)
    with pytest.raises(ValueError, match="without its head"):
        our_logits(load_decoder(tiny, "float32", kernels, with_head=False), "float32", token_ids, tmp_path)


@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lengths", MODEL_LENGTHS)
def test_default_model_float64(default_model_dir: Path, tmp_path: Path, lengths: tuple[int, ...]) -> None:
    check_float64(default_model_dir, lengths, tmp_path)


@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lengths", MODEL_LENGTHS)
def test_default_model_float32(default_model_dir: Path, tmp_path: Path, lengths: tuple[int, ...], kernels: str) -> None:
    check_float32(default_model_dir, lengths, tmp_path, kernels)


@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lengths", MODEL_LENGTHS)
def test_default_model_native_bfloat16(default_model_dir: Path, tmp_path: Path, lengths: tuple[int, ...]) -> None:
    require_native()
    check_bfloat16(default_model_dir, lengths, tmp_path)


@pytest.mark.model
@pytest.mark.timeout(900)
def test_default_model_greedy(default_model_dir: Path, tmp_path: Path) -> None:
    prompts = [random_tokens(n, 49152, seed=n) for n in (5, 40)]
    check_greedy(default_model_dir, prompts, 32, tmp_path)


def test_unusable_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="float16"):
        load_decoder(tmp_path, "float16")
    with pytest.raises(SettingsError, match="fast"):
        load_decoder(tmp_path, "float32", kernels="fast")


@pytest.mark.model
@pytest.mark.timeout(600)
def test_default_model_float32_lone_tokens(default_model_dir: Path, tmp_path: Path) -> None:
    """One prompt of one token is too few rows to judge by: its greatest error scatters by a factor of four."""
    draw = torch.Generator().manual_seed(0)
    prompts = [[int(i)] for i in torch.randint(3, 49_000, (24,), generator=draw)]
    with plain_norm(), torch.no_grad():
        # all at once: in float64 the order of a sum is far below what is judged
        truth = reference_model(default_model_dir, "float64")(torch.tensor(prompts)).logits
    reference, model = reference_model(default_model_dir, "float32"), load_decoder(default_model_dir, "float32")
    own, theirs = [], []
    for prompt, right in zip(prompts, truth, strict=True):
        own.append(float((our_logits(model, "float32", prompt, tmp_path).double() - right).abs().max()))
        theirs.append(float((reference_logits(reference, prompt).double() - right).abs().max()))
    print(f"float32, 24 prompts of 1 token: median error {median(own):.2g}, transformers {median(theirs):.2g}")
    print(f"float32, 24 prompts of 1 token: max error {max(own):.2g}, transformers {max(theirs):.2g}")
    assert median(own) <= 2 * median(theirs)
    assert max(own) <= min(2 * max(theirs), 3e-4)
