"""Draws on a device, step by step planned ahead: the tokens and log-probabilities that the CPU's sampler gives.

The model is a table of logits by token and position; everything behind the logits is the worker's own.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.testing import DEVICE, INTERPRETED

# isort: split
from shared.contracts.errors import Internal
from shared.contracts.logprobs import TokenLogprob
from shared.contracts.sampling import SamplingParams
from shared.engine.batcher import NOT_FINITE, STUCK, Batcher
from shared.engine.batcher_config import BatcherConfig
from shared.engine.block_room import ReservationRefused
from shared.engine.decode_graphs import DecodeGraphs
from shared.engine.device_compute import DeviceCompute, StepLimits
from shared.engine.device_runner import DeviceRunner
from shared.engine.device_sizing import Steps
from shared.engine.device_stream import DeviceStream
from shared.engine.sampler import constrained_rows, logprobs_of, sample_sequences
from shared.engine.sequence_spec import SequenceSpec
from shared.engine.sequence_update import ERROR, SequenceUpdate
from shared.engine.step_plan import IN_FLIGHT, ScheduledSequence, StepOutput, StepPlan
from shared.grammar.compiler import GrammarCompiler, LazyCompiler
from shared.grammar.row_masks import RowMasks
from shared.grammar.source import schema_grammar
from shared.kv.device_spans import device_views
from shared.kv.layout import LayerGroup, PoolLayout
from tests.json_schemas import SCHEMAS
from tests.tiny_tokenizer import tiny_tokenizer

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, in the interpreter
    *([] if INTERPRETED else [pytest.mark.gpu]),
]

Cases = dict[str, tuple[list[int], SamplingParams]]

VOCAB, EOS, BLOCK = 320, 2, 8
GROUP = LayerGroup("full", (0,), num_kv_heads=1, head_dim=64, block_size=BLOCK, dtype="float32")
TABLE = torch.randn(61, VOCAB, generator=torch.Generator().manual_seed(3)) * 2
TABLE[:, 40:44] += 6  # said again and again, but for penalties
COMPILER = GrammarCompiler(tiny_tokenizer())
MAX_NUM_SEQS = 4


class Ready(LazyCompiler):
    """A compiler that is there already."""

    def __init__(self) -> None:
        self._made = COMPILER
        self._lock = threading.Lock()


def logits_of(tokens: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    return table[(tokens.long() * 7 + positions.long() * 3) % len(table)]


class TableModel:
    """What a worker needs of a model."""

    dtype, device, compiles_by_rows = torch.float32, DEVICE, False
    weights = SimpleNamespace(head=True)
    config = SimpleNamespace(
        num_layers=1, num_q_heads=1, num_kv_heads=1, head_dim=64, vocab_size=VOCAB, family=SimpleNamespace(windows=())
    )

    def __init__(self) -> None:
        self.table = TABLE.to(DEVICE, copy=True)

    def forward(self, step: Any, samples: Tensor, *_: Any) -> Tensor:
        source = step.token_source.long()
        tokens = torch.where(source >= 0, samples[source.clamp(min=0)], step.token_ids)
        rows = step.logit_rows.long()
        return logits_of(tokens[rows], step.positions[rows], self.table)


def device_runner(layout: PoolLayout, graphs: bool = False) -> DeviceRunner:
    data = torch.zeros(layout.total_bytes, dtype=torch.uint8, device=DEVICE)
    limits = StepLimits(max_rows=24, max_num_seqs=MAX_NUM_SEQS, max_len=128)
    compute = DeviceCompute(TableModel(), layout.groups, device_views(data, layout), limits)  # type: ignore[arg-type]
    stream = DeviceStream(DEVICE)
    captured = None
    if graphs:
        captured = DecodeGraphs(stream, compute.decode, compute.draw)
        captured.capture(compute.buckets)
    return DeviceRunner(compute, stream, captured, masks=RowMasks(Ready(), VOCAB))


class HostRunner:
    """The CPU's sampler over the same table. Every token is known when a step is planned."""

    def __init__(self) -> None:
        self._masks = RowMasks(Ready(), VOCAB)

    def run(self, plan: StepPlan) -> StepOutput:
        rows, ranges, first = [], [], 0
        for part in plan.sequences:
            assert IN_FLIGHT not in part.token_ids
            tokens, positions = torch.tensor(part.token_ids), torch.arange(len(part.token_ids)) + part.start
            rows.append(logits_of(tokens, positions, TABLE)[len(tokens) - part.num_logits :])
            ranges.append(range(first, first + part.num_logits))
            first += part.num_logits
        logits, tokens_of = torch.cat(rows), [part.token_ids for part in plan.sequences]
        found = self._masks.now(constrained_rows(plan.sequences, tokens_of, frozenset()))
        stuck = frozenset(found.faults)
        drawn, bad = sample_sequences(logits, plan.sequences, ranges, stuck, tokens_of, found.bits)
        told = logprobs_of(logits, plan.sequences, ranges, drawn, bad)
        return StepOutput(plan.step, drawn, bad, 0.0, told, stuck)


