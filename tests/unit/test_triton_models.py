"""Whole tiny models through the Triton kernels, in the interpreter or on a GPU: the logits of the families' own code.

transformers is the judge, in float32; a prompt's chunks, and decode steps that feed one another on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.testing import DEVICE, INTERPRETED, require_float8

# isort: split
from shared.contracts.errors import Internal
from shared.contracts.sampling import SamplingParams
from shared.engine.step_plan import IN_FLIGHT, ScheduledSequence, StepOutput
from shared.kv.device_memory import OutOfDeviceMemory
from shared.model.device_decoder import DeviceDecoder, load_device_decoder
from tests.device_models import BLOCKS, FAMILIES, GREEDY, TOKENS, VOCAB, Runs, llama, part, save
from tests.packed_checkpoints import Form, write

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered"),  # numpy's, in the interpreter
    *([] if INTERPRETED else [pytest.mark.gpu]),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_model_gives_the_logits_of_its_own_code(family: str, tmp_path: Path) -> None:
    judge = save(FAMILIES[family], tmp_path)
    tokens = torch.randint(3, VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = judge(tokens[None]).logits[0]
    ids = tokens.tolist()
    runs = Runs(load_device_decoder(tmp_path, "float32", DEVICE.type))

    # a chunk beside another sequence, a chunk, then single tokens beside it; rows that fill what steps are padded to
    runs.run(part("a", ids[:30], 0, BLOCKS[0]), part("b", ids[:2], 0, BLOCKS[1]))
    runs.run(part("a", ids[30:46], 30, BLOCKS[0]))
    for i in range(46, TOKENS):
        runs.run(part("a", ids[i : i + 1], i, BLOCKS[0]), part("b", ids[i - 44 : i - 43], i - 44, BLOCKS[1]))

    found = torch.stack([runs.rows["a", i] for i in range(TOKENS)])
    assert torch.isfinite(found).all()
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    beside = torch.stack([runs.rows["b", i] for i in range(4)])
    assert (beside - expected[:4]).abs().max() < 1e-4 * expected.abs().max()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save(llama, path)
    return path


@pytest.fixture(scope="module")
def tiny(folder: Path) -> DeviceDecoder:
    return load_device_decoder(folder, "float32", DEVICE.type)


SEEDED = SamplingParams(max_tokens=64, temperature=0.9, top_k=50, top_p=0.95, seed=7)
PROMPTS = ([5, 9, 200, 31, 77], [8, 300, 12])


def fed_by_the_host(runs: Runs, count: int) -> list[tuple[int, ...]]:
    """What two sequences draw when the host reads each token before the next step."""
    drawn: list[list[int]] = [[], []]
    for i in range(count):
        parts = []
        for s, (prompt, sampling) in enumerate(zip(PROMPTS, (GREEDY, SEEDED), strict=True)):
            tokens = prompt if i == 0 else drawn[s][-1:]
            start = 0 if i == 0 else len(prompt) + i - 1
            parts.append(ScheduledSequence(f"s{s}", start, tuple(tokens), (BLOCKS[s],), 1, sampling))
        for s, tokens in enumerate(runs.run(*parts).sampled):
            drawn[s] += tokens
    return [tuple(tokens) for tokens in drawn]


def fed_on_the_device(runs: Runs, count: int) -> list[tuple[int, ...]]:
    """The same with every step launched before the one before has been read; the sequences change places each time."""
    drawn: list[list[int]] = [[], []]
    pending: list[tuple[list[int], Callable[[], StepOutput]]] = []
    for i in range(count):
        order = [0, 1] if i % 2 else [1, 0]
        parts = []
        for s in order:
            tokens = tuple(PROMPTS[s]) if i == 0 else (IN_FLIGHT,)
            start = 0 if i == 0 else len(PROMPTS[s]) + i - 1
            parts.append(ScheduledSequence(f"s{s}", start, tokens, (BLOCKS[s],), 1, (GREEDY, SEEDED)[s]))
        pending.append((order, runs.launch(*parts)))
        if len(pending) > 1 or i == count - 1:
            _take(pending, drawn)
    while pending:
        _take(pending, drawn)
    return [tuple(tokens) for tokens in drawn]


def _take(pending: list[tuple[list[int], Callable[[], StepOutput]]], drawn: list[list[int]]) -> None:
    order, wait = pending.pop(0)
    for s, tokens in zip(order, wait().sampled, strict=True):
        drawn[s] += tokens


def test_steps_feed_one_another_on_the_device(tiny: DeviceDecoder) -> None:
    by_host = fed_by_the_host(Runs(tiny), 3)
    assert all(len(tokens) == 3 for tokens in by_host)
    assert fed_on_the_device(Runs(tiny), 3) == by_host


def test_a_bad_row_is_told_and_so_is_whoever_waited_for_its_token(tiny: DeviceDecoder) -> None:
    runs = Runs(tiny)
    first = runs.launch(
        ScheduledSequence("good", 0, (5, 6), (BLOCKS[0],), 1, GREEDY),
        # positions [0, 16) of its table were never computed: NaN
        ScheduledSequence("bad", 16, (7,), (BLOCKS[1],), 1, GREEDY),
    )
    second = runs.launch(
        ScheduledSequence("good", 2, (IN_FLIGHT,), (BLOCKS[0],), 1, GREEDY),
        ScheduledSequence("bad", 17, (IN_FLIGHT,), ((1, 1),), 1, GREEDY),
    )
    output = first()
    assert output.bad_rows == {1}
    assert output.sampled[1] == ()
    output = second()
    assert output.bad_rows == {1}
    assert len(output.sampled[0]) == 1
    assert output.sampled[1] == ()


def test_a_model_without_its_head_makes_the_same_kv(tiny: DeviceDecoder, folder: Path) -> None:
    whole, prefill = Runs(tiny), Runs(load_device_decoder(folder, "float32", DEVICE.type, with_head=False))
    prompt = (5, 9, 200, 31, 77)
    whole.run(ScheduledSequence("a", 0, prompt, (BLOCKS[0],), 1, GREEDY))
    output = prefill.run(ScheduledSequence("a", 0, prompt, (BLOCKS[0],), 0, None))
    assert output.sampled == ((),)
    assert output.bad_rows == frozenset()
    block = BLOCKS[0][0]
    assert torch.equal(prefill.pool[block, :, :, :, :5], whole.pool[block, :, :, :, :5])
    assert bool(torch.isnan(prefill.pool[block, :, :, :, 5:]).all())


def test_what_a_plan_names_is_checked_before_a_launch(tiny: DeviceDecoder) -> None:
    runs = Runs(tiny)
    cases = {
        "token id": ScheduledSequence("a", 0, (VOCAB,), (BLOCKS[0],), 1, GREEDY),
        "block outside": ScheduledSequence("a", 0, (5,), ((16,),), 1, GREEDY),
        "do not cover": ScheduledSequence("a", 0, (5,) * 17, ((1,),), 1, GREEDY),
        "no step samples": ScheduledSequence("a", 3, (IN_FLIGHT,), (BLOCKS[0],), 1, GREEDY),
        "exceeds": ScheduledSequence("a", 256, (5,), ((1,) * 17,), 1, GREEDY),
    }
    for what, sequence in cases.items():
        with pytest.raises(Internal, match=what):
            runs.run(sequence)
    with pytest.raises(Internal, match="empty"):
        runs.run()
    assert runs.run(ScheduledSequence("a", 0, (5,), (BLOCKS[0],), 1, GREEDY)).bad_rows == frozenset()


def test_a_launch_that_fails_half_way_keeps_the_inputs_the_device_may_still_read(
    tiny: DeviceDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    runs = Runs(tiny)
    inputs = runs.runner._slots[0].inputs
    with monkeypatch.context() as patch:
        patch.setattr(runs.runner._compute, "mixed", no_room)
        with pytest.raises(OutOfDeviceMemory, match="no memory before step 1: no room"):
            runs.run(part("a", [5, 9], 0, BLOCKS[0]))
    sent = inputs.clone()
    assert bool(sent.any())
    assert runs.run(part("b", [8], 0, BLOCKS[1])).bad_rows == frozenset()
    assert torch.equal(inputs, sent)


def test_blocks_are_zeroed_and_no_others(tiny: DeviceDecoder) -> None:
    runs = Runs(tiny)
    runs.runner.zero_blocks([(0, 3), (0, 9)])()
    zeroed = (runs.pool == 0).flatten(1).all(1)
    assert zeroed.nonzero().flatten().tolist() == [3, 9]
    assert bool(torch.isnan(runs.pool[~zeroed]).all())


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize("weights", ["none", "int4", "w8a8", "fp8", "gptq-order"])
def test_captured_steps_draw_the_tokens_of_launched_ones(weights: str, folder: Path, tmp_path: Path) -> None:
    require_float8(weights)
    quant = weights
    if weights == "gptq-order":
        write(folder, tmp_path / "packed", tmp_path / "floats", Form(act_order=True))
        folder, quant = tmp_path / "packed", "none"
    model = load_device_decoder(folder, "float32", DEVICE.type, quant=quant)
    assert model.weights.reordered == (weights == "gptq-order")
    by_host = fed_by_the_host(Runs(model), 12)
    assert all(len(tokens) == 12 for tokens in by_host)
    assert fed_on_the_device(Runs(model, graphs=True), 12) == by_host
