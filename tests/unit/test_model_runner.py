"""The runner's promises: the same bits in any company, tokens in flight, bad rows, what is stored and what is not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from kernels.tile_layouts import LEAST_BLOCK
from shared.contracts.errors import Internal, SettingsError
from shared.contracts.ids import WorkerId
from shared.contracts.sampling import SamplingParams
from shared.engine.model_runner import ModelRunner
from shared.engine.step_plan import IN_FLIGHT, ScheduledSequence, StepOutput, StepPlan
from shared.kv.layout import PoolLayout
from shared.kv.pool import Pool, create_pool
from shared.kv.transfer import zero_rest
from shared.model.config import layer_groups
from shared.model.decoder import DTYPES, Model, load_decoder
from shared.model.native_decoder import NativeDecoder
from tests.native import require_native
from tests.tiny_models import GREEDY, make_tiny_model, random_tokens, sequence

VOCAB = 320
PROMPT = random_tokens(150, VOCAB, seed=7)
BLOCKS = [9, 3, 14, 1, 12]
SEEDED = SamplingParams(max_tokens=32, temperature=0.9, top_p=0.95, top_k=50, seed=77)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float32-native", "bfloat16-native"])
def model(request: pytest.FixtureRequest, folder: Path) -> Model:
    dtype, _, kernels = request.param.partition("-")
    if kernels:
        require_native()
    return load_decoder(folder, dtype, kernels or "torch", threads=2)


@pytest.fixture(scope="module", params=["torch", "native"])
def float32_model(request: pytest.FixtureRequest, folder: Path) -> Model:
    if request.param == "native":
        require_native()
    return load_decoder(folder, "float32", request.param, threads=2)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Engine:
    """A runner over a fresh pool of NaN that records every logits row."""

    def __init__(self, model: Model, folder: Path, num_blocks: int = 80) -> None:
        dtype = next(name for name, value in DTYPES.items() if value == model.dtype)
        layout = PoolLayout(layer_groups(model.config, 32, dtype, tile_layout=model.kernels.tile_layout), (num_blocks,))
        self.pool: Pool = create_pool(folder, WorkerId("decode-test"), layout)
        self.pool.views()[0].fill_(float("nan"))
        self.rows: dict[tuple[str, int], Tensor] = {}
        self.runner = ModelRunner(model, self.pool, self._record)
        self.step = 0

    def _record(self, seq_id: str, position: int, row: Tensor) -> None:
        self.rows[seq_id, position] = row.clone()

    def run(self, *sequences: ScheduledSequence) -> StepOutput:
        self.step += 1
        return self.runner.run(StepPlan(self.step, sequences))

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.close()


def neighbours(count: int, step: int) -> list[ScheduledSequence]:
    """One-token neighbours with blocks of their own, from 20 on."""
    return [sequence(f"n{i}", [3 + i + step], [20 + i], num_logits=i % 2) for i in range(count)]


@pytest.fixture(scope="module")
def whole(model: Model, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tensor, bytes]:
    """The prompt alone in one step: every logits row, and the sequence's blocks as bytes."""
    torch.set_num_threads(1)
    with Engine(model, tmp_path_factory.mktemp("pool")) as engine:
        engine.run(sequence("a", PROMPT, BLOCKS, num_logits=len(PROMPT), sampling=None))
        rows = torch.stack([engine.rows["a", i] for i in range(len(PROMPT))])
        return rows, stored(engine, BLOCKS)


def stored(engine: Engine, blocks: list[int]) -> bytes:
    """The prompt's KV: its blocks, zero behind its last token."""
    spans = [bytearray(engine.pool.span(0, block)) for block in blocks]
    zero_rest(memoryview(spans[-1]), engine.pool.layout.groups[0], len(PROMPT) % 32)
    return b"".join(spans)