class Running:
    """A batcher over a runner, as an engine has them: as many steps planned ahead as there may be."""

    def __init__(
        self, make: Callable[[PoolLayout], Any], num_blocks: int = 40, depth: int = 1, max_num_seqs: int = MAX_NUM_SEQS
    ) -> None:
        layout = PoolLayout((GROUP,), (num_blocks,))
        config = BatcherConfig(token_budget=24, max_num_seqs=max_num_seqs, depth=depth)
        self.batcher = Batcher(layout, config)
        self.runner = make(layout)
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprob]] = {}
        self.ends: dict[str, SequenceUpdate] = {}
        self.plans: list[StepPlan] = []

    def add(self, seq_id: str, prompt: Sequence[int], sampling: SamplingParams, done: Sequence[int] = ()) -> None:
        self.tokens[seq_id], self.logprobs[seq_id] = list(done), []
        tokens = (*prompt, *done)
        self.batcher.reserve(SequenceSpec(seq_id, tokens, len(prompt), sampling, frozenset({EOS})))

    def all(self, preempt: Collection[str] = (), between: Callable[[Batcher], None] = lambda batcher: None) -> None:
        """Run until all have ended.

        Args:
            preempt: who loses its blocks when it has three tokens.
            between: called after each step.
        """
        ahead: deque[Callable[[], StepOutput]] = deque()
        while True:
            while (plan := self.batcher.plan()) is not None:
                self.plans.append(plan)
                pending = self.runner.run(plan)
                ahead.append(pending if callable(pending) else lambda found=pending: found)
            if not ahead:
                break
            for update in self.batcher.commit(ahead.popleft()()):
                self.tokens[update.seq_id] += update.token_ids
                if update.seq_id in preempt and len(self.tokens[update.seq_id]) == 3:
                    self.batcher.preempt(update.seq_id)
                self.logprobs[update.seq_id] += (*update.prompt_logprobs, *update.logprobs)
                if update.finish:
                    self.ends[update.seq_id] = update
            between(self.batcher)
        self.batcher.check()


def sampled(max_tokens: int = 6, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "temperature": 1.0, "seed": 11, "ignore_eos": True} | more)


KINDS, BOUNDS = (schema_grammar(SCHEMAS[name], "response_format") for name in ("enum of kinds", "integer bounds"))
STRONG = {"repetition_penalty": 1.7, "presence_penalty": 0.9, "frequency_penalty": 0.7}
SOME: Cases = {
    "penalized": ([5, 9, 9, 31, 5], sampled(7, temperature=0.0, **STRONG)),
    "penalized and drawn": ([17, 4], sampled(6, frequency_penalty=2.0, min_p=0.05, logprobs=3)),
    "biased": ([8, 30], sampled(5, logit_bias=((9, -100.0), (77, 6.5), (300, 7.0)), logprobs=0, top_p=0.9)),
    "longer": ([3, 200, 12], sampled(6, ignore_eos=False, min_tokens=3, logit_bias=((EOS, 60.0),), **STRONG)),
}
OTHERS: Cases = {
    "plain": ([44, 5, 61], sampled(6, top_k=20)),
    "scored": ([9, 300, 2, 77, 8, 8, 41], sampled(3, temperature=0.0, prompt_logprobs=2, logprobs=20)),
    "constrained": ([12, 99], sampled(90, ignore_eos=False, logprobs=1, grammar=KINDS)),
    "constrained and penalized": ([7, 7, 130], sampled(90, ignore_eos=False, grammar=BOUNDS, **STRONG)),
}


def judged(name: str, prompt: list[int], params: SamplingParams) -> Running:
    """What the CPU's sampler gives a sequence that is alone."""
    alone = Running(lambda layout: HostRunner(), depth=0)
    alone.add(name, prompt, params)
    alone.all()
    return alone


