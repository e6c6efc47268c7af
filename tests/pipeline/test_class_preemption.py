"""A decode worker full of a lower class: who comes takes its place, and all end with the right tokens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.decode import service
from shared.contracts import messages as m
from shared.contracts.ids import RequestId
from shared.contracts.sampling import SamplingParams
from shared.engine.step_plan import StepPlan
from tests.pipeline.test_preemption_service import SAMPLING
from tests.pipeline.worker_support import Cell, attempt, cancel, cell, expected, options, signed_grant, until

LOW, HIGH = [100, 101], list(range(200, 400))  # the second one's prompt takes 50 blocks, and one to grow into
LOW_TOKENS = 100
NAMES = ["low-0", "low-1"]


@asynccontextmanager
async def full(
    folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> AsyncIterator[tuple[Cell, threading.Event]]:
    """Two batch requests decode, and the step that they are at ends when the event is set."""
    async with cell(options(folder, **changes), options(folder)) as c:
        runner, go, at = c.decode.shell.core.runner, threading.Event(), threading.Event()
        run = runner.run

        def hangs(plan: StepPlan) -> object:
            if not go.is_set() and len(plan.sequences) == 2 and min(row.start for row in plan.sequences) >= 60:
                at.set()
                assert go.wait(60)
            return run(plan)

        monkeypatch.setattr(runner, "run", hangs)
        sampling = SamplingParams(max_tokens=LOW_TOKENS, temperature=0.0, ignore_eos=True)
        try:
            for name in NAMES:
                grant = signed_grant(name, klass="batch")
                answer = await c.driver.reserve(c.decode_id, LOW, a=attempt(name), sampling=sampling, grant=grant)
                assert isinstance(answer, m.Reserved)
            await until(at.is_set, 30)
            yield c, go
        finally:
            go.set()


async def preemptions(c: Cell) -> int:
    """Wait for the lower ones' ends; how often they were preempted."""
    count = 0
    for name in NAMES:
        final = await c.driver.final(name)
        assert c.driver.output(name) == expected(LOW, LOW_TOKENS)
        assert final.totals is not None
        count += final.totals.preemptions
    await c.driver.idle([c.decode_id, c.prefill_id])
    await c.check()
    return count


async def test_a_place_is_had_at_once_where_all_are_a_lower_class_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with full(tmp_path, monkeypatch, max_num_seqs=2, pool_bytes=256 * 16) as (c, go):
        await until(lambda: [room.sequences for room in c.driver.beats[c.decode_id].rooms] == [2, 2, 0])
        answer = await c.driver.reserve(c.decode_id, HIGH, a=attempt("high"), sampling=SAMPLING)
        assert isinstance(answer, m.Reserved)
        go.set()
        await c.driver.final("high")
        assert c.driver.output("high") == expected(HIGH, 30)
        assert await preemptions(c) == 1
        rooms = c.driver.beats[c.decode_id].rooms
        assert [(room.sequences, room.blocks) for room in rooms] == [(2, (256,))] * 3


async def test_kv_is_still_handed_off_into_blocks_that_others_give_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "ARRIVAL_S", 30.0)  # a busy machine may take long over a step
    async with full(tmp_path, monkeypatch, pool_bytes=70 * 16) as (c, go):
        rooms = await c.decode.shell.call(lambda batcher: batcher.gauges().rooms)
        assert rooms[0].blocks[0] >= 51 > rooms[2].blocks[0]
        running = asyncio.create_task(c.handed_off(HIGH, a=attempt("high"), sampling=SAMPLING))
        await until(lambda: RequestId("high") in c.decode.book.held)
        go.set()
        assert await running == expected(HIGH, 30)
        totals = c.driver.finals[RequestId("high")].totals
        assert totals is not None
        assert totals.received_tokens == len(HIGH) - 1
        assert await preemptions(c) >= 1


async def test_blocks_that_do_not_come_in_time_let_the_prompt_be_computed_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "ARRIVAL_S", 0.01)
    async with full(tmp_path, monkeypatch, pool_bytes=70 * 16) as (c, go):
        answer = await c.driver.reserve(c.decode_id, HIGH, a=attempt("high"), prefill=c.prefill_id, sampling=SAMPLING)
        assert isinstance(answer, m.Reserved)
        assert answer.already_running  # nobody is to send KV
        go.set()
        await c.driver.final("high")
        assert c.driver.output("high") == expected(HIGH, 30)
        assert await preemptions(c) >= 1


async def test_who_leaves_while_its_blocks_are_on_their_way_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "ARRIVAL_S", 30.0)
    async with full(tmp_path, monkeypatch, pool_bytes=70 * 16) as (c, go):
        asked = asyncio.create_task(
            c.driver.reserve(c.decode_id, HIGH, a=attempt("high"), prefill=c.prefill_id, sampling=SAMPLING)
        )
        await until(lambda: RequestId("high") in c.decode.book.held)
        assert (await cancel(c, "high")).held
        assert isinstance(await asked, m.Refusal)
        go.set()
        await preemptions(c)
