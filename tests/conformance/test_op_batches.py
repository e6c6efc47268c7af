"""Batch cases of the conformance list, each named after its number."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack.batch_runs import Ledger, batch_line, batches_of, tokens_in
from tests.stack.running import Baton, until
from tests.stack.streams import kill

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory, default_model_dir: Path) -> Iterator[Baton]:
    """A stack of fake workers with the batch service, which has no local disk to be wiped."""
    baton = Baton(tmp_path_factory.mktemp("op-batches") / "state")
    try:
        baton.up("--fake")
        yield baton
        baton.down()
    finally:
        baton.kill_all()


def another_process(stack: Baton, killed: int) -> bool:
    return any(line.strip().endswith("services.batch") for pid, line in stack.processes().items() if pid != killed)


async def test_op58_a_processor_killed_in_mid_run_goes_on(fakes: Baton) -> None:
    ledger = Ledger(fakes)
    names = [f"line-{number}" for number in range(64)]
    async with batches_of(fakes) as batches:
        # Given 64 lines of which some 27 are done
        batch_id = await batches.begin([batch_line(name, 60) for name in names])
        before = await batches.reach(batch_id, 27)
        # When the processor is killed, and another starts
        killed = fakes.pid("batch")
        kill(fakes, killed)
        until(lambda: another_process(fakes, killed), 60)
        # Then it goes on and ends, keeping what was finished; each line once, billed as the file shows
        done = await batches.end(batch_id)
        assert (done.status, done.completed, done.failed) == ("completed", 64, 0)
        assert before.completed >= 27
        lines = await batches.file(done.output_file_id)
        assert sorted(line["custom_id"] for line in lines) == sorted(names)
        await ledger.settles_at(tokens_in(lines))
    fakes.wait_idle(60)


@pytest.mark.long
async def test_op58_a_batch_whose_processor_was_killed_can_be_cancelled(fakes: Baton) -> None:
    """In every run tests/pipeline/test_batch_jobs.py kills at every write of a cancelled batch, with a real Redis."""
    ledger = Ledger(fakes)
    names = [f"line-{number}" for number in range(64)]
    async with batches_of(fakes) as batches:
        # Given a batch that runs, of which the processor is killed
        batch_id = await batches.begin([batch_line(name, 200) for name in names])
        await batches.reach(batch_id, 5)
        killed = fakes.pid("batch")
        kill(fakes, killed)
        # When it is cancelled meanwhile
        await batches.cancel(batch_id)
        # Then the next processor ends it: each line once, done or cancelled, and those done are billed
        done = await batches.end(batch_id, timeout_s=60)
        assert done.status == "cancelled"
        lines, ended = await batches.file(done.output_file_id), await batches.file(done.error_file_id)
        assert sorted(line["custom_id"] for line in lines + ended) == sorted(names)
        assert (len(lines), len(ended)) == (done.completed, done.failed)
        assert {line["error"]["code"] for line in ended} == {"batch_cancelled"}
        await ledger.settles_at(tokens_in(lines))
    fakes.wait_idle(60)