@pytest.mark.parametrize("chunks", [[1, 149], [16, 17, 117], [64, 64, 22], [149, 1], [50, 50, 50]], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_chunks_and_neighbours_change_no_bit(
    model: Model, whole: tuple[Tensor, bytes], chunks: list[int], threads: int, tmp_path: Path
) -> None:
    torch.set_num_threads(threads)
    expected, expected_kv = whole
    blocks = [2, 8, 5, 0, 17]
    with Engine(model, tmp_path) as engine:
        start = 0
        for i, chunk in enumerate(chunks):
            mine = sequence("a", PROMPT[start : start + chunk], blocks, start=start, num_logits=chunk, sampling=None)
            others = neighbours(3 * i, i)
            engine.run(*others[: i + 1], mine, *others[i + 1 :])
            start += chunk
        for position in range(len(PROMPT)):
            assert torch.equal(engine.rows["a", position], expected[position]), position
        assert stored(engine, blocks) == expected_kv


def test_any_number_of_rows_gives_the_same_bits(model: Model, whole: tuple[Tensor, bytes], tmp_path: Path) -> None:
    expected, _ = whole
    with Engine(model, tmp_path) as engine:
        engine.run(sequence("a", PROMPT[:100], BLOCKS, num_logits=0, sampling=None))
        for count in range(40):
            engine.run(*neighbours(count, 1), sequence("a", PROMPT[100:101], BLOCKS, start=100))
            assert torch.equal(engine.rows["a", 100], expected[100]), count


def test_one_token_at_a_time(model: Model, whole: tuple[Tensor, bytes], tmp_path: Path) -> None:
    expected, expected_kv = whole
    with Engine(model, tmp_path) as engine:
        for i, token_id in enumerate(PROMPT):
            engine.run(sequence("a", [token_id], BLOCKS, start=i))
        for position in range(len(PROMPT)):
            assert torch.equal(engine.rows["a", position], expected[position]), position
        assert stored(engine, BLOCKS) == expected_kv


def test_shared_blocks_are_read_and_not_written(model: Model, whole: tuple[Tensor, bytes], tmp_path: Path) -> None:
    expected, _ = whole
    with Engine(model, tmp_path) as engine:
        engine.run(sequence("a", PROMPT[:64], BLOCKS, num_logits=0, sampling=None))
        before = bytes(engine.pool.span(0, BLOCKS[1]))
        mine = sequence("b", PROMPT[60:], [*BLOCKS[:2], 30, 31, 32], start=60, num_logits=90, sampling=None)
        engine.run(msgspec.structs.replace(mine, stored_from=64))
        assert bytes(engine.pool.span(0, BLOCKS[1])) == before
        for position in range(60, len(PROMPT)):
            assert torch.equal(engine.rows["b", position], expected[position]), position


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_tokens_in_flight_equal_known_ones(float32_model: Model, sampling: SamplingParams, tmp_path: Path) -> None:
    outputs = []
    for pipelined in (False, True):
        with Engine(float32_model, tmp_path) as engine:
            tokens = list(engine.run(sequence("a", PROMPT[:20], BLOCKS, sampling=sampling)).sampled[0])
            for i in range(10):
                last = IN_FLIGHT if pipelined else tokens[-1]
                planned = sequence("a", [last], BLOCKS, start=20 + i, sampling=sampling)
                others = neighbours(i, i) if pipelined else []
                tokens += engine.run(*others, planned).sampled[-1]
            outputs.append(tokens)
    assert outputs[0] == outputs[1]


def test_verification_rows_sample_what_single_steps_sample(float32_model: Model, tmp_path: Path) -> None:
    with Engine(float32_model, tmp_path) as engine:
        tokens = list(engine.run(sequence("a", PROMPT[:20], BLOCKS, sampling=SEEDED)).sampled[0])
        for i in range(4):
            tokens += engine.run(sequence("a", [tokens[-1]], BLOCKS, start=20 + i, sampling=SEEDED)).sampled[0]
        draft = sequence("b", [*PROMPT[:20], *tokens[:4]], [40], num_logits=5, sampling=SEEDED)
        assert list(engine.run(draft).sampled[0]) == tokens


def test_a_token_nobody_samples_is_internal(float32_model: Model, tmp_path: Path) -> None:
    with Engine(float32_model, tmp_path) as engine:
        engine.run(sequence("b", [5], [1]))
        with pytest.raises(Internal, match="a waits"):
            engine.run(sequence("a", [IN_FLIGHT], [0]))
        with pytest.raises(Internal, match="blocks"):
            engine.run(sequence("a", [5] * 40, [0]))


def test_bad_rows_are_flagged_alone_and_yield_no_token(float32_model: Model, tmp_path: Path) -> None:
    with Engine(float32_model, tmp_path) as engine:
        good = engine.run(sequence("good", PROMPT[:40], [5, 6])).sampled[0]
        # block 7 was never written, so it holds NaN
        output = engine.run(
            sequence("bad", [4], [7, 8], start=32),
            sequence("fine", PROMPT[:40], [10, 11]),
            sequence("idle", [3], [12], num_logits=0),
        )
        assert output.bad_rows == {0}
        assert output.sampled == ((), good, ())
        after = engine.run(sequence("bad", [IN_FLIGHT], [7, 8], start=33), sequence("fine", [3], [10, 11], start=39))
        assert after.bad_rows == {0}
        assert after.sampled[0] == ()


def test_a_token_that_cannot_be_is_no_fault_in_any_company(
    float32_model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, token = type(float32_model), torch.tensor([5])
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda *a: forward(*a).index_fill_(1, token, float("-inf")))
    greedy, seeded = sequence("a", PROMPT[:8], [1]), sequence("b", PROMPT[:9], [2], sampling=SEEDED)
    with Engine(float32_model, tmp_path) as engine:
        runner = ModelRunner(float32_model, engine.pool)
        alone = runner.run(StepPlan(1, (greedy,)))
        both = runner.run(StepPlan(2, (greedy, seeded)))
    assert not alone.bad_rows | both.bad_rows
    assert both.sampled[0] == alone.sampled[0] != ()
    assert both.sampled[1] != (5,)


def test_nothing_is_sampled_without_parameters(float32_model: Model, tmp_path: Path) -> None:
    with Engine(float32_model, tmp_path) as engine:
        output = engine.run(sequence("a", PROMPT[:5], [0], num_logits=5, sampling=None))
        assert output.sampled == ((),)
        assert not output.bad_rows
        assert output.duration_s > 0
        assert sorted(engine.rows) == [("a", i) for i in range(5)]


def test_a_pool_of_another_model_is_refused(float32_model: Model, tmp_path: Path) -> None:
    (group,) = layer_groups(float32_model.config, 32, "bfloat16")
    other = next(layout for layout in LEAST_BLOCK if layout != float32_model.kernels.tile_layout)
    right = replace(group, dtype="float32")
    for wrong in (group, replace(right, layers=(0,)), replace(right, tile_layout=other)):
        with (
            create_pool(tmp_path, WorkerId("w"), PoolLayout((wrong,), (2,))) as pool,
            pytest.raises(SettingsError),
        ):
            ModelRunner(float32_model, pool)


def test_greedy_steps_of_few_rows_use_the_quick_head(folder: Path, tmp_path: Path) -> None:
    require_native()
    quick = load_decoder(folder, "bfloat16", "native", threads=2, quick_head=True)
    assert isinstance(quick, NativeDecoder)
    plain = load_decoder(folder, "bfloat16", "native", threads=2)
    greedy = [ScheduledSequence(f"s{i}", 0, (5, 9, 7 + i), ((i,),), 1, GREEDY) for i in range(3)]
    mixed = [greedy[0], msgspec.structs.replace(greedy[1], sampling=SEEDED)]
    sampled = []
    for number, model in enumerate((quick, plain)):
        layout = PoolLayout(layer_groups(model.config, 32, "bfloat16", tile_layout=model.kernels.tile_layout), (8,))
        pool = create_pool(tmp_path / str(number), WorkerId("decode-test"), layout)
        runner = ModelRunner(model, pool)
        sampled.append([runner.run(StepPlan(i, tuple(rows))).sampled for i, rows in enumerate((greedy, mixed))])
        pool.close()
    assert sampled[0] == sampled[1]
    # the second step draws a token, and needs all logits
    assert quick.native(layout.groups).rechecks.rows == 3
