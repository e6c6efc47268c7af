"""The short way of decode steps computes what the long way does: the same tokens, the same KV, the same faults."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from ctypes import c_int32
from functools import partial
from pathlib import Path

import pytest
import torch

from kernels.native.decode_step import MOST_STEPS
from shared.contracts.errors import Internal
from shared.contracts.ids import WorkerId
from shared.contracts.sampling import SamplingParams
from shared.engine.engine_parts import Limits
from shared.engine.model_runner import ModelRunner
from shared.engine.step_plan import IN_FLIGHT, ScheduledSequence, StepOutput, StepPlan
from shared.kv.layout import PoolLayout
from shared.kv.pool import Pool, create_pool
from shared.model.config import layer_groups
from shared.model.decoder import DTYPES, Model, load_decoder
from tests.native import require_native
from tests.tiny_models import GREEDY, make_tiny_model, random_tokens, sequence

VOCAB, BLOCK, NUM_BLOCKS = 320, 32, 200
HOW = (
    GREEDY,
    SamplingParams(max_tokens=900, temperature=0.9, top_p=0.95, top_k=50, seed=77),
    SamplingParams(max_tokens=900, temperature=1.3, min_p=0.02, seed=2**63 + 5),
)


@pytest.fixture(scope="module", params=["float32", "bfloat16-quick"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    require_native()
    dtype, _, quick = request.param.partition("-")
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    return load_decoder(folder, dtype, "native", threads=2, quick_head=bool(quick))


class Way:
    """A runner over a pool of its own, with or without the lane."""

    def __init__(self, model: Model, folder: Path, short: bool) -> None:
        dtype = next(name for name, value in DTYPES.items() if value == model.dtype)
        groups = layer_groups(model.config, BLOCK, dtype, tile_layout=model.kernels.tile_layout)
        self.pool: Pool = create_pool(
            folder, WorkerId(f"decode-{'short' if short else 'long'}"), PoolLayout(groups, (NUM_BLOCKS,))
        )
        self.pool.views()[0].zero_()
        self.runner = ModelRunner(model, self.pool)
        self.taken = 0
        lane = self.runner._lane
        assert lane is not None
        if short:
            run = lane.run

            def counted(*arguments: object) -> object:
                drawn = run(*arguments)  # type: ignore[arg-type]
                self.taken += drawn is not None
                return drawn

            lane.run = counted  # type: ignore[method-assign, assignment]
        else:
            self.runner._lane = None


@pytest.fixture
def ways(model: Model, tmp_path: Path) -> Iterator[tuple[Way, Way]]:
    both = Way(model, tmp_path, True), Way(model, tmp_path, False)
    yield both
    for way in both:
        way.pool.close()


def run(ways: tuple[Way, Way], step: int, *rows: ScheduledSequence) -> StepOutput:
    """The step by both, which must agree on tokens, bad rows and every byte of KV."""
    short, long = (way.runner.run(StepPlan(step, rows)) for way in ways)
    assert (short.sampled, short.bad_rows, short.step) == (long.sampled, long.bad_rows, step)
    one, two = (way.pool.views()[0].view(torch.uint8) for way in ways)
    assert torch.equal(one, two)
    return short


class Text:
    """A sequence that is decoded: its tokens, and blocks that come one by one as tuples of their own."""

    def __init__(self, name: str, length: int, sampling: SamplingParams, free: list[int]) -> None:
        self.name, self.sampling, self._free = name, sampling, free
        self.tokens = random_tokens(length, VOCAB, seed=len(name) * 1000 + length)
        self.start = 0
        self.tables: tuple[tuple[int, ...], ...] = ((),)

    def row(self, in_flight: bool = False) -> ScheduledSequence:
        """All that is to be computed: the prompt, then a token a step."""
        known = [IN_FLIGHT] if in_flight else self.tokens[self.start :]
        end = self.start + len(known)
        while len(self.tables[0]) * BLOCK < end:
            self.tables = ((*self.tables[0], self._free.pop()),)
        made = ScheduledSequence(self.name, self.start, tuple(known), self.tables, 1, self.sampling)
        self.start = end
        return made


def test_texts_that_come_grow_and_go_are_the_same_both_ways(ways: tuple[Way, Way]) -> None:
    rng, free = random.Random(5), list(range(NUM_BLOCKS))
    rng.shuffle(free)
    texts = [Text(f"t{i}", rng.randrange(1, 40), HOW[i % 3], free) for i in range(2)]
    late = [Text(f"late{i}", rng.choice((1, 20, 65)), HOW[i % 3], free) for i in range(9)]
    long = Text("long", 20 * BLOCK - 3, GREEDY, free)  # more blocks than there is room for at first
    for number in range(70):
        if number % 5 == 4 and late:
            texts.append(late.pop())
        if number == 50:
            texts.append(long)
        if number % 20 == 19:
            texts.pop(rng.randrange(len(texts)))
        # every third step is planned before the one before has ended
        rows = [text.row(in_flight=number % 3 == 2 and text.start == len(text.tokens) - 1) for text in texts]
        output = run(ways, number + 1, *rows)
        for text, (token,) in zip(texts, output.sampled, strict=True):
            text.tokens.append(token)
    assert 30 < ways[0].taken < 70, "decodes took the short way, and chunks the long one"


def test_one_in_a_crowd_keeps_its_tokens(ways: tuple[Way, Way]) -> None:
    free = list(range(NUM_BLOCKS))
    for how in HOW:
        alone, crowd = Text("a", 5, how, free), [Text(f"n{i}", 7 + i, HOW[i % 3], free) for i in range(11)]
        twin = Text("a", 5, how, free)
        for step in range(1, 25):
            (token,) = run(ways, step, alone.row()).sampled[0]
            alone.tokens.append(token)
        for step in range(1, 25):
            output = run(ways, step, *(text.row() for text in (*crowd, twin)))
            for text, (token,) in zip((*crowd, twin), output.sampled, strict=True):
                text.tokens.append(token)
        assert twin.tokens == alone.tokens
        free = list(range(NUM_BLOCKS))


def limits(most: int = 1, until: float = math.inf, ending: tuple[int, ...] = (), halt: int = 0) -> Limits:
    return Limits(most, until, frozenset(ending), c_int32(halt))


@pytest.mark.parametrize(("count", "together"), [(3, 1), (3, 4), (9, 50)])
def test_a_stretch_is_the_same_as_its_steps(ways: tuple[Way, Way], count: int, together: int) -> None:
    short, long = ways
    free = list(range(NUM_BLOCKS))
    random.Random(3).shuffle(free)
    texts = [Text(f"t{i}", 3 + 17 * i, HOW[i % 3], free) for i in range(count)]
    for text, (token,) in zip(texts, run(ways, 1, *(text.row() for text in texts)).sampled, strict=True):
        text.tokens.append(token)
    steps = 2 * BLOCK + 5
    for text in texts:  # with blocks for all of it
        text.tables = (text.tables[0] + tuple(free.pop() for _ in range(3)),)
    first = StepPlan(2, tuple(text.row() for text in texts), repeats=steps)
    drawn = [[token for (token,) in short.runner.run(first).sampled]]
    told: list[int] = []
    while len(drawn) < steps:
        before, known = time.monotonic(), len(drawn)
        more = short.runner.again(partial(told.append, known), limits(min(together, steps - known)))
        assert more is not None
        assert before <= more[0][0] <= more[-1][0] <= time.monotonic()
        assert [end for end, _ in more] == sorted(end for end, _ in more)
        drawn += [list(tokens) for _, tokens in more]
    assert told == list(range(1, steps, together))
    for number, tokens in enumerate(drawn, start=2):
        rows = first.sequences if number == 2 else tuple(text.row() for text in texts)
        assert [token for (token,) in long.runner.run(StepPlan(number, rows)).sampled] == tokens
        for text, token in zip(texts, tokens, strict=True):
            text.tokens.append(token)
    one, two = (way.pool.views()[0].view(torch.uint8) for way in ways)
    assert torch.equal(one, two)


def test_what_is_not_the_lanes_is_not_done_again(ways: tuple[Way, Way]) -> None:
    short, long = ways
    text = Text("t", 9, GREEDY, list(range(NUM_BLOCKS)))
    chunk = StepPlan(1, (text.row(),))
    for way in ways:
        (token,) = way.runner.run(chunk).sampled[0]
        assert way.runner.again(lambda: None, limits()) is None
    text.tokens.append(token)
    plan = StepPlan(2, (text.row(),))
    for way in ways:
        way.runner.run(plan)
    assert long.runner.again(lambda: None, limits()) is None
    short.pool.views()[0].view(torch.uint8).fill_(0xFF)  # not a number anywhere
    assert short.runner.again(lambda: None, limits(3)) is None
    assert short.runner.again(lambda: None, limits(3)) is None, "nothing follows a bad row"


def stretched(way: Way, blocks: int = 4) -> None:
    """A text of nine tokens whose next step may be done again."""
    text = Text("t", 9, GREEDY, list(range(NUM_BLOCKS)))
    text.tokens += way.runner.run(StepPlan(1, (text.row(),))).sampled[0]
    text.tables = (tuple(range(blocks)),)
    way.runner.run(StepPlan(2, (text.row(),)))


def count_of(way: Way, given: Limits) -> int:
    steps = way.runner.again(lambda: None, given)
    return 0 if steps is None else len(steps)


def test_a_stretch_keeps_its_limits(ways: tuple[Way, Way]) -> None:
    way, _ = ways
    stretched(way)
    tokens = [row[0] for _, row in way.runner.again(lambda: None, limits(6)) or ()]
    stretched(way)
    assert count_of(way, limits(6, ending=(VOCAB - 1, tokens[3]))) == tokens.index(tokens[3]) + 1
    stretched(way)
    assert count_of(way, limits(6, halt=1)) == 1, "the step that is asked for, and no other"
    assert count_of(way, limits(6, until=time.monotonic())) == 1
    assert count_of(way, limits(6, until=time.monotonic() + 60)) == 6
    assert count_of(way, limits(1000)) == MOST_STEPS


def test_nothing_follows_a_step_without_a_block(ways: tuple[Way, Way]) -> None:
    way, _ = ways
    stretched(way, blocks=1)
    lane = way.runner._lane
    assert lane is not None
    assert lane._step is not None
    room = lane._step.blocks * BLOCK - 10  # what the array has places for, behind the ten tokens there are
    assert [count_of(way, limits(room - 3)), count_of(way, limits(9))] == [MOST_STEPS, 9]
    done = MOST_STEPS + 9
    while (more := count_of(way, limits(50))) == 50:
        done += more
    assert done + more == room
    assert count_of(way, limits()) == 0, "nothing follows a step that was refused"
    stretched(way, blocks=1)
    assert [count_of(way, limits()) for _ in range(room)] == [1] * room
    with pytest.raises(ValueError, match="block"):
        count_of(way, limits())
    assert count_of(way, limits()) == 0


def test_a_bad_row_is_told_and_its_next_one_too(ways: tuple[Way, Way]) -> None:
    free = list(range(NUM_BLOCKS))
    texts = [Text("good", 9, GREEDY, free), Text("bad", 9, HOW[1], free)]
    run(ways, 1, *(text.row() for text in texts))
    for way in ways:
        way.pool.views()[0][texts[1].tables[0][0]].fill_(float("nan"))
    second = run(ways, 2, *(text.row(in_flight=True) for text in texts))
    assert (second.sampled[1], second.bad_rows) == ((), frozenset({1}))
    third = run(ways, 3, *(text.row(in_flight=True) for text in texts))
    assert (third.sampled[1], third.bad_rows) == ((), frozenset({1}))
    assert len(third.sampled[0]) == 1
    assert ways[0].taken == 2


def refused(way: Way, row: ScheduledSequence) -> str:
    with pytest.raises(Internal) as caught:
        way.runner.run(StepPlan(1, (row,)))
    return caught.value.message


def test_a_plan_that_breaks_its_contract_is_refused(ways: tuple[Way, Way]) -> None:
    for way in ways:
        assert "waits for a token" in refused(way, sequence("a", [IN_FLIGHT], [1]))
        assert "block" in refused(way, sequence("a", [5], [1], start=BLOCK))
        assert "block tables" in refused(way, ScheduledSequence("a", 0, (5,), ((1,), (2,)), 1, GREEDY))
        with pytest.raises(ValueError, match="vocabulary"):
            way.runner.run(StepPlan(1, (sequence("a", [VOCAB], [1]),)))
        with pytest.raises(ValueError, match="outside the pool"):
            way.runner.run(StepPlan(1, (sequence("a", [5], [NUM_BLOCKS]),)))


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=9, temperature=0.0, repetition_penalty=1.2),
        SamplingParams(max_tokens=9, temperature=0.0, logit_bias=((7, 3.0),)),
        SamplingParams(max_tokens=9, temperature=0.0, logprobs=2),
    ],
    ids=["penalty", "bias", "logprobs"],
)
def test_what_asks_for_more_goes_the_long_way(ways: tuple[Way, Way], sampling: SamplingParams) -> None:
    free = list(range(NUM_BLOCKS))
    texts = [Text("plain", 1, GREEDY, free), Text("more", 1, sampling, free)]
    run(ways, 1, *(text.row() for text in texts))
    assert ways[0].taken == 0
