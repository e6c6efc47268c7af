"""A worker on a GPU: its pool sized by measurement, its tokens, and blocks pulled from another process's pool."""

from __future__ import annotations

import multiprocessing
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.testing import require_float8

# isort: split
from shared.contracts.attempt import Attempt
from shared.contracts.errors import SettingsError
from shared.contracts.ids import BlockGeneration, Incarnation, RequestId, WorkerId
from shared.contracts.parts import BlockRef
from shared.contracts.sampling import SamplingParams
from shared.engine.sequence_spec import SequenceSpec
from shared.engine.sequence_update import SequenceUpdate
from shared.engine.worker_engine import WorkerEngine, WorkerOptions, open_worker_engine
from shared.grammar.source import regex_grammar
from shared.kv.handoff_sink import Pull, PullItem
from shared.kv.layout import LayerGroup, PoolLayout
from tests.tiny_tokenizer import tiny_tokenizer, tokenizer_json

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

GROUP = LayerGroup("full", (0, 1), num_kv_heads=2, head_dim=64, block_size=16, dtype="bfloat16")
LAYOUT = PoolLayout((GROUP,), (6,))
ATTEMPT = Attempt(RequestId("r-1"), 1, 1)
WAIT_S = 60.0


def own_blocks(folder: str, pipe: Connection) -> None:
    """A peer: a pool of known bytes, until it is told to go."""
    from shared.kv.device_pool import create_device_pool

    pool = create_device_pool(Path(folder), WorkerId("prefill-peer"), LAYOUT, torch.device("cuda", 0))
    for block in range(6):
        pool.tensor(0, block).random_(0, 256, generator=torch.Generator("cuda").manual_seed(block))
    # the tail of block 4: rows from 5 on are nobody's
    pool.views()[0].values[4, :, :, :, 5:] = 0
    torch.cuda.synchronize()
    blocks = [(0, 3, 7, 0), (0, 4, 7, 1)]
    digests = pool.digests(ATTEMPT, blocks)
    pool.views()[0].values[4, :, :, :, 5:] = 1
    torch.cuda.synchronize()
    pipe.send((digests, [bytes(pool.span(0, block)) for _, block, _, _ in blocks]))
    pipe.recv()
    pool.close()


def test_blocks_are_pulled_from_another_process(tmp_path: Path) -> None:
    from shared.kv.device_pool import create_device_pool
    from shared.kv.device_transfer import DeviceTransport

    here, there = multiprocessing.Pipe()
    peer = multiprocessing.get_context("spawn").Process(target=own_blocks, args=(str(tmp_path), there))
    peer.start()
    assert here.poll(WAIT_S)
    digests, spans = here.recv()
    device = torch.device("cuda", 0)
    pool = create_device_pool(tmp_path, WorkerId("decode-me"), LAYOUT, device)
    transport = DeviceTransport(tmp_path, (GROUP,), pool, device)

    def pull(*found: bytes) -> Any:
        items = [
            PullItem(0, position, BlockRef(block, BlockGeneration(7), digest), valid)
            for position, (block, digest, valid) in enumerate(zip((3, 4), found, (16, 5), strict=True))
        ]
        wanted = Pull(1, ATTEMPT, WorkerId("prefill-peer"), Incarnation(1), "prefill-peer.kvpool", tuple(items))
        return transport.pull(wanted, [[2, 5]], ())

    result = pull(*digests)
    assert not result.error
    assert result.bad == ()
    assert result.num_bytes == 2 * GROUP.span_bytes
    assert bytes(pool.span(0, 2)) == spans[0]
    assert bool((pool.views()[0].values[5, :, :, :, 5:] == 0).all())
    assert pull(digests[0], b"x" * 16).bad == ((0, 1),)

    here.send("go")
    peer.join(WAIT_S)
    transport.drop_dead()
    assert "cannot be opened" in pull(*digests).error
    transport.close()
    pool.close()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    from transformers import LlamaForCausalLM

    from tests.tiny_models import make_tiny_model

    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"), head_dim=64, num_hidden_layers=2)
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32), folder


def options(folder: Path, kv_dir: Path, **changes: Any) -> WorkerOptions:
    wanted: dict[str, Any] = {
        "dtype": "float32",
        "device": "cuda",
        "block_size": 16,
        "token_budget": 64,
        "max_num_seqs": 8,
        "pool_bytes": 64 << 20,
        "gpu_share": 0.3,
    }
    return WorkerOptions(folder, kv_dir, **wanted | changes)


