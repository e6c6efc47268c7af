"""Fake workers on the memory bus: epochs and dispatches of a request, the newest of which holds."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from shared.contracts import messages as m
from shared.contracts import subjects
from shared.contracts.ids import WorkerId
from shared.contracts.sampling import SamplingParams
from shared.contracts.tokens import completion_checksum
from tests.pipeline.worker_support import (
    PROMPT,
    attempt,
    cancel,
    cell,
    expected,
    options,
    until,
)


async def test_a_newer_epoch_goes_on_with_what_runs(tmp_path: Path) -> None:
    async with cell(options(tmp_path, fake_speed=0.5)) as c:
        sampling = SamplingParams(max_tokens=30, ignore_eos=True)
        await c.driver.reserve(c.decode_id, PROMPT, sampling=sampling)
        await until(lambda: len(c.driver.output()) > 5)
        committed = c.driver.output()[:4]
        answer = await c.driver.reserve(
            c.decode_id,
            PROMPT + committed,
            a=attempt(epoch=2),
            sampling=sampling,
            num_prompt_tokens=len(PROMPT),
        )
        assert isinstance(answer, m.Reserved)
        assert answer.already_running
        assert not (await cancel(c, "req-a", epoch=1)).held
        final = await c.driver.final()
        assert final.attempt == attempt(epoch=2)
        assert c.driver.output() == expected(PROMPT, 30)
        assert final.totals is not None
        assert final.totals.computed_tokens < 65, "nothing was computed twice"


async def test_a_resumed_request_goes_on_with_its_sequence_numbers(tmp_path: Path) -> None:
    async with cell(options(tmp_path)) as c:
        committed = expected(PROMPT, 5)
        c.driver.tokens[attempt().request_id] = dict(enumerate(committed))
        await c.driver.reserve(c.decode_id, PROMPT + committed, a=attempt(epoch=2), num_prompt_tokens=len(PROMPT))
        final = await c.driver.final()
        assert c.driver.output() == expected(PROMPT, 12)
        assert final.totals is not None
        assert final.totals.completion_tokens == 12
        assert final.totals.checksum == completion_checksum(expected(PROMPT, 12))


@pytest.mark.parametrize(
    ("max_tokens", "eos", "finish"), [(5, False, "length"), (4, False, "length"), (12, True, "stop")]
)
async def test_a_resumed_request_with_nothing_left_ends_at_once(
    tmp_path: Path, max_tokens: int, eos: bool, finish: str
) -> None:
    async with cell(options(tmp_path)) as c:
        committed = expected(PROMPT, 5)
        if eos:
            core = c.decode.shell.core
            core.facts = replace(core.facts, eos_token_ids=frozenset({committed[-1]}))
        answer = await c.driver.reserve(
            c.decode_id,
            PROMPT + committed,
            a=attempt(epoch=2),
            num_prompt_tokens=len(PROMPT),
            sampling=SamplingParams(max_tokens=max_tokens),
            prefill=c.prefill_id,
        )
        assert isinstance(answer, m.Reserved)
        assert answer.already_running, "no prefill leg is needed"
        final = await c.driver.final()
        assert (final.finish, final.first_seq, final.token_ids) == (finish, 5, b"")
        assert final.totals is not None
        assert final.totals.completion_tokens == 5
        assert final.totals.checksum == completion_checksum(committed)
        await until(lambda: not c.decode.book.held)
        await c.driver.idle([c.decode_id])


async def test_a_new_placement_releases_the_old_source_under_its_attempt(tmp_path: Path) -> None:
    releases: list[m.HandoffRelease] = []
    async with cell(options(tmp_path)) as c:
        subject = subjects.handoff(c.prefill_id, "release")
        await c.driver.bus.subscribe(subject, m.HandoffRelease, lambda d: releases.append(d.message))
        await c.driver.reserve(c.decode_id, PROMPT, prefill=c.prefill_id)
        await c.driver.reserve(c.decode_id, PROMPT, a=attempt(dispatch=2), prefill=WorkerId("prefill-2"))
        await until(lambda: bool(releases))
        assert releases[0].attempt == attempt(dispatch=1)
        await cancel(c, "req-a", dispatch=2)
        await c.driver.idle([c.decode_id])


async def test_a_reservation_cancelled_while_it_waits_for_the_one_before_is_refused(tmp_path: Path) -> None:
    async with cell(options(tmp_path)) as c:
        engine, gate = c.decode.shell.core.engine, threading.Event()
        engine.call(lambda batcher: gate.wait(5))  # the planner answers nothing meanwhile
        reserves = [asyncio.create_task(c.driver.reserve(c.decode_id, PROMPT, a=attempt(dispatch=d))) for d in (1, 2)]
        await until(lambda: len(c.decode.book.table) == 1)
        await until(lambda: c.decode.book.table.attempts == (attempt(dispatch=2),))
        cancelled = asyncio.create_task(cancel(c, "req-a", dispatch=2))
        await until(lambda: not c.decode.book.held)
        gate.set()
        assert [type(answer) for answer in await asyncio.gather(*reserves)] == [m.Refusal, m.Refusal]
        assert (await cancelled).held
        assert not c.decode.book.held, "it would run for nobody"
        await c.driver.idle([c.decode_id])


async def test_a_newer_epoch_survives_the_refusal_of_the_one_before(tmp_path: Path) -> None:
    async with cell(options(tmp_path)) as c:
        engine, gate = c.decode.shell.core.engine, threading.Event()
        big = SamplingParams(max_tokens=200, ignore_eos=True)
        await c.driver.reserve(c.decode_id, PROMPT, sampling=big, a=attempt("req-big"))
        engine.call(lambda batcher: gate.wait(5))
        first = asyncio.create_task(c.driver.reserve(c.decode_id, PROMPT, sampling=big))
        await until(lambda: attempt().request_id in c.decode.book.held)
        cancelled = asyncio.create_task(cancel(c, "req-a"))
        await until(lambda: attempt().request_id not in c.decode.book.held)
        second = asyncio.create_task(c.driver.reserve(c.decode_id, PROMPT[:4], a=attempt(epoch=2)))
        await until(lambda: attempt().request_id in c.decode.book.held)
        gate.set()
        assert isinstance(await first, m.Refusal)
        await cancelled
        assert isinstance(await second, m.Reserved)
        await c.driver.final()
        assert c.driver.output() == expected(PROMPT[:4], 12)
        await cancel(c, "req-big")


async def test_a_prefill_cancelled_while_it_is_refused_ends_quietly(tmp_path: Path) -> None:
    async with cell(options(tmp_path)) as c:
        engine, gate = c.prefill.shell.core.engine, threading.Event()
        reserved = m.Reserved(incarnation=c.decode.shell.incarnation, num_cached_tokens=0, lease_token=b"x" * 16)
        engine.call(lambda batcher: gate.wait(5))
        run = asyncio.create_task(c.driver.run(c.prefill_id, c.decode_id, PROMPT * 10, reserved))
        await until(lambda: len(c.prefill.table) == 1)
        message = m.Cancel(attempt=attempt(), reason="client")
        await c.driver.bus.request(subjects.prefill(c.prefill_id, "cancel"), message, m.Cancelled, timeout_s=5)
        gate.set()
        answer = await run
        assert isinstance(answer, m.Refusal)
        assert (answer.error.code, answer.never) == ("Overloaded/NeverFits", True)
        await c.driver.idle([c.prefill_id])


async def test_a_newer_dispatch_keeps_pulled_blocks(tmp_path: Path) -> None:
    slow = options(tmp_path, fake_speed=0.2)
    async with cell(options(tmp_path), slow) as c:
        first = await c.driver.reserve(c.decode_id, PROMPT, prefill=c.prefill_id)
        assert isinstance(first, m.Reserved)
        await c.driver.run(c.prefill_id, c.decode_id, PROMPT, first)
        held = c.decode.book.held[attempt().request_id]
        await until(lambda: held.sink is not None and held.sink.contiguous > 0)
        second = await c.driver.reserve(c.decode_id, PROMPT, a=attempt(dispatch=2), prefill=c.prefill_id)
        assert isinstance(second, m.Reserved)
        assert not second.already_running
        assert second.num_cached_tokens > 0
        assert second.lease_token != first.lease_token
        await c.driver.run(c.prefill_id, c.decode_id, PROMPT, second, a=attempt(dispatch=2))
        await c.driver.final()
        assert c.driver.output() == expected(PROMPT, 12)
        await c.driver.idle([c.decode_id, c.prefill_id])
        await c.check()


async def test_prefill_fences_and_refuses(tmp_path: Path) -> None:
    async with cell(options(tmp_path)) as c:
        reserved = m.Reserved(incarnation=c.decode.shell.incarnation, num_cached_tokens=0, lease_token=b"x" * 16)
        a2 = attempt(dispatch=2)
        assert isinstance(
            await c.driver.run(c.prefill_id, c.decode_id, PROMPT, reserved, a=a2, term=5), m.PrefillAccepted
        )
        # The decode worker does not hold it: it releases the source at the first commit.
        await c.driver.idle([c.prefill_id], timeout_s=4)
        late = await c.driver.run(c.prefill_id, c.decode_id, PROMPT, reserved, a=attempt(dispatch=1), term=5)
        assert isinstance(late, m.Refusal)
        assert late.error.code == "Conflict/older_attempt"
        lower = await c.driver.run(c.prefill_id, c.decode_id, PROMPT, reserved, a=attempt(dispatch=3), term=4)
        assert isinstance(lower, m.Refusal)
        assert lower.error.code == "Conflict/lower_term"
