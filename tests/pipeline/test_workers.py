"""Fake workers on the memory bus: the worker's side of every hop."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shared.bus.bus import Delivery
from shared.bus.memory_bus import MemoryBus
from shared.contracts import messages as m
from shared.contracts import subjects
from shared.contracts.errors import ProtocolError
from shared.contracts.ids import BlockTag, Term, WorkerId
from shared.contracts.parts import ExtendedRun, GroupTags, StreamRecord
from shared.contracts.sampling import SamplingParams
from shared.contracts.tokens import completion_checksum, pack_tokens, unpack_tokens
from shared.engine.fake_runner import made_up_token
from shared.engine.step_plan import StepOutput, StepPlan
from shared.security.grant_signature import GrantSigner
from shared.telemetry import attributes as a
from shared.telemetry.setup import Telemetry
from tests.pipeline.worker_support import INGRESS, Cell, attempt, cell, options, signed_grant, until

PROMPT = list(range(100, 130))


def expected(prompt: list[int], count: int, seed: int = 0) -> list[int]:
    return [made_up_token(seed, p, range(1000, 9000)) for p in range(len(prompt), len(prompt) + count)]


async def test_local_and_handed_off_give_the_same_tokens(tmp_path: Path) -> None:
    async with cell(options(tmp_path)) as c:
        assert await c.local(PROMPT, a=attempt("req-l")) == expected(PROMPT, 12)
        assert await c.handed_off(PROMPT, a=attempt("req-h")) == expected(PROMPT, 12)
        final = c.driver.finals[attempt("req-h").request_id]
        assert final.finish == "length"
        assert final.totals is not None
        assert final.totals.received_tokens == len(PROMPT) - 1
        assert final.totals.bytes_pulled > 0
        assert final.totals.computed_tokens == 12
        assert final.totals.checksum == completion_checksum(expected(PROMPT, 12))
        await c.driver.idle([c.decode_id, c.prefill_id])
        await c.check()


async def test_several_choices_share_a_prompt_that_is_handed_off(tmp_path: Path) -> None:
    async with cell(options(tmp_path)) as c:
        finals: dict[int, StreamRecord] = {}

        def note(delivery: Delivery) -> None:
            finals.update({record.choice: record for record in delivery.message.records if record.finish})

        bus = MemoryBus(c.broker, "watch")
        await bus.subscribe(subjects.stream(INGRESS), m.StreamFrame, note)
        c.driver.held.add(attempt().request_id)
        message = m.Reserve(
            attempt=attempt(),
            term=Term(1),
            ingress_id=INGRESS,
            grant=signed_grant("req-a"),
            token_ids=pack_tokens(PROMPT),
            num_prompt_tokens=len(PROMPT),
            sampling=(SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),) * 3,
            prefill_worker=c.prefill_id,
        )
        subject = subjects.decode(c.decode_id, "reserve")
        reserved = await c.driver.bus.request(subject, message, m.Reserved | m.Refusal, timeout_s=10)
        await c.driver.run(c.prefill_id, c.decode_id, PROMPT, reserved)
        await until(lambda: len(finals) == 3, 30)
        assert c.driver.output() == expected(PROMPT, 12)
        full_blocks = (len(PROMPT) - 1) // 4 * 4
        for choice, final in finals.items():
            assert final.totals is not None
            assert final.totals.checksum == completion_checksum(expected(PROMPT, 12))
            # the first one's KV came from the other worker, the others begin behind its full blocks
            received, computed = (len(PROMPT) - 1, 12) if choice == 0 else (0, 11 + len(PROMPT) - full_blocks)
            assert (final.totals.received_tokens, final.totals.computed_tokens) == (received, computed)
            assert final.totals.cached_tokens == 0
        await c.driver.idle([c.decode_id, c.prefill_id])
        await c.check()
        await bus.close()


@pytest.mark.parametrize("length", [1, 2, 4, 5, 8, 9, 17])
async def test_prompts_around_block_edges_are_handed_off(tmp_path: Path, length: int) -> None:
    prompt = PROMPT[:length]
    async with cell(options(tmp_path)) as c:
        assert await c.handed_off(prompt) == expected(prompt, 12)
        await c.driver.idle([c.decode_id, c.prefill_id])


async def test_many_requests_at_once(tmp_path: Path) -> None:
    async with cell(options(tmp_path, pool_bytes=400 * 16)) as c:
        prompts = {f"req-{i}": PROMPT[: 3 + 3 * i] for i in range(8)}
        runs = [
            c.handed_off(p, a=attempt(r)) if i % 2 else c.local(p, a=attempt(r))
            for i, (r, p) in enumerate(prompts.items())
        ]
        for (_, prompt), output in zip(prompts.items(), await asyncio.gather(*runs), strict=True):
            assert output == expected(prompt, 12)
        await c.driver.idle([c.decode_id, c.prefill_id])
        await c.check()


async def test_no_prefill_ever_comes(tmp_path: Path) -> None:
    async with cell(options(tmp_path)) as c:
        await c.driver.reserve(c.decode_id, PROMPT, prefill=c.prefill_id, lease_s=1.0)
        await c.driver.final()
        assert c.driver.output() == expected(PROMPT, 12)
        await c.driver.idle([c.decode_id])


async def test_refusals_say_why(tmp_path: Path) -> None:
    async with cell(options(tmp_path)) as c:
        forged = signed_grant("req-a", signer=GrantSigner(Ed25519PrivateKey.generate()))
        answer = await c.driver.reserve(c.decode_id, PROMPT, grant=forged)
        assert isinstance(answer, m.Refusal)
        assert (answer.error.code, answer.never) == ("Forbidden/grant_invalid", True)
        answer = await c.driver.reserve(c.decode_id, PROMPT, grant=signed_grant("req-other"))
        assert isinstance(answer, m.Refusal)
        assert answer.never
        huge = SamplingParams(max_tokens=5000)
        answer = await c.driver.reserve(c.decode_id, PROMPT, sampling=huge, a=attempt("req-b"))
        assert isinstance(answer, m.Refusal)
        assert (answer.error.code, answer.never) == ("Overloaded/NeverFits", True)
        over = SamplingParams(max_tokens=9000)
        answer = await c.driver.reserve(c.decode_id, PROMPT, sampling=over, a=attempt("req-c"))
        assert isinstance(answer, m.Refusal)
        assert answer.error.code.startswith("ContextExceeded")
        prompt, big = PROMPT * 5, SamplingParams(max_tokens=60, ignore_eos=True)  # 39 blocks of 64 to begin with
        assert isinstance(await c.driver.reserve(c.decode_id, prompt, sampling=big, a=attempt("req-d")), m.Reserved)
        answer = await c.driver.reserve(c.decode_id, prompt, sampling=big, a=attempt("req-e"))
        assert isinstance(answer, m.Refusal)
        assert not answer.never
        await cancel(c, "req-d")
        for _ in range(100):  # the blocks are free within two steps
            answer = await c.driver.reserve(c.decode_id, prompt, sampling=big, a=attempt("req-e"))
            if isinstance(answer, m.Reserved):
                break
            await asyncio.sleep(0.01)
        assert isinstance(answer, m.Reserved)
        await cancel(c, "req-e")
        await c.driver.idle([c.decode_id])


async def cancel(c: Cell, request: str, *, epoch: int = 1, dispatch: int = 1) -> m.Cancelled:
    message = m.Cancel(attempt=attempt(request, epoch, dispatch), reason="client")
    answer: m.Cancelled = await c.driver.bus.request(
        subjects.decode(c.decode_id, "cancel"), message, m.Cancelled, timeout_s=5
    )
    return answer


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


async def test_a_prompt_beyond_the_context_is_refused_by_prefill_too(tmp_path: Path) -> None:
    async with cell(options(tmp_path)) as c:
        core = c.prefill.shell.core
        core.facts = replace(core.facts, max_positions=len(PROMPT) - 1)
        reserved = m.Reserved(incarnation=c.decode.shell.incarnation, num_cached_tokens=0, lease_token=b"x" * 16)
        answer = await c.driver.run(c.prefill_id, c.decode_id, PROMPT, reserved)
        assert isinstance(answer, m.Refusal)
        assert answer.error.code.startswith("ContextExceeded")
        assert answer.never


async def test_a_fault_in_a_reservation_is_answered_and_leaves_nothing(tmp_path: Path) -> None:
    async with cell(options(tmp_path)) as c:
        weightless = signed_grant("req-a", weight=0.0)
        answer = await c.driver.reserve(c.decode_id, PROMPT, grant=weightless)
        assert isinstance(answer, m.Refusal)
        assert answer.error.code == "Internal/internal_error"
        assert not c.decode.book.held
        assert isinstance(await c.driver.reserve(c.decode_id, PROMPT), m.Reserved)
        await c.driver.final()


async def test_a_finish_inside_the_prompt_is_refused(tmp_path: Path) -> None:
    async with cell(options(tmp_path)) as c:
        c.driver.ack_finals = False
        await c.driver.reserve(c.decode_id, PROMPT)
        await c.driver.final()
        message = m.Finish(attempt=attempt(), choice=0, num_tokens=-1)
        with pytest.raises(ProtocolError):
            await c.driver.bus.request(subjects.decode(c.decode_id, "finish"), message, m.Finished, timeout_s=5)


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


async def test_tags_are_announced_and_hit(tmp_path: Path) -> None:
    tags = tuple(BlockTag(bytes([i]) * 16) for i in range(7))
    events: list[m.BlockEvents] = []
    extends: list[m.Extend] = []

    async def extend(delivery: object) -> m.Extended:
        message: m.Extend = delivery.message  # type: ignore[attr-defined]
        extends.append(message)
        runs = []
        for run in message.runs:
            made = tuple(BlockTag(bytes([200 + i]) * 16) for i in range(len(run.blocks)))
            runs.append(ExtendedRun(tags=made))
        return m.Extended(runs=tuple(runs))

    async with cell(options(tmp_path)) as c:
        await c.driver.bus.subscribe(subjects.ANY_INDEX_EVENTS, m.BlockEvents, lambda d: events.append(d.message))
        await c.driver.bus.serve(subjects.INDEX_EXTEND, m.Extend, extend)
        groups = (GroupTags(0, tags),)
        reserved = await c.driver.reserve(c.decode_id, PROMPT, prefill=c.prefill_id, tags=groups)
        assert isinstance(reserved, m.Reserved)
        await c.driver.run(c.prefill_id, c.decode_id, PROMPT, reserved, tags=groups)
        await c.driver.final()

        def stored(worker: str) -> set[bytes]:
            return {t for e in events if e.worker == worker for g in e.stored for t in g.tags}

        await until(lambda: stored(c.prefill_id) == set(tags))
        await until(lambda: len(stored(c.decode_id)) > len(tags))
        assert stored(c.decode_id) >= set(tags)
        assert extends[0].runs[0].parent == tags[-1]
        again = await c.driver.reserve(c.decode_id, PROMPT, a=attempt("req-b"), tags=groups)
        assert isinstance(again, m.Reserved)
        assert again.num_cached_tokens == 28
        await c.driver.final("req-b")
        assert c.driver.output("req-b") == expected(PROMPT, 12)
        await c.driver.bus.publish(subjects.index_replay(c.decode_id), m.Replay(number=0))
        await until(lambda: any(e.snapshot and e.worker == c.decode_id and e.number > 1 for e in events))
        numbers = [e.number for e in events if e.worker == c.decode_id]
        assert numbers == sorted(numbers)


async def test_beats_and_listings_say_what_is_held(tmp_path: Path) -> None:
    async with cell(options(tmp_path, fake_speed=0.5)) as c:
        beat = c.driver.beats[c.decode_id]
        assert beat.fake
        assert (beat.role, beat.block_sizes, beat.kv_pool) == ("decode", (4,), "decode-1.kvpool")
        assert beat.token_bytes == (4,)  # K and V of one head of two int8 numbers
        assert beat.fingerprint
        assert beat.numerics == "fake"
        assert beat.step_model.base_s > 0
        await c.driver.reserve(c.decode_id, PROMPT, sampling=SamplingParams(max_tokens=100, ignore_eos=True))
        await until(lambda: [p.attempt for p in c.driver.beats[c.decode_id].attempts] == [attempt()])
        await until(lambda: any(f.held and f.held[0].next_seq[0] > 0 for f in c.driver.listings), 30)
        await cancel(c, "req-a")


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


async def test_tokens_of_several_steps_go_out_together_and_with_the_end(tmp_path: Path) -> None:
    async with cell(options(tmp_path, pool_bytes=100 * 16, publish_interval_s=5.0)) as c:
        await c.local(PROMPT, a=attempt(), sampling=SamplingParams(max_tokens=60, ignore_eos=True))
        assert (sum(c.driver.pieces), c.driver.pieces[0]) == (60, 1)
        assert len(c.driver.pieces) < 30


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


async def test_tokens_do_not_wait_for_a_step_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cell(options(tmp_path, pool_bytes=100 * 16, publish_interval_s=1.0)) as c:
        runner, go, steps = c.decode.shell.core.runner, threading.Event(), 0
        run = runner.run

        def hangs(plan: StepPlan) -> object:
            nonlocal steps
            steps += 1
            if steps == 12:
                assert go.wait(60)
            return run(plan)

        monkeypatch.setattr(runner, "run", hangs)
        await c.driver.reserve(c.decode_id, PROMPT, sampling=SamplingParams(max_tokens=60, ignore_eos=True))
        await until(lambda: steps == 12, 30)
        computed = c.decode.shell.core.options.depth
        try:
            await until(lambda: len(c.driver.output()) >= steps - 1 - computed, 30)
        finally:
            go.set()
        await c.driver.final()
        assert len(c.driver.output()) == 60


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


async def test_a_failed_prefill_is_computed_here(tmp_path: Path) -> None:
    async with cell(options(tmp_path)) as c:

        def fail(plan: StepPlan) -> StepOutput:
            raise RuntimeError("no")

        c.prefill.shell.core.engine._runner.run = fail  # type: ignore[method-assign]
        assert await c.handed_off(PROMPT) == expected(PROMPT, 12)
        await c.driver.idle([c.decode_id, c.prefill_id])
        await c.check()


@pytest.mark.parametrize("service", ["decode", "prefill"])
def test_fake_workers_need_no_torch(service: str) -> None:
    code = (
        f"import sys, services.{service}.__main__, shared.engine.worker_fake\n"
        "sys.exit([m for m in ('torch', 'transformers') if m in sys.modules] or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


async def test_blocks_that_may_not_be_kept_are_not_tagged(tmp_path: Path) -> None:
    tags = (GroupTags(0, tuple(BlockTag(bytes([i]) * 16) for i in range(7))),)
    async with cell(options(tmp_path)) as c:
        await c.driver.reserve(c.decode_id, PROMPT, tags=tags, grant=signed_grant("req-a", retention_s=0))
        await c.driver.final()
        await asyncio.sleep(0.1)
        again = await c.driver.reserve(c.decode_id, PROMPT, a=attempt("req-b"), tags=tags)
        assert isinstance(again, m.Reserved)
        assert again.num_cached_tokens == 0
        await c.driver.final("req-b")


async def test_spans_of_a_handed_off_request(tmp_path: Path) -> None:
    telemetry = Telemetry("decode", None)
    async with cell(options(tmp_path), tracer=telemetry.tracer) as c:
        with telemetry.tracer.start_as_current_span("test.request"):
            await c.handed_off(PROMPT)
        await c.driver.idle([c.decode_id, c.prefill_id])
    spans = {s.name: s for s in telemetry.queue.take()}
    assert set(spans) == {"test.request", "decode.reserve", "decode.run", "prefill.run", "handoff.pull"}
    assert {s.trace_id for s in spans.values()} == {spans["test.request"].trace_id}
    assert {s.parent_id for n, s in spans.items() if n != "test.request"} == {spans["test.request"].span_id}
    assert spans["decode.run"].attributes[a.PATH] == "handed_off"
    assert spans["decode.run"].attributes[a.COMPLETION_TOKENS] == 12
    assert spans["decode.run"].attributes[a.FINISH] == "length"
    assert spans["prefill.run"].attributes[a.COMPUTED_TOKENS] == len(PROMPT) - 1
    assert spans["handoff.pull"].attributes[a.BLOCKS] == 8
    assert spans["handoff.pull"].attributes[a.BYTES] == 8 * 16
    assert spans["handoff.pull"].attributes[a.MISMATCHES] == 0
    assert spans["handoff.pull"].attributes[a.TRANSPORT] == "shared_memory"


async def test_a_prefill_that_is_wholly_cached_says_so_on_its_span(tmp_path: Path) -> None:
    telemetry = Telemetry("prefill", None)
    prompt, tags = PROMPT[:9], (GroupTags(0, tuple(BlockTag(bytes([i]) * 16) for i in range(2))),)
    async with cell(options(tmp_path), tracer=telemetry.tracer) as c:
        for name in ("req-a", "req-b"):
            reserved = await c.driver.reserve(c.decode_id, prompt, a=attempt(name), prefill=c.prefill_id)
            assert isinstance(reserved, m.Reserved)
            await c.driver.run(c.prefill_id, c.decode_id, prompt, reserved, a=attempt(name), tags=tags)
            await c.driver.final(name)
            await until(lambda: len(c.prefill.table) == 0)
            await asyncio.sleep(0.15)  # tags are applied in batches
    spans = [s for s in telemetry.queue.take() if s.name == "prefill.run"]
    assert [s.attributes[a.CACHED_TOKENS] for s in spans] == [0, 8]
