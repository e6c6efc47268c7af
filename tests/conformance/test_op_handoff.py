"""Cases of reference reports on the hand-off of KV: real workers of a tiny model in this process."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from services.scheduler.service import SchedulerService
from services.scheduler.settings import SchedulerConfig
from shared.bus.memory_bus import MemoryBus
from shared.contracts import messages as m
from shared.contracts.sampling import SamplingParams
from shared.engine.worker_engine import WorkerOptions
from shared.kv.handoff import Pull
from shared.kv.transfer import PullResult
from shared.telemetry import metric_names as names
from tests.pipeline.worker_support import Cell, attempt, cell, until
from tests.tiny_models import make_tiny_model

PROMPT = [(7 * i + 3) % 320 for i in range(75)]
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def real(model_dir: Path, folder: Path, **changes: Any) -> WorkerOptions:
    found = WorkerOptions(
        model_dir=model_dir,
        kv_dir=folder / "kv",
        block_size=16,
        pool_bytes=4 << 20,
        token_budget=48,
        max_num_seqs=8,
        threads=1,
        self_check=False,
        calibrate=False,
    )
    return dataclasses.replace(found, **changes)


class Vandal:
    """A transport before whose first pull something is done to what was handed over."""

    path = "spoiled"

    def __init__(self, c: Cell, what: str) -> None:
        self._inner = c.decode.book.handoff._transport
        self._pool = c.prefill.shell.core.pool
        self._what = what

    def pull(self, pull: Pull, tables: Sequence[Sequence[int]], source_blocks: tuple[int, ...]) -> PullResult:
        what, self._what = self._what, ""
        spans = [self._pool.span(item.group, item.block.block_id) for item in pull.items]
        match what:
            case "one bit":
                spans[0][5] ^= 0x40
            case "zeros":
                for span in spans:
                    span[:] = bytes(len(span))
            case "another block":
                spans[0][:] = bytes(spans[-1])
            case "file gone":
                self._pool.path.unlink()
            case "cut off":
                raise ConnectionResetError("the other end is gone")
        return self._inner.pull(pull, tables, source_blocks)

    def drop_dead(self) -> None:
        self._inner.drop_dead()

    def close(self) -> None:
        self._inner.close()


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("one bit", "digest_mismatch"),
        ("zeros", "digest_mismatch"),
        ("another block", "digest_mismatch"),
        ("file gone", ""),  # it comes over TCP instead
        ("cut off", "pull_failed"),
    ],
)
async def test_op48_lost_or_wrong_kv_is_computed_anew(model_dir: Path, tmp_path: Path, what: str, reason: str) -> None:
    async with cell(real(model_dir, tmp_path), real(model_dir, tmp_path, chunk_size=32)) as c:
        # Given what the request says when nothing is handed over
        expected = await c.local(PROMPT, a=attempt("req-l"), sampling=GREEDY)
        # When what the prefill worker made is spoiled, or gone, before the decode worker reads it
        metrics = c.decode.shell.metrics
        outcome = "local" if reason else "done"
        c.decode.book.handoff._transport = Vandal(c, what)
        output = await c.handed_off(PROMPT, sampling=GREEDY)
        # Then the output is the same, a failed load is counted by its reason, and nothing is held
        assert output == expected
        assert metrics.value(names.HANDOFFS, outcome=outcome) == 1
        assert not reason or metrics.value(names.HANDOFF_FAILURES, reason=reason) == 1
        await c.driver.idle([c.decode_id] if what == "file gone" else [c.decode_id, c.prefill_id])
        await c.check()


FIELDS = {"block_size": "block_sizes", "kv_dtype": "numerics", "model_revision": "model_digest", "kernels": "numerics"}
"""What the two differ in, as a beat tells it."""


@pytest.mark.parametrize("unlike", FIELDS)
async def test_op47_prefill_and_decode_that_do_not_fit(
    model_dir: Path, tmp_path: Path, unlike: str, caplog: pytest.LogCaptureFixture
) -> None:
    other_model = make_tiny_model(tmp_path / "revision", seed=7) if unlike == "model_revision" else model_dir
    changes: dict[str, dict[str, Any]] = {
        "block_size": {"block_size": 32},
        "kv_dtype": {"kv_dtype": "float16"},
        "model_revision": {"model_dir": other_model},
        "kernels": {"kernels": "torch"},
    }
    mine = real(model_dir, tmp_path, kernels="native")
    others = dataclasses.replace(mine, **changes[unlike])
    with caplog.at_level(logging.ERROR, "baton.scheduler"):
        async with cell(mine, others) as c:
            # When both tell a scheduler of themselves
            scheduler = SchedulerService(MemoryBus(c.broker, "scheduler"), SchedulerConfig())
            await scheduler.start()
            try:
                await until(lambda: "refused" in caplog.text, 30)
                # Then the second is refused, with both values in the log
                (first,) = [view.worker for view in scheduler.workers.views()]
            finally:
                await scheduler.stop()
            values = {worker: str(getattr(beat, FIELDS[unlike])) for worker, beat in c.driver.beats.items()}
            pools, refused = values.pop(first), *values.values()
            assert pools != refused
            assert f"refused: its {FIELDS[unlike]} is {refused}, the pool's is {pools}" in caplog.text
            # And a hand-off between them all the same, by one who has not seen it, is refused block by block
            expected = await c.local(PROMPT, a=attempt("req-l"), sampling=GREEDY)
            reserved = await c.driver.reserve(c.decode_id, PROMPT, prefill=c.prefill_id, sampling=GREEDY)
            assert isinstance(reserved, m.Reserved)
            await c.driver.run(c.prefill_id, c.decode_id, PROMPT, reserved)
            await c.driver.final()
            assert c.driver.output() == expected
            failures = c.decode.shell.metrics.value(names.HANDOFF_FAILURES, reason="fingerprint_mismatch")
            assert failures == 1
            await c.driver.idle([c.decode_id, c.prefill_id])