def values_of(entries: Sequence[TokenLogprob]) -> list[float]:
    return [value for entry in entries for value in (entry.logprob, *(value for _, value in entry.top))]


def require_same(running: Running, cases: Cases) -> None:
    for name, (prompt, params) in cases.items():
        truth = judged(name, prompt, params)
        assert running.tokens[name] == truth.tokens[name], name
        assert running.ends[name].finish == truth.ends[name].finish
        own, expected = running.logprobs[name], truth.logprobs[name]
        assert [[i for i, _ in entry.top] for entry in own] == [[i for i, _ in entry.top] for entry in expected]
        assert values_of(own) == pytest.approx(values_of(expected), abs=2e-5)
        scored = len(prompt) - 1 if params.prompt_logprobs >= 0 else 0
        assert len(own) == scored + (len(truth.tokens[name]) if params.logprobs >= 0 else 0)


@pytest.mark.parametrize("cases", [SOME, OTHERS], ids=["some", "others"])
def test_sequences_draw_what_they_draw_alone_on_a_cpu(cases: Cases) -> None:
    running = Running(device_runner)
    for name, (prompt, params) in cases.items():
        running.add(name, prompt, params)
    running.all(preempt=("penalized", "constrained"))
    require_same(running, cases)
    ahead = {row.seq_id for plan in running.plans for row in plan.sequences if IN_FLIGHT in row.token_ids}
    assert ahead == set(cases)
    preempted = {name for name, end in running.ends.items() if end.totals and end.totals.preemptions}
    assert preempted == {"penalized", "constrained"} & set(cases)


def test_a_row_that_is_not_finite_ends_a_constrained_output_alone() -> None:
    running = Running(device_runner)
    table = running.runner._compute.model.table
    table[(9 * 7 + 1 * 3) % len(table)] = torch.nan  # of token 9 at position 1
    running.add("bad", [4, 9], sampled(90, ignore_eos=False, grammar=KINDS))
    running.add("good", [12, 99], sampled(3, grammar=KINDS))
    running.all()
    assert (running.ends["bad"].finish, running.ends["bad"].detail) == (ERROR, NOT_FINITE)
    assert running.ends["good"].finish == "length"


def test_an_output_goes_on_where_another_worker_left_it() -> None:
    prompt, params = SOME["penalized"]
    truth = judged("whole", prompt, params).tokens["whole"]
    running = Running(device_runner)
    running.add("first", prompt, params, truth[:3])
    running.add("broken", [4, 9], sampled(20, grammar=KINDS), [80, 80])
    running.all()
    assert running.tokens["first"] == truth
    assert (running.ends["broken"].finish, running.ends["broken"].detail) == (ERROR, STUCK)
    assert any(
        row.seq_id == "broken" and IN_FLIGHT in row.token_ids for plan in running.plans for row in plan.sequences
    )
    # the same name again, at the same place: nothing is left of the one before
    prompt, params = [5, 9, 9, 31, 6], sampled(4, temperature=0.0, **STRONG)
    running.add("first", prompt, params, [33, 33, 33])
    running.all()
    other = Running(lambda layout: HostRunner(), depth=0)
    other.add("first", prompt, params, [33, 33, 33])
    other.all()
    assert running.tokens["first"] == other.tokens["first"]


