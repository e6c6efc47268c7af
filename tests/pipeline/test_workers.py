"""Fake workers on the memory bus: the worker's side of every hop."""

from __future__ import annotations

import asyncio
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
from shared.contracts.ids import BlockTag, Term
from shared.contracts.parts import ExtendedRun, GroupTags, StreamRecord
from shared.contracts.sampling import SamplingParams
from shared.contracts.tokens import completion_checksum, pack_tokens
from shared.engine.step_plan import StepOutput, StepPlan
from shared.security.grant_signature import GrantSigner
from shared.telemetry import attributes as a
from shared.telemetry.setup import Telemetry
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
        assert (answer.error.code, answer.never) == ("ContextExceeded/context_length_exceeded", True)
        assert "hold 257 tokens" in answer.error.message  # 64 blocks of four, and a last one that takes no slot
        answer = await c.driver.reserve(
            c.decode_id, list(range(257)), sampling=SamplingParams(max_tokens=10, open_ended=True), a=attempt("req-p")
        )
        assert isinstance(answer, m.Refusal)
        assert answer.never
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


async def test_tokens_of_several_steps_go_out_together_and_with_the_end(tmp_path: Path) -> None:
    async with cell(options(tmp_path, pool_bytes=100 * 16, publish_interval_s=5.0)) as c:
        await c.local(PROMPT, a=attempt(), sampling=SamplingParams(max_tokens=60, ignore_eos=True))
        assert sum(c.driver.pieces) == 60
        assert len(c.driver.pieces) < 30


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


async def test_an_output_that_nobody_named_a_length_of_ends_with_the_pool(tmp_path: Path) -> None:
    async with cell(options(tmp_path, fake_speed=100.0)) as c:
        open_ended = SamplingParams(max_tokens=1000, ignore_eos=True, open_ended=True)
        assert await c.local(PROMPT, a=attempt(), sampling=open_ended) == expected(PROMPT, 64 * 4 + 1 - len(PROMPT))
        assert c.driver.finals[attempt().request_id].finish == "length"
        short = SamplingParams(max_tokens=5, ignore_eos=True, open_ended=True)
        assert await c.local(PROMPT, a=attempt("req-s"), sampling=short) == expected(PROMPT, 5)


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
