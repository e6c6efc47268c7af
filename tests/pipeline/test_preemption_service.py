"""Decode workers that run out of blocks: nothing is lost or sent twice, and it is told in beats, totals and traces."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from shared.contracts import messages as m
from shared.contracts import subjects
from shared.contracts.ids import Term
from shared.contracts.sampling import SamplingParams
from shared.contracts.tokens import completion_checksum, pack_tokens
from shared.engine.fake_runner import made_up_token
from shared.telemetry import attributes as a
from shared.telemetry.setup import Telemetry
from tests.pipeline.worker_support import INGRESS, Cell, attempt, cell, options, signed_grant, until

PROMPT = list(range(100, 112))
OUTPUT = 30
SAMPLING = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
SMALL = {"pool_bytes": 18 * 16, "fake_speed": 5.0}  # 18 blocks of 4 tokens; one request comes to need 11


def expected(prompt: list[int]) -> list[int]:
    return [made_up_token(0, p, range(1000, 9000)) for p in range(len(prompt), len(prompt) + OUTPUT)]


async def insist(c: Cell, request: str, prompt: list[int], **more: Any) -> m.Reserved:
    """Reserve as the scheduler does: again after a while, as long as there is no room."""
    for _ in range(1000):
        answer = await c.driver.reserve(c.decode_id, prompt, a=attempt(request), sampling=SAMPLING, **more)
        if isinstance(answer, m.Reserved):
            return answer
        assert not answer.never
        await asyncio.sleep(0.01)
    raise AssertionError(f"{request} was never let in")


async def one(c: Cell, number: int, *, handed_off: bool) -> int:
    """One request to its end; how often it was preempted."""
    request, prompt = f"req-{number}", PROMPT[: 6 + number]
    reserved = await insist(c, request, prompt, prefill=c.prefill_id if handed_off else None)
    if handed_off:
        await c.driver.run(c.prefill_id, c.decode_id, prompt, reserved, a=attempt(request))
    final = await c.driver.final(request)
    assert final.finish == "length"
    assert c.driver.output(request) == expected(prompt)
    totals = final.totals
    assert totals is not None
    assert totals.completion_tokens == OUTPUT
    assert totals.checksum == completion_checksum(expected(prompt))
    paid = totals.computed_tokens + totals.cached_tokens + totals.received_tokens - totals.wasted_tokens
    assert paid == len(prompt) + OUTPUT - 1, "what was computed again is waste, everything else was needed once"
    assert (totals.wasted_tokens > 0) == (totals.preemptions > 0)
    return totals.preemptions


@pytest.mark.parametrize(("depth", "handed_off"), [(0, False), (1, False), (1, True)])
async def test_requests_that_do_not_all_fit_take_turns_and_finish(tmp_path: Path, depth: int, handed_off: bool) -> None:
    async with cell(options(tmp_path, depth=depth, **SMALL), options(tmp_path)) as c:
        counts = await asyncio.gather(*(one(c, i, handed_off=handed_off) for i in range(6)))
        assert sum(counts) > 0
        await c.driver.idle([c.decode_id, c.prefill_id])
        beat = c.driver.beats[c.decode_id]
        assert (beat.preemptions, beat.held_back, beat.revoked) == (sum(counts), (0,), ())
        await c.check()


async def test_it_is_told_on_the_trace(tmp_path: Path) -> None:
    telemetry = Telemetry("decode", None)
    async with cell(options(tmp_path, **SMALL), options(tmp_path), tracer=telemetry.tracer) as c:
        counts = await asyncio.gather(*(one(c, i, handed_off=False) for i in range(4)))
    runs = [span for span in telemetry.queue.take() if span.name == "decode.run"]
    assert sorted(span.attributes[a.PREEMPTIONS] for span in runs) == sorted(counts)
    for span in runs:
        assert 0 < span.attributes[a.WORKER_QUEUE_S] < span.attributes[a.PREFILL_S] + 0.1
        names = [name for name, _ in span.events]
        assert names.count("preempted") == names.count("resumed") == span.attributes[a.PREEMPTIONS]


async def test_a_reservation_that_has_not_begun_is_offered_back_and_runs_by_itself(tmp_path: Path) -> None:
    """A static batch runs; the next one's reservation loses its blocks to it. Nobody takes the offer."""
    static = options(tmp_path, batching="static", batch_size=1, **SMALL | {"fake_speed": 0.6})
    async with cell(static, options(tmp_path)) as c:
        await insist(c, "req-first", PROMPT)
        await insist(c, "req-next", PROMPT * 3)  # ten blocks to begin with
        await until(lambda: attempt("req-next") in c.driver.beats[c.decode_id].revoked)
        assert c.driver.beats[c.decode_id].held_back[0] >= 10
        final = await c.driver.final("req-first")
        assert final.totals is not None
        assert final.totals.preemptions == 0
        final = await c.driver.final("req-next")
        assert c.driver.output("req-next") == expected(PROMPT * 3)
        assert final.totals is not None
        assert (final.totals.preemptions, final.totals.wasted_tokens) == (0, 0)
        await until(lambda: c.driver.beats[c.decode_id].revoked == ())


@pytest.mark.parametrize("batching", ["static", "dynamic"])
async def test_whole_batches_give_the_same_tokens(tmp_path: Path, batching: str) -> None:
    small = options(tmp_path, batching=batching, batch_size=3, batch_window_s=0.1, **SMALL)
    async with cell(small, options(tmp_path)) as c:
        await asyncio.gather(*(one(c, i, handed_off=i % 2 == 1) for i in range(6)))
        await c.driver.idle([c.decode_id, c.prefill_id])
        await c.check()


async def test_choices_that_could_not_all_begin_are_refused_for_good(tmp_path: Path) -> None:
    async with cell(options(tmp_path, **SMALL), options(tmp_path)) as c:
        message = m.Reserve(
            attempt=attempt("req-many"),
            term=Term(1),
            ingress_id=INGRESS,
            grant=signed_grant("req-many"),
            token_ids=pack_tokens(PROMPT * 2),
            num_prompt_tokens=len(PROMPT) * 2,
            sampling=(SAMPLING,) * 8,
        )
        subject = subjects.decode(c.decode_id, "reserve")
        answer = await c.driver.bus.request(subject, message, m.Reserved | m.Refusal, timeout_s=5)
        assert isinstance(answer, m.Refusal)
        assert answer.never