@pytest.mark.parametrize("params", [sampled(grammar=KINDS), sampled(**STRONG)], ids=["constrained", "penalized"])
def test_the_host_waits_for_grammars_alone_and_when_the_next_step_is_launched(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = device_runner(PoolLayout((GROUP,), (4,)))
    events: list[str] = []

    class Noting:
        def wait(self) -> None:
            events.append("waits")

    def noting(name: str) -> None:
        launch = getattr(runner._compute, name)
        monkeypatch.setattr(runner._compute, name, lambda *args: (events.append(name), launch(*args))[1])

    for name in ("mixed", "decode", "draw"):
        noting(name)
    monkeypatch.setattr(runner._stream, "mark", Noting)
    first = ScheduledSequence("a", 0, (5, 6), ((0,),), 1, params, num_prompt_tokens=2)
    second = ScheduledSequence("a", 2, (IN_FLIGHT,), ((0,),), 1, params, num_prompt_tokens=2, history=(5, 6))
    ends = [runner.run(StepPlan(i, (row,))) for i, row in enumerate((first, second), start=1)]
    assert events == ["mixed", "draw", "decode", *(["waits"] if params.grammar else []), "draw"]
    assert [len(end().sampled[0]) for end in ends] == [1, 1]


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"sampling": sampled(**STRONG), "token_ids": (IN_FLIGHT,)}, "nobody knows"),
        ({"sampling": sampled(**STRONG), "start": 0, "token_ids": (5, 6), "num_logits": 2}, "draws 2 tokens at once"),
        ({"sampling": sampled(**STRONG), "history": (VOCAB,)}, "token id outside"),
        ({"sampling": sampled(logit_bias=tuple((i, 1.0) for i in range(2049)))}, "2049 biases, at most 2048"),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(row: dict[str, Any], what: str) -> None:
    runner = device_runner(PoolLayout((GROUP,), (4,)))
    before = ScheduledSequence("a", 0, (5,), ((0,),), 1, sampled(), num_prompt_tokens=1)
    runner.run(StepPlan(1, (before,)))()
    values = {"start": 1, "token_ids": (7,), "num_logits": 1, "num_prompt_tokens": 1} | row
    with pytest.raises(Internal, match=what):
        runner.run(StepPlan(2, (ScheduledSequence(seq_id="a", block_tables=((0,),), **values),)))


def test_the_burst_before_ready_has_as_many_rows_of_logits_as_a_step_can() -> None:
    layout = PoolLayout((GROUP,), (8,))
    data = torch.zeros(layout.total_bytes, dtype=torch.uint8, device=DEVICE)
    limits = StepLimits(max_rows=5, max_num_seqs=2, max_len=64)
    steps = Steps(TableModel(), layout.groups, device_views(data, layout), limits)  # type: ignore[arg-type]
    rows = steps._scored()
    assert [(row.num_logits, len(row.scored)) for row in rows] == [(1, 0), (4, 4)]
    output = steps.runner.run(StepPlan(1, rows))()
    assert (len(output.sampled[0]), output.sampled[1], output.bad_rows) == (1, (), frozenset())
    assert [len(entry.top) for entry in output.logprobs[1]] == [20] * 4
    steps.close()


def made_up(rng: random.Random) -> tuple[list[int], SamplingParams]:
    """A prompt and what is asked of its output: some of everything."""
    bound = rng.random() < 0.25
    biases = {rng.randrange(VOCAB): rng.choice([5.0, -50.0, 9.0]) for _ in range(rng.choice([0, 0, 4]))}
    params = sampled(
        90 if bound else rng.randint(1, 12),
        temperature=rng.choice([0.0, 1.0, 2.0]),
        top_k=rng.choice([0, 0, 9]),
        top_p=rng.choice([1.0, 0.8]),
        min_p=rng.choice([0.0, 0.1]),
        seed=rng.getrandbits(64),
        repetition_penalty=rng.choice([1.0, 1.4]),
        presence_penalty=rng.choice([0.0, 1.2]),
        frequency_penalty=rng.choice([0.0, 0.9]),
        logit_bias=tuple(biases.items()),
        min_tokens=0 if bound else rng.choice([0, 0, 3]),
        stop_token_ids=() if bound else (40, 41),
        logprobs=rng.choice([-1, -1, 0, 4]),
        prompt_logprobs=rng.choice([-1, -1, -1, 2]),
        grammar=rng.choice([KINDS, BOUNDS]) if bound else "",
        ignore_eos=not bound,
    )
    return [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 30))], params


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_whatever_company_comes_and_goes_each_draws_what_it_draws_alone(seed: int) -> None:
    rng = random.Random(seed)
    cases = {f"s{i}": made_up(rng) for i in range(14)}
    running = Running(device_runner, num_blocks=22)
    waiting = deque(cases)

    def between(batcher: Batcher) -> None:
        with contextlib.suppress(ReservationRefused):
            while waiting:
                running.add(waiting[0], *cases[waiting[0]])
                waiting.popleft()
        if rng.random() < 0.2:
            batcher.preempt(rng.choice(list(cases)))

    between(running.batcher)
    running.all(between=between)
    assert not waiting
    require_same(running, cases)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_captured_steps_draw_the_same() -> None:
    running = Running(lambda layout: device_runner(layout, graphs=True))
    for cases in (SOME, OTHERS):
        for name, (prompt, params) in cases.items():
            running.add(name, prompt, params)
        running.all(preempt=("penalized",))
        require_same(running, cases)
