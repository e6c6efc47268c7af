"""Outputs under grammars in an engine: in any company, after a preemption, and where another worker left off."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
import torch

from shared.contracts.ids import WorkerId
from shared.contracts.sampling import SamplingParams
from shared.engine.batcher import STUCK, Batcher
from shared.engine.batcher_config import BatcherConfig
from shared.engine.model_runner import ModelRunner
from shared.engine.sequence_spec import SequenceSpec
from shared.engine.sequence_update import ERROR, SequenceUpdate
from shared.engine.step_plan import StepPlan
from shared.grammar.compiler import GrammarCompiler, LazyCompiler
from shared.grammar.row_masks import RowMasks
from shared.grammar.source import schema_grammar
from shared.kv.layout import PoolLayout
from shared.kv.pool import create_pool
from shared.model.config import layer_groups
from shared.model.decoder import DTYPES, Model, load_decoder
from tests.json_schemas import SCHEMAS, obj
from tests.native import require_native
from tests.tiny_models import make_tiny_model, random_tokens
from tests.tiny_tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
COMPILER = GrammarCompiler(TOKENIZER)
VOCAB, EOS = 320, 2
PROMPT = tuple(random_tokens(40, VOCAB, seed=3))
SHORT = ("pattern", "enum of kinds", "integer bounds", "array with bounds", "uuid", "date")


class Ready(LazyCompiler):
    """A compiler that is there already."""

    def __init__(self) -> None:
        self._made = COMPILER
        self._lock = threading.Lock()


@pytest.fixture(scope="module", params=["torch", "native"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    if request.param == "native":
        require_native()
    return load_decoder(make_tiny_model(tmp_path_factory.mktemp("tiny")), "float32", request.param, threads=1)


class Running:
    """A batcher and a runner, a step planned ahead of each that ends."""

    def __init__(self, model: Model, folder: Path) -> None:
        dtype = next(name for name, value in DTYPES.items() if value == model.dtype)
        layout = PoolLayout(layer_groups(model.config, 32, dtype, tile_layout=model.kernels.tile_layout), (200,))
        self.pool = create_pool(folder, WorkerId("decode-test"), layout)
        self.batcher = Batcher(layout, BatcherConfig(token_budget=64, max_num_seqs=16))
        self.runner = ModelRunner(model, self.pool, masks=RowMasks(Ready(), VOCAB))
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, SequenceUpdate] = {}

    def add(self, seq_id: str, sampling: SamplingParams, done: tuple[int, ...] = ()) -> None:
        tokens = PROMPT[len(seq_id) :] + done
        self.outputs[seq_id] = list(done)
        self.batcher.reserve(SequenceSpec(seq_id, tokens, len(tokens) - len(done), sampling, frozenset({EOS})))

    def steps(self, most: int = 10_000) -> None:
        """Run until all have ended, or so many steps."""
        ahead: deque[StepPlan] = deque()
        while most:
            while most and (plan := self.batcher.plan()) is not None:
                ahead.append(plan)
                most -= 1
            if not ahead:
                break
            self._take(self.batcher.commit(self.runner.run(ahead.popleft())))
        while ahead:
            self._take(self.batcher.commit(self.runner.run(ahead.popleft())))

    def _take(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            self.outputs[update.seq_id] += update.token_ids
            if update.finish:
                self.ends[update.seq_id] = update

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.close()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def under(name: str, temperature: float = 1.0, seed: int = 1, **more: object) -> SamplingParams:
    grammar = schema_grammar(SCHEMAS[name], "response_format")
    return SamplingParams(max_tokens=400, temperature=temperature, seed=seed, grammar=grammar, **more)  # type: ignore[arg-type]


FREE = {
    "free-greedy": SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True),
    "free-drawn": SamplingParams(max_tokens=30, temperature=0.9, seed=5, ignore_eos=True),
}


def test_constrained_and_free_sequences_share_steps(model: Model, tmp_path: Path) -> None:
    with Running(model, tmp_path) as alone:
        for name, params in FREE.items():
            alone.add(name, params)
            alone.steps()
    with Running(model, tmp_path) as running:
        for name, params in FREE.items():
            running.add(name, params)
        for i, name in enumerate(SHORT):
            running.add(name, under(name, temperature=float(i % 2), logprobs=1))
        running.steps()
        running.batcher.check()
    assert {name: running.outputs[name] for name in FREE} == alone.outputs
    finished = [name for name in SHORT if running.ends[name].finish == "stop"]
    assert len(finished) >= 4  # greedily, a random model may go round in a circle
    for name in SHORT:
        output = running.outputs[name]
        assert COMPILER.constraint(under(name).grammar).advance_to(output) is None
        if name in finished:
            assert output[-1] == EOS
            jsonschema.validate(json.loads(TOKENIZER.decode(output)), SCHEMAS[name])


@pytest.mark.parametrize("name", ["uuid", "array with bounds"])
def test_an_output_goes_on_from_its_tokens(model: Model, tmp_path: Path, name: str) -> None:
    """On another worker, from any token on, and after its blocks were taken."""
    with Running(model, tmp_path) as running:
        running.add("s", under(name))
        running.steps()
    whole = running.outputs["s"]
    for done in (1, len(whole) // 2, len(whole) - 1):
        with Running(model, tmp_path) as resumed:
            resumed.add("s", under(name), tuple(whole[:done]))
            resumed.steps()
        assert resumed.outputs["s"] == whole, done
    with Running(model, tmp_path) as preempted:
        preempted.add("s", under(name))
        for _ in range(3):
            preempted.steps(4)
            preempted.batcher.preempt("s")
        preempted.steps()
    assert preempted.outputs["s"] == whole
    assert preempted.ends["s"].totals is not None
    assert preempted.ends["s"].totals.preemptions >= 1


def test_an_output_that_broke_its_grammar_ends_alone(model: Model, tmp_path: Path) -> None:
    with Running(model, tmp_path) as running:
        running.add("broken", under("uuid"), tuple(TOKENIZER.encode("no JSON")))
        running.add("whole", under("pattern"))
        running.steps()
        running.batcher.check()
    assert running.ends["broken"].finish == ERROR
    assert running.ends["broken"].detail == STUCK
    assert running.ends["whole"].finish == "stop"


def test_a_cut_output_says_so(model: Model, tmp_path: Path) -> None:
    grammar = schema_grammar(obj(text={"type": "string", "minLength": 50}), "response_format")
    with Running(model, tmp_path) as running:
        running.add("cut", SamplingParams(max_tokens=20, grammar=grammar))
        running.steps()
    assert running.ends["cut"].finish == "length"
    assert len(running.outputs["cut"]) == 20
