"""Fake workers on the memory bus: how what they run ends, and what is told of it until it is acknowledged."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from services.decode import outputs
from shared.contracts import messages as m
from shared.contracts import subjects
from shared.contracts.errors import ProtocolError
from shared.contracts.ids import Term
from shared.contracts.parts import StreamRecord
from shared.contracts.sampling import SamplingParams
from shared.contracts.tokens import completion_checksum, pack_tokens, unpack_tokens
from shared.engine.step_plan import StepOutput, StepPlan
from tests.pipeline.worker_support import (
    INGRESS,
    PROMPT,
    attempt,
    cancel,
    cell,
    expected,
    options,
    signed_grant,
    until,
)


async def test_cancel_frees_and_fences(tmp_path: Path) -> None:
    async with cell(options(tmp_path, fake_speed=1.0)) as c:
        long = SamplingParams(max_tokens=100, ignore_eos=True)
        await c.driver.reserve(c.decode_id, PROMPT, sampling=long)
        await until(lambda: len(c.driver.output()) > 3)
        answer = await cancel(c, "req-a")
        assert answer.held
        assert answer.totals is not None
        assert answer.totals.completion_tokens >= 3
        assert not (await cancel(c, "req-a")).held
        refused = await c.driver.reserve(c.decode_id, PROMPT)
        assert isinstance(refused, m.Refusal)
        assert refused.error.code == "Conflict/older_attempt"
        await c.driver.idle([c.decode_id])


async def test_beats_say_what_came_of_requests_that_run_and_that_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "TOLD_S", 1.5)
    async with cell(options(tmp_path, fake_speed=0.3)) as c:

        def told(request: str) -> tuple[int, bool] | None:
            listed = c.driver.beats[c.decode_id].outputs
            return next(((o.num_tokens, o.ended) for o in listed if o.attempt == attempt(request)), None)

        short = SamplingParams(max_tokens=5, ignore_eos=True)
        await c.driver.reserve(c.decode_id, PROMPT, sampling=short)
        long = SamplingParams(max_tokens=100, ignore_eos=True)
        await c.driver.reserve(c.decode_id, PROMPT, a=attempt("req-b"), sampling=long)
        await until(lambda: told("req-a") == (5, True), 30)
        await until(lambda: (told("req-b") or (0, True))[0] > 5, 30)
        assert (await cancel(c, "req-b")).held
        await until(lambda: (told("req-b") or (0, False))[1], 30)
        await until(lambda: c.driver.beats[c.decode_id].outputs == (), 30)  # for seconds, not for ever
        await c.driver.idle([c.decode_id])


async def test_cancel_while_kv_is_awaited(tmp_path: Path) -> None:
    async with cell(options(tmp_path)) as c:
        await c.driver.reserve(c.decode_id, PROMPT, prefill=c.prefill_id)
        assert (await cancel(c, "req-a")).held
        await c.driver.idle([c.decode_id])


async def test_finish_cuts_and_books_the_rest_as_waste(tmp_path: Path) -> None:
    async with cell(options(tmp_path, fake_speed=1.0)) as c:
        long = SamplingParams(max_tokens=100, ignore_eos=True)
        await c.driver.reserve(c.decode_id, PROMPT, sampling=long)
        await until(lambda: len(c.driver.output()) > 6)
        message = m.Finish(attempt=attempt(), choice=0, num_tokens=4)
        subject = subjects.decode(c.decode_id, "finish")
        answer = await c.driver.bus.request(subject, message, m.Finished, timeout_s=5)
        assert answer.held
        assert answer.totals.completion_tokens == 4
        assert answer.totals.wasted_tokens > 0
        assert answer.totals.checksum == completion_checksum(expected(PROMPT, 4))
        again = await c.driver.bus.request(subject, message, m.Finished, timeout_s=5)
        assert not again.held
        await c.driver.idle([c.decode_id])


async def test_finish_after_the_end_cuts_the_same_account(tmp_path: Path) -> None:
    async with cell(options(tmp_path)) as c:
        c.driver.ack_finals = False
        await c.driver.reserve(c.decode_id, PROMPT)
        await c.driver.final()
        message = m.Finish(attempt=attempt(), choice=0, num_tokens=5)
        answer = await c.driver.bus.request(subjects.decode(c.decode_id, "finish"), message, m.Finished, timeout_s=5)
        assert answer.held
        assert answer.totals.completion_tokens == 5
        assert answer.totals.wasted_tokens == 7
        assert answer.totals.checksum == completion_checksum(expected(PROMPT, 5))


async def test_replay_and_finals_until_acknowledged(tmp_path: Path) -> None:
    async with cell(options(tmp_path)) as c:
        c.driver.ack_finals = False
        await c.driver.reserve(c.decode_id, PROMPT)
        await c.driver.final()
        ask = m.StreamReplay(attempt=attempt(), choice=0, from_seq=5)
        answer = await c.driver.bus.request(subjects.decode(c.decode_id, "replay"), ask, m.StreamReplayed, timeout_s=5)
        assert [t for r in answer.records for t in unpack_tokens(r.token_ids)] == expected(PROMPT, 12)[5:]
        assert answer.records[-1].finish == "length"
        c.driver.finals.clear()
        c.driver.ack_finals = True
        await c.driver.final(timeout_s=5)
        await until(lambda: len(c.decode.book.held) == 0)
        answer = await c.driver.bus.request(subjects.decode(c.decode_id, "replay"), ask, m.StreamReplayed, timeout_s=5)
        assert not answer.held


async def test_a_finish_inside_the_prompt_is_refused(tmp_path: Path) -> None:
    async with cell(options(tmp_path)) as c:
        c.driver.ack_finals = False
        await c.driver.reserve(c.decode_id, PROMPT)
        await c.driver.final()
        message = m.Finish(attempt=attempt(), choice=0, num_tokens=-1)
        with pytest.raises(ProtocolError):
            await c.driver.bus.request(subjects.decode(c.decode_id, "finish"), message, m.Finished, timeout_s=5)


async def test_stopping_ends_what_runs_with_an_error(tmp_path: Path) -> None:
    async with cell(options(tmp_path, fake_speed=0.2)) as c:
        await c.driver.reserve(c.decode_id, PROMPT, sampling=SamplingParams(max_tokens=150, ignore_eos=True))
        await until(lambda: len(c.driver.output()) > 2)
        stopping = asyncio.create_task(c.decode.stop(0.3))
        await until(lambda: c.driver.beats[c.decode_id].draining)
        refused = await c.driver.reserve(c.decode_id, PROMPT, a=attempt("req-b"))
        assert isinstance(refused, m.Refusal)
        final = await c.driver.final()
        assert (final.finish, final.error is not None and final.error.code) == (
            "error",
            "Unavailable/worker_stopping",
        )
        await stopping


async def test_a_stop_takes_the_tokens_with_it_that_wait(tmp_path: Path) -> None:
    async with cell(options(tmp_path, pool_bytes=400 * 16, fake_speed=0.2, publish_interval_s=60.0)) as c:
        await c.driver.reserve(c.decode_id, PROMPT, sampling=SamplingParams(max_tokens=150, ignore_eos=True))
        engine = c.decode.shell.core.engine
        await until(lambda: len(c.driver.output()) > 0, 30)
        begun = engine.progress
        await until(lambda: engine.progress > begun + 3, 30)
        await c.decode.stop(0.0)
        final = await c.driver.final()
        assert final.totals is not None
        assert final.totals.completion_tokens == len(c.driver.output()) > 2
        assert len(final.token_ids) // 4 == len(c.driver.output()) - 1


async def test_what_waits_of_others_goes_out_with_a_finish(tmp_path: Path) -> None:
    async with cell(options(tmp_path, pool_bytes=400 * 16, fake_speed=0.2, publish_interval_s=60.0)) as c:
        sampling = SamplingParams(max_tokens=1000, ignore_eos=True)
        await c.driver.reserve(c.decode_id, PROMPT, sampling=sampling)
        await c.driver.reserve(c.decode_id, PROMPT, a=attempt("req-b"), sampling=sampling)
        await until(lambda: len(c.driver.output("req-b")) > 0, 30)
        engine = c.decode.shell.core.engine
        begun = engine.progress
        await until(lambda: engine.progress > begun + 3, 30)
        sent = len(c.driver.output("req-b"))
        message = m.Finish(attempt=attempt(), choice=0, num_tokens=1)
        await c.driver.bus.request(subjects.decode(c.decode_id, "finish"), message, m.Finished, timeout_s=5)
        await until(lambda: len(c.driver.output("req-b")) > sent, 20)
        assert attempt("req-b").request_id not in c.driver.finals
        await cancel(c, "req-b")


async def test_each_choice_ends_for_itself(tmp_path: Path) -> None:
    async with cell(options(tmp_path, pool_bytes=400 * 16)) as c:
        sampling = tuple(SamplingParams(max_tokens=8 + 4 * i, seed=i, ignore_eos=True) for i in range(3))
        message = m.Reserve(
            attempt=attempt(),
            term=Term(1),
            ingress_id=INGRESS,
            grant=signed_grant("req-a"),
            token_ids=pack_tokens(PROMPT),
            num_prompt_tokens=len(PROMPT),
            sampling=sampling,
            prefill_worker=c.prefill_id,
        )
        records: list[StreamRecord] = []
        await c.driver.bus.subscribe(
            subjects.stream(INGRESS), m.StreamFrame, lambda d: records.extend(d.message.records)
        )
        c.driver.ack_finals = False
        c.driver.held.add(attempt().request_id)
        answer = await c.driver.bus.request(
            subjects.decode(c.decode_id, "reserve"), message, m.Reserved | m.Refusal, timeout_s=5
        )
        await c.driver.run(c.prefill_id, c.decode_id, PROMPT, answer)
        await until(lambda: {r.choice for r in records if r.finish} == {0, 1, 2})
        for i in range(3):
            first = {r.first_seq: r.token_ids for r in records if r.choice == i and r.token_ids}
            tokens = [t for _, ids in sorted(first.items()) for t in unpack_tokens(ids)]
            assert tokens == expected(PROMPT, 8 + 4 * i, seed=i)
        assert len(c.decode.book.table) == 0
        await c.driver.bus.request(
            subjects.decode(c.decode_id, "ack"), m.FinalAck(attempts=(attempt(),)), m.FinalAcked, timeout_s=5
        )
        await c.driver.idle([c.decode_id, c.prefill_id])
        await c.check()


async def test_rows_that_are_not_finite_end_with_an_error(tmp_path: Path) -> None:
    async with cell(options(tmp_path)) as c:
        core = c.decode.shell.core
        run = core.engine._runner.run
        steps = itertools.count()

        def spoil(plan: StepPlan) -> StepOutput:
            output = run(plan)
            return replace(output, bad_rows=frozenset({0})) if next(steps) == 5 else output

        core.engine._runner.run = spoil  # type: ignore[method-assign]
        await c.driver.reserve(c.decode_id, PROMPT)
        final = await c.driver.final()
        assert final.finish == "error"
        assert final.error is not None
        assert final.error.code == "Internal/engine_error"
        assert final.totals is not None
        await c.driver.idle([c.decode_id])
        await c.check()
