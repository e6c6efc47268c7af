"""Whole tiny models through the Triton kernels, in the interpreter or on a GPU: the logits of the families' own code.

transformers is the judge, in float32; a prompt's chunks, and decode steps that feed one another on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.testing import DEVICE, INTERPRETED

# isort: split
from shared.contracts.errors import Internal
from shared.contracts.sampling import SamplingParams
from shared.engine.decode_graphs import DecodeGraphs
from shared.engine.device_compute import DeviceCompute, StepLimits
from shared.engine.device_runner import DeviceRunner
from shared.engine.device_stream import DeviceStream
from shared.engine.step_plan import IN_FLIGHT, ScheduledSequence, StepOutput, StepPlan
from shared.kv.device_spans import KvView
from shared.model.config import layer_groups
from shared.model.device_decoder import DeviceDecoder, load_device_decoder

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered"),  # numpy's, in the interpreter
    *([] if INTERPRETED else [pytest.mark.gpu]),
]

VOCAB, TOKENS, BLOCK = 320, 48, 16
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "eos_token_id": 2,
    "dtype": torch.float32,
}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True))


def qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SIZES))


def gemma2() -> Any:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    caps = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0, "query_pre_attn_scalar": 32}
    config = Gemma2Config(**SIZES, **caps, sliding_window=20)
    config._attn_implementation = "eager"  # the others leave the soft cap out
    return Gemma2ForCausalLM(config)


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2))


FAMILIES: dict[str, Callable[[], Any]] = {"llama": llama, "qwen3": qwen3, "gemma2": gemma2, "mixtral": mixtral}


def save(make: Callable[[], Any], folder: Path) -> Any:
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(-0.5, 0.5) if "Gemma" in type(model).__name__ else parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.5)
    model.save_pretrained(folder)
    return model


class Runs:
    """A runner over a fresh pool of NaN that records every row of logits."""

    def __init__(self, model: DeviceDecoder, graphs: bool = False, max_num_seqs: int = 4) -> None:
        self.rows: dict[tuple[str, int], Tensor] = {}
        groups = layer_groups(model.config, BLOCK, str(model.dtype).removeprefix("torch."))
        shape = (16, len(groups[0].layers), 2, groups[0].num_kv_heads, BLOCK, groups[0].head_dim)
        self.pool = torch.full(shape, float("nan"), dtype=model.dtype, device=model.device)
        limits = StepLimits(max_rows=64, max_num_seqs=max_num_seqs, max_len=256)
        compute = DeviceCompute(model, groups, (KvView(self.pool),), limits)
        stream = DeviceStream(model.device)
        captured = None
        if graphs:
            captured = DecodeGraphs(stream, compute.decode)
            captured.capture(compute.buckets)
        self.runner = DeviceRunner(compute, stream, captured, None if graphs else self._record)
        self.step = 0

    def _record(self, seq_id: str, position: int, row: Tensor) -> None:
        self.rows[seq_id, position] = row

    def launch(self, *sequences: ScheduledSequence) -> Callable[[], StepOutput]:
        self.step += 1
        return self.runner.run(StepPlan(self.step, sequences))

    def run(self, *sequences: ScheduledSequence) -> StepOutput:
        return self.launch(*sequences)()


GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
BLOCKS = ((9, 3, 14, 1), (2, 8, 5, 11))


def part(
    seq_id: str, tokens: list[int], start: int, blocks: tuple[int, ...], sampling: SamplingParams | None = GREEDY
) -> ScheduledSequence:
    """Positions from `start` on, with logits of every row."""
    return ScheduledSequence(seq_id, start, tuple(tokens), (blocks,), len(tokens), sampling)


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
        with pytest.raises(torch.OutOfMemoryError):
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
def test_captured_steps_draw_the_tokens_of_launched_ones(tiny: DeviceDecoder) -> None:
    by_host = fed_by_the_host(Runs(tiny), 12)
    assert fed_on_the_device(Runs(tiny, graphs=True), 12) == by_host
