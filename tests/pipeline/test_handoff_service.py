"""Two workers with a real, tiny model: handed-off output equals local output, whatever happens to the hand-off."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from shared.contracts import messages as m
from shared.contracts.ids import BlockTag
from shared.contracts.parts import GroupTags
from shared.contracts.sampling import SamplingParams
from shared.engine.engine_parts import Steps
from shared.engine.step_plan import StepPlan
from shared.engine.worker_engine import WorkerOptions
from shared.kv.handoff import Pull
from shared.kv.transfer import PullResult
from tests.pipeline.worker_support import Cell, attempt, cell, until
from tests.tiny_models import make_tiny_model

PROMPT = [(7 * i + 3) % 320 for i in range(75)]
SAMPLED = SamplingParams(max_tokens=16, temperature=0.8, top_p=0.9, seed=11, ignore_eos=True)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def real(model_dir: Path, folder: Path, *, chunk_size: int = 0, pool_bytes: int = 4 << 20) -> WorkerOptions:
    return WorkerOptions(
        model_dir=model_dir,
        kv_dir=folder / "kv",
        block_size=16,
        pool_bytes=pool_bytes,
        token_budget=48,
        chunk_size=chunk_size,
        max_num_seqs=8,
        threads=1,
        self_check=False,
        calibrate=False,
    )


async def test_handed_off_equals_local(model_dir: Path, tmp_path: Path) -> None:
    async with cell(real(model_dir, tmp_path), real(model_dir, tmp_path, chunk_size=16, pool_bytes=2 << 20)) as c:
        for length in (2, 16, 17, 33, 75):
            prompt = PROMPT[:length]
            local = await c.local(prompt, a=attempt(f"req-l{length}"), sampling=SAMPLED)
            handed = await c.handed_off(prompt, a=attempt(f"req-h{length}"), sampling=SAMPLED)
            assert handed == local, f"prompt of {length}"
            totals = c.driver.finals[attempt(f"req-h{length}").request_id].totals
            assert totals is not None
            assert totals.received_tokens == length - 1
            assert totals.computed_tokens == 16
        await c.driver.idle([c.decode_id, c.prefill_id])
        await c.check()


@pytest.mark.parametrize("interval_s", [0.0, 0.01, 1.0])
async def test_tokens_of_a_stretch_come_once(model_dir: Path, tmp_path: Path, interval_s: float) -> None:
    sampling = msgspec.structs.replace(SAMPLED, max_tokens=40)
    gathers = dataclasses.replace(real(model_dir, tmp_path), publish_interval_s=interval_s)
    async with cell(gathers, real(model_dir, tmp_path)) as c:
        engine = c.decode.shell.core.engine
        tell, told = engine.on_drawn, list[int]()

        def counted(plan: StepPlan, steps: Steps) -> None:
            assert tell is not None
            told.extend(token for _, drawn in steps for token in drawn)
            tell(plan, steps)

        engine.on_drawn = counted
        in_stretches = await c.local(PROMPT, a=attempt("req-s"), sampling=sampling)
        engine.on_drawn = None
        by_steps = await c.local(PROMPT, a=attempt("req-o"), sampling=sampling)
        assert in_stretches == by_steps
        assert told
        first, second = (c.driver.finals[attempt(name).request_id].totals for name in ("req-s", "req-o"))
        assert first is not None
        assert second is not None
        assert (first.completion_tokens, first.checksum) == (second.completion_tokens, second.checksum)
        assert first.wasted_tokens == 0
        await c.driver.idle([c.decode_id])
        await c.check()


class Spoiler:
    """A transport that lets a test spoil the source just before a pull: the one named, or the last where there are
    fewer, as chunks that end close together are named in one commit."""

    path = "spoiled"

    def __init__(self, inner: object, c: Cell, spoil_pull: int) -> None:
        self._inner = inner
        self._cell = c
        self._left = spoil_pull
        self.results: list[PullResult] = []

    def pull(self, pull: Pull, tables: Sequence[Sequence[int]], source_blocks: tuple[int, ...]) -> PullResult:
        self._left -= 1
        is_last = pull.items[-1].position == (len(PROMPT) - 2) // 16
        if self._left == 0 or (self._left > 0 and is_last):
            self._left = 0
            block = pull.items[-1].block.block_id
            span = self._cell.prefill.shell.core.pool.span(0, block)
            span[5] ^= 0x40
        result: PullResult = self._inner.pull(pull, tables, source_blocks)  # type: ignore[attr-defined]
        self.results.append(result)
        return result

    def drop_dead(self) -> None:
        self._inner.drop_dead()  # type: ignore[attr-defined]

    def close(self) -> None:
        self._inner.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("spoil_pull", [1, 2])
async def test_a_corrupt_span_is_recomputed(model_dir: Path, tmp_path: Path, spoil_pull: int) -> None:
    async with cell(real(model_dir, tmp_path), real(model_dir, tmp_path, chunk_size=32)) as c:
        local = await c.local(PROMPT, a=attempt("req-l"), sampling=SAMPLED)
        handoff = c.decode.book.handoff
        spoiler = Spoiler(handoff._transport, c, spoil_pull)
        handoff._transport = spoiler
        reserved = await c.driver.reserve(c.decode_id, PROMPT, prefill=c.prefill_id, sampling=SAMPLED)
        assert isinstance(reserved, m.Reserved)
        held = c.decode.book.held[attempt().request_id]
        await c.driver.run(c.prefill_id, c.decode_id, PROMPT, reserved)
        await c.driver.final()
        assert c.driver.output() == local
        assert held.local_reason == "digest_mismatch"
        assert held.pulls.mismatches == 1
        assert any(r.bad for r in spoiler.results)
        totals = c.driver.finals[attempt().request_id].totals
        assert totals is not None
        assert totals.computed_tokens > 16, "the bad part was computed here"
        await c.driver.idle([c.decode_id, c.prefill_id])
        await c.check()


async def test_the_source_dies_in_the_middle(model_dir: Path, tmp_path: Path) -> None:
    async with cell(real(model_dir, tmp_path), real(model_dir, tmp_path, chunk_size=16)) as c:
        local = await c.local(PROMPT, a=attempt("req-l"), sampling=SAMPLED)
        reserved = await c.driver.reserve(c.decode_id, PROMPT, prefill=c.prefill_id, sampling=SAMPLED, lease_s=60)
        assert isinstance(reserved, m.Reserved)
        held = c.decode.book.held[attempt().request_id]
        # No run ever comes, and the pool file is gone: its owner no longer holds it.
        c.prefill.shell.core.pool.path.unlink()
        await c.driver.final()
        assert c.driver.output() == local
        assert held.local_reason == "prefill_died"


async def test_a_prefill_that_hits_its_cache_hands_over_at_once(model_dir: Path, tmp_path: Path) -> None:
    tags = (GroupTags(0, tuple(BlockTag(bytes([i]) * 16) for i in range(4))),)
    async with cell(real(model_dir, tmp_path)) as c:
        outputs = []
        for name in ("req-a", "req-b"):
            a = attempt(name)
            reserved = await c.driver.reserve(c.decode_id, PROMPT, a=a, prefill=c.prefill_id, sampling=SAMPLED)
            assert isinstance(reserved, m.Reserved)
            accepted = await c.driver.run(c.prefill_id, c.decode_id, PROMPT, reserved, a=a, tags=tags)
            assert isinstance(accepted, m.PrefillAccepted)
            outputs.append((accepted.num_cached_tokens, await _output(c, name)))
            await until(lambda: len(c.prefill.table) == 0)
            await asyncio.sleep(0.15)  # tags are applied in batches
        assert [cached for cached, _ in outputs] == [0, 64]
        assert outputs[0][1] == outputs[1][1]


async def _output(c: Cell, request: str) -> list[int]:
    await c.driver.final(request)
    return c.driver.output(request)