def complete(core: WorkerEngine, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy tokens of all prompts at once, by the engine's threads."""
    drawn: dict[str, list[int]] = {f"s{i}": [] for i in range(len(prompts))}
    ended, errors = threading.Event(), list[str]()

    def on_updates(updates: list[SequenceUpdate]) -> None:
        for update in updates:
            drawn[update.seq_id] += update.token_ids
            errors.extend([update.detail] if update.finish == "error" else [])
        if errors or all(len(tokens) == count for tokens in drawn.values()):
            ended.set()

    core.on_updates = on_updates
    sampling = SamplingParams(max_tokens=count, temperature=0.0)
    for i, prompt in enumerate(prompts):
        spec = SequenceSpec(f"s{i}", tuple(prompt), len(prompt), sampling)
        core.engine.call(lambda batcher, spec=spec: batcher.reserve(spec)).result(WAIT_S)
    assert ended.wait(WAIT_S)
    assert errors == []
    return list(drawn.values())


def test_a_worker_on_a_gpu_draws_the_tokens_of_the_models_own_code(judge: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = judge
    core = open_worker_engine(options(folder, tmp_path), WorkerId("decode-gpu"))
    core.start()
    try:
        generator = torch.Generator().manual_seed(3)
        prompts = [torch.randint(3, 320, (n,), generator=generator).tolist() for n in (5, 90, 33, 17, 60, 1)]
        found = complete(core, prompts, 24)
    finally:
        core.stop(WAIT_S)
    for prompt, tokens in zip(prompts, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        best, chosen = logits.max(dim=1).values, logits[range(len(tokens)), tokens]
        assert bool((best - chosen < 1e-3 * logits.abs().max()).all())
    assert {path.name for path in tmp_path.iterdir()} == {"gpu.lock"}


def test_a_worker_on_a_gpu_draws_under_penalties_and_grammars(judge: tuple[Any, Path], tmp_path: Path) -> None:
    """Biases that leave two tokens and penalties that make them take turns; digits under a grammar."""
    core = open_worker_engine(options(judge[1], tmp_path), WorkerId("decode-gpu"))
    turns = {"temperature": 0.0, "logit_bias": ((40, 1000.0), (50, 1000.0)), "frequency_penalty": 2.0}
    digits = regex_grammar("[0-9]{6}", "structured_outputs")
    wanted = {
        "turns": SamplingParams(max_tokens=40, presence_penalty=2.0, repetition_penalty=1.5, logprobs=5, **turns),
        "digits": SamplingParams(max_tokens=20, grammar=digits, prompt_logprobs=1),
        "plain": SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True),
    }
    updates: dict[str, list[SequenceUpdate]] = {name: [] for name in wanted}
    ended = threading.Event()

    def on_updates(news: list[SequenceUpdate]) -> None:
        for update in news:
            updates[update.seq_id].append(update)
        if all(found and found[-1].finish for found in updates.values()):
            ended.set()

    core.start()
    try:
        core.on_updates = on_updates
        for name, sampling in wanted.items():
            spec = SequenceSpec(name, (5, 9, 40, 77), 4, sampling, core.facts.eos_token_ids)
            core.engine.call(lambda batcher, spec=spec: batcher.reserve(spec)).result(WAIT_S)
        assert ended.wait(WAIT_S)
    finally:
        core.stop(WAIT_S)
    tokens = {name: [token for update in found for token in update.token_ids] for name, found in updates.items()}
    assert [found[-1].finish for found in updates.values()] == ["length", "stop", "length"]
    # with penalties far above what logits differ by, neither gets two ahead of the other
    for count in range(1, 41):
        said = tokens["turns"][:count]
        assert set(said) <= {40, 50}
        assert abs(said.count(40) - said.count(50)) <= 2
    told = [entry for update in updates["turns"] for entry in update.logprobs]
    assert [len(entry.top) for entry in told] == [5] * 40
    assert all(entry.logprob <= entry.top[0][1] <= 0 for entry in told)
    assert sum(len(update.prompt_logprobs) for update in updates["digits"]) == 3
    text = tiny_tokenizer().decode(tokens["digits"])
    assert len(text) == 6
    assert text.isdigit()
    assert len(tokens["plain"]) == 30


@pytest.mark.parametrize(
    "changes",
    [
        {"exact": True},
        {"quant": "int8", "kv_dtype": "int8", "exact": True},
        {"quant": "int4", "exact": True, "dtype": "bfloat16"},
    ],
    ids=str,
)
def test_exact_pools_run_alone_as_among_others(
    judge: tuple[Any, Path], tmp_path: Path, changes: dict[str, Any]
) -> None:
    core = open_worker_engine(options(judge[1], tmp_path, **changes), WorkerId("decode-gpu"))
    core.start()
    try:
        generator = torch.Generator().manual_seed(3)
        prompts = [torch.randint(3, 320, (n,), generator=generator).tolist() for n in (5, 90, 33, 17)]
        together = complete(core, prompts, 24)
        assert together == [complete(core, [prompt], 24)[0] for prompt in prompts]
    finally:
        core.stop(WAIT_S)


def test_float8_pools_run_where_the_card_has_them(judge: tuple[Any, Path], tmp_path: Path) -> None:
    require_float8("fp8")
    wanted = options(judge[1], tmp_path, kv_dtype="fp8")
    core = open_worker_engine(wanted, WorkerId("decode-gpu"))
    core.start()
    try:
        assert core.facts.layout.groups[0].dtype == "float8_e4m3fn"
        assert len(complete(core, [[5, 9, 31]], 8)[0]) == 8
    finally:
        core.stop(WAIT_S)


def test_a_pool_of_no_stated_size_takes_what_is_left(judge: tuple[Any, Path], tmp_path: Path) -> None:
    core = open_worker_engine(options(judge[1], tmp_path, pool_bytes=0, gpu_share=0.1), WorkerId("decode-gpu"))
    total = torch.cuda.get_device_properties(0).total_memory
    assert 0.05 * total < core.facts.layout.total_bytes < 0.1 * total
    core.stop(WAIT_S)


def test_a_pool_that_cannot_fit_is_told_with_numbers(judge: tuple[Any, Path], tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"kv.pool_bytes asks for 400.00 GiB"):
        open_worker_engine(options(judge[1], tmp_path, pool_bytes=400 << 30), WorkerId("decode-gpu"))
